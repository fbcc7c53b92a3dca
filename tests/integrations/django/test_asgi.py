"""Tests of `ResponsesASGI`: routing, long bodies, startup and shutdown, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from responses_kit import Limits, ResponsesKit
from responses_kit.adapters import asgi
from responses_kit.errors import ConfigurationError, Unauthorized
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Record
from responses_kit.testing import Pause, ScriptedBackend

from .databases import configure

configure()

from asgiref.sync import markcoroutinefunction  # noqa: E402  # Django's settings come first
from django.core.asgi import get_asgi_application  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import URLPattern, URLResolver, include, path  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402

from responses_kit_django.asgi import ResponsesASGI  # noqa: E402
from responses_kit_django.views import ResponsesView  # noqa: E402

pytestmark = pytest.mark.anyio

LIMIT = 100_000
PIECE = b" " * 50_000
BOUND = 10.0

urlpatterns: list[URLPattern | URLResolver] = []

Message = dict[str, Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Closing(ScriptedBackend):
    """A backend that records when it is closed."""

    def __init__(self, *scripts: Any) -> None:
        super().__init__(*scripts)
        self.begun, self.closed = asyncio.Event(), asyncio.Event()

    async def generate(self, turn: Any) -> Any:
        self.begun.set()
        try:
            async for output in super().generate(turn):
                yield output
        finally:
            self.closed.set()


def owner(request: HttpRequest) -> str:
    if request.headers.get("Authorization") == "Bearer stranger":
        raise Unauthorized("This key opens nothing here.")
    return "ann"


@csrf_exempt
def _length(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(len(request.read())))


@contextmanager
def site(kit: ResponsesKit | None, *middleware: str, **settings: Any) -> Iterator[None]:
    """A project with the given kit, or with the kit of its settings."""
    view = ResponsesView.as_view(kit=kit)
    urlpatterns[:] = [path("length", _length), path("v1/", include([path("", view), path("<path:path>", view)]))]
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], MIDDLEWARE=[*middleware], **settings):
        yield


def create_kit(backend: ScriptedBackend | None = None, **more: Any) -> ResponsesKit:
    return ResponsesKit(backend or ScriptedBackend(["Hi."]), owner=owner, limits=Limits(max_body_bytes=LIMIT), **more)


class Connection:
    """One ASGI connection without a server.

    Attributes:
        sent: The messages that the app has sent.
        taken: The number of messages that the app has received.
    """

    def __init__(self, *messages: Message) -> None:
        self.sent: list[Message] = []
        self.taken = 0
        self.left = asyncio.Event()
        self._waiting = [*messages]

    async def receive(self) -> Message:
        self.taken += 1
        if self._waiting:
            return self._waiting.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def with_(self, app: Callable[[Any, Any, Any], Awaitable[None]], kind: str, where: str, **more: Any) -> None:
        method = {"method": "POST"} if kind == "http" else {}
        scope = {"type": kind, "path": where, "query_string": b"", "headers": [], "asgi": {"version": "3.0"}}
        with anyio.fail_after(BOUND):
            await app({**scope, **method, **more}, self.receive, self.send)

    @property
    def answer(self) -> tuple[int, bytes]:
        body = b"".join(message.get("body", b"") for message in self.sent[1:])
        return self.sent[0]["status"], body


def pieces(number: int) -> list[Message]:
    return [{"type": "http.request", "body": PIECE, "more_body": True} for _ in range(number)]


# Long bodies.


async def test_announced_oversize_body_is_refused_unread() -> None:
    connection = Connection(*pieces(100))
    with site(create_kit()):
        app = ResponsesASGI(get_asgi_application())
        headers = [(b"content-length", b"%d" % (LIMIT + 1))]
        await connection.with_(app, "http", "/v1/responses", headers=headers)
    status, body = connection.answer
    assert (status, json.loads(body)["error"]["code"]) == (413, "payload_too_large")


async def test_growing_oversize_body_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.core.handlers.asgi import ASGIHandler

    connection, kept = Connection(*pieces(100)), 0
    read_body = ASGIHandler.read_body

    async def measured(self: ASGIHandler, receive: Any) -> Any:
        nonlocal kept
        body = await read_body(self, receive)
        kept = body.seek(0, 2)
        body.seek(0)
        return body

    monkeypatch.setattr(ASGIHandler, "read_body", measured)
    with site(create_kit()):
        await connection.with_(ResponsesASGI(get_asgi_application()), "http", "/v1/responses")
    status, body = connection.answer
    assert (status, json.loads(body)["error"]["code"]) == (413, "payload_too_large")
    assert LIMIT < kept <= LIMIT + len(PIECE)


async def test_body_of_exact_limit_is_accepted() -> None:
    question = b'{"input": "Hello?"}'
    body = question + b" " * (LIMIT - len(question))
    connection = Connection(
        {"type": "http.request", "body": body[:70_000], "more_body": True},
        {"type": "http.request", "body": body[70_000:]},
    )
    with site(create_kit()):
        await connection.with_(ResponsesASGI(get_asgi_application()), "http", "/v1/responses")
    assert connection.answer[0] == 200


async def test_other_pages_have_no_body_limit() -> None:
    connection = Connection(*pieces(10), {"type": "http.request"})
    with site(create_kit()):
        await connection.with_(ResponsesASGI(get_asgi_application()), "http", "/length")
    assert connection.answer == (200, b"%d" % (10 * len(PIECE)))


# Startup and shutdown.


STARTS, STOPS = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}


def kinds(connection: Connection) -> list[str]:
    return [message["type"] for message in connection.sent]


async def alive(kit: ResponsesKit) -> bool:
    """Return whether the kit is running on this event loop."""
    return kit in asgi._LIFETIMES.get(asyncio.get_running_loop(), {})


async def test_mounted_kits_start_and_stop_with_server() -> None:
    kit, seen = create_kit(), []

    class Watching(Connection):
        async def receive(self) -> Message:
            seen.append(await alive(kit))
            return await super().receive()

    connection = Watching(STARTS, STOPS)
    with site(kit):
        await connection.with_(ResponsesASGI(get_asgi_application()), "lifespan", "")
    assert kinds(connection) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert seen == [False, True]
    assert not await alive(kit)


async def test_project_lifespan_wraps_kit_lifespan() -> None:
    kit, seen, connection = create_kit(), [], Connection(STARTS, STOPS)

    async def around(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == STARTS
        seen.append(await alive(kit))
        await send({"type": "lifespan.startup.complete"})
        seen.append(await alive(kit))
        assert await receive() == STOPS
        seen.append(await alive(kit))
        await send({"type": "lifespan.shutdown.complete"})

    with site(kit):
        await connection.with_(ResponsesASGI(around), "lifespan", "")
    assert kinds(connection) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert seen == [False, True, False]


async def test_project_startup_failure_is_passed_on() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})
        raise LookupError

    connection = Connection(STARTS)
    with site(create_kit()), pytest.raises(LookupError):
        await connection.with_(ResponsesASGI(broken), "lifespan", "")
    assert kinds(connection) == ["lifespan.startup.failed"]


class NotSetUp(MemoryStore):
    async def get(self, owner: str, response_id: str) -> Record | None:
        raise ConfigurationError("the tables are missing")


async def test_project_starts_with_misconfigured_api(caplog: pytest.LogCaptureFixture) -> None:
    connection, page = Connection(STARTS, STOPS), Connection({"type": "http.request", "body": b"four"})
    with site(create_kit(store=NotSetUp(), secrets=["s" * 32])):
        app = ResponsesASGI(get_asgi_application())
        await connection.with_(app, "lifespan", "")
        await page.with_(app, "http", "/length")
    assert kinds(connection) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert page.answer == (200, b"4")
    assert "the tables are missing" in caplog.text


@pytest.mark.parametrize("debug", [False, True])
async def test_misconfigured_api_returns_error_object(caplog: pytest.LogCaptureFixture, debug: bool) -> None:
    short = {"type": "http.request", "body": b'{"input": "Hello?"}'}
    with site(None, RESPONSES_KIT={"BACKEND": "no.such.Thing"}, DEBUG=debug):
        for message in (short, {"type": "http.request", "body": PIECE}):
            connection = Connection(message)
            await connection.with_(ResponsesASGI(get_asgi_application()), "http", "/v1/responses")
            status, body = connection.answer
            error = json.loads(body)["error"]
            assert (status, error["type"], error["code"]) == (500, "server_error", "server_error")
            assert ("no.such" in error["message"] or "'no'" in error["message"]) is debug
    records = [record for record in caplog.records if record.name == "responses_kit"]
    assert len(records) == 2
    assert all("RESPONSES_KIT['BACKEND']" in record.getMessage() for record in records)
    assert not any(record.exc_info for record in records)


# WebSockets.


async def answered(app: Any, where: str, **more: Any) -> list[Message]:
    connection = Connection({"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000})
    await connection.with_(app, "websocket", where, scheme="ws", subprotocols=[], **more)
    return connection.sent


async def test_other_websockets_reach_router() -> None:
    async def router(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept", "subprotocol": scope["path"]})

    with site(create_kit()):
        app = ResponsesASGI(router)
        for where in ("/chat", "/length", "/v1"):
            assert await answered(app, where) == [{"type": "websocket.accept", "subprotocol": where}]
        assert await answered(app, "/v1/responses") == [{"type": "websocket.accept"}]


@pytest.mark.parametrize(
    ("where", "headers", "status"),
    [
        ("/v1/responses", [(b"authorization", b"Bearer stranger")], 401),
        ("/v1/models", [], 404),
        ("/nowhere", [], 404),
        ("/length", [], 200),
    ],
)
async def test_refused_websocket_gets_project_response(
    where: str, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    with site(create_kit(), "django.middleware.common.CommonMiddleware"):
        app = ResponsesASGI(get_asgi_application())
        sent = await answered(app, where, headers=headers, extensions={"websocket.http.response": {}})
        assert [message["type"] for message in sent] == [
            "websocket.http.response.start",
            "websocket.http.response.body",
        ]
        assert sent[0]["status"] == status
        lengths = [value for name, value in sent[0]["headers"] if name == b"content-length"]
        assert lengths == [b"%d" % len(sent[1]["body"])]
        assert await answered(app, where, headers=headers) == [{"type": "websocket.close"}]


# Clients that disconnect.


class SyncOnly:
    """Synchronous middleware, in which a thread waits for the response."""

    sync_capable, async_capable = True, False

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response["X-Sync"] = "yes"
        return response


@pytest.mark.parametrize("middleware", [[], [f"{__name__}.SyncOnly"]], ids=["async", "sync only"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_disconnect_closes_backend_behind_middleware(middleware: list[str], streamed: bool) -> None:
    backend = Closing(["Hi", Pause(60), "there"])
    kit = create_kit(backend)
    body = json.dumps({"input": "Hello?", "stream": streamed}).encode()
    connection = Connection({"type": "http.request", "body": body})
    with site(kit, *middleware):
        app = ResponsesASGI(get_asgi_application())
        async with anyio.create_task_group() as group:
            group.start_soon(connection.with_, app, "http", "/v1/responses")
            with anyio.fail_after(BOUND):
                await backend.begun.wait()
                connection.left.set()
                await backend.closed.wait()
    (turn,) = backend.turns
    assert (await kit.retrieve(turn.response_id, owner="ann"))["status"] == "cancelled"


class Failing:
    """Middleware that fails after the view, so that its reply is dropped."""

    sync_capable, async_capable = False, True

    def __init__(self, get_response: Callable[[HttpRequest], Awaitable[HttpResponse]]) -> None:
        self.get_response = get_response
        markcoroutinefunction(self)

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        await self.get_response(request)
        raise LookupError


class Ids(MemoryStore):
    """A store that records the ids of its records."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    async def create(self, owner: str, record: Record) -> Record | None:
        self.ids.append(record.id)
        return await super().create(owner, record)


