"""Group commit: calls that arrive during a flush are flushed together by the next one.

asyncio only, like the database drivers that need it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["GroupCommit"]

T = TypeVar("T")
R = TypeVar("R")


class GroupCommit(Generic[T, R]):
    """Batches items from many tasks for one flush function.

    During a flush, new items are collected for the next one, so batches grow with the load and a single item never
    waits. Each event loop has its own flushes, one at a time.

    Example::

        appends = GroupCommit(store_all, size=lambda item: len(item.data))
        is_stored = await appends.submit(item)           # in any number of tasks

    Args:
        flush: Called with the items in order of arrival; returns as many results in the same order. It runs in its own
            task and must end within a bounded time. Its exceptions reach all callers of this batch.
        size: Bytes of an item.
        max_items: Items per flush.
        max_bytes: Bytes per flush; a larger item is flushed alone.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        *,
        size: Callable[[T], int] | None = None,
        max_items: int = 512,
        max_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        self._flush, self._size = flush, size
        self._max_items, self._max_bytes = max_items, max_bytes
        # Holds only event loops with pending items, so that closed loops can be garbage-collected.
        self._pending: dict[asyncio.AbstractEventLoop, _Pending[T, R]] = {}

    async def submit(self, item: T) -> R:
        """Flush the item in a batch, and return its result.

        If the caller is cancelled before the flush starts, the item is left out; afterwards it is flushed regardless.

        Raises:
            Exception: Any exception of the flush.
            RuntimeError: There is no asyncio event loop, or it is closing.
        """
        loop = asyncio.get_running_loop()
        pending = self._pending.get(loop)
        if pending is None:
            pending = self._pending[loop] = _Pending()
            # A flush serves all callers: it must not run in the context of the first one.
            pending.task = loop.create_task(self._run(loop, pending), context=contextvars.Context())
        future: asyncio.Future[R] = loop.create_future()
        pending.waiting.append((item, future))
        return await future

    async def drain(self) -> None:
        """Wait until all items that are pending on this event loop have been flushed, successfully or not."""
        pending = self._pending.get(asyncio.get_running_loop())
        if pending is not None and pending.task is not None:
            await asyncio.wait([pending.task])

    async def _run(self, loop: asyncio.AbstractEventLoop, pending: _Pending[T, R]) -> None:
        taken: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while pending.waiting:
                if taken := self._take(pending.waiting):
                    await self._settle(taken)
        finally:
            del self._pending[loop]
            for _, future in (*taken, *pending.waiting):
                if not future.done():  # only if this task was cancelled
                    future.set_exception(RuntimeError("the event loop is closing; the write was not flushed"))

    def _take(self, waiting: deque[tuple[T, asyncio.Future[R]]]) -> list[tuple[T, asyncio.Future[R]]]:
        taken: list[tuple[T, asyncio.Future[R]]] = []
        size = 0
        while waiting and len(taken) < self._max_items:
            item, future = waiting[0]
            if not future.cancelled():
                size += 0 if self._size is None else self._size(item)
                if taken and size > self._max_bytes:
                    break
                taken.append((item, future))
            waiting.popleft()
        return taken

    async def _settle(self, taken: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._flush([item for item, _ in taken])
            if len(results) != len(taken):
                raise RuntimeError(f"the flush of {len(taken)} items returned {len(results)} results")
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(taken, results, strict=True):
            if not future.done():
                future.set_result(result)


class _Pending(Generic[T, R]):
    """The pending items of one event loop."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self.task: asyncio.Task[None] | None = None
