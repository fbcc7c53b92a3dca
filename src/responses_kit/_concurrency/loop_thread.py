"""The event loop of synchronous hosts: one a process, in a thread of its own.

It is made when it is first needed, so that it is safe to fork before; a forked process makes its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor  # which registers what is called at the process's end
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Protocol, TypeVar

__all__ = [
    "HasLifespan",
    "call",
    "event_loop",
    "handle_sigterm",
    "handle_sigterm_under_server",
    "start_kit",
    "stop_kit",
    "submit",
]

logger = logging.getLogger("responses_kit")

T = TypeVar("T")

_LEFTOVERS_SECONDS: Final = 10.0
"""What is left at the process's end for what was cancelled then."""


class HasLifespan(Protocol):
    """What lives on an event loop, such as a `ResponsesKit`."""

    def lifespan(self, *, grace: float) -> AbstractAsyncContextManager[None]:
        """Entered where its life begins, and left where it ends; see `ResponsesKit.lifespan`."""


@dataclass(slots=True, eq=False)
class _Life:
    """A kit's life on the loop."""

    begun: Future[None] = field(default_factory=Future)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: Future[None] = field(init=False)


class _Loop:
    """The event loop of one process, and the kits that live on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._lives: dict[HasLifespan, _Life] = {}
        self._lock = threading.RLock()
        self._ended = False
        # For the end, when some versions of Python let no thread begin any more.
        self._reserve = ThreadPoolExecutor(1, "responses-kit-reserve")
        self._reserve.submit(int).result()
        # Nobody waits for it at the end, for it is ended in order before.
        self._thread = threading.Thread(target=self._run, name="responses-kit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.loop.run_until_complete(self._over.wait())
            except (SystemExit, KeyboardInterrupt) as error:
                # Of a task: in a thread of its own it would end no more than that.
                logger.error("a task wanted to end the process", exc_info=error)
        # Not asyncio's own runner, which begins a thread to wait for those of executors.
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._ended:
                # Not in this thread's context: a framework's may lead back into this thread, which does not come to it.
                return contextvars.Context().run(asyncio.run_coroutine_threadsafe, work, self.loop)
        work.close()
        raise RuntimeError("the process is ending")

    def enter(self, kit: HasLifespan, grace: float) -> None:
        self.check()
        with self._lock:
            life = self._lives.get(kit)
            if life is None:
                life = _Life()
                life.ended = self.start(self._live(kit, grace, life))
                self._lives[kit] = life
        life.begun.result()

    def check(self) -> None:
        """Whether this thread may wait for the loop."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the event loop cannot wait for itself: this is for other threads")

    async def _live(self, kit: HasLifespan, grace: float, life: _Life) -> None:
        refused: Exception | None = None
        try:
            async with kit.lifespan(grace=grace):
                life.begun.set_result(None)
                await life.over.wait()
        except Exception as error:
            if life.begun.done():
                raise
            refused = error
        finally:
            with self._lock:
                del self._lives[kit]  # the next who enters tries again
            if refused is not None:
                life.begun.set_exception(refused)
            life.begun.cancel()  # where it has not begun, for nobody else would end the waiting for it

    def begin_to_end(self) -> None:
        # In a signal's handler, which must not wait for a lock that its own thread may have.
        for life in list(self._lives.values()):
            self.loop.call_soon_threadsafe(life.over.set)

    def leave(self, *kits: HasLifespan) -> None:
        """Ends their lives, side by side."""
        self.check()
        lives = [life for kit in kits if (life := self._lives.get(kit)) is not None]
        for life in lives:
            self.loop.call_soon_threadsafe(life.over.set)
            if not life.begun.done():
                life.ended.cancel()  # its store may never answer
        concurrent.futures.wait(life.ended for life in lives)
        for life in lives:
            if not life.ended.cancelled():
                life.ended.result()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.set_default_executor, self._reserve)
        try:
            self.leave(*self._lives)
        except Exception as error:
            logger.error("a kit could not be closed", exc_info=error)
        with self._lock:
            self._ended = True
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_LEFTOVERS_SECONDS)


_lock = threading.Lock()

_here: _Loop | None = None
"""That of this process."""

_inherited: list[_Loop] = []
"""Those of the processes that this one was forked from, whose files are theirs and are not to be closed here."""


def _loop() -> _Loop:
    global _here
    if _here is None:
        with _lock:
            if _here is None:
                _here = _Loop()
    return _here


def _begin_anew() -> None:
    global _lock, _here
    _lock = threading.Lock()  # another thread may have held it in the moment of the fork
    if _here is not None:
        _inherited.append(_here)
        _here = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def _end_with_process() -> None:
    if _here is not None:
        _here.end()


# Not atexit, which comes too late: before it the interpreter waits for all threads, and first for those of executors,
# which may be at work on a stream; and once it has waited there are no executors any more, without which no store can
# be connected to. What is registered last is called first, so before the executors are ended.
threading._register_atexit(_end_with_process)  # type: ignore[attr-defined]  # private, but nothing else is early enough


class _Termination:
    """Handles SIGTERM: begins to end the kits' lives, and leaves the rest to who was there before.

    Servers of threads begin to end by waiting for them, and those last as long as their streams.
    """

    def __init__(self, earlier: Any) -> None:
        self._earlier = earlier

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _here is not None:
            _here.begin_to_end()
        if callable(self._earlier):
            self._earlier(number, frame)
        elif self._earlier is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def handle_sigterm_under_server() -> None:
    """The same as `handle_sigterm`, where some server handles SIGTERM: of other processes it is left alone.

    For frameworks to call where an app is loaded.
    """
    if callable(signal.getsignal(signal.SIGTERM)):
        handle_sigterm()


def handle_sigterm() -> None:
    """Has a SIGTERM begin to end the kits' lives here, beside what the server does at it.

    For hosts to call where an app is loaded: in the main thread, after the server has set its own handlers. In other
    threads nothing happens.
    """
    if threading.current_thread() is threading.main_thread():
        earlier = signal.getsignal(signal.SIGTERM)
        if earlier is not None and not isinstance(earlier, _Termination):  # None: it is handled by what is no Python
            with suppress(ValueError):  # of an interpreter within another, which has no signals
                signal.signal(signal.SIGTERM, _Termination(earlier))


def event_loop() -> asyncio.AbstractEventLoop:
    """This process's event loop, for synchronous hosts."""
    return _loop().loop


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine on this process's event loop, in no context of whoever starts it."""
    return _loop().start(work)


def call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Calls an async function on this process's event loop, and waits for what it returns.

    Whoever is torn away from waiting, by a signal's handler, cancels it.
    """

    async def called() -> T:
        return await function(*args)

    loop = _loop()
    loop.check()
    result = loop.start(called())
    try:
        return result.result()
    finally:
        result.cancel()


def start_kit(kit: HasLifespan, *, grace: float = 10.0) -> None:
    """Has a kit live on this process's event loop, from the first call on until the process ends or `leave`.

    In the main thread it sees to `handle_sigterm`, too.

    Args:
        kit: The kit.
        grace: As in `ResponsesKit.lifespan`.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    handle_sigterm()
    _loop().enter(kit, grace)


def stop_kit(kit: HasLifespan) -> None:
    """Ends the kit's life here, if it has begun."""
    if _here is not None:
        _here.leave(kit)
