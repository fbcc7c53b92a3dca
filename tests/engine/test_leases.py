"""Leases: renewal, and detection of cancelled, ended and deleted responses."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from responses_kit import ResponsesKit, Timeouts, errors
from responses_kit.engine import leases as leases_module
from responses_kit.engine.leases import LeaseRenewer
from responses_kit.engine.repository import Repository
from responses_kit.protocol.sse import encode_json
from responses_kit.runners.base import LocalRunner
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import ScriptedBackend

from ..protocol.test_state_machine import fresh_response
from ..support.conformance import check_stream
from .test_repository import ASK, GatedBackend, leave_orphaned, read_stream, replay_stream
from .test_run import BOUND, Call, Clock, EventClient, InterceptedStore, check_records, stored_response

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BACKGROUND = {**ASK, "background": True}

LEASE = 30.0


class LeaseHolder:
    """Stands in for a run."""

    def __init__(self, name: str) -> None:
        self.key = ("", name)
        self.ended = anyio.Event()

    def cancel(self) -> None:
        self.ended.set()


@pytest.fixture
def fast_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the interval of lease checks."""
    monkeypatch.setattr(leases_module, "_CHECK_INTERVAL", 0.002)


class StoreCallCounter:
    """Counts the calls of a store, lets tests wait for the next ones, and fails the methods named in `failing`."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.failing: set[str] = set()
        self._next: dict[str, anyio.Event] = {}

    async def __call__(self, name: str, call: Call) -> Any:
        self.count[name] += 1
        self._next.pop(name, anyio.Event()).set()
        if name in self.failing:
            raise OSError("the disk of secret-host is full")
        return await call()

    async def next(self, name: str, times: int = 2) -> None:
        """Wait for a number of further calls; after two, at least one has run completely."""
        for _ in range(times):
            with anyio.fail_after(BOUND):
                await self._next.setdefault(name, anyio.Event()).wait()
        await anyio.lowlevel.checkpoint()


def counted_store() -> tuple[StoreCallCounter, InterceptedStore, Clock, LeaseRenewer]:
    calls, clock = StoreCallCounter(), Clock()
    store = InterceptedStore(calls)
    return calls, store, clock, LeaseRenewer(Repository(store, clock=clock), duration=LEASE, clock=clock)


async def create_leased(store: MemoryStore, leases: LeaseRenewer, name: str) -> Record:
    response = encode_json(fresh_response() | {"id": name})
    record = Record(id=name, previous_id=None, input=b"[]", response=response, lease=leases.next_expiry())
    await store.create("", record)
    return record


# Leases of holders.


async def test_lease_is_renewed_after_a_third_of_its_duration(fast_checks: None) -> None:
    calls, store, clock, leases = counted_store()
    record, holder = await create_leased(store, leases, "one"), LeaseHolder("one")
    assert record.lease == leases.next_expiry() == clock.now + LEASE
    leases.add(holder)
    await calls.next("renew")
    for passed, lease in ((9.5, record.lease), (0.5, record.lease + 10), (9.5, record.lease + 10)):
        clock.now += passed
        await calls.next("renew")
        found = await store.get("", "one")
        assert found is not None
        assert found.lease == lease
    assert not holder.ended.is_set()


async def test_held_response_is_never_orphaned(fast_checks: None) -> None:
    calls, store, clock, leases = counted_store()
    await create_leased(store, leases, "one")
    await create_leased(store, leases, "left")
    holder = LeaseHolder("one")
    leases.add(holder)
    other = Repository(store, clock=clock)
    for _ in range(10):
        clock.now += LEASE / 2
        await calls.next("renew")
        found = await other.get("", "one")
        assert found is not None
        assert not found.final
    orphaned = await store.get("", "left")
    assert orphaned is not None
    assert orphaned.final, "a lease renewal did not sweep orphaned responses"


@pytest.mark.parametrize("unwanted", ["cancelled", "final", "deleted"])
async def test_holder_is_cancelled_when_record_is_cancelled_or_gone(unwanted: str, fast_checks: None) -> None:
    calls, store, clock, leases = counted_store()
    records = {name: await create_leased(store, leases, name) for name in ("one", "two")}
    one, two = LeaseHolder("one"), LeaseHolder("two")
    leases.add(one)
    leases.add(two)
    await calls.next("renew")
    if unwanted == "cancelled":
        await store.cancel("", "one", clock.now + 2)
    elif unwanted == "deleted":
        await store.delete("", "one")
    else:
        await Repository(store).end("", records["one"])
    with anyio.fail_after(BOUND):
        await one.ended.wait()
    await calls.next("renew")
    assert not two.ended.is_set()


async def test_discarded_lease_is_not_checked_again(fast_checks: None) -> None:
    calls, store, _, leases = counted_store()
    holder = LeaseHolder("one")
    for _ in range(2):
        await create_leased(store, leases, "one")
        assert leases.find(holder.key) is None
        leases.add(holder)
        assert leases.find(holder.key) is holder
        await calls.next("renew")
        leases.discard(holder)
        leases.discard(holder)
        assert leases.find(holder.key) is None
        await store.delete("", "one")
        before = calls.count["renew"]
        await anyio.sleep(0.05)
        assert calls.count["renew"] <= before + 1, "more than one check was under way"
        assert not holder.ended.is_set()


async def test_leases_are_renewed_together_in_one_call(fast_checks: None) -> None:
    sizes: list[int] = []

    class Counting(MemoryStore):
        async def renew(self, runs: Any, until: float | None = None) -> set[tuple[str, str]]:
            sizes.append(len(runs))
            if len(sizes) == 3:
                called_thrice.set()
            return await super().renew(runs, until)

    called_thrice, clock, store = anyio.Event(), Clock(), Counting()
    leases = LeaseRenewer(Repository(store, clock=clock), duration=LEASE, clock=clock)
    holders = [LeaseHolder(str(number)) for number in range(50)]
    for holder in holders:
        await create_leased(store, leases, holder.key[1])
        leases.add(holder)
    with anyio.fail_after(BOUND):
        await called_thrice.wait()
    assert sizes[:3] == [50] * 3
    assert not any(holder.ended.is_set() for holder in holders)


async def test_dropped_holder_is_not_renewed(fast_checks: None) -> None:
    _, store, clock, leases = counted_store()
    await create_leased(store, leases, "one")
    leases.add(LeaseHolder("one"))
    gc.collect()
    clock.now += LEASE + 1
    await anyio.sleep(0.02)
    found = await Repository(store, clock=clock).get("", "one")
    assert found is not None
    assert found.final
    assert leases.find(("", "one")) is None


@pytest.mark.parametrize("failing", ["renew", "expired"])
async def test_failing_store_ends_nothing_and_is_retried(
    failing: str, fast_checks: None, caplog: pytest.LogCaptureFixture
) -> None:
    calls, store, clock, leases = counted_store()
    record, holder = await create_leased(store, leases, "one"), LeaseHolder("one")
    leases.add(holder)
    await calls.next("renew")
    calls.failing.add(failing)
    clock.now += LEASE / 2
    await calls.next(failing, 3 if failing == "renew" else 1)
    assert not holder.ended.is_set()
    calls.failing.clear()
    await calls.next("renew")
    found = await store.get("", "one")
    assert found is not None
    assert found.lease == record.lease + LEASE / 2
    await store.cancel("", "one", clock.now)
    with anyio.fail_after(BOUND):
        await holder.ended.wait()
    assert "the store failed" in caplog.text


async def test_damaged_record_does_not_stop_renewals(fast_checks: None) -> None:
    calls, store, clock, leases = counted_store()
    poisoned = Record(id="x", previous_id=None, input=b"[]", response=b"no JSON", events="logged", lease=clock.now - 1)
    await store.create("", poisoned)
    await store.append("", "x", Log(0, 1, b"no event"))
    record, holder = await create_leased(store, leases, "one"), LeaseHolder("one")
    leases.add(holder)
    await calls.next("renew", 1)
    for periods in (1, 2, 3):
        clock.now += LEASE / 2
        await calls.next("renew", 3)
        found = await store.get("", "one")
        assert found is not None
        assert found.lease == record.lease + periods * LEASE / 2
    assert not holder.ended.is_set()


def test_each_event_loop_renews_its_own_leases(anyio_backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_CHECK_INTERVAL", 0.002)
    store = MemoryStore()
    leases = LeaseRenewer(Repository(store), duration=LEASE)
    both, failures = threading.Barrier(2), []

    async def main(name: str) -> None:
        holder = LeaseHolder(name)
        await create_leased(store, leases, name)
        leases.add(holder)
        await anyio.to_thread.run_sync(both.wait, BOUND)
        other = "two" if name == "one" else "one"
        assert leases.find(holder.key) is holder
        assert leases.find(("", other)) is None
        await store.cancel("", other, 0.0)
        with anyio.fail_after(BOUND):
            await holder.ended.wait()

    def work(name: str, backend: str) -> None:
        try:
            anyio.run(main, name, backend=backend)
        except BaseException as error:
            failures.append(repr(error))

    threads = [
        threading.Thread(target=work, args=(name, backend))
        for name, backend in (("one", anyio_backend_name), ("two", "asyncio"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert failures == []


# Runs and their leases.


@pytest.mark.parametrize("mode", ["foreground", "background", "queued"])
async def test_live_run_is_not_ended_by_other_processes(mode: str, fast_checks: None) -> None:
    calls, clock, backend = StoreCallCounter(), Clock(), GatedBackend()
    store = InterceptedStore(calls)
    kit = ResponsesKit(
        backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE), runner=LocalRunner(max_concurrent=1)
    )
    other = ResponsesKit(ScriptedBackend(), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    client = EventClient()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if mode == "foreground":
                run = await kit.service.create_run(ASK, streamed=True)
                response_id = run.id
                group.start_soon(run.execute, client.emit)
            else:
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            await backend.half_sent.wait()
            if mode == "queued":
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            for _ in range(12):
                clock.now += LEASE / 2
                await calls.next("renew")
                assert await other.service.repository.sweep() == 0
                assert (await other.retrieve(response_id))["status"] in ("in_progress", "queued")
            backend.resume.set()
    with anyio.fail_after(BOUND):
        assert (await other.wait(response_id))["status"] == "completed"
    before = calls.count["renew"]
    await anyio.sleep(0.05)
    assert calls.count["renew"] <= before + 1


@pytest.mark.parametrize("kind", ["background", "streamed", "whole"])
async def test_cancellation_from_another_process_frees_slot_within_a_second(kind: str) -> None:
    """This test uses the real intervals."""
    backend, store, client = GatedBackend(), MemoryStore(), EventClient()
    kit, other = ResponsesKit(backend, store=store), ResponsesKit(ScriptedBackend(), store=store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if kind == "background":
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            else:
                run = await kit.service.create_run(ASK, streamed=kind == "streamed")
                response_id = run.id
                group.start_soon(run.execute, client.emit)
            await backend.half_sent.wait()
            with anyio.fail_after(1.0):
                answer = await other.cancel(response_id)
                await backend.closed.wait()
    assert answer["status"] == "cancelled"
    if kind != "background":
        assert check_stream(client.events) == answer == await stored_response(run, store)


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("then", ["continues", "hangs"])
async def test_run_yields_when_its_lease_expired_and_it_was_ended(
    background: bool, resumable: bool, then: str, fast_checks: None
) -> None:
    """The run's process was suspended, or disconnected from the store."""
    calls, clock, backend, client = StoreCallCounter(), Clock(), GatedBackend(), EventClient()
    store = MemoryStore()
    cut_off = InterceptedStore(calls)
    vars(cut_off).update({name: value for name, value in vars(store).items() if name != "intercept"})
    kit = ResponsesKit(backend, store=cut_off, clock=clock, timeouts=Timeouts(lease=LEASE), resumable=resumable)
    other = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if background:
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            else:
                run = await kit.service.create_run(ASK, streamed=True)
                response_id = run.id
                group.start_soon(run.execute, client.emit)
            await backend.half_sent.wait()
            calls.failing = {"renew"}
            await calls.next("renew")
            clock.now += LEASE + 1
            lost = await other.retrieve(response_id)
            assert (lost["status"], lost["error"]["code"]) == ("failed", "worker_lost")
            record, log = await store.get("", response_id), await store.events("", response_id, -1)
            if then == "continues":
                backend.resume.set()
            else:
                calls.failing = set()
            await backend.closed.wait()
            with anyio.fail_after(BOUND):
                while kit.service.leases.find(("", response_id)) is not None:
                    await anyio.lowlevel.checkpoint()
    assert (await store.get("", response_id), await store.events("", response_id, -1)) == (record, log)
    assert await other.retrieve(response_id) == lost
    if not background:
        sent = check_stream(client.events)
        assert (sent["status"], sent["error"]) == (lost["status"], lost["error"])
        assert sent == lost or not resumable
    if background or resumable:
        assert replay_stream(await read_stream(other, response_id)) == lost
    await check_records(store, clock)


