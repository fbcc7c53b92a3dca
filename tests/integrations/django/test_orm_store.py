"""Tests of `OrmStore`: the contract, expiry, threads and connections, and several processes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from responses_kit import ResponsesKit, errors
from responses_kit.stores.protocol import Log, Record, call_store
from responses_kit.testing import ScriptedBackend
from responses_kit.testing.store_contract import STORE_CONTRACT, Check

from .databases import POSTGRES, configure, postgres

configure()

from django.conf import settings  # noqa: E402  # Django's models come after its settings
from django.core.management import call_command  # noqa: E402
from django.db import Error, OperationalError, connections, transaction  # noqa: E402
from django.db.backends.utils import CursorWrapper  # noqa: E402
from django.test import override_settings  # noqa: E402

from responses_kit_django.models import Conversation, Item, Piece, Response  # noqa: E402
from responses_kit_django.store import (  # noqa: E402
    OrmStore,
    connection,
    database,
    pruning,
    queries,
    statements,
    thread_pool,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

FUTURE = 4_102_444_800.0
SECRET = "what was stored"

needs_postgres = pytest.mark.skipif(POSTGRES is None, reason="RESPONSES_KIT_TEST_POSTGRES names no server")
DATABASES = [pytest.param("other", id="sqlite"), pytest.param("postgres", id="postgres", marks=needs_postgres)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def _tables_of_postgres() -> Iterator[None]:
    with nullcontext() if POSTGRES is None else postgres():
        yield


@pytest.fixture(params=DATABASES)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    clear(request.param)


@pytest.fixture
def on_postgres() -> Iterator[str]:
    yield "postgres"
    clear("postgres")


def clear(using: str) -> None:
    with connections[using].cursor() as cursor:
        for model in (Piece, Item, Response, Conversation):
            cursor.execute(f"DELETE FROM {model._meta.db_table}")
    connections[using].close()


async def aside(call: Callable[[], Any]) -> Any:
    """Return the result of a function that uses the ORM, called in a thread."""

    def run() -> Any:
        try:
            return call()
        finally:
            connections.close_all()

    return await asyncio.to_thread(run)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def opened(using: str, **options: Any) -> AsyncIterator[OrmStore]:
    store = OrmStore(using, **options)
    try:
        yield store
    finally:
        await store.aclose()


@contextmanager
def another(name: str, using: str, **changes: Any) -> Iterator[str]:
    """Add an alias for a database with other settings."""
    given = settings.DATABASES[using]
    options = {**given["OPTIONS"], **changes.pop("OPTIONS", {})}
    connections.settings[name] = {**given, **changes, "OPTIONS": options}
    try:
        yield name
    finally:
        del connections.settings[name]
        if hasattr(connections._connections, name):
            del connections[name]


@contextmanager
def statements_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the statements on all databases, one for each round trip, without BEGIN and COMMIT."""
    seen: list[str] = []
    execute = CursorWrapper._execute

    def note(self: Any, sql: str, *rest: Any) -> Any:
        if sql not in ("BEGIN", statements._LOCK_SQLITE):
            seen.append(sql)
        return execute(self, sql, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(CursorWrapper, "_execute", note)
        yield seen


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110  # polls, as there is no event to wait for
            await asyncio.sleep(0.01)


async def rows(using: str) -> dict[str, int]:
    """Return the number of rows of each table."""
    models = (Response, Item, Piece, Conversation)
    return await aside(lambda: {model.__name__: model.objects.using(using).count() for model in models})


def record(name: str, *, previous: str | None = None, final: bool = True, **fields: Any) -> Record:
    return Record(
        id=name,
        previous_id=previous,
        input=b'[{"type":"message"}]',
        response=b'{"object":"response"}',
        item_ids=(f"{name}_in", f"{name}_out"),
        final=final,
        lease=FUTURE,
        **fields,
    )


async def converse(store: OrmStore, turns: int, *, name: str = "turn", first: int = 0) -> None:
    for number in range(first, first + turns):
        previous = f"{name}_{number - 1}" if number else None
        assert await store.create("ann", record(f"{name}_{number}", previous=previous)) is None


class LeaseHolder:
    """A call that blocks until it is released."""

    def __init__(self) -> None:
        self.begun, self.free, self.done = threading.Event(), threading.Event(), 0

    def __call__(self) -> str:
        self.begun.set()
        assert self.free.wait(30)
        self.done += 1
        return threading.current_thread().name


def describe_exception_chain(failure: BaseException) -> str:
    return "".join(traceback.format_exception(failure))


# The contract.


@pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("database", DATABASES)
async def test_store_passes_contract(check: Check, database: str) -> None:
    @asynccontextmanager
    async def make_store() -> AsyncIterator[OrmStore]:
        async with opened(database) as store:
            yield store
        await aside(lambda: clear(database))

    await check(make_store)


VARIANTS = [
    pytest.param({"OPTIONS": {"server_side_binding": True}}, id="server-side binding"),
    pytest.param({"OPTIONS": {"isolation_level": 4}}, id="serializable"),
    pytest.param({"CONN_MAX_AGE": None}, id="persistent"),
    pytest.param({"CONN_MAX_AGE": 60, "CONN_HEALTH_CHECKS": True}, id="health checks"),
]


@needs_postgres
@pytest.mark.parametrize("changes", VARIANTS)
async def test_store_passes_contract_with_any_connection_settings(changes: dict[str, Any], on_postgres: str) -> None:
    telling = (
        "keeps_what",
        "returns",
        "finds_items",
        "gives",
        "lets",
        "cancels_or",
        "renews_only",
        "updates",
        "knows_a_",
    )
    with another("variant", on_postgres, **changes) as using:

        @asynccontextmanager
        async def make_store() -> AsyncIterator[OrmStore]:
            async with opened(using) as store:
                yield store
            await aside(lambda: clear("postgres"))

        for check in STORE_CONTRACT:
            if check.__name__.startswith(telling):
                await check(make_store)


ODD = [
    "",
    "a\x00b",
    "\ud800",
    "?",
    "\ufffd",
    "%00",
    "%",
    "%s",
    "#",
    "é",
    "日本 😀",
    '"\\\n',
    "x" * 5000,
    "x" * 4999 + "y",
    "É",
]


async def test_any_text_is_valid_owner_id_and_key(using: str) -> None:
    async with opened(using) as store:
        for number, owner in enumerate(ODD):
            odd = replace(record(f"r{number}", final=False), lease=5.0 + number, key=owner, item_ids=(owner,))
            assert await store.create(owner, odd) is None
        for number, owner in enumerate(ODD):
            kept = await store.get(owner, f"r{number}")
            assert kept is not None
            assert (kept.key, kept.item_ids) == (owner, (owner,))
            assert await store.items(owner, [owner]) == {owner: kept}
            assert await store.create(owner, record("another", key=owner)) == kept
        assert [owner for owner, _ in await store.expired(100.0)] == ODD
        for name in ODD:
            assert await store.create("ann", replace(record(name), previous_id=f"{name}.")) is None
        for name in ODD:
            kept = await store.get("ann", name)
            assert kept is not None
            assert (kept.id, kept.previous_id) == (name, f"{name}.")


async def test_infinite_lease_is_stored(using: str) -> None:
    async with opened(using) as store:
        endless = replace(record("r", final=False), lease=float("inf"))
        await store.create("ann", endless)
        assert await store.get("ann", "r") == endless
        assert await store.expired(FUTURE) == []
        assert await store.cancel("ann", "r", 5.0)
        kept = await store.get("ann", "r")
        assert kept is not None
        assert kept.lease == 5.0


@pytest.mark.parametrize("field", ["input", "response"])
@pytest.mark.parametrize("data", [b'"a\x00b"', b"\xff"])
async def test_invalid_json_is_refused(using: str, field: str, data: bytes) -> None:
    async with opened(using) as store:
        live = record("live", final=False)
        await store.create("ann", live)
        for call in (
            store.create("ann", replace(record("r"), **{field: data})),
            store.update("ann", replace(live, **{field: data}), Log(0, 1, b"x")),
        ):
            with pytest.raises(errors.StoreError, match="not valid JSON"):
                await call
        assert await store.get("ann", "r") is None
        assert await store.get("ann", "live") == live
        assert await store.events("ann", "live", -1) == []


# The columns of the admin.


async def test_searchable_fields_have_columns(using: str) -> None:
    response_object = {
        "status": "in_progress",
        "model": "smollm2",
        "background": True,
        "created_at": 1_700_000_000,
        "usage": None,
    }
    names = ("status", "model", "background", "created", "input_tokens", "output_tokens")

    async def columns() -> tuple[Any, ...]:
        return await aside(lambda: Response.objects.using(using).values_list(*names).get())

    async with opened(using) as store:
        live = replace(record("r", final=False), response=json.dumps(response_object).encode())
        await store.create("ann", live)
        made = datetime.fromtimestamp(1_700_000_000, UTC)
        assert await columns() == ("in_progress", "smollm2", True, made, None, None)
        response_object |= {"status": "completed", "usage": {"input_tokens": 7, "output_tokens": 2**40}}
        await store.update("ann", replace(live, response=json.dumps(response_object).encode(), final=True))
        assert await columns() == ("completed", "smollm2", True, made, 7, 2**40)


@pytest.mark.parametrize(
    "response",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b"1e999",
        b"[" * 100_000,
        json.dumps(
            {
                "status": "x" * 1000,
                "model": "m\0" * 1000,
                "background": "yes",
                "created_at": 1e300,
                "usage": {"input_tokens": 2**63, "output_tokens": -1},
            }
        ).encode(),
        json.dumps({"status": 7, "model": None, "created_at": "now", "usage": [1]}).encode(),
        b'{"model":"\\ud800","created_at":NaN,"usage":{"input_tokens":1.5}}',
    ],
)
async def test_response_of_any_form_is_stored(using: str, response: bytes, clock: Clock) -> None:
    async with opened(using, clock=clock) as store:
        odd = replace(record("r", final=False), response=response)
        assert await store.create("ann", odd) is None
        assert await store.update("ann", odd)
        assert await store.get("ann", "r") == odd
        row = await aside(lambda: Response.objects.using(using).get())
        assert (row.background, row.input_tokens, row.output_tokens) == (False, None, None)
        assert row.created == datetime.fromtimestamp(clock.now, UTC)


