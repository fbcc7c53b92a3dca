"""The handling of Django requests, under WSGI and ASGI, and of WebSocket upgrades."""

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

from ..auth import error_from_exception
from ..scope import is_within_request
from .responses import EventStream, WebSocketUpgrade

__all__ = ["handle_asgi", "handle_wsgi", "to_http_response"]

_CHUNK_BYTES: Final = 64 * 1024
"""Bytes of a body that are read and checked at once."""


def handle_wsgi(dialect: WireProtocol, request: HttpRequest, path: str) -> HttpResponseBase:
    """Handle a request under WSGI, in the request's own thread."""
    # Without a Content-Length (chunked requests) Django reads nothing, so the kit reads from the server itself, unless
    # middleware has set the body already.
    known = "CONTENT_LENGTH" in request.META or hasattr(request, "_body")
    reply = wsgi.handle_request(
        dialect,
        request.META,
        path=path,
        host_request=request,
        translate_error=error_from_exception,
        read=request.read if known else None,
    )
    if reply.stream is None:
        return to_http_response(reply)
    return EventStream(reply.stream, reply.status, reply.headers)


async def handle_asgi(dialect: WireProtocol, request: ASGIRequest, path: str) -> HttpResponseBase:
    """Handle a request under ASGI. WebSocket requests come from `asgi.ResponsesASGI`, which acts on the result."""
    kit = dialect.kit
    await asgi.start_kit(kit)
    if request.scope["type"] == "websocket":
        return await _authorize_websocket(dialect, request, path)
    is_within_request.set(True)
    headers = {name.lower(): value for name, value in request.headers.items()}

    async def read() -> bytes:
        body = Body(headers, limit=kit.settings.limits.max_body_bytes)
        while chunk := request.read(_CHUNK_BYTES):  # does not block: Django has read the body into a file
            body.feed(chunk)
        return body.finish()

    kit_request = Request(
        method=request.method or "",
        path=path,
        query=request.META["QUERY_STRING"],
        headers=headers,
        read=read,
        host_request=request,
        translate_error=error_from_exception,
        call_hook=_call_hook,
    )
    try:
        reply = await dialect.handle(kit_request)
    except ClientDisconnected:
        return HttpResponse(status=499)
    if reply.stream is None:
        return to_http_response(reply)
    return EventStream(asgi.PullStream(reply.stream), reply.status, reply.headers)


async def _authorize_websocket(dialect: WireProtocol, request: ASGIRequest, path: str) -> HttpResponse:
    try:
        if not dialect.has_websocket or path.strip("/") != "responses":
            raise NotFound("This path does not exist.")
        headers = asgi.read_headers(request.scope)
        secure = request.is_secure()
        owner = await websocket.authorize(
            dialect.kit, request, headers, translate_error=error_from_exception, call_hook=_call_hook, is_secure=secure
        )
        return WebSocketUpgrade(dialect.kit, owner)
    except APIError as error:
        return to_http_response(dialect.render_error(error))


async def _call_hook(hook: Callable[[Any], Any], request: Any) -> Any:
    """Call the owner hook in a thread, where it may use the ORM."""
    return hook(request) if inspect.iscoroutinefunction(hook) else await sync_to_async(hook)(request)


def to_http_response(reply: Reply | wsgi.WSGIReply) -> HttpResponse:
    """Return a reply that is not streamed as Django's response."""
    return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))
