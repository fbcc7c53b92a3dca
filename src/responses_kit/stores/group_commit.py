"""Group commit: calls that come while one is on its way go out together with the next.

On asyncio only, as are the drivers of the databases that need it.
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
    """Gathers items from many tasks and hands them to one function, a batch at a time.

    While a flush is on its way, newcomers gather for the next, so that the batches grow with the load and a lone item
    never waits. Each event loop has its own flushes, one at a time.

    Example::

        appends = Batch(store_all, size=lambda item: len(item.data))
        kept = await appends.add(item)                   # in as many tasks as you like

    Args:
        flush: Takes the items in the order in which they came, and returns as many results in the same order. It runs
            in a task of its own and must not take for ever. What it raises reaches all who wait for this batch, and
            nobody else.
        size: Bytes of an item.
        max_items: Most items of a flush.
        max_bytes: Most bytes of a flush; an item that is larger goes alone.
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
        # Of the event loops that have something to do, so that none is kept alive once it is over.
        self._gathered: dict[asyncio.AbstractEventLoop, _Gathered[T, R]] = {}

    async def submit(self, item: T) -> R:
        """Has the item flushed with others, and returns its result.

        Who is cancelled leaves: the item is left out where its flush has not begun, else it goes its way unseen.

        Raises:
            Exception: Whatever the flush raised.
            RuntimeError: There is no asyncio event loop, or it is about to end.
        """
        loop = asyncio.get_running_loop()
        gathered = self._gathered.get(loop)
        if gathered is None:
            gathered = self._gathered[loop] = _Gathered()
            # A flush is everybody's: it must not carry the context of whoever came first.
            gathered.task = loop.create_task(self._work(loop, gathered), context=contextvars.Context())
        future: asyncio.Future[R] = loop.create_future()
        gathered.waiting.append((item, future))
        return await future

    async def drain(self) -> None:
        """Waits until all that was gathered on this event loop until now has been flushed, whatever came of it."""
        gathered = self._gathered.get(asyncio.get_running_loop())
        if gathered is not None and gathered.task is not None:
            await asyncio.wait([gathered.task])

    async def _work(self, loop: asyncio.AbstractEventLoop, gathered: _Gathered[T, R]) -> None:
        taken: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while gathered.waiting:
                if taken := self._take(gathered.waiting):
                    await self._settle(taken)
        finally:
            del self._gathered[loop]
            for _, future in (*taken, *gathered.waiting):
                if not future.done():  # only where this task was cancelled
                    future.set_exception(RuntimeError("the event loop ends, and what waits for the store with it"))

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
                raise RuntimeError(f"a flush of {len(taken)} items gave {len(results)} results")
        except Exception as error:
            for _, future in taken:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(taken, results, strict=True):
            if not future.done():
                future.set_result(result)


class _Gathered(Generic[T, R]):
    """What waits on one event loop."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self.task: asyncio.Task[None] | None = None
