"""A WebSocket session, with no framework in it (specification, "WebSocket Transport").

A host that is asked for an upgrade of `GET /responses` calls `admit`, accepts, and lets `serve` talk until it returns
the code to close with. Each text frame that the client sends is one request, `{"type": "response.create", ...}` with
the fields of `POST /responses`; its events go back as text frames. Requests are answered one after the other. To each
belongs exactly one last frame: the response's terminal event, or an `error` where no response was begun.
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
from ..protocol.state_machine import TERMINAL, Event
from ..protocol.validation import parse_json, parse_request
from ..stores.memory import MemoryStore
from ..stores.protocol import Log, Record

__all__ = ["Receive", "Send", "authorize", "serve"]

logger = logging.getLogger("responses_kit")

Receive = Callable[[], Awaitable[str | bytes]]
"""The next frame: a str if it is text, bytes if it is binary. Raises `ClientDisconnected` once the client has left."""

Send = Callable[[str], Awaitable[None]]
"""Puts one text frame on its way; raises `OSError` or `ClientDisconnected` if the client has left."""

_MOST_WAITING: Final = 32
"""Requests that may wait on one socket while another is answered; of bytes, as many as one request may have."""

_LOCAL_RECORDS, _LOCAL_BYTES = 1000, 16 * 1024 * 1024
"""What one socket remembers of responses that are not stored."""

_GRACE_SECONDS = 300.0
"""What a response may still take when the socket's time is over."""

_NORMAL, _GOING_AWAY, _TRY_AGAIN_LATER = 1000, 1001, 1013

_ALL_BYTES = 512 * 1024 * 1024
"""What all sockets of a kit may hold together, of frames that wait and of responses that are remembered."""


class _Sockets:
    """The open sockets of one kit, and the bytes that they hold together."""

    def __init__(self) -> None:
        self.open: set[_Session] = set()
        self.bytes = 0


_SOCKETS: weakref.WeakKeyDictionary[ResponsesKit, _Sockets] = weakref.WeakKeyDictionary()


def _sockets(kit: ResponsesKit) -> _Sockets:
    return _SOCKETS.setdefault(kit, _Sockets())


async def authorize(
    kit: ResponsesKit,
    host: Any,
    headers: Mapping[str, str],
    *,
    refusal: Callable[[Exception], APIError | None] = lambda error: None,
    call: HostCaller = call_on_event_loop,
    secure: bool = False,
) -> str:
    """Whether a client may open a socket, asked before the upgrade is accepted; whose responses it may see.

    Args:
        kit: Answers the requests.
        host: The host's own request object, for the owner hook.
        headers: Those of the upgrade request, names in lower case.
        refusal: As in `http.Request`.
        call: As in `http.Request`.
        secure: Whether the client is known to use TLS. Then a page that came without it is another's: anybody on the
            way could have put it there.

    Raises:
        Forbidden: A page of another site asks. Browsers send cookies along with whatever page opens a socket, so
            that nothing but the `Origin` header keeps such pages from acting for the user.
        SocketsUnavailable: There are enough sockets, or the server is shutting down.
        APIError: What the owner hook says.
    """
    origin = headers.get("origin")
    if origin is not None and not _is_welcome(origin, headers.get("host", ""), kit.settings.allowed_origins, secure):
        raise Forbidden(
            "Pages of other sites may not connect. The server's owner can add the origin to allowed_origins.",
            code="origin_not_allowed",
        )
    try:
        owner = await kit.service.resolve_owner(host, call)
    except APIError:
        raise
    except Exception as error:
        if (refused := refusal(error)) is not None:
            raise refused from None
        logger.error("the request for a socket failed", exc_info=error)
        raise ServerError("The server failed. Its log has the reason.") from None
    if kit.lifecycle.is_closing:
        raise WebSocketsUnavailable("The server is shutting down. Connect again later.")
    if len(_sockets(kit).open) >= kit.settings.limits.max_websockets:
        raise WebSocketsUnavailable(
            "All sockets are taken. Connect again later, or use POST.", headers={"Retry-After": "1"}
        )
    return owner


def _is_welcome(origin: str, host: str, allowed: Set[str], secure: bool) -> bool:
    if "*" in allowed or origin.lower() in allowed:
        return True
    # Behind a proxy that ends TLS, a page has https where this server sees http.
    scheme, _, address = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    if secure and scheme == "http":
        return False
    return port is not None and bool(address) and address.removesuffix(port) == host.lower().removesuffix(port)


