"""Repository and followers: orphaned responses are ended on reading, and every logged stream can be resumed."""

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
from responses_kit.engine import repository as repository_module
from responses_kit.engine.repository import LayeredRepository, Repository, encode_log
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import decode_events, encode_json, encode_sse
from responses_kit.protocol.state_machine import Event, StateMachine
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import ScriptedBackend

from ..protocol.test_state_machine import fresh_response
from ..support.conformance import check_response, check_stream
from .test_run import (
    BOUND,
    Call,
    CallableBackend,
    Clock,
    InterceptedStore,
    StoreFailure,
    check_records,
    check_replay,
    pass_with_checkpoints,
)

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
def fast_polling() -> Iterator[None]:
    """Shorten the poll intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository_module, "_POLL_INTERVALS", (0.005, 0.02))
        yield


class GatedBackend(Backend):
    """Yields half of its answer, waits for `resume`, and yields the rest."""

    models = (Model("gated", tools=True),)

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.half_sent, self.resume, self.closed = anyio.Event(), anyio.Event(), anyio.Event()

    async def generate(self, turn: Turn) -> AsyncIterator[outputs.Output]:
        self.turns.append(turn)
        try:
            for output in ("half ", outputs.Reasoning("Hm.")):
                yield output
            self.half_sent.set()
            await self.resume.wait()
            yield "whole"
        finally:
            self.closed.set()


async def read_stream(kit: ResponsesKit, response_id: str, after: int | None = None, *, owner: str = "") -> bytes:
    """Return the bytes of a response's stream from an event on."""
    with anyio.fail_after(BOUND):
        follower = await kit.service.follow(response_id, owner=owner, after=after)
        async with aclosing(follower.pieces()) as pieces:
            return b"".join([piece async for piece in pieces])


async def read_final(kit: ResponsesKit, response_id: str, *, owner: str = "") -> dict[str, Any]:
    """Return the final response of a stream, once it has ended in any way."""
    with anyio.fail_after(BOUND):
        return check_replay(decode_events(await read_stream(kit, response_id, owner=owner)))


def split_events(data: bytes) -> list[bytes]:
    """Return the events of a stream as bytes."""
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def replay_stream(data: bytes) -> dict[str, Any]:
    """Check a stream and return its final response."""
    return check_stream(decode_events(data))


async def create_finished(kit: ResponsesKit, **body: Any) -> str:
    """Create a background response, wait for its end and return its id."""
    started = await kit.service.submit({**ASK, "background": True, **body})
    with anyio.fail_after(BOUND):
        await kit.wait(started["id"])
    return str(started["id"])


# Following.


@pytest.mark.parametrize("is_sync", [False, True], ids=["single events", "batches"])
async def test_stream_is_resumed_byte_for_byte_from_any_event(is_sync: bool) -> None:
    backend = CallableBackend(lambda turn: list(SCRIPT)) if is_sync else ScriptedBackend(SCRIPT)
    store = MemoryStore()
    kit, other = ResponsesKit(backend, store=store), ResponsesKit(ScriptedBackend(), store=store)
    response_id = await create_finished(kit)
    whole = await read_stream(kit, response_id)
    assert replay_stream(whole) == await kit.retrieve(response_id)
    events = split_events(whole)
    assert len(events) > 30
    for number in range(len(events) + 3):
        rest = b"".join(events[number + 1 :])
        for reader in (kit, other):
            assert await read_stream(reader, response_id, number) == rest


async def test_followers_receive_same_bytes_at_any_time_on_any_kit() -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit, other = ResponsesKit(backend, store=store), ResponsesKit(GatedBackend(), store=store)
    received: list[bytes] = []

    async def receive(reader: ResponsesKit) -> None:
        received.append(await read_stream(reader, response_id))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            response_id = (await kit.service.submit({**ASK, "background": True}))["id"]
            for reader in (kit, other, kit):
                group.start_soon(receive, reader)
            await backend.half_sent.wait()
            for reader in (kit, other):
                group.start_soon(receive, reader)
            await anyio.wait_all_tasks_blocked()
            assert received == []
            backend.resume.set()
        for reader in (kit, other):
            await receive(reader)
    assert len(received) == 7
    assert len(set(received)) == 1
    assert replay_stream(received[0])["status"] == "completed"


