"""The bridge from a plain generator to the event loop: one worker thread a turn, outputs in batches.

The thread never waits for the loop, unless it is far ahead; the loop takes whatever is ready at once. So a
fast generator costs one wake-up and one write for many outputs, and a slow one gets each output out alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from ..errors import IllegalOutput
from .tasks import call_soon_threadsafe

__all__ = ["IteratorThread", "ThreadLimiter"]

T = TypeVar("T")

_AHEAD = 256
"""Outputs that a thread may be ahead of the loop."""


class _Stopped(BaseException):
    """Raised in the thread to leave the generator; no backend should catch it."""


class IteratorThread(Generic[T]):
    """Iterates one iterable in a thread of its own.

    Args:
        produce: Called in the thread; returns what is to be iterated there. If it turns out to be an async
            iterable, or an awaitable of one, it is handed back as it is: see `handed_back`.

    Attributes:
        done: Whether the thread has come to its end.
        handed_back: What `produce` returned, where that is async.
    """

    def __init__(self, produce: Callable[[], Any]) -> None:
        self._produce = produce
        self._ready: deque[T] = deque()
        self._error: Exception | None = None
        self.done = False
        self._stopped = False
        self._room = threading.Event()
        self._arrived = anyio.Event()
        self._idle = False
        self._call_soon = call_soon_threadsafe()
        self._began = False
        self._limiter: anyio.CapacityLimiter | None = None
        self._around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.handed_back: AsyncIterable[T] | Awaitable[Any] | None = None

    async def reserve(self, threads: ThreadLimiter) -> None:
        """Takes a place for the thread, and holds it until the thread ends, also when nobody waits for it any more.

        Otherwise clients that come and leave would make threads without bound.
        """
        limiter = threads.current()
        await limiter.acquire_on_behalf_of(self)
        self._limiter = limiter
        self._around = threads.scope

    async def run(self) -> None:
        """Works in a thread, seated before, until the iterable is exhausted, fails, or `stop` is called."""
        await anyio.to_thread.run_sync(self._work, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(math.inf))

    def _leave(self) -> None:
        if self._limiter is not None:
            self._limiter.release_on_behalf_of(self)
            self._limiter = None

    def stop(self) -> None:
        """Closes the iterable as soon as it comes to its next output. Called in the end in any case."""
        self._stopped = True
        self._room.set()
        if not self._began:
            self._leave()

    async def take(self) -> list[T]:
        """Waits for outputs and returns all that are ready; an empty list means the end.

        Raises:
            Exception: Whatever the iterable raised, after all that it gave before.
        """
        while not self._ready:
            if self.done:
                error, self._error = self._error, None
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # a cycle through the traceback, which would keep the whole turn alive
                return []
            self._arrived = anyio.Event()
            self._idle = True
            if self._ready or self.done:
                self._idle = False
            else:
                await self._arrived.wait()
        batch = [self._ready.popleft() for _ in range(len(self._ready))]
        self._room.set()
        return batch

    # In the thread.

    def _work(self) -> None:
        self._began = True
        try:
            if self._stopped:
                raise _Stopped
            with self._around():
                self._consume()
        except _Stopped:
            pass
        except Exception as error:  # handed to the loop, which raises it
            self._error = error
        except BaseException as error:
            # SystemExit and its like would end the host, and a cancellation would look like ours.
            self._error = RuntimeError(f"the backend raised {type(error).__name__}")
            self._error.__cause__ = error
        finally:
            self.done = True
            self._wake()
            with contextlib.suppress(RuntimeError):  # the loop is gone, and its limiter with it
                self._call_soon(self._leave)

    def _consume(self) -> None:
        found = self._produce()
        if isinstance(found, str):
            found = [found]
        if isinstance(found, AsyncIterable | Awaitable):
            self.handed_back = found
        elif isinstance(found, Mapping) or not isinstance(found, Iterable):
            raise IllegalOutput(f"generate returned {type(found).__name__}: yield outputs, or return text")
        else:
            self._iterate(found)

    def _iterate(self, outputs: Iterable[T]) -> None:
        iterator = iter(outputs)
        try:
            for output in iterator:
                self._put(output)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _put(self, output: T) -> None:
        if self._stopped:
            raise _Stopped
        self._ready.append(output)
        self._wake()
        if len(self._ready) >= _AHEAD:
            # Cleared before the second look, so that a batch taken in between is not missed.
            self._room.clear()
            if len(self._ready) >= _AHEAD and not self._stopped:
                self._room.wait()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            try:
                self._call_soon(self._set_arrived)
            except RuntimeError:
                # The loop is gone, and with it whoever waited.
                self._stopped = True

    def _set_arrived(self) -> None:
        self._arrived.set()


_NUMBERS = itertools.count()


class ThreadLimiter:
    """So many threads at once on each event loop; the limiter itself is made when first needed there.

    Args:
        threads: How many.
        around: Entered in each thread around what it is for.
    """

    def __init__(
        self, threads: int, around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        self.scope = around
        self._threads = threads
        self._limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar(
            f"responses_kit.{next(_NUMBERS)}"  # anyio knows them by name
        )

    def current(self) -> anyio.CapacityLimiter:
        """The limiter of the running event loop."""
        limiter = self._limiter.get(None)
        if limiter is None:
            self._limiter.set(limiter := anyio.CapacityLimiter(self._threads))
        return limiter
