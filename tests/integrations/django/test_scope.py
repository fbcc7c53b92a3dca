"""Tests of the database scope: connections of backends, tools and receivers are released, as PostgreSQL counts them."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from responses_kit import Backend, Model, Turn
from responses_kit._concurrency import loop_thread
from responses_kit.errors import APIError
from responses_kit.outputs import ToolCall
from responses_kit.stores.memory import MemoryStore
from responses_kit.tools import HostedTool

from .databases import POSTGRES, configure, postgres

configure()

from asgiref.sync import async_to_sync, sync_to_async  # noqa: E402  # Django's settings come first
from django.contrib.auth.models import Group  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402
from django.db import connection, connections, transaction  # noqa: E402
from django.http import HttpRequest  # noqa: E402
from django.test import Client, override_settings  # noqa: E402  # Django's settings come first
from django.urls import include, path  # noqa: E402

from responses_kit_django.conf import get_kit  # noqa: E402
from responses_kit_django.scope import DatabaseScope  # noqa: E402
from responses_kit_django.signals import response_completed  # noqa: E402

BOUND = 20.0

NAME = f"kit_{secrets.token_hex(6)}"
"""The application name of this module's connections in PostgreSQL."""

urlpatterns = [path("v1/", include("responses_kit_django.urls"))]


def groups_in_postgres() -> Any:
    return Group.objects.using("postgres")


class Plain(Backend):
    """A synchronous backend that uses the ORM, and blocks at "wait" until it is released."""

    models = ("plain",)
    may_go_on = threading.Event()

    def generate(self, turn: Turn) -> Iterator[Any]:
        yield f"{groups_in_postgres().count()} "
        if "wait" in turn.text:
            self.may_go_on.wait(BOUND)
        if "fail" in turn.text:
            raise ValueError("no")
        yield f"{groups_in_postgres().count()}"


class Waiting(Backend):
    """An asynchronous backend that uses the async ORM."""

    models = ("waiting",)

    async def generate(self, turn: Turn) -> AsyncIterator[Any]:
        yield f"{await groups_in_postgres().acount()} "
        if "wait" in turn.text:
            await asyncio.to_thread(Plain.may_go_on.wait, BOUND)
        if "fail" in turn.text:
            raise ValueError("no")
        yield f"{await groups_in_postgres().acount()}"

    async def admit(self, turn: Turn) -> None:
        await groups_in_postgres().acount()


class Caller(Backend):
    """A backend that calls a hosted tool."""

    models = (Model("caller", tools=True),)

    async def generate(self, turn: Turn) -> AsyncIterator[Any]:
        if turn.round == 0:
            yield ToolCall("plain", "{}")
            yield ToolCall("waiting", "{}")
        else:
            yield " ".join(str(getattr(item, "output", "")) for item in turn.items[1:])


def plain() -> str:
    return str(groups_in_postgres().count())


async def waiting() -> str:
    return str(await groups_in_postgres().acount())


TOOLS = [
    HostedTool.from_function("acme:plain", plain, name="plain"),
    HostedTool.from_function("acme:waiting", waiting, name="waiting"),
]


# Connections as PostgreSQL counts them.


@pytest.fixture(scope="module")
def _tables() -> Iterator[None]:
    if POSTGRES is None:
        pytest.skip("RESPONSES_KIT_TEST_POSTGRES is not set")
    with postgres():
        yield


class Server:
    """The counter of this module's connections in PostgreSQL."""

    def __init__(self) -> None:
        import psycopg

        self._connection = psycopg.connect(POSTGRES or "", autocommit=True)

    def connections(self) -> int:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
        row = self._connection.execute(query, [NAME]).fetchone()
        assert row is not None
        return int(row[0])

    def is_left_alone(self) -> bool:
        return wait_until(lambda: self.connections() == 0)

    def close(self) -> None:
        self._connection.close()


def wait_until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)  # another process can only be polled
    return True


