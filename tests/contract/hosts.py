"""The hosts that the contract is held against. A new one is one function and one entry in `HOSTS`.

A host makes the app of somebody who has one already: some routes of its own, and the kit under `/v1`, and, in its other
dialect, under `/lmsp/v1`. Its own
routes are the same everywhere, so that the suite can tell that they are left alone:

* `POST /host/echo` answers with what it was sent,
* `GET /host/state` says whether the host's own start-up code ran,
* the WebSocket at `/host/socket` says its path, and closes,
* everything else that is not the kit's is the host's own 404.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from responses_kit import Limits, ResponsesKit, Timeouts, errors
from responses_kit.http.lmsp import LMSP
from responses_kit.runners.base import LocalRunner
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record

from .puppet import LoopPuppet, Strings, ThreadPuppet
from .tools import hosted_tools

HOST_404 = "the host knows no such page"


def owner(request: Any) -> str:
    """Who asks is who the key says it is; `request` is the host's own, and all of them have headers."""
    key: str = request.headers.get("Authorization", "")
    if key == "Bearer stranger":
        raise errors.Unauthorized("This key opens nothing here.")
    return key


MAX_BODY_BYTES = 16 * 1024 * 1024
"""Small enough to be crossed quickly, large enough for the longest text that the specification allows."""


MAX_TOOL_CALLS = 20
TTL = 24 * 60 * 60
MOST_SOCKETS = 3
SOCKET_SECONDS = 1.0
WELCOME_ORIGIN = "https://app.example"
SECRETS = ["the secret of today", "the secret of yesterday"]


if TYPE_CHECKING:
    _AnyStore = MemoryStore
else:
    _AnyStore = object  # it is mixed into stores of every kind


class Fragile(_AnyStore):
    """Keeps responses, and fails where their metadata ask for it.

    `{"store": "no create"}` and "no update" break the connection, "late" makes every update take a while.
    """

    @staticmethod
    def _fall_apart(moment: str, record: Record) -> None:
        if f'"store":"no {moment}"'.encode() in record.response:
            raise ConnectionError("the password of the database is hunter2")

    async def create(self, owner: str, record: Record) -> Record | None:
        self._fall_apart("create", record)
        return await super().create(owner, record)

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._fall_apart("update", record)
        if b'"store":"late"' in record.response:
            await anyio.sleep(0.1)
        return await super().update(owner, record, log)

    async def get(self, owner: str, response_id: str) -> Record | None:
        if response_id == "resp_unreachable":
            raise ConnectionError("the password of the database is hunter2")
        return await super().get(owner, response_id)

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        if response_id == "resp_unreachable":
            raise ConnectionError("the password of the database is hunter2")
        return await super().chain(owner, response_id)


class FragileMemoryStore(Fragile, MemoryStore):
    """The default store."""


def in_memory(strings: Strings) -> dict[str, Any]:
    """What a host brings to its kit that has nothing of its own to bring."""
    return {"store": FragileMemoryStore(ttl=TTL, clock=strings.clock)}


def build_kit(strings: Strings, setting: str, **host: Any) -> ResponsesKit:
    """The kit under test.

    Args:
        strings: What the puppet hangs on.
        setting: "loop" or "threads" for where the backend runs; all others are a "loop": "chatty" for clients that want
            raw reasoning and extension events too, "few" with few sockets, "brief" with short times for them, "single"
            with one background response at a time and one that waits, foreground streams that can be resumed, and long
            silences.
        host: What the host brings: a store, and what its framework needs around a backend.
    """
    puppet = ThreadPuppet(strings) if setting == "threads" else LoopPuppet(strings)
    limits = Limits(max_body_bytes=MAX_BODY_BYTES, max_tool_calls=MAX_TOOL_CALLS)
    more: dict[str, Any] = {
        "chatty": {"stream_reasoning": True, "stream_extensions": True},
        "few": {"limits": replace(limits, max_websockets=MOST_SOCKETS)},
        "brief": {
            "timeouts": Timeouts(keep_alive=0.25, websocket=SOCKET_SECONDS, send=SOCKET_SECONDS / 2),
            "allowed_origins": [WELCOME_ORIGIN],
        },
        "single": {
            "runner": LocalRunner(max_concurrent=1, max_queued=1),
            "resumable": True,
            "timeouts": Timeouts(keep_alive=60.0),
        },
    }.get(setting, {})
    return ResponsesKit(
        puppet,
        owner=owner,
        tools=hosted_tools(strings),
        secrets=SECRETS,
        **{"limits": limits, "timeouts": Timeouts(keep_alive=0.25), **more, **(host or in_memory(strings))},
    )


async def _bare_app(scope: Any, receive: Any, send: Any) -> None:
    """A whole ASGI app without a framework."""
    if scope["type"] == "lifespan":
        await receive()
        scope["state"]["started"] = True
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": f"host at {scope['path']}"})
        await send({"type": "websocket.close", "code": 1000})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    status, answer = 404, HOST_404.encode()
    if scope["path"] == "/host/echo":
        said = {
            "method": scope["method"],
            "path": scope["path"],
            "root_path": scope.get("root_path", ""),
            "query": scope["query_string"].decode(),
            "length": len(body),
            "body": body[:100].decode(),
        }
        status, answer = 200, json.dumps(said).encode()
    elif scope["path"] == "/host/state":
        status, answer = 200, json.dumps({"started": scope["state"].get("started", False)}).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-host", b"bare")]})
    await send({"type": "http.response.body", "body": answer})


