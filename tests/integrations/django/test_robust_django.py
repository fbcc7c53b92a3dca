"""Tests of failures: closed connections, conflicting transactions, exhausted pools and dropped replies."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import anyio
import httpx
import pytest

from responses_kit import Backend, Turn
from responses_kit.stores.protocol import Record

from .databases import POSTGRES, configure, postgres

configure()

from asgiref.sync import iscoroutinefunction  # noqa: E402
from django.conf import settings  # noqa: E402  # Django's models come after its settings
from django.core.asgi import get_asgi_application  # Django's settings come first  # noqa: E402
from django.db import OperationalError, connections, transaction  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.test import Client, override_settings  # noqa: E402  # Django's settings come first
from django.urls import include, path  # noqa: E402
from django.utils.decorators import sync_and_async_middleware  # noqa: E402

from responses_kit_django.conf import get_kit  # noqa: E402
from responses_kit_django.models import Conversation, Item, Piece, Response  # noqa: E402
from responses_kit_django.signals import response_failed  # noqa: E402
from responses_kit_django.store import OrmStore  # noqa: E402

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

BOUND = 20.0

needs_postgres = pytest.mark.skipif(POSTGRES is None, reason="RESPONSES_KIT_TEST_POSTGRES names no server")

urlpatterns = [path("v1/", include("responses_kit_django.urls"))]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def _tables_of_postgres() -> Iterator[None]:
    with nullcontext() if POSTGRES is None else postgres():
        yield


@pytest.fixture
def on_postgres() -> Iterator[str]:
    yield "postgres"
    with connections["postgres"].cursor() as cursor:
        for model in (Piece, Item, Response, Conversation):
            cursor.execute(f"DELETE FROM {model._meta.db_table}")
    connections["postgres"].close()


def record(response_id: str, **changes: Any) -> Record:
    given: dict[str, Any] = {
        "id": response_id,
        "previous_id": None,
        "input": b"[]",
        "response": b"{}",
        "item_ids": (),
        "final": False,
        "events": "logged",
        "lease": time.time() + 60,
    }
    return Record(**given | changes)


async def aside(call: Callable[[], Any]) -> Any:
    """Return the result of a function that uses the ORM, called in a thread."""

    def run() -> Any:
        try:
            return call()
        finally:
            connections.close_all()

    return await asyncio.to_thread(run)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(BOUND):
        while not condition():  # noqa: ASYNC110  # polls, as there is no event to wait for
            await asyncio.sleep(0.01)


# Restarts of the database.


@needs_postgres
async def test_store_survives_terminated_idle_connections(on_postgres: str) -> None:
    store = OrmStore(on_postgres, threads=4)
    there = threading.Barrier(4, timeout=BOUND)

    def work() -> int:
        there.wait()  # each call then uses its own connection
        with connections[on_postgres].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return int(cursor.fetchone()[0])

    def end(backends: list[int]) -> None:
        with connections[on_postgres].cursor() as cursor:
            for backend in backends:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
                assert cursor.fetchone() == (True,)

    backends = await asyncio.gather(*(store._run(work) for _ in range(4)))
    await aside(lambda: end(backends))
    others = await asyncio.gather(*(store._run(work) for _ in range(4)))
    assert len({*backends, *others}) == 8
    await store.aclose()


# Conflicting transactions.


@needs_postgres
async def test_serialization_failure_is_retried(on_postgres: str) -> None:
    """Delete a response as Django's ORM does, which locks related rows before the response."""
    store = OrmStore(on_postgres)
    await store.create("ann", record("one", item_ids=("msg_a",)))
    locked, may_go_on = threading.Event(), threading.Event()

    def delete_elsewhere() -> None:
        with transaction.atomic(using=on_postgres):
            with connections[on_postgres].cursor() as cursor:
                cursor.execute(
                    "SET LOCAL deadlock_timeout = '30s'"
                )  # makes the database roll back the other transaction
            Item.objects.using(on_postgres).filter(item_id="msg_a").select_for_update().get()
            locked.set()
            assert may_go_on.wait(BOUND)
            Response.objects.using(on_postgres).select_for_update().get(response_id="one")

    elsewhere = asyncio.create_task(aside(delete_elsewhere))
    await until(locked.is_set)
    deleting = asyncio.create_task(store.delete("ann", "one"))
    await until_waiting(on_postgres)
    may_go_on.set()
    await elsewhere
    assert await deleting
    await store.aclose()