@pytest.fixture
def server(_tables: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    connections["postgres"].close()
    server = Server()
    monkeypatch.setenv("PGAPPNAME", NAME)
    Plain.may_go_on.clear()
    yield server
    Plain.may_go_on.set()
    server.close()


# The project.


class Project:
    """A client of the API over WSGI or ASGI."""

    def __init__(self, interface: str, backend: type[Backend], stack: ExitStack, **said: Any) -> None:
        said = {"BACKEND": backend, "STORE": MemoryStore(), "AUTH": [], "OWNER": owner, "TOOLS": TOOLS, **said}
        stack.enter_context(override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], RESPONSES_KIT=said))
        self._app: Any = get_asgi_application() if interface == "asgi" else None

    def send(self, method: str, where: str, body: Any = None) -> httpx.Response:
        if self._app is None:
            with httpx.Client(transport=httpx.WSGITransport(self._wsgi), base_url="http://testserver") as client:
                return client.request(method, where, json=body)
        return loop_thread.call(self._send, method, where, body)

    async def _send(self, method: str, where: str, body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=BOUND) as client:
            return await client.request(method, where, json=body)

    @property
    def _wsgi(self) -> Any:
        from django.core.wsgi import get_wsgi_application

        return get_wsgi_application()

    def ask(self, text: str = "Count.", **more: Any) -> httpx.Response:
        return self.send("POST", "/v1/responses", {"input": text, **more})


def owner(request: HttpRequest) -> str:
    return f"owner {groups_in_postgres().count()}"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


INTERFACES = pytest.mark.parametrize("interface", ["wsgi", "asgi"])
BACKENDS = pytest.mark.parametrize("backend", [Plain, Waiting, Caller])
TOOLS_ON = [{"type": "acme:plain"}, {"type": "acme:waiting"}]


@INTERFACES
@BACKENDS
@pytest.mark.parametrize("how", ["whole", "streamed", "background", "twice"])
def test_connections_of_response_are_closed(
    server: Server, stack: ExitStack, interface: str, backend: type[Backend], how: str
) -> None:
    project = Project(interface, backend, stack)
    asked: dict[str, Any] = {"stream": how == "streamed", "background": how == "background"}
    if backend is Caller:
        asked["tools"] = TOOLS_ON
    for _ in range(2 if how == "twice" else 1):
        answer = project.ask(**asked)
        assert answer.status_code == 200
    if how == "background":
        where = f"/v1/responses/{answer.json()['id']}"
        wait_until(lambda: project.send("GET", where).json()["status"] == "completed")
        answer = project.send("GET", where)
    assert "0 0" in answer.text
    assert server.is_left_alone()


@INTERFACES
@pytest.mark.parametrize("backend", [Plain, Waiting])
@pytest.mark.parametrize("background", [True, False])
def test_connections_are_closed_after_backend_failure(
    server: Server, stack: ExitStack, interface: str, backend: type[Backend], background: bool
) -> None:
    project = Project(interface, backend, stack)
    answer = project.ask("fail", background=background)
    assert answer.status_code == (200 if background else 500)
    if background:
        where = f"/v1/responses/{answer.json()['id']}"
        wait_until(lambda: project.send("GET", where).json()["status"] == "failed")
    assert server.is_left_alone()


@pytest.mark.parametrize("backend", [Plain, Waiting])
def test_connections_are_closed_after_disconnect(server: Server, stack: ExitStack, backend: type[Backend]) -> None:
    Project("wsgi", backend, stack, TIMEOUTS={"keep_alive": 0.1})
    answer: Any = Client().post("/v1/responses", {"input": "wait", "stream": True}, content_type="application/json")
    assert b"response.created" in next(answer.streaming_content)
    answer.close()
    Plain.may_go_on.set()
    connections["postgres"].close()  # the connection of this thread, which has run the owner hook
    assert server.is_left_alone()


@INTERFACES
@pytest.mark.parametrize("backend", [Plain, Waiting])
@pytest.mark.parametrize("age", [600, None])
def test_persistent_connections_do_not_pile_up(
    server: Server,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    interface: str,
    backend: type[Backend],
    age: int | None,
) -> None:
    monkeypatch.setitem(connections.settings["postgres"], "CONN_MAX_AGE", age)
    project = Project(interface, backend, stack, OWNER=None)
    for _ in range(5):
        where = f"/v1/responses/{project.ask(background=True).json()['id']}"
        wait_until(lambda at=where: project.send("GET", at).json()["status"] == "completed")  # type: ignore[misc]
    assert server.is_left_alone()


