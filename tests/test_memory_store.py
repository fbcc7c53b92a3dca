"""The default store: it keeps the contract that every store keeps, and it is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import errors
from responses_kit.stores import Record, ResponseStore
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing.store_contract import STORE_CONTRACT, Check

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


def record(name: str, *, previous: str | None = None, size: int = 100) -> Record:
    return Record(
        id=name, previous_id=previous, input=b"[]", response=b"x" * size, item_ids=(f"{name}_item",), final=True
    )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def make_store() -> AsyncIterator[ResponseStore]:
    yield MemoryStore()


@pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
async def test_the_memory_store_keeps_the_contract(check: Check) -> None:
    await check(make_store)


@pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
async def test_the_contract_notices_a_store_that_breaks_it(check: Check) -> None:
    class Forgetful(MemoryStore):
        async def get(self, owner: str, response_id: str) -> Record | None:
            return None

        async def chain(self, owner: str, response_id: str) -> list[Record]:
            return (await super().chain(owner, response_id))[1:]

        async def items(self, owner: str, item_ids: object) -> dict[str, Record]:
            return {}

        async def update(self, owner: str, record: Record) -> bool:
            return True

    @asynccontextmanager
    async def make_bad_store() -> AsyncIterator[ResponseStore]:
        yield Forgetful()

    with pytest.raises((AssertionError, ExceptionGroup)):
        await check(make_bad_store)


async def test_a_store_without_owners_is_noticed() -> None:
    class Open(MemoryStore):
        async def get(self, owner: str, response_id: str) -> Record | None:
            return await super().get("", response_id)

        async def create(self, owner: str, record: Record) -> None:
            await super().create("", record)

    @asynccontextmanager
    async def make_open_store() -> AsyncIterator[ResponseStore]:
        yield Open()

    broken = []
    for check in STORE_CONTRACT:
        try:
            await check(make_open_store)
        except (AssertionError, ExceptionGroup):
            broken.append(check.__name__)
    assert {"shows_nobody_elses", "keeps_owners_and_ids_apart"} <= set(broken)


async def test_the_least_recently_used_goes_first_when_there_are_too_many() -> None:
    store = MemoryStore(max_records=3)
    for name in ("a", "b", "c"):
        await store.create("ann", record(name))
    assert await store.get("ann", "a")
    await store.create("ann", record("d"))
    assert len(store) == 3
    assert await store.get("ann", "b") is None
    assert [bool(await store.get("ann", name)) for name in ("a", "c", "d")] == [True, True, True]
    assert not await store.items("ann", ["b_item"])


async def test_the_bound_holds_for_all_owners_together() -> None:
    store = MemoryStore(max_records=2)
    for owner in ("ann", "bob", "eve"):
        await store.create(owner, record("a"))
    assert len(store) == 2
    assert await store.get("ann", "a") is None


async def test_bytes_are_bounded_too_and_an_update_counts_anew() -> None:
    store = MemoryStore(max_bytes=100_000)
    for name in ("a", "b", "c"):
        await store.create("ann", record(name, size=30_000))
    assert len(store) == 3
    assert await store.update("ann", record("a", size=1))
    await store.create("ann", record("d", size=30_000))
    assert len(store) == 4, "the room that the update freed is used"
    assert await store.update("ann", record("a", size=60_000))
    assert await store.get("ann", "b") is None
    assert await store.get("ann", "a") is not None, "the record that was just written stays"


async def test_deleting_makes_room() -> None:
    store = MemoryStore(max_bytes=100_000)
    for _ in range(50):
        await store.create("ann", record("a", size=60_000))
        assert await store.delete("ann", "a")
    assert len(store) == 0
    await store.create("ann", record("b", size=90_000))
    assert await store.get("ann", "b")


@pytest.mark.parametrize("known", [True, False])
async def test_a_record_larger_than_the_whole_store_is_refused_and_harms_no_other(known: bool) -> None:
    store = MemoryStore(max_bytes=50_000)
    await store.create("ann", record("a"))
    await store.create("ann", record("b"))
    with pytest.raises(errors.StoreError, match="store: false"):
        await (store.update if known else store.create)("ann", record("b" if known else "c", size=60_000))
    assert await store.get("ann", "a") is not None
    assert await store.get("ann", "b") in (record("b"), None), "no half of what was refused is kept"


async def test_a_record_is_gone_when_its_time_is_over_and_use_prolongs_it() -> None:
    clock = Clock()
    store = MemoryStore(ttl=60, clock=clock)
    await store.create("ann", record("a"))
    await store.create("ann", record("b"))
    clock.now += 59
    assert await store.get("ann", "a")
    clock.now += 1
    assert await store.get("ann", "b") is None
    assert not await store.items("ann", ["b_item"])
    assert await store.update("ann", record("b")) is False
    assert await store.delete("ann", "b") is False
    assert await store.get("ann", "a")
    clock.now += 60
    assert await store.chain("ann", "a") == []


async def test_what_has_expired_is_cleared_away_by_the_next_write() -> None:
    clock = Clock()
    store = MemoryStore(ttl=60, clock=clock)
    for number in range(10):
        await store.create("ann", record(f"{number}"))
    clock.now += 60
    await store.create("ann", record("new"))
    assert len(store) == 1


async def test_a_living_conversation_stays_whole() -> None:
    clock = Clock()
    store = MemoryStore(max_records=4, ttl=60, clock=clock)
    await store.create("ann", record("first"))
    for number in range(10):
        await store.create("ann", record(f"other_{number}"))
        clock.now += 50
        assert await store.chain("ann", "first" if number == 0 else "second")
        if number == 0:
            await store.create("ann", record("second", previous="first"))
    assert [kept.id for kept in await store.chain("ann", "second")] == ["first", "second"]


async def test_records_cannot_be_changed_from_outside() -> None:
    store = MemoryStore()
    await store.create("ann", record("a"))
    kept = await store.get("ann", "a")
    assert kept is not None
    with pytest.raises(FrozenInstanceError):
        kept.response = b"{}"
    chain = await store.chain("ann", "a")
    chain.clear()
    found = await store.items("ann", ["a_item"])
    assert isinstance(found, dict)
    found.clear()
    assert await store.chain("ann", "a") == [kept]
    assert await store.items("ann", ["a_item"]) == {"a_item": kept}


actions = st.lists(
    st.tuples(
        st.sampled_from(["create", "update", "get", "delete", "chain", "items", "wait"]),
        st.sampled_from(["ann", "bob"]),
        st.integers(0, 5),
        st.sampled_from([1, 500, 3000, 20_000]),
    ),
    max_size=40,
)


@given(script=actions)
async def test_whatever_happens_the_bounds_hold_and_the_books_balance(
    script: list[tuple[str, str, int, int]],
) -> None:
    clock = Clock()
    store = MemoryStore(max_records=4, max_bytes=15_000, ttl=10, clock=clock)
    for action, owner, number, size in script:
        new = replace(record(f"r{number}", size=size), previous_id=f"r{number - 1}" if number else None)
        match action:
            case "create" if await store.get(owner, new.id) is None:
                await _or_too_large(store.create, owner, new)
            case "update":
                await _or_too_large(store.update, owner, new)
            case "get":
                await store.get(owner, new.id)
            case "delete":
                await store.delete(owner, new.id)
            case "chain":
                assert all(kept.id <= new.id for kept in await store.chain(owner, new.id))
            case "items":
                assert set(await store.items(owner, ["r0_item", new.item_ids[0]])) <= {"r0_item", new.item_ids[0]}
            case "wait":
                clock.now += number
        assert len(store) <= 4
        assert 0 <= store._bytes <= 15_000
        assert store._bytes >= sum(entry.record.size for entry in store._records.values())
    for owner in ("ann", "bob"):
        for number in range(6):
            await store.delete(owner, f"r{number}")
    clock.now += 10
    await store.create("eve", record("last", size=1))
    await store.delete("eve", "last")
    assert (len(store), store._bytes, len(store._items)) == (0, 0, 0), "nothing is left behind"


async def _or_too_large(write: object, owner: str, new: Record) -> None:
    try:
        await write(owner, new)
    except errors.StoreError:
        assert new.size > 10_000
