"""WebSocket mode, and an orderly start and end, beside Django's ASGI app: one line in `asgi.py`.

Example::

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

from ._http.body_limit import Bounded, is_long
from ._http.responses import Upgrade
from .mounts import kit_of, view_at, views

__all__ = ["ResponsesASGI"]

logger = logging.getLogger("responses_kit")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ResponsesASGI:
    """Serves the API's WebSocket wherever the URLconf has the API; all else is the app's.

    The request for a socket goes through the project's middleware to the view, like any other: so whoever is logged in
    there is known here. The kit starts and ends with the server. And of a body that is sent to the API no more is taken
    in than the API takes; Django itself takes in all of it before it looks whom it is for.

    Args:
        app: What `get_asgi_application` returns, or whatever stands around it, such as a router of Channels'.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self.app = app
        self._handler = app if isinstance(app, ASGIHandler) else get_asgi_application()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Serves one connection (ASGI)."""
        match scope["type"]:
            case "lifespan":
                await _Lifespan(self.app).live(scope, receive, send)
            case "websocket" if self.app is self._handler or view_at(scope) is not None:
                await self._converse(scope, receive, send)
            case "http" if is_long(scope) and (view := view_at(scope)) is not None:
                await self.app(scope, Bounded(scope, receive, limit=await _limit(view)), send)
            case _:
                await self.app(scope, receive, send)

    async def _converse(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        response = await self._response(scope)
        if isinstance(response, Upgrade):
            await serve_websocket(response.kit, scope, receive, send, admitted=response.admitted)
        else:
            content = b"" if response.streaming else response.content  # type: ignore[attr-defined]  # who doesn't stream has it
            headers = {name: value for name, value in response.items() if name.lower() != "content-length"}
            await reject_websocket(scope, receive, send, reply=Reply(response.status_code, headers, content))

    async def _response(self, scope: dict[str, Any]) -> HttpResponseBase:
        """What the project answers to the request for a socket."""
        scheme = {"ws": "http", "wss": "https"}.get(scope.get("scheme", "ws"), "http")
        async with ThreadSensitiveContext():
            set_script_prefix(get_script_prefix(scope))
            await signals.request_started.asend(sender=ASGIHandler, scope=scope)
            asked = {**scope, "method": "GET", "scheme": scheme}
            request, refusal = self._handler.create_request(asked, io.BytesIO())
            response = refusal if request is None else await self._handler.run_get_response(request)
            assert response is not None
            await sync_to_async(response.close)()
            return response


class _Lifespan:
    """The server's start and end: the API starts when the app has, and ends before it does.

    Args:
        app: Told of both, if it likes to be told; Django does not.
    """

    def __init__(self, app: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self._app = app
        self._kits: list[ResponsesKit] = []
        self._answered = False

    async def live(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        starting = [await receive()]

        async def hear() -> Message:
            message: Message = starting.pop() if starting else await receive()
            if message["type"] == "lifespan.shutdown":
                for kit in self._kits:
                    await stop_kit(kit)
            return message

        async def tell(message: Message) -> None:
            self._answered = True
            if message["type"] == "lifespan.startup.complete":
                await self._begin()
            await send(message)

        try:
            await self._app(scope, hear, tell)
        except Exception:
            if self._answered:
                raise
        if not self._answered:
            starting.clear()
            await tell({"type": "lifespan.startup.complete"})
            await hear()
            await tell({"type": "lifespan.shutdown.complete"})

    async def _begin(self) -> None:
        try:
            for view in views():
                kit = await kit_of(view)
                await start_kit(kit)
                self._kits.append(kit)
        except Exception as error:  # the site's other pages are none the worse for it
            logger.error("the API cannot be served: %s", error, exc_info=error)


async def _limit(view: Any) -> int:
    """Most bytes that are sent to the API at once."""
    try:
        return (await kit_of(view)).settings.limits.max_body_bytes
    except Exception:  # which the view is about to tell
        return 0
