"""Plain iterables in worker threads, read from the event loop in batches.

The thread waits for the loop only if it is far ahead, and the loop takes all outputs that are ready. A fast generator
thus costs one wake-up for many outputs, and a slow one has each output delivered at once.
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

_MAX_AHEAD = 256
"""Outputs that a thread may be ahead of the loop; then it waits."""

_RUN_VAR_NUMBERS = itertools.count()


class _StopIterating(BaseException):
    """Raised in the thread to leave the generator. A `BaseException`, so that backends do not catch it."""


class IteratorThread(Generic[T]):
    """Iterates one iterable in a thread of its own.

    Args:
        produce: Called in the thread; returns the iterable. An async iterable, or an awaitable, is not iterated but
            returned as `async_result`.

    Attributes:
        is_done: Whether the thread has finished.
        async_result: The result of `produce`, if it is async.
    """

    def __init__(self, produce: Callable[[], Any]) -> None:
        self._produce = produce
        self._ready: deque[T] = deque()
        self._error: Exception | None = None
        self.is_done = False
        self._is_stopped = False
        self._room_available = threading.Event()
        self._arrived = anyio.Event()
        self._is_waiting = False
        self._call_soon = call_soon_threadsafe()
        self._is_started = False
        self._limiter: anyio.CapacityLimiter | None = None
        self._scope: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.async_result: AsyncIterable[T] | Awaitable[Any] | None = None

    async def reserve(self, limiter: ThreadLimiter) -> None:
        """Wait for a free thread, and reserve it until the thread has finished, even if `run` is cancelled.

        Otherwise clients that connect and leave could start threads without bound.
        """
        capacity = limiter.current()
        await capacity.acquire_on_behalf_of(self)
        self._limiter = capacity
        self._scope = limiter.scope

    async def run(self) -> None:
        """Iterate in the reserved thread until the iterable is exhausted or fails, or `stop` is called."""
        await anyio.to_thread.run_sync(
            self._run_in_thread, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(math.inf)
        )

    def _release(self) -> None:
        if self._limiter is not None:
            self._limiter.release_on_behalf_of(self)
            self._limiter = None

    def stop(self) -> None:
        """Close the iterable at its next output. Must always be called at the end."""
        self._is_stopped = True
        self._room_available.set()
        if not self._is_started:
            self._release()

    async def take(self) -> list[T]:
        """Wait for outputs and return all that are ready; an empty list at the end.

        Raises:
            Exception: The iterable's exception, after all of its outputs.
        """
        while not self._ready:
            if self.is_done:
                error, self._error = self._error, None
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # breaks the reference cycle with the traceback, which would keep the turn alive
                return []
            self._arrived = anyio.Event()
            self._is_waiting = True
            if self._ready or self.is_done:
                self._is_waiting = False
            else:
                await self._arrived.wait()
        batch = [self._ready.popleft() for _ in range(len(self._ready))]
        self._room_available.set()
        return batch

    # In the thread.

    def _run_in_thread(self) -> None:
        self._is_started = True
        try:
            if self._is_stopped:
                raise _StopIterating
            with self._scope():
                self._consume()
        except _StopIterating:
            pass
        except Exception as error:  # raised by `take` on the loop
            self._error = error
        except BaseException as error:
            # SystemExit would stop the host, and a cancellation would look like the task's own.
            self._error = RuntimeError(f"the backend raised {type(error).__name__}")
            self._error.__cause__ = error
        finally:
            self.is_done = True
            self._wake()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its limiter unused
                self._call_soon(self._release)

    def _consume(self) -> None:
        result = self._produce()
        if isinstance(result, str):
            result = [result]
        if isinstance(result, AsyncIterable | Awaitable):
            self.async_result = result
        elif isinstance(result, Mapping) or not isinstance(result, Iterable):
            raise IllegalOutput(f"generate returned {type(result).__name__}: yield outputs, or return text")
        else:
            self._iterate(result)

    def _iterate(self, outputs: Iterable[T]) -> None:
        iterator = iter(outputs)
        try:
            for output in iterator:
                self._append(output)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()

    def _append(self, output: T) -> None:
        if self._is_stopped:
            raise _StopIterating
        self._ready.append(output)
        self._wake()
        if len(self._ready) >= _MAX_AHEAD:
            # Cleared before the second check, so that a batch taken in between is not missed.
            self._room_available.clear()
            if len(self._ready) >= _MAX_AHEAD and not self._is_stopped:
                self._room_available.wait()

    def _wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            try:
                self._call_soon(self._set_arrived)
            except RuntimeError:
                # The loop is closed, and its tasks with it.
                self._is_stopped = True

    def _set_arrived(self) -> None:
        self._arrived.set()


class ThreadLimiter:
    """Limits the threads of each event loop. A loop's limiter is created at its first use.

    Args:
        limit: Maximum number of threads per event loop; further ones wait.
        scope: Entered in each thread around its work.

    Attributes:
        scope: See the argument.
    """

    def __init__(
        self, limit: int, scope: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        self.scope = scope
        self._limit = limit
        self._limiter: anyio.lowlevel.RunVar[anyio.CapacityLimiter] = anyio.lowlevel.RunVar(
            f"responses_kit.{next(_RUN_VAR_NUMBERS)}"  # anyio identifies variables by name
        )

    def current(self) -> anyio.CapacityLimiter:
        """Return the limiter of the running event loop."""
        limiter = self._limiter.get(None)
        if limiter is None:
            self._limiter.set(limiter := anyio.CapacityLimiter(self._limit))
        return limiter