async def until_waiting(using: str) -> None:
    """Wait until a transaction waits for a lock."""

    def waits() -> bool:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
            return bool(cursor.fetchone()[0])

    with anyio.fail_after(BOUND):
        while not await aside(waits):
            pass


@needs_postgres
async def test_repeated_serialization_failure_is_error(on_postgres: str) -> None:
    store = OrmStore(on_postgres)
    tries = 0

    def be_undone() -> None:
        nonlocal tries
        tries += 1
        with connections[on_postgres].cursor() as cursor:
            cursor.execute("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40P01'; END $$")

    with pytest.raises(OperationalError, match="40P01"):
        await store._run(be_undone)
    assert tries == 3
    await store.aclose()


# Django's connection pool.


@needs_postgres
async def test_store_works_while_streams_hold_connection_pool(on_postgres: str) -> None:
    pytest.importorskip("psycopg_pool")
    given = settings.DATABASES[on_postgres]
    pool = {"min_size": 0, "max_size": 1, "timeout": 1}
    connections.settings["pooled"] = {**given, "CONN_MAX_AGE": 0, "OPTIONS": {**given["OPTIONS"], "pool": pool}}
    asked, may_go_on = threading.Event(), threading.Event()

    def stream() -> None:
        with connections["pooled"].cursor() as cursor:
            cursor.execute("SELECT 1")
            asked.set()
            assert may_go_on.wait(BOUND)

    try:
        streaming = asyncio.create_task(aside(stream))
        await until(asked.is_set)
        store = OrmStore("pooled")
        assert await store.create("ann", record("one")) is None
        may_go_on.set()
        await streaming
        await store.aclose()
        await aside(lambda: connections["pooled"].close_pool())  # type: ignore[attr-defined]  # of PostgreSQL's only
    finally:
        may_go_on.set()
        del connections.settings["pooled"]


# Replies that middleware drops.


class Endless(Backend):
    """A backend that never finishes."""

    models = ("endless",)

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        while True:
            yield "word "
            await asyncio.sleep(0.01)


@sync_and_async_middleware
def another_answers(get_response: Any) -> Any:
    if iscoroutinefunction(get_response):

        async def middleware(request: HttpRequest) -> HttpResponse:
            await get_response(request)
            return HttpResponse("something else")

        return middleware

    def synchronous(request: HttpRequest) -> HttpResponse:
        get_response(request)
        return HttpResponse("something else")

    return synchronous


@sync_and_async_middleware
def fails(get_response: Any) -> Any:
    if iscoroutinefunction(get_response):

        async def middleware(request: HttpRequest) -> HttpResponse:
            await get_response(request)
            raise ValueError("no")

        return middleware

    def synchronous(request: HttpRequest) -> HttpResponse:
        get_response(request)
        raise ValueError("no")

    return synchronous


@pytest.fixture(params=["another_answers", "fails"])
def lost(request: pytest.FixtureRequest) -> Iterator[threading.Event]:
    """A project with middleware that drops replies; yields an event that is set when a response has ended."""
    ended = threading.Event()

    def hear(**_: Any) -> None:
        ended.set()

    given: dict[str, Any] = {"BACKEND": Endless, "STORE": "memory:", "AUTH": [], "OWNER": None}
    response_failed.connect(hear)
    with override_settings(
        ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.{request.param}"], RESPONSES_KIT=given, ALLOWED_HOSTS=["*"]
    ):
        yield ended
    response_failed.disconnect(hear)


BODY = {"model": "endless", "input": "Hi", "stream": True}


def test_reply_lost_by_wsgi_middleware_ends_backend(lost: threading.Event) -> None:
    client = Client(raise_request_exception=False)
    client.post("/v1/responses", json.dumps(BODY), content_type="application/json")
    gc.collect()  # an exception's traceback refers to the reply
    assert lost.wait(BOUND)


async def test_reply_lost_by_asgi_middleware_ends_response(lost: threading.Event) -> None:
    application: Any = get_asgi_application()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        await client.post("/v1/responses", json=BODY)
    gc.collect()
    await until(lost.is_set)
    await get_kit().aclose()
