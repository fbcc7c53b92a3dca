"""The SQL store on PostgreSQL and SQLite: contract, expiry, concurrency and failures."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import event, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from responses_kit import errors
from responses_kit.stores.key_encoding import encode_key
from responses_kit.stores.protocol import Log, Record, call_store
from responses_kit.stores.sql import SqlStore, engine, tables
from responses_kit.stores.sql import store as sql
from responses_kit.testing.store_contract import STORE_CONTRACT, Check

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

POSTGRES = os.environ.get("RESPONSES_KIT_TEST_POSTGRES")
FUTURE = 4_102_444_800.0
PAYLOAD = b"stored payload"

Database = Callable[[Path], AbstractAsyncContextManager[str]]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def sqlite(folder: Path) -> AsyncIterator[str]:
    yield f"sqlite:///{folder}/{secrets.token_hex(6)}.db"


@asynccontextmanager
async def postgres(_: Path) -> AsyncIterator[str]:
    import asyncpg

    schema = f"kit_{secrets.token_hex(6)}"
    connection = await asyncpg.connect(POSTGRES)
    try:
        await connection.execute(f"CREATE SCHEMA {schema}")
        yield f"{POSTGRES}?search_path={schema}"
    finally:
        await connection.execute(f"DROP SCHEMA {schema} CASCADE")
        await connection.close()


needs_postgres = pytest.mark.skipif(POSTGRES is None, reason="RESPONSES_KIT_TEST_POSTGRES names no server")
DATABASES = [pytest.param(sqlite, id="sqlite"), pytest.param(postgres, id="postgres", marks=needs_postgres)]


@pytest.fixture(params=DATABASES)
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    async with request.param(tmp_path) as url:
        yield url


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def opened(source: str | AsyncEngine, **settings: Any) -> AsyncIterator[SqlStore]:
    store = SqlStore(source, **settings)
    await store.setup()
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def engine_for(url: str) -> AsyncIterator[AsyncEngine]:
    """Yield an engine that the host owns and passes to the store."""
    if url.startswith("sqlite"):
        engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    else:
        plain, _, schema = url.partition("?search_path=")
        settings = {"server_settings": {"search_path": schema}}
        engine = create_async_engine(plain.replace("postgresql:", "postgresql+asyncpg:"), connect_args=settings)
    try:
        yield engine
    finally:
        await engine.dispose()


@contextmanager
def statements_of(engine: AsyncEngine) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement != "BEGIN IMMEDIATE":
            seen.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)


async def rows(store: SqlStore) -> dict[str, int]:
    """Return the number of rows of each table."""
    counted = (tables.responses, tables.items, tables.logs, tables.conversations)
    async with store._engines.statement() as connection:
        return {
            table.name.removeprefix("responses_kit_"): (
                await connection.execute(select(func.count()).select_from(table))
            ).scalar_one()
            for table in counted
        }


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


async def create_conversation(store: SqlStore, turns: int, *, name: str = "turn", first: int = 0) -> None:
    for number in range(first, first + turns):
        previous = f"{name}_{number - 1}" if number else None
        assert await store.create("ann", record(f"{name}_{number}", previous=previous)) is None


# The contract.


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
async def test_store_passes_contract(check: Check, database: Database, tmp_path: Path) -> None:
    @asynccontextmanager
    async def make_store() -> AsyncIterator[SqlStore]:
        async with database(tmp_path) as url, opened(url) as store:
            yield store

    await check(make_store)


async def test_given_engine_is_used_and_left_open(url: str) -> None:
    async with engine_for(url) as engine:
        async with opened(engine) as store:
            await create_conversation(store, 3)
            assert await store.append("ann", "turn_0", Log(0, 1, b"x")) is False
            assert len(await store.chain("ann", "turn_2")) == 3
        async with engine.connect() as connection:
            held = await connection.execute(select(func.count()).select_from(tables.responses))
            assert held.scalar_one() == 3, "the engine of the host is still open"


ODD = [
    "",
    "a\x00b",
    "\ud800",
    "?",
    "\ufffd",
    "%00",
    "%",
    "#",
    "é",
    "日本 😀",
    '"\\\n',
    "x" * 5000,
    "x" * 4999 + "y",
    "é" * 100,
    "a/b",
]


async def test_any_text_is_valid_owner_id_and_key(url: str) -> None:
    async with opened(url) as store:
        for number, owner in enumerate(ODD):
            odd = replace(record(f"r{number}", final=False), lease=5.0 + number, key=owner, item_ids=(owner,))
            assert await store.create(owner, odd) is None
        for number, owner in enumerate(ODD):
            saved = await store.get(owner, f"r{number}")
            assert saved is not None
            assert (saved.key, saved.item_ids) == (owner, (owner,))
            assert await store.items(owner, [owner]) == {owner: saved}
            assert await store.create(owner, record("another", key=owner)) == saved
        assert [owner for owner, _ in await store.expired(100.0)] == ODD
        for name in ODD:
            assert await store.create("ann", replace(record(name), previous_id=f"{name}.")) is None
        for name in ODD:
            saved = await store.get("ann", name)
            assert saved is not None
            assert (saved.id, saved.previous_id) == (name, f"{name}.")


async def test_infinite_lease_is_stored(url: str) -> None:
    async with opened(url) as store:
        endless = replace(record("r", final=False), lease=float("inf"))
        await store.create("ann", endless)
        assert await store.get("ann", "r") == endless
        assert await store.expired(FUTURE) == []
        assert await store.cancel("ann", "r", 5.0)
        saved = await store.get("ann", "r")
        assert saved is not None
        assert saved.lease == 5.0


# Setup.


async def test_setup_is_idempotent(url: str) -> None:
    async with opened(url) as store:
        await create_conversation(store, 2)
        await store.setup()
        async with opened(url) as other:
            assert len(await other.chain("ann", "turn_1")) == 2


async def test_concurrent_setups_succeed(url: str) -> None:
    stores = [SqlStore(url) for _ in range(6)]
    async with anyio.create_task_group() as group:
        for store in stores:
            group.start_soon(store.setup)
    await stores[0].create("ann", record("r"))
    for store in stores:
        assert await store.get("ann", "r") == record("r")
        await store.aclose()


async def test_missing_tables_are_reported_with_remedy(url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = SqlStore(url)
    try:
        for call in (
            store.get("ann", "r"),
            store.append("ann", "r", Log(0, 1, b"x")),
            store.create("ann", record("r")),
        ):
            with pytest.raises(errors.ConfigurationError, match="responses-kit store setup URL"):
                await call
        with pytest.raises(errors.StoreError), caplog.at_level(logging.ERROR):
            await call_store(store.get("ann", "r"))
        assert "responses-kit store setup URL" in caplog.text
        async with opened(url):
            pass
        assert await store.get("ann", "r") is None, "no restart is needed after the setup"
    finally:
        await store.aclose()


async def test_newer_tables_are_refused(url: str) -> None:
    async with opened(url) as store:
        async with store._engines.transaction() as connection:
            await connection.execute(update(tables._versions).values(version=99))
        with pytest.raises(errors.ConfigurationError, match=r"version 99.*upgrade"):
            await store.setup()
    store = SqlStore(url)
    with pytest.raises(errors.ConfigurationError, match=r"version 99.*upgrade"):
        await store.get("ann", "r")
    await store.aclose()


async def test_older_tables_are_migrated_by_setup_only(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as store:
        await create_conversation(store, 2)
    steps: list[int] = []

    def widen(connection: Any) -> None:
        connection.execute(text("ALTER TABLE responses_kit_responses ADD COLUMN note TEXT"))
        steps.append(2)

    monkeypatch.setattr(tables, "MIGRATIONS", [widen, lambda connection: steps.append(3)])
    store = SqlStore(url)
    with pytest.raises(errors.ConfigurationError, match=r"version 1 instead of 3.*responses-kit store setup URL"):
        await store.get("ann", "turn_0")
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(SqlStore(url).setup)
    assert steps == [2, 3]
    assert len(await store.chain("ann", "turn_1")) == 2
    await store.aclose()


async def test_failing_migration_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as store:
        await create_conversation(store, 2)

    def fail(connection: Any) -> None:
        connection.execute(text("DELETE FROM responses_kit_responses"))
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(tables, "MIGRATIONS", [fail])
        with pytest.raises(OSError, match="full"):
            await SqlStore(url).setup()
    async with opened(url) as store:
        assert len(await store.chain("ann", "turn_1")) == 2


async def test_setup_records_version_of_existing_tables(url: str) -> None:
    async with engine_for(url) as engine:
        async with engine.begin() as connection:
            await connection.run_sync(tables.metadata.create_all)
        async with opened(engine) as store:
            await create_conversation(store, 1)


# Expiry.


async def test_conversation_expires_with_its_last_response(url: str, clock: Clock) -> None:
    async with opened(url, ttl=100, clock=clock) as store:
        await create_conversation(store, 1, name="idle")
        await create_conversation(store, 1)
        for number in range(1, 10):
            clock.now += 60
            await create_conversation(store, 1, first=number)
        assert len(await store.chain("ann", "turn_9")) == 10
        assert await store.get("ann", "turn_0") is not None, "the first response of the chain still exists"
        assert await store.get("ann", "idle_0") is None


@pytest.mark.parametrize("use", ["get", "chain", "items", "events", "update", "renew"])
async def test_each_use_renews_conversation(url: str, clock: Clock, use: str) -> None:
    async with opened(url, ttl=100, clock=clock) as store:
        await create_conversation(store, 2)
        await store.create("ann", record("live", previous="turn_1", final=False))
        clock.now += 99
        uses: dict[str, Callable[[], Any]] = {
            "get": lambda: store.get("ann", "turn_1"),
            "chain": lambda: store.chain("ann", "turn_1"),
            "items": lambda: store.items("ann", ["turn_1_in"]),
            "events": lambda: store.events("ann", "live", -1),
            "update": lambda: store.update("ann", record("live", previous="turn_1")),
            "renew": lambda: store.renew([("ann", "live")], FUTURE),
        }
        await uses[use]()
        clock.now += 99
        assert await store.get("ann", "turn_0") is not None


async def test_expired_records_are_unknown(url: str, clock: Clock) -> None:
    async with opened(url, ttl=100, clock=clock) as store:
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
        assert await store.create("ann", record("new", previous="old", key="key")) is None, "the key can be reused"
        assert [saved.id for saved in await store.chain("ann", "new")] == ["new"]
        clock.now += 1
        assert await store.prune() == 1
        assert await rows(store) == {"responses": 1, "items": 2, "logs": 0, "conversations": 1}
        assert await store.create("ann", record("newest", key="key")) == record("new", previous="old", key="key")


async def test_read_writes_only_if_last_use_is_old(url: str, clock: Clock) -> None:
    async with engine_for(url) as engine, opened(engine, ttl=1000, clock=clock) as store:
        await create_conversation(store, 3)
        with statements_of(engine) as seen:
            for _ in range(20):
                clock.now += 0.4
                await store.chain("ann", "turn_2")
            assert not [statement for statement in seen if "UPDATE" in statement], (
                "no update within a hundredth of the ttl"
            )
            clock.now += 10
            for _ in range(20):
                await store.chain("ann", "turn_2")
            assert len([statement for statement in seen if "UPDATE" in statement]) == 1


async def test_log_expires_before_response(url: str, clock: Clock) -> None:
    async with opened(url, ttl=1000, log_ttl=60, clock=clock) as store:
        for name in ("done", "live"):
            await store.create("ann", record(name, final=False))
            assert await store.append("ann", name, Log(0, 2, b"ab"))
        clock.now += 100
        assert await store.update("ann", record("done"), Log(2, 1, b"c"))
        clock.now += 59
        assert await store.prune() == 0
        assert await store.events("ann", "done", -1) == [Log(0, 2, b"ab"), Log(2, 1, b"c")]
        clock.now += 1
        assert await store.events("ann", "done", -1) is None, "an expired log is hidden before it is pruned"
        assert await store.prune() == 0
        assert await store.events("ann", "done", -1) is None
        assert await store.get("ann", "done") == record("done")
        assert await store.events("ann", "live", -1) == [Log(0, 2, b"ab")]
        assert (await rows(store))["logs"] == 1


# Size limits.


async def test_conversation_cost_is_linear(url: str) -> None:
    async with engine_for(url) as engine, opened(engine) as store:
        work = []
        for number in range(30):
            with statements_of(engine) as seen:
                await create_conversation(store, 1, first=number)
                await store.get("ann", f"turn_{number}")
            work.append(len(seen))
        assert len(set(work[1:])) == 1, "the number of statements is the same for all turns"
        assert await rows(store) == {"responses": 30, "items": 60, "logs": 0, "conversations": 1}


async def test_prune_deletes_all_expired_rows(url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_MAX_PRUNED_ROWS", 3)
    async with opened(url, ttl=100, clock=clock) as store:
        await create_conversation(store, 7, name="old")
        for number in range(5):
            await store.create("bob", record(f"single_{number}", final=False))
            await store.append("bob", f"single_{number}", Log(0, 1, b"x"))
            await store.append("bob", f"single_{number}", Log(1, 1, b"x"))
        clock.now += 50
        await create_conversation(store, 4)
        await store.delete("ann", "turn_0")
        clock.now += 50
        assert await store.prune() == 12
        assert await store.prune() == 0
        assert await rows(store) == {"responses": 3, "items": 6, "logs": 0, "conversations": 1}
        clock.now += 100
        assert await store.prune() == 3
        assert await rows(store) == {"responses": 0, "items": 0, "logs": 0, "conversations": 0}


async def test_empty_conversation_expires(url: str, clock: Clock) -> None:
    async with opened(url, ttl=100, clock=clock) as store:
        await create_conversation(store, 1)
        await store.delete("ann", "turn_0")
        clock.now += 100
        assert await store.prune() == 0
        assert (await rows(store))["conversations"] == 0


async def test_prune_evicts_least_recently_used_conversations(
    url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "_MAX_PRUNED_ROWS", 2)
    async with opened(url, ttl=1000, max_records=10, clock=clock) as store:
        for name in ("a", "b", "c", "d"):
            await create_conversation(store, 3, name=name)
            clock.now += 20
        assert await store.get("ann", "a_1") is not None, "which makes b the least recently used"
        assert await store.prune() == 3
        assert [len(await store.chain("ann", f"{name}_2")) for name in ("a", "b", "c", "d")] == [3, 0, 3, 3]
        assert await store.prune() == 0
    async with opened(url, ttl=1000, max_records=1, clock=clock) as store:
        assert await store.prune() == 9
        assert await rows(store) == {"responses": 0, "items": 0, "logs": 0, "conversations": 0}


async def test_prune_evicts_no_more_than_necessary(url: str, clock: Clock) -> None:
    async with opened(url, max_records=3, clock=clock) as store:
        for number in range(8):
            await store.create("ann", record(f"r{number}"))
        assert await store.prune() == 5
        assert (await rows(store))["responses"] == 3


async def test_concurrent_prunes_are_safe(url: str, clock: Clock) -> None:
    async with opened(url, ttl=100, clock=clock) as store, opened(url, ttl=100, clock=clock) as other:
        for number in range(20):
            await create_conversation(store, 2, name=f"c{number}")
        clock.now += 100
        pruned_counts: list[int] = []

        async def prune(one: SqlStore) -> None:
            pruned_counts.append(await one.prune())

        async with anyio.create_task_group() as group:
            for one in (store, other, store, other):
                group.start_soon(prune, one)
        assert sum(pruned_counts) == 40
        assert await rows(store) == {"responses": 0, "items": 0, "logs": 0, "conversations": 0}


async def test_oversize_record_is_refused(url: str) -> None:
    async with opened(url, max_record_bytes=1000) as store:
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


async def test_duplicate_id_is_refused_without_disclosure(url: str) -> None:
    async with opened(url) as store:
        await store.create("ann", record("r"))
        with pytest.raises(errors.StoreError, match="another request") as refused:
            await store.create("ann", replace(record("r"), input=PAYLOAD))
        assert PAYLOAD.decode() not in "".join(traceback.format_exception(refused.value))
        assert await store.get("ann", "r") == record("r")
        assert (await rows(store))["conversations"] == 1


# The number of statements.


async def test_chain_is_one_statement(url: str) -> None:
    async with engine_for(url) as engine, opened(engine) as store:
        await create_conversation(store, 1000)
        for length in (1, 10, 100, 1000):
            with statements_of(engine) as seen:
                chain = await store.chain("ann", f"turn_{length - 1}")
            assert [saved.id for saved in chain] == [f"turn_{number}" for number in range(length)]
            assert len(seen) == 1
        found = [f"turn_{number}_out" for number in range(1000)]
        with statements_of(engine) as seen:
            assert set(await store.items("ann", [*found, "unknown"])) == set(found)
        assert len(seen) == 1
        runs = [("ann", f"turn_{number}") for number in range(1000)]
        for until in (None, FUTURE):
            with statements_of(engine) as seen:
                assert await store.renew(runs, until) == set()
            assert len(seen) <= 2


async def test_circular_chain_is_bounded(url: str) -> None:
    async with opened(url) as store:
        await store.create("ann", record("a", previous="c"))
        await store.create("ann", record("b", previous="a"))
        await store.create("ann", record("c", previous="b"))
        await store.create("ann", record("self", previous="self"))
        assert [saved.id for saved in await store.chain("ann", "c")] == ["a", "b", "c"]
        assert [saved.id for saved in await store.chain("ann", "self")] == ["self"]


async def test_record_with_many_items_is_read_once(url: str) -> None:
    async with opened(url) as store:
        names = tuple(f"i{number}" for number in range(300))
        many = replace(record("many"), item_ids=names, input=b"x" * 1_000_000)
        await store.create("ann", many)
        found = await store.items("ann", names)
        assert set(found) == set(names)
        assert len({id(holder) for holder in found.values()}) == 1


async def test_concurrent_appends_are_grouped(url: str) -> None:
    async with engine_for(url) as engine, opened(engine) as store:
        names = [f"r{number}" for number in range(40)]
        for name in names:
            await store.create("ann", record(name, final=False))
        done: list[bool] = []

        async def append(name: str, number: int) -> None:
            done.append(await store.append("ann", name, Log(number, 1, b"%d" % number)))

        with statements_of(engine) as seen:
            for number in range(5):
                async with anyio.create_task_group() as group:
                    for name in names:
                        group.start_soon(append, name, number)
        assert done == [True] * 200
        assert len(seen) <= 30, "concurrent appends share statements"
        for name in names:
            assert await store.events("ann", name, 1) == [Log(number, 1, b"%d" % number) for number in (2, 3, 4)]


async def test_grouped_appends_have_separate_results(url: str) -> None:
    async with opened(url) as store:
        for name in ("a", "b", "done"):
            await store.create("ann", record(name, final=name == "done"))
        calls = [
            ("a", 0, 2),
            ("b", 3, 1),
            ("a", 2, 1),
            ("a", 2, 1),
            ("pruned_counts", 0, 1),
            ("done", 0, 1),
            ("b", 0, 1),
        ]
        done = await asyncio.gather(
            *(store.append("ann", name, Log(start, count, b"x" * count)) for name, start, count in calls)
        )
        assert done == [True, False, True, False, False, False, True]
        assert await store.events("ann", "a", -1) == [Log(0, 2, b"xx"), Log(2, 1, b"x")]
        assert await store.events("ann", "b", -1) == [Log(0, 1, b"x")]


# Concurrency.

WRITER = """
import asyncio, sys
from responses_kit.stores import Log
from responses_kit.stores.sql import SqlStore

