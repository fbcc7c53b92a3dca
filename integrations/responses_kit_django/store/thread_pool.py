"""The thread pool of `OrmStore`: Django's ORM is synchronous, and each of its connections belongs to one thread."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from django.db import Error

from responses_kit.errors import ConfigurationError

from .connection import Connection

__all__ = ["ThreadPool"]

T = TypeVar("T")

THREAD_TIMEOUT: Final = 10.0
"""Seconds that a call waits for a free thread before it fails."""

CALL_TIMEOUT: Final = 30.0
"""Seconds that a call may take with all its statements before its connection is shut down and it fails."""


class ThreadPool:
    """A pool of threads, each with its own connection to one database.

    The threads of asgiref do not fit: they end with their request, or run the calls of all requests in
    sequence. A thread starts when all threads are busy, and ends when it has been idle for a while. A forked process
    starts without threads and leaves its parent's connections open.

    Args:
        using: The database's alias.
        max_threads: Threads, and so connections, at the same time. Further calls wait.
    """

    def __init__(self, using: str, max_threads: int) -> None:
        self._using, self._max_threads = using, max_threads
        self._parent_threads: list[_Thread] = []
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[_Thread] = set()
        self._idle: list[_Thread] = []  # a stack: the most recently used first, so that unneeded threads end
        self._waiting: deque[_Call] = deque()

    def after_fork(self) -> None:
        """Reset the pool in a forked process, and keep references to the parent's connections.

        Garbage collection would close them, and the database would then end the parent's sessions.
        """
        self._parent_threads += self._threads
        self._reset()

    async def run(self, work: Callable[[], T]) -> T:
        """Call a function in one of the threads and return its result.

        If the caller is cancelled, a call that has started runs on, and one that waits for a thread is discarded.

        Raises:
            TimeoutError: All threads are busy, or the database does not respond.
            ConfigurationError: There is no running asyncio event loop.
        """
        call = _Call(work, get_event_loop())
        self._dispatch(call)
        call.timer = call.loop.call_later(THREAD_TIMEOUT, self._check_timeouts, call)
        try:
            result: T = await call.future
            return result
        finally:
            call.timer.cancel()
            self._discard_waiting_call(call)

    async def aclose(self) -> None:
        """Wait for this event loop's calls, and end their threads and the idle ones."""
        loop = asyncio.get_running_loop()
        waiters: list[asyncio.Future[None]] = []
        with self._lock:
            for thread in self._threads:
                if thread.call is None or thread.call.loop is loop:
                    waiters.append(loop.create_future())
                    thread.exit_waiters.append((loop, waiters[-1]))
            for thread in self._idle:
                thread.inbox.put(None)
            self._idle.clear()
        if waiters:
            await asyncio.wait(waiters, timeout=CALL_TIMEOUT)

    def _dispatch(self, call: _Call) -> None:
        with self._lock:
            if not self._idle and len(self._threads) >= self._max_threads:
                self._waiting.append(call)
                return
            call.started_at = time.monotonic()
            thread = self._idle.pop() if self._idle else _Thread(self._using)
            thread.call = call
            thread.inbox.put(call)
            if thread in self._threads:
                return
            self._threads.add(thread)
        name = f"responses-kit-{self._using}"
        try:
            threading.Thread(target=self._run_thread, args=(thread,), name=name, daemon=True).start()
        except BaseException:  # the system's limit on threads
            with self._lock:
                self._threads.discard(thread)
            raise

    def _run_thread(self, thread: _Thread) -> None:
        call = thread.inbox.get()
        while call is not None:
            thread.execute(call)
            del call  # frees its arguments while the thread waits
            call = self._next_call(thread)
            if call is None:
                thread.connection.close()
                with self._lock:  # until now the thread counted, so a call may be waiting for it
                    call = self._take_waiting_call(thread)
                    if call is None:
                        self._threads.discard(thread)
                    thread.notify_exit()

    def _next_call(self, thread: _Thread) -> _Call | None:
        """Return the next call, or None if the thread must end."""
        with self._lock:
            thread.call = None
            call = None if thread.exit_waiters else self._take_waiting_call(thread)
            idle = call is None and not thread.exit_waiters
            if idle:
                self._idle.append(thread)
        thread.deliver_result()  # after it became idle, so that the caller's next call can use this thread
        if not idle:
            return call
        try:
            return thread.inbox.get(timeout=thread.connection.idle_timeout)
        except Empty:
            with self._lock:
                if thread in self._idle:
                    self._idle.remove(thread)
                    return None
            return thread.inbox.get()  # dispatched after the timeout

    def _take_waiting_call(self, thread: _Thread) -> _Call | None:
        if not self._waiting:
            return None
        thread.call = call = self._waiting.popleft()
        call.started_at = time.monotonic()
        return call

    def _discard_waiting_call(self, call: _Call) -> None:
        if call.started_at is None:
            with self._lock, suppress(ValueError):
                self._waiting.remove(call)

    def _check_timeouts(self, call: _Call) -> None:
        """Disconnect calls that take too long, and fail this call if its time is up."""
        now = time.monotonic()
        with self._lock:
            for thread in self._threads:
                if thread.call is not None and now - (thread.call.started_at or now) >= CALL_TIMEOUT:
                    thread.connection.disconnect()
            started_at = call.started_at
        if started_at is None:
            call.fail(TimeoutError("all connections of the store are in use"))
        elif now - started_at >= CALL_TIMEOUT:
            call.fail(TimeoutError("the database of the store does not respond"))
        else:
            call.timer = call.loop.call_later(started_at + CALL_TIMEOUT - now, self._check_timeouts, call)


class _Call:
    """A function to call, and the future of its result. `started_at` is None until a thread takes it."""

    timer: asyncio.TimerHandle

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.function, self.loop = function, loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.started_at: float | None = None

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks it as retrieved, since the caller may be gone

    def succeed(self, result: Any) -> None:
        if not self.future.done():
            self.future.set_result(result)


class _Thread:
    """The state of one thread. The pool's lock guards `call` and `exit_waiters`."""

    def __init__(self, using: str) -> None:
        self.connection = Connection(using)
        self.inbox: SimpleQueue[_Call | None] = SimpleQueue()
        self.call: _Call | None = None
        self.exit_waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._result: tuple[asyncio.AbstractEventLoop, Callable[[Any], None], Any] | None = None

    def execute(self, call: _Call) -> None:
        deliver: Callable[[Any], None] = call.succeed
        outcome: Any
        try:
            self.connection.open()
            outcome = call.function()
        except BaseException as error:
            if isinstance(error, Error):  # the connection may be broken
                self.connection.close()
            deliver, outcome = call.fail, error
        self.connection.release()
        self._result = (call.loop, deliver, outcome)
        del call, deliver, outcome  # an exception's traceback refers to this frame, and so to them

    def deliver_result(self) -> None:
        """Pass the result of the last call to its caller."""
        if self._result is not None:
            (loop, deliver, outcome), self._result = self._result, None
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(deliver, outcome)

    def notify_exit(self) -> None:
        """Notify `ThreadPool.aclose` that the thread ends."""
        for loop, waiter in self.exit_waiters:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_set_done, waiter)
        self.exit_waiters.clear()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        ConfigurationError: There is no asyncio event loop; under trio, for example.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("an OrmStore needs asyncio; use a MemoryStore on trio") from None


_pools: Final[weakref.WeakSet[ThreadPool]] = weakref.WeakSet()


def _reset_pools() -> None:
    for threads in list(_pools):
        threads.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_pools)
