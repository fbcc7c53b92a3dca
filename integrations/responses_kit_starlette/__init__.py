"""The Open Responses API in any ASGI app: mounted in Starlette and FastAPI, or as middleware around the rest.

Mounted::

    app.mount("/v1", ResponsesApp(kit))                 # Starlette, FastAPI
    app.routes.extend(responses_routes(kit, "/v1"))     # the same, as a list of routes

Around any ASGI app at all; other paths pass through untouched::

    app = ResponsesMiddleware(app, kit, prefix="/v1")
"""

from __future__ import annotations

try:
    import starlette  # noqa: F401  # only to say early what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'responses_kit_starlette needs Starlette: pip install "responses-kit[starlette]"'
    ) from error

from .app import ResponsesApp, ResponsesMiddleware, responses_routes

__all__ = ["ResponsesApp", "ResponsesMiddleware", "responses_routes"]
