"""Tasks that anyio does not offer: detached ones, ones scoped to a block, and task groups that wrap no exceptions.

They run on asyncio and on trio. `ScopedTask` exists because every reply needs a task that notices the client's leaving,
and a task group on asyncio costs more than all other work of a short reply. On asyncio it is a bare task, created when
the block first waits; on trio it is a nursery.
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

_IS_CANCELLATION = "_responses_kit_is_cancellation"
"""Attribute of exceptions that have passed an `open_task_group`: the result of `is_cancellation` before."""


@asynccontextmanager
async def open_task_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Open a task group that raises the block's own exception instead of an `ExceptionGroup`.

    The tasks must not raise. A cancellation cancels them; otherwise the group waits until they have finished.

    The exception bypasses the group, because anyio would take asyncio's own cancellation for the group's and swallow
    it if a task does not finish at once. The group also resets `Task.cancelling`, so that the exception is marked for
    `is_cancellation`.
    """
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            except BaseException as error:
                failure = error
                if not isinstance(error, Exception):
                    setattr(error, _IS_CANCELLATION, is_cancellation())
                    group.cancel_scope.cancel()
        if failure is not None:
            raise failure
    finally:
        del failure  # breaks the reference cycle with the traceback, which would keep the block's objects alive


def is_cancellation(error: BaseException | None = None) -> bool:
    """Return whether the current task was cancelled, as a backend may raise such an exception by itself.

    Args:
        error: The exception that was raised, if any.
    """
    if getattr(error, _IS_CANCELLATION, False):
        return True
    if anyio.current_effective_deadline() == -math.inf:
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio: its cancellations cannot be raised by code
        return False
    return task is not None and task.cancelling() > 0


def call_soon_threadsafe() -> Callable[[Callable[[], None]], Any]:
    """Return the running loop's function that schedules a callback from any thread.

    `anyio.from_thread` has only functions that wait for the loop.
    """
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio.lowlevel  # optional dependency, present when it runs

        return trio.lowlevel.current_trio_token().run_sync_soon


class Notifier:
    """Wakes subscribers on any event loop. Later subscribers wait for the next notification."""

    __slots__ = ("_subscribers",)

    def __init__(self) -> None:
        self._subscribers: dict[anyio.Event, Callable[[Callable[[], None]], Any]] = {}

    def notify_all(self) -> None:
        """Wake all subscribers; callable from any thread."""
        for event, call_soon in list(self._subscribers.items()):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                call_soon(event.set)

    @property
    def has_subscribers(self) -> bool:
        """Whether there are subscribers."""
        return bool(self._subscribers)

    @contextmanager
    def subscribe(self) -> Iterator[anyio.Event]:
        """Yield an event that the next notification sets; check the condition that you wait for after subscribing."""
        event = anyio.Event()
        self._subscribers[event] = call_soon_threadsafe()
        try:
            yield event
        finally:
            del self._subscribers[event]


_DETACHED: set[asyncio.Task[None]] = set()
"""Strong references: asyncio itself holds tasks weakly."""


def spawn(function: Callable[..., Awaitable[None]], *args: Any) -> Callable[[], Any]:
    """Run a coroutine function as a detached task of the running event loop.

    Exceptions are logged. The task is cancelled when the loop is closed.

    Args:
        function: The coroutine function.
        args: Its arguments.

    Returns:
        A function that cancels the task; call it on the same loop.
    """

    async def guarded() -> None:
        try:
            await function(*args)
        except Exception as error:
            logger.error("a detached task failed", exc_info=error)

    try:
        # In an empty context, because the caller's may hold a framework's objects that end with a request.
        task = asyncio.get_running_loop().create_task(guarded(), context=contextvars.Context())
    except RuntimeError:
        import trio.lowlevel  # optional dependency, present when it runs

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
    """A task that runs at most as long as the block that it is entered for.

    The end of the block cancels the task. The task may return earlier, and its exceptions are logged. To stop the
    block, it cancels a scope that was opened around both.

    Args:
        function: The coroutine function.
        args: Its arguments.
    """

    __slots__ = ("_args", "_function", "_group", "_is_started", "_loop", "_start_handle", "_task")

    def __init__(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._function, self._args = function, args
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_handle: asyncio.Handle | None = None
        self._task: asyncio.Task[None] | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._is_started = False

    async def __aenter__(self) -> ScopedTask:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._group = anyio.create_task_group()
            await self._group.__aenter__()
        return self

    def start(self) -> None:
        """Start the task, within the block. Further calls do nothing."""
        if self._is_started:
            return
        self._is_started = True
        if self._group is not None:
            self._group.start_soon(self._run)
        elif self._loop is not None:
            self._start_handle = self._loop.call_soon(self._create_task)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            self._group.cancel_scope.cancel()
            # Without the block's exception, so that the group cannot wrap it.
            await self._group.__aexit__(None, None, None)
        if self._start_handle is not None:
            self._start_handle.cancel()
        if self._task is not None:
            self._task.cancel()

    def _create_task(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._function(*self._args)
        except Exception as error:
            logger.error("a task of a response failed", exc_info=error)
