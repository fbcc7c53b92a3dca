"""What anyio leaves open: tasks beside or beyond a block, a group that wraps no exceptions, a word from another thread.

A task group could be a companion too, but on asyncio it costs more than all the rest of a short answer, and every
answer needs one to see the client leave. So on asyncio this is a bare task, made when the block first waits for
something, which a short answer never does; on trio it is a nursery.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

import anyio.abc

__all__ = ["Notifier", "ScopedTask", "call_soon_threadsafe", "is_cancellation", "open_task_group", "spawn"]

logger = logging.getLogger("responses_kit")


_FROM_OUTSIDE = "_responses_kit_from_outside"


@asynccontextmanager
async def open_task_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group out of which the block's own exception comes as it is, and not within an `ExceptionGroup`.

    The tasks must not raise. A cancellation cancels them; otherwise the group waits for their end.

    The exception is carried around the group whatever it is: asyncio's own cancellations would be taken for the
    group's, and swallowed, where a task needs a moment to end. asyncio's count of them is lost in there, too, so that
    such an exception is marked for `is_cancellation`.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            except BaseException as error:
                failure = error
                if not isinstance(error, Exception):
                    setattr(error, _FROM_OUTSIDE, is_cancellation())
                    group.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        del failure  # with its traceback it would be a cycle, which keeps alive what the block held


def is_cancellation(error: BaseException | None = None) -> bool:
    """Whether somebody around us cancelled; a backend may raise the same exceptions of its own making.

    Args:
        error: The exception that has come up, if any.
    """
    if getattr(error, _FROM_OUTSIDE, False):
        return True
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio, which nobody can feign
        return False
    return task is not None and task.cancelling() > 0


def call_soon_threadsafe() -> Callable[[Callable[[], None]], Any]:
    """The running loop's way to be called from a thread without waiting for it; anyio has only one that waits."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio.lowlevel  # only loaded where a program runs on trio already

        return trio.lowlevel.current_trio_token().run_sync_soon


class Notifier:
    """Wakes all who wait for it, on whatever event loop each does; whoever comes later waits for the next time."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[anyio.Event, Callable[[Callable[[], None]], Any]] = {}

    def notify_all(self) -> None:
        """Wakes them; callable from any thread."""
        for waiter, call_soon in list(self._waiting.items()):
            with contextlib.suppress(RuntimeError):  # its loop is gone, and nobody waits on it
                call_soon(waiter.set)

    @property
    def has_subscribers(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    @contextmanager
    def subscribe(self) -> Iterator[anyio.Event]:
        """An event that the next ring sets, from now on: look for what you wait for after you have got it."""
        waiter = anyio.Event()
        self._waiting[waiter] = call_soon_threadsafe()
        try:
            yield waiter
        finally:
            del self._waiting[waiter]


_DETACHED: set[asyncio.Task[None]] = set()
"""asyncio itself holds its tasks weakly."""


def spawn(work: Callable[..., Awaitable[None]], *args: Any) -> Callable[[], Any]:
    """Runs a coroutine function as a task of the running event loop, which whoever began it need not outlive.

    Its failures are logged. If the loop ends first, it is cancelled.

    Returns:
        Cancels it; to be called on the same loop.
    """

    async def guarded() -> None:
        try:
            await work(*args)
        except Exception as error:
            logger.error("a detached task failed", exc_info=error)

    try:
        # In no context of whoever began it: a framework's may end with the request that it is for.
        task = asyncio.get_running_loop().create_task(guarded(), context=contextvars.Context())
    except RuntimeError:
        import trio.lowlevel  # only loaded where a program runs on trio already

        scope = anyio.CancelScope()

        async def scoped() -> None:
            with scope:
                await guarded()

        trio.lowlevel.spawn_system_task(scoped)
        return scope.cancel
    _DETACHED.add(task)
    task.add_done_callback(_DETACHED.discard)
    return task.cancel


class ScopedTask:
    """Runs a coroutine function beside the block it is entered for, from `begin` on.

    The block does not wait for it, it may end early, and its failures are logged. To end the block itself, it
    cancels a scope that was opened around both.

    Args:
        work: The coroutine function.
        args: What it is called with.
    """

    __slots__ = ("_args", "_begun", "_group", "_loop", "_start", "_task", "_work")

    def __init__(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._work, self._args = work, args
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._begun = False

    async def __aenter__(self) -> ScopedTask:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._group = anyio.create_task_group()
            await self._group.__aenter__()
        return self

    def start(self) -> None:
        """Starts the work, within the block; what has begun goes on."""
        if self._begun:
            return
        self._begun = True
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