@INTERFACES
def test_connections_are_bounded_by_threads(server: Server, stack: ExitStack, interface: str) -> None:
    project = Project(interface, Plain, stack, LIMITS={"max_threads": 3}, OWNER=None)
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(project.ask, "wait") for _ in range(10)]
        wait_until(lambda: server.connections() == 3)
        Plain.may_go_on.set()
        most = 0
        while not all(answer.done() for answer in answers):
            most = max(most, server.connections())
        assert {answer.result(BOUND).status_code for answer in answers} == {200}
    assert most <= 2 * 3  # PostgreSQL may count a closed connection for a moment
    assert server.is_left_alone()


@INTERFACES
def test_authentication_holds_no_connection_during_generation(server: Server, stack: ExitStack, interface: str) -> None:
    class Busy(Backend):
        models = ("busy",)

        async def generate(self, turn: Turn) -> AsyncIterator[Any]:
            await asyncio.to_thread(Plain.may_go_on.wait, BOUND)
            yield turn.owner

    project = Project(interface, Busy, stack)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(project.ask)
        wait_until(lambda: len(get_kit().store._in_progress) == 1)  # type: ignore[attr-defined]
        assert server.is_left_alone()
        assert not answer.done()
        Plain.may_go_on.set()
        assert "owner 0" in answer.result(BOUND).text


@INTERFACES
def test_connections_of_receivers_are_closed(server: Server, stack: ExitStack, interface: str) -> None:
    counts: list[int] = []

    def plain(**_: Any) -> None:
        counts.append(groups_in_postgres().count())

    async def waiting(**_: Any) -> None:
        counts.append(await groups_in_postgres().acount())

    project = Project(interface, Waiting, stack, OWNER=None)
    response_completed.connect(plain)
    response_completed.connect(waiting)
    try:
        assert project.ask().status_code == 200
    finally:
        response_completed.disconnect(plain)
        response_completed.disconnect(waiting)
    assert counts == [0, 0]
    assert server.is_left_alone()


# A transaction of the caller, such as that of a test.


class Here(Backend):
    """A backend that counts the groups in the default database."""

    models = ("here",)

    async def generate(self, turn: Turn) -> AsyncIterator[Any]:
        yield f"{await Group.objects.acount()}"


def test_transaction_around_kit_call_stays_open() -> None:
    said = {"BACKEND": Here, "STORE": "memory:"}
    with override_settings(RESPONSES_KIT=said), transaction.atomic():
        Group.objects.create(name="not committed")
        response = async_to_sync(get_kit().create)({"input": "Count."}, owner="ann")
        assert response["output"][0]["content"][0]["text"] == "1"
        assert Group.objects.count() == 1
        transaction.set_rollback(True)
    assert not Group.objects.exists()


def test_transaction_around_scope_stays_open() -> None:
    with transaction.atomic():
        Group.objects.create(name="not committed")
        with DatabaseScope().thread_scope():
            assert Group.objects.count() == 1
        assert Group.objects.count() == 1
        transaction.set_rollback(True)
    with DatabaseScope().thread_scope():
        assert not Group.objects.exists()
    assert connection.connection is None


# Threads.


def test_async_orm_thread_ends_with_response() -> None:
    names: list[int] = []

    class Looking(Backend):
        models = ("looking",)

        async def generate(self, turn: Turn) -> AsyncIterator[Any]:
            for _ in range(2):
                names.append(await sync_to_async(threading.get_ident)())
            yield "Hi."

    async def ask() -> None:
        found = get_kit()
        await asyncio.gather(*[found.create({"input": "Hi"}) for _ in range(3)], return_exceptions=True)

    with override_settings(RESPONSES_KIT={"BACKEND": Looking, "STORE": "memory:"}):
        get_kit()
        loop_thread.call(ask)
    assert len(names) == 6
    assert threading.get_ident() not in names
    assert all(first == second for first, second in zip(sorted(names)[::2], sorted(names)[1::2], strict=True))
    wait_until(lambda: not {*names} & {thread.ident for thread in threading.enumerate()})


def test_refused_admission_leaves_no_connections() -> None:
    class Strict(Here):
        async def admit(self, turn: Turn) -> None:
            await Group.objects.acount()
            raise APIError("Not today.")

    before = threading.active_count()
    with override_settings(RESPONSES_KIT={"BACKEND": Strict, "STORE": "memory:"}):
        get_kit()
        for _ in range(5):
            with pytest.raises(APIError, match=r"Not today\."):
                loop_thread.call(lambda: get_kit().create({"input": "Hi"}))
    wait_until(lambda: threading.active_count() <= before + 2)  # the event loop's thread and the one that stops it
