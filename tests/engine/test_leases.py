"""Leases: renewed while somebody is at work, and the way to hear that the work is not wanted any more."""

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
from .test_repository import ASK, Gated, left, rebuilt, told
from .test_run import BOUND, Audience, Call, Clock, Watched, check_kept, record_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BACKGROUND = {**ASK, "background": True}

LEASE = 30.0


class LeaseHolder:
    """Stands for a run."""

    def __init__(self, name: str) -> None:
        self.key = ("", name)
        self.ended = anyio.Event()

    def cancel(self) -> None:
        self.ended.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is at work looks again soon."""
    monkeypatch.setattr(leases_module, "_LOOK_SECONDS", 0.002)


class Looks:
    """Stands around a store's calls: counts them, fails where the test says so, and lets the test wait for the next."""

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
        """Returns after so many calls more; two, and a whole one lies between."""
        for _ in range(times):
            with anyio.fail_after(BOUND):
                await self._next.setdefault(name, anyio.Event()).wait()
        await anyio.lowlevel.checkpoint()


def watched() -> tuple[Looks, Watched, Clock, LeaseRenewer]:
    looks, clock = Looks(), Clock()
    store = Watched(looks)
    return looks, store, clock, LeaseRenewer(Repository(store, clock=clock), duration=LEASE, clock=clock)


async def kept_in(store: MemoryStore, leases: LeaseRenewer, name: str) -> Record:
    response = encode_json(fresh_response() | {"id": name})
    record = Record(id=name, previous_id=None, input=b"[]", response=response, lease=leases.next_expiry())
    await store.create("", record)
    return record


# The leases of what is held.


async def test_a_lease_is_renewed_when_a_third_of_it_is_over_and_not_before(quick: None) -> None:
    looks, store, clock, leases = watched()
    record, held = await kept_in(store, leases, "one"), LeaseHolder("one")
    assert record.lease == leases.next_expiry() == clock.now + LEASE
    leases.add(held)
    await looks.next("renew")
    for passed, lease in ((9.5, record.lease), (0.5, record.lease + 10), (9.5, record.lease + 10)):
        clock.now += passed
        await looks.next("renew")
        found = await store.get("", "one")
        assert found is not None
        assert found.lease == lease
    assert not held.ended.is_set()


async def test_what_is_at_work_is_never_given_up_however_long_it_takes(quick: None) -> None:
    looks, store, clock, leases = watched()
    await kept_in(store, leases, "one")
    await kept_in(store, leases, "left")
    held = LeaseHolder("one")
    leases.add(held)
    other = Repository(store, clock=clock)
    for _ in range(10):
        clock.now += LEASE / 2
        await looks.next("renew")
        found = await other.get("", "one")
        assert found is not None
        assert not found.final
    left_alone = await store.get("", "left")
    assert left_alone is not None
    assert left_alone.final, "whoever renews leases looks for what others have left"


@pytest.mark.parametrize("unwanted", ["cancelled", "final", "deleted"])
async def test_whoever_is_at_work_hears_when_it_is_not_wanted_any_more(unwanted: str, quick: None) -> None:
    looks, store, clock, leases = watched()
    records = {name: await kept_in(store, leases, name) for name in ("one", "two")}
    one, two = LeaseHolder("one"), LeaseHolder("two")
    leases.add(one)
    leases.add(two)
    await looks.next("renew")
    if unwanted == "cancelled":
        await store.cancel("", "one", clock.now + 2)
    elif unwanted == "deleted":
        await store.delete("", "one")
    else:
        await Repository(store).end("", records["one"])
    with anyio.fail_after(BOUND):
        await one.ended.wait()
    await looks.next("renew")
    assert not two.ended.is_set()


async def test_what_is_given_back_is_not_looked_at_again_and_nobody_looks_where_nothing_is_held(quick: None) -> None:
    looks, store, _, leases = watched()
    held = LeaseHolder("one")
    for _ in range(2):
        await kept_in(store, leases, "one")
        assert leases.find(held.key) is None
        leases.add(held)
        assert leases.find(held.key) is held
        await looks.next("renew")
        leases.discard(held)
        leases.discard(held)
        assert leases.find(held.key) is None
        await store.delete("", "one")
        before = looks.count["renew"]
        await anyio.sleep(0.05)
        assert looks.count["renew"] <= before + 1, "one look may have been under way"
        assert not held.ended.is_set()


async def test_one_task_keeps_all_leases_in_one_call(quick: None) -> None:
    asked: list[int] = []

    class Counting(MemoryStore):
        async def renew(self, runs: Any, until: float | None = None) -> set[tuple[str, str]]:
            asked.append(len(runs))
            if len(asked) == 3:
                thrice.set()
            return await super().renew(runs, until)

    thrice, clock, store = anyio.Event(), Clock(), Counting()
    leases = LeaseRenewer(Repository(store, clock=clock), duration=LEASE, clock=clock)
    all_held = [LeaseHolder(str(number)) for number in range(50)]
    for held in all_held:
        await kept_in(store, leases, held.key[1])
        leases.add(held)
    with anyio.fail_after(BOUND):
        await thrice.wait()
    assert asked[:3] == [50] * 3
    assert not any(held.ended.is_set() for held in all_held)