@pytest.mark.parametrize("is_same_kit", [True, False], ids=["the same kit", "another kit"])
async def test_follower_receives_events_while_they_are_generated(is_same_kit: bool) -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    reader = kit if is_same_kit else ResponsesKit(GatedBackend(), store=store)
    started = await kit.service.submit({**ASK, "background": True})
    received = b""
    with anyio.fail_after(BOUND):
        async with aclosing((await reader.service.follow(started["id"])).pieces()) as pieces:
            async for piece in pieces:
                received += piece
                assert piece.endswith(b"\n\n"), "a piece ends within an event"
                if b"delta" in piece and not backend.resume.is_set():
                    assert b"half " in piece
                    backend.resume.set()
    assert backend.resume.is_set(), "no event was sent before the end"
    assert replay_stream(received) == await kit.retrieve(started["id"])


async def test_reconnecting_follower_misses_no_events() -> None:
    backend, store = GatedBackend(), MemoryStore()
    kits = [ResponsesKit(backend, store=store), ResponsesKit(GatedBackend(), store=store)]
    started = await kits[0].service.submit({**ASK, "background": True})
    received, last = b"", None
    with anyio.fail_after(BOUND):
        for reader in itertools.cycle(kits):
            async with aclosing((await reader.service.follow(started["id"], after=last)).pieces()) as pieces:
                async for piece in pieces:
                    received += piece
                    break  # disconnect after each piece
                else:
                    break
            last = decode_events(received)[-1]["sequence_number"]
            if b"half " in piece:
                backend.resume.set()
    assert received == await read_stream(kits[0], started["id"])
    assert replay_stream(received)["status"] == "completed"


async def test_cancelled_followers_leave_no_notifiers_and_response_continues() -> None:
    backend = GatedBackend()
    kit = ResponsesKit(backend)
    started = await kit.service.submit({**ASK, "background": True})

    async def receive() -> None:
        await read_stream(kit, started["id"])

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(receive)
            await backend.half_sent.wait()
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert not kit.service.repository._notifiers
        backend.resume.set()
        assert (await kit.wait(started["id"]))["status"] == "completed"
    assert not kit.service.repository._notifiers


async def test_unknown_response_and_other_owners_response_cannot_be_followed() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    started = await kit.service.submit({"input": "Hi", "background": True}, owner="ann")
    payloads = []
    for response_id, owner in ((started["id"], "bob"), (started["id"], ""), ("resp_unknown", "ann")):
        with pytest.raises(errors.NotFound) as caught:
            await kit.service.follow(response_id, owner=owner)
        payloads.append(caught.value.payload())
    assert payloads[0] == payloads[1] == payloads[2]
    assert replay_stream(await read_stream(kit, started["id"], owner="ann"))["status"] == "completed"


@pytest.mark.parametrize("after", [None, 0, 2, 1000])
async def test_expired_log_is_unavailable_but_response_remains(after: int | None) -> None:
    clock = Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=MemoryStore(log_ttl=60.0, clock=clock))
    response_id = await create_finished(kit)
    clock.now += 59
    await read_stream(kit, response_id)
    clock.now += 2
    with pytest.raises(errors.EventsUnavailable) as caught:
        await kit.service.follow(response_id, after=after)
    assert (caught.value.status, caught.value.code) == (400, "events_not_kept")
    assert (await kit.retrieve(response_id))["status"] == "completed"


async def test_log_expiring_after_open_is_replaced_by_synthesized_events() -> None:
    clock = Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=MemoryStore(log_ttl=60.0, clock=clock))
    follower = await kit.service.follow(await create_finished(kit))
    clock.now += 61
    events = [event async for piece in follower.pieces() for event in decode_events(piece)]
    assert check_stream(events) == await kit.retrieve(events[0]["response"]["id"])


@pytest.mark.parametrize("ending", ["completed", "incomplete", "failed", "cancelled"])
async def test_unstreamed_response_is_synthesized_from_any_event(ending: str) -> None:
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
    await run.execute(_notify_nothing)
    response = await kit.retrieve(run.id)
    assert response["status"] == ending
    whole = await read_stream(ResponsesKit(ScriptedBackend(), store=store), run.id)
    assert replay_stream(whole) == response
    events = split_events(whole)
    for number in range(len(events) + 2):
        assert await read_stream(kit, run.id, number) == b"".join(events[number + 1 :])


