"""The bridge between a synchronous host's thread and the coroutine that handles its request on the event loop.

While the thread waits for the reply, the coroutine can call functions in it: hooks, views, and the function that reads
the body. The thread also sends the pieces of a stream. Host code thus finds its thread-local state, and the
kit runs on one event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

from .._concurrency.loop_thread import event_loop, submit
from ..errors import ClientDisconnected
from ..http.messages import Reply
from ..protocol.sse import KEEP_ALIVE

__all__ = ["WSGIBridge", "current_bridge"]

logger = logging.getLogger("responses_kit")

_DISCONNECT_POLL_INTERVAL: Final = 0.5
"""Seconds between checks whether the client has left, while there is nothing to send."""

_MAX_PENDING_PIECES: Final = 8
"""Pieces that may wait for the host's thread; then the kit waits, and its send timeout applies."""

_FIRST_READ_TIMEOUT: Final = 30.0
"""Seconds until a stream that was never iterated is cancelled, as after a failure in the framework's middleware."""

_CLOSE_TIMEOUT: Final = 10.0
"""Seconds without a message after which the host's thread stops waiting for a cancelled coroutine."""

_EMPTY_CONTEXT: Final = contextvars.Context()
"""The context of timers: the loop references cancelled timers, and their contexts, for a while."""


@dataclass(slots=True)
class _Call:
    """A function to call in the host's thread, and the future of its result."""

    function: Callable[[Any], Any]
    argument: Any
    done: asyncio.Future[Any]


current_bridge: contextvars.ContextVar[WSGIBridge | None] = contextvars.ContextVar("responses_kit_bridge", default=None)
"""The bridge of the current request, for backends that are bound to it."""


class _Signal:
    """A message without content to the host's thread."""


_PIECE_READY, _FINISHED = _Signal(), _Signal()


