"""One request of Django's, answered: under WSGI, under ASGI, and where it asks for a WebSocket."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from responses_kit.adapters import asgi, wsgi
from responses_kit.errors import APIError, ClientDisconnected, NotFound
from responses_kit.http import websocket
from responses_kit.http.messages import Body, Reply, Request
from responses_kit.http.router import WireProtocol

from ..auth import refused
from ..scope import within_request
from .responses import EventStream, Upgrade

__all__ = ["answer", "plain", "respond"]

_PIECE: Final = 64 * 1024
"""Bytes of a body that are read at once."""


def respond(dialect: WireProtocol, request: HttpRequest, path: str) -> HttpResponseBase:
    """Answers under WSGI, in the thread that has the request."""
    # Where there is no length Django reads nothing, though servers can do better; what was read it has.
    known = "CONTENT_LENGTH" in request.META or hasattr(request, "_body")
    found = wsgi.handle_request(
        dialect, request.META, path=path, host=request, refusal=refused, read=request.read if known else None
    )
    if found.pieces is None:
        return plain(found)
    return EventStream(found.pieces, found.status, found.headers)


async def answer(dialect: WireProtocol, request: ASGIRequest, path: str) -> HttpResponseBase:
    """Answers under ASGI. A request for a WebSocket comes from `asgi.ResponsesASGI`, which goes on with the answer."""
    kit = dialect.kit
    await asgi.start_kit(kit)
    if request.scope["type"] == "websocket":
        return await _admit(dialect, request, path)
    within_request.set(True)
    headers = {name.lower(): value for name, value in request.headers.items()}

    async def read() -> bytes:
        body = Body(headers, limit=kit.settings.limits.max_body_bytes)
        while piece := request.read(_PIECE):  # which the server has read before
            body.feed(piece)
        return body.finish()

    asked = Request(
        method=request.method or "",
        path=path,
        query=request.META["QUERY_STRING"],
        headers=headers,
        read=read,
        host=request,
        refusal=refused,
        call=_in_thread,
    )
    try:
        reply = await dialect.handle(asked)
    except ClientDisconnected:
        return HttpResponse(status=499)
    if reply.stream is None:
        return plain(reply)
    return EventStream(asgi.PullStream(reply.stream), reply.status, reply.headers)


async def _admit(dialect: WireProtocol, request: ASGIRequest, path: str) -> HttpResponse:
    try:
        if not dialect.sockets or path.strip("/") != "responses":
            raise NotFound("There is no such path in this API.")
        headers = asgi.read_headers(request.scope)
        secure = request.is_secure()
        owner = await websocket.authorize(
            dialect.kit, request, headers, refusal=refused, call=_in_thread, secure=secure
        )
        return Upgrade(dialect.kit, owner)
    except APIError as error:
        return plain(dialect.render_error(error))


async def _in_thread(hook: Callable[[Any], Any], request: Any) -> Any:
    """Calls the owner hook where the ORM may be used."""
    return hook(request) if inspect.iscoroutinefunction(hook) else await sync_to_async(hook)(request)


def plain(reply: Reply | wsgi.WSGIReply) -> HttpResponse:
    """A reply that does not stream."""
    return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))
