"""The Redis store: contract, expiry, round trips, concurrency and failures."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import redis
from redis import exceptions
from redis.asyncio import Redis, RedisCluster

from responses_kit import errors
from responses_kit.stores.protocol import Log, Record, ResponseStore
from responses_kit.stores.redis import RedisStore
from responses_kit.stores.redis import store as module
from responses_kit.testing.store_contract import STORE_CONTRACT, Check

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

URL = os.environ.get("RESPONSES_KIT_TEST_REDIS", "")

needs_redis = pytest.mark.skipif(not URL, reason="RESPONSES_KIT_TEST_REDIS names no Redis")

TTL, LOG_TTL = 1000, 100
"""The retention in seconds."""

LATE = 4_102_444_800.0

REFUSED = "redis://user:hunter2@127.0.0.1:1/0"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def prefix() -> Iterator[str]:
    name = f"responses_kit_test_{secrets.token_hex(8)}:"
    yield name
    remove(name)


def remove(prefix: str) -> None:
    with redis.Redis.from_url(URL) as server:
        for key in server.scan_iter(f"{prefix}*", count=1000):
            server.unlink(key)


@pytest.fixture
async def store(prefix: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(URL, prefix=prefix, ttl=TTL, log_ttl=LOG_TTL)
    yield store
    await store.aclose()


@pytest.fixture
async def server() -> AsyncIterator[Redis]:
    async with Redis.from_url(URL) as client:
        yield client


@asynccontextmanager
async def make_store() -> AsyncIterator[ResponseStore]:
    prefix = f"responses_kit_test_{secrets.token_hex(8)}:"
    store = RedisStore(URL, prefix=prefix)
    try:
        yield store
    finally:
        await store.aclose()
        remove(prefix)


class Proxy:
    """A proxy of the server that can drop replies or close its connections."""

    def __init__(self) -> None:
        self.port = 0
        self.losing = 0
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        there = urlsplit(URL)
        return there._replace(netloc=f"{there.netloc.rpartition('@')[0]}@127.0.0.1:{self.port}".lstrip("@")).geturl()

    async def begin(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def end(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = urlsplit(URL)
        answers, asks = await asyncio.open_connection(there.hostname, there.port or 6379)
        self._open |= {writer, asks}
        asking = asyncio.create_task(self._pump(reader, asks))
        with contextlib.suppress(ConnectionError):
            while data := await answers.read(65536):
                if self.losing:
                    self.losing -= 1
                    break
                writer.write(data)
        asking.cancel()
        for one in (writer, asks):
            self._open.discard(one)
            one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.transport.abort()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    proxy = Proxy()
    await proxy.begin()
    yield proxy
    proxy.end()


class CountingRedis(Redis):
    """A client that counts its round trips."""

    round_trips = 0

    async def execute_command(self, *args: object, **options: object) -> object:
        self.round_trips += 1
        return await super().execute_command(*args, **options)

    def pipeline(self, *args: object, **options: object) -> object:
        self.round_trips += 1
        return super().pipeline(*args, **options)


def live(name: str, *, previous: str | None = None, size: int = 100, key: str | None = None) -> Record:
    return Record(
        id=name,
        previous_id=previous,
        input=b"[]",
        response=b"x" * size,
        item_ids=(f"{name}_in", f"{name}_out"),
        events="logged",
        lease=LATE,
        key=key,
    )


def ended(name: str, *, previous: str | None = None, size: int = 100) -> Record:
    return replace(live(name, previous=previous, size=size), final=True)


def log(start: int, count: int = 1, size: int = 10) -> Log:
    return Log(start, count, b"%d" % (start % 10) * size)


async def conversation(store: RedisStore, turns: int, size: int = 100) -> list[Record]:
    records = [ended(f"resp_{turn}", previous=f"resp_{turn - 1}" if turn else None, size=size) for turn in range(turns)]
    for record in records:
        await store.create("ann", record)
    return records


async def read_ttls(server: Redis, prefix: str) -> dict[str, int]:
    """Return the time to live of each key in seconds, by the key without its prefix."""
    keys = [key async for key in server.scan_iter(f"{prefix}*", count=1000)]
    return {key.decode().removeprefix(prefix): await server.ttl(key) for key in keys}


async def age(server: Redis, prefix: str) -> None:
    """Set the time to live of all keys to ten seconds."""
    for name in await read_ttls(server, prefix):
        await server.expire(prefix + name, 10)


async def lose(server: Redis, prefix: str, name: str) -> None:
    """Delete the keys of a record as if they had expired."""
    await server.delete(f"{prefix}record:{name}", f"{prefix}log:{name}")


# The contract.


@needs_redis
@pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
async def test_store_passes_contract(check: Check) -> None:
    await check(make_store)


@needs_redis
async def test_lone_surrogates_are_stored(store: RedisStore) -> None:
    halves, emoji = "\ud83d\ude00", "😀"
    for text in (halves, emoji, "\ud83d"):
        record = replace(live(text, previous=text, key=text), item_ids=(text,), fingerprint=text)
        assert await store.create(text, record) is None
        assert await store.append(text, text, log(0)) is True
        assert await store.get(text, text) == record
        assert await store.items(text, [text]) == {text: record}
        assert await store.renew([(text, text)]) == {(text, text)}


# Expiry.


@needs_redis
async def test_every_redis_key_expires(store: RedisStore, server: Redis, prefix: str) -> None:
    await store.create("ann", live("resp_1", key="k"))
    await store.append("ann", "resp_1", log(0))
    await store.cancel("ann", "resp_1", 5.0)
    await store.create("bob", live("resp_2"))
    await store.renew([("bob", "resp_2")], LATE)
    await store.update("bob", replace(live("resp_2"), item_ids=("other",)), log(0, 2))
    await store.create("bob", ended("resp_3", previous="resp_2"))
    remaining_ttls = await read_ttls(server, prefix)
    assert set(remaining_ttls) == {
        "leases",
        "key:ann:k",
        "log:ann:resp_1",
        "log:bob:resp_2",
        "record:ann:resp_1",
        "record:bob:resp_2",
        "record:bob:resp_3",
        "item:ann:resp_1_in",
        "item:ann:resp_1_out",
        "item:bob:other",
        "item:bob:resp_3_in",
        "item:bob:resp_3_out",
    }
    assert all(TTL - 10 < seconds <= TTL for seconds in remaining_ttls.values()), remaining_ttls
    await server.delete(f"{prefix}leases")
    await store.renew([("bob", "resp_2")], LATE)
    assert 0 < await server.ttl(f"{prefix}leases") <= TTL


@needs_redis
async def test_delete_leaves_no_keys(store: RedisStore, server: Redis, prefix: str) -> None:
    for name, key in (("resp_1", "k"), ("resp_2", None)):
        await store.create("ann", live(name, key=key))
        await store.append("ann", name, log(0))
    await store.update("ann", replace(ended("resp_1"), item_ids=("other",)), log(1))
    for name in ("resp_1", "resp_2"):
        assert await store.delete("ann", name) is True
    assert await read_ttls(server, prefix) == {}


@needs_redis
async def test_log_expires_before_response(store: RedisStore, server: Redis, prefix: str) -> None:
    await store.create("ann", live("resp_1"))
    await store.append("ann", "resp_1", log(0))
    await store.update("ann", ended("resp_1"), log(1))
    remaining_ttls = await read_ttls(server, prefix)
    assert LOG_TTL - 10 < remaining_ttls.pop("log:ann:resp_1") <= LOG_TTL
    assert all(TTL - 10 < seconds <= TTL for seconds in remaining_ttls.values()), remaining_ttls
    await age(server, prefix)
    assert await store.get("ann", "resp_1") == ended("resp_1")
    assert (await read_ttls(server, prefix))["log:ann:resp_1"] <= 10, (
        "reading a response does not extend the retention of its events"
    )
    await server.delete(f"{prefix}log:ann:resp_1")
    for after in (-1, 0, 1, 5):
        assert await store.events("ann", "resp_1", after) is None
    assert await store.get("ann", "resp_1") == ended("resp_1")


@needs_redis
async def test_log_without_start_is_unavailable(store: RedisStore, server: Redis, prefix: str) -> None:
    await store.create("ann", live("resp_1"))
    for start in range(4):
        await store.append("ann", "resp_1", log(start))
    await server.xtrim(f"{prefix}log:ann:resp_1", maxlen=2, approximate=False)
    assert await store.events("ann", "resp_1", -1) is None
    assert await store.events("ann", "resp_1", 1) == [log(2), log(3)]


USES: dict[str, Callable[[RedisStore], Awaitable[object]]] = {
    "chain": lambda store: store.chain("ann", "resp_3"),
    "get": lambda store: store.get("ann", "resp_3"),
    "items": lambda store: store.items("ann", ["resp_3_in"]),
    "renew": lambda store: store.renew([("ann", "resp_3")], LATE),
    "create": lambda store: store.create("ann", live("resp_9", key="k")),
}


@needs_redis
@pytest.mark.parametrize("use", USES)
async def test_use_renews_whole_conversation(store: RedisStore, server: Redis, prefix: str, use: str) -> None:
    await store.create("ann", ended("resp_1"))
    await store.create("ann", ended("resp_2", previous="resp_1"))
    await store.create("ann", live("resp_3", previous="resp_2", key="k"))
    await store.append("ann", "resp_3", log(0))
    await store.create("ann", ended("resp_other", previous="resp_1"))
    await age(server, prefix)
    assert await USES[use](store)
    remaining_ttls = await read_ttls(server, prefix)
    unused = {name: seconds for name, seconds in remaining_ttls.items() if "other" in name}
    assert len(unused) == 3
    assert all(seconds <= 10 for seconds in unused.values()), "an unused branch expires"
    used = {name: seconds for name, seconds in remaining_ttls.items() if name not in unused}
    assert len(used) == 3 + 6 + len(("key", "log", "leases"))
    assert all(seconds > TTL - 10 for seconds in used.values()), used


@needs_redis
async def test_renewal_keeps_record_and_log(store: RedisStore, server: Redis, prefix: str) -> None:
    await store.create("ann", live("resp_1", key="k"))
    await store.append("ann", "resp_1", log(0))
    await age(server, prefix)
    assert await store.append("ann", "resp_1", log(1)) is True
    assert (await read_ttls(server, prefix))["log:ann:resp_1"] > TTL - 10
    await age(server, prefix)
    assert await store.update("ann", replace(live("resp_1"), response=b"{}")) is True
    remaining_ttls = await read_ttls(server, prefix)
    assert all(seconds > TTL - 10 for seconds in remaining_ttls.values()), remaining_ttls


@needs_redis
async def test_expired_records_are_unknown(store: RedisStore, server: Redis, prefix: str) -> None:
    last = live("resp_2", previous="resp_1", key="k")
    await store.create("ann", ended("resp_1"))
    await store.create("ann", last)
    await lose(server, prefix, "ann:resp_1")
    assert await store.chain("ann", "resp_2") == [last]
    assert await store.items("ann", ["resp_1_in", "resp_2_in"]) == {"resp_2_in": last}
    await lose(server, prefix, "ann:resp_2")
    assert await store.update("ann", ended("resp_2")) is False
    assert await store.append("ann", "resp_2", log(0)) is False
    assert await store.renew([("ann", "resp_2")], LATE) == set()
    assert await store.items("ann", ["resp_1_in", "resp_2_in"]) == {}
    assert await store.create("ann", live("resp_3", key="k")) is None, "the key can be reused"


@needs_redis
@pytest.mark.parametrize("count", [3, 2500])
async def test_leases_of_expired_records_are_removed(store: RedisStore, server: Redis, prefix: str, count: int) -> None:
    await store.create("ann", replace(live("resp_1"), lease=5.0))
    await store.create("ann", live("resp_2"))
    gone = {f"ann:gone_{number}": number / count for number in range(count)}
    for clear, result in (
        (partial(store.expired, 10.0), [("ann", replace(live("resp_1"), lease=5.0))]),
        (store.prune, count),
    ):
        await server.zadd(f"{prefix}leases", gone)
        assert await clear() == result
        assert await server.zrange(f"{prefix}leases", 0, -1) == [b"ann:resp_1", b"ann:resp_2"]
    assert await store.prune() == 0


@needs_redis
async def test_repeated_item_leaves_no_keys(store: RedisStore, server: Redis, prefix: str) -> None:
    for number in range(50):
        await store.create("ann", replace(ended(f"resp_{number}"), item_ids=("shared",)))
        if number < 49:
            await lose(server, prefix, f"ann:resp_{number}")
    assert await server.zcard(f"{prefix}item:ann:shared") < 20
    last = replace(ended("resp_49"), item_ids=("shared",))
    assert await store.items("ann", ["shared"]) == {"shared": last}
    assert await server.zrange(f"{prefix}item:ann:shared", 0, -1) == [b":resp_49"]


# Round trips and large data.


@needs_redis
async def test_chain_is_one_round_trip(store: RedisStore, prefix: str) -> None:
    records = await conversation(store, 1000)
    async with CountingRedis.from_url(URL) as client:
        counted = RedisStore(client, prefix=prefix)
        for turns in (1, 10, 100, 1000):
            client.round_trips = 0
            assert await counted.chain("ann", f"resp_{turns - 1}") == records[:turns]
            assert client.round_trips == 1
            client.round_trips = 0
            assert len(await counted.items("ann", [f"resp_{turn}_in" for turn in range(turns)])) == turns
            assert client.round_trips == 1


@needs_redis
async def test_large_chain_is_split_over_replies(store: RedisStore, prefix: str) -> None:
    records = await conversation(store, 30, size=100_000)
    async with CountingRedis.from_url(URL) as client:
        counted = RedisStore(client, prefix=prefix)
        assert await counted.chain("ann", "resp_29") == records
        assert client.round_trips == 2
        found = await counted.items("ann", [f"resp_{turn}_out" for turn in range(30)])
        assert found == {f"resp_{turn}_out": records[turn] for turn in range(30)}
        assert client.round_trips == 4
    large = [replace(live(f"large_{number}", size=400_000), lease=1.0) for number in range(5)]
    for record in large:
        await store.create("ann", record)
    assert sorted(record.id for _, record in await store.expired(2.0)) == [record.id for record in large]
    assert len(await store.expired(2.0, limit=3)) == 3
    assert await store.get("ann", "large_0") == large[0]


@needs_redis
async def test_conversation_of_1000_turns_is_whole(store: RedisStore) -> None:
    records = await conversation(store, 2100)
    assert await store.chain("ann", "resp_2099") == records
    await store.delete("ann", "resp_50")
    assert await store.chain("ann", "resp_2099") == records[51:]


@needs_redis
@pytest.mark.parametrize("turns", [1, 2, 1500])
async def test_circular_chain_is_bounded(store: RedisStore, turns: int) -> None:
    records = await conversation(store, turns)
    await store.delete("ann", "resp_0")
    first = ended("resp_0", previous=f"resp_{turns - 1}")
    await store.create("ann", first)
    assert await store.chain("ann", f"resp_{turns - 1}") == [first, *records[1:]]
    assert await store.get("ann", "resp_0") == first


@needs_redis
async def test_long_log_is_whole_and_ordered(store: RedisStore) -> None:
    await store.create("ann", live("resp_1"))
    pieces = [log(2 * number, 2, size=20_000) for number in range(100)]
    for piece in pieces:
        assert await store.append("ann", "resp_1", piece) is True
    assert await store.events("ann", "resp_1", -1) == pieces
    assert await store.events("ann", "resp_1", 100) == pieces[50:]
    assert await store.events("ann", "resp_1", 10**30) == []


@needs_redis
async def test_oversize_record_is_refused(prefix: str) -> None:
    store = RedisStore(URL, prefix=prefix, max_record_bytes=10_000)
    await store.create("ann", live("resp_1"))
    with pytest.raises(errors.StoreError, match="'store' to false"):
        await store.create("ann", live("resp_2", size=10_000))
    with pytest.raises(errors.StoreError, match="'store' to false"):
        await store.update("ann", ended("resp_1", size=10_000))
    for write in (partial(store.append, "ann", "resp_1"), partial(store.update, "ann", ended("resp_1"))):
        with pytest.raises(errors.StoreError, match="too large"):
            await write(log(0, size=10_001))
    assert await store.get("ann", "resp_1") == live("resp_1")
    assert await store.get("ann", "resp_2") is None
    assert await store.append("ann", "resp_1", log(0, size=10_000)) is True
    await store.aclose()


@needs_redis
async def test_record_deleted_between_reads_is_unknown(store: RedisStore, prefix: str) -> None:
    class Late(Redis):
        def pipeline(self, *args: object, **options: object) -> object:
            with redis.Redis.from_url(URL) as other:
                other.delete(f"{prefix}record:ann:large")
            return super().pipeline(*args, **options)

    large = replace(ended("large", size=600_000), key="k")
    await store.create("ann", ended("resp_3", previous="large"))
    async with Late.from_url(URL) as client:
        late = RedisStore(client, prefix=prefix)
        await store.create("ann", large)
        assert await late.get("ann", "large") is None
        await store.create("ann", large)
        assert await late.items("ann", ["large_in", "resp_3_in"]) == {"resp_3_in": ended("resp_3", previous="large")}
        await store.create("ann", large)
        assert await late.chain("ann", "resp_3") == [ended("resp_3", previous="large")]
        await store.create("ann", large)
        assert await late.create("ann", live("resp_4", key="k")) is None
    assert await store.get("ann", "resp_4") == live("resp_4", key="k")


# Concurrency.


@needs_redis
async def test_processes_see_each_others_writes(store: RedisStore, prefix: str) -> None:
    other = RedisStore(URL, prefix=prefix)
    await store.create("ann", live("resp_1", key="k"))
    for start in range(10):
        assert await (store, other)[start % 2].append("ann", "resp_1", log(start)) is True
        assert await (other, store)[start % 2].events("ann", "resp_1", start - 1) == [log(start)]
        assert await (other, store)[start % 2].append("ann", "resp_1", log(start)) is False
    assert await other.create("ann", live("resp_2", key="k")) == live("resp_1", key="k")
    assert await other.cancel("ann", "resp_1", LATE) is True
    assert await store.renew([("ann", "resp_1")], LATE) == set()
    await other.aclose()


@needs_redis
async def test_concurrent_appends_are_grouped(prefix: str) -> None:
    async with CountingRedis.from_url(URL) as client:
        store = RedisStore(client, prefix=prefix)
        for number in range(100):
            await store.create("ann", live(f"resp_{number}"))
        client.round_trips = 0

        async def append(number: int) -> None:
            for start in range(5):
                assert await store.append("ann", f"resp_{number}", log(start, size=number)) is (number != 50)

        await store.delete("ann", "resp_50")
        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(append, number)
        assert client.round_trips < 50, "concurrent appends share round trips"
        for number in range(100):
            expected = None if number == 50 else [log(start, size=number) for start in range(5)]
            assert await store.events("ann", f"resp_{number}", -1) == expected


@needs_redis
async def test_store_serves_several_event_loops(store: RedisStore) -> None:
    async def live_here(number: int) -> None:
        with anyio.fail_after(20):
            await store.create("ann", live(f"resp_{number}"))
            for start in range(20):
                assert await store.append("ann", f"resp_{number}", log(start)) is True
            assert await store.update("ann", ended(f"resp_{number}"), log(20)) is True
            await store.aclose()

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(anyio.to_thread.run_sync, asyncio.run, live_here(number))
    for number in range(4):
        assert await store.get("ann", f"resp_{number}") == ended(f"resp_{number}")
        assert await store.events("ann", f"resp_{number}", -1) == [log(start) for start in range(21)]


@needs_redis
async def test_call_waits_for_free_connection(prefix: str) -> None:
    store = RedisStore(f"{URL}?max_connections=2", prefix=prefix)
    await store.create("ann", live("resp_1"))
    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(store.get, "ann", "resp_1")
    await store.aclose()


@needs_redis
async def test_cancelled_call_returns_connection(prefix: str) -> None:
    store = RedisStore(f"{URL}?max_connections=2", prefix=prefix)
    await store.create("ann", live("resp_1"))
    for turn in range(40):
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(store.get, "ann", "resp_1")
                group.start_soon(store.append, "ann", "resp_1", log(1000 + number))
            for _ in range(turn):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    with anyio.fail_after(5):
        for _ in range(4):
            assert await store.get("ann", "resp_1") == live("resp_1")
        assert await store.append("ann", "resp_1", log(0)) is True
    await store.aclose()


# Failures.


@needs_redis
async def test_scripts_are_reloaded_after_flush(store: RedisStore, server: Redis) -> None:
    await store.create("ann", live("resp_1"))
    await server.script_flush()
    assert await store.append("ann", "resp_1", log(0)) is True
    await server.script_flush()
    assert await store.events("ann", "resp_1", -1) == [log(0)]


@needs_redis
async def test_write_with_lost_reply_is_applied_once(proxy: Proxy, prefix: str) -> None:
    store = RedisStore(proxy.url, prefix=prefix)
    await store.setup()
    writes: list[tuple[Callable[[], Awaitable[object]], object]] = [
        (lambda: store.create("ann", live("resp_1", key="k")), None),
        (lambda: store.append("ann", "resp_1", log(0)), True),
        (lambda: store.append("ann", "resp_1", log(1)), True),
        (lambda: store.update("ann", replace(live("resp_1"), response=b"{}"), log(2)), True),
        (lambda: store.renew([("ann", "resp_1")], LATE), {("ann", "resp_1")}),
        (lambda: store.cancel("ann", "resp_1", LATE), True),
        (lambda: store.update("ann", ended("resp_1"), log(3)), True),
    ]
    for write, answer in writes:
        proxy.losing = 1
        assert await write() == answer
        assert proxy.losing == 0, "the reply was dropped"
    assert await store.get("ann", "resp_1") == replace(ended("resp_1"), cancelled=True, key="k")
    assert await store.events("ann", "resp_1", -1) == [log(start) for start in range(4)]
    assert await store.append("ann", "resp_1", log(3)) is False
    assert await store.update("ann", ended("resp_1")) is False
    with pytest.raises(errors.StoreError, match="exists already"):
        await store.create("ann", live("resp_1", key="k"))
    await store.aclose()


@needs_redis
async def test_restarted_server_is_used_again(proxy: Proxy, prefix: str) -> None:
    store = RedisStore(proxy.url, prefix=prefix)
    async with anyio.create_task_group() as group:
        for number in range(10):
            group.start_soon(store.create, "ann", live(f"resp_{number}"))
    proxy.end()
    with anyio.fail_after(10):
        for call in (partial(store.get, "ann", "resp_1"), partial(store.append, "ann", "resp_1", log(0)), store.setup):
            with pytest.raises(exceptions.ConnectionError):
                await call()
    await proxy.begin()
    for number in range(10):
        assert await store.append("ann", f"resp_{number}", log(0)) is True
        assert await store.get("ann", f"resp_{number}") == live(f"resp_{number}")
    await store.aclose()


async def test_unreachable_server_is_error_without_secrets() -> None:
    store = RedisStore(REFUSED)
    with anyio.fail_after(10):
        for call in (store.setup, partial(store.get, "ann", "resp_1"), partial(store.append, "ann", "resp_1", log(0))):
            with pytest.raises(exceptions.ConnectionError) as caught:
                await call()
            assert "hunter2" not in "".join(traceback.format_exception(caught.value)) + repr(store)
    await store.aclose()


@needs_redis
async def test_refused_password_is_not_disclosed() -> None:
    there = urlsplit(URL)
    store = RedisStore(there._replace(netloc=f"nobody:hunter2@{there.hostname}:{there.port or 6379}").geturl())
    with pytest.raises(exceptions.RedisError) as caught:
        await store.setup()
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
    await store.aclose()


@pytest.mark.parametrize("given", [False, True])
async def test_silent_server_times_out(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    monkeypatch.setattr(module, "_CALL_TIMEOUT" if given else "_COMMAND_TIMEOUT", 0.2)
    connections: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1")
    host, port = listener.sockets[0].getsockname()
    client = Redis(host=host, port=port, socket_timeout=None, socket_connect_timeout=None)
    store = RedisStore(client if given else f"redis://{host}:{port}")
    with anyio.fail_after(10):
        for call in (store.setup, partial(store.get, "ann", "resp_1"), partial(store.append, "ann", "resp_1", log(0))):
            with pytest.raises((TimeoutError, exceptions.TimeoutError)):
                await call()
    assert connections
    await client.aclose()
    await store.aclose()
    for writer in connections:
        writer.transport.abort()
    listener.close()


# Setup.


@needs_redis
async def test_given_client_is_left_open(server: Redis, prefix: str) -> None:
    store = RedisStore(server, prefix=prefix)
    await store.setup()
    await store.create("ann", live("resp_1"))
    await store.aclose()
    assert await server.exists(f"{prefix}record:ann:resp_1")
    assert await store.get("ann", "resp_1") == live("resp_1")


@needs_redis
async def test_closed_store_reopens(store: RedisStore) -> None:
    await store.aclose()
    await store.setup()
    await store.create("ann", live("resp_1"))
    await store.aclose()
    await store.aclose()
    assert await store.get("ann", "resp_1") == live("resp_1")


@pytest.mark.parametrize(
    ("info", "match"),
    [
        ({"redis_version": "6.0.16"}, "6.2 or newer; the server has 6.0.16"),
        ({"redis_version": "5.10"}, "6.2 or newer"),
        ({"redis_version": "7.0.15", "redis_mode": "cluster"}, "Cluster"),
        ({"redis_version": "7.0.15", "redis_mode": "standalone"}, None),
        ({"redis_version": "10.0", "redis_mode": "sentinel"}, None),
    ],
)
async def test_setup_refuses_unsupported_server(info: dict[str, str], match: str | None) -> None:
    class PatchedInfo(Redis):
        async def info(self, *sections: str) -> dict[str, str]:
            return info

    refused = contextlib.nullcontext() if match is None else pytest.raises(errors.ConfigurationError, match=match)
    with refused:
        await RedisStore(PatchedInfo()).setup()


@pytest.mark.parametrize(
    "given",
    [
        "",
        "localhost",
        "http://localhost:6379",
        "redis://:hunter2/hunter2@localhost:6379",
        "redis://localhost:hunter2",
        "redis://localhost?socket_timeout=hunter2",
        None,
        Redis,
        Redis(decode_responses=True),
        redis.Redis(),
        RedisCluster(host="localhost"),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_invalid_url_or_client_is_refused(given: object) -> None:
    with pytest.raises(errors.ConfigurationError) as caught:
        RedisStore(given)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


async def test_url_with_decode_responses_is_refused() -> None:
    store = RedisStore("redis://localhost?decode_responses=true")
    with pytest.raises(errors.ConfigurationError, match="decode_responses"):
        await store.setup()


def test_trio_is_refused() -> None:
    store = RedisStore("redis://localhost")
    with pytest.raises(errors.ConfigurationError, match="asyncio"):
        anyio.run(store.get, "ann", "resp_1", backend="trio")


def test_missing_redis_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "responses_kit.stores.redis")
    monkeypatch.delitem(sys.modules, "responses_kit.stores.redis.store")
    with pytest.raises(ImportError, match=r'pip install "responses-kit\[redis\]"'):
        importlib.import_module("responses_kit.stores.redis")
