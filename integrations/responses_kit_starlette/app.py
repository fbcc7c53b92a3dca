"""ASGI applications around a kit. Pure ASGI, so that a client's leaving is seen behind other middleware too."""

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
    """The API as an ASGI app, to be mounted where its paths shall begin.

    Args:
        kit: Answers the requests. Its owner hook is given a `starlette.requests.Request`, or, where a WebSocket is
            opened, the `HTTPConnection` that a request is, too: headers, session, user and state are there.
        dialect: What is spoken, such as `responses_kit.http.lmsp.LMSP`; by default Open Responses.
    """

    def __init__(self, kit: ResponsesKit, *, dialect: type[WireProtocol] = OpenResponses) -> None:
        self.dialect = _spoken(kit, dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection (ASGI)."""
        if scope["type"] == "http":
            await _respond(self.dialect, _below_root(scope), scope, receive, send)
        elif scope["type"] == "websocket":
            await _converse(self.dialect, _below_root(scope), scope, receive, send)
        elif scope["type"] == "lifespan":
            await _live(receive, send)


class ResponsesMiddleware:
    """The API under a prefix of any ASGI app; all else, lifespan included, passes through untouched.

    Args:
        app: The app around which the API is put.
        kit: Answers the requests. Its owner hook is given what `ResponsesApp` says.
        prefix: Where the API's paths begin.
        dialect: What is spoken there, as in `ResponsesApp`.
    """

    def __init__(
        self, app: ASGIApp, kit: ResponsesKit, *, prefix: str = "/v1", dialect: type[WireProtocol] = OpenResponses
    ) -> None:
        self.app = app
        self.dialect = _spoken(kit, dialect)
        self.prefix = "/" + prefix.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection (ASGI)."""
        if scope["type"] in ("http", "websocket"):
            path = _below_root(scope)
            if path == self.prefix or path.startswith(self.prefix.rstrip("/") + "/"):
                below = path[len(self.prefix) :]
                if scope["type"] == "http":
                    await _respond(self.dialect, below, scope, receive, send)
                    return
                if _is_socket_path(self.dialect, below):
                    await _converse(self.dialect, below, scope, receive, send)
                    return
        await self.app(scope, receive, send)


def responses_routes(
    kit: ResponsesKit, prefix: str = "/v1", *, dialect: type[WireProtocol] = OpenResponses
) -> list[BaseRoute]:
    """The API as Starlette routes, for an app that is built from a list of them."""
    return [Mount("/" + prefix.strip("/"), app=ResponsesApp(kit, dialect=dialect))]


def _spoken(kit: ResponsesKit, dialect: type[WireProtocol]) -> WireProtocol:
    if not isinstance(kit, ResponsesKit):
        raise ConfigurationError(f"give it a ResponsesKit, such as ResponsesKit(backend), not {type(kit).__name__}")
    return WireProtocol.validate(dialect)(kit)


def _below_root(scope: Scope) -> str:
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


async def _respond(dialect: WireProtocol, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    headers = read_headers(scope)

    async def read() -> bytes:
        body = Body(headers, limit=dialect.kit.settings.limits.max_body_bytes)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body.feed(message.get("body", b""))
            more = message.get("more_body", False)
        leaving.start()  # the client's leaving can be waited for only where the body does not come any more
        return body.finish()

    async def cancel_on_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answering.cancel()

    leaving = ScopedTask(cancel_on_disconnect)
    request = Request(
        method=scope["method"],
        path=path,
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        read=read,
        host=HostRequest(scope, _not_for_hooks),
        refusal=_refusal,
    )
    reply = Reply(499, {})  # goes nowhere, but middleware around us may wait for some answer when a client has left
    sender = _Sender(send)
    with anyio.CancelScope() as answering, suppress(ClientDisconnected):
        async with leaving:
            reply = await dialect.handle(request)
            if reply.stream is not None:
                leaving.start()  # of a request that has no body, none was read
                await reply.stream(partial(sender.write, reply))
    # Beyond the scope: some servers report a disconnect while they send the last message, which must not cut it.
    with suppress(OSError):
        await sender.finish(reply)


def _is_socket_path(dialect: WireProtocol, path: str) -> bool:
    return dialect.sockets and path.strip("/") == "responses"


async def _converse(dialect: WireProtocol, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    async def admitted() -> str:
        secure = scope.get("scheme") == "wss"
        return await authorize(dialect.kit, HTTPConnection(scope), read_headers(scope), refusal=_refusal, secure=secure)

    if _is_socket_path(dialect, path):
        await serve_websocket(dialect.kit, scope, receive, send, admitted=admitted)
    else:
        await reject_websocket(
            scope, receive, send, reply=dialect.render_error(NotFound("There is no such path in this API."))
        )


async def _not_for_hooks() -> Message:
    raise ConfigurationError("an owner hook cannot read the body; headers, session, user and state are there")


def _refusal(error: Exception) -> APIError | None:
    if isinstance(error, HTTPException):
        return error_for_status(error.status_code, str(error.detail))
    return None


class _Sender:
    """Sends one reply: its head with its first byte, so that whatever happens to it happens within a stream."""

    __slots__ = ("_begun", "_headed", "_send")

    def __init__(self, send: Send) -> None:
        self._send, self._begun, self._headed = send, False, False

    async def write(self, reply: Reply, data: bytes, *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers.items()]
            if reply.stream is None:
                headers.append((b"content-length", b"%d" % len(reply.body)))
            await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
            self._headed = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def finish(self, reply: Reply) -> None:
        if self._headed or not self._begun:  # behind a head that was cut off in the middle nothing can follow
            await self.write(reply, reply.body, more=False)


async def _live(receive: Receive, send: Send) -> None:
    # Served on its own, the app is asked for its lifespan; it has none, and says so politely.
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
