"""ASGI applications around a kit.

They use ASGI directly, because Starlette's `BaseHTTPMiddleware` hides client disconnects.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.requests import Request as HostRequest
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from responses_kit._concurrency.tasks import ScopedTask
from responses_kit.adapters.asgi import read_headers, reject_websocket, serve_websocket
from responses_kit.errors import APIError, ClientDisconnected, ConfigurationError, NotFound, error_for_status
from responses_kit.http.messages import Body, Reply, Request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol
from responses_kit.http.websocket import authorize
from responses_kit.kit import ResponsesKit

__all__ = ["ResponsesApp", "ResponsesMiddleware", "responses_routes"]


class ResponsesApp:
    """The API as an ASGI app, to mount under a path.

    Args:
        kit: Handles the requests. Its owner hook is called with a `starlette.requests.Request`, or with its base class
            `HTTPConnection` when a WebSocket opens. Both have headers, session, user and state; neither has the body.
        dialect: The wire protocol, such as `responses_kit.http.lmsp.LMSP`; by default Open Responses.

    Raises:
        ConfigurationError: `kit` is not a kit, or `dialect` is not a wire protocol.
    """

    def __init__(self, kit: ResponsesKit, *, dialect: type[WireProtocol] = OpenResponses) -> None:
        self.protocol = _build_protocol(kit, dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http":
            await _handle_request(self.protocol, _relative_path(scope), scope, receive, send)
        elif scope["type"] == "websocket":
            await _handle_websocket(self.protocol, _relative_path(scope), scope, receive, send)
        elif scope["type"] == "lifespan":
            await _handle_lifespan(receive, send)


class ResponsesMiddleware:
    """The API under a prefix of any ASGI app, which serves the other paths.

    Args:
        app: The wrapped app.
        kit: Handles the requests, as in `ResponsesApp`.
        prefix: The API's path prefix.
        dialect: The wire protocol, as in `ResponsesApp`.

    Raises:
        ConfigurationError: `kit` is not a kit, or `dialect` is not a wire protocol.
    """

    def __init__(
        self, app: ASGIApp, kit: ResponsesKit, *, prefix: str = "/v1", dialect: type[WireProtocol] = OpenResponses
    ) -> None:
        self.app = app
        self.protocol = _build_protocol(kit, dialect)
        self.prefix = "/" + prefix.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] in ("http", "websocket"):
            path = _relative_path(scope)
            if path == self.prefix or path.startswith(self.prefix.rstrip("/") + "/"):
                below = path[len(self.prefix) :]
                if scope["type"] == "http":
                    await _handle_request(self.protocol, below, scope, receive, send)
                    return
                if _is_websocket_path(self.protocol, below):
                    await _handle_websocket(self.protocol, below, scope, receive, send)
                    return
        await self.app(scope, receive, send)


def responses_routes(
    kit: ResponsesKit, prefix: str = "/v1", *, dialect: type[WireProtocol] = OpenResponses
) -> list[BaseRoute]:
    """Return the API as a list of Starlette routes.

    Args:
        kit: Handles the requests, as in `ResponsesApp`.
        prefix: The API's path prefix.
        dialect: The wire protocol, as in `ResponsesApp`.

    Raises:
        ConfigurationError: `kit` is not a kit, or `dialect` is not a wire protocol.
    """
    return [Mount("/" + prefix.strip("/"), app=ResponsesApp(kit, dialect=dialect))]


def _build_protocol(kit: ResponsesKit, dialect: type[WireProtocol]) -> WireProtocol:
    if not isinstance(kit, ResponsesKit):
        raise ConfigurationError(f"'kit' must be a ResponsesKit, not {type(kit).__name__}.")
    return WireProtocol.validate(dialect)(kit)


def _relative_path(scope: Scope) -> str:
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


async def _handle_request(protocol: WireProtocol, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    headers = read_headers(scope)

    async def read() -> bytes:
        body = Body(headers, limit=protocol.kit.settings.limits.max_body_bytes)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body.feed(message.get("body", b""))
            more = message.get("more_body", False)
        disconnect_watcher.start()  # only now: the watcher calls receive(), which yields the body first
        return body.finish()

    async def cancel_on_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        handling.cancel()

    disconnect_watcher = ScopedTask(cancel_on_disconnect)
    request = Request(
        method=scope["method"],
        path=path,
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        read=read,
        host_request=HostRequest(scope, _reject_body_read),
        translate_error=_translate_error,
    )
    reply = Reply(499, {})  # never received, but outer middleware may wait for a response after a disconnect
    sender = _ReplySender(send)
    with anyio.CancelScope() as handling, suppress(ClientDisconnected):
        async with disconnect_watcher:
            reply = await protocol.handle(request)
            if reply.stream is not None:
                disconnect_watcher.start()  # a request without a body has not started it yet
                await reply.stream(partial(sender.write, reply))
    # Outside the scope: some servers report a disconnect while they send the last message, which must be complete.
    with suppress(OSError):
        await sender.finish(reply)


def _is_websocket_path(protocol: WireProtocol, path: str) -> bool:
    return protocol.has_websocket and path.strip("/") == "responses"


async def _handle_websocket(protocol: WireProtocol, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    async def authorize_websocket() -> str:
        secure = scope.get("scheme") == "wss"
        return await authorize(
            protocol.kit, HTTPConnection(scope), read_headers(scope), translate_error=_translate_error, is_secure=secure
        )

    if _is_websocket_path(protocol, path):
        await serve_websocket(protocol.kit, scope, receive, send, authorize=authorize_websocket)
    else:
        await reject_websocket(scope, receive, send, reply=protocol.render_error(NotFound("This path does not exist.")))


async def _reject_body_read() -> Message:
    raise ConfigurationError("The owner hook cannot read the request's body.")


def _translate_error(error: Exception) -> APIError | None:
    if isinstance(error, HTTPException):
        return error_for_status(error.status_code, str(error.detail))
    return None


class _ReplySender:
    """Sends one reply, the head together with the first data."""

    __slots__ = ("_has_sent_head", "_has_started", "_send")

    def __init__(self, send: Send) -> None:
        self._send, self._has_started, self._has_sent_head = send, False, False

    async def write(self, reply: Reply, data: bytes, *, more: bool = True) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
            if reply.stream is None:
                headers.append((b"content-length", b"%d" % len(reply.body)))
            await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
            self._has_sent_head = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def finish(self, reply: Reply) -> None:
        if self._has_sent_head or not self._has_started:  # nothing can follow a head whose sending was cancelled
            await self.write(reply, reply.body, more=False)


async def _handle_lifespan(receive: Receive, send: Send) -> None:
    # A server sends lifespan events when the app runs unmounted; the app only confirms them.
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
