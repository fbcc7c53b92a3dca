"""An ASGI application that adds WebSockets, and the kit's startup and shutdown, to Django's.

In `asgi.py`::

    application = ResponsesASGI(get_asgi_application())
"""

from __future__ import annotations

import io
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.core import signals
from django.core.asgi import get_asgi_application
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.http import HttpResponseBase
from django.urls import set_script_prefix

from responses_kit.adapters.asgi import Message, reject_websocket, serve_websocket, start_kit, stop_kit
from responses_kit.http.messages import Reply
from responses_kit.kit import ResponsesKit

from ._http.body_limit import LimitedReceive, has_long_body
from ._http.responses import WebSocketUpgrade
from .mounts import find_view, get_kit, iter_views

__all__ = ["ResponsesASGI"]

logger = logging.getLogger("responses_kit")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ResponsesASGI:
    """An ASGI application that serves the API's WebSocket, and passes everything else on to Django.

    A WebSocket request passes the project's middleware and the view like any other request, so session logins work.
    Kits start and stop with the server. Bodies that are sent to the API are read up to its limit only; without this
    class Django reads them completely before it resolves the URL.

    Args:
        app: The result of `get_asgi_application`, or an application around it, such as a router of Channels.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self.app = app
        self._handler = app if isinstance(app, ASGIHandler) else get_asgi_application()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection (ASGI)."""
        match scope["type"]:
            case "lifespan":
                await _Lifespan(self.app).run(scope, receive, send)
            case "websocket" if self.app is self._handler or find_view(scope) is not None:
                await self._serve_websocket(scope, receive, send)
            case "http" if has_long_body(scope) and (view := find_view(scope)) is not None:
                await self.app(scope, LimitedReceive(scope, receive, limit=await _max_body_bytes(view)), send)
            case _:
                await self.app(scope, receive, send)

    async def _serve_websocket(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        response = await self._get_response(scope)
        if isinstance(response, WebSocketUpgrade):
            await serve_websocket(response.kit, scope, receive, send, authorize=response.authorize)
        else:
            content = b"" if response.streaming else response.content  # type: ignore[attr-defined]  # set unless streaming
            headers = {name: value for name, value in response.items() if name.lower() != "content-length"}
            await reject_websocket(scope, receive, send, reply=Reply(response.status_code, headers, content))

    async def _get_response(self, scope: dict[str, Any]) -> HttpResponseBase:
        """Return the project's response to a WebSocket request, which Django handles as a GET."""
        scheme = {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http")
        async with ThreadSensitiveContext():
            set_script_prefix(get_script_prefix(scope))
            await signals.request_started.asend(sender=ASGIHandler, scope=scope)
            http_scope = {**scope, "method": "GET", "scheme": scheme}
            request, error = self._handler.create_request(http_scope, io.BytesIO())
            response = error if request is None else await self._handler.run_get_response(request)
            assert response is not None
            await sync_to_async(response.close)()
            return response


class _Lifespan:
    """The lifespan protocol: kits start after the application and stop before it.

    Args:
        app: The application, which need not support the protocol; Django does not.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app
        self._kits: list[ResponsesKit] = []
        self._has_replied = False

    async def run(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        received = [await receive()]

        async def receive_message() -> Message:
            message: Message = received.pop() if received else await receive()
            if message["type"] == "lifespan.shutdown":
                for kit in self._kits:
                    await stop_kit(kit)
            return message

        async def send_message(message: Message) -> None:
            self._has_replied = True
            if message["type"] == "lifespan.startup.complete":
                await self._start_kits()
            await send(message)

        try:
            await self._app(scope, receive_message, send_message)
        except Exception:
            if self._has_replied:
                raise
        if not self._has_replied:
            received.clear()
            await send_message({"type": "lifespan.startup.complete"})
            await receive_message()
            await send_message({"type": "lifespan.shutdown.complete"})

    async def _start_kits(self) -> None:
        try:
            for view in iter_views():
                kit = await get_kit(view)
                await start_kit(kit)
                self._kits.append(kit)
        except Exception as error:  # the project's other pages must start
            logger.error("the API cannot be served: %s", error, exc_info=error)


async def _max_body_bytes(view: Any) -> int:
    """Return the limit of a view's kit on request bodies, or 0 if there is no kit."""
    try:
        return (await get_kit(view)).settings.limits.max_body_bytes
    except Exception:  # the view reports it to the client
        return 0
