"""The Open Responses API in Starlette, FastAPI and any other ASGI app.

Mounted in Starlette or FastAPI::

    app.mount("/v1", ResponsesApp(kit))
    app.routes.extend(responses_routes(kit, "/v1"))     # the same, as a list of routes

Around any other ASGI app, which still serves all other paths::

    app = ResponsesMiddleware(app, kit, prefix="/v1")
"""

from __future__ import annotations

try:
    import starlette  # noqa: F401  # for a clear error if Starlette is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'responses_kit_starlette needs Starlette: pip install "responses-kit[starlette]"'
    ) from error

from .app import ResponsesApp, ResponsesMiddleware, responses_routes

__all__ = ["ResponsesApp", "ResponsesMiddleware", "responses_routes"]