async def main(url, name):
    store, won, start = SqlStore(url), 0, 0
    while start < 60:
        if await store.append("ann", "shared", Log(start, 1, name.encode())):
            won += 1
        start += 1
    for number in range(20):
        assert await store.create("ann", (await store.get("ann", "seed")).__class__(
            id=f"{name}_{number}", previous_id="seed", input=b"[]", response=b"{}", final=True)) is None
    await store.aclose()
    print(won)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_several_processes_share_database(url: str) -> None:
    async with opened(url) as store:
        await store.create("ann", record("shared", final=False))
        await store.create("ann", record("seed"))
        won: list[int] = []

        async def write(name: str) -> None:
            ended = await anyio.run_process([sys.executable, "-c", WRITER, url, name])
            won.append(int(ended.stdout))

        async with anyio.create_task_group() as group:
            for name in ("one", "two", "three"):
                group.start_soon(write, name)
        pieces = await store.events("ann", "shared", -1)
        assert pieces is not None
        assert [piece.start for piece in pieces] == list(range(60)), "each event is saved once"
        assert sum(won) == 60
        assert (await rows(store))["responses"] == 62


async def test_append_after_end_is_refused_in_races(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        for number in range(30):
            name = f"r{number}"
            await one.create("ann", record(name, final=False))
            assert await other.append("ann", name, Log(0, 1, b"0"))
            appended, ended = await asyncio.gather(
                other.append("ann", name, Log(1, 1, b"1")), one.update("ann", record(name), Log(1, 1, b"end"))
            )
            assert appended != ended, "exactly one of append and update succeeds"
            assert await one.events("ann", name, 0) == [Log(1, 1, b"1" if appended else b"end")]


async def test_concurrent_append_batches_do_not_deadlock(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        names = [f"r{number}" for number in range(30)]
        for name in names:
            await one.create("ann", record(name, final=False))

        async def run(store: SqlStore, mine: Sequence[str]) -> None:
            for number in range(6):
                done = await asyncio.gather(*(store.append("ann", name, Log(number, 1, b"x")) for name in mine))
                assert all(done)

        async def renew(store: SqlStore, runs: Sequence[str]) -> None:
            for _ in range(6):
                assert len(await store.renew([("ann", name) for name in runs], FUTURE)) == 30

        with anyio.fail_after(30):
            await asyncio.gather(
                run(one, names[::2]), run(other, names[1::2][::-1]), renew(one, names), renew(other, names[::-1])
            )


async def test_store_serves_several_event_loops_and_closes_their_connections(url: str) -> None:
    async with opened(url) as store:
        await store.create("ann", record("r", final=False))
        failures: list[BaseException] = []

        async def work(name: str) -> None:
            for number in range(5):
                assert await store.get("ann", "r") is not None
                assert await store.create("ann", record(f"{name}_{number}")) is None
            await store.append("ann", "r", Log(0, 1, b"x"))  # without aclose: closing the event loop must suffice

        def run(name: str) -> None:
            try:
                for number in range(2):
                    asyncio.run(work(f"{name}_{number}"))
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=(f"thread_{number}",)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join, 30)
        assert failures == []
        assert (await rows(store))["responses"] == 31
        assert list(store._engines._loops) == [asyncio.get_running_loop()]


async def test_cancelled_call_returns_connection(url: str) -> None:
    async with opened(url) as store:
        lost: list[object] = []
        await create_conversation(store, 3)
        here = store._engines._loops[asyncio.get_running_loop()]
        for engine in (here.reads, here.writes):
            event.listen(engine.sync_engine.pool, "close", lambda connection, _: lost.append(connection))
            event.listen(engine.sync_engine.pool, "invalidate", lambda connection, *_: lost.append(connection))
        callers = [
            asyncio.create_task(call)
            for number in range(30)
            for call in (
                store.chain("ann", "turn_2"),
                store.create("ann", record(f"new_{number}", previous="turn_2")),
                store.append("ann", "turn_0", Log(number, 1, b"x")),
            )
        ]
        for _ in range(40):
            await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        ends = await asyncio.gather(*callers, return_exceptions=True)
        assert any(isinstance(end, asyncio.CancelledError) for end in ends)
        with anyio.fail_after(20):
            await asyncio.gather(*(store.get("ann", "turn_0") for _ in range(20)))
            assert await store.create("ann", record("after")) is None
        assert not lost
        await store.aclose()  # which waits for the calls in progress
        held = await rows(store)
        assert held["items"] == 2 * held["responses"], "each response is saved with all its items or not at all"


async def test_close_waits_for_started_calls(url: str) -> None:
    async with opened(url) as store:
        started, free = asyncio.Event(), asyncio.Event()

        async def write() -> bool:
            started.set()
            await free.wait()
            return await store._appends.submit(sql._Piece("ann", "r", Log(0, 1, b"x")))

        await store.create("ann", record("r", final=False))
        caller = asyncio.create_task(store._engines.run_shielded(write, writes=False))
        await started.wait()
        caller.cancel()
        closing = asyncio.create_task(store.aclose())
        await asyncio.wait([caller])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        free.set()
        with anyio.fail_after(20):
            await closing
        assert await store.events("ann", "r", -1) == [Log(0, 1, b"x")]


# Failures.


def refused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def test_unreachable_server_error_hides_password(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("asyncpg")
    store = SqlStore(f"postgresql://kit:s3cr3t-word@127.0.0.1:{refused_port()}/kit")
    with anyio.fail_after(10):
        for call in (store.get("ann", "r"), store.append("ann", "r", Log(0, 1, b"x")), store.setup()):
            with pytest.raises(OSError, match="onnect") as failure:
                await call
            assert "s3cr3t" not in "".join(traceback.format_exception(failure.value))
        with pytest.raises(errors.StoreError):
            await call_store(store.create("ann", record("r")))
    assert "s3cr3t" not in caplog.text
    await store.aclose()


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://kit:s3cr3t/word@host/kit",
        "postgresql://kit:1/s3cr3t@host/kit",
        "postgresql://kit:1?s3cr3t@host/kit",
        "postgresql://kit:1#s3cr3t@host/kit",
        "postgresql://kit:s3cr3t@[host/kit",
        "postgresql://kit:s3cr3t@ho:st/kit",
        "postgresql://host/kit?s3cr3t",
        "postgresql+psycopg://kit:s3cr3t@host/kit",
        "mysql://kit:s3cr3t@host/kit",
        "kit:s3cr3t@host/kit",
        "s3cr3t.db",
        "sqlite://s3cr3t:port/file.db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:kit?mode=memory&uri=true",
        "",
        7,
    ],
)
def test_invalid_url_is_refused_without_secrets(bad: Any) -> None:
    with pytest.raises(errors.ConfigurationError) as refused:
        SqlStore(bad)
    assert "s3cr3t" not in "".join(traceback.format_exception(refused.value)).replace(repr(bad), "")


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg", "PostgreSQL"])
@needs_postgres
async def test_common_url_schemes_are_accepted(scheme: str, tmp_path: Path) -> None:
    async with postgres(tmp_path) as url:
        address = url.replace("postgresql", scheme, 1) + "&sslmode=prefer&channel_binding=prefer&application_name=a%20b"
        async with opened(address) as store, store._engines.statement() as connection:
            assert (await connection.execute(text("SHOW application_name"))).scalar_one() == "a b"


