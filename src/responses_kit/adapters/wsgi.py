"""Code shared by WSGI hosts (PEP 3333): from a request's environment to a reply that streams by iteration."""

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
from ..http.websocket import authorize, serve_session
from ..kit import ResponsesKit
from .wsgi_bridge import WSGIBridge

try:
    from .wsgi_websocket import upgrade
except ImportError:  # an optional dependency, for WebSockets only
    upgrade = None  # type: ignore[assignment]

__all__ = ["WSGIReply", "connection_taken_over", "handle_request", "serve_websocket"]

_CHUNK_BYTES: Final = 64 * 1024
"""Bytes of a body that are read in one call."""


@dataclass(frozen=True, slots=True)
class WSGIReply:
    """The reply for the framework to send.

    Attributes:
        status: The status code.
        headers: The headers.
        body: The whole body, unless `stream` is set.
        stream: An iterator of the body's pieces; call its `close` at the end.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: WSGIBridge | None = None


def handle_request(
    protocol: WireProtocol,
    environ: Mapping[str, Any],
    *,
    path: str,
    host_request: Any,
    translate_error: Callable[[Exception], APIError | None] = lambda error: None,
    read: Callable[[int], bytes] | None = None,
    read_buffered: Callable[[], bytes] = bytes,
) -> WSGIReply:
    """Answer a request from its thread, in which the kit calls the host's functions meanwhile.

    Starts the kit on this process's event loop; see `_concurrency.loop_thread.start_kit`.

    Args:
        protocol: The wire protocol.
        environ: The WSGI environment.
        path: The path below the prefix.
        host_request: The framework's own request, for the owner hook, which is called in this thread.
        translate_error: See `http.messages.Request`.
        read: Reads up to the given number of bytes of the body; by default from the environment.
        read_buffered: Returns the body if the app has already read it.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    kit = protocol.kit
    start_kit(kit)
    headers = _read_headers(environ)
    connection = _find_socket(environ)
    if connection is not None:
        _set_send_timeout(connection, kit.settings.timeouts.send)
    bridge = WSGIBridge(_disconnect_check(environ, connection))
    source = read or _body_reader(environ, headers)

    async def read_body() -> bytes:
        body: bytes = await bridge.call(
            functools.partial(_read_body, headers, kit.settings.limits.max_body_bytes, translate_error, read_buffered),
            source,
        )
        return body

    request = Request(
        method=environ["REQUEST_METHOD"].upper(),
        path=path,
        query=environ.get("QUERY_STRING", ""),
        headers=headers,
        read=read_body,
        host_request=host_request,
        translate_error=translate_error,
        call_hook=bridge.call,
    )

    async def respond() -> Reply:
        return await protocol.handle(request)

    reply = bridge.start(respond)
    if reply is None:
        return WSGIReply(499, {})  # the client has left, and does not receive it
    # Hop-by-hop headers belong to the server (PEP 3333).
    headers_out = {name: value for name, value in reply.headers.items() if not is_hop_by_hop(name)}
    if reply.stream is None:
        return WSGIReply(reply.status, headers_out, reply.body)
    return WSGIReply(reply.status, headers_out, stream=bridge)


def serve_websocket(
    kit: ResponsesKit,
    environ: Mapping[str, Any],
    *,
    host_request: Any,
    translate_error: Callable[[Exception], APIError | None] = lambda error: None,
) -> WSGIReply | None:
    """Serve a WebSocket over the server's socket; returns when it is closed.

    Args:
        kit: Answers the requests.
        environ: The WSGI environment of an upgrade request to `GET /responses`.
        host_request: See `handle_request`.
        translate_error: See `handle_request`.

    Returns:
        The reply if the upgrade is refused, or if the server, such as waitress, does not expose its socket. None if
        the connection was used: then raise `connection_taken_over` out of the app.

    Raises:
        ConfigurationError: The kit's store was not set up.
    """
    start_kit(kit)
    headers = _read_headers(environ)
    connection = _find_socket(environ)
    bridge = WSGIBridge()

    async def run_session() -> Reply:
        try:
            if connection is None or isinstance(connection, ssl.SSLSocket) or upgrade is None:
                raise UpgradeRequired("WebSockets are not supported by this server. Use POST.")
            secure = environ["wsgi.url_scheme"] == "https"
            owner = await authorize(
                kit, host_request, headers, translate_error=translate_error, call_hook=bridge.call, is_secure=secure
            )
            websocket = await upgrade(connection, headers, limit=kit.settings.limits.max_body_bytes)
        except APIError as error:
            return OpenResponses.render_error(error)
        await websocket.close(await serve_session(kit, owner, receive=websocket.receive, send=websocket.send))
        return Reply(101, {})

    reply = bridge.start(run_session)
    if reply is None or reply.status == 101:
        return None
    return WSGIReply(reply.status, reply.headers, reply.body)


