"""The hosts that the contract suite runs on. A new host is one function and one entry in `HOSTS`.

A host is an existing app with routes of its own, the kit under `/v1`, and the kit with LMSP under `/lmsp/v1`. All hosts
have the same routes, so that the suite can check that the kit does not affect them:

* `POST /host/echo` returns the request.
* `GET /host/state` returns whether the host's startup code ran.
* The WebSocket at `/host/socket` sends its path and closes.
* All other paths that are not the kit's return the host's own 404.
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

from .scripted import AsyncScriptableBackend, Control, ThreadedScriptableBackend
from .tools import hosted_tools

HOST_404 = "the host knows no such page"


def owner(request: Any) -> str:
    """Return the request's key as its owner; every host's request has `headers`."""
    key: str = request.headers.get("Authorization", "")
    if key == "Bearer stranger":
        raise errors.Unauthorized("This key opens nothing here.")
    return key


MAX_BODY_BYTES = 16 * 1024 * 1024
"""Small enough to exceed quickly, large enough for the longest text that the specification allows."""

MAX_TOOL_CALLS = 20
TTL = 24 * 60 * 60
MAX_WEBSOCKETS = 3
WEBSOCKET_TIMEOUT = 1.0
ALLOWED_ORIGIN = "https://app.example"
SECRETS = ["the secret of today", "the secret of yesterday"]


if TYPE_CHECKING:
    _AnyStore = MemoryStore
else:
    _AnyStore = object  # the mixin works with every store


class FaultInjectionMixin(_AnyStore):
    """A mixin that makes a store fail if a response's metadata asks for it.

    `{"store": "no create"}` and "no update" raise ConnectionError, "late" delays every update.
    """

    @staticmethod
    def _raise_if_requested(moment: str, record: Record) -> None:
        if f'"store":"no {moment}"'.encode() in record.response:
            raise ConnectionError("the password of the database is hunter2")

    async def create(self, owner: str, record: Record) -> Record | None:
        self._raise_if_requested("create", record)
        return await super().create(owner, record)

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._raise_if_requested("update", record)
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


class FaultyMemoryStore(FaultInjectionMixin, MemoryStore):
    """The memory store."""


def memory_settings(control: Control) -> dict[str, Any]:
    """Return the kit's settings for hosts without a store of their own."""
    return {"store": FaultyMemoryStore(ttl=TTL, clock=control.clock)}


def build_kit(control: Control, setting: str, **host: Any) -> ResponsesKit:
    """Return the kit under test.

    Args:
        control: The state that the tests control.
        setting: "loop" or "threads": the backend runs on the event loop or in threads. All other settings use the event
            loop. "extended": raw reasoning and extension events are streamed. "few_websockets": few WebSockets may be
            open. "short_timeouts": WebSockets time out early. "serial": one background response runs and one waits,
            foreground streams can be resumed, and keep-alive comments are rare.
        host: Settings that the host provides, such as a store.
    """
    backend = ThreadedScriptableBackend(control) if setting == "threads" else AsyncScriptableBackend(control)
    limits = Limits(max_body_bytes=MAX_BODY_BYTES, max_tool_calls=MAX_TOOL_CALLS)
    more: dict[str, Any] = {
        "extended": {"stream_reasoning": True, "stream_extensions": True},
        "few_websockets": {"limits": replace(limits, max_websockets=MAX_WEBSOCKETS)},
        "short_timeouts": {
            "timeouts": Timeouts(keep_alive=0.25, websocket=WEBSOCKET_TIMEOUT, send=WEBSOCKET_TIMEOUT / 2),
            "allowed_origins": [ALLOWED_ORIGIN],
        },
        "serial": {
            "runner": LocalRunner(max_concurrent=1, max_queued=1),
            "resumable": True,
            "timeouts": Timeouts(keep_alive=60.0),
        },
    }.get(setting, {})
    return ResponsesKit(
        backend,
        owner=owner,
        tools=hosted_tools(control),
        secrets=SECRETS,
        **{"limits": limits, "timeouts": Timeouts(keep_alive=0.25), **more, **(host or memory_settings(control))},
    )


