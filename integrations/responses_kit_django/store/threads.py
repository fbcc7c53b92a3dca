"""The threads of `OrmStore`: Django's ORM is synchronous, and a connection of its belongs to one thread."""

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

__all__ = ["Threads"]

T = TypeVar("T")

PLACE_TIMEOUT: Final = 10.0
"""Seconds for which a call waits until a thread is free."""

CALL_TIMEOUT: Final = 30.0
"""Seconds that a call may take, all its statements together. Then its connection is cut off, and it fails."""


class Threads:
    """Runs functions that use one database in threads with a connection each.

    Not asgiref's threads, which are those of a request and end with it, or serve all requests one by one. A thread is
    started where all others are busy, and ends where it had nothing to do for a while. A forked process begins with
    none, and does not touch its parent's connections.

    Args:
        using: The database's alias.
        most: Most threads.
    """

    def __init__(self, using: str, most: int) -> None:
        self._using, self._most = using, most
        self._left_behind: list[_Thread] = []
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[_Thread] = set()
        self._idle: list[_Thread] = []  # the one that was busy last is taken first, so that the others can go
        self._waiting: deque[_Call] = deque()

    def after_fork(self) -> None:
        """Leaves the parent process its threads, and their connections open: closing one here would end it there."""
        self._left_behind += self._threads
        self._begin()

    async def run(self, work: Callable[[], T]) -> T:
        """What a function returns that is called in one of the threads.

        Who is cancelled leaves: where the call has begun, it goes on to its end, else it is left out.

        Raises:
            TimeoutError: All threads are busy, or the database does not answer.
            ConfigurationError: This is no asyncio event loop.
        """
        call = _Call(work, running_loop())
        self._hand(call)
        call.timer = call.loop.call_later(PLACE_TIMEOUT, self._look_after, call)
        try:
            answer: T = await call.answer
            return answer
        finally:
            call.timer.cancel()
            self._withdraw(call)

    async def aclose(self) -> None:
        """Waits for this event loop's calls that have begun, and ends their threads, as well as those that are idle."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[None]] = []
        with self._lock:
            for thread in self._threads:
                if thread.call is None or thread.call.loop is loop:
                    ends.append(loop.create_future())
                    thread.farewells.append((loop, ends[-1]))
            for thread in self._idle:
                thread.inbox.put(None)
            self._idle.clear()
        if ends:
            await asyncio.wait(ends, timeout=CALL_TIMEOUT)

    def _hand(self, call: _Call) -> None:
        with self._lock:
            if not self._idle and len(self._threads) >= self._most:
                self._waiting.append(call)
                return
            call.begun = time.monotonic()
            thread = self._idle.pop() if self._idle else _Thread(self._using)
            thread.call = call
            thread.inbox.put(call)
            if thread in self._threads:
                return
            self._threads.add(thread)
        name = f"responses-kit-{self._using}"
        try:
            threading.Thread(target=self._serve, args=(thread,), name=name, daemon=True).start()
        except BaseException:  # the system has no more of them
            with self._lock:
                self._threads.discard(thread)
            raise

    def _serve(self, thread: _Thread) -> None:
        call = thread.inbox.get()
        while call is not None:
            thread.do(call)
            del call  # with all that was to be stored
            call = self._next(thread)
            if call is None:
                thread.connection.close()
                with self._lock:  # whose place was taken until now, so that somebody may have come to wait for it
                    call = self._take(thread)
                    if call is None:
                        self._threads.discard(thread)
                    thread.say_farewell()

    def _next(self, thread: _Thread) -> _Call | None:
        """The next call, or None where the thread shall go."""
        with self._lock:
            thread.call = None
            call = None if thread.farewells else self._take(thread)
            idle = call is None and not thread.farewells
            if idle:
                self._idle.append(thread)
        thread.tell()  # only now, so that whoever asks again at once finds it idle
        if not idle:
            return call
        try:
            return thread.inbox.get(timeout=thread.connection.patience)
        except Empty:
            with self._lock:
                if thread in self._idle:
                    self._idle.remove(thread)
                    return None
            return thread.inbox.get()  # it was handed in just now

    def _take(self, thread: _Thread) -> _Call | None:
        if not self._waiting:
            return None
        thread.call = call = self._waiting.popleft()
        call.begun = time.monotonic()
        return call

    def _withdraw(self, call: _Call) -> None:
        if call.begun is None:
            with self._lock, suppress(ValueError):
                self._waiting.remove(call)

    def _look_after(self, call: _Call) -> None:
        """Has nobody wait for ever."""
        now = time.monotonic()
        with self._lock:
            for thread in self._threads:
                if thread.call is not None and now - (thread.call.begun or now) >= CALL_TIMEOUT:
                    thread.connection.cut()
            begun = call.begun
        if begun is None:
            call.fail(TimeoutError("all connections of the store are in use"))
        elif now - begun >= CALL_TIMEOUT:
            call.fail(TimeoutError("the database of the store does not answer"))
        else:
            call.timer = call.loop.call_later(begun + CALL_TIMEOUT - now, self._look_after, call)


class _Call:
    """A function to be called, and the one who waits for what it returns."""

    timer: asyncio.TimerHandle

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work, self.loop = work, loop
        self.answer: asyncio.Future[Any] = loop.create_future()
        self.begun: float | None = None

    def fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it may be that nobody looks at it, which is no news

    def succeed(self, result: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(result)


class _Thread:
    """What one thread is busy with. `call` and `farewells` are guarded by the lock of all."""

    def __init__(self, using: str) -> None:
        self.connection = Connection(using)
        self.inbox: SimpleQueue[_Call | None] = SimpleQueue()
        self.call: _Call | None = None
        self.farewells: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._answer: tuple[asyncio.AbstractEventLoop, Callable[[Any], None], Any] | None = None

    def do(self, call: _Call) -> None:
        tell: Callable[[Any], None] = call.succeed
        outcome: Any
        try:
            self.connection.open()
            outcome = call.work()
        except BaseException as error:
            if isinstance(error, Error):  # whatever state the connection is in now
                self.connection.close()
            tell, outcome = call.fail, error
        self.connection.rest()
        self._answer = (call.loop, tell, outcome)
        del call, tell, outcome  # an exception's traceback would keep them

    def tell(self) -> None:
        """Gives the caller its answer."""
        if self._answer is not None:
            (loop, tell, outcome), self._answer = self._answer, None
            with suppress(RuntimeError):  # its event loop is gone
                loop.call_soon_threadsafe(tell, outcome)

    def say_farewell(self) -> None:
        """Tells those who wait for its end."""
        for loop, end in self.farewells:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_end, end)
        self.farewells.clear()


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that this runs on.

    Raises:
        ConfigurationError: It is none of asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError("an OrmStore works on asyncio only; on trio there is the MemoryStore") from None


_all: Final[weakref.WeakSet[Threads]] = weakref.WeakSet()


def _after_fork() -> None:
    for threads in list(_all):
        threads.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
