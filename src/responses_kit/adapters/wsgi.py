"""What all WSGI frameworks share: a request's environment in, a reply out that streams by iteration (PEP 3333)."""

from __future__ import annotations

import errno
import functools
import selectors
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from wsgiref.util import is_hop_by_hop

from .._concurrency.loop_thread import start_kit
from ..errors import APIError, ClientDisconnected, InvalidRequest, UpgradeRequired
from ..http.messages import Body, Reply, Request
from ..http.open_responses import OpenResponses
from ..http.router import WireProtocol
from ..http.websocket import authorize, serve
from ..kit import ResponsesKit
from .wsgi_bridge import WSGIBridge

try:
    from .wsgi_websocket import upgrade
except ImportError:  # of what is not needed where nobody asks for WebSockets
    upgrade = None  # type: ignore[assignment]

__all__ = ["WSGIReply", "connection_taken_over", "handle_request", "serve_websocket"]

_PIECE: Final = 64 * 1024
"""Bytes of a body that are read at once."""


@dataclass(frozen=True, slots=True)
class WSGIReply:
    """What the framework is to send: `body`, or, where `pieces` is set, those as they come; at the end `close` them."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    pieces: WSGIBridge | None = None


def handle_request(
    dialect: WireProtocol,
    environ: Mapping[str, Any],
    *,
    path: str,
    host: Any,
    refusal: Callable[[Exception], APIError | None] = lambda error: None,
    read: Callable[[int], bytes] | None = None,
    kept: Callable[[], bytes] = bytes,
) -> WSGIReply:
    """Answers a request, from the thread that has it and is meanwhile at the kit's service.

    Its kit lives on this process's event loop from then on; see `blocking.enter`.

    Args:
        dialect: Answers.
        environ: WSGI's.
        path: Below the prefix.
        host: The framework's own request, for the owner hook, which is called in this thread.
        refusal: As in `http.Request`.
        read: Reads up to so many bytes of the body; by default from the environment.
        kept: The whole body, where the app has read it before and nothing comes any more.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    kit = dialect.kit
    start_kit(kit)
    headers = _headers(environ)
    connection = _connection(environ)
    if connection is not None:
        _bound_sending(connection, kit.settings.timeouts.send)
    exchange = WSGIBridge(_departure(environ, connection))
    source = read or _source(environ, headers)

    async def body() -> bytes:
        whole: bytes = await exchange.call(
            functools.partial(_body, headers, kit.settings.limits.max_body_bytes, refusal, kept), source
        )
        return whole

    request = Request(
        method=environ["REQUEST_METHOD"].upper(),
        path=path,
        query=environ.get("QUERY_STRING", ""),
        headers=headers,
        read=body,
        host=host,
        refusal=refusal,
        call=exchange.call,
    )

    async def answer() -> Reply:
        return await dialect.handle(request)

    reply = exchange.start(answer)
    if reply is None:
        return WSGIReply(499, {})  # goes nowhere: the client has left
    # PEP 3333 leaves what is between two ends of a connection to the server.
    headers_out = {name: value for name, value in reply.headers.items() if not is_hop_by_hop(name)}
    if reply.stream is None:
        return WSGIReply(reply.status, headers_out, reply.body)
    return WSGIReply(reply.status, headers_out, pieces=exchange)


