"""Code shared by ASGI hosts: WebSockets, streams that a framework pulls, and lifespans without startup events."""

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
from ..http.websocket import serve_session
from ..kit import ResponsesKit

__all__ = ["PullStream", "read_headers", "reject_websocket", "serve_websocket", "start_kit", "stop_kit"]

logger = logging.getLogger("responses_kit")

Message = MutableMapping[str, Any]


def read_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return a connection's headers, with names in lower case."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    if sum(name.lower() == b"origin" for name, _ in scope["headers"]) > 1:
        headers["origin"] = "null"  # browsers send one (RFC 6454, 7.3): another one was added
    return headers


async def serve_websocket(
    kit: ResponsesKit,
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
    *,
    authorize: Callable[[], Awaitable[str]],
) -> None:
    """Accept or reject a WebSocket, and serve its session.

    Args:
        kit: Answers the requests.
        scope: The connection's ASGI scope.
        receive: The connection's ASGI `receive`.
        send: The connection's ASGI `send`.
        authorize: Returns the owner of the session, or raises an `APIError` to reject it; see `websocket.authorize`.
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
        except RuntimeError as error:  # raised by servers after they have closed the connection
            raise ClientDisconnected from error

    if (await receive())["type"] != "websocket.connect":
        return
    with suppress(OSError):  # the client may leave at any time
        try:
            owner = await authorize()
        except APIError as error:
            await _reject(scope, send, OpenResponses.render_error(error))
            return
        await send({"type": "websocket.accept"})
        code = await serve_session(kit, owner, receive=next_frame, send=send_frame)
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
    """Reject the upgrade to a WebSocket.

    Args:
        scope: The connection's ASGI scope.
        receive: The connection's ASGI `receive`.
        send: The connection's ASGI `send`.
        reply: The reply to send, if the server supports the extension `websocket.http.response`; otherwise a bare 403.
    """
    if (await receive())["type"] == "websocket.connect":
        with suppress(OSError):  # the client may leave at any time
            await _reject(scope, send, reply)


async def _reject(scope: Mapping[str, Any], send: Callable[[Message], Awaitable[None]], reply: Reply) -> None:
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close"})  # servers reply with a bare 403
        return
    headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
    headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": reply.body})


_FIRST_PULL_TIMEOUT: Final = 30.0
"""Seconds until a stream that was never pulled is cancelled, as after a failure in the framework's middleware."""


class PullStream:
    """A reply's stream as an async iterator, for frameworks on asyncio that pull it.

    The stream is written in a task of its own, which waits until each piece has been pulled and sent. Closing the
    iterator cancels the task.

    Args:
        stream: See `Reply.stream`.
    """

    def __init__(self, stream: Callable[[Send], Awaitable[None]]) -> None:
        self._stream = stream
        self._task: asyncio.Task[None] | None = None
        self._piece: bytes | None = None
        self._is_abandoned = self._is_finished = False
        self._piece_ready, self._pulled, self._send_lock = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._first_pull_timer = self._loop.call_later(_FIRST_PULL_TIMEOUT, self._cancel)

    def __aiter__(self) -> PullStream:
        return self

    async def __anext__(self) -> bytes:
        if self._task is None:
            self._start()
        self._pulled.set()
        while self._piece is None and not self._is_finished:
            self._piece_ready.clear()
            await self._piece_ready.wait()
        piece, self._piece = self._piece, None
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Cancel the stream, and wait until the backend is closed and the response saved."""
        task = self._cancel()
        if not task.done():
            await asyncio.wait([task])

    def cancel(self) -> None:
        """Cancel the stream without waiting; callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and its tasks with it
            self._loop.call_soon_threadsafe(self._cancel)

    close = cancel

    def _start(self, context: contextvars.Context | None = None) -> asyncio.Task[None]:
        self._first_pull_timer.cancel()
        self._task = self._loop.create_task(self._write(), context=context)
        self._task.add_done_callback(self._on_done)  # called even if the task is cancelled before its first step
        return self._task

    def _cancel(self) -> asyncio.Task[None]:
        if self._task is None:  # the run must be finished even if its stream was never pulled
            self._is_abandoned = True
            return self._start(contextvars.Context())
        if not self._is_abandoned:
            self._task.cancel()
        return self._task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._is_finished = True
        self._piece_ready.set()

    async def _write(self) -> None:
        try:
            await self._stream(self._send)
        except Exception as error:
            logger.error("a stream failed", exc_info=error)

    async def _send(self, data: bytes) -> None:
        if self._is_abandoned:
            raise ClientDisconnected
        async with self._send_lock:
            await self._pulled.wait()
            self._pulled.clear()
            self._piece = data
            self._piece_ready.set()
            await self._pulled.wait()  # the next pull: the piece has been sent


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Lifetime:
    """A kit's lifespan on one event loop."""

    started: asyncio.Future[None]
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


_LIFETIMES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ResponsesKit, _Lifetime]] = (
    weakref.WeakKeyDictionary()
)


async def start_kit(kit: ResponsesKit, *, grace: float = 10.0) -> None:
    """Start a kit on the running asyncio event loop, until `stop_kit` or the loop's end.

    For frameworks without startup events. Returns when the kit has started; further calls return at once.
    `_concurrency.loop_thread.start_kit` is the counterpart for synchronous hosts, on the process's own loop.

    Args:
        kit: The kit.
        grace: Seconds that runs may continue after a signal; see `ResponsesKit.lifespan`.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    loop = asyncio.get_running_loop()
    lifetimes = _LIFETIMES.setdefault(loop, {})
    lifetime = lifetimes.get(kit)
    if lifetime is None:
        lifetime = lifetimes[kit] = _Lifetime(loop.create_future())
        spawn(_run_lifespan, kit, grace, lifetimes, lifetime)
    if not lifetime.started.done() or lifetime.started.exception() is not None:
        await asyncio.shield(lifetime.started)


async def stop_kit(kit: ResponsesKit) -> None:
    """Stop a kit on the running event loop, if it was started there, and wait for it."""
    lifetime = _LIFETIMES.get(asyncio.get_running_loop(), {}).get(kit)
    if lifetime is not None:
        lifetime.stop_requested.set()
        await lifetime.stopped.wait()


async def _run_lifespan(
    kit: ResponsesKit, grace: float, lifetimes: dict[ResponsesKit, _Lifetime], lifetime: _Lifetime
) -> None:
    try:
        async with kit.lifespan(grace=grace):
            lifetime.started.set_result(None)
            await lifetime.stop_requested.wait()
    except Exception as error:
        if lifetime.started.done():
            raise
        lifetime.started.set_exception(error)
    finally:
        del lifetimes[kit]  # so that the next call tries again
        lifetime.stopped.set()
