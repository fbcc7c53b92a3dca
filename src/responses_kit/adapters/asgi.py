"""What ASGI frameworks share, with none of them in it: WebSockets, and streams for those who pull them."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from .._concurrency.tasks import spawn
from ..errors import APIError, ClientDisconnected
from ..http.messages import Reply, Send
from ..http.open_responses import OpenResponses
from ..http.websocket import serve
from ..kit import ResponsesKit

__all__ = ["PullStream", "read_headers", "reject_websocket", "serve_websocket", "start_kit", "stop_kit"]

logger = logging.getLogger("responses_kit")

Message = MutableMapping[str, Any]


def read_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """A request's headers, names in lower case."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    if sum(name.lower() == b"origin" for name, _ in scope["headers"]) > 1:
        headers["origin"] = "null"  # no browser sends two: somebody added one
    return headers


async def serve_websocket(
    kit: ResponsesKit,
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
    *,
    admitted: Callable[[], Awaitable[str]],
) -> None:
    """Serves one WebSocket connection: the upgrade is refused or accepted, and the session's frames go to and fro.

    Args:
        kit: Answers the requests.
        scope: The connection's.
        receive: The connection's.
        send: The connection's.
        admitted: Whose socket it becomes; see `websocket.admit`. Raises an `APIError` to refuse it.
    """

    async def next_frame() -> str | bytes:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            raise ClientDisconnected
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send_frame(text: str) -> None:
        try:
            await send({"type": "websocket.send", "text": text})
        except RuntimeError as error:  # what servers raise where they have closed the socket by themselves
            raise ClientDisconnected from error

    if (await receive())["type"] != "websocket.connect":
        return
    with suppress(OSError):  # the client may leave at any time
        try:
            owner = await admitted()
        except APIError as error:
            await _refuse(scope, send, OpenResponses.render_error(error))
            return
        await send({"type": "websocket.accept"})
        code = await serve(kit, owner, receive=next_frame, send=send_frame)
        if code is not None:
            with anyio.move_on_after(kit.settings.timeouts.send):
                await send({"type": "websocket.close", "code": code})


async def reject_websocket(
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
    *,
    reply: Reply,
) -> None:
    """Refuses the upgrade to a WebSocket.

    Args:
        scope: The connection's.
        receive: The connection's.
        send: The connection's.
        reply: What is answered instead, as far as the server can.
    """
    if (await receive())["type"] == "websocket.connect":
        with suppress(OSError):  # the client may leave at any time
            await _refuse(scope, send, reply)


async def _refuse(scope: Mapping[str, Any], send: Callable[[Message], Awaitable[None]], reply: Reply) -> None:
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close"})  # which servers turn into a bare 403
        return
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
    headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": reply.body})


_CLAIM_SECONDS: Final = 30.0
"""How long a stream waits to be pulled at all; a framework's middleware may fail, and drop the reply."""


class PullStream:
    """A reply's stream for frameworks that pull it piece by piece; on asyncio.

    The stream is written in a task of its own, which goes on when the piece before has left: who stops pulling holds
    it up, and who closes ends it.

    Args:
        stream: `Reply.stream`.
    """

    def __init__(self, stream: Callable[[Send], Awaitable[None]]) -> None:
        self._stream = stream
        self._task: asyncio.Task[None] | None = None
        self._piece: bytes | None = None
        self._left = self._ended = False
        self._came, self._wanted, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._unclaimed = self._loop.call_later(_CLAIM_SECONDS, self._end)

    def __aiter__(self) -> PullStream:
        return self

    async def __anext__(self) -> bytes:
        if self._task is None:
            self._begin()
        self._wanted.set()
        while self._piece is None and not self._ended:
            self._came.clear()
            await self._came.wait()
        piece, self._piece = self._piece, None
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Ends the stream: the backend is closed, and the record says so. Returns when that is done."""
        task = self._end()
        if not task.done():
            await asyncio.wait([task])

    def drop(self) -> None:
        """The same from any thread, without waiting."""
        with suppress(RuntimeError):  # the loop is gone, and the task with it
            self._loop.call_soon_threadsafe(self._end)

    close = drop

    def _begin(self, context: contextvars.Context | None = None) -> asyncio.Task[None]:
        self._unclaimed.cancel()
        self._task = self._loop.create_task(self._write(), context=context)
        self._task.add_done_callback(self._over)  # which it calls even where it is cancelled before it has begun
        return self._task

    def _end(self) -> asyncio.Task[None]:
        if self._task is None:  # a run that nobody hears of has to come to its end, too
            self._left = True
            return self._begin(contextvars.Context())
        if not self._left:
            self._task.cancel()
        return self._task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._ended = True
        self._came.set()

    async def _write(self) -> None:
        try:
            await self._stream(self._put)
        except Exception as error:
            logger.error("a stream failed", exc_info=error)

    async def _put(self, data: bytes) -> None:
        if self._left:
            raise ClientDisconnected
        async with self._turn:
            await self._wanted.wait()
            self._wanted.clear()
            self._piece = data
            self._came.set()
            await self._wanted.wait()  # until it has left


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Life:
    """A kit's life on one event loop."""

    begun: asyncio.Future[None]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


_LIVES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ResponsesKit, _Life]] = weakref.WeakKeyDictionary()


async def start_kit(kit: ResponsesKit, *, grace: float = 10.0) -> None:
    """Has a kit live on the running event loop, from the first call on until the loop ends or `leave`; on asyncio.

    For frameworks that do not tell when they start.

    Args:
        kit: The kit.
        grace: As in `ResponsesKit.lifespan`.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    loop = asyncio.get_running_loop()
    lives = _LIVES.setdefault(loop, {})
    life = lives.get(kit)
    if life is None:
        life = lives[kit] = _Life(loop.create_future())
        spawn(_live, kit, grace, lives, life)
    if not life.begun.done() or life.begun.exception() is not None:
        await asyncio.shield(life.begun)


async def stop_kit(kit: ResponsesKit) -> None:
    """Ends the kit's life on the running event loop, if it has begun."""
    life = _LIVES.get(asyncio.get_running_loop(), {}).get(kit)
    if life is not None:
        life.over.set()
        await life.ended.wait()


async def _live(kit: ResponsesKit, grace: float, lives: dict[ResponsesKit, _Life], life: _Life) -> None:
    try:
        async with kit.lifespan(grace=grace):
            life.begun.set_result(None)
            await life.over.wait()
    except Exception as error:
        if life.begun.done():
            raise
        life.begun.set_exception(error)
    finally:
        del lives[kit]  # the next who enters tries again
        life.ended.set()