async def test_unlogged_stream_is_synthesized_but_cannot_be_resumed() -> None:
    kit = ResponsesKit(ScriptedBackend(SCRIPT))
    async with kit.stream(ASK) as events:
        received = [event async for event in events]
    response_id = received[0]["response"]["id"]
    with pytest.raises(errors.EventsUnavailable) as caught:
        await kit.service.follow(response_id, after=0)
    assert caught.value.param == "starting_after"
    assert replay_stream(await read_stream(kit, response_id)) == received[-1]["response"]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("after", [None, 0])
async def test_unlogged_response_in_progress_cannot_be_followed(streamed: bool, after: int | None) -> None:
    backend = GatedBackend()
    kit = ResponsesKit(backend)
    run = await kit.service.create_run(ASK, streamed=streamed)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, _notify_nothing)
            await backend.half_sent.wait()
            with pytest.raises(errors.EventsUnavailable):
                await kit.service.follow(run.id, after=after)
            backend.resume.set()


async def test_resumable_foreground_stream_is_logged_as_sent() -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit, other = ResponsesKit(backend, store=store, resumable=True), ResponsesKit(GatedBackend(), store=store)
    received: list[Event] = []
    followed: list[bytes] = []

    async def follow() -> None:
        followed.append(await read_stream(other, received[0]["response"]["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group, kit.stream(ASK) as events:
            async for event in events:
                received.append(event)
                if event.get("delta") == "half ":
                    group.start_soon(follow)
                    backend.resume.set()
    whole = b"".join(map(encode_sse, received))
    assert followed == [whole]
    response_id = received[0]["response"]["id"]
    for number in range(len(received)):
        assert await read_stream(other, response_id, number) == b"".join(map(encode_sse, received[number + 1 :]))


async def test_unstored_response_is_not_logged_when_resumable() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, resumable=True)
    async with kit.stream({"input": "Hi", "store": False}) as events:
        received = [event async for event in events]
    check_stream(received)
    assert len(store) == 0


def test_response_is_followed_from_other_event_loops(anyio_backend_name: str) -> None:
    resume: anyio.Event

    async def generate(turn: Turn) -> AsyncIterator[str]:
        yield "half "
        await resume.wait()
        yield "whole"

    kit, ids, received, failures = ResponsesKit(CallableBackend(generate)), list[str](), list[bytes](), list[str]()
    started, following = threading.Event(), threading.Barrier(3)

    async def create() -> None:
        nonlocal resume
        resume = anyio.Event()
        ids.append((await kit.service.submit({"input": "Hi", "background": True}))["id"])
        started.set()
        await anyio.to_thread.run_sync(following.wait, BOUND)
        resume.set()
        received.append(await read_stream(kit, ids[0]))

    async def follow() -> None:
        await anyio.to_thread.run_sync(started.wait, BOUND)
        async with aclosing((await kit.service.follow(ids[0])).pieces()) as pieces:
            data = await anext(pieces)
            await anyio.to_thread.run_sync(following.wait, BOUND)
            received.append(data + b"".join([piece async for piece in pieces]))

    async def bounded(action: Callable[[], Awaitable[None]]) -> None:
        with anyio.fail_after(BOUND):
            await action()

    def work(action: Callable[[], Awaitable[None]], backend: str) -> None:
        try:
            anyio.run(bounded, action, backend=backend)
        except BaseException as error:
            failures.append(repr(error))

    threads = [
        threading.Thread(target=work, args=args)
        for args in ((create, anyio_backend_name), (follow, "asyncio"), (follow, "trio"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND)
    assert failures == []
    assert len(received) == 3
    assert len(set(received)) == 1
    assert replay_stream(received[0])["status"] == "completed"
    assert not kit.service.repository._notifiers


@pytest.mark.parametrize("is_same_kit", [True, False], ids=["the same kit", "another kit"])
async def test_followers_end_when_response_is_deleted(is_same_kit: bool) -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    reader = kit if is_same_kit else ResponsesKit(GatedBackend(), store=store)
    started = await kit.service.submit({**ASK, "background": True})
    received: list[bytes] = []

    async def receive() -> None:
        received.append(await read_stream(reader, started["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(receive)
            await backend.half_sent.wait()
            await kit.delete(started["id"])
            await backend.closed.wait()
    assert len(store) == 0
    assert {replay_stream(whole)["status"] for whole in received} <= {"cancelled", "failed"}
    with pytest.raises(errors.NotFound):
        await reader.service.follow(started["id"])


async def test_follower_ends_legally_when_record_is_deleted_at_any_event() -> None:
    state_machine, script = _state_machine(), [outputs.Reasoning("Hm."), "a", outputs.ToolCall("f"), "b"]
    log = state_machine.queue() + state_machine.start()
    for output in script:
        log += state_machine.feed(output)
    for count in range(1, len(log) + 1):
        store = MemoryStore()
        kit = ResponsesKit(ScriptedBackend(), store=store)
        record = _record(state_machine, lease=2e9)
        await store.create("", record)
        await store.append("", record.id, encode_log(log[:count]))
        received = b""
        with anyio.fail_after(BOUND):
            async with aclosing((await kit.service.follow(record.id)).pieces()) as pieces:
                async for piece in pieces:
                    received += piece
                    await store.delete("", record.id)
        assert check_replay(decode_events(received))["status"] == "failed"
        assert received.startswith(b"".join(map(encode_sse, log[:count])))


@pytest.mark.parametrize("fails_after_work", [False, True], ids=["before work", "after work"])
async def test_follower_gets_legal_stream_or_error_when_store_fails_at_any_call(fails_after_work: bool) -> None:
    for nth in range(100):
        store = MemoryStore()
        backend = GatedBackend()
        kit = ResponsesKit(backend, store=store)
        failing = StoreFailure(nth, fails_after_work=fails_after_work)
        intercepted = InterceptedStore(failing)
        intercepted.__dict__ |= {name: value for name, value in store.__dict__.items() if name != "intercept"}
        reader = ResponsesKit(GatedBackend(), store=intercepted)
        started = await kit.service.submit({**ASK, "background": True})
        received = b""
        with anyio.fail_after(BOUND):
            await backend.half_sent.wait()
            try:
                async with aclosing((await reader.service.follow(started["id"])).pieces()) as pieces:
                    async for piece in pieces:
                        received += piece
                        backend.resume.set()
            except errors.StoreError:
                assert received == b"", "the error was raised by a started stream"
            backend.resume.set()
            whole = await read_stream(kit, started["id"])
        if received:
            assert check_replay(decode_events(received))["status"] in ("completed", "failed")
        if not failing.stop_failing():
            assert received == whole
            break
    else:
        pytest.fail("the store was called without end")
    assert nth > 3


# Orphaned responses.


def _state_machine(**extra: Any) -> StateMachine:
    return StateMachine(fresh_response() | {"id": new_id("resp"), "background": True, **extra}, new_id=new_id)


def _record(
    state_machine: StateMachine, *, lease: float, events: Literal["logged", "streamed", "none"] = "logged", **extra: Any
) -> Record:
    started = state_machine.response | {"output": []}
    item = {"type": "message", "id": new_id("msg"), "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    return Record(
        id=started["id"],
        previous_id=started["previous_response_id"],
        input=encode_json([item | {"status": "completed"}]),
        response=encode_json(started),
        item_ids=(item["id"],),
        events=events,
        lease=lease,
        **extra,
    )


async def leave_orphaned(
    store: MemoryStore,
    clock: Clock,
    *,
    count: int = 10,
    queued: bool = True,
    events: Literal["logged", "streamed", "none"] = "logged",
    owner: str = "",
    **extra: Any,
) -> Record:
    """Create a record as left by a process that was killed after `count` events; its lease expires in 60 seconds."""
    state_machine = _state_machine()
    log = state_machine.queue() if queued else []
    if count > len(log):
        log += state_machine.start()
        for output in (outputs.Reasoning("Hm."), "half ", "an ", "answer"):
            log += state_machine.feed(output)
    record = _record(state_machine, lease=clock.now + 60, events=events, **extra)
    await store.create(owner, record)
    if events == "logged" and count:
        await store.append(owner, record.id, encode_log(log[:count]))
    return record


async def _get(kit: ResponsesKit, response_id: str) -> None:
    await kit.retrieve(response_id)


async def _continue(kit: ResponsesKit, response_id: str) -> None:
    await kit.create({"input": "Go on.", "previous_response_id": response_id})


async def _follow(kit: ResponsesKit, response_id: str) -> None:
    await read_stream(kit, response_id)


async def _wait(kit: ResponsesKit, response_id: str) -> None:
    with pytest.raises(errors.ServerError, match="was lost"):
        await kit.wait(response_id)


async def _sweep(kit: ResponsesKit, response_id: str) -> None:
    assert await kit.service.repository.sweep() == 1


READERS = {"get": _get, "continue": _continue, "follow": _follow, "wait": _wait, "sweep": _sweep}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
async def test_reader_ends_orphaned_response_as_failed(reader: Any) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    record = await leave_orphaned(store, clock)
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
    assert replay_stream(await read_stream(kit, record.id)) == response


@pytest.mark.parametrize("reader", ["get", "sweep", "continue"])
async def test_response_with_valid_lease_is_not_ended(reader: str) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    record = await leave_orphaned(store, clock)
    clock.now += 60  # exactly the end of the lease
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
async def test_log_cut_at_any_event_gets_legal_ending(count: int, cancelled: bool) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(), store=store, clock=clock)
    record = await leave_orphaned(store, clock, count=count, cancelled=cancelled)
    before = b"".join(piece.data for piece in await store.events("", record.id, -1) or ())
    clock.now += 61
    response = await kit.retrieve(record.id)
    assert response["status"] == ("cancelled" if cancelled else "failed")
    whole = await read_stream(kit, record.id)
    assert whole.startswith(before)
    assert replay_stream(whole) == response


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("events", ["streamed", "none"])
async def test_orphaned_response_without_log_is_ended(events: Any, cancelled: bool) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(), store=store, clock=clock)
    record = await leave_orphaned(store, clock, queued=False, events=events, cancelled=cancelled)
    clock.now += 61
    response = await kit.retrieve(record.id)
    check_response(response)
    assert (response["status"], response["output"]) == ("cancelled" if cancelled else "failed", [])
    assert replay_stream(await read_stream(kit, record.id)) == response


async def test_unclaimed_queued_response_is_ended_when_its_lease_expires() -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(), store=store, clock=clock)
    record = await leave_orphaned(store, clock, count=2, request=b"{}")
    clock.now += 61
    response = await kit.retrieve(record.id)
    assert response["error"]["code"] == "worker_lost"
    ended = await store.get("", record.id)
    assert ended is not None
    assert ended.request == b"", "a worker could still claim it"
    await kit.service.run_queued("", record.id)
    assert await store.get("", record.id) == ended


async def test_concurrent_readers_see_one_ending() -> None:
    for cancelled in (False, True):
        store, clock = InterceptedStore(pass_with_checkpoints), Clock()
        kits = [ResponsesKit(ScriptedBackend(), store=store, clock=clock) for _ in range(4)]
        record = await leave_orphaned(store, clock, cancelled=cancelled)
        clock.now += 61
        results: list[Any] = []

        async def read(kit: ResponsesKit, response_id: str, results: list[Any]) -> None:
            results.append(await kit.retrieve(response_id))
            results.append(check_replay(decode_events(await read_stream(kit, response_id))))
            await kit.service.repository.sweep()

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                for kit in kits * 3:
                    group.start_soon(read, kit, record.id, results)
        assert len(results) == 24
        assert all(one == results[0] for one in results)
        await check_records(store, clock)


async def test_response_is_not_ended_when_worker_renews_lease_meanwhile() -> None:
    clock = Clock()

    async def intercept(name: str, call: Call) -> Any:
        if name == "update" and not renewals:
            renewals.append(name)
            await MemoryStore.renew(store, [("", record.id)], clock.now + 60)
            log = await MemoryStore.events(store, "", record.id, -1)
            assert log
            event = {"type": "acme:sign", "sequence_number": log[-1].end}
            await MemoryStore.append(store, "", record.id, encode_log([event]))
        return await call()

    renewals: list[str] = []
    store = InterceptedStore(intercept)
    record = await leave_orphaned(store, clock)
    clock.now += 61
    found = await Repository(store, clock=clock).get("", record.id)
    assert renewals
    assert found is not None
    assert (found.final, found.lease) == (False, clock.now + 60)


async def test_damaged_log_does_not_affect_other_responses(caplog: pytest.LogCaptureFixture) -> None:
    damaged_logs = [
        b"event: x\ndata: {\n\n",
        b"event: x\ndata: []\n\n",
        b"event: x\ndata: {}\n\n",
        b'event: x\ndata: {"type":"response.output_text.delta","sequence_number":0,"item_id":"msg_1"}\n\n',
        encode_sse({"type": "response.queued", "sequence_number": 0, "response": {"id": "resp_other"}}),
    ]
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    damaged = []
    for data in damaged_logs:
        record = _record(_state_machine(), lease=clock.now + 60)
        await store.create("", record)
        await store.append("", record.id, Log(0, 1, data))
        damaged.append(record.id)
    intact = await leave_orphaned(store, clock)
    clock.now += 61
    with anyio.fail_after(BOUND):
        await kit.service.repository.sweep()
        for response_id in (*damaged, intact.id):
            response = await kit.retrieve(response_id)
            check_response(response)
            assert response["error"]["code"] == "worker_lost"
    assert replay_stream(await read_stream(kit, intact.id))["status"] == "failed"
    assert "half an answer" not in caplog.text


async def test_sweep_ends_all_orphaned_responses_of_all_owners() -> None:
    store, clock = MemoryStore(), Clock()
    owners = ["", "ann", "bob"]
    for number in range(250):
        await leave_orphaned(store, clock, count=3, owner=owners[number % 3])
    live = await leave_orphaned(store, clock, count=3)
    await store.renew([("", live.id)], clock.now + 1000)
    clock.now += 61
    repository = Repository(store, clock=clock)
    with anyio.fail_after(BOUND):
        assert await repository.sweep() == 250
        assert await repository.sweep() == 0
    assert await store.get("", live.id) == replace(live, lease=clock.now - 61 + 1000)


async def test_sweep_without_progress_returns() -> None:
    clock = Clock()

    async def intercept(name: str, call: Call) -> Any:
        return False if name == "update" else await call()

    store = InterceptedStore(intercept)
    await leave_orphaned(store, clock)
    clock.now += 61
    with anyio.fail_after(BOUND):
        assert await Repository(store, clock=clock).sweep() == 0


@pytest.mark.parametrize("fails_after_work", [False, True], ids=["before work", "after work"])
@pytest.mark.parametrize("times", [1, 2])
async def test_next_reader_ends_response_when_store_failed_meanwhile(fails_after_work: bool, times: int) -> None:
    for nth in range(100):
        failing, clock = StoreFailure(1000, fails_after_work=fails_after_work), Clock()
        store = InterceptedStore(failing)
        record = await leave_orphaned(store, clock)
        failing.failing_calls = range(failing.count + nth, failing.count + nth + times)
        clock.now += 61
        repository = Repository(store, clock=clock)
        try:
            found = await repository.get("", record.id)
            assert found is not None
            assert found.final
        except errors.StoreError:
            pass
        has_failed = failing.stop_failing()
        (response,) = await check_records(store, clock)
        assert response["status"] == "failed"
        if not has_failed:
            break
    else:
        pytest.fail("the store was called without end")
    assert nth >= 3


async def test_orphaned_response_can_be_continued() -> None:
    store, clock, backend = MemoryStore(), Clock(), ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend, store=store, clock=clock)
    record = await leave_orphaned(store, clock)
    clock.now += 61
    response = await kit.create({"input": "Go on.", "previous_response_id": record.id})
    assert response["status"] == "completed"
    assert [item.type for item in backend.turns[0].items] == ["message", "reasoning", "message", "message"]


# Layered stores.


async def _filled_repository(*names: str, previous: str | None = None) -> Repository:
    store = MemoryStore()
    for name in names:
        item_ids = (f"msg_{name}", "msg_both")
        await store.create(
            "ann", Record(id=name, previous_id=previous, input=b"[]", response=b"{}", item_ids=item_ids, final=True)
        )
        previous = name
    return Repository(store)


async def test_chain_continues_in_lower_store() -> None:
    layered = LayeredRepository(await _filled_repository("c", "d", previous="b"), await _filled_repository("a", "b"))
    for response_id, chain in {"d": "abcd", "c": "abc", "b": "ab", "a": "a", "e": ""}.items():
        assert [record.id for record in await layered.chain("ann", response_id)] == list(chain)
    assert await layered.chain("bob", "d") == []


async def test_chain_with_missing_start_has_previous_id() -> None:
    layered = LayeredRepository(await _filled_repository("c", "d", previous="b"), await _filled_repository("x"))
    repository = await layered.chain("ann", "d")
    assert [record.id for record in repository] == ["c", "d"]
    assert repository[0].previous_id == "b"


async def test_items_are_searched_in_upper_store_first() -> None:
    layered = LayeredRepository(await _filled_repository("b"), await _filled_repository("a"))
    found = await layered.items("ann", ["msg_a", "msg_b", "msg_both", "msg_none"])
    assert {item_id: record.id for item_id, record in found.items()} == {"msg_a": "a", "msg_b": "b", "msg_both": "b"}
    assert await layered.items("bob", ["msg_a"]) == {}
    assert await layered.items("ann", []) == {}


async def _notify_nothing(events: list[Event]) -> None:
    pass