async def serve(kit: ResponsesKit, owner: str, *, receive: Receive, send: Send) -> int | None:
    """Answers what comes over an open socket, until the client leaves, the time is up or the server goes down.

    Args:
        kit: Answers the requests.
        owner: Whose they are; see `admit`.
        receive: Called again and again, also while something is sent.
        send: Called for one frame at a time.

    Returns:
        The code to close the socket with, or None where the client has left already.
    """
    sockets = _sockets(kit)
    if len(sockets.open) >= kit.settings.limits.max_websockets:
        return _TRY_AGAIN_LATER
    session = _Session(kit, owner, receive, send)
    sockets.open.add(session)
    try:
        return await session.run()
    finally:
        sockets.open.discard(session)
        session.let_go()


class _Memory(MemoryStore):
    """What one socket remembers. What is too large for it is forgotten: nobody asked for it to be stored."""

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
class _Waiting:
    """What a client has sent: a request's bytes, or what is wrong with it, or with so many in a row."""

    frame: bytes = b""
    error: APIError | None = None
    times: int = 1


class _Session:
    """One open socket."""

    def __init__(self, kit: ResponsesKit, owner: str, receive: Receive, send: Send) -> None:
        self._kit, self._owner = kit, owner
        self._receive, self._put = receive, send
        self._all = _sockets(kit)
        self._local = _Memory(max_records=_LOCAL_RECORDS, max_bytes=_LOCAL_BYTES, ttl=math.inf)
        self._remembered = 0
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._came = anyio.Event()
        self._until = anyio.current_time() + kit.settings.timeouts.websocket
        self._scope = anyio.CancelScope()
        self._run: Run | None = None
        self._last = ""
        self._gone = False
        self._sent = 0
        self._sending = False

    async def run(self) -> int | None:
        code = None
        with self._scope:
            async with open_task_group() as group:
                for work in (self._read, self._watch, self._await_closing):
                    group.start_soon(work)
                try:
                    code = await self._answer()
                except ClientDisconnected:
                    pass
                finally:
                    group.cancel_scope.cancel()
        return None if self._gone else code

    def let_go(self) -> None:
        """What it holds is held no more."""
        self._all.bytes -= self._bytes + self._remembered
        self._bytes = self._remembered = 0

    def _remember(self) -> None:
        """Counts what is remembered; where all sockets together hold too much, this one forgets."""
        self._all.bytes += self._local.size - self._remembered
        self._remembered = self._local.size
        if self._all.bytes > _ALL_BYTES:
            self._all.bytes -= self._remembered
            self._remembered = 0
            self._local = _Memory(max_records=_LOCAL_RECORDS, max_bytes=_LOCAL_BYTES, ttl=math.inf)

    async def _answer(self) -> int:
        while (waiting := await self._next()) is not None:
            with anyio.CancelScope(deadline=self._until + _GRACE_SECONDS):
                await self._turn(waiting)
            self._remember()
        if self._kit.lifecycle.is_closing:
            return _GOING_AWAY
        await self._say(WebSocketLimitReached("This socket has reached its time limit. Open a new one to continue."))
        return _NORMAL

    # Reading, which never waits for an answer to be sent: that is how a client's leaving is seen.

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._receive())
        except ClientDisconnected:
            pass
        except Exception as error:
            logger.warning("a socket could not be read", exc_info=error)
        self._leave()

    def _take(self, frame: str | bytes) -> None:
        if isinstance(frame, bytes):
            waiting = _Waiting(error=InvalidRequest("Send text frames. Binary ones have no meaning here."))
        else:
            waiting = _Waiting(frame.encode("utf-8", "surrogatepass"))
            if len(waiting.frame) > self._kit.settings.limits.max_body_bytes:
                waiting = _Waiting(
                    error=PayloadTooLarge(
                        f"The frame is larger than the {self._kit.settings.limits.max_body_bytes} bytes that this server accepts."
                    )
                )
        size = len(waiting.frame)
        full = len(self._waiting) >= _MOST_WAITING or self._bytes + size > self._kit.settings.limits.max_body_bytes
        if full or self._all.bytes + size > _ALL_BYTES:
            last = self._waiting[-1] if self._waiting else _Waiting()
            if isinstance(last.error, TooManyRequests):
                last.times += 1  # so that those that are refused take no place
                return
            waiting = _Waiting(
                error=TooManyRequests("Too many requests wait on this socket. Send the next one after an answer.")
            )
        self._waiting.append(waiting)
        self._bytes += len(waiting.frame)
        self._all.bytes += len(waiting.frame)
        self._came.set()

    async def _next(self) -> _Waiting | None:
        """What is to be answered next, or None when there shall be no more."""
        while not self._kit.lifecycle.is_closing and anyio.current_time() < self._until:
            if self._waiting:
                waiting = self._waiting.popleft()
                self._bytes -= len(waiting.frame)
                self._all.bytes -= len(waiting.frame)
                return waiting
            self._came = anyio.Event()
            with anyio.CancelScope(deadline=self._until):
                await self._came.wait()
        return None

    async def _await_closing(self) -> None:
        await self._kit.lifecycle.wait_closing()
        self._came.set()

    # Answering.

    async def _turn(self, waiting: _Waiting) -> None:
        if waiting.error is not None:
            for _ in range(waiting.times):
                await self._say(waiting.error)
                await anyio.lowlevel.checkpoint()  # there may be many, and sending need not wait
            return
        previous = None
        try:
            body = _request(waiting.frame)
            waiting.frame = b""  # it may be large, and the response takes long
            previous = body.get("previous_response_id")
            failed = await self._respond(body)
        except APIError as error:
            failed = True
            await self._say(error)
        if failed and isinstance(previous, str):
            await self._local.delete(self._owner, previous)

    async def _respond(self, body: dict[str, Any]) -> bool:
        """Makes a response; whether it has failed."""
        generate = body.pop("generate", None)
        if generate is not None and not isinstance(generate, bool):
            raise InvalidRequest("generate: must be true or false.", param="generate")
        try:
            self._run = await self._kit.service.create_run(
                parse_request(body),
                owner=self._owner,
                streamed=True,
                local=self._local,
                generate=generate is not False,
                error_events=False,
            )
            self._last = ""
            await self._run.execute(self._tell)
            if self._last not in TERMINAL and not self._gone:
                # Over HTTP the stream would end here. A socket goes on, and the client would wait for ever.
                raise ServerError("The response came to no end. Create a new one.")
            return self._run.error is not None
        except APIError:
            raise
        except Exception as error:
            logger.error("the request failed", exc_info=error)
            raise ServerError("The server failed. Its log has the reason.") from None
        finally:
            self._run = None

    async def _tell(self, events: list[Event]) -> None:
        for event in events:
            # The data line alone. No line in it is broken, and no name of an event has a space.
            await self._send(encode_sse(event).partition(b"\ndata: ")[2][:-2].decode())
        self._last = events[-1]["type"]

    async def _say(self, error: APIError) -> None:
        frame = {"type": "error", "status": error.status, "error": error.payload()}
        await self._send(encode_json(frame).decode())

    # Sending.

    async def _send(self, text: str) -> None:
        if self._gone:
            raise ClientDisconnected
        self._sending = True
        try:
            await self._put(text)
        except Exception as error:
            if not isinstance(error, (OSError, ClientDisconnected)):
                logger.warning("a socket could not be written", exc_info=error)
            self._leave()
            raise ClientDisconnected from None
        finally:
            self._sending = False
        self._sent += 1

    async def _watch(self) -> None:
        """Takes a client that reads nothing for gone."""
        unread = 0
        while unread < 4:
            sent = self._sent
            await anyio.sleep(self._kit.settings.timeouts.send / 4)
            unread = unread + 1 if self._sending and sent == self._sent else 0
        self._leave()

    def _leave(self) -> None:
        self._gone = True
        if self._run is not None:
            self._run.abort()
        self._scope.cancel()


def _request(frame: bytes) -> dict[str, Any]:
    """The request in a frame, without what says how to send the answer.

    Raises:
        InvalidRequest: It is none.
    """
    body = parse_json(frame)
    if not isinstance(body, dict):
        raise InvalidRequest('A frame is a JSON object with the type "response.create".')
    if body.pop("type", None) != "response.create":
        raise InvalidRequest('type: must be "response.create".', param="type")
    body.pop("stream", None)  # the specification forbids them; but clients send what they send over HTTP
    body.pop("stream_options", None)
    return body