class WSGIBridge:
    """One request, shared by the host's thread and a coroutine on the event loop.

    It is also the body of a streamed reply: an iterator of pieces of whole events. A host that stops iterating early
    must call `close`.

    Args:
        has_client_left: Returns whether the client is known to have left. Called at intervals, in the host's thread
            or, while that is busy, on the event loop.

    Attributes:
        context: A copy of the host's context variables, in which its functions are called.
    """

    def __init__(self, has_client_left: Callable[[], bool] = lambda: False) -> None:
        self.context = contextvars.copy_context()
        self._has_client_left = has_client_left
        self._loop = event_loop()
        self._messages: SimpleQueue[_Call | Reply | _Signal] = SimpleQueue()
        self._pieces: deque[bytes] = deque()
        self._room_available = asyncio.Event()
        self._future: concurrent.futures.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_read = self._is_finished = self._is_abandoned = False

    # In the host's thread.

    def start(self, respond: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply | None:
        """Start the coroutine that creates the reply, and execute its calls until the reply is ready.

        Args:
            respond: Creates the reply. If the reply is streamed, the coroutine continues with the stream.

        Returns:
            The reply, or None if the client left.

        Raises:
            Exception: The coroutine raised it.
            RuntimeError: The coroutine raised SystemExit or KeyboardInterrupt.
        """
        self._future = submit(self._run(respond))
        message = self._process_messages()
        if isinstance(message, Reply):
            return message
        if self._error is None:
            return None
        if isinstance(self._error, Exception):
            raise self._error
        raise RuntimeError("the request's handler raised SystemExit or KeyboardInterrupt") from self._error

    def __iter__(self) -> WSGIBridge:
        return self

    def __next__(self) -> bytes:
        self._is_read = True
        if self._process_messages() is not _PIECE_READY:
            raise StopIteration
        piece = b"".join([self._pieces.popleft() for _ in range(len(self._pieces))])
        self._call_on_loop(self._room_available.set)
        return piece

    def close(self) -> None:
        """Cancel the request, and wait for its cleanup while it sends messages; see `_CLOSE_TIMEOUT`."""
        if self._future is not None and not self._is_finished:
            self.cancel()
            self._is_abandoned = (
                False  # this thread can execute calls again, although an exception made it abandon them
            )
            self._process_messages(timeout=_CLOSE_TIMEOUT)

    def cancel(self) -> None:
        """Cancel the request without waiting; callable from any thread."""
        if self._future is not None:
            self._future.cancel()

    def _process_messages(self, timeout: float | None = None) -> Reply | _Signal:
        """Execute calls until there is something to send, or the coroutine has finished.

        Args:
            timeout: Seconds to wait for each message of a cancelled coroutine; None while it is not cancelled.
        """
        next_check = time.monotonic() + _DISCONNECT_POLL_INTERVAL
        try:
            while not self._is_finished:
                message: _Call | Reply | _Signal | None
                try:
                    message = self._messages.get(timeout=_DISCONNECT_POLL_INTERVAL if timeout is None else timeout)
                except Empty:
                    if timeout is not None or self._loop.is_closed():
                        break
                    message = None
                if timeout is None and (message is None or time.monotonic() >= next_check):
                    next_check = time.monotonic() + _DISCONNECT_POLL_INTERVAL
                    if self._has_client_left():
                        self.cancel()
                        timeout = _CLOSE_TIMEOUT
                if isinstance(message, _Call):
                    self._execute(message)
                elif message is _FINISHED:
                    self._is_finished = True
                elif message is not None and timeout is None and (message is not _PIECE_READY or self._pieces):
                    return message
        except BaseException:  # such as the SystemExit of gunicorn's worker timeout
            self.cancel()
            self._abandon_pending_calls()
            raise
        self._abandon_pending_calls()
        return _FINISHED

    def _abandon_pending_calls(self) -> None:
        """Fail the calls that this thread will not execute any more."""
        self._is_abandoned = True
        with suppress(Empty):
            while True:
                message = self._messages.get_nowait()
                if isinstance(message, _Call):
                    self._call_on_loop(_resolve, message.done, None, ClientDisconnected())
        if self._is_finished:
            self._messages.put(_FINISHED)  # for other threads that wait, and for later calls

    def _execute(self, call: _Call) -> None:
        try:
            result = self.context.run(call.function, call.argument)
        except StopIteration as error:  # futures and coroutines cannot raise it
            stopped = RuntimeError("a function of the host raised StopIteration")
            stopped.__cause__ = error
            self._call_on_loop(_resolve, call.done, None, stopped)
        except Exception as error:
            self._call_on_loop(_resolve, call.done, None, error)
        except BaseException:
            self._call_on_loop(_resolve, call.done, None, ClientDisconnected())
            raise
        else:
            self._call_on_loop(_resolve, call.done, result, None)

    def _call_on_loop(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is exiting
            self._loop.call_soon_threadsafe(function, *args)

    # On the event loop.

    async def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Call a function in the host's thread; see `engine.hooks.HostCaller`.

        Raises:
            ClientDisconnected: The host's thread no longer executes calls.
        """
        done = self._loop.create_future()
        self._messages.put(_Call(function, argument, done))
        if self._is_abandoned:  # checked after the put, because the thread may leave in between
            raise ClientDisconnected
        check = self._loop.call_later(_DISCONNECT_POLL_INTERVAL, self._check_client, done, context=_EMPTY_CONTEXT)
        try:
            return await done
        finally:
            check.cancel()

    def _check_client(self, done: asyncio.Future[Any]) -> None:
        """Cancel the request if the client leaves while the host's thread is busy."""
        if not done.done():
            if self._has_client_left():
                self.cancel()
            else:
                self._loop.call_later(_DISCONNECT_POLL_INTERVAL, self._check_client, done, context=_EMPTY_CONTEXT)

    async def send(self, data: bytes) -> None:
        """Pass a piece to the host's thread, which sends it."""
        if data == KEEP_ALIVE and self._pieces:
            return  # pending pieces keep the connection alive as well
        while len(self._pieces) >= _MAX_PENDING_PIECES:
            self._room_available.clear()
            await self._room_available.wait()
        self._pieces.append(data)
        self._messages.put(_PIECE_READY)

    def _cancel_if_unread(self) -> None:
        if not self._is_read:
            self.cancel()

    async def _run(self, respond: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        has_replied = False
        current_bridge.set(self)
        try:
            reply = await respond()
            has_replied = True
            self._messages.put(reply)
            if reply.stream is not None:
                read_timer = self._loop.call_later(_FIRST_READ_TIMEOUT, self._cancel_if_unread, context=_EMPTY_CONTEXT)
                try:
                    await reply.stream(self.send)
                finally:
                    read_timer.cancel()
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # including SystemExit, which would stop the event loop
            if has_replied:
                logger.error("a stream failed", exc_info=error)
            else:
                self._error = error
        finally:
            self._messages.put(_FINISHED)


def _resolve(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return  # the call was cancelled
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