async def test_ended_response_can_be_continued_while_its_run_still_works(fast_checks: None) -> None:
    calls, clock, backend = StoreCallCounter(), Clock(), GatedBackend()
    store = InterceptedStore(calls)
    kit = ResponsesKit(backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    other = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(BACKGROUND)
        await backend.half_sent.wait()
        with pytest.raises(errors.InvalidRequest, match="in progress"):
            await other.create({"input": "Go on.", "previous_response_id": started["id"]})
        calls.failing = {"renew"}
        await calls.next("renew")
        clock.now += LEASE + 1
        continued = await other.create({"input": "Go on.", "previous_response_id": started["id"]})
        backend.resume.set()
        await backend.closed.wait()
    assert continued["status"] == "completed"


async def test_unexecuted_foreground_run_is_ended_when_its_lease_expires() -> None:
    clock, store = Clock(), MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    response_id = (await kit.service.create_run(ASK)).id
    gc.collect()
    clock.now += LEASE
    assert (await kit.retrieve(response_id))["status"] == "in_progress"
    clock.now += 1
    assert (await kit.retrieve(response_id))["error"]["code"] == "worker_lost"


async def test_lifespan_sweeps_orphaned_responses(fast_checks: None, caplog: pytest.LogCaptureFixture) -> None:
    clock, calls = Clock(), StoreCallCounter()
    store = InterceptedStore(calls)
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=0.01))
    record = await leave_orphaned(store, clock)
    clock.now += 61
    calls.failing = {"expired"}
    with anyio.fail_after(BOUND):
        async with kit.lifespan(grace=0.0):
            await calls.next("expired", 3)
            calls.failing = set()
            await calls.next("expired", 3)
            found = await store.get("", record.id)
            assert found is not None
            assert json.loads(found.response)["status"] == "failed"
        before = calls.count["expired"]
        await anyio.sleep(0.05)
        assert calls.count["expired"] == before
    assert {entry.levelno for entry in caplog.records} == {logging.ERROR}


async def test_run_with_private_store_has_no_lease(fast_checks: None) -> None:
    """A WebSocket has such a store for responses with `store: false`."""
    calls, clock, local, backend = StoreCallCounter(), Clock(), MemoryStore(), GatedBackend()
    store = InterceptedStore(calls)
    kit = ResponsesKit(backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    client = EventClient()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            run = await kit.service.create_run({**ASK, "store": False}, streamed=True, local=local)
            group.start_soon(run.execute, client.emit)
            await backend.half_sent.wait()
            clock.now += 1_000_000
            record = await local.get("", run.id)
            assert record is not None
            assert not record.final
            backend.resume.set()
    assert check_stream(client.events)["status"] == "completed"
    assert calls.count["create"] == calls.count["renew"] == 0