async def test_naive_times_are_supported(clock: Clock) -> None:
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo"):
        async with opened("other", clock=clock) as store:
            await store.create("ann", record("r"))
            created = await aside(lambda: Response.objects.using("other").get().created)
    clear_later = aside(lambda: clear("other"))
    assert created == datetime(1970, 1, 12, 22, 46, 40)  # the value in the database
    await clear_later


# Setup.


def test_migrations_are_complete() -> None:
    call_command("makemigrations", "responses_kit_django", check=True, dry_run=True, verbosity=0)


async def test_missing_tables_are_reported_with_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with another("empty", "default", NAME=str(tmp_path / "empty.db")) as using:
        async with opened(using) as store:
            for call in (
                store.setup(),
                store.get("ann", "r"),
                store.append("ann", "r", Log(0, 1, b"x")),
                store.create("ann", record("r")),
                store.prune(),
            ):
                with pytest.raises(errors.ConfigurationError, match=r"manage\.py migrate --database empty"):
                    await call
            with pytest.raises(errors.StoreError), caplog.at_level(logging.ERROR):
                await call_store(store.get("ann", "r"))
            assert "manage.py migrate" in caplog.text
            with pytest.raises(errors.ConfigurationError, match=r"manage\.py migrate"):
                async with ResponsesKit(ScriptedBackend(["Hi."]), store=store).lifespan():
                    pass
            await aside(lambda: call_command("migrate", database=using, verbosity=0))
            await store.setup()
            assert await store.get("ann", "r") is None, "no restart is needed after the migration"


@needs_postgres
async def test_missing_tables_on_postgres_are_reported_with_remedy(on_postgres: str) -> None:
    with another("empty", on_postgres, OPTIONS={"options": "-c search_path=kit_no_such_schema"}) as using:
        async with opened(using) as store:
            for call in (store.setup(), store.get("ann", "r"), store.create("ann", record("r"))):
                with pytest.raises(errors.ConfigurationError, match=r"manage\.py migrate --database empty"):
                    await call


async def test_outdated_table_is_reported(tmp_path: Path) -> None:
    with another("older", "default", NAME=str(tmp_path / "older.db")) as using:

        def age() -> None:
            call_command("migrate", database=using, verbosity=0)
            with connections[using].cursor() as cursor:
                cursor.execute("ALTER TABLE responses_kit_django_response DROP COLUMN names")

        await aside(age)
        async with opened(using) as store:
            for call in (store.get("ann", "r"), store.create("ann", record("r"))):
                with pytest.raises(errors.ConfigurationError, match="out of date"):
                    await call