@pytest.mark.parametrize(
    ("module", "url", "extra"),
    [
        ("sqlalchemy", None, r"responses-kit\[sql\]"),
        ("aiosqlite", "sqlite:///file.db", r"responses-kit\[sql\]"),
        ("asyncpg", "postgresql://host/kit", r"responses-kit\[postgres\]"),
    ],
)
def test_missing_driver_names_extra(module: str, url: str | None, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.setitem(sys.modules, name, None)
    if url is None:
        for name in [name for name in sys.modules if name.startswith("responses_kit.stores.sql")]:
            monkeypatch.delitem(sys.modules, name)
        with pytest.raises(ImportError, match=extra):
            importlib.import_module("responses_kit.stores.sql")
    else:
        with pytest.raises(ImportError, match=extra):
            SqlStore(url)


def test_trio_is_refused(tmp_path: Path) -> None:
    trio = pytest.importorskip("trio")
    store = SqlStore(f"sqlite:///{tmp_path}/kit.db")
    for call in (store.setup, lambda: store.get("ann", "r")):
        with pytest.raises(errors.ConfigurationError, match="asyncio"):
            trio.run(call)


async def test_full_disk_is_error_without_payload(tmp_path: Path) -> None:
    async with sqlite(tmp_path) as url, engine_for(url) as engine:
        full, owner, payload = False, PAYLOAD.decode(), PAYLOAD * 100_000

        def limit(connection: Any, record: Any, proxy: Any) -> None:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA max_page_count={1 if full else 1_000_000}")  # the pool has only one connection
            cursor.close()

        event.listen(engine.sync_engine, "checkout", limit)
        async with opened(engine) as store:
            await store.create(owner, record("live", final=False))
            full = True
            for call in (
                store.create(owner, replace(record("r"), input=payload)),
                store.update(owner, replace(record("live"), response=payload)),
                store.append(owner, "live", Log(0, 1, payload)),
            ):
                with pytest.raises(Exception, match="full") as failure:
                    await call
                assert PAYLOAD.decode() not in "".join(traceback.format_exception(failure.value))
            full = False
            assert await store.get(owner, "r") is None
            assert await store.get(owner, "live") == record("live", final=False)
            assert await store.append(owner, "live", Log(0, 1, payload))


async def test_locked_file_is_error_and_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CONNECT_TIMEOUT", 0.05)
    async with sqlite(tmp_path) as url, opened(url) as store, opened(url) as other:
        await store.create("ann", record("live", final=False))
        with anyio.fail_after(20):
            async with other._engines.transaction():
                assert await store.get("ann", "live") is not None
                for call in (store.create("ann", record("r")), store.append("ann", "live", Log(0, 1, b"x"))):
                    with pytest.raises(Exception, match="locked"):
                        await call
        assert await store.create("ann", record("r")) is None
        assert await store.append("ann", "live", Log(0, 1, b"x"))


async def test_call_times_out_waiting_for_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(engine, "POOL_TIMEOUT", 0.05)
    async with opened(url) as store:
        busy, free = anyio.Event(), anyio.Event()

        async def hold() -> None:
            busy.set()
            await free.wait()

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: store._engines.run_shielded(hold, writes=False))
                await busy.wait()
                with pytest.raises(TimeoutError, match="in use"):
                    await store.get("ann", "r")
                free.set()
            assert await store.get("ann", "r") is None


