"""The API in an existing Starlette app: `uvicorn examples.starlette_app:app`.

Two users have an API key each and see only their own responses. The default local model is loaded when the server
starts.
"""

import contextlib
import hmac
from collections.abc import AsyncIterator

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from responses_kit import ResponsesKit
from responses_kit.backends.local import LocalBackend
from responses_kit_starlette import ResponsesApp

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}


def owner(request: Request) -> str | None:
    """Return the user that a request belongs to; None rejects it."""
    sent = request.headers.get("authorization", "").removeprefix("Bearer ")
    names = [name for name, key in KEYS.items() if hmac.compare_digest(key.encode(), sent.encode())]
    return names[0] if names else None


async def home(request: Request) -> PlainTextResponse:
    return PlainTextResponse("Welcome. The API is under /v1.")


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    backend = await anyio.to_thread.run_sync(LocalBackend)
    kit = ResponsesKit(backend, owner=owner)
    app.router.routes.append(Mount("/v1", ResponsesApp(kit)))
    async with kit.lifespan():
        yield


app = Starlette(routes=[Route("/", home)], lifespan=lifespan)
