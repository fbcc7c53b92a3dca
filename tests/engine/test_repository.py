"""Records as the kit reads them: nothing stays open whose worker is gone, and every stream can be told again."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from pydantic_core import from_json

from responses_kit import Backend, Model, ResponsesKit, Turn, errors, outputs
from responses_kit.engine import repository as records_module
from responses_kit.engine.repository import LayeredRepository, Repository, encode_log
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import decode_events, encode_json, encode_sse
from responses_kit.protocol.state_machine import Event, StateMachine
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import ScriptedBackend

from ..protocol.test_state_machine import fresh_response
from ..support.conformance import check_response, check_stream
from .test_run import BOUND, Call, Calls, Clock, Failing, Watched, check_kept, check_order, slow

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

SCRIPT: list[Any] = [
    outputs.ReasoningSummary("First."),
    outputs.Reasoning("Hm."),
    outputs.Message("commentary"),
    "Let ",
    outputs.Text("me see. [DONE]\n\ndata: \u2028", [outputs.LogProb("me", -0.25, b"me")]),
    outputs.Annotation("https://example.org", "Example", 0, 3),
    outputs.ToolCall("f", '{"x"', "a"),
    outputs.ToolCall("g"),
    outputs.ToolArguments(": 1}", "a"),
    outputs.Item("acme:note", {"n": [1, None]}),
    "Bye",
]
"""All kinds of events."""

ASK = {"input": "Hi", "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Whoever looks again and again does so soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "_POLL_SECONDS", (0.005, 0.02))
        yield


class Gated(Backend):
    """Says half of it, waits until it may go on, and says the rest."""

    models = (Model("gated", tools=True),)

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.half, self.goes_on, self.closed = anyio.Event(), anyio.Event(), anyio.Event()

    async def generate(self, turn: Turn) -> AsyncIterator[outputs.Output]:
        self.turns.append(turn)
        try:
            for output in ("half ", outputs.Reasoning("Hm.")):
                yield output
            self.half.set()
            await self.goes_on.wait()
            yield "whole"
        finally:
            self.closed.set()


async def told(kit: ResponsesKit, response_id: str, after: int | None = None, *, owner: str = "") -> bytes:
    """What a follower is told, until the end."""
    with anyio.fail_after(BOUND):
        follower = await kit.service.follow(response_id, owner=owner, after=after)
        async with aclosing(follower.pieces()) as pieces:
            return b"".join([piece async for piece in pieces])


async def ended(kit: ResponsesKit, response_id: str, *, owner: str = "") -> dict[str, Any]:
    """The response, which has ended, or will, well or not."""
    with anyio.fail_after(BOUND):
        return check_order(decode_events(await told(kit, response_id, owner=owner)))


def events_of(data: bytes) -> list[bytes]:
    """The events in it, one by one."""
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def rebuilt(data: bytes) -> dict[str, Any]:
    """The final object of a stream, which is judged."""
    return check_stream(decode_events(data))


async def made(kit: ResponsesKit, **body: Any) -> str:
    """The id of a background response that has ended."""
    started = await kit.service.submit({**ASK, "background": True, **body})
    with anyio.fail_after(BOUND):
        await kit.wait(started["id"])
    return str(started["id"])


# Following.


@pytest.mark.parametrize("plain", [False, True], ids=["event by event", "in batches"])
async def test_from_any_event_on_the_rest_of_the_stream_is_told_byte_for_byte(plain: bool) -> None:
    backend = Calls(lambda turn: list(SCRIPT)) if plain else ScriptedBackend(SCRIPT)
    store = MemoryStore()
    kit, other = ResponsesKit(backend, store=store), ResponsesKit(ScriptedBackend(), store=store)
    response_id = await made(kit)
    whole = await told(kit, response_id)
    assert rebuilt(whole) == await kit.retrieve(response_id)
    events = events_of(whole)
    assert len(events) > 30
    for number in range(len(events) + 3):
        rest = b"".join(events[number + 1 :])
        for reader in (kit, other):
            assert await told(reader, response_id, number) == rest


async def test_whoever_follows_before_during_and_after_hears_the_same_on_any_kit() -> None:
    backend, store = Gated(), MemoryStore()
    kit, other = ResponsesKit(backend, store=store), ResponsesKit(Gated(), store=store)
    heard: list[bytes] = []

    async def hear(reader: ResponsesKit) -> None:
        heard.append(await told(reader, response_id))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            response_id = (await kit.service.submit({**ASK, "background": True}))["id"]
            for reader in (kit, other, kit):
                group.start_soon(hear, reader)
            await backend.half.wait()
            for reader in (kit, other):
                group.start_soon(hear, reader)
            await anyio.wait_all_tasks_blocked()
            assert heard == []
            backend.goes_on.set()
        for reader in (kit, other):
            await hear(reader)
    assert len(heard) == 7
    assert len(set(heard)) == 1
    assert rebuilt(heard[0])["status"] == "completed"


@pytest.mark.parametrize("same", [True, False], ids=["the same kit", "another kit"])
async def test_a_follower_hears_what_is_made_while_it_is_made(same: bool) -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    reader = kit if same else ResponsesKit(Gated(), store=store)
    started = await kit.service.submit({**ASK, "background": True})
    heard = b""
    with anyio.fail_after(BOUND):
        async with aclosing((await reader.service.follow(started["id"])).pieces()) as pieces:
            async for piece in pieces:
                heard += piece
                assert piece.endswith(b"\n\n"), "an event is torn"
                if b"delta" in piece and not backend.goes_on.is_set():
                    assert b"half " in piece
                    backend.goes_on.set()
    assert backend.goes_on.is_set(), "nothing was heard before the end"
    assert rebuilt(heard) == await kit.retrieve(started["id"])


async def test_whoever_leaves_in_the_middle_resumes_where_it_was_and_misses_nothing() -> None:
    backend, store = Gated(), MemoryStore()
    kits = [ResponsesKit(backend, store=store), ResponsesKit(Gated(), store=store)]
    started = await kits[0].service.submit({**ASK, "background": True})
    heard, last = b"", None
    with anyio.fail_after(BOUND):
        for reader in itertools.cycle(kits):
            async with aclosing((await reader.service.follow(started["id"], after=last)).pieces()) as pieces:
                async for piece in pieces:
                    heard += piece
                    break  # after each single piece
                else:
                    break
            last = decode_events(heard)[-1]["sequence_number"]
            if b"half " in piece:
                backend.goes_on.set()
    assert heard == await told(kits[0], started["id"])
    assert rebuilt(heard)["status"] == "completed"


async def test_followers_leave_no_trace_and_what_they_followed_goes_on() -> None:
    backend = Gated()
    kit = ResponsesKit(backend)
    started = await kit.service.submit({**ASK, "background": True})

    async def hear() -> None:
        await told(kit, started["id"])

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(hear)
            await backend.half.wait()
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert not kit.service.repository._bells
        backend.goes_on.set()
        assert (await kit.wait(started["id"]))["status"] == "completed"
    assert not kit.service.repository._bells


async def test_an_unknown_and_a_foreign_response_cannot_be_followed() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    started = await kit.service.submit({"input": "Hi", "background": True}, owner="ann")
    payloads = []
    for response_id, owner in ((started["id"], "bob"), (started["id"], ""), ("resp_unknown", "ann")):
        with pytest.raises(errors.NotFound) as caught:
            await kit.service.follow(response_id, owner=owner)
        payloads.append(caught.value.payload())
    assert payloads[0] == payloads[1] == payloads[2]
    assert rebuilt(await told(kit, started["id"], owner="ann"))["status"] == "completed"


@pytest.mark.parametrize("after", [None, 0, 2, 1000])
async def test_once_the_log_has_had_its_time_the_events_are_gone_and_the_response_is_not(after: int | None) -> None:
    clock = Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=MemoryStore(log_ttl=60.0, clock=clock))
    response_id = await made(kit)
    clock.now += 59
    await told(kit, response_id)
    clock.now += 2
    with pytest.raises(errors.EventsUnavailable) as caught:
        await kit.service.follow(response_id, after=after)
    assert (caught.value.status, caught.value.code) == (400, "events_not_kept")
    assert (await kit.retrieve(response_id))["status"] == "completed"


async def test_a_log_that_goes_between_the_asking_and_the_reading_is_told_by_events() -> None:
    clock = Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=MemoryStore(log_ttl=60.0, clock=clock))
    follower = await kit.service.follow(await made(kit))
    clock.now += 61
    events = [event async for piece in follower.pieces() for event in decode_events(piece)]
    assert check_stream(events) == await kit.retrieve(events[0]["response"]["id"])


@pytest.mark.parametrize("ending", ["completed", "incomplete", "failed", "cancelled"])
async def test_a_foreground_response_that_nobody_was_told_of_can_be_told_from_any_event_on(ending: str) -> None:
    last: dict[str, list[Any]] = {
        "completed": [],
        "incomplete": [outputs.Finish("max_output_tokens")],
        "failed": [LookupError("gone")],
    }
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend([*SCRIPT, *last.get(ending, ())]), store=store)
    run = await kit.service.create_run(ASK)
    if ending == "cancelled":
        run.cancel()
    await run.execute(_nobody)
    response = await kit.retrieve(run.id)
    assert response["status"] == ending
    whole = await told(ResponsesKit(ScriptedBackend(), store=store), run.id)
    assert rebuilt(whole) == response
    events = events_of(whole)
    for number in range(len(events) + 2):
        assert await told(kit, run.id, number) == b"".join(events[number + 1 :])


async def test_a_stream_that_was_told_but_not_kept_cannot_be_resumed_but_told_anew() -> None:
    kit = ResponsesKit(ScriptedBackend(SCRIPT))
    async with kit.stream(ASK) as events:
        heard = [event async for event in events]
    response_id = heard[0]["response"]["id"]
    with pytest.raises(errors.EventsUnavailable) as caught:
        await kit.service.follow(response_id, after=0)
    assert caught.value.param == "starting_after"
    assert rebuilt(await told(kit, response_id)) == heard[-1]["response"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after", [None, 0])
async def test_what_is_made_without_being_kept_cannot_be_followed_meanwhile(streamed: bool, after: int | None) -> None:
    backend = Gated()
    kit = ResponsesKit(backend)
    run = await kit.service.create_run(ASK, streamed=streamed)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, _nobody)
            await backend.half.wait()
            with pytest.raises(errors.EventsUnavailable):
                await kit.service.follow(run.id, after=after)
            backend.goes_on.set()


async def test_a_resumable_foreground_stream_is_kept_as_it_was_told() -> None:
    backend, store = Gated(), MemoryStore()
    kit, other = ResponsesKit(backend, store=store, resumable=True), ResponsesKit(Gated(), store=store)
    heard: list[Event] = []
    followed: list[bytes] = []

    async def follow() -> None:
        followed.append(await told(other, heard[0]["response"]["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group, kit.stream(ASK) as events:
            async for event in events:
                heard.append(event)
                if event.get("delta") == "half ":
                    group.start_soon(follow)
                    backend.goes_on.set()
    whole = b"".join(map(encode_sse, heard))
    assert followed == [whole]
    response_id = heard[0]["response"]["id"]
    for number in range(len(heard)):
        assert await told(other, response_id, number) == b"".join(map(encode_sse, heard[number + 1 :]))


async def test_what_is_not_stored_is_not_kept_though_streams_are_resumable() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, resumable=True)
    async with kit.stream({"input": "Hi", "store": False}) as events:
        heard = [event async for event in events]
    check_stream(heard)
    assert len(store) == 0


def test_what_one_event_loop_makes_is_followed_from_others(anyio_backend_name: str) -> None:
    goes_on: anyio.Event

    async def generate(turn: Turn) -> AsyncIterator[str]:
        yield "half "
        await goes_on.wait()
        yield "whole"

    kit, ids, heard, failures = ResponsesKit(Calls(generate)), list[str](), list[bytes](), list[str]()
    begun, hearing = threading.Event(), threading.Barrier(3)

    async def make() -> None:
        nonlocal goes_on
        goes_on = anyio.Event()
        ids.append((await kit.service.submit({"input": "Hi", "background": True}))["id"])
        begun.set()
        await anyio.to_thread.run_sync(hearing.wait, BOUND)
        goes_on.set()
        heard.append(await told(kit, ids[0]))

    async def follow() -> None:
        await anyio.to_thread.run_sync(begun.wait, BOUND)
        async with aclosing((await kit.service.follow(ids[0])).pieces()) as pieces:
            data = await anext(pieces)
            await anyio.to_thread.run_sync(hearing.wait, BOUND)
            heard.append(data + b"".join([piece async for piece in pieces]))

    async def bounded(act: Callable[[], Awaitable[None]]) -> None:
        with anyio.fail_after(BOUND):
            await act()

    def work(act: Callable[[], Awaitable[None]], backend: str) -> None:
        try:
            anyio.run(bounded, act, backend=backend)
        except BaseException as error:
            failures.append(repr(error))

    threads = [
        threading.Thread(target=work, args=args)
        for args in ((make, anyio_backend_name), (follow, "asyncio"), (follow, "trio"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND)
    assert failures == []
    assert len(heard) == 3
    assert len(set(heard)) == 1
    assert rebuilt(heard[0])["status"] == "completed"
    assert not kit.service.repository._bells


@pytest.mark.parametrize("same", [True, False], ids=["the same kit", "another kit"])
async def test_a_response_that_is_deleted_while_it_is_followed_ends_for_its_followers(same: bool) -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    reader = kit if same else ResponsesKit(Gated(), store=store)
    started = await kit.service.submit({**ASK, "background": True})
    heard: list[bytes] = []

    async def hear() -> None:
        heard.append(await told(reader, started["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(hear)
            await backend.half.wait()
            await kit.delete(started["id"])
            await backend.closed.wait()
    assert len(store) == 0
    assert {rebuilt(whole)["status"] for whole in heard} <= {"cancelled", "failed"}
    with pytest.raises(errors.NotFound):
        await reader.service.follow(started["id"])


async def test_a_record_that_goes_while_it_is_followed_ends_the_stream_legally_at_any_moment() -> None:
    machine, script = _machine(), [outputs.Reasoning("Hm."), "a", outputs.ToolCall("f"), "b"]
    log = machine.queue() + machine.start()
    for output in script:
        log += machine.feed(output)
    for count in range(1, len(log) + 1):
        store = MemoryStore()
        kit = ResponsesKit(ScriptedBackend(), store=store)
        record = _record(machine, lease=2e9)
        await store.create("", record)
        await store.append("", record.id, encode_log(log[:count]))
        heard = b""
        with anyio.fail_after(BOUND):
            async with aclosing((await kit.service.follow(record.id)).pieces()) as pieces:
                async for piece in pieces:
                    heard += piece
                    await store.delete("", record.id)
        assert check_order(decode_events(heard))["status"] == "failed"
        assert heard.startswith(b"".join(map(encode_sse, log[:count])))


@pytest.mark.parametrize("done", [False, True], ids=["before its work", "after its work"])
async def test_a_follower_whose_store_fails_at_any_call_has_a_legal_stream_or_is_refused(done: bool) -> None:
    for nth in range(100):
        store = MemoryStore()
        backend = Gated()
        kit = ResponsesKit(backend, store=store)
        failing = Failing(nth, done=done)
        watched = Watched(failing)
        watched.__dict__ |= {name: value for name, value in store.__dict__.items() if name != "around"}
        reader = ResponsesKit(Gated(), store=watched)
        started = await kit.service.submit({**ASK, "background": True})
        heard = b""
        with anyio.fail_after(BOUND):
            await backend.half.wait()
            try:
                async with aclosing((await reader.service.follow(started["id"])).pieces()) as pieces:
                    async for piece in pieces:
                        heard += piece
                        backend.goes_on.set()
            except errors.StoreError:
                assert heard == b"", "a failure came out of a stream that had begun"
            backend.goes_on.set()
            whole = await told(kit, started["id"])
        if heard:
            assert check_order(decode_events(heard))["status"] in ("completed", "failed")
        if not failing.heal():
            assert heard == whole
            break
    else:
        pytest.fail("the store was called for ever")
    assert nth > 3


# What a worker has left.


def _machine(**more: Any) -> StateMachine:
    return StateMachine(fresh_response() | {"id": new_id("resp"), "background": True, **more}, new_id=new_id)


def _record(
    machine: StateMachine, *, lease: float, events: Literal["kept", "told", "none"] = "kept", **more: Any
) -> Record:
    begun = machine.response | {"output": []}
    item = {"type": "message", "id": new_id("msg"), "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    return Record(
        id=begun["id"],
        previous_id=begun["previous_response_id"],
        input=encode_json([item | {"status": "completed"}]),
        response=encode_json(begun),
        item_ids=(item["id"],),
        events=events,
        lease=lease,
        **more,
    )


async def left(
    store: MemoryStore,
    clock: Clock,
    *,
    count: int = 10,
    queued: bool = True,
    events: Literal["kept", "told", "none"] = "kept",
    owner: str = "",
    **more: Any,
) -> Record:
    """A record as a process leaves it that was killed after so many events; its lease has a minute to go."""
    machine = _machine()
    log = machine.queue() if queued else []
    if count > len(log):
        log += machine.start()
        for output in (outputs.Reasoning("Hm."), "half ", "an ", "answer"):
            log += machine.feed(output)
    record = _record(machine, lease=clock.now + 60, events=events, **more)
    await store.create(owner, record)
    if events == "kept" and count:
        await store.append(owner, record.id, encode_log(log[:count]))
    return record


async def _get(kit: ResponsesKit, response_id: str) -> None:
    await kit.retrieve(response_id)


async def _continue(kit: ResponsesKit, response_id: str) -> None:
    await kit.create({"input": "Go on.", "previous_response_id": response_id})


async def _follow(kit: ResponsesKit, response_id: str) -> None:
    await told(kit, response_id)


async def _wait(kit: ResponsesKit, response_id: str) -> None:
    with pytest.raises(errors.ServerError, match="gone away"):
        await kit.wait(response_id)


async def _sweep(kit: ResponsesKit, response_id: str) -> None:
    assert await kit.service.repository.sweep() == 1


READERS = {"get": _get, "continue": _continue, "follow": _follow, "wait": _wait, "sweep": _sweep}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
async def test_whoever_reads_what_a_dead_worker_left_ends_it_as_failed(reader: Any) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    record = await left(store, clock)
    clock.now += 61
    with anyio.fail_after(BOUND):
        await reader(kit, record.id)
    ended = await store.get("", record.id)
    assert ended is not None
    assert ended.final
    response = from_json(ended.response)
    check_response(response)
    assert (response["status"], response["error"]["code"]) == ("failed", "worker_lost")
    assert response["output"][-1]["content"][0]["text"] == "half an answer"
    assert set(ended.item_ids) == set(record.item_ids) | {item["id"] for item in response["output"]}
    assert rebuilt(await told(kit, record.id)) == response


@pytest.mark.parametrize("reader", ["get", "sweep", "continue"])
async def test_nobody_ends_what_has_its_lease(reader: str) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    record = await left(store, clock)
    clock.now += 60  # to the very end of it
    log = await store.events("", record.id, -1)
    if reader == "get":
        assert (await kit.retrieve(record.id))["status"] == "in_progress"
    elif reader == "sweep":
        assert await kit.service.repository.sweep() == 0
    else:
        with pytest.raises(errors.InvalidRequest) as caught:
            await kit.create({"input": "Go on.", "previous_response_id": record.id})
        assert caught.value.code == "previous_response_in_progress"
    assert await store.get("", record.id) == record
    assert await store.events("", record.id, -1) == log


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("count", range(11))
async def test_a_log_that_ends_anywhere_gets_a_legal_ending(count: int, cancelled: bool) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(), store=store, clock=clock)
    record = await left(store, clock, count=count, cancelled=cancelled)
    before = b"".join(piece.data for piece in await store.events("", record.id, -1) or ())
    clock.now += 61
    response = await kit.retrieve(record.id)
    assert response["status"] == ("cancelled" if cancelled else "failed")
    whole = await told(kit, record.id)
    assert whole.startswith(before)
    assert rebuilt(whole) == response


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("events", ["told", "none"])
async def test_what_was_left_without_a_log_is_ended_too(events: Any, cancelled: bool) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(), store=store, clock=clock)
    record = await left(store, clock, queued=False, events=events, cancelled=cancelled)
    clock.now += 61
    response = await kit.retrieve(record.id)
    check_response(response)
    assert (response["status"], response["output"]) == ("cancelled" if cancelled else "failed", [])
    assert rebuilt(await told(kit, record.id)) == response


async def test_a_queued_response_that_no_worker_took_is_ended_when_its_time_is_over() -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(), store=store, clock=clock)
    record = await left(store, clock, count=2, request=b"{}")
    clock.now += 61
    response = await kit.retrieve(record.id)
    assert response["error"]["code"] == "worker_lost"
    ended = await store.get("", record.id)
    assert ended is not None
    assert ended.request == b"", "nobody may work on it any more"
    await kit.service.run_queued("", record.id)
    assert await store.get("", record.id) == ended


async def test_many_who_look_at_once_see_one_ending() -> None:
    for cancelled in (False, True):
        store, clock = Watched(slow), Clock()
        kits = [ResponsesKit(ScriptedBackend(), store=store, clock=clock) for _ in range(4)]
        record = await left(store, clock, cancelled=cancelled)
        clock.now += 61
        seen: list[Any] = []

        async def look(kit: ResponsesKit, response_id: str, seen: list[Any]) -> None:
            seen.append(await kit.retrieve(response_id))
            seen.append(check_order(decode_events(await told(kit, response_id))))
            await kit.service.repository.sweep()

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                for kit in kits * 3:
                    group.start_soon(look, kit, record.id, seen)
        assert len(seen) == 24
        assert all(one == seen[0] for one in seen)
        await check_kept(store, clock)


async def test_a_worker_that_gives_a_sign_while_it_is_given_up_lives_on() -> None:
    clock = Clock()

    async def around(name: str, call: Call) -> Any:
        if name == "update" and not signs:
            signs.append(name)
            await MemoryStore.renew(store, [("", record.id)], clock.now + 60)
            log = await MemoryStore.events(store, "", record.id, -1)
            assert log
            event = {"type": "acme:sign", "sequence_number": log[-1].end}
            await MemoryStore.append(store, "", record.id, encode_log([event]))
        return await call()

    signs: list[str] = []
    store = Watched(around)
    record = await left(store, clock)
    clock.now += 61
    found = await Repository(store, clock=clock).get("", record.id)
    assert signs
    assert found is not None
    assert (found.final, found.lease) == (False, clock.now + 60)


async def test_a_log_that_no_machine_could_have_told_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    rubbish = [
        b"event: x\ndata: {\n\n",
        b"event: x\ndata: []\n\n",
        b"event: x\ndata: {}\n\n",
        b'event: x\ndata: {"type":"response.output_text.delta","sequence_number":0,"item_id":"msg_1"}\n\n',
        encode_sse({"type": "response.queued", "sequence_number": 0, "response": {"id": "resp_other"}}),
    ]
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    poisoned = []
    for data in rubbish:
        record = _record(_machine(), lease=clock.now + 60)
        await store.create("", record)
        await store.append("", record.id, Log(0, 1, data))
        poisoned.append(record.id)
    sound = await left(store, clock)
    clock.now += 61
    with anyio.fail_after(BOUND):
        await kit.service.repository.sweep()
        for response_id in (*poisoned, sound.id):
            response = await kit.retrieve(response_id)
            check_response(response)
            assert response["error"]["code"] == "worker_lost"
    assert rebuilt(await told(kit, sound.id))["status"] == "failed"
    assert "half an answer" not in caplog.text


async def test_a_sweep_ends_all_that_is_left_however_much_it_is_and_whosever() -> None:
    store, clock = MemoryStore(), Clock()
    owners = ["", "ann", "bob"]
    for number in range(250):
        await left(store, clock, count=3, owner=owners[number % 3])
    alive = await left(store, clock, count=3)
    await store.renew([("", alive.id)], clock.now + 1000)
    clock.now += 61
    records = Repository(store, clock=clock)
    with anyio.fail_after(BOUND):
        assert await records.sweep() == 250
        assert await records.sweep() == 0
    assert await store.get("", alive.id) == replace(alive, lease=clock.now - 61 + 1000)


async def test_a_sweep_that_makes_no_progress_ends() -> None:
    clock = Clock()

    async def around(name: str, call: Call) -> Any:
        return False if name == "update" else await call()

    store = Watched(around)
    await left(store, clock)
    clock.now += 61
    with anyio.fail_after(BOUND):
        assert await Repository(store, clock=clock).sweep() == 0


@pytest.mark.parametrize("done", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_store_that_fails_while_something_is_ended_leaves_it_to_the_next_who_looks(
    done: bool, times: int
) -> None:
    for nth in range(100):
        failing, clock = Failing(1000, done=done), Clock()
        store = Watched(failing)
        record = await left(store, clock)
        failing.failing = range(failing.count + nth, failing.count + nth + times)
        clock.now += 61
        records = Repository(store, clock=clock)
        try:
            found = await records.get("", record.id)
            assert found is not None
            assert found.final
        except errors.StoreError:
            pass
        met = failing.heal()
        (response,) = await check_kept(store, clock)
        assert response["status"] == "failed"
        if not met:
            break
    else:
        pytest.fail("the store was called for ever")
    assert nth >= 3


async def test_the_next_turn_may_build_on_what_a_dead_worker_left() -> None:
    store, clock, backend = MemoryStore(), Clock(), ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend, store=store, clock=clock)
    record = await left(store, clock)
    clock.now += 61
    response = await kit.create({"input": "Go on.", "previous_response_id": record.id})
    assert response["status"] == "completed"
    assert [item.type for item in backend.turns[0].items] == ["message", "reasoning", "message", "message"]


# Two stores, one before the other.


async def _filled(*names: str, previous: str | None = None) -> Repository:
    store = MemoryStore()
    for name in names:
        item_ids = (f"msg_{name}", "msg_both")
        await store.create(
            "ann", Record(id=name, previous_id=previous, input=b"[]", response=b"{}", item_ids=item_ids, final=True)
        )
        previous = name
    return Repository(store)


async def test_a_chain_goes_on_from_the_first_store_into_the_second() -> None:
    layered = LayeredRepository(await _filled("c", "d", previous="b"), await _filled("a", "b"))
    for response_id, chain in {"d": "abcd", "c": "abc", "b": "ab", "a": "a", "e": ""}.items():
        assert [record.id for record in await layered.chain("ann", response_id)] == list(chain)
    assert await layered.chain("bob", "d") == []


async def test_a_chain_whose_beginning_is_in_neither_store_says_so() -> None:
    layered = LayeredRepository(await _filled("c", "d", previous="b"), await _filled("x"))
    records = await layered.chain("ann", "d")
    assert [record.id for record in records] == ["c", "d"]
    assert records[0].previous_id == "b"


async def test_items_are_looked_for_in_the_first_store_and_then_in_the_second() -> None:
    layered = LayeredRepository(await _filled("b"), await _filled("a"))
    found = await layered.items("ann", ["msg_a", "msg_b", "msg_both", "msg_none"])
    assert {item_id: record.id for item_id, record in found.items()} == {"msg_a": "a", "msg_b": "b", "msg_both": "b"}
    assert await layered.items("bob", ["msg_a"]) == {}
    assert await layered.items("ann", []) == {}


async def _nobody(events: list[Event]) -> None:
    pass