class NotThere:
    """A router that allows the app in one database only."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db == "other" if app_label == "responses_kit_django" else None

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "default"

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "responses_kit_django" else None


async def test_database_routers_choose_database(tmp_path: Path) -> None:
    with override_settings(DATABASE_ROUTERS=["tests.integrations.django.test_orm_store.NotThere"]):
        store = OrmStore()
        assert await store.create("ann", record("r")) is None
        assert await store.get("ann", "r") == record("r"), "it reads where it writes"
        assert (await rows("other"))["Response"] == 1
        with another("kept_out", "default", NAME=str(tmp_path / "kept_out.db")) as using:
            await aside(lambda: call_command("migrate", database=using, verbosity=0))
            async with opened(using) as wrong:
                with pytest.raises(errors.ConfigurationError, match="once your DATABASE_ROUTERS allow"):
                    await wrong.setup()
        await store.aclose()
    await aside(lambda: clear("other"))


async def test_databases_are_independent() -> None:
    async with opened("default") as one, opened("other") as other:
        await one.create("ann", record("r"))
        assert await other.get("ann", "r") is None
        await other.create("ann", replace(record("r"), input=b"[]"))
        assert await one.get("ann", "r") == record("r")
        assert await one.delete("ann", "r")
        assert await other.get("ann", "r") is not None
    for using in ("default", "other"):
        await aside(lambda using=using: clear(using))


def test_unsupported_database_is_refused_with_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ConfigurationError, match="nowhere"):
        OrmStore("nowhere")
    with another("mine", "default") as using:
        monkeypatch.setattr(type(connections[using]), "vendor", "mysql")
        with pytest.raises(errors.ConfigurationError, match="SqlStore or a RedisStore"):
            OrmStore(using)
        monkeypatch.undo()
    for changes, said in (
        ({"AUTOCOMMIT": False}, "AUTOCOMMIT"),
        ({"NAME": ":memory:"}, "MemoryStore"),
        ({"ENGINE": "no.such.engine"}, "no.such.engine"),
    ):
        with another("useless", "default", **changes) as using, pytest.raises(errors.ConfigurationError, match=said):
            OrmStore(using)


def test_trio_is_refused() -> None:
    trio = pytest.importorskip("trio")
    store = OrmStore("other")
    for call in (store.setup, lambda: store.get("ann", "r"), lambda: store.append("ann", "r", Log(0, 1, b"x"))):
        with pytest.raises(errors.ConfigurationError, match="asyncio"):
            trio.run(call)


# Expiry.


async def test_conversation_expires_with_its_last_response(using: str, clock: Clock) -> None:
    async with opened(using, ttl=100, clock=clock) as store:
        await converse(store, 1, name="idle")
        await converse(store, 1)
        for number in range(1, 10):
            clock.now += 60
            await converse(store, 1, first=number)
        assert len(await store.chain("ann", "turn_9")) == 10
        assert await store.get("ann", "turn_0") is not None, "the first is as old as nine turns, and there"
        assert await store.get("ann", "idle_0") is None


@pytest.mark.parametrize("use", ["get", "find", "chain", "items", "events", "update", "renew", "create"])
async def test_each_use_renews_conversation(using: str, clock: Clock, use: str) -> None:
    async with opened(using, ttl=100, clock=clock) as store:
        await converse(store, 2)
        await store.create("ann", record("live", previous="turn_1", final=False, key="key"))
        clock.now += 99
        uses: dict[str, Callable[[], Any]] = {
            "get": lambda: store.get("ann", "turn_1"),
            "find": lambda: store.find("ann", "key"),
            "chain": lambda: store.chain("ann", "turn_1"),
            "items": lambda: store.items("ann", ["turn_1_in"]),
            "events": lambda: store.events("ann", "live", -1),
            "update": lambda: store.update("ann", record("live", previous="turn_1")),
            "renew": lambda: store.renew([("ann", "live")], FUTURE),
            "create": lambda: store.create("ann", record("again", key="key")),
        }
        await uses[use]()
        clock.now += 99
        assert await store.get("ann", "turn_0") is not None


async def test_expired_records_are_unknown(using: str, clock: Clock) -> None:
    async with opened(using, ttl=100, clock=clock) as store:
        await store.create("ann", record("old", final=False, key="key"))
        assert await store.append("ann", "old", Log(0, 1, b"x"))
        clock.now += 100
        assert await store.get("ann", "old") is None
        assert await store.find("ann", "key") is None
        assert await store.chain("ann", "old") == []
        assert await store.items("ann", ["old_in"]) == {}
        assert await store.events("ann", "old", -1) is None
        assert await store.update("ann", record("old")) is False
        assert await store.delete("ann", "old") is False
        assert await store.cancel("ann", "old", 5.0) is False
        assert await store.renew([("ann", "old")], FUTURE) == set()
        assert await store.expired(FUTURE + 1) == []
        assert await store.create("ann", record("new", previous="old", key="key")) is None, "its key is free"
        assert [kept.id for kept in await store.chain("ann", "new")] == ["new"]
        clock.now += 1
        assert await store.prune() == 1
        assert await rows(using) == {"Response": 1, "Item": 2, "Piece": 0, "Conversation": 1}
        assert await store.create("ann", record("newest", key="key")) == record("new", previous="old", key="key")


async def test_read_writes_only_if_last_use_is_old(using: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(using, ttl=1000, clock=clock) as store:
        await converse(store, 3)
        with statements_seen(monkeypatch) as seen:
            for _ in range(20):
                clock.now += 0.4
                await store.chain("ann", "turn_2")
            assert len(seen) == 20, "within a hundredth of the ttl"
            clock.now += 10
            for _ in range(20):
                await store.chain("ann", "turn_2")
            assert len(seen) == 42, "and then once, after a look at who else does it"


async def test_log_expires_before_response(using: str, clock: Clock) -> None:
    async with opened(using, ttl=1000, log_ttl=60, clock=clock) as store:
        for name in ("done", "live"):
            await store.create("ann", record(name, final=False))
            assert await store.append("ann", name, Log(0, 2, b"ab"))
        clock.now += 100
        assert await store.update("ann", record("done"), Log(2, 1, b"c"))
        clock.now += 59
        assert await store.prune() == 0
        assert await store.events("ann", "done", -1) == [Log(0, 2, b"ab"), Log(2, 1, b"c")]
        clock.now += 1
        assert await store.events("ann", "done", -1) is None, "at once, pruned or not"
        assert await store.prune() == 0
        assert await store.events("ann", "done", -1) is None
        assert await store.get("ann", "done") == record("done")
        assert await store.events("ann", "live", -1) == [Log(0, 2, b"ab")]
        assert (await rows(using))["Piece"] == 1


# Pruning.


async def test_conversation_cost_is_linear(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(using) as store:
        work = []
        for number in range(20):
            with statements_seen(monkeypatch) as seen:
                await converse(store, 1, first=number)
                await store.get("ann", f"turn_{number}")
            work.append(len(seen))
        assert set(work[1:]) == {4}, "to look at the conversation, to keep the response and its items; and to read it"
        assert await rows(using) == {"Response": 20, "Item": 40, "Piece": 0, "Conversation": 1}


async def test_prune_deletes_all_expired_rows(using: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "_BATCH_SIZE", 3)
    async with opened(using, ttl=100, clock=clock) as store:
        await converse(store, 7, name="old")
        for number in range(5):
            await store.create("bob", record(f"single_{number}", final=False))
            await store.append("bob", f"single_{number}", Log(0, 1, b"x"))
            await store.append("bob", f"single_{number}", Log(1, 1, b"x"))
        clock.now += 50
        await converse(store, 4)
        await store.delete("ann", "turn_0")
        clock.now += 50
        assert await store.prune() == 12
        assert await store.prune() == 0
        assert await rows(using) == {"Response": 3, "Item": 6, "Piece": 0, "Conversation": 1}
        clock.now += 100
        assert await store.prune() == 3
        assert await rows(using) == {"Response": 0, "Item": 0, "Piece": 0, "Conversation": 0}


async def test_empty_conversation_expires(using: str, clock: Clock) -> None:
    async with opened(using, ttl=100, clock=clock) as store:
        await converse(store, 1)
        await store.delete("ann", "turn_0")
        assert (await rows(using))["Conversation"] == 1
        clock.now += 100
        assert await store.prune() == 0
        assert (await rows(using))["Conversation"] == 0


async def test_prune_evicts_least_recently_used_conversations(
    using: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_BATCH_SIZE", 2)
    async with opened(using, ttl=1000, max_records=10, clock=clock) as store:
        for name in ("a", "b", "c", "d"):
            await converse(store, 3, name=name)
            clock.now += 20
        assert await store.get("ann", "a_1") is not None, "which makes b the least recently used"
        assert await store.prune() == 3
        assert [len(await store.chain("ann", f"{name}_2")) for name in ("a", "b", "c", "d")] == [3, 0, 3, 3]
        assert await store.prune() == 0
    async with opened(using, ttl=1000, max_records=1, clock=clock) as store:
        assert await store.prune() == 9
        assert await rows(using) == {"Response": 0, "Item": 0, "Piece": 0, "Conversation": 0}


async def test_prune_evicts_no_more_than_necessary(using: str, clock: Clock) -> None:
    async with opened(using, max_records=3, clock=clock) as store:
        for number in range(8):
            await store.create("ann", record(f"r{number}"))
        assert await store.prune() == 5
        assert (await rows(using))["Response"] == 3


async def test_concurrent_prunes_are_safe(using: str, clock: Clock) -> None:
    async with opened(using, ttl=100, clock=clock) as store, opened(using, ttl=100, clock=clock) as other:
        for number in range(20):
            await converse(store, 2, name=f"c{number}")
        clock.now += 100
        gone = await asyncio.gather(*(one.prune() for one in (store, other, store, other)))
        assert sum(gone) == 40
        assert await rows(using) == {"Response": 0, "Item": 0, "Piece": 0, "Conversation": 0}


async def test_oversize_record_is_refused(using: str) -> None:
    async with opened(using, max_record_bytes=1000) as store:
        live = record("live", final=False)
        await store.create("ann", live)
        large = replace(record("large"), response=b"x" * 1000)
        for call in (
            store.create("ann", large),
            store.update("ann", replace(large, id="live")),
            store.update("ann", live, Log(0, 1, b"x" * 1001)),
            store.append("ann", "live", Log(0, 1, b"x" * 1001)),
        ):
            with pytest.raises(errors.StoreError, match="'store' to false"):
                await call
        assert await store.get("ann", "large") is None
        assert await store.get("ann", "live") == live
        assert await store.append("ann", "live", Log(0, 1, b"x" * 1000))


async def test_duplicate_id_is_refused_without_disclosure(using: str) -> None:
    async with opened(using) as store:
        await store.create("ann", record("r"))
        with pytest.raises(errors.StoreError, match="exists") as refused:
            await store.create("ann", replace(record("r"), input=json.dumps([SECRET]).encode()))
        assert SECRET not in describe_exception_chain(refused.value)
        assert refused.value.__context__ is None
        assert await store.get("ann", "r") == record("r")
        assert (await rows(using))["Conversation"] == 1


# The number of statements.


async def test_chain_is_one_statement(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(using) as store:
        await converse(store, 300)
        for length in (1, 10, 100, 300):
            with statements_seen(monkeypatch) as seen:
                chain = await store.chain("ann", f"turn_{length - 1}")
            assert [kept.id for kept in chain] == [f"turn_{number}" for number in range(length)]
            assert len(seen) == 1
        found = [f"turn_{number}_out" for number in range(300)]
        with statements_seen(monkeypatch) as seen:
            assert set(await store.items("ann", [*found, "unknown"])) == set(found)
        assert len(seen) == 1


async def test_renew_is_one_statement_for_many_runs(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(using) as store:
        await asyncio.gather(*(store.create("ann", record(f"r{number}", final=False)) for number in range(40)))
        runs = [("ann", f"r{number}") for number in range(5000)]
        for until_, most in ((None, 1), (FUTURE, 2)):
            with statements_seen(monkeypatch) as seen:
                assert await store.renew(runs, until_) == {("ann", f"r{number}") for number in range(40)}
            assert len(seen) == most


async def test_circular_chain_is_bounded(using: str) -> None:
    async with opened(using) as store:
        await store.create("ann", record("a", previous="c"))
        await store.create("ann", record("b", previous="a"))
        await store.create("ann", record("c", previous="b"))
        await store.create("ann", record("self", previous="self"))
        assert [kept.id for kept in await store.chain("ann", "c")] == ["a", "b", "c"]
        assert [kept.id for kept in await store.chain("ann", "self")] == ["self"]


async def test_record_with_many_items_is_read_once(using: str) -> None:
    async with opened(using) as store:
        names = tuple(f"i{number}" for number in range(300))
        await store.create("ann", replace(record("many"), item_ids=names, input=b'"%b"' % (b"x" * 1_000_000)))
        found = await store.items("ann", names)
        assert set(found) == set(names)
        assert len({id(holder) for holder in found.values()}) == 1


@needs_postgres
async def test_single_append_is_one_round_trip(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(on_postgres) as store:
        await store.create("ann", record("r", final=False))
        with statements_seen(monkeypatch) as seen:
            assert await store.append("ann", "r", Log(0, 1, b"x"))
        (statement,) = seen
        assert "SET LOCAL statement_timeout = 10000" in statement


async def test_concurrent_appends_are_grouped(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(using) as store:
        names = [f"r{number}" for number in range(40)]
        for name in names:
            await store.create("ann", record(name, final=False))
        done: list[bool] = []
        with statements_seen(monkeypatch) as seen:
            for number in range(5):
                done += await asyncio.gather(
                    *(store.append("ann", name, Log(number, 1, b"%d" % number)) for name in names)
                )
        assert done == [True] * 200
        assert len(seen) <= 30, "and not one for each"
        for name in names:
            assert await store.events("ann", name, 1) == [Log(number, 1, b"%d" % number) for number in (2, 3, 4)]


async def test_grouped_appends_have_separate_results(using: str) -> None:
    async with opened(using) as store:
        for name in ("a", "b", "done"):
            await store.create("ann", record(name, final=name == "done"))
        calls = [("a", 0, 2), ("b", 3, 1), ("a", 2, 1), ("a", 2, 1), ("gone", 0, 1), ("done", 0, 1), ("b", 0, 1)]
        done = await asyncio.gather(
            *(store.append("ann", name, Log(start, count, b"x" * count)) for name, start, count in calls)
        )
        assert done == [True, False, True, False, False, False, True]
        assert await store.events("ann", "a", -1) == [Log(0, 2, b"xx"), Log(2, 1, b"x")]
        assert await store.events("ann", "b", -1) == [Log(0, 1, b"x")]


# Concurrency.

WRITER = """
import asyncio, json, sys
from tests.integrations.django.databases import configure

