"""Tasks beside a block: a companion that is cancelled at its end, and a group that wraps no exceptions.

A task group could be a companion too, but on asyncio it costs more than all the rest of a short answer, and every
answer needs one to see the client leave. So on asyncio this is a bare task, made when the block first waits for
something, which a short answer never does; on trio it is a nursery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import anyio.abc

__all__ = ["Companion", "unwrapped_group"]

logger = logging.getLogger("responses_kit")


@asynccontextmanager
async def unwrapped_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group out of which the block's own exception comes as it is, and not within an `ExceptionGroup`.

    The tasks in it must not raise.
    """
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            except Exception as error:  # carried around the group
                failure = error
        if failure is not None:
            raise failure
    finally:
        del failure  # with its traceback it would be a cycle, which keeps alive what the block held


class Companion:
    """Runs a coroutine function beside the block it is entered for, from `begin` on.

    The block does not wait for it, it may end early, and its failures are logged. To end the block itself, it
    cancels a scope that was opened around both.

    Args:
        work: The coroutine function.
        args: What it is called with.
    """

    __slots__ = ("_args", "_group", "_loop", "_start", "_task", "_work")

    def __init__(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._work, self._args = work, args
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._group: anyio.abc.TaskGroup | None = None

    async def __aenter__(self) -> Companion:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._group = anyio.create_task_group()
            await self._group.__aenter__()
        return self

    def begin(self) -> None:
        """Starts the work, within the block and once."""
        if self._group is not None:
            self._group.start_soon(self._guarded)
        elif self._loop is not None:
            self._start = self._loop.call_soon(self._make_task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.cancel_scope.cancel()
            # Told nothing of the block's exception, the group cannot wrap it.
            await self._group.__aexit__(None, None, None)
        if self._start is not None:
            self._start.cancel()
        if self._task is not None:
            self._task.cancel()

    def _make_task(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._guarded())

    async def _guarded(self) -> None:
        try:
            await self._work(*self._args)
        except Exception as error:
            logger.error("a task beside a response failed", exc_info=error)