def connection_taken_over() -> OSError:
    """Return the exception to raise out of the app after a WebSocket: servers take it for a client that has left."""
    return ConnectionResetError(errno.ECONNRESET, "the connection was a WebSocket")


def _read_headers(environ: Mapping[str, Any]) -> dict[str, str]:
    headers = {name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.replace("_", "-").lower()] = environ[name]
    return headers


def _body_reader(environ: Mapping[str, Any], headers: Mapping[str, str]) -> Callable[[int], bytes]:
    """Return a function that reads up to the given number of bytes of the body, and nothing after it."""
    source = environ["wsgi.input"]
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        # A chunked body. `wsgi.input_terminated` says that the server decodes it and signals its end.
        read_chunked: Callable[[int], bytes] = source.read
        return read_chunked if environ.get("wsgi.input_terminated") else lambda size: b""
    remaining = int(length[:20])

    def read(size: int) -> bytes:
        nonlocal remaining
        chunk: bytes = source.read(min(size, remaining))
        remaining -= len(chunk)
        return chunk

    return read


def _read_body(
    headers: Mapping[str, str],
    limit: int,
    translate_error: Callable[[Exception], APIError | None],
    read_buffered: Callable[[], bytes],
    read: Callable[[int], bytes],
) -> bytes:
    body = Body(headers, limit=limit)
    size = 0
    try:
        while chunk := read(_CHUNK_BYTES) or (b"" if size else read_buffered()):
            size += len(chunk)
            body.feed(chunk)
    except OSError:
        raise ClientDisconnected from None
    except Exception as error:
        if isinstance(error, APIError) or translate_error(error) is not None:
            raise
        # Such as gunicorn's exceptions for malformed chunks.
        raise InvalidRequest("The body could not be read.", code="invalid_body") from error
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and size < int(declared[:20]):
        # The client has left, or the app has consumed the body without buffering it.
        raise InvalidRequest("The body is shorter than its 'Content-Length'.", code="invalid_body")
    return body.finish()


def _find_socket(environ: Mapping[str, Any]) -> socket.socket | None:
    """Return the client's socket, or None if the server does not expose it."""
    connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
    return connection if isinstance(connection, socket.socket) else None


def _set_send_timeout(connection: socket.socket, seconds: float) -> None:
    """Set a timeout for sending, because a client that does not read would block the host's thread."""
    if hasattr(socket, "SO_SNDTIMEO") and connection.gettimeout() is None:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _disconnect_check(environ: Mapping[str, Any], connection: socket.socket | None) -> Callable[[], bool]:
    """Return a function that returns whether the client is known to have left."""
    is_disconnected = environ.get("waitress.client_disconnected")
    if callable(is_disconnected):
        return lambda: bool(is_disconnected())
    if connection is not None and hasattr(socket, "MSG_DONTWAIT"):
        return functools.partial(_is_closed, connection)
    return lambda: False


def _is_closed(connection: socket.socket) -> bool:
    try:
        with selectors.DefaultSelector() as selector:  # `recv` would wait for a timeout of the socket
            selector.register(connection, selectors.EVENT_READ)
            return bool(selector.select(0)) and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ValueError:  # TLS sockets do not support MSG_PEEK
        return False
    except OSError:
        return True