def serve_websocket(
    kit: ResponsesKit,
    environ: Mapping[str, Any],
    *,
    host: Any,
    refusal: Callable[[Exception], APIError | None] = lambda error: None,
) -> WSGIReply | None:
    """Serves one WebSocket, over the connection that the server gives away; returns when it is closed.

    Args:
        kit: Answers the requests.
        environ: WSGI's, of a request that asks for an upgrade of `GET /responses`.
        host: As for `respond`.
        refusal: As for `respond`.

    Returns:
        What to answer instead, where the upgrade is refused, or the server, such as waitress, gives no connection
        away. None where the connection is used up: then end the request as if its client had left, by `connection_taken_over`.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    start_kit(kit)
    headers = _headers(environ)
    connection = _connection(environ)
    exchange = WSGIBridge()

    async def talk() -> Reply:
        try:
            if connection is None or isinstance(connection, ssl.SSLSocket) or upgrade is None:
                raise UpgradeRequired("There are no WebSockets on this server. POST instead.")
            secure = environ["wsgi.url_scheme"] == "https"
            owner = await authorize(kit, host, headers, refusal=refusal, call=exchange.call, secure=secure)
            socket = await upgrade(connection, headers, limit=kit.settings.limits.max_body_bytes)
        except APIError as error:
            return OpenResponses.render_error(error)
        await socket.close(await serve(kit, owner, receive=socket.receive, send=socket.send))
        return Reply(101, {})

    reply = exchange.start(talk)
    if reply is None or reply.status == 101:
        return None
    return WSGIReply(reply.status, reply.headers, reply.body)


def connection_taken_over() -> OSError:
    """What to raise out of the app where there is nothing more to send: servers take it for a client that has left."""
    return ConnectionResetError(errno.ECONNRESET, "the connection was a WebSocket")


def _headers(environ: Mapping[str, Any]) -> dict[str, str]:
    headers = {name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.replace("_", "-").lower()] = environ[name]
    return headers


def _source(environ: Mapping[str, Any], headers: Mapping[str, str]) -> Callable[[int], bytes]:
    """Reads the body, and nothing beyond it."""
    source = environ["wsgi.input"]
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        # In pieces of unknown number, which the server puts together, where it can and says so.
        whole: Callable[[int], bytes] = source.read
        return whole if environ.get("wsgi.input_terminated") else lambda size: b""
    left = int(length[:20])

    def read(size: int) -> bytes:
        nonlocal left
        piece: bytes = source.read(min(size, left))
        left -= len(piece)
        return piece

    return read


def _body(
    headers: Mapping[str, str],
    limit: int,
    refusal: Callable[[Exception], APIError | None],
    kept: Callable[[], bytes],
    read: Callable[[int], bytes],
) -> bytes:
    body = Body(headers, limit=limit)
    size = 0
    try:
        while piece := read(_PIECE) or (b"" if size else kept()):
            size += len(piece)
            body.feed(piece)
    except OSError:
        raise ClientDisconnected from None
    except Exception as error:
        if isinstance(error, APIError) or refusal(error) is not None:
            raise
        # Such as gunicorn's, of chunks that are none.
        raise InvalidRequest("The body could not be read.", code="invalid_body") from error
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and size < int(declared[:20]):
        # The client has left, and hears nothing; or the app has read the body, and has not kept it.
        raise InvalidRequest("The body is shorter than its Content-Length says.", code="invalid_body")
    return body.finish()


def _connection(environ: Mapping[str, Any]) -> socket.socket | None:
    """The client's connection, where the server gives it away."""
    connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
    return connection if isinstance(connection, socket.socket) else None


def _bound_sending(connection: socket.socket, seconds: float) -> None:
    """Has sending fail to a client that reads nothing for so long, or it would hold the host's thread for ever."""
    if hasattr(socket, "SO_SNDTIMEO") and connection.gettimeout() is None:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _departure(environ: Mapping[str, Any], connection: socket.socket | None) -> Callable[[], bool]:
    """Tells whether the client has left, where the server gives away what is needed to know it."""
    told = environ.get("waitress.client_disconnected")
    if callable(told):
        return lambda: bool(told())
    if connection is not None and hasattr(socket, "MSG_DONTWAIT"):
        return functools.partial(_is_closed, connection)
    return lambda: False


def _is_closed(connection: socket.socket) -> bool:
    try:
        with selectors.DefaultSelector() as selector:  # where the socket has a timeout, it would be waited out
            selector.register(connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ValueError:  # of TLS there is no peeking
        return False
    except OSError:
        return True
