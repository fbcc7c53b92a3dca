"""One request of a synchronous host: a coroutine on the event loop, and the host's thread, which serves it.

The thread waits for the reply, and does meanwhile what the coroutine asks it to: call the host's own functions, read
the body, send pieces. So the host's code finds everything that it keeps by thread, and the kit all that is its loop's.
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

__all__ = ["WSGIBridge", "current"]

logger = logging.getLogger("responses_kit")

_LOOK_SECONDS: Final = 0.5
"""How often it is looked whether a client has left while there is nothing to send."""

_AHEAD: Final = 8
"""Pieces that may wait for the host's thread. Then the kit has to wait, and sees that nobody reads."""

_CLAIM_SECONDS: Final = 30.0
"""How long a stream waits to be iterated at all; a framework's middleware may fail, and lose the reply."""

_CLOSING_SECONDS: Final = 10.0
"""How long the host's thread waits for the end of what it has given up."""

_NOWHERE: Final = contextvars.Context()
"""The context of timers, which the loop keeps for a while when they are cancelled, with all that is in it."""


@dataclass(slots=True)
class _Order:
    """What the host's thread is to call, and who waits for it."""

    function: Callable[[Any], Any]
    argument: Any
    done: asyncio.Future[Any]


current: contextvars.ContextVar[WSGIBridge | None] = contextvars.ContextVar("responses_kit_exchange", default=None)
"""The exchange that a coroutine belongs to: how a backend that is bound to its request finds the host's thread."""


class _Sign:
    """What the host's thread is told beside orders."""


_PIECE, _END = _Sign(), _Sign()