async def is_cancelled(kit: ResponsesKit, backend: ScriptedBackend, store: Ids) -> None:
    """Wait until the only response is cancelled, and check that its backend has not answered."""
    with anyio.fail_after(BOUND):
        while (await kit.retrieve(store.ids[0], owner="ann"))["status"] != "cancelled":
            await anyio.lowlevel.checkpoint()
    assert backend.turns == []


async def test_stream_dropped_by_middleware_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_FIRST_PULL_TIMEOUT", 0.05)
    backend, store = Closing(["Hi"]), Ids()
    kit = create_kit(backend, store=store)
    connection = Connection({"type": "http.request", "body": b'{"input": "Hello?", "stream": true}'})
    with site(kit, f"{__name__}.Failing"):
        await connection.with_(ResponsesASGI(get_asgi_application()), "http", "/v1/responses")
    assert connection.answer[0] == 500
    await is_cancelled(kit, backend, store)


async def test_disconnect_before_headers_ends_stream() -> None:
    class Stuck(Connection):
        async def send(self, message: Message) -> None:
            self.left.set()
            await anyio.sleep_forever()

    backend, store = Closing(["Hi"]), Ids()
    kit = create_kit(backend, store=store)
    connection = Stuck({"type": "http.request", "body": b'{"input": "Hello?", "stream": true}'})
    with site(kit):
        await connection.with_(ResponsesASGI(get_asgi_application()), "http", "/v1/responses")
    await is_cancelled(kit, backend, store)
