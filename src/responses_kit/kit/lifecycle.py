"""Startup, shutdown and maintenance of a kit."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from .._concurrency.signals import on_termination
from .._concurrency.tasks import spawn
from ..errors import ConfigurationError, StoreError
from ..stores.protocol import call_store
from .service import ResponseService

__all__ = ["Lifecycle"]

logger = logging.getLogger("responses_kit")


class Lifecycle:
    """Drains and closes a service, and ends orphaned responses while it runs."""

    def __init__(self, service: ResponseService) -> None:
        self._service = service
        self._closed = False

    @property
    def is_closing(self) -> bool:
        """Whether the server is shutting down; new requests are refused."""
        return self._service.registry.is_closed

    async def wait_closing(self) -> None:
        """Return when the server starts shutting down."""
        with self._service.registry.closing.subscribe() as closing:
            if not self.is_closing:
                await closing.wait()

    @asynccontextmanager
    async def run(self, grace: float, close: Callable[[float], Awaitable[None]]) -> AsyncIterator[None]:
        """Sweep orphaned responses within the block, drain on SIGTERM and SIGINT, and close at its end.

        Args:
            grace: Seconds that runs may continue after a signal, or after the block has ended.
            close: Closes the kit.

        Raises:
            ConfigurationError: The store was not set up.
        """
        await self._check_store()
        stop_sweeping = spawn(self._sweep)
        with on_termination(functools.partial(spawn, self.drain, grace)):
            try:
                yield
            finally:
                stop_sweeping()
                with anyio.CancelScope(shield=True):
                    await close(grace)

    async def _check_store(self) -> None:
        """Raise at startup, and not at the first request, if the store was not set up."""
        try:
            await call_store(self._service.settings.store.get("", ""))
        except StoreError as error:
            if isinstance(error.__cause__, ConfigurationError):
                raise error.__cause__ from None
            # Already logged. A store that is down now may be up at the first request.

    async def _sweep(self) -> None:
        while True:
            with suppress(StoreError):  # already logged
                await self._service.repository.sweep()
            await anyio.sleep(self._service.leases.duration)

    async def drain(self, grace: float) -> None:
        """Refuse new requests, wait for running ones, and stop the rest.

        Args:
            grace: Seconds that runs may continue, counted from the first call.
        """
        try:
            await self._service.registry.close(grace)
        finally:
            self._service.repository.close()

    async def close(self, grace: float) -> None:
        """Drain, then close the backend and the tools. Further calls only drain."""
        try:
            await self.drain(grace)
        finally:
            if not self._closed:
                self._closed = True
                try:
                    self._service.backend.close()
                finally:
                    await self._close_tools()

    async def _close_tools(self) -> None:
        for toolset in self._service.toolsets.values():
            try:
                await toolset.aclose()
            except Exception as error:  # the other toolsets must still be closed
                logger.error("closing the tools of %s failed", toolset.type, exc_info=error)