class WSGIBridge:
    """One request: its coroutine on the event loop, and the host's thread, which serves it.

    Of a reply that streams, the exchange is the body: an iterator of pieces of whole events, which whoever stops early
    has to `close`.

    Args:
        left: Whether the client is known to have left. Called now and then, in the host's thread or, while that is
            busy, on the event loop.

    Attributes:
        context: The host's context variables, as they were when the exchange was made; its functions are called in it.
    """

    def __init__(self, left: Callable[[], bool] = lambda: False) -> None:
        self.context = contextvars.copy_context()
        self._left = left
        self._loop = event_loop()
        self._orders: SimpleQueue[_Order | Reply | _Sign] = SimpleQueue()
        self._pieces: deque[bytes] = deque()
        self._room = asyncio.Event()
        self._running: concurrent.futures.Future[None] | None = None
        self._failure: BaseException | None = None
        self._claimed = self._ended = self._deserted = False

    # In the host's thread.

    def start(self, work: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply | None:
        """Starts the coroutine that makes the reply, and serves it until the reply is there.

        Args:
            work: Makes the reply. Where that streams, the stream is written after it.

        Returns:
            The reply; None where the client left.

        Raises:
            Exception: What the coroutine has raised.
        """
        self._running = submit(self._work(work))
        found = self._serve()
        if isinstance(found, Reply):
            return found
        if self._failure is None:
            return None
        if isinstance(self._failure, Exception):
            raise self._failure
        raise RuntimeError("a request was to end the process") from self._failure

    def __iter__(self) -> WSGIBridge:
        return self

    def __next__(self) -> bytes:
        self._claimed = True
        if self._serve() is not _PIECE:
            raise StopIteration
        piece = b"".join([self._pieces.popleft() for _ in range(len(self._pieces))])
        self._tell_loop(self._room.set)
        return piece

    def close(self) -> None:
        """Gives up: the backend is closed, and the record says so. Returns when that is done."""
        if self._running is not None and not self._ended:
            self.drop()
            self._deserted = False  # where it was torn away from here, it is back
            self._serve(within=_CLOSING_SECONDS)

    def drop(self) -> None:
        """Gives up without waiting, from any thread; also what nobody has begun to send, nor closed."""
        if self._running is not None:
            self._running.cancel()

    def _serve(self, within: float | None = None) -> Reply | _Sign:
        """Does what is asked for, until there is something to send, or the end."""
        look = time.monotonic() + _LOOK_SECONDS
        try:
            while not self._ended:
                order: _Order | Reply | _Sign | None
                try:
                    order = self._orders.get(timeout=_LOOK_SECONDS if within is None else within)
                except Empty:
                    if within is not None or self._loop.is_closed():
                        break
                    order = None
                if within is None and (order is None or time.monotonic() >= look):
                    look = time.monotonic() + _LOOK_SECONDS
                    if self._left():
                        self.drop()
                        within = _CLOSING_SECONDS
                if isinstance(order, _Order):
                    self._obey(order)
                elif order is _END:
                    self._ended = True
                elif order is not None and within is None and (order is not _PIECE or self._pieces):
                    return order
        except BaseException:  # such as the server's word that this thread has taken too long
            self.drop()
            self._desert()
            raise
        self._desert()
        return _END

    def _desert(self) -> None:
        """Nothing is called in this thread any more: whoever waits for that is told."""
        self._deserted = True
        with suppress(Empty):
            while True:
                order = self._orders.get_nowait()
                if isinstance(order, _Order):
                    self._tell_loop(_settle, order.done, None, ClientDisconnected())
        if self._ended:
            self._orders.put(_END)  # for whoever else waits for it

    def _obey(self, order: _Order) -> None:
        try:
            result = self.context.run(order.function, order.argument)
        except StopIteration as error:  # which no future takes, and no coroutine raises
            stopped = RuntimeError("a function of the host's raised StopIteration")
            stopped.__cause__ = error
            self._tell_loop(_settle, order.done, None, stopped)
        except Exception as error:
            self._tell_loop(_settle, order.done, None, error)
        except BaseException:
            self._tell_loop(_settle, order.done, None, ClientDisconnected())
            raise
        else:
            self._tell_loop(_settle, order.done, result, None)

    def _tell_loop(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # it has ended with the process, and nobody listens
            self._loop.call_soon_threadsafe(function, *args)

    # On the event loop.

    async def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        """Calls a function in the host's thread; see `surroundings.Call`.

        Raises:
            ClientGone: That thread has left the exchange.
        """
        done = self._loop.create_future()
        self._orders.put(_Order(function, argument, done))
        if self._deserted:  # looked at last, for it may have happened meanwhile
            raise ClientDisconnected
        look = self._loop.call_later(_LOOK_SECONDS, self._look, done, context=_NOWHERE)
        try:
            return await done
        finally:
            look.cancel()

    def _look(self, done: asyncio.Future[Any]) -> None:
        """Sees a client leave while the host's thread is busy."""
        if not done.done():
            if self._left():
                self.drop()
            else:
                self._loop.call_later(_LOOK_SECONDS, self._look, done, context=_NOWHERE)

    async def send(self, data: bytes) -> None:
        """Hands a piece to the host's thread."""
        if data == KEEP_ALIVE and self._pieces:
            return  # the thread is busy; what waits for it will do as well
        while len(self._pieces) >= _AHEAD:
            self._room.clear()
            await self._room.wait()
        self._pieces.append(data)
        self._orders.put(_PIECE)

    def _give_up_unclaimed(self) -> None:
        if not self._claimed:
            self.drop()

    async def _work(self, work: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
        replied = False
        current.set(self)
        try:
            reply = await work()
            replied = True
            self._orders.put(reply)
            if reply.stream is not None:
                unclaimed = self._loop.call_later(_CLAIM_SECONDS, self._give_up_unclaimed, context=_NOWHERE)
                try:
                    await reply.stream(self.send)
                finally:
                    unclaimed.cancel()
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit, too, which would end the loop, and with it everybody's requests
            if replied:
                logger.error("a stream failed", exc_info=error)
            else:
                self._failure = error
        finally:
            self._orders.put(_END)


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return  # whoever asked was cancelled
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