def middleware(kit: ResponsesKit) -> Any:
    from responses_kit_starlette import ResponsesMiddleware

    app = ResponsesMiddleware(_bare_app, kit, prefix="/v1")
    return ResponsesMiddleware(app, kit, prefix="/lmsp/v1", dialect=LMSP)


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"started": True}


async def _echo(request: Any) -> Any:
    from starlette.responses import JSONResponse

    body = await request.body()
    return JSONResponse(
        {
            "method": request.method,
            "path": request.url.path,
            "root_path": request.scope.get("root_path", ""),
            "query": request.url.query,
            "length": len(body),
            "body": body[:100].decode(),
        },
        headers={"X-Host": "starlette"},
    )


async def _state(request: Any) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"started": getattr(request.state, "started", False)})


async def _socket(websocket: Any) -> None:
    await websocket.accept()
    await websocket.send_text(f"host at {websocket.url.path}")
    await websocket.close()


async def _lost(request: Any, error: Exception) -> Any:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(HOST_404, 404)


def _host_routes() -> list[Any]:
    from starlette.routing import Route, WebSocketRoute

    return [
        Route("/host/echo", _echo, methods=["POST"]),
        Route("/host/state", _state),
        WebSocketRoute("/host/socket", _socket),
    ]


def starlette(kit: ResponsesKit) -> Any:
    from starlette.applications import Starlette

    from responses_kit_starlette import ResponsesApp

    app = Starlette(routes=_host_routes(), lifespan=_lifespan, exception_handlers={404: _lost})
    app.mount("/v1", ResponsesApp(kit))
    app.mount("/lmsp/v1", ResponsesApp(kit, dialect=LMSP))
    return app


def fastapi(kit: ResponsesKit) -> Any:
    from fastapi import FastAPI

    from responses_kit_starlette import ResponsesApp

    app = FastAPI(lifespan=_lifespan, routes=_host_routes(), exception_handlers={404: _lost})
    app.mount("/v1", ResponsesApp(kit))
    app.mount("/lmsp/v1", ResponsesApp(kit, dialect=LMSP))
    return app