async def test_what_its_host_drops_is_let_go(quick: None) -> None:
    _, store, clock, leases = watched()
    await kept_in(store, leases, "one")
    leases.add(LeaseHolder("one"))
    gc.collect()
    clock.now += LEASE + 1
    await anyio.sleep(0.02)
    found = await Repository(store, clock=clock).get("", "one")
    assert found is not None
    assert found.final
    assert leases.find(("", "one")) is None


@pytest.mark.parametrize("failing", ["renew", "expired"])
async def test_a_store_that_fails_meanwhile_ends_nothing_and_is_asked_again(
    failing: str, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    looks, store, clock, leases = watched()
    record, held = await kept_in(store, leases, "one"), LeaseHolder("one")
    leases.add(held)
    await looks.next("renew")
    looks.failing.add(failing)
    clock.now += LEASE / 2
    await looks.next(failing, 3 if failing == "renew" else 1)
    assert not held.ended.is_set()
    looks.failing.clear()
    await looks.next("renew")
    found = await store.get("", "one")
    assert found is not None
    assert found.lease == record.lease + LEASE / 2
    await store.cancel("", "one", clock.now)
    with anyio.fail_after(BOUND):
        await held.ended.wait()
    assert "the store failed" in caplog.text


async def test_a_record_that_cannot_be_ended_stops_no_lease_from_being_kept(quick: None) -> None:
    looks, store, clock, leases = watched()
    poisoned = Record(id="x", previous_id=None, input=b"[]", response=b"no JSON", events="kept", lease=clock.now - 1)
    await store.create("", poisoned)
    await store.append("", "x", Log(0, 1, b"no event"))
    record, held = await kept_in(store, leases, "one"), LeaseHolder("one")
    leases.add(held)
    await looks.next("renew", 1)
    for halves in (1, 2, 3):
        clock.now += LEASE / 2
        await looks.next("renew", 3)
        found = await store.get("", "one")
        assert found is not None
        assert found.lease == record.lease + halves * LEASE / 2
    assert not held.ended.is_set()


def test_each_event_loop_keeps_its_own(anyio_backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_LOOK_SECONDS", 0.002)
    store = MemoryStore()
    leases = LeaseRenewer(Repository(store), duration=LEASE)
    both, failures = threading.Barrier(2), []

    async def main(name: str) -> None:
        held = LeaseHolder(name)
        await kept_in(store, leases, name)
        leases.add(held)
        await anyio.to_thread.run_sync(both.wait, BOUND)
        other = "two" if name == "one" else "one"
        assert leases.find(held.key) is held
        assert leases.find(("", other)) is None
        await store.cancel("", other, 0.0)
        with anyio.fail_after(BOUND):
            await held.ended.wait()

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


@pytest.mark.parametrize("where", ["in the foreground", "in the background", "while it waits"])
async def test_a_living_run_is_given_up_by_nobody(where: str, quick: None) -> None:
    looks, clock, backend = Looks(), Clock(), Gated()
    store = Watched(looks)
    kit = ResponsesKit(
        backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE), runner=LocalRunner(max_concurrent=1)
    )
    other = ResponsesKit(ScriptedBackend(), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    audience = Audience()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if where == "in the foreground":
                run = await kit.service.create_run(ASK, streamed=True)
                response_id = run.id
                group.start_soon(run.execute, audience.tell)
            else:
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            await backend.half.wait()
            if where == "while it waits":
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            for _ in range(12):
                clock.now += LEASE / 2
                await looks.next("renew")
                assert await other.service.repository.sweep() == 0
                assert (await other.retrieve(response_id))["status"] in ("in_progress", "queued")
            backend.goes_on.set()
    with anyio.fail_after(BOUND):
        assert (await other.wait(response_id))["status"] == "completed"
    before = looks.count["renew"]
    await anyio.sleep(0.05)
    assert looks.count["renew"] <= before + 1


@pytest.mark.parametrize("kind", ["background", "streamed", "whole"])
async def test_a_cancellation_from_another_process_frees_the_slot_within_a_second(kind: str) -> None:
    """With the pauses as they are."""
    backend, store, audience = Gated(), MemoryStore(), Audience()
    kit, other = ResponsesKit(backend, store=store), ResponsesKit(ScriptedBackend(), store=store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if kind == "background":
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            else:
                run = await kit.service.create_run(ASK, streamed=kind == "streamed")
                response_id = run.id
                group.start_soon(run.execute, audience.tell)
            await backend.half.wait()
            with anyio.fail_after(1.0):
                answer = await other.cancel(response_id)
                await backend.closed.wait()
    assert answer["status"] == "cancelled"
    if kind != "background":
        assert check_stream(audience.events) == answer == await record_of(run, store)


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("then", ["goes on", "hangs"])
async def test_a_run_that_was_given_up_while_it_lived_gives_way(
    background: bool, resumable: bool, then: str, quick: None
) -> None:
    """Its process was stopped for long, or cut off from the store."""
    looks, clock, backend, audience = Looks(), Clock(), Gated(), Audience()
    store = MemoryStore()
    cut_off = Watched(looks)
    vars(cut_off).update({name: value for name, value in vars(store).items() if name != "around"})
    kit = ResponsesKit(backend, store=cut_off, clock=clock, timeouts=Timeouts(lease=LEASE), resumable=resumable)
    other = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if background:
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            else:
                run = await kit.service.create_run(ASK, streamed=True)
                response_id = run.id
                group.start_soon(run.execute, audience.tell)
            await backend.half.wait()
            looks.failing = {"renew"}
            await looks.next("renew")
            clock.now += LEASE + 1
            lost = await other.retrieve(response_id)
            assert (lost["status"], lost["error"]["code"]) == ("failed", "worker_lost")
            record, log = await store.get("", response_id), await store.events("", response_id, -1)
            if then == "goes on":
                backend.goes_on.set()
            else:
                looks.failing = set()
            await backend.closed.wait()
            with anyio.fail_after(BOUND):
                while kit.service.leases.find(("", response_id)) is not None:
                    await anyio.lowlevel.checkpoint()
    assert (await store.get("", response_id), await store.events("", response_id, -1)) == (record, log)
    assert await other.retrieve(response_id) == lost
    if not background:
        heard = check_stream(audience.events)
        assert (heard["status"], heard["error"]) == (lost["status"], lost["error"])
        assert heard == lost or not resumable
    if background or resumable:
        assert rebuilt(await told(other, response_id)) == lost
    await check_kept(store, clock)


async def test_the_owners_next_turn_may_build_on_it_while_the_one_that_was_given_up_still_works(quick: None) -> None:
    looks, clock, backend = Looks(), Clock(), Gated()
    store = Watched(looks)
    kit = ResponsesKit(backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    other = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(BACKGROUND)
        await backend.half.wait()
        with pytest.raises(errors.InvalidRequest, match="in progress"):
            await other.create({"input": "Go on.", "previous_response_id": started["id"]})
        looks.failing = {"renew"}
        await looks.next("renew")
        clock.now += LEASE + 1
        built = await other.create({"input": "Go on.", "previous_response_id": started["id"]})
        backend.goes_on.set()
        await backend.closed.wait()
    assert built["status"] == "completed"


async def test_a_foreground_run_that_its_host_never_executes_is_ended_when_its_lease_is_over() -> None:
    clock, store = Clock(), MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    response_id = (await kit.service.create_run(ASK)).id
    gc.collect()
    clock.now += LEASE
    assert (await kit.retrieve(response_id))["status"] == "in_progress"
    clock.now += 1
    assert (await kit.retrieve(response_id))["error"]["code"] == "worker_lost"


async def test_the_lifespan_looks_for_what_others_have_left(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    clock, looks = Clock(), Looks()
    store = Watched(looks)
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=0.01))
    record = await left(store, clock)
    clock.now += 61
    looks.failing = {"expired"}
    with anyio.fail_after(BOUND):
        async with kit.lifespan(grace=0.0):
            await looks.next("expired", 3)
            looks.failing = set()
            await looks.next("expired", 3)
            found = await store.get("", record.id)
            assert found is not None
            assert json.loads(found.response)["status"] == "failed"
        before = looks.count["expired"]
        await anyio.sleep(0.05)
        assert looks.count["expired"] == before
    assert {entry.levelno for entry in caplog.records} == {logging.ERROR}


async def test_a_run_whose_record_is_of_no_store_that_others_see_has_no_lease(quick: None) -> None:
    """As on a WebSocket, where what is not to be stored lives as long as the socket."""
    looks, clock, local, backend = Looks(), Clock(), MemoryStore(), Gated()
    store = Watched(looks)
    kit = ResponsesKit(backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE))
    audience = Audience()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            run = await kit.service.create_run({**ASK, "store": False}, streamed=True, local=local)
            group.start_soon(run.execute, audience.tell)
            await backend.half.wait()
            clock.now += 1_000_000
            again = await local.get("", run.id)
            assert again is not None
            assert not again.final
            backend.goes_on.set()
    assert check_stream(audience.events)["status"] == "completed"
    assert looks.count["create"] == looks.count["renew"] == 0
