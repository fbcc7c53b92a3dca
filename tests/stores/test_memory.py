"""The memory store: the contract of all stores, and its bounds."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import FrozenInstanceError, replace

import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import errors
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record, ResponseStore
from responses_kit.testing.store_contract import STORE_CONTRACT, Check

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


def record(name: str, *, previous: str | None = None, size: int = 100, final: bool = True) -> Record:
    return Record(
        id=name, previous_id=previous, input=b"[]", response=b"x" * size, item_ids=(f"{name}_item",), final=final
    )


def live(name: str, *, size: int = 100) -> Record:
    return replace(record(name, size=size, final=False), events="logged")


def piece(start: int, size: int = 100) -> Log:
    return Log(start, 1, b"x" * size)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def make_store() -> AsyncIterator[ResponseStore]:
    yield MemoryStore()


@pytest.mark.parametrize("check", STORE_CONTRACT, ids=lambda check: check.__name__)
async def test_store_passes_contract(check: Check) -> None:
    await check(make_store)


def make_changing_store(change: Callable[[Record], Record]) -> type[MemoryStore]:
    """Return a store class that changes each record before it saves it."""

    class ChangingStore(MemoryStore):
        async def create(self, owner: str, record: Record) -> Record | None:
            return await super().create(owner, change(record))

    return ChangingStore


class GetReturnsNone(MemoryStore):
    async def get(self, owner: str, response_id: str) -> Record | None:
        return None


class EventsReturnsEmptyForUnknownId(MemoryStore):
    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        return await super().events(owner, response_id, after) or []


class IgnoresOwners(MemoryStore):
    async def get(self, owner: str, response_id: str) -> Record | None:
        return await super().get("", response_id)

    async def create(self, owner: str, record: Record) -> Record | None:
        return await super().create("", record)


class AppendIgnoresOwner(MemoryStore):
    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        return await super().append("ann", response_id, log)


class ChainReturnsNewestFirst(MemoryStore):
    async def chain(self, owner: str, response_id: str) -> list[Record]:
        return (await super().chain(owner, response_id))[::-1]


class ChainIsEmptyAfterGap(MemoryStore):
    async def chain(self, owner: str, response_id: str) -> list[Record]:
        chain = await super().chain(owner, response_id)
        return [] if chain and chain[0].previous_id is not None else chain


class ItemsReturnsFirstItemOnly(MemoryStore):
    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        found = await super().items(owner, item_ids)
        return {item: record for item, record in found.items() if item == record.item_ids[0]}


class UpdateDoesNothing(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        return True


class UpdateReplacesFinalRecord(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        if (old := await self.get(owner, record.id)) is not None and old.final:
            await self.delete(owner, record.id)
            return await self.create(owner, record) is None
        return await super().update(owner, record, log)


class UpdateResetsCancelled(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        if done := await super().update(owner, record, log):
            entry = self._use((owner, record.id))
            entry.record = replace(record, key=entry.record.key)
        return done


class UpdateChangesKey(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        if done := await super().update(owner, record, log):
            entry = self._use((owner, record.id))
            self._keys.pop((owner, entry.record.key), None)
            self._keys[owner, record.key] = record.id
        return done


class UpdateIsNotAtomic(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        if log is not None and not await self.append(owner, record.id, log):
            await super().update(owner, replace(record, final=False))
            return False
        return await super().update(owner, record)


class DeletePreservesLog(MemoryStore):
    async def delete(self, owner: str, response_id: str) -> bool:
        self._kept = getattr(self, "_kept", {})
        self._kept[owner, response_id] = await self.events(owner, response_id, -1)
        return await super().delete(owner, response_id)

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        return getattr(self, "_kept", {}).get((owner, response_id)) or await super().events(owner, response_id, after)


class DeletePreservesKey(MemoryStore):
    async def create(self, owner: str, record: Record) -> Record | None:
        self._taken = getattr(self, "_taken", {})
        if record.key is not None and (known := self._taken.setdefault((owner, record.key), record)) is not record:
            return known
        return await super().create(owner, record)


class KeysIgnoreOwner(MemoryStore):
    async def create(self, owner: str, record: Record) -> Record | None:
        for (_, key), response_id in self._keys.items():
            if key == record.key:
                return replace(record, id=response_id)
        return await super().create(owner, record)


class MissingKeyIsShared(MemoryStore):
    async def create(self, owner: str, record: Record) -> Record | None:
        return await super().create(owner, replace(record, key=record.key or ""))


class CreateRaces(MemoryStore):
    async def create(self, owner: str, record: Record) -> Record | None:
        known = self._keys.get((owner, record.key))
        await anyio.lowlevel.checkpoint()
        if known is not None:
            return await self.get(owner, known)
        self._keys.pop((owner, record.key), None)
        return await super().create(owner, record)


class AppendAllowsGaps(MemoryStore):
    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        entry = self._use((owner, response_id))
        if entry is None or entry.record.final or log.start < entry.log_end:
            return False
        entry.log.append(log)
        return True


class AppendAllowsRepetition(MemoryStore):
    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        return await super().append(owner, response_id, log) or (await self.events(owner, response_id, -1)) == [log]


class AppendRaces(MemoryStore):
    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        entry = self._use((owner, response_id))
        goes_on = entry is not None and not entry.record.final and entry.log_end == log.start
        await anyio.lowlevel.checkpoint()
        if goes_on:
            entry.log.append(log)
        return goes_on


class FinalUpdateRaces(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        old = await self.get(owner, record.id)
        await anyio.lowlevel.checkpoint()
        done = await super().update(owner, record, log)
        return done or (log is None and old is not None and not old.final)


class EventsReturnsFirstPageOnly(MemoryStore):
    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        pieces = await super().events(owner, response_id, after)
        return pieces and pieces[:100]


class EventsIgnoresAfter(MemoryStore):
    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        return await super().events(owner, response_id, -1)


class EventsOmitsPartialPiece(MemoryStore):
    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        pieces = await super().events(owner, response_id, after)
        return pieces and [piece for piece in pieces if piece.start > after]


class AppendDecodesBytes(MemoryStore):
    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        data = log.data.decode(errors="replace").encode()
        return await super().append(owner, response_id, replace(log, data=data))


class CancelExtendsLease(MemoryStore):
    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        if done := await super().cancel(owner, response_id, until):
            entry = self._use((owner, response_id))
            entry.record = replace(entry.record, lease=until)
        return done


class CancelRaces(MemoryStore):
    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        record = await self.get(owner, response_id)
        await anyio.lowlevel.checkpoint()
        await super().cancel(owner, response_id, until)
        return record is not None and not record.final


class RenewIncludesInactiveRuns(MemoryStore):
    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        for run in runs:
            if until is not None and (entry := self._use(run)) is not None:
                entry.record = replace(entry.record, lease=until)
        return await super().renew(runs, until)


class RenewTruncatesRuns(MemoryStore):
    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        return await super().renew(list(runs)[:500], until)


class RenewWithoutTimeChangesLease(MemoryStore):
    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        return await super().renew(runs, 0.0 if until is None else until)


class RenewReturnsCancelledRuns(MemoryStore):
    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        return await super().renew(runs, until) | {run for run in runs if run in self._in_progress}


class ExpiredIgnoresLimit(MemoryStore):
    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        return await super().expired(now, len(self))


class ExpiredIncludesLiveRecords(MemoryStore):
    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        return await super().expired(math.inf, limit)


class ExpiredReturnsOneOwnerOnly(MemoryStore):
    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        return [found for found in await super().expired(now, limit) if found[0] == "ann"]


class ExpiredIncludesFinalRecords(MemoryStore):
    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        final = [(owner, entry.record) for (owner, _), entry in self._final.items()]
        return [*await super().expired(now, limit), *final][:limit]


class PruneRemovesAllFinalRecords(MemoryStore):
    async def prune(self) -> int:
        gone = list(self._final)
        for key in gone:
            self._remove(key)
        return len(gone)


class UpdatesMix(MemoryStore):
    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        self._latest = record
        await anyio.lowlevel.checkpoint()
        return await super().update(owner, replace(record, response=self._latest.response), log)


BROKEN_STORES: dict[type[MemoryStore], set[str]] = {
    make_changing_store(lambda record: replace(record, lease=float(int(record.lease)))): {"get_returns_equal_record"},
    make_changing_store(lambda record: replace(record, request=b"")): {"get_returns_equal_record"},
    make_changing_store(lambda record: replace(record, events="none")): {"get_returns_equal_record"},
    make_changing_store(lambda record: replace(record, cancelled=False)): {"get_returns_equal_record"},
    make_changing_store(lambda record: replace(record, item_ids=tuple(sorted(record.item_ids)))): {
        "get_returns_equal_record"
    },
    GetReturnsNone: {"get_returns_equal_record", "update_replaces_record", "overlapping_calls_do_not_mix"},
    EventsReturnsEmptyForUnknownId: {
        "unknown_ids_return_nothing",
        "delete_removes_record_items_and_log",
        "owners_cannot_access_each_other",
    },
    IgnoresOwners: {"owners_cannot_access_each_other", "owners_and_ids_do_not_collide"},
    AppendIgnoresOwner: {"owners_cannot_access_each_other", "owners_and_ids_do_not_collide"},
    ChainReturnsNewestFirst: {"chain_returns_oldest_first", "chain_starts_after_gap"},
    ChainIsEmptyAfterGap: {"chain_starts_after_gap"},
    ItemsReturnsFirstItemOnly: {"items_returns_any_record_with_item"},
    UpdateDoesNothing: {
        "unknown_ids_return_nothing",
        "update_replaces_record",
        "delete_removes_record_items_and_log",
        "overlapping_calls_do_not_mix",
    },
    UpdateReplacesFinalRecord: {"final_record_never_changes", "concurrent_writes_have_one_winner"},
    UpdateResetsCancelled: {"update_preserves_key_and_cancellation", "cancel_and_update_agree"},
    UpdateChangesKey: {"update_preserves_key_and_cancellation"},
    UpdateIsNotAtomic: {"update_saves_record_and_log_atomically"},
    DeletePreservesLog: {"delete_removes_record_items_and_log"},
    DeletePreservesKey: {"create_returns_record_with_same_key"},
    KeysIgnoreOwner: {"create_returns_record_with_same_key"},
    MissingKeyIsShared: {"create_returns_record_with_same_key"},
    CreateRaces: {"concurrent_creates_save_one_record"},
    AppendAllowsGaps: {"append_requires_contiguous_log"},
    AppendAllowsRepetition: {"append_requires_contiguous_log"},
    AppendRaces: {"concurrent_writes_have_one_winner"},
    FinalUpdateRaces: {"concurrent_writes_have_one_winner"},
    EventsReturnsFirstPageOnly: {"events_returns_events_after_number"},
    EventsIgnoresAfter: {"events_returns_events_after_number"},
    EventsOmitsPartialPiece: {"events_returns_events_after_number"},
    AppendDecodesBytes: {"events_returns_events_after_number"},
    CancelExtendsLease: {"cancel_marks_unfinished_record"},
    CancelRaces: {"cancel_and_update_agree"},
    RenewIncludesInactiveRuns: {"renew_returns_active_runs", "renew_accepts_many_runs"},
    RenewTruncatesRuns: {"renew_accepts_many_runs"},
    RenewWithoutTimeChangesLease: {"renew_returns_active_runs"},
    RenewReturnsCancelledRuns: {"renew_returns_active_runs", "renew_accepts_many_runs"},
    ExpiredIgnoresLimit: {"expired_returns_records_with_expired_lease"},
    ExpiredIncludesLiveRecords: {"expired_returns_records_with_expired_lease", "renew_accepts_many_runs"},
    ExpiredReturnsOneOwnerOnly: {"expired_returns_records_with_expired_lease"},
    ExpiredIncludesFinalRecords: {"expired_returns_records_with_expired_lease"},
    PruneRemovesAllFinalRecords: {"prune_preserves_recent_records"},
    UpdatesMix: {"overlapping_calls_do_not_mix"},
}


@pytest.mark.parametrize("store_class", BROKEN_STORES, ids=lambda store_class: store_class.__name__)
async def test_contract_detects_broken_store(store_class: type[MemoryStore]) -> None:
    @asynccontextmanager
    async def make_broken_store() -> AsyncIterator[ResponseStore]:
        yield store_class()

    failed_checks = set()
    for check in STORE_CONTRACT:
        try:
            await check(make_broken_store)
        except* AssertionError:
            failed_checks.add(check.__name__)
    assert BROKEN_STORES[store_class] <= failed_checks


def test_every_clause_of_contract_can_fail() -> None:
    assert set().union(*BROKEN_STORES.values()) == {check.__name__ for check in STORE_CONTRACT}


async def test_least_recently_used_record_is_evicted_first() -> None:
    store = MemoryStore(max_records=3)
    for name in ("a", "b", "c"):
        await store.create("ann", record(name))
    assert await store.get("ann", "a")
    await store.create("ann", record("d"))
    assert len(store) == 3
    assert await store.get("ann", "b") is None
    assert [bool(await store.get("ann", name)) for name in ("a", "c", "d")] == [True, True, True]
    assert not await store.items("ann", ["b_item"])


async def test_limit_applies_to_all_owners_together() -> None:
    store = MemoryStore(max_records=2)
    for owner in ("ann", "bob", "eve"):
        await store.create(owner, record("a"))
    assert len(store) == 2
    assert await store.get("ann", "a") is None


async def test_bytes_are_limited_and_recounted_on_update() -> None:
    store = MemoryStore(max_bytes=100_000)
    await store.create("ann", live("a", size=30_000))
    for name in ("b", "c"):
        await store.create("ann", record(name, size=30_000))
    assert len(store) == 3
    assert await store.update("ann", live("a", size=1))
    await store.create("ann", record("d", size=30_000))
    assert len(store) == 4, "the capacity that update released is available"
    assert await store.update("ann", record("a", size=60_000))
    assert await store.get("ann", "b") is None
    assert await store.get("ann", "a") is not None, "the most recent record is not evicted"


async def test_delete_frees_bytes() -> None:
    store = MemoryStore(max_bytes=100_000)
    for _ in range(50):
        await store.create("ann", record("a", size=60_000))
        assert await store.delete("ann", "a")
    assert len(store) == 0
    await store.create("ann", record("b", size=90_000))
    assert await store.get("ann", "b")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("field", ["response", "request", "input"])
async def test_oversize_record_is_refused_without_eviction(known: bool, field: str) -> None:
    store = MemoryStore(max_bytes=50_000)
    await store.create("ann", record("a"))
    await store.create("ann", live("b"))
    large = replace(live("b" if known else "c"), **{field: b"x" * 60_000})
    for final in (False, True):
        with pytest.raises(errors.StoreError, match=r"larger than .* 'store' to false"):
            await (store.update if known else store.create)("ann", replace(large, final=final))
    assert await store.get("ann", "a") == record("a")
    assert await store.get("ann", "b") == live("b"), "a rejected update changes nothing"
    assert await store.get("ann", "c") is None


@pytest.mark.parametrize("update", [True, False])
async def test_oversize_log_is_refused_without_eviction(update: bool) -> None:
    store = MemoryStore(max_bytes=50_000)
    await store.create("ann", record("a"))
    await store.create("ann", live("b"))
    assert await store.append("ann", "b", piece(0, 30_000))
    large = piece(1, 30_000)
    with pytest.raises(errors.StoreError, match="larger than"):
        await (
            store.update("ann", replace(live("b"), cancelled=True), large)
            if update
            else store.append("ann", "b", large)
        )
    assert await store.get("ann", "a") == record("a")
    assert await store.get("ann", "b") == live("b")
    assert await store.events("ann", "b", -1) == [piece(0, 30_000)]
    assert await store.append("ann", "b", piece(1)), "append continues the unchanged log"


async def test_logs_of_finished_responses_are_evicted_first() -> None:
    store = MemoryStore(max_bytes=100_000)
    for name in ("a", "b"):
        await store.create("ann", live(name))
        assert await store.append("ann", name, piece(0, 30_000))
    for name in ("b", "a"):
        assert await store.update("ann", record(name))
    assert await store.get("ann", "b"), "reading a record does not extend the retention of its log"
    await store.create("ann", live("c"))
    assert await store.append("ann", "c", piece(0, 50_000))
    assert await store.events("ann", "b", -1) is None
    assert await store.events("ann", "a", -1) == [piece(0, 30_000)]
    await store.create("ann", record("d", size=30_000))
    assert await store.events("ann", "a", -1) is None
    assert len(store) == 4
    assert await store.events("ann", "c", -1) == [piece(0, 50_000)], "the log of a record in progress is not evicted"


async def test_records_in_progress_are_evicted_last() -> None:
    store = MemoryStore(max_records=3, max_bytes=100_000)
    for name in ("a", "b"):
        await store.create("ann", live(name))
    for number in range(10):
        await store.create("ann", record(f"{number}"))
        assert len(store) == 3
    assert await store.append("ann", "a", piece(0, 92_000))
    assert await store.get("ann", "9") is not None
    assert await store.append("ann", "b", piece(0, 1000))
    assert await store.append("ann", "b", piece(1, 2500)), "evicting the last final log releases capacity"
    assert await store.get("ann", "9") is None
    assert [bool(await store.get("ann", name)) for name in ("a", "b")] == [True, True]


async def test_store_full_of_records_in_progress_refuses_more() -> None:
    store = MemoryStore(max_records=3)
    for name in ("a", "b", "c"):
        await store.create("ann", live(name))
    for new in (live("d"), record("d")):
        with pytest.raises(errors.StoreError, match="in progress"):
            await store.create("bob", new)
    assert [bool(await store.get("ann", name)) for name in ("a", "b", "c")] == [True, True, True]
    assert await store.update("ann", record("a")), "an existing record can be made final"
    await store.create("bob", live("d"))
    assert await store.get("ann", "a") is None, "a final record is evicted"


async def test_bytes_of_records_in_progress_are_not_reused() -> None:
    store = MemoryStore(max_bytes=100_000)
    await store.create("ann", live("a"))
    await store.create("ann", live("b"))
    await store.create("ann", record("c"))
    assert await store.append("ann", "a", piece(0, 70_000))
    with pytest.raises(errors.StoreError, match="in progress"):
        await store.append("ann", "b", piece(0, 30_000))
    with pytest.raises(errors.StoreError, match="in progress"):
        await store.update("ann", live("b", size=30_000))
    with pytest.raises(errors.StoreError, match="in progress"):
        await store.update("ann", record("b", size=30_000), piece(0))
    with pytest.raises(errors.StoreError, match="in progress"):
        await store.create("ann", live("d", size=30_000))
    assert await store.get("ann", "b") == live("b")
    assert await store.events("ann", "b", -1) == []
    assert await store.get("ann", "c") == record("c"), "a rejected write evicts no record"
    assert await store.update("ann", record("a", size=60_000)), "a final update may evict the log of its record"
    assert await store.append("ann", "b", piece(0, 30_000))
    assert await store.get("ann", "a") == record("a", size=60_000)


async def test_finishing_response_drops_its_log_if_store_is_full() -> None:
    store = MemoryStore(max_bytes=50_000)
    await store.create("ann", live("a"))
    await store.create("ann", live("b"))
    assert await store.append("ann", "a", piece(0, 30_000))
    assert await store.update("ann", record("a", size=30_000), piece(1))
    assert await store.get("ann", "a") == record("a", size=30_000)
    assert await store.events("ann", "a", -1) is None
    assert await store.append("ann", "b", piece(0, 10_000)), "the capacity of the log is released"


async def test_log_expires_before_record() -> None:
    clock = Clock()
    store = MemoryStore(ttl=1000, log_ttl=60, clock=clock)
    await store.create("ann", live("a"))
    await store.create("ann", record("b"))
    assert await store.append("ann", "a", piece(0))
    clock.now += 59
    assert await store.events("ann", "b", -1) == []
    clock.now += 541
    assert await store.events("ann", "b", -1) is None
    assert await store.events("ann", "a", -1) == [piece(0)], "an active log is not evicted"
    assert await store.update("ann", replace(record("a"), events="logged"), piece(1))
    clock.now += 59
    assert await store.events("ann", "a", 0) == [piece(1)]
    clock.now += 1
    assert await store.events("ann", "a", 0) is None
    assert await store.events("ann", "a", 100) is None
    assert await store.get("ann", "a") == replace(record("a"), events="logged")


async def test_operations_count_as_use_except_expired() -> None:
    clock = Clock()
    store = MemoryStore(ttl=60, clock=clock)
    names = ("append", "renew", "cancel", "events", "expired")
    for name in names:
        await store.create("ann", live(name))
    clock.now += 59
    assert await store.append("ann", "append", piece(0))
    assert await store.renew([("ann", "renew")]) == {("ann", "renew")}
    assert await store.cancel("ann", "cancel", 0.0)
    assert await store.events("ann", "events", -1) == []
    assert len(await store.expired(1.0)) == 5
    clock.now += 1
    assert {saved.id for _, saved in await store.expired(1.0)} == set(names) - {"expired"}
    assert [bool(await store.get("ann", name)) for name in names] == [True, True, True, True, False]


async def test_prune_counts_expired_records() -> None:
    clock = Clock()
    store = MemoryStore(ttl=60, log_ttl=30, clock=clock)
    for name in ("a", "b"):
        await store.create("ann", record(name))
        await store.create("ann", live(f"live_{name}"))
    clock.now += 30
    assert await store.get("ann", "b")
    assert await store.get("ann", "live_b")
    assert await store.prune() == 0, "prune does not count logs"
    assert len(store) == 4
    clock.now += 30
    assert await store.prune() == 2
    assert len(store) == 2
    clock.now += 60
    assert await store.prune() == 2
    assert await store.prune() == 0


async def test_key_is_free_after_record_is_deleted() -> None:
    clock = Clock()
    store = MemoryStore(max_records=1, ttl=60, clock=clock)
    first = replace(record("a"), key="k")
    await store.create("ann", first)
    assert await store.create("ann", replace(first, id="b")) == first
    await store.create("bob", record("other"))
    assert await store.create("ann", replace(first, id="b")) is None
    clock.now += 59
    assert await store.create("ann", first) == replace(first, id="b"), "create with a used key counts as use"
    clock.now += 59
    assert await store.get("ann", "b")
    clock.now += 60
    assert await store.create("ann", first) is None


async def test_item_named_twice_is_removed_with_its_record() -> None:
    store = MemoryStore()
    twice = replace(live("a"), item_ids=("x", "x", "y"))
    await store.create("ann", twice)
    assert await store.update("ann", replace(twice, item_ids=("x", "z", "z")))
    assert set(await store.items("ann", ["x", "y", "z"])) == {"x", "z"}
    assert await store.delete("ann", "a")
    assert await store.items("ann", ["x", "y", "z"]) == {}


async def test_record_expires_and_use_prolongs_it() -> None:
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


async def test_next_write_removes_expired_records() -> None:
    clock = Clock()
    store = MemoryStore(ttl=60, clock=clock)
    for number in range(10):
        await store.create("ann", record(f"{number}"))
    clock.now += 60
    await store.create("ann", record("new"))
    assert len(store) == 1


async def test_used_conversation_stays_whole() -> None:
    clock = Clock()
    store = MemoryStore(max_records=4, ttl=60, clock=clock)
    await store.create("ann", record("first"))
    for number in range(10):
        await store.create("ann", record(f"other_{number}"))
        clock.now += 50
        assert await store.chain("ann", "first" if number == 0 else "second")
        if number == 0:
            await store.create("ann", record("second", previous="first"))
    assert [saved.id for saved in await store.chain("ann", "second")] == ["first", "second"]


async def test_records_are_immutable() -> None:
    store = MemoryStore()
    await store.create("ann", record("a"))
    saved = await store.get("ann", "a")
    assert saved is not None
    with pytest.raises(FrozenInstanceError):
        saved.response = b"{}"
    chain = await store.chain("ann", "a")
    chain.clear()
    await store.create("ann", live("b"))
    assert await store.append("ann", "b", piece(0))
    pieces = await store.events("ann", "b", -1)
    assert isinstance(pieces, list)
    pieces.clear()
    assert await store.events("ann", "b", -1) == [piece(0)]
    found = await store.items("ann", ["a_item"])
    assert isinstance(found, dict)
    found.clear()
    assert await store.chain("ann", "a") == [saved]
    assert await store.items("ann", ["a_item"]) == {"a_item": saved}


actions = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "create",
                "update",
                "end",
                "append",
                "get",
                "delete",
                "chain",
                "items",
                "events",
                "cancel",
                "renew",
                "wait",
            ]
        ),
        st.sampled_from(["ann", "bob"]),
        st.integers(0, 5),
        st.sampled_from([1, 500, 3000, 20_000]),
    ),
    max_size=40,
)


@given(script=actions)
async def test_limits_hold_under_any_operations(
    script: list[tuple[str, str, int, int]],
) -> None:
    clock = Clock()
    store = MemoryStore(max_records=4, max_bytes=15_000, ttl=10, log_ttl=5, clock=clock)
    used: dict[tuple[str, str], float] = {}  # the records in progress
    for action, owner, number, size in script:
        previous = f"r{number - 1}" if number else None
        new = replace(live(f"r{number}", size=size), previous_id=previous, key=f"k{number // 2}")
        key = (owner, new.id)
        used = {other: at for other, at in used.items() if clock.now < at + 10}
        match action:
            case "create" if await store.get(owner, new.id) is None:
                if await _unless_refused(store.create(owner, new)) is None:
                    used[key] = clock.now
            case "update":
                await _unless_refused(store.update(owner, new))
            case "end":
                if await _unless_refused(store.update(owner, replace(new, final=True))) is True:
                    used.pop(key, None)
            case "append":
                entry = store._in_progress.get(key)
                await _unless_refused(store.append(owner, new.id, piece(entry.log_end if entry else 0, size)))
            case "get":
                await store.get(owner, new.id)
            case "delete":
                await store.delete(owner, new.id)
                used.pop(key, None)
            case "chain":
                assert all(saved.id <= new.id for saved in await store.chain(owner, new.id))
            case "items":
                assert set(await store.items(owner, ["r0_item", new.item_ids[0]])) <= {"r0_item", new.item_ids[0]}
            case "events":
                assert all(found.end > number for found in await store.events(owner, new.id, number - 1) or ())
            case "cancel":
                await store.cancel(owner, new.id, 0.0)
            case "renew":
                assert await store.renew([key]) <= set(used)
            case "wait":
                clock.now += number
        entries = [*store._in_progress.values(), *store._final.values()]
        assert len(store) == len(entries) <= 4
        assert store._bytes == sum(entry.size + entry.log_size for entry in entries) <= 15_000
        assert store._in_progress_bytes == sum(entry.size + entry.log_size for entry in store._in_progress.values())
        assert all(entry.size > entry.record.size for entry in entries)
        assert set(used) <= set(store._in_progress), "no record in progress is evicted early"
    for owner in ("ann", "bob"):
        for number in range(6):
            await store.delete(owner, f"r{number}")
    assert (len(store), store._bytes, store._in_progress_bytes) == (0, 0, 0), "the totals are zero"
    assert not [*store._items, *store._keys, *store._logs], "the indexes are empty"


_REFUSED = object()


async def _unless_refused(answer: Awaitable[object]) -> object:
    try:
        return await answer
    except errors.StoreError:
        return _REFUSED
