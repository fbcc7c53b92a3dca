"""The scope of backends, tools and signal receivers: their database connections are released afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import anyio
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connections

from responses_kit.engine.hooks import Scope

__all__ = ["DatabaseScope", "is_within_request", "release_connections"]

is_within_request: ContextVar[bool] = ContextVar("responses_kit_within_request", default=False)
"""Whether Django itself releases the connections of async code, at the end of the request."""


class DatabaseScope(Scope):
    """The scope that releases the database connections which the ORM opened for a backend or tool."""

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        """Run the async ORM in a thread of this response, which ends with it."""
        if is_within_request.get():
            yield
            return
        context: Any = ThreadSensitiveContext()
        await context.__aenter__()
        try:
            yield
        finally:
            # An interpreter that shuts down starts no threads (RuntimeError), and closes the connections itself.
            with anyio.CancelScope(shield=True), suppress(RuntimeError):
                await sync_to_async(release_connections)()
                await context.__aexit__(None, None, None)

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        """Release the connections of this thread, which may not run again."""
        try:
            yield
        finally:
            release_connections()


def release_connections(*, only_obsolete: bool = False) -> None:
    """Close this thread's connections, or return them to Django's pool.

    Args:
        only_obsolete: Whether to close only connections that Django would close at the end of a request. A thread that
            may not run again must close all of them, or they leak.
    """
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:  # the caller still uses it, as a Django TestCase does
            continue
        if only_obsolete:
            connection.close_if_unusable_or_obsolete()
        else:
            connection.close()
