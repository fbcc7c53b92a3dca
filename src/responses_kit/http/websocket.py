"""WebSocket sessions, without a web framework (specification, "WebSocket Transport").

For an upgrade of `GET /responses` a host calls `authorize`, accepts the WebSocket, calls `serve_session`, and closes
the WebSocket with the code that it returns. Each text frame from the client is one request
`{"type": "response.create", ...}` with the fields of `POST /responses`; its events are sent as text frames. Requests
are answered one after another. The last frame of each answer is the response's terminal event, or an `error` if no
response was created.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.lowlevel

from .._concurrency.tasks import open_task_group
from ..engine.hooks import HostCaller, call_on_event_loop
from ..engine.run import Run
from ..errors import (
    APIError,
    ClientDisconnected,
    Forbidden,
    InvalidRequest,
    PayloadTooLarge,
    ServerError,
    StoreError,
    TooManyRequests,
    WebSocketLimitReached,
    WebSocketsUnavailable,
)
from ..kit import ResponsesKit
from ..protocol.sse import encode_json, encode_sse
from ..protocol.state_machine import TERMINAL_EVENT_TYPES, Event
from ..protocol.validation import parse_json, parse_request
from ..stores.memory import MemoryStore
from ..stores.protocol import Log, Record

__all__ = ["Receive", "Send", "authorize", "serve_session"]

logger = logging.getLogger("responses_kit")

Receive = Callable[[], Awaitable[str | bytes]]
"""Returns the next frame, text as str and binary as bytes. Raises `ClientDisconnected` if the client has left."""

Send = Callable[[str], Awaitable[None]]
"""Sends a text frame. Raises `OSError` or `ClientDisconnected` if the client has left."""

_MAX_PENDING_FRAMES: Final = 32
"""Requests that may wait in one session; further ones are refused. Their bytes are limited to `max_body_bytes`."""

_MAX_LOCAL_RECORDS: Final = 1000
"""Responses with `store: false` that one session caches; the least recently used are evicted."""

_MAX_LOCAL_BYTES: Final = 16 * 1024 * 1024
"""Bytes of the responses with `store: false` that one session caches; the least recently used are evicted."""

_MAX_TOTAL_BYTES: Final = 512 * 1024 * 1024
"""Bytes of waiting requests and cached responses in all sessions of a kit.

Beyond it further requests are refused, and sessions drop their cached responses.
"""

_GRACE_TIMEOUT: Final = 300.0
"""Seconds that a response may take after the session's time limit; then it is cancelled."""

_NORMAL, _GOING_AWAY, _TRY_AGAIN_LATER = 1000, 1001, 1013


class _OpenSessions:
    """The open sessions of one kit, and the bytes that they hold."""

    def __init__(self) -> None:
        self.sessions: set[_Session] = set()
        self.bytes = 0


_OPEN_SESSIONS: weakref.WeakKeyDictionary[ResponsesKit, _OpenSessions] = weakref.WeakKeyDictionary()


def _open_sessions(kit: ResponsesKit) -> _OpenSessions:
    return _OPEN_SESSIONS.setdefault(kit, _OpenSessions())


async def authorize(
    kit: ResponsesKit,
    host_request: Any,
    headers: Mapping[str, str],
    *,
    translate_error: Callable[[Exception], APIError | None] = lambda error: None,
    call_hook: HostCaller = call_on_event_loop,
    is_secure: bool = False,
) -> str:
    """Return the owner of a new session, or raise if the upgrade must be refused.

    Args:
        kit: Answers the requests.
        host_request: The host's own request object, for the owner hook.
        headers: The upgrade request's headers, with names in lower case.
        translate_error: See `Request.translate_error`.
        call_hook: See `Request.call_hook`.
        is_secure: Whether the client is known to use TLS. Then an origin without TLS is not the server's own, because
            its pages can be forged.

    Raises:
        Forbidden: The page is of another origin. Browsers send cookies with any WebSocket handshake, so that only the
            `Origin` header prevents foreign pages from acting for the user (RFC 6455, 10.2).
        WebSocketsUnavailable: Too many sessions are open, or the server is shutting down.
        APIError: The owner hook refused the request.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and not _is_allowed_origin(origin, host, kit.settings.allowed_origins, is_secure):
        raise Forbidden(
            "The request's 'Origin' is not allowed. The server's setting 'allowed_origins' can permit it.",
            code="origin_not_allowed",
        )
    try:
        owner = await kit.service.resolve_owner(host_request, call_hook)
    except APIError:
        raise
    except Exception as error:
        if (translated := translate_error(error)) is not None:
            raise translated from None
        logger.error("a WebSocket upgrade failed", exc_info=error)
        raise ServerError("The server failed. Its log has the reason.") from None
    if kit.lifecycle.is_closing:
        raise WebSocketsUnavailable("The server is shutting down. Connect again later.")
    if len(_open_sessions(kit).sessions) >= kit.settings.limits.max_websockets:
        raise WebSocketsUnavailable(
            "Too many WebSockets are open. Connect again later, or use POST.", headers={"Retry-After": "1"}
        )
    return owner


def _is_allowed_origin(origin: str, host: str, allowed: Set[str], is_secure: bool) -> bool:
    if "*" in allowed or origin.lower() in allowed:
        return True
    # Behind a proxy that terminates TLS, the page's scheme differs from the one that this server sees.
    scheme, _, address = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    if is_secure and scheme == "http":
        return False
    return port is not None and bool(address) and address.removesuffix(port) == host.lower().removesuffix(port)


async def serve_session(kit: ResponsesKit, owner: str, *, receive: Receive, send: Send) -> int | None:
    """Answer a WebSocket's requests until the client leaves, the time limit is reached or the server shuts down.

    Args:
        kit: Answers the requests.
        owner: The owner of the requests; see `authorize`.
        receive: Receives frames; also called while a frame is being sent.
        send: Sends one frame at a time.

    Returns:
        The code to close the WebSocket with, or None if the client has already left.
    """
    open_sessions = _open_sessions(kit)
    if len(open_sessions.sessions) >= kit.settings.limits.max_websockets:
        return _TRY_AGAIN_LATER
    session = _Session(kit, owner, receive, send)
    open_sessions.sessions.add(session)
    try:
        return await session.run()
    finally:
        open_sessions.sessions.discard(session)
        session.release()


class _SessionStore(MemoryStore):
    """A session's cache of responses with `store: false`. Records that are too large are dropped."""

    async def create(self, owner: str, record: Record) -> Record | None:
        with suppress(StoreError):
            await super().create(owner, record)
        return None

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        try:
            return await super().update(owner, record, log)
        except StoreError:
            await self.delete(owner, record.id)
            return False


