"""The API as a view, for ASGI and WSGI alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from responses_kit import asgi, websocket, wsgi
from responses_kit.errors import APIError, ClientGone, NotFound
from responses_kit.http import Body, Request, error_reply, handle
from responses_kit.kit import ResponsesKit

from . import conf
from .auth import refused
from .replies import EventStream, Upgrade
from .surroundings import within_request

__all__ = ["ResponsesView"]

_PIECE = 64 * 1024
"""Bytes of a body that are read at once."""


class ResponsesView(View):
    """All paths of the API, below wherever it is mounted. `urls` has it twice: at the root, and with a `path`.

    Attributes:
        kit: Answers the requests; by default the one of the setting `RESPONSES_KIT`.
    """

    kit: ResponsesKit | None = None
    view_is_async = True

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., Any]:
        """The view. Who asks is found out by the setting `AUTH`, CSRF check included, and a 401 is JSON."""
        view = login_not_required(csrf_exempt(super().as_view(**initkwargs)))
        for alias in connections:  # no transaction is to be open for as long as an answer takes
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    async def dispatch(self, request: HttpRequest, path: str = "") -> HttpResponseBase:  # type: ignore[override]  # it may be async
        """Answers one request."""
        kit = self.kit or await conf.ready()
        if not isinstance(request, ASGIRequest):
            return await sync_to_async(self._respond)(kit, request, path)  # in the thread that has the request
        await asgi.enter(kit)
        if request.scope["type"] == "websocket":
            return await self._admit(kit, request, path)
        within_request.set(True)
        return await self._answer(kit, request, path)

    def _respond(self, kit: ResponsesKit, request: HttpRequest, path: str) -> HttpResponseBase:
        """Answers under WSGI."""
        # Where there is no length Django reads nothing, though servers can do better; what was read it has.
        known = "CONTENT_LENGTH" in request.META or hasattr(request, "_body")
        answer = wsgi.respond(
            kit, request.META, path=path, host=request, refusal=refused, read=request.read if known else None
        )
        if answer.pieces is None:
            return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))
        return EventStream(answer.pieces, answer.status, answer.headers)

    async def _answer(self, kit: ResponsesKit, request: ASGIRequest, path: str) -> HttpResponseBase:
        """Answers under ASGI."""
        headers = {name.lower(): value for name, value in request.headers.items()}

        async def read() -> bytes:
            body = Body(headers, limit=kit.max_body_bytes)
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
            reply = await handle(kit, asked)
        except ClientGone:
            return HttpResponse(status=499)
        if reply.stream is None:
            return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))
        return EventStream(asgi.Pieces(reply.stream), reply.status, reply.headers)

    async def _admit(self, kit: ResponsesKit, request: ASGIRequest, path: str) -> HttpResponse:
        """Says whether a WebSocket may be opened: `asgi.ResponsesASGI` asks for it with a request as all others."""
        try:
            if path.strip("/") != "responses":
                raise NotFound("There is no such path in this API.")
            headers = asgi.headers_in(request.scope)
            return Upgrade(kit, await websocket.admit(kit, request, headers, refusal=refused, call=_in_thread))
        except APIError as error:
            reply = error_reply(error)
            return HttpResponse(reply.body, status=reply.status, headers=dict(reply.headers))


async def _in_thread(hook: Callable[[Any], Any], request: Any) -> Any:
    """Calls the owner hook where the ORM may be used."""
    return hook(request) if inspect.iscoroutinefunction(hook) else await sync_to_async(hook)(request)
