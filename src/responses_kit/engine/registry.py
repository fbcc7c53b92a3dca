"""The unfinished runs of a server, which are stopped together at shutdown."""

from __future__ import annotations

import math
import weakref
from typing import Final, Protocol

import anyio

from .._concurrency.tasks import Notifier
from ..errors import ServerError

__all__ = ["CLEANUP_TIMEOUT", "SHUTTING_DOWN", "RunRegistry"]

CLEANUP_TIMEOUT: Final = 5.0
"""Seconds that an interrupted run has to close its backend and save its record."""

SHUTTING_DOWN: Final = "The server is shutting down. Try again."


class _Stoppable(Protocol):
    """A run or a queued response."""

    def stop(self) -> None:
        """End the response as failed because the server shuts down."""


class RunRegistry:
    """The unfinished runs of a server. Once closed, it accepts no new ones.

    Attributes:
        closing: Notified when the registry is closed.
    """

    def __init__(self) -> None:
        # Weak, because a host may drop a run before executing it, and such a run is never discarded.
        self._runs: weakref.WeakSet[_Stoppable] = weakref.WeakSet()
        self._drained: anyio.Event | None = None
        self._closed_at = math.inf
        self.closing = Notifier()

    @property
    def is_closed(self) -> bool:
        """Whether no new runs are accepted."""
        return self._drained is not None

    def add(self, run: _Stoppable) -> None:
        """Add a run.

        Raises:
            ServerError: The registry is closed.
        """
        self.check_open()
        self._runs.add(run)

    def check_open(self) -> None:
        """Check that new runs are accepted.

        Raises:
            ServerError: The registry is closed.
        """
        if self.is_closed:
            raise ServerError(SHUTTING_DOWN)

    def discard(self, run: _Stoppable) -> None:
        """Remove a run that has finished."""
        self._runs.discard(run)
        if self._drained is not None and not self._runs:
            self._drained.set()

    async def close(self, grace: float = 0.0) -> None:
        """Accept no new runs, wait for the unfinished ones, stop the rest, and wait for their cleanup.

        Args:
            grace: Seconds that runs have to finish, counted from the first call.
        """
        if self._drained is None:
            self._drained = anyio.Event()
            self._closed_at = anyio.current_time()
            self.closing.notify_all()
        with anyio.CancelScope(deadline=self._closed_at + grace):
            if self._runs:
                await self._drained.wait()
        for run in list(self._runs):
            run.stop()
        with anyio.move_on_after(2 * CLEANUP_TIMEOUT):
            if self._runs:
                await self._drained.wait()
