"""The runs that are not over, so that a server can go down in order."""

from __future__ import annotations

import math
import weakref
from typing import Final, Protocol

import anyio

from .._concurrency.tasks import Notifier
from ..errors import ServerError

__all__ = ["CLEANUP_TIMEOUT", "SHUTTING_DOWN", "RunRegistry"]

CLEANUP_TIMEOUT: Final = 5.0
"""What a run that was cancelled may still spend on closing its backend and its record."""

SHUTTING_DOWN: Final = "The server is shutting down. Try again."


class Stoppable(Protocol):
    """A run, as far as it matters here."""

    def stop(self) -> None:
        """Ends it, since the server is going down."""


class RunRegistry:
    """The runs that are not over, to be stopped together. Once closed, it takes no more.

    Attributes:
        closing: Rings when it is closed.
    """

    def __init__(self) -> None:
        # Weak, for a run that its host drops before it is executed never says that it is over.
        self._runs: weakref.WeakSet[Stoppable] = weakref.WeakSet()
        self._empty: anyio.Event | None = None
        self._closed_at = math.inf
        self.closing = Notifier()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more."""
        return self._empty is not None

    def add(self, run: Stoppable) -> None:
        """A run begins.

        Raises:
            ServerError: No more are taken.
        """
        self.check_open()
        self._runs.add(run)

    def check_open(self) -> None:
        """Whether there may be more.

        Raises:
            ServerError: No more are taken.
        """
        if self.is_closed:
            raise ServerError(SHUTTING_DOWN)

    def discard(self, run: Stoppable) -> None:
        """A run is over, and its record is final."""
        self._runs.discard(run)
        if self._empty is not None and not self._runs:
            self._empty.set()

    async def close(self, grace: float = 0.0) -> None:
        """Takes no more runs, lets those that there are come to their ends, and stops those that have not.

        It waits for the end of those, too, but not for ever.

        Args:
            grace: Seconds that they have, from the first call on.
        """
        if self._empty is None:
            self._empty = anyio.Event()
            self._closed_at = anyio.current_time()
            self.closing.notify_all()
        with anyio.CancelScope(deadline=self._closed_at + grace):
            if self._runs:
                await self._empty.wait()
        for run in list(self._runs):
            run.stop()
        with anyio.move_on_after(2 * CLEANUP_TIMEOUT):
            if self._runs:
                await self._empty.wait()
