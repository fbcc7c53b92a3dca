"""The event loop of synchronous hosts: one per process, in a thread of its own.

It is created at its first use, so that a process can fork before; a forked process creates its own.
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
from concurrent.futures import Future, ThreadPoolExecutor  # registers its exit handler before ours
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

_JOIN_TIMEOUT: Final = 10.0
"""Seconds that cancelled tasks may take at the process's exit; then they are abandoned."""


class HasLifespan(Protocol):
    """An object with a lifespan on an event loop, such as a `ResponsesKit`."""

    def lifespan(self, *, grace: float) -> AbstractAsyncContextManager[None]:
        """Run the object within the block; see `ResponsesKit.lifespan`."""


@dataclass(slots=True, eq=False)
class _Lifetime:
    """A kit's lifespan on the loop."""

    started: Future[None] = field(default_factory=Future)
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    task: Future[None] = field(init=False)


class _LoopThread:
    """The event loop of one process, its thread, and the kits that run on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._stop_requested = asyncio.Event()
        self._lifetimes: dict[HasLifespan, _Lifetime] = {}
        self._lock = threading.RLock()
        self._is_stopped = False
        # For the exit, because Python 3.12 and later cannot start threads then.
        self._spare_executor = ThreadPoolExecutor(1, "responses-kit-reserve")
        self._spare_executor.submit(int).result()
        # A daemon, because `stop` joins it at the exit, with a timeout.
        self._thread = threading.Thread(target=self._run, name="responses-kit", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop_requested.is_set():
            try:
                self.loop.run_until_complete(self._stop_requested.wait())
            except (SystemExit, KeyboardInterrupt) as error:
                # Raised by a task. Only the main thread may end the process.
                logger.error("a task tried to exit the process", exc_info=error)
        # Not asyncio.Runner, which starts a thread to shut down the executors.
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._is_stopped:
                # In an empty context: with the caller's, frameworks such as asgiref would call back into this thread,
                # which is blocked.
                return contextvars.Context().run(asyncio.run_coroutine_threadsafe, coroutine, self.loop)
        coroutine.close()
        raise RuntimeError("the process is exiting")

    def start_kit(self, kit: HasLifespan, grace: float) -> None:
        self.check_thread()
        with self._lock:
            lifetime = self._lifetimes.get(kit)
            if lifetime is None:
                lifetime = _Lifetime()
                lifetime.task = self.submit(self._run_lifespan(kit, grace, lifetime))
                self._lifetimes[kit] = lifetime
        lifetime.started.result()

    def check_thread(self) -> None:
        """Raise if the calling thread is the loop's own, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("this function must not be called on the event loop: it would wait for itself")

    async def _run_lifespan(self, kit: HasLifespan, grace: float, lifetime: _Lifetime) -> None:
        failure: Exception | None = None
        try:
            async with kit.lifespan(grace=grace):
                lifetime.started.set_result(None)
                await lifetime.stop_requested.wait()
        except Exception as error:
            if lifetime.started.done():
                raise
            failure = error
        finally:
            with self._lock:
                del self._lifetimes[kit]  # so that the next call tries again
            if failure is not None:
                lifetime.started.set_exception(failure)
            lifetime.started.cancel()  # if cancelled before the start: `start_kit` waits for it

    def request_stop(self) -> None:
        # Without the lock: this runs in a signal handler, and the interrupted code may hold it.
        for lifetime in list(self._lifetimes.values()):
            self.loop.call_soon_threadsafe(lifetime.stop_requested.set)

    def stop_kits(self, *kits: HasLifespan) -> None:
        """Stop kits concurrently, and wait for them."""
        self.check_thread()
        lifetimes = [lifetime for kit in kits if (lifetime := self._lifetimes.get(kit)) is not None]
        for lifetime in lifetimes:
            self.loop.call_soon_threadsafe(lifetime.stop_requested.set)
            if not lifetime.started.done():
                lifetime.task.cancel()  # its startup may hang, such as for a store that does not answer
        concurrent.futures.wait(lifetime.task for lifetime in lifetimes)
        for lifetime in lifetimes:
            if not lifetime.task.cancelled():
                lifetime.task.result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.set_default_executor, self._spare_executor)
        try:
            self.stop_kits(*self._lifetimes)
        except Exception as error:
            logger.error("closing a kit failed", exc_info=error)
        with self._lock:
            self._is_stopped = True
        self.loop.call_soon_threadsafe(self._stop_requested.set)
        self._thread.join(_JOIN_TIMEOUT)


_lock = threading.Lock()

_current: _LoopThread | None = None
"""This process's loop."""

_inherited_threads: list[_LoopThread] = []
"""Loops of parent processes, referenced so that their file descriptors are not closed here."""


def _loop_thread() -> _LoopThread:
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = _LoopThread()
    return _current


def _reset_after_fork() -> None:
    global _lock, _current
    _lock = threading.Lock()  # another thread may have held it during the fork
    if _current is not None:
        _inherited_threads.append(_current)
        _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def _stop_at_exit() -> None:
    if _current is not None:
        _current.stop()


# Not `atexit`, which runs after the interpreter has joined the executors' threads. These may be serving streams, and
# stores need executors to connect. Handlers of `_register_atexit` run in reverse order, so that this one precedes
# the executors' own.
threading._register_atexit(_stop_at_exit)  # type: ignore[attr-defined]  # no public hook runs early enough


class _SigtermHandler:
    """A SIGTERM handler that starts stopping the kits, then calls the previous handler.

    Threaded servers first wait for their threads, which are busy as long as their streams.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _current is not None:
            _current.request_stop()
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def handle_sigterm_under_server() -> None:
    """Call `handle_sigterm` if a server handles SIGTERM; processes without a handler are left alone.

    Integrations call it when an app is loaded.
    """
    if callable(signal.getsignal(signal.SIGTERM)):
        handle_sigterm()


def handle_sigterm() -> None:
    """Install a SIGTERM handler that starts stopping the kits, then calls the server's own handler.

    Call it in the main thread, after the server has installed its handlers. In other threads it does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        previous = signal.getsignal(signal.SIGTERM)
        if previous is not None and not isinstance(previous, _SigtermHandler):  # None: not installed by Python
            with suppress(ValueError):  # a subinterpreter has no signals
                signal.signal(signal.SIGTERM, _SigtermHandler(previous))


def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop, for synchronous hosts."""
    return _loop_thread().loop


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on this process's event loop, in an empty context."""
    return _loop_thread().submit(coroutine)


def call(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Call an async function on this process's event loop, and return its result.

    An exception raised in the waiting thread, as by a signal handler, cancels the function.
    """

    async def run() -> T:
        return await function(*args)

    loop = _loop_thread()
    loop.check_thread()
    future = loop.submit(run())
    try:
        return future.result()
    finally:
        future.cancel()


def start_kit(kit: HasLifespan, *, grace: float = 10.0) -> None:
    """Start a kit on this process's own event loop, for synchronous hosts, until `stop_kit` or the process's exit.

    Blocks until the kit has started; further calls return at once. In the main thread it also calls `handle_sigterm`.
    `adapters.asgi.start_kit` is the counterpart for the running event loop.

    Args:
        kit: The kit.
        grace: Seconds that runs may continue after a signal; see `ResponsesKit.lifespan`.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    handle_sigterm()
    _loop_thread().start_kit(kit, grace)


def stop_kit(kit: HasLifespan) -> None:
    """Stop a kit on this process's own event loop, if it was started there, and wait for it."""
    if _current is not None:
        _current.stop_kits(kit)
