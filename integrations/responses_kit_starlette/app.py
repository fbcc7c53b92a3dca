"""ASGI applications around a kit. Pure ASGI, so that a client's leaving is seen behind other middleware too."""

from __future__ import annotations

from contextlib import suppress

import anyio
from starlette.requests import Request as HostRequest
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from responses_kit.companion import Companion
from responses_kit.errors import APIError
from responses_kit.http import Body, Reply, Request, error_reply, handle
from responses_kit.kit import ResponsesKit

__all__ = ["ResponsesApp", "ResponsesMiddleware", "responses_routes"]


class ResponsesApp:
    """The API as an ASGI app, to be mounted where its paths shall begin.

    Args:
        kit: Answers the requests. Its owner hook is given a `starlette.requests.Request`.
    """

    def __init__(self, kit: ResponsesKit) -> None:
        self.kit = kit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection (ASGI)."""
        if scope["type"] == "http":
            await _respond(self.kit, _below_root(scope), scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "lifespan":
            await _live(receive, send)


class ResponsesMiddleware:
    """The API under a prefix of any ASGI app; all else, lifespan included, passes through untouched.

    Args:
        app: The app around which the API is put.
        kit: Answers the requests. Its owner hook is given a `starlette.requests.Request`.
        prefix: Where the API's paths begin.
    """

    def __init__(self, app: ASGIApp, kit: ResponsesKit, *, prefix: str = "/v1") -> None:
        self.app = app
        self.kit = kit
        self.prefix = "/" + prefix.strip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection (ASGI)."""
        if scope["type"] == "http":
            path = _below_root(scope)
            if path == self.prefix or path.startswith(self.prefix.rstrip("/") + "/"):
                await _respond(self.kit, path[len(self.prefix) :], scope, receive, send)
                return
        await self.app(scope, receive, send)


def responses_routes(kit: ResponsesKit, prefix: str = "/v1") -> list[BaseRoute]:
    """The API as Starlette routes, for an app that is built from a list of them."""
    return [Mount("/" + prefix.strip("/"), app=ResponsesApp(kit))]


def _below_root(scope: Scope) -> str:
    path, root = scope["path"], scope.get("root_path", "")
    return str(path[len(root) :] if root and path.startswith(root) else path)


async def _respond(kit: ResponsesKit, path: str, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        reply = await _answer(kit, path, scope, receive, send)
    except OSError:
        return  # some servers raise it where others ignore what is sent to a client that has left
    if reply is None:
        # Goes nowhere, but middleware around us may wait for some answer.
        with suppress(OSError):
            await _send(Reply(499, {}), send)


async def _answer(kit: ResponsesKit, path: str, scope: Scope, receive: Receive, send: Send) -> Reply | None:
    """Sends and returns the reply; None where the client left before there was one."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    reply: Reply | None = None
    try:
        body = Body(headers, limit=kit.max_body_bytes)
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body.feed(message.get("body", b""))
            more = message.get("more_body", False)
        content = body.finish()
    except APIError as error:
        reply = error_reply(error)
        await _send(reply, send)
        return reply
    request = Request(
        method=scope["method"],
        path=path,
        query=scope["query_string"].decode("latin-1"),
        headers=headers,
        body=content,
        host=HostRequest(scope, receive),
    )
    with anyio.CancelScope() as answering:
        async with Companion(_cancel_on_disconnect, receive, answering):
            reply = await handle(kit, request)
            await _send(reply, send)
    return reply


async def _cancel_on_disconnect(receive: Receive, answering: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def _send(reply: Reply, send: Send) -> None:
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()]
    start = {"type": "http.response.start", "status": reply.status, "headers": headers}
    if reply.stream is None:
        headers.append((b"content-length", b"%d" % len(reply.body)))
        await send(start)
        await send({"type": "http.response.body", "body": reply.body})
        return
    started = False

    async def write(data: bytes) -> None:
        # Whatever happens from the first byte on happens within the stream, which then knows how to end.
        nonlocal started
        if not started:
            started = True
            await send(start)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    await reply.stream(write)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    # Served on its own, the app is asked for its lifespan; it has none, and says so politely.
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
