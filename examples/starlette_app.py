"""An app with pages of its own, to which the API was added: `uvicorn examples.starlette_app:app`.

Two users, each with a key; each sees only their own responses. The model is the local default, loaded when the
server starts.
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
    """Whose responses a request may see; None refuses it."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    names = [name for name, key in KEYS.items() if hmac.compare_digest(key.encode(), given.encode())]
    return names[0] if names else None


async def home(request: Request) -> PlainTextResponse:
    return PlainTextResponse("This app was here before. The API is under /v1.")


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    backend = await anyio.to_thread.run_sync(LocalBackend)
    kit = ResponsesKit(backend, owner=owner)
    app.router.routes.append(Mount("/v1", ResponsesApp(kit)))
    async with kit.lifespan():
        yield


app = Starlette(routes=[Route("/", home)], lifespan=lifespan)