@needs_postgres
async def test_connection_closed_by_server_is_replaced(tmp_path: Path) -> None:
    async with postgres(tmp_path) as url, opened(url) as store:
        await create_conversation(store, 1)
        async with store._engines.statement() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            pid, heard_of_it = driver.get_server_pid(), asyncio.Event()
            driver.add_termination_listener(lambda _: heard_of_it.set())
        async with opened(url) as other, other._engines.statement() as connection:
            await connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        with anyio.fail_after(10):
            await heard_of_it.wait()
            assert await store.get("ann", "turn_0") is not None
            assert await store.create("ann", record("r")) is None


@needs_postgres
async def test_silent_server_times_out_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "COMMAND_TIMEOUT", 0.1)
    monkeypatch.setattr(engine, "CONNECT_TIMEOUT", 0.5)
    async with postgres(tmp_path) as url, opened(url), pausable_proxy(url) as (address, speaks):
        store = SqlStore(address)
        assert await store.create("ann", record("r")) is None
        speaks.clear()
        with anyio.fail_after(20), pytest.raises(TimeoutError):
            await store.get("ann", "r")
        speaks.set()
        with anyio.fail_after(20):
            assert await store.get("ann", "r") == record("r")
            speaks.clear()
            await store.aclose()


@asynccontextmanager
async def pausable_proxy(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield a proxy to the server that forwards data only while the event is set."""
    speaks = asyncio.Event()
    speaks.set()
    _, _, place = url.partition("@")
    host, _, port = place.partition("/")[0].partition(":")

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await speaks.wait()
                target.write(data)
        target.close()

    async def connect(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        answers, questions = await asyncio.open_connection(host, int(port or 5432))
        await asyncio.gather(pass_on(source, questions), pass_on(answers, target))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    here = server.sockets[0].getsockname()
    try:
        yield url.replace(place.partition("/")[0], f"127.0.0.1:{here[1]}"), speaks
    finally:
        speaks.set()
        server.close()
        with anyio.move_on_after(5):
            await server.wait_closed()


def test_encoded_keys_are_readable_short_and_distinct() -> None:
    assert encode_key("user@example.com/ä") == "user@example.com/%C3%A4"
    keys = [encode_key(text) for text in ODD]
    assert len(set(keys)) == len(ODD)
    assert all(len(key) <= 240 and key.isascii() and "\x00" not in key for key in keys)
    assert encode_key(encode_key("x" * 5000)) != encode_key("x" * 5000), "short and long texts have different keys"