@dataclass(slots=True)
class _PendingFrame:
    """A frame that has not been answered yet.

    Attributes:
        data: The request, unless there is an error.
        error: The error to reply with.
        repeats: Number of consecutive frames that get this error.
    """

    data: bytes = b""
    error: APIError | None = None
    repeats: int = 1


class _Session:
    """One open WebSocket."""

    def __init__(self, kit: ResponsesKit, owner: str, receive: Receive, send: Send) -> None:
        self._kit, self._owner = kit, owner
        self._receive, self._send_text = receive, send
        self._open_sessions = _open_sessions(kit)
        self._local = _SessionStore(max_records=_MAX_LOCAL_RECORDS, max_bytes=_MAX_LOCAL_BYTES, ttl=math.inf)
        self._local_bytes = 0
        self._pending: deque[_PendingFrame] = deque()
        self._pending_bytes = 0
        self._wake_up = anyio.Event()
        self._deadline = anyio.current_time() + kit.settings.timeouts.websocket
        self._scope = anyio.CancelScope()
        self._run: Run | None = None
        self._last_event_type = ""
        self._is_disconnected = False
        self._sent = 0
        self._is_sending = False

    async def run(self) -> int | None:
        code = None
        with self._scope:
            async with open_task_group() as group:
                for task in (self._receive_frames, self._watch_sending, self._wait_closing):
                    group.start_soon(task)
                try:
                    code = await self._process_frames()
                except ClientDisconnected:
                    pass
                finally:
                    group.cancel_scope.cancel()
        return None if self._is_disconnected else code

    def release(self) -> None:
        """Subtract this session's bytes from the kit's total."""
        self._open_sessions.bytes -= self._pending_bytes + self._local_bytes
        self._pending_bytes = self._local_bytes = 0

    def _count_local_bytes(self) -> None:
        """Update the kit's total; drop this session's cache if the total is too large."""
        self._open_sessions.bytes += self._local.size - self._local_bytes
        self._local_bytes = self._local.size
        if self._open_sessions.bytes > _MAX_TOTAL_BYTES:
            self._open_sessions.bytes -= self._local_bytes
            self._local_bytes = 0
            self._local = _SessionStore(max_records=_MAX_LOCAL_RECORDS, max_bytes=_MAX_LOCAL_BYTES, ttl=math.inf)

    async def _process_frames(self) -> int:
        while (frame := await self._next_frame()) is not None:
            with anyio.CancelScope(deadline=self._deadline + _GRACE_TIMEOUT):
                await self._process(frame)
            self._count_local_bytes()
        if self._kit.lifecycle.is_closing:
            return _GOING_AWAY
        await self._send_error(
            WebSocketLimitReached("This WebSocket has reached its time limit. Open a new one to continue.")
        )
        return _NORMAL

    # Receiving. It never waits for sending, so that a disconnect is noticed at any time.

    async def _receive_frames(self) -> None:
        try:
            while True:
                self._enqueue(await self._receive())
        except ClientDisconnected:
            pass
        except Exception as error:
            logger.warning("receiving from a WebSocket failed", exc_info=error)
        self._disconnect()

    def _enqueue(self, frame: str | bytes) -> None:
        max_bytes = self._kit.settings.limits.max_body_bytes
        if isinstance(frame, bytes):
            pending = _PendingFrame(error=InvalidRequest("Frames must be text, not binary."))
        else:
            pending = _PendingFrame(frame.encode("utf-8", "surrogatepass"))
            if len(pending.data) > max_bytes:
                pending = _PendingFrame(error=PayloadTooLarge(f"A frame must not be larger than {max_bytes} bytes."))
        size = len(pending.data)
        is_full = len(self._pending) >= _MAX_PENDING_FRAMES or self._pending_bytes + size > max_bytes
        if is_full or self._open_sessions.bytes + size > _MAX_TOTAL_BYTES:
            last = self._pending[-1] if self._pending else _PendingFrame()
            if isinstance(last.error, TooManyRequests):
                last.repeats += 1  # so that refused frames occupy no memory
                return
            pending = _PendingFrame(
                error=TooManyRequests("Too many requests wait on this WebSocket. Wait for a response, then send again.")
            )
        self._pending.append(pending)
        self._pending_bytes += len(pending.data)
        self._open_sessions.bytes += len(pending.data)
        self._wake_up.set()

    async def _next_frame(self) -> _PendingFrame | None:
        """Return the next frame, or None at the time limit or the server's shutdown."""
        while not self._kit.lifecycle.is_closing and anyio.current_time() < self._deadline:
            if self._pending:
                frame = self._pending.popleft()
                self._pending_bytes -= len(frame.data)
                self._open_sessions.bytes -= len(frame.data)
                return frame
            self._wake_up = anyio.Event()
            with anyio.CancelScope(deadline=self._deadline):
                await self._wake_up.wait()
        return None

    async def _wait_closing(self) -> None:
        await self._kit.lifecycle.wait_closing()
        self._wake_up.set()

    # Responding.

    async def _process(self, frame: _PendingFrame) -> None:
        if frame.error is not None:
            for _ in range(frame.repeats):
                await self._send_error(frame.error)
                await anyio.lowlevel.checkpoint()  # sending need not yield, and there may be many
            return
        previous = None
        try:
            body = _parse_frame(frame.data)
            frame.data = b""  # release the memory while the response is generated
            previous = body.get("previous_response_id")
            failed = await self._respond(body)
        except APIError as error:
            failed = True
            await self._send_error(error)
        if failed and isinstance(previous, str):
            await self._local.delete(self._owner, previous)

    async def _respond(self, body: dict[str, Any]) -> bool:
        """Generate a response; return whether it failed."""
        generate = body.pop("generate", None)
        if generate is not None and not isinstance(generate, bool):
            raise InvalidRequest("'generate' must be true or false.", param="generate")
        try:
            self._run = await self._kit.service.create_run(
                parse_request(body),
                owner=self._owner,
                streamed=True,
                local=self._local,
                generate=generate is not False,
                error_events=False,
            )
            self._last_event_type = ""
            await self._run.execute(self._emit)
            if self._last_event_type not in TERMINAL_EVENT_TYPES and not self._is_disconnected:
                # Without a last frame the client would wait forever, because the WebSocket stays open.
                raise ServerError("The response ended unexpectedly. Create a new one.")
            return self._run.error is not None
        except APIError:
            raise
        except Exception as error:
            logger.error("the request failed", exc_info=error)
            raise ServerError("The server failed. Its log has the reason.") from None
        finally:
            self._run = None

    async def _emit(self, events: list[Event]) -> None:
        for event in events:
            # The data line of the encoded event; JSON has no raw line breaks.
            await self._send_frame(encode_sse(event).partition(b"\ndata: ")[2][:-2].decode())
        self._last_event_type = events[-1]["type"]

    async def _send_error(self, error: APIError) -> None:
        frame = {"type": "error", "status": error.status, "error": error.payload()}
        await self._send_frame(encode_json(frame).decode())

    # Sending.

    async def _send_frame(self, text: str) -> None:
        if self._is_disconnected:
            raise ClientDisconnected
        self._is_sending = True
        try:
            await self._send_text(text)
        except Exception as error:
            if not isinstance(error, (OSError, ClientDisconnected)):
                logger.warning("sending to a WebSocket failed", exc_info=error)
            self._disconnect()
            raise ClientDisconnected from None
        finally:
            self._is_sending = False
        self._sent += 1

    async def _watch_sending(self) -> None:
        """Disconnect if a frame is not sent within the send timeout."""
        stalled_checks = 0
        while stalled_checks < 4:
            sent, was_sending = self._sent, self._is_sending
            await anyio.sleep(self._kit.settings.timeouts.send / 4)
            stalled_checks = stalled_checks + 1 if was_sending and sent == self._sent else 0
        self._disconnect()

    def _disconnect(self) -> None:
        self._is_disconnected = True
        if self._run is not None:
            self._run.abort()
        self._scope.cancel()


def _parse_frame(frame: bytes) -> dict[str, Any]:
    """Return the request in a frame, without the members that select the transport.

    Raises:
        InvalidRequest: The frame is not a request.
    """
    body = parse_json(frame)
    if not isinstance(body, dict):
        raise InvalidRequest('A frame must be a JSON object with the type "response.create".')
    if body.pop("type", None) != "response.create":
        raise InvalidRequest("'type' must be 'response.create'.", param="type")
    body.pop("stream", None)  # not part of the protocol, but clients reuse their HTTP requests
    body.pop("stream_options", None)
    return body