def behind_middleware(kit: ResponsesKit) -> Any:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.gzip import GZipMiddleware

    from responses_kit_starlette import responses_routes

    async def dispatch(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["X-Wrapped"] = "yes"
        return response

    return Starlette(
        routes=[*_host_routes(), *responses_routes(kit, "/v1"), *responses_routes(kit, "/lmsp/v1", dialect=LMSP)],
        middleware=[Middleware(GZipMiddleware, minimum_size=100), Middleware(BaseHTTPMiddleware, dispatch=dispatch)],
        lifespan=_lifespan,
        exception_handlers={404: _lost},
    )


def _django_under_asgi(kit: ResponsesKit) -> Any:
    from .django_project import under_asgi

    return under_asgi(kit, beside=_bare_app)


def _django_under_wsgi(kit: ResponsesKit) -> Any:
    from .django_project import under_wsgi

    return under_wsgi(kit)


def _flask(kit: ResponsesKit) -> Any:
    from .flask_app import under_prefix

    return under_prefix(kit)


def _flask_view(kit: ResponsesKit) -> Any:
    from .flask_app import by_decorator

    return by_decorator(kit)


def _on_store(strings: Strings) -> dict[str, Any]:
    from .kept import settings

    return settings(strings)


@contextmanager
def _store(kind: str) -> Iterator[None]:
    from .kept import place

    with place(kind):
        yield


def _in_djangos_database(strings: Strings) -> dict[str, Any]:
    """What Django's settings bring to a kit, and would to this one, too, if it was made of them."""
    from responses_kit_django.scope import DatabaseScope
    from responses_kit_django.store import OrmStore

    class FragileOrmStore(Fragile, OrmStore):
        """The project's database."""

    store = FragileOrmStore(ttl=TTL, clock=lambda: time.time() + strings.ahead)
    return {"store": store, "surroundings": DatabaseScope()}


@contextmanager
def _django_project(database: str) -> Iterator[None]:
    from .django_project import project

    with project(database):
        yield


@dataclass(frozen=True)
class Host:
    """A way to add the kit to an app.

    Attributes:
        app: Makes the app around a kit; called in the server's own process.
        server: Which of `serve`'s servers runs it.
        settings: Makes what the host brings to its kit, in the server's own process, too.
        place: What is there as long as the server is, such as a database; servers are forked within.
        lifespan: Whether hosts of this kind have start-up code that the kit must leave in place. WSGI has none.
        sockets: Whether they can do WebSockets. Of WSGI's servers only some give the connection away.
        whole_bodies: Whether the server takes a body in, to its end, before it asks the app.
        closes: Whether the server closes the connection after a stream.
        clock: Whether tests can turn the clock of its store. Redis goes by its own.
        bound: Whether what creates responses is a view, with which they end.
        alone: Whether their framework's settings are those of a whole process, which is then the server's.
        prefix: Where the kit lives.
    """

    app: Callable[[ResponsesKit], Any]
    server: str = "uvicorn"
    settings: Callable[[Strings], dict[str, Any]] = in_memory
    place: Callable[[], AbstractContextManager[None]] = nullcontext
    lifespan: bool = True
    sockets: bool = True
    whole_bodies: bool = False
    closes: bool = False
    clock: bool = True
    bound: bool = False
    alone: bool = False
    prefix: str = "/v1"


def _under_asgi(database: str) -> Host:
    return Host(_django_under_asgi, settings=_in_djangos_database, place=partial(_django_project, database), alone=True)


def _under_wsgi(database: str) -> Host:
    return Host(
        _django_under_wsgi,
        server="gunicorn",
        settings=_in_djangos_database,
        place=partial(_django_project, database),
        lifespan=False,
        sockets=False,
        alone=True,
    )


def _under_flask(server: str, store: str = "", **more: Any) -> Host:
    kept: dict[str, Any] = {"settings": _on_store, "place": partial(_store, store)} if store else {}
    own = {
        "sockets": server == "gunicorn",
        "whole_bodies": server == "waitress",
        "closes": server == "waitress",
        "clock": store != "redis",
    }
    return Host(**{"app": _flask, "server": server, "lifespan": False, **own, **kept, **more})


BARE = "middleware on a bare ASGI app"
MOUNTS = ["Starlette mount", "FastAPI mount"]
BEHIND = "Starlette routes behind GZip and BaseHTTP middleware"
DJANGO_WSGI = "Django under WSGI, SQLite"
FLASK = "Flask on gunicorn, SQLite"
FLASK_VIEW = "Flask view on gunicorn"
WAITRESS = "Flask on waitress"

HOSTS = {
    BARE: Host(middleware),
    "Starlette mount": Host(starlette),
    "FastAPI mount": Host(fastapi),
    BEHIND: Host(behind_middleware),
    "Django under ASGI, SQLite": _under_asgi("sqlite"),
    DJANGO_WSGI: _under_wsgi("sqlite"),
}
for _server in ("gunicorn", "waitress"):
    HOSTS[f"Flask on {_server}"] = _under_flask(_server)
    HOSTS[f"Flask on {_server}, SQLite"] = _under_flask(_server, "sqlite")
    if os.environ.get("RESPONSES_KIT_TEST_POSTGRES"):
        HOSTS[f"Flask on {_server}, PostgreSQL"] = _under_flask(_server, "postgresql")
    if os.environ.get("RESPONSES_KIT_TEST_REDIS"):
        HOSTS[f"Flask on {_server}, Redis"] = _under_flask(_server, "redis")
HOSTS["Flask view on gunicorn"] = _under_flask("gunicorn", app=_flask_view, bound=True)
if os.environ.get("RESPONSES_KIT_TEST_POSTGRES"):
    HOSTS["Django under ASGI, PostgreSQL"] = _under_asgi("postgresql")
    HOSTS["Django under WSGI, PostgreSQL"] = _under_wsgi("postgresql")

DJANGO_ASGI = next(name for name in reversed(HOSTS) if name.startswith("Django under ASGI"))
"""The one on PostgreSQL, where there is PostgreSQL."""

# Which hosts the modules of the contract are run on every day; see `chosen` for all the others.

EVERYDAY = [BARE, BEHIND, DJANGO_ASGI, FLASK]
"""One of each kind, for what a host could spoil: bytes, connections, leaving."""

FARTHEST = [BARE, DJANGO_WSGI]
"""The two that have least in common, for what touches threads and tasks, or a store."""

ASYNC = [BARE, DJANGO_ASGI]
"""The two whose tasks have least in common, and a database."""

SOCKETS = [BARE, DJANGO_ASGI, FLASK]
"""One for each way to serve WebSockets."""

STORES = [BARE, DJANGO_ASGI, DJANGO_WSGI]
"""One with each store."""

ANY = [BARE]
"""The quickest, for what no host has a say in: what the kit makes of what it was given."""


def chosen(served_by: list[str]) -> list[str]:
    """The hosts that a test runs on: those given, or, where `RESPONSES_KIT_TEST_HOSTS` says so, others.

    That is "all", or a part of hosts' names, such as "Django": then all of these hosts run the whole contract.
    """
    part = os.environ.get("RESPONSES_KIT_TEST_HOSTS")
    if not part:
        return served_by
    names = [name for name in HOSTS if part == "all" or part in name]
    assert names, f"RESPONSES_KIT_TEST_HOSTS={part} is none of the hosts: {', '.join(HOSTS)}"
    return names


def single(*, sockets: bool = False) -> str:
    """The host of a test that is about one of the kit's settings.

    Args:
        sockets: Whether it needs WebSockets.
    """
    able = (name for name in chosen(ANY) if (HOSTS[name].sockets or not sockets) and not HOSTS[name].bound)
    return next(able, BARE)