configure(json.loads(sys.argv[1]))

from responses_kit.stores import Log
from responses_kit_django.store import OrmStore

async def main(using, name):
    store, won, start = OrmStore(using), 0, 0
    seed = await store.get("ann", "seed")
    print("ready", flush=True)
    sys.stdin.readline()
    while start < 60:
        if await store.append("ann", "shared", Log(start, 1, name.encode())):
            won += 1
        start += 1
    for number in range(20):
        assert await store.create("ann", type(seed)(
            id=f"{name}_{number}", previous_id="seed", input=b"[]", response=b"{}", final=True)) is None
        await store.renew([("ann", "shared"), ("ann", "seed")], 4e9)
    await store.aclose()
    print(won)

asyncio.run(main(*sys.argv[2:]))
"""


@asynccontextmanager
async def processes(script: str, using: str, *names: str) -> AsyncIterator[list[anyio.abc.Process]]:
    """Start Python processes of the same project, which wait for a line on their standard input."""
    databases = {name: connections.settings[name] for name in settings.DATABASES}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found = []
    try:
        for name in names:
            command = [sys.executable, "-c", script, json.dumps(databases), using, name]
            found.append(await anyio.open_process(command, stderr=None, env=env))
        yield found
    finally:
        for process in found:
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


async def all_of(process: anyio.abc.Process) -> str:
    assert process.stdout is not None
    return b"".join([chunk async for chunk in process.stdout]).decode()


async def test_several_processes_share_database(using: str) -> None:
    async with opened(using) as store:
        await store.create("ann", record("shared", final=False))
        await store.create("ann", record("seed"))
        async with processes(WRITER, using, "one", "two") as writers:
            with anyio.fail_after(50):
                for writer in writers:
                    assert (await writer.stdout.receive()).startswith(b"ready")
                for writer in writers:
                    await writer.stdin.send(b"go\n")
                won = await asyncio.gather(*map(all_of, writers))
        pieces = await store.events("ann", "shared", -1)
        assert pieces is not None
        assert [piece.start for piece in pieces] == list(range(60)), "every place was won by one"
        assert sum(map(int, won)) == 60
        assert (await rows(using))["Response"] == 42


async def test_append_after_end_is_refused_in_races(using: str) -> None:
    async with opened(using) as one, opened(using) as other:
        for number in range(20):
            name = f"r{number}"
            await one.create("ann", record(name, final=False))
            assert await other.append("ann", name, Log(0, 1, b"0"))
            appended, ended = await asyncio.gather(
                other.append("ann", name, Log(1, 1, b"1")), one.update("ann", record(name), Log(1, 1, b"end"))
            )
            assert appended != ended, "one of them, and only one, was in time"
            assert await one.events("ann", name, 0) == [Log(1, 1, b"1" if appended else b"end")]


@needs_postgres
async def test_append_waits_for_concurrent_end(on_postgres: str) -> None:
    async with opened(on_postgres) as store:
        await store.create("ann", record("r", final=False))
        held = LeaseHolder()

        def end() -> None:
            with transaction.atomic(using=on_postgres):
                Response.objects.using(on_postgres).update(final=True)
                held()

        def blocked() -> bool:
            with connections[on_postgres].cursor() as cursor:
                cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0")
                return bool(cursor.fetchone()[0])

        ending = asyncio.create_task(aside(end))
        await until(held.begun.is_set)
        append = asyncio.create_task(store.append("ann", "r", Log(0, 1, b"x")))
        with anyio.fail_after(20):
            while not append.done() and not await aside(blocked):  # noqa: ASYNC110  # polls, as there is no event to wait for
                await asyncio.sleep(0.01)
        held.free.set()
        await ending
        assert await append is False
        assert await aside(lambda: Piece.objects.using(on_postgres).count()) == 0


async def test_row_locks_do_not_deadlock(using: str) -> None:
    async with opened(using) as one, opened(using) as other:
        names = [f"r{number}" for number in range(20)]
        for name in names:
            await one.create("ann", record(name, final=False))

        async def run(store: OrmStore, mine: list[str]) -> None:
            for number in range(6):
                assert all(await asyncio.gather(*(store.append("ann", name, Log(number, 1, b"x")) for name in mine)))

        async def renew(store: OrmStore, runs: list[str]) -> None:
            for _ in range(6):
                assert len(await store.renew([("ann", name) for name in runs], FUTURE)) == 20

        with anyio.fail_after(50):
            await asyncio.gather(
                run(one, names[::2]), run(other, names[1::2][::-1]), renew(one, names), renew(other, names[::-1])
            )


async def test_conversation_updates_do_not_deadlock(using: str, clock: Clock) -> None:
    async with opened(using, ttl=100, clock=clock) as one, opened(using, ttl=100, clock=clock) as other:
        names = [f"r{number}" for number in range(10)]
        for name in names:
            await one.create("ann", record(name))
        items = [f"{name}_in" for name in names]
        with anyio.fail_after(50):
            for _ in range(5):
                clock.now += 50
                found = await asyncio.gather(*(store.items("ann", items) for store in (one, other) * 5))
                assert all(set(each) == set(items) for each in found)
                continued = (
                    store.create("ann", record(f"{clock.now}_{name}", previous=name))
                    for store, name in zip((one, other) * 5, names, strict=True)
                )
                assert await asyncio.gather(*continued) == [None] * 10


async def test_store_serves_several_event_loops(using: str) -> None:
    async with opened(using) as store:
        await store.create("ann", record("r", final=False))
        failures: list[BaseException] = []

        async def work(name: str) -> None:
            for number in range(5):
                assert await store.get("ann", "r") is not None
                assert await store.create("ann", record(f"{name}_{number}")) is None
            await store.append("ann", "r", Log(0, 1, b"x"))

        def run(name: str) -> None:
            try:
                for number in range(2):
                    asyncio.run(work(f"{name}_{number}"))
            except BaseException as failure:
                failures.append(failure)

        loops = [threading.Thread(target=run, args=(f"thread_{number}",)) for number in range(3)]
        for loop in loops:
            loop.start()
        for loop in loops:
            await asyncio.to_thread(loop.join, 30)
        assert failures == []
        assert (await rows(using))["Response"] == 31
        assert await store.events("ann", "r", -1) == [Log(0, 1, b"x")]


# Threads and their connections.


def serving(pool: thread_pool.ThreadPool) -> int:
    return len(pool._threads)


async def test_slow_call_does_not_block_event_loop() -> None:
    pool, held = thread_pool.ThreadPool("other", 1), LeaseHolder()
    call = asyncio.create_task(pool.run(held))
    await until(held.begun.is_set)
    assert not call.done()
    held.free.set()
    assert "responses-kit" in await call
    await pool.aclose()
    assert serving(pool) == 0


async def test_concurrent_calls_use_separate_threads_up_to_limit() -> None:
    pool, helds = thread_pool.ThreadPool("other", 3), [LeaseHolder() for _ in range(5)]
    calls = [asyncio.create_task(pool.run(held)) for held in helds]
    await until(lambda: all(held.begun.is_set() for held in helds[:3]))
    assert serving(pool) == 3
    assert not helds[3].begun.is_set()
    helds[1].free.set()
    await calls[1]
    await until(helds[3].begun.is_set)
    for held in helds:
        held.free.set()
    await asyncio.gather(*calls)
    assert serving(pool) == 3
    await pool.aclose()


async def test_sequential_calls_share_thread() -> None:
    pool = thread_pool.ThreadPool("other", 10)
    names = {await pool.run(lambda: threading.get_ident()) for _ in range(20)}
    assert len(names) == 1
    await pool.aclose()


async def test_sqlite_uses_one_thread() -> None:
    async with opened("other", threads=10) as store:
        await asyncio.gather(*(store.get("ann", "r") for _ in range(20)))
        assert serving(store._pool) == 1


async def test_cancelled_call_is_withdrawn_only_if_not_started() -> None:
    pool, first, second, third = thread_pool.ThreadPool("other", 1), LeaseHolder(), LeaseHolder(), LeaseHolder()
    calls = [asyncio.create_task(pool.run(held)) for held in (first, second, third)]
    await until(first.begun.is_set)
    for call in calls[:2]:
        call.cancel()
    ends = await asyncio.gather(*calls[:2], return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    for held in (first, second, third):
        held.free.set()
    await calls[2]
    assert (first.done, second.done, third.done) == (1, 0, 1)
    await pool.aclose()


async def test_cancelled_write_is_atomic(using: str) -> None:
    async with opened(using) as store:
        await converse(store, 1)
        callers = [
            asyncio.create_task(call)
            for number in range(20)
            for call in (
                store.create("ann", record(f"new_{number}", previous="turn_0")),
                store.append("ann", "turn_0", Log(number, 1, b"x")),
                store.chain("ann", "turn_0"),
            )
        ]
        await callers[0]
        for caller in callers:
            caller.cancel()
        ends = await asyncio.gather(*callers, return_exceptions=True)
        assert any(isinstance(end, asyncio.CancelledError) for end in ends)
        assert await store.create("ann", record("after")) is None
        await store.aclose()
        held = await rows(using)
        assert held["Item"] == 2 * held["Response"]


async def test_call_times_out_waiting_for_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "THREAD_TIMEOUT", 0.05)
    pool, held, late = thread_pool.ThreadPool("other", 1), LeaseHolder(), LeaseHolder()
    call = asyncio.create_task(pool.run(held))
    await until(held.begun.is_set)
    with pytest.raises(TimeoutError, match="in use"):
        await pool.run(late)
    held.free.set()
    await call
    late.free.set()
    assert await pool.run(lambda: "free") == "free"
    assert late.done == 0
    await pool.aclose()


async def test_hanging_call_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "THREAD_TIMEOUT", 0.05)
    monkeypatch.setattr(thread_pool, "CALL_TIMEOUT", 0.1)
    pool, held = thread_pool.ThreadPool("other", 1), LeaseHolder()
    with anyio.fail_after(20), pytest.raises(TimeoutError, match="does not respond"):
        await pool.run(held)
    held.free.set()
    await pool.aclose()


async def test_thread_survives_closed_event_loop() -> None:
    pool, held = thread_pool.ThreadPool("other", 1), LeaseHolder()

    async def leave() -> None:
        call = asyncio.create_task(pool.run(held))
        await until(held.begun.is_set)
        call.cancel()
        await asyncio.wait([call])

    await asyncio.to_thread(asyncio.run, leave())
    held.free.set()
    assert await pool.run(lambda: "here") == "here"
    assert held.done == 1
    await pool.aclose()


async def test_close_waits_for_started_calls(using: str) -> None:
    async with opened(using) as store:
        await store.create("ann", record("r", final=False))
        held = LeaseHolder()

        def write() -> list[bool]:
            held()
            return store._queries.append([queries.PendingAppend("ann", "r", Log(0, 1, b"x"))])

        caller = asyncio.create_task(store._run(write))
        await until(held.begun.is_set)
        caller.cancel()
        await asyncio.wait([caller])
        closing = asyncio.create_task(store.aclose())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        held.free.set()
        with anyio.fail_after(20):
            await closing
        assert serving(store._pool) == 0
        assert await store.events("ann", "r", -1) == [Log(0, 1, b"x")], "and it can be used again"


async def test_failed_thread_start_frees_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = thread_pool.ThreadPool("other", 1)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start"):
            await pool.run(lambda: None)
    assert await pool.run(lambda: "started") == "started"
    await pool.aclose()


@needs_postgres
async def test_idle_connection_is_closed(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MIN_IDLE_TIMEOUT", 0.05)
    with another("idle", on_postgres, OPTIONS={"application_name": "responses-kit-idle"}) as using:
        async with opened(using, threads=4) as store:
            await asyncio.gather(*(store.get("ann", "r") for _ in range(20)))
            await until(lambda: serving(store._pool) == 0)
            await until_none_named("responses-kit-idle")
            assert await store.get("ann", "r") is None, "the next call has a new one"


@needs_postgres
async def test_close_closes_all_connections(on_postgres: str) -> None:
    options = {"application_name": "responses-kit-closing"}
    with another("closing", on_postgres, CONN_MAX_AGE=None, OPTIONS=options) as using:
        async with opened(using) as store:
            await asyncio.gather(*(store.get("ann", "r") for _ in range(20)))
        await until_none_named("responses-kit-closing")


async def until_none_named(name: str) -> None:
    def count() -> int:
        with connections["postgres"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name])
            return int(cursor.fetchone()[0])

    with anyio.fail_after(20):
        while await aside(count):  # noqa: ASYNC110  # polls, as there is no event to wait for
            await asyncio.sleep(0.01)


async def test_connection_is_renewed_at_max_age(monkeypatch: pytest.MonkeyPatch) -> None:
    with another("aging", "other", CONN_MAX_AGE=30) as using:
        pool = thread_pool.ThreadPool(using, 1)
        first = await pool.run(lambda: connections[using].connection)
        assert await pool.run(lambda: connections[using].connection) is first

        def age() -> None:
            connections[using].close_at = 0.0

        await pool.run(age)
        assert await pool.run(lambda: connections[using].connection) is not first
        await pool.aclose()


@needs_postgres
async def test_connection_closed_by_server_is_replaced(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MIN_IDLE_TIMEOUT", 0.0)
    with another("killed", on_postgres, CONN_MAX_AGE=60) as using:
        async with opened(using, threads=1) as store:
            await converse(store, 1)
            await kill(await store._run(backend_of, using))
            assert await store.get("ann", "turn_0") is not None
            await kill(await store._run(backend_of, using))
            assert await store.create("ann", record("r")) is None


@needs_postgres
async def test_lost_connection_fails_one_call(on_postgres: str) -> None:
    async with opened(on_postgres, threads=1) as store:
        await converse(store, 1)

        def lose() -> None:
            backend = backend_of(on_postgres)
            threading.Thread(target=lambda: asyncio.run(kill(backend))).start()
            with connections[on_postgres].cursor() as cursor:
                cursor.execute("SELECT pg_sleep(30)")

        with pytest.raises(OperationalError):
            await store._run(lose)
        assert await store.get("ann", "turn_0") is not None


def backend_of(using: str) -> int:
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


async def kill(backend: int) -> None:
    def terminate() -> None:
        with connections["postgres"].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
            assert cursor.fetchone() == (True,)

    await aside(terminate)


@needs_postgres
async def test_silent_server_times_out_without_losing_thread(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied() as (port, silence):
        with another("silent", on_postgres, HOST="127.0.0.1", PORT=str(port)) as using:
            async with opened(using, threads=1) as store:
                assert await store.create("ann", record("r")) is None
                silence()
                with monkeypatch.context() as hasty:
                    hasty.setattr(thread_pool, "THREAD_TIMEOUT", 0.1)
                    hasty.setattr(thread_pool, "CALL_TIMEOUT", 0.2)
                    with anyio.fail_after(20), pytest.raises(TimeoutError, match="does not respond"):
                        await store.get("ann", "r")
                with anyio.fail_after(9):
                    assert await store.get("ann", "r") == record("r"), "its one thread has a new connection"


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[int, Callable[[], None]]]:
    """A proxy to the server, and a function that makes all its connections silent."""
    there = settings.DATABASES["postgres"]
    speaking: list[asyncio.Event] = []

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, speaks: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await speaks.wait()
                target.write(data)
        target.close()

    async def connect(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        speaking.append(speaks := asyncio.Event())
        speaks.set()
        connected.append(asyncio.current_task())
        answers, questions = await asyncio.open_connection(there["HOST"], int(there["PORT"] or 5432))
        await asyncio.gather(pass_on(source, questions, speaks), pass_on(answers, target, speaks))

    def silence() -> None:
        for speaks in speaking:
            speaks.clear()

    connected: list[Any] = []
    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], silence
    finally:
        for speaks in speaking:
            speaks.set()
        server.close()
        await asyncio.wait(connected, timeout=5)


@needs_postgres
async def test_statement_timeout_is_error(on_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "STATEMENT_TIMEOUT", 0.1)
    async with opened(on_postgres) as store:
        await store.create("ann", record("r", final=False))
        held = LeaseHolder()

        def lock() -> None:
            with transaction.atomic(using=on_postgres):
                list(Response.objects.using(on_postgres).select_for_update())
                held()

        holder = asyncio.create_task(aside(lock))
        await until(held.begun.is_set)
        for call in (
            store.cancel("ann", "r", 5.0),
            store.update("ann", record("r")),
            store.append("ann", "r", Log(0, 1, b"x")),
            store.delete("ann", "r"),
        ):
            with pytest.raises(OperationalError, match="statement timeout"):
                await call
        assert await store.get("ann", "r") == record("r", final=False), "which waits for nobody"
        held.free.set()
        await holder
        assert await store.update("ann", record("r"))


@needs_postgres
async def test_timeouts_apply_to_store_transactions_only(on_postgres: str) -> None:
    def limit() -> str:
        with connections[on_postgres].cursor() as cursor:
            cursor.execute("SHOW statement_timeout")
            return str(cursor.fetchone()[0])

    async with opened(on_postgres, threads=1) as store:
        before = await store._run(limit)
        await store.create("ann", record("r"))
        await store.get("ann", "r")
        assert await store._run(limit) == before


async def test_locked_file_is_error_and_recovers() -> None:
    with another("hasty", "other", OPTIONS={"timeout": 0.05}) as using:
        async with opened(using) as store:
            await store.create("ann", record("live", final=False))
            held = LeaseHolder()

            def lock() -> None:
                with transaction.atomic(using="other"):
                    Conversation.objects.using("other").update(expires=FUTURE)
                    held()

            holder = asyncio.create_task(aside(lock))
            await until(held.begun.is_set)
            assert await store.get("ann", "live") is not None
            for call in (
                store.create("ann", record("r")),
                store.append("ann", "live", Log(0, 1, b"x")),
                store.cancel("ann", "live", 5.0),
            ):
                with pytest.raises(OperationalError, match="locked"):
                    await call
            held.free.set()
            await holder
            assert await store.create("ann", record("r")) is None
            assert await store.append("ann", "live", Log(0, 1, b"x"))
    await aside(lambda: clear("other"))


async def test_busy_file_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SQLite refuses a write after a read if another transaction wrote in between, so transactions must lock first."""
    async with opened("other") as store, opened("other") as other:
        await store.create("ann", record("seed", key="seed"))

        async def work(one: OrmStore, name: str) -> None:
            for number in range(10):
                live = record(f"{name}_{number}", previous="seed", final=False, key=f"{name}_{number}")
                assert await one.create("ann", live) is None
                assert await one.create("ann", replace(live, id="another")) is not None
                assert await one.renew([("ann", live.id)], FUTURE) == {("ann", live.id)}
                assert await one.update("ann", replace(live, final=True), Log(0, 1, b"x"))
                assert await one.delete("ann", live.id)

        with anyio.fail_after(50):
            await asyncio.gather(work(store, "one"), work(other, "other"))
    await aside(lambda: clear("other"))