async def _bare_app(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI app without a framework."""
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
        echo = {
            "method": scope["method"],
            "path": scope["path"],
            "root_path": scope.get("root_path", ""),
            "query": scope["query_string"].decode(),
            "length": len(body),
            "body": body[:100].decode(),
        }
        status, answer = 200, json.dumps(echo).encode()
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


async def _not_found(request: Any, error: Exception) -> Any:
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

    app = Starlette(routes=_host_routes(), lifespan=_lifespan, exception_handlers={404: _not_found})
    app.mount("/v1", ResponsesApp(kit))
    app.mount("/lmsp/v1", ResponsesApp(kit, dialect=LMSP))
    return app


def fastapi(kit: ResponsesKit) -> Any:
    from fastapi import FastAPI

    from responses_kit_starlette import ResponsesApp

    app = FastAPI(lifespan=_lifespan, routes=_host_routes(), exception_handlers={404: _not_found})
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
        exception_handlers={404: _not_found},
    )


def _django_under_asgi(kit: ResponsesKit) -> Any:
    from .django_project import under_asgi

    return under_asgi(kit, beside=_bare_app)


def _django_under_wsgi(kit: ResponsesKit) -> Any:
    from .django_project import under_wsgi

    return under_wsgi(kit)


def _flask(kit: ResponsesKit) -> Any:
    from .flask_app import with_extension

    return with_extension(kit)


def _flask_view(kit: ResponsesKit) -> Any:
    from .flask_app import with_endpoint

    return with_endpoint(kit)


def _store_settings(control: Control) -> dict[str, Any]:
    from .stores import settings

    return settings(control)


@contextmanager
def _store_environment(kind: str) -> Iterator[None]:
    from .stores import provide_store

    with provide_store(kind):
        yield


def _django_settings(control: Control) -> dict[str, Any]:
    """Return the kit's settings as Django's settings would provide them."""
    from responses_kit_django.scope import DatabaseScope
    from responses_kit_django.store import OrmStore

    class FaultyOrmStore(FaultInjectionMixin, OrmStore):
        """The store in the project's database."""

    store = FaultyOrmStore(ttl=TTL, clock=lambda: time.time() + control.clock_offset)
    return {"store": store, "scope": DatabaseScope()}


@contextmanager
def _django_environment(database: str) -> Iterator[None]:
    from .django_project import django_project

    with django_project(database):
        yield


@dataclass(frozen=True)
class Host:
    """A way to add the kit to an app.

    Attributes:
        app: Creates the app with a kit, in the server's process.
        server: The server that runs it; see `serve`.
        settings: Returns the kit's settings that the host provides, in the server's process.
        environment: A context, such as a database, that lasts as long as the server and its forked workers.
        has_lifespan: Whether the host has startup code that the kit must not affect. WSGI has none.
        has_websockets: Whether the host supports WebSockets. Only some WSGI servers hand over the connection.
        buffers_bodies: Whether the server reads the whole body before it calls the app.
        closes_after_stream: Whether the server closes the connection after a stream.
        has_test_clock: Whether tests can advance the clock of its store. Redis uses its own clock.
        is_view: Whether a view creates the responses, which end with its request.
        is_process_wide: Whether the framework's settings apply to the whole process.
        prefix: The URL prefix of the kit.
    """

    app: Callable[[ResponsesKit], Any]
    server: str = "uvicorn"
    settings: Callable[[Control], dict[str, Any]] = memory_settings
    environment: Callable[[], AbstractContextManager[None]] = nullcontext
    has_lifespan: bool = True
    has_websockets: bool = True
    buffers_bodies: bool = False
    closes_after_stream: bool = False
    has_test_clock: bool = True
    is_view: bool = False
    is_process_wide: bool = False
    prefix: str = "/v1"


def _under_asgi(database: str) -> Host:
    return Host(
        _django_under_asgi,
        settings=_django_settings,
        environment=partial(_django_environment, database),
        is_process_wide=True,
    )


def _under_wsgi(database: str) -> Host:
    return Host(
        _django_under_wsgi,
        server="gunicorn",
        settings=_django_settings,
        environment=partial(_django_environment, database),
        has_lifespan=False,
        has_websockets=False,
        is_process_wide=True,
    )


def _under_flask(server: str, store: str = "", **more: Any) -> Host:
    storage: dict[str, Any] = {}
    if store:
        storage = {"settings": _store_settings, "environment": partial(_store_environment, store)}
    features = {
        "has_websockets": server == "gunicorn",
        "buffers_bodies": server == "waitress",
        "closes_after_stream": server == "waitress",
        "has_test_clock": store != "redis",
    }
    return Host(**{"app": _flask, "server": server, "has_lifespan": False, **features, **storage, **more})


BARE = "middleware on a bare ASGI app"
MOUNTS = ["Starlette mount", "FastAPI mount"]
BEHIND_MIDDLEWARE = "Starlette routes behind GZip and BaseHTTP middleware"
DJANGO_WSGI = "Django under WSGI, SQLite"
FLASK = "Flask on gunicorn, SQLite"
FLASK_VIEW = "Flask view on gunicorn"
WAITRESS = "Flask on waitress"

HOSTS = {
    BARE: Host(middleware),
    "Starlette mount": Host(starlette),
    "FastAPI mount": Host(fastapi),
    BEHIND_MIDDLEWARE: Host(behind_middleware),
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
HOSTS["Flask view on gunicorn"] = _under_flask("gunicorn", app=_flask_view, is_view=True)
if os.environ.get("RESPONSES_KIT_TEST_POSTGRES"):
    HOSTS["Django under ASGI, PostgreSQL"] = _under_asgi("postgresql")
    HOSTS["Django under WSGI, PostgreSQL"] = _under_wsgi("postgresql")

DJANGO_ASGI = next(name for name in reversed(HOSTS) if name.startswith("Django under ASGI"))
"""The host with PostgreSQL if there is one."""

# Hosts of the suite's modules by default; see `select_hosts`.

DEFAULT_HOSTS = [BARE, BEHIND_MIDDLEWARE, DJANGO_ASGI, FLASK]
"""One host of each kind, for everything that a host could break: bytes, connections, disconnects."""

DISSIMILAR = [BARE, DJANGO_WSGI]
"""The two hosts with the least in common, for everything that depends on threads, tasks or a store."""

ASYNC_HOSTS = [BARE, DJANGO_ASGI]
"""An ASGI app without a framework, and Django with a database."""

WEBSOCKET_HOSTS = [BARE, DJANGO_ASGI, FLASK]
"""One host for each way to serve WebSockets."""

STORE_HOSTS = [BARE, DJANGO_ASGI, DJANGO_WSGI]
"""One host with each store."""

FASTEST = [BARE]
"""The fastest host, for behaviour that does not depend on the host."""


def select_hosts(served_by: list[str]) -> list[str]:
    """Return the hosts that a test runs on.

    The variable `RESPONSES_KIT_TEST_HOSTS` overrides `served_by` for the whole suite: it is "all" or a part of the
    hosts' names, such as "Django".
    """
    part = os.environ.get("RESPONSES_KIT_TEST_HOSTS")
    if not part:
        return served_by
    names = [name for name in HOSTS if part == "all" or part in name]
    assert names, f"RESPONSES_KIT_TEST_HOSTS={part} matches none of the hosts {', '.join(HOSTS)}"
    return names


def settings_host(*, websockets: bool = False) -> str:
    """Return the host for a test of one of the kit's settings.

    Args:
        websockets: Whether the test needs WebSockets.
    """
    able = (
        name
        for name in select_hosts(FASTEST)
        if (HOSTS[name].has_websockets or not websockets) and not HOSTS[name].is_view
    )
    return next(able, BARE)