async def test_shared_in_memory_database_works() -> None:
    name = "file:responses_kit_shared?mode=memory&cache=shared"
    with another("shared", "default", NAME=name) as using:
        held = LeaseHolder()

        def keep() -> None:
            call_command("migrate", database=using, verbosity=0)
            held()
            connections[using].connection.close()  # Django leaves it open
            connections[using].connection = None

        keeper = asyncio.create_task(asyncio.to_thread(keep))
        await until(held.begun.is_set)
        async with opened(using) as store:
            await store.setup()
            await converse(store, 3)
            assert len(await store.chain("ann", "turn_2")) == 3
        held.free.set()
        await keeper


async def test_debug_does_not_collect_statements(using: str) -> None:
    with override_settings(DEBUG=True):
        async with opened(using, threads=1) as store:
            await converse(store, 2)
            assert await store._run(lambda: len(connections[using].queries_log)) == 0


# Forks.

FORKING = """
import asyncio, json, os, sys
from tests.integrations.django.databases import configure

configure(json.loads(sys.argv[1]))

from responses_kit.stores import Log
from responses_kit_django.store import OrmStore

using = sys.argv[2]
store = OrmStore(using)

async def look():
    seed = await store.get("ann", "seed")
    assert seed is not None
    return len(store._pool._threads)

async def in_child():
    assert not store._pool._threads
    assert await look() == 1
    assert await store.append("ann", "live", Log(0, 1, b"child"))
    await store.aclose()
    print("child", flush=True)

async def start():
    await asyncio.gather(*(look() for _ in range(20)))

loop = asyncio.new_event_loop()
loop.run_until_complete(start())
child = os.fork()
if child == 0:
    try:
        asyncio.run(in_child())
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
for _ in range(20):
    loop.run_until_complete(look())
_, status = os.waitpid(child, 0)
for _ in range(20):
    assert loop.run_until_complete(look()) > 0
loop.run_until_complete(store.aclose())
loop.close()
print("parent", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
async def test_forked_process_opens_its_own_connections(using: str) -> None:
    async with opened(using) as store:
        await store.create("ann", record("seed"))
        await store.create("ann", record("live", final=False))
        async with processes(FORKING, using, "") as (process,):
            with anyio.fail_after(50):
                assert (await all_of(process)).split() == ["child", "parent", "0"]
        assert await store.events("ann", "live", -1) == [Log(0, 1, b"child")]


# Errors.


@needs_postgres
async def test_database_errors_do_not_quote_payloads(on_postgres: str, caplog: pytest.LogCaptureFixture) -> None:
    quoting = """
        CREATE FUNCTION quote() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'not this: %', NEW.input; END $$;
        CREATE TRIGGER quote BEFORE INSERT OR UPDATE ON responses_kit_django_response
        FOR EACH ROW WHEN (NEW.response_id = 'quoted') EXECUTE FUNCTION quote()
    """
    await aside(lambda: connections[on_postgres].cursor().execute(quoting))
    try:
        async with opened(on_postgres) as store:
            secret = replace(record("quoted"), input=json.dumps([SECRET]).encode())
            for call in (
                store.create("ann", secret),
                store.create("ann", replace(record("r", final=False), events=SECRET, input=secret.input)),
            ):
                with pytest.raises(Error) as failure:
                    await call
                assert SECRET not in describe_exception_chain(failure.value)
                assert failure.value.__cause__ is failure.value.__context__ is None
            with pytest.raises(errors.StoreError), caplog.at_level(logging.DEBUG):
                await call_store(store.create("ann", secret))
            assert "RaiseException (P0001)" in caplog.text
            assert SECRET not in caplog.text
    finally:
        await aside(
            lambda: (
                connections[on_postgres]
                .cursor()
                .execute("DROP TRIGGER quote ON responses_kit_django_response; DROP FUNCTION quote()")
            )
        )


async def test_full_disk_is_error_without_payload(tmp_path: Path) -> None:
    payload = json.dumps(SECRET * 100_000).encode()
    with another("full", "default", NAME=str(tmp_path / "full.db"), CONN_MAX_AGE=60) as using:
        await aside(lambda: call_command("migrate", database=using, verbosity=0))
        async with opened(using) as store:
            await store.create(SECRET, record("live", final=False))

            def pages(most: int) -> None:
                connections[using].cursor().execute(f"PRAGMA max_page_count={most}")

            for call in (
                lambda: store.create(SECRET, replace(record("r"), input=payload)),
                lambda: store.update(SECRET, replace(record("live"), response=payload)),
                lambda: store.append(SECRET, "live", Log(0, 1, payload)),
            ):
                await store._run(pages, 1)  # the server's limit
                with pytest.raises(OperationalError, match="full") as failure:
                    await call()
                assert SECRET not in describe_exception_chain(failure.value)
            assert await store.get(SECRET, "r") is None
            assert await store.get(SECRET, "live") == record("live", final=False)
            assert await store.append(SECRET, "live", Log(0, 1, payload)), "a new connection has no such bound"


@needs_postgres
async def test_unreachable_server_error_hides_password(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        with another("gone", "postgres", HOST="127.0.0.1", PORT=port, USER="kit", PASSWORD="s3cr3t-word") as using:
            async with opened(using) as store:
                with anyio.fail_after(30):
                    for call in (store.get("ann", "r"), store.append("ann", "r", Log(0, 1, b"x")), store.setup()):
                        with pytest.raises(OperationalError, match="onnect") as failure:
                            await call
                        assert "s3cr3t" not in describe_exception_chain(failure.value)
                    with pytest.raises(errors.StoreError):
                        await call_store(store.create("ann", record("r")))
    assert "s3cr3t" not in caplog.text


def test_error_without_code_is_passed_on() -> None:
    assert str(database.to_safe_error(OperationalError("database is locked"), "default")) == "database is locked"


# The store in a kit.


async def test_kit_stores_conversation(using: str) -> None:
    async with opened(using) as store:
        kit = ResponsesKit(ScriptedBackend(["Hello."], ["Again."]), store=store)
        async with kit.lifespan():
            first = await kit.create({"model": "scripted", "input": "Hi"}, owner="ann")
            second = await kit.create(
                {"model": "scripted", "input": "And?", "previous_response_id": first["id"]}, owner="ann"
            )
            assert (await kit.retrieve(second["id"], owner="ann"))["output"] == second["output"]
            started = await kit.service.submit({"model": "scripted", "input": "Later", "background": True}, owner="ann")
            await kit.wait(started["id"], owner="ann")
        row = await aside(lambda: Response.objects.using(using).get(response_id=second["id"]))
        assert (row.status, row.model, row.owner) == ("completed", "scripted", "ann")
        assert row.created == datetime.fromtimestamp(second["created_at"], UTC)
