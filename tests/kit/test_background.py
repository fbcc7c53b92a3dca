"""Background responses and idempotency keys: workers, cancellation, repeated requests and failing stores."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import Backend, HostedTool, Model, ResponsesKit, Turn, errors, outputs
from responses_kit.engine import leases as leases_module
from responses_kit.engine import recorder
from responses_kit.engine import repository as repository_module
from responses_kit.kit import kit as kit_module
from responses_kit.protocol.ids import is_id
from responses_kit.protocol.sse import decode_events
from responses_kit.runners.base import LocalRunner
from responses_kit.schema.request import CreateRequest
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import Pause, ScriptedBackend

from ..engine.test_repository import ASK, SCRIPT, GatedBackend, read_final, read_stream, replay_stream
from ..engine.test_run import (
    BOUND,
    Call,
    Clock,
    EventClient,
    InterceptedStore,
    StoreFailure,
    check_records,
    check_replay,
    pass_with_checkpoints,
)
from ..runners.test_runners import QueueRunner
from ..support.conformance import check_response, check_stream
from ..support.memory import stored_records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

BACKGROUND = {**ASK, "background": True}


@pytest.fixture(autouse=True, scope="module")
def fast_polling() -> Iterator[None]:
    """Shorten the poll and check intervals."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repository_module, "_POLL_INTERVALS", (0.002, 0.01))
        patch.setattr(leases_module, "_CHECK_INTERVAL", 0.005)
        patch.setattr(kit_module, "_CANCEL_POLL_INTERVAL", 0.002)
        patch.setattr(kit_module, "_CANCEL_TIMEOUT", 0.5)
        yield


async def stream_events(kit: ResponsesKit, body: Any) -> AsyncIterator[Any]:
    async with kit.stream(body) as events:
        async for event in events:
            yield event


# Submission.


async def test_submit_returns_queued_response_immediately() -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=QueueRunner())
    for ask in (kit.service.submit, kit.create):
        response = await ask({**BACKGROUND, "metadata": {"k": "v"}})
        check_response(response)
        assert (response["status"], response["output"], response["background"]) == ("queued", [], True)
        assert response["metadata"] == {"k": "v"}
        record = await store.get("", response["id"])
        assert record is not None
        assert json.loads(record.response) == response
    assert backend.turns == []


async def test_background_response_continues_after_caller_is_cancelled() -> None:
    backend = GatedBackend()
    kit = ResponsesKit(backend)
    ids: list[str] = []

    async def ask() -> None:
        ids.append((await kit.service.submit(BACKGROUND))["id"])

    with anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            await ask()
            scope.cancel()
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
        await backend.half_sent.wait()
        backend.resume.set()
        for response_id in ids:
            assert (await read_final(kit, response_id))["status"] == "completed"


async def test_log_is_written_before_events_are_sent() -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    started = await kit.service.submit(BACKGROUND)
    received = b""
    with anyio.fail_after(BOUND):
        async with aclosing((await kit.service.follow(started["id"])).pieces()) as pieces:
            async for piece in pieces:
                received += piece
                log = await store.events("", started["id"], -1)
                assert log is not None
                assert b"".join(part.data for part in log).startswith(received)
                record = await store.get("", started["id"])
                assert record is not None
                status = json.loads(record.response)["status"]
                if b"response.in_progress" in piece:
                    assert status == "in_progress"
                    assert record.request == b""
                if b"event: response.completed" in received:
                    assert (record.final, status) == (True, "completed")
                if record.final:
                    assert b"event: response.completed" in b"".join(part.data for part in log)
                if b"half " in piece:
                    backend.resume.set()
    assert replay_stream(received) == await kit.retrieve(started["id"])


async def test_terminal_event_and_final_record_are_saved_atomically() -> None:
    steps: list[tuple[str, bool, list[str]]] = []

    class RecordingStore(MemoryStore):
        async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
            steps.append(("update", record.final, [] if log is None else kinds(log.data)))
            return await super().update(owner, record, log)

        async def append(self, owner: str, response_id: str, log: Log) -> bool:
            steps.append(("append", False, kinds(log.data)))
            return await super().append(owner, response_id, log)

    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=RecordingStore())
    started = await kit.service.submit(BACKGROUND)
    await read_final(kit, started["id"])
    assert steps[0] == ("append", False, ["created", "queued"])
    assert steps[1] == ("update", False, ["in_progress"])
    assert steps[-1] == ("update", True, ["completed"])
    assert all(name == "append" for name, _, _ in steps[2:-1])


def kinds(data: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in decode_events(data)]


async def test_leaving_background_stream_does_not_end_response() -> None:
    backend = GatedBackend()
    kit = ResponsesKit(backend)
    received: list[dict[str, Any]] = []
    with anyio.fail_after(BOUND):
        async with kit.stream(BACKGROUND) as events:
            async for event in events:
                received.append(event)
                if "delta" in event:
                    break
        assert not backend.closed.is_set()
        backend.resume.set()
        left = await read_final(kit, received[0]["response"]["id"])
        async with kit.stream(BACKGROUND) as events:
            whole = [event async for event in events]
    assert left["status"] == check_stream(whole)["status"] == "completed"


@pytest.mark.parametrize("ask", ["submit", "create", "stream"])
async def test_background_is_refused_with_store_false(ask: str) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    body = {**BACKGROUND, "store": False}
    with pytest.raises(errors.InvalidRequest, match="background") as caught:
        await (
            anext(stream_events(kit, body))
            if ask == "stream"
            else getattr(kit.service if ask == "submit" else kit, ask)(body)
        )
    assert caught.value.param == "background"
    assert len(store) == 0


async def test_invalid_background_request_stores_nothing() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    for body in ({"input": 1}, {"model": "other"}, {"previous_response_id": "resp_none"}, {"input": []}):
        with pytest.raises(errors.InvalidRequest):
            await kit.service.submit({**BACKGROUND, **body})
    assert len(store) == 0


@pytest.mark.parametrize("script", [["half ", LookupError("gone")], [LookupError("gone")], [object()]])
async def test_background_failure_is_recorded_logged_and_raised_by_wait(script: list[Any]) -> None:
    kit = ResponsesKit(ScriptedBackend(script))
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND), pytest.raises(errors.ModelError):
        await kit.wait(started["id"])
    response = await read_final(kit, started["id"])
    assert response["error"]["code"] == "model_error"
    assert response == await kit.retrieve(started["id"])


async def test_refused_admission_fails_background_response() -> None:
    class RefusingBackend(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            raise errors.TooManyRequests("All slots are taken.", retry_after=3)

    kit = ResponsesKit(RefusingBackend(["Hi"]))
    started = await kit.service.submit(BACKGROUND)
    assert (await read_final(kit, started["id"]))["error"]["code"] == "too_many_requests"
    with pytest.raises(errors.TooManyRequests):
        await kit.wait(started["id"])


async def test_oversize_log_fails_response_with_legal_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_MAX_LOG_BYTES", 5000)
    kit = ResponsesKit(ScriptedBackend(["word "] * 100))
    started = await kit.service.submit(BACKGROUND)
    response = await read_final(kit, started["id"])
    assert (response["status"], response["error"]["code"]) == ("failed", "store_error")
    assert response == await kit.retrieve(started["id"])
    assert response["output"][0]["content"][0]["text"].startswith("word word ")


async def test_oversize_response_leaves_nothing_in_progress() -> None:
    for words in (10, 60, 100, 1000):
        clock = Clock()
        store = MemoryStore(max_bytes=30_000)
        kit = ResponsesKit(ScriptedBackend(["word " * 20] * words), store=store, clock=clock)
        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            await kit.aclose(BOUND)
        (record,) = stored_records(store) or [None]
        if record is None:
            assert words > 60, "the record without its output would have fitted"
            continue
        assert record.final
        response = await kit.retrieve(started["id"])
        check_response(response)
        assert response["status"] == ("completed" if words == 10 else "failed")


async def test_wait_ends_for_unknown_or_deleted_response() -> None:
    kit = ResponsesKit(GatedBackend())
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        with pytest.raises(errors.NotFound):
            await kit.wait("resp_unknown")
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                try:  # the response is cancelled first and then deleted; either may be seen
                    turn_fields.append((await kit.wait(started["id"]))["status"])
                except errors.NotFound:
                    turn_fields.append("gone")

            turn_fields: list[str] = []
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await kit.delete(started["id"])
    assert turn_fields in (["gone"], ["cancelled"])


# Workers.


def create_workers(backend: Backend, *backends: Backend, store: MemoryStore | None = None, **settings: Any) -> Any:
    """Return a kit with a `QueueRunner`, the runner, and a worker kit on the same store for each further backend."""
    runner, store = QueueRunner(), MemoryStore() if store is None else store
    kit = ResponsesKit(backend, store=store, runner=runner, **settings)
    return kit, runner, [ResponsesKit(one, store=store, **settings) for one in backends]


async def test_worker_generates_response_from_owner_and_id() -> None:
    backend = ScriptedBackend(SCRIPT)
    kit, _, (worker,) = create_workers(ScriptedBackend(), backend)
    started = await kit.service.submit({**BACKGROUND, "metadata": {"k": "v"}}, owner="ann")
    with anyio.fail_after(BOUND):
        for owner, response_id in (("bob", started["id"]), ("ann", "resp_unknown"), ("", started["id"])):
            await worker.service.run_queued(owner, response_id)
        assert backend.turns == []
        await worker.service.run_queued("ann", started["id"])
    (turn,) = backend.turns
    assert (turn.owner, turn.response_id) == ("ann", started["id"])
    response = await read_final(kit, started["id"], owner="ann")
    assert response["status"] == "completed"
    unchanged = ("id", "created_at", "tools", "tool_choice", "metadata", "model", "background", "text", "store")
    assert {name: response[name] for name in unchanged} == {name: started[name] for name in unchanged}


@pytest.mark.parametrize("at_a_time", [False, True], ids=["at once", "one after the other"])
async def test_response_given_to_several_workers_is_generated_once(at_a_time: bool) -> None:
    for steps in range(0, 12, 1):
        backends = [ScriptedBackend(["made ", f"by {number}"]) for number in range(5)]
        store, clock = InterceptedStore(pass_with_checkpoints), Clock()
        kit, _, workers = create_workers(ScriptedBackend(), *backends, store=store, clock=clock)
        started = await kit.service.submit(BACKGROUND)
        with anyio.fail_after(BOUND):
            if at_a_time:
                for worker in workers:
                    await worker.service.run_queued("", started["id"])
            else:
                async with anyio.create_task_group() as group:
                    for number, worker in enumerate(workers):
                        group.start_soon(worker.service.run_queued, "", started["id"])
                        for _ in range(steps if number % 2 else 0):
                            await anyio.lowlevel.checkpoint()
            response = await read_final(kit, started["id"])
        assert response["status"] == "completed"
        assert sum(len(backend.turns) for backend in backends) == 1
        await check_records(store, clock)


async def test_worker_with_failing_store_leaves_response_to_its_holder() -> None:
    """Two workers read the response as queued; one claims it, and the other one's claim fails."""

    async def intercept(name: str, call: Call) -> Any:
        if name == "update" and workers[-1] == "second":
            raise OSError("the disk of secret-host is full")
        return await call()

    workers, store, clock = ["first"], InterceptedStore(intercept), Clock()
    one = GatedBackend()
    kit, _, (worker,) = create_workers(GatedBackend(), one, store=store, clock=clock)
    read, resume = anyio.Event(), anyio.Event()

    class BlockingStore(InterceptedStore):
        async def get(self, owner: str, response_id: str) -> Record | None:
            record = await store.get(owner, response_id)
            if not resume.is_set():
                read.set()
                await resume.wait()
            return record

    blocking_store = BlockingStore(intercept)
    shared = {name: value for name, value in vars(store).items() if name != "intercept"}
    vars(blocking_store).update(shared)
    other = ResponsesKit(GatedBackend(), store=blocking_store, clock=clock)
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(other.service.run_queued, "", started["id"])
            await read.wait()
            group.start_soon(worker.service.run_queued, "", started["id"])
            await one.half_sent.wait()
            workers.append("second")
            resume.set()
            await anyio.wait_all_tasks_blocked()
            workers.append("first")
            one.resume.set()
    assert (await read_final(kit, started["id"]))["status"] == "completed"
    await check_records(store, clock)


@pytest.mark.parametrize("cause", ["unknown model", "deleted previous response"])
async def test_worker_that_cannot_build_context_leaves_response_to_its_holder(cause: str) -> None:
    one, store, clock = GatedBackend(), MemoryStore(), Clock()
    kit, _, (worker,) = create_workers(GatedBackend(), one, store=store, clock=clock)
    read, resume = anyio.Event(), anyio.Event()

    class BlockingStore(MemoryStore):
        async def get(self, owner: str, response_id: str) -> Record | None:
            record = await super().get(owner, response_id)
            if not resume.is_set():
                read.set()
                await resume.wait()
            return record

    blocking_store = BlockingStore()
    vars(blocking_store).update(vars(store))
    first = await ResponsesKit(ScriptedBackend(["Hi"]), store=store).create({"input": "Hi"})
    backend = GatedBackend()
    if cause == "unknown model":
        backend.models = (Model("other"),)
    other = ResponsesKit(backend, store=blocking_store, clock=clock)
    started = await kit.service.submit({**BACKGROUND, "model": "gated", "previous_response_id": first["id"]})
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(other.service.run_queued, "", started["id"])
            await read.wait()
            group.start_soon(worker.service.run_queued, "", started["id"])
            await one.half_sent.wait()
            if cause == "deleted previous response":
                await store.delete("", first["id"])
            resume.set()
            await anyio.wait_all_tasks_blocked()
            one.resume.set()
    assert (await read_final(kit, started["id"]))["status"] == "completed"
    assert backend.turns == []


async def test_run_stopped_before_start_leaves_response_to_its_holder() -> None:
    store, clock, busy_backend, worker_backend = MemoryStore(), Clock(), GatedBackend(), GatedBackend()
    kit = ResponsesKit(busy_backend, store=store, clock=clock, runner=LocalRunner(max_concurrent=1))
    worker = ResponsesKit(worker_backend, store=store, clock=clock)
    with anyio.fail_after(BOUND):
        await kit.service.submit(BACKGROUND)
        await busy_backend.half_sent.wait()
        started = await kit.service.submit(BACKGROUND)
        async with anyio.create_task_group() as group:
            group.start_soon(worker.service.run_queued, "", started["id"])
            await worker_backend.half_sent.wait()
            await kit.aclose()
            worker_backend.resume.set()
    assert (await read_final(worker, started["id"]))["status"] == "completed"
    assert len(busy_backend.turns) == 1
    await check_records(store, clock)


async def test_worker_uses_promised_model() -> None:
    backends = [ScriptedBackend(["Hi"], models=names) for names in (["a", "b"], ["b", "a"])]
    kit, _, (worker,) = create_workers(*backends)
    started = await kit.service.submit({"input": "Hi", "background": True})
    assert started["model"] == "a"
    await worker.service.run_queued("", started["id"])
    assert (await read_final(kit, started["id"]))["model"] == "a"
    assert backends[1].turns[0].model == "a"


async def test_deleted_previous_response_fails_queued_response_with_legal_stream() -> None:
    backend = ScriptedBackend(["Hi"])
    kit, _, (worker,) = create_workers(ScriptedBackend(["Hi"]), backend)
    first = await kit.create({"input": "Hi"})
    started = await kit.service.submit({**BACKGROUND, "previous_response_id": first["id"]})
    await kit.delete(first["id"])
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    response = await read_final(kit, started["id"])
    assert (response["status"], response["error"]["code"]) == ("failed", "previous_response_not_found")
    assert response["previous_response_id"] == first["id"]
    assert backend.turns == []


async def test_worker_of_other_version_fails_unreadable_request() -> None:
    """A worker may run an older version during a rollout."""
    store, clock = MemoryStore(), Clock()
    kit, _, (worker,) = create_workers(ScriptedBackend(), ScriptedBackend(["Hi"]), store=store, clock=clock)
    for damaged in (b'{"tools": [{"type": 7}]}', b"no JSON at all"):
        started = await kit.service.submit(BACKGROUND)
        record = await store.get("", started["id"])
        assert record is not None
        entry = store._in_progress["", started["id"]]
        entry.record = type(record)(**{name: getattr(record, name) for name in Record.__slots__} | {"request": damaged})
        with anyio.fail_after(BOUND):
            await worker.service.run_queued("", started["id"])
        assert (await read_final(kit, started["id"]))["status"] == "failed"


async def test_stopping_worker_leaves_queued_responses() -> None:
    kit, _, (has_left, worker) = create_workers(ScriptedBackend(), ScriptedBackend(["no"]), ScriptedBackend(["Hi"]))
    await has_left.aclose()
    started = await kit.service.submit(BACKGROUND)
    with pytest.raises(errors.ServerError, match="shutting down"):
        await has_left.service.run_queued("", started["id"])
    assert (await kit.retrieve(started["id"]))["status"] == "queued"
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    assert (await read_final(kit, started["id"]))["status"] == "completed"


async def test_orphaned_response_is_not_started_again() -> None:
    clock = Clock()
    backend, second = GatedBackend(), ScriptedBackend(["again"], models=["gated"])
    kit, _, (worker, other) = create_workers(GatedBackend(), backend, second, clock=clock)
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(worker.service.run_queued, "", started["id"])
            await backend.half_sent.wait()
            await other.service.run_queued("", started["id"])
            assert second.turns == []
            assert (await kit.retrieve(started["id"]))["status"] == "in_progress"
            group.cancel_scope.cancel()
    assert (await read_final(kit, started["id"]))["status"] == "cancelled"


# The worker's turn equals the foreground turn.

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_parts = st.one_of(
    st.builds(lambda text: {"type": "input_text", "text": text}, _texts),
    st.sampled_from(
        [
            {"type": "input_image", "image_url": "https://example.org/cat.png", "detail": "low"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": None},
            {"type": "input_file", "filename": "a.txt", "file_data": "AA=="},
            {"type": "input_file", "file_url": "https://example.org/a.pdf"},
            {"type": "input_video", "video_url": "https://example.org/a.mp4"},
        ]
    ),
)
_ids = st.sampled_from([None, "", "msg_mine", "msg_" + "0" * 32, "msg_" + "1" * 32])
_items = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer"]), "content": _texts}, optional={"id": _ids}
    ),
    st.fixed_dictionaries(
        {"type": st.just("message"), "role": st.just("user"), "content": st.lists(_parts, max_size=2)},
        optional={"id": _ids, "status": st.sampled_from([None, "incomplete", "completed"])},
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.lists(
                st.sampled_from(
                    [
                        {"type": "output_text", "text": "Yes.", "annotations": None, "logprobs": None},
                        {"type": "refusal", "refusal": "No."},
                        {
                            "type": "output_text",
                            "text": "me",
                            "logprobs": [{"token": "me", "logprob": -0.5, "bytes": [109, 101], "top_logprobs": []}],
                            "annotations": [
                                {"type": "url_citation", "url": "u", "title": "t", "start_index": 0, "end_index": 1}
                            ],
                        },
                    ]
                ),
                max_size=2,
            ),
        },
        optional={"id": _ids, "phase": st.sampled_from([None, "commentary", "final_answer"])},
    ),
    st.just({"type": "function_call_output", "name": "f", "output": "unasked"}),
    st.fixed_dictionaries(
        {"type": st.just("reasoning")},
        optional={
            "summary": st.just([{"type": "summary_text", "text": "Hm."}]),
            "content": st.just([{"type": "reasoning_text", "text": "Hm."}]),
            "encrypted_content": st.none() | st.just("theirs"),
        },
    ),
    st.fixed_dictionaries({"type": st.just("acme:note"), "n": st.integers() | _texts | st.none()}),
    st.just({"type": "item_reference", "id": "EARLIER"}),
    st.just("EARLIER ITEM"),
)
_exchanges = st.builds(
    lambda call_id, output, ids: [
        {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{bad", "id": ids[0]},
        {"type": "function_call_output", "call_id": call_id, "output": output, "id": ids[1]},
    ],
    st.sampled_from(["call_1", "call_2", "x" * 64]),
    _texts | st.lists(_parts, max_size=1),
    st.tuples(_ids, _ids),
)
_inputs = st.lists(_exchanges | _items.map(lambda item: [item]), min_size=1, max_size=6).map(
    lambda groups: [item for group in groups for item in group]
)
_functions = st.fixed_dictionaries(
    {"type": st.just("function"), "name": st.sampled_from(["f", "g"])},
    optional={
        "description": st.none() | _texts,
        "parameters": st.none()
        | st.just({"type": "object", "properties": {"x": {"type": "number", "default": None}}, "required": ["x"]}),
        "strict": st.none() | st.booleans(),
    },
)
_choices = st.one_of(
    st.sampled_from(["none", "auto", "required"]),
    st.sampled_from([{"type": "function", "name": "f"}, {"type": "t:look"}, {"type": "t:look", "name": "look"}]),
    st.fixed_dictionaries(
        {"type": st.just("allowed_tools"), "tools": st.just([{"type": "function", "name": "f"}])},
        optional={"mode": st.sampled_from([None, "auto", "required", "none"])},
    ),
)
_schema = {"type": "object", "properties": {"schema": {"type": ["string", "null"], "default": None}}}
_requests = st.fixed_dictionaries(
    {"input": _texts | _inputs | st.none()},
    optional={
        "model": st.sampled_from([None, "able", "able", "plain"]),
        "previous_response_id": st.sampled_from([None, "PREVIOUS"]),
        "instructions": st.none() | _texts,
        "include": st.lists(
            st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs"]), max_size=2
        ),
        "tools": st.lists(
            st.one_of(_functions, st.just({"type": "t:look"}), st.just({"type": "namespace", "x": [1, None]})),
            max_size=3,
            unique_by=lambda tool: tool.get("name", tool["type"]),
        ),
        "tool_choice": _choices,
        "parallel_tool_calls": st.none() | st.booleans(),
        "max_tool_calls": st.none() | st.integers(1, 100),
        "text": st.fixed_dictionaries(
            {},
            optional={
                "format": st.sampled_from(
                    [
                        None,
                        {"type": "text"},
                        {"type": "json_object"},
                        {"type": "json_schema", "name": "n", "schema": _schema, "strict": True},
                        {"type": "json_schema", "name": "n", "description": None, "schema": _schema, "strict": None},
                        {"type": "json_schema"},
                    ]
                ),
                "verbosity": st.sampled_from([None, "low", "high"]),
            },
        ),
        "temperature": st.none() | st.floats(0, 2),
        "top_p": st.none() | st.floats(0, 1),
        "presence_penalty": st.none() | st.floats(-2, 2),
        "frequency_penalty": st.none() | st.floats(-2, 2),
        "max_output_tokens": st.none() | st.integers(16, 2**31 - 1),
        "top_logprobs": st.integers(0, 20),
        "reasoning": st.fixed_dictionaries(
            {},
            optional={
                "effort": st.sampled_from([None, "none", "xhigh"]),
                "summary": st.sampled_from([None, "auto", "concise"]),
            },
        ),
        "truncation": st.sampled_from(["auto", "disabled"]),
        "metadata": st.none() | st.dictionaries(_texts, _texts, max_size=3),
        "service_tier": st.sampled_from(["auto", "priority"]),
        "safety_identifier": st.none() | _texts,
        "prompt_cache_key": st.none() | _texts,
        "stream": st.booleans(),
        "client_metadata": st.just({"unknown": 1}),
    },
)


def canonical(value: Any) -> Any:
    """Return a value as JSON in which generated ids are replaced by their order, for comparison."""
    names: dict[str, str] = {}

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            if value.startswith("rk1."):
                return "encrypted"  # each encryption differs
            return names.setdefault(value, f"id {len(names)}") if is_id(value) else value
        if isinstance(value, dict):
            return {key: rename(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [rename(member) for member in value]
        return value.model_dump(mode="json") if hasattr(value, "model_dump") else value

    return rename(json.loads(json.dumps(value, default=lambda one: one.model_dump(mode="json"))))


def turn_fields(turn: Turn) -> Any:
    """Return all fields of a turn in canonical form."""
    return canonical({name: getattr(turn, name) for name in Turn.__dataclass_fields__})


def _lookup(place: str) -> str:
    return f"nothing at {place}"


async def _create_earlier(kit: ResponsesKit, backend: ScriptedBackend) -> dict[str, Any]:
    response = await kit.create({"input": "before", "include": ["reasoning.encrypted_content"], "model": "able"})
    backend.turns.clear()
    return response


def fill_in(body: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the ids of the earlier response filled in."""
    body = copy.deepcopy(body)
    if body.get("previous_response_id"):
        body["previous_response_id"] = earlier["id"]
    if isinstance(body["input"], list):
        body["input"] = [
            earlier["output"][0]
            if item == "EARLIER ITEM"
            else item | {"id": earlier["output"][1]["id"]}
            if item.get("id") == "EARLIER"
            else item
            for item in body["input"]
        ]
    # A chosen tool must be among the tools.
    for name, tool in (("f", {"type": "function", "name": "f"}), ("t:look", {"type": "t:look"})):
        if name in str(body.get("tool_choice")) and tool not in body.setdefault("tools", []):
            body["tools"] = [tool, *(other for other in body["tools"] if name not in other.values())]
    return body


@given(body=_requests, typed=st.booleans())
async def test_any_request_gives_worker_the_foreground_turn(body: dict[str, Any], typed: bool) -> None:
    def script(turn: Turn) -> list[Any]:
        calls = [outputs.ToolCall("f", '{"x": 1}')] if turn.callable_tools else []
        return [outputs.Reasoning("Hm."), *calls, "Yes."]

    capable = Model("able", vision=True, tools=True, reasoning=True, structured_output=True, logprobs=True)
    backends = [ScriptedBackend(script, models=[capable, Model("plain", temperature=0.3)]) for _ in range(2)]
    store, clock, secret = MemoryStore(), Clock(), "0123456789abcdef0123456789abcdef"
    tools = [HostedTool.from_function("t:look", _lookup, name="look")]
    kit, _, (worker,) = create_workers(*backends, store=store, clock=clock, tools=tools, secrets=[secret])
    body = fill_in(body, await _create_earlier(kit, backends[0]))
    try:
        await kit.create(body)
    except errors.APIError as error:
        refused = error
    foreground_turn = turn_fields(backends[0].turns[0]) if backends[0].turns else None
    if foreground_turn is None:
        with pytest.raises(type(refused)) as caught:
            await kit.service.submit({**body, "background": True})
        assert caught.value.payload() == refused.payload()
        return
    foreground = json.loads(stored_records(store)[-1].response)
    request: Any = {**body, "background": True}
    started = await kit.service.submit(CreateRequest.model_validate_json(json.dumps(request)) if typed else request)
    clock.now += 5
    queued = await store.get("", started["id"])
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    (turn, *_) = backends[1].turns
    assert turn_fields(turn) == foreground_turn
    final, record = await kit.retrieve(started["id"]), await store.get("", started["id"])
    assert queued is not None
    assert record is not None
    assert (turn.response_id, final["id"], final["created_at"]) == (started["id"], started["id"], started["created_at"])
    assert record.input == queued.input, "the input items or their ids have changed"
    sent_input = json.loads(record.input)
    assert [item["id"] for item in json.loads(json.dumps(item_ids(turn)))][-len(sent_input) or len(turn.items) :] == [
        item["id"] for item in sent_input
    ]
    ignored = {"id", "created_at", "completed_at", "background"}
    assert canonical({key: final[key] for key in final.keys() - ignored}) == canonical(
        {key: foreground[key] for key in foreground.keys() - ignored}
    )


def item_ids(turn: Turn) -> list[dict[str, str]]:
    return [{"id": item.id} for item in turn.items]


async def test_request_made_of_models_reaches_worker() -> None:
    from responses_kit.schema.request import JsonObject, TextOptions
    from responses_kit.schema.tools import AllowedTools, FunctionTool, NamedFunction

    backend = ScriptedBackend([outputs.ToolCall("f", "{}")])
    kit, _, (worker,) = create_workers(ScriptedBackend(), backend)
    request = CreateRequest(
        input="Hi",
        background=True,
        text=TextOptions(format=JsonObject()),
        tools=[FunctionTool(name="f")],
        tool_choice=AllowedTools(tools=[NamedFunction(name="f")], mode="required"),
    )
    started = await kit.service.submit(request)
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    response = await read_final(kit, started["id"])
    assert (response["status"], response["error"]) == ("completed", None)
    for name in ("text", "tools", "tool_choice"):
        assert response[name] == started[name]


@pytest.mark.parametrize("parameter", [{"x": float("nan")}, {"x": 2**70}, {"x": "\u2028"}, {"x": [None]}])
async def test_tool_with_odd_parameters_is_refused_or_reaches_worker(parameter: dict[str, Any]) -> None:
    backend = ScriptedBackend(["Hi"])
    kit, _, (worker,) = create_workers(ScriptedBackend(), backend)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "default": parameter}}
    try:
        started = await kit.service.submit({"input": "Hi", "background": True, "tools": [tool]})
    except errors.InvalidRequest:
        return
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    response = await read_final(kit, started["id"])
    assert response["status"] == "completed"
    assert response["tools"] == started["tools"]


async def test_worker_decrypts_reasoning_of_client() -> None:
    backend = ScriptedBackend(["Hi"])
    secret = "0123456789abcdef0123456789abcdef"
    kit, _, (worker,) = create_workers(ScriptedBackend([outputs.Reasoning("Deep."), "Yes."]), backend, secrets=[secret])
    first = await kit.create({"input": "Hi", "store": False, "include": ["reasoning.encrypted_content"]}, owner="ann")
    encrypted = {key: value for key, value in first["output"][0].items() if key != "content"}
    ask = {"role": "user", "content": "Go on."}
    started = await kit.service.submit({"input": [encrypted, ask], "background": True}, owner="ann")
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("ann", started["id"])
    assert backend.turns[0].items[0].text == "Deep."
    record = await kit.store.get("ann", started["id"])
    assert b"Deep." not in record.input + record.request + record.response


# Cancellation.

TARGETS = ["same kit", "another kit"]


async def try_cancel(kit: ResponsesKit, response_id: str) -> dict[str, Any] | None:
    """Cancel a response and return it, or None if it has already ended in another way."""
    try:
        return await kit.cancel(response_id)
    except errors.InvalidRequest as error:
        if (error.status, error.code) != (400, "response_already_ended"):
            raise
        return None


@pytest.mark.parametrize("target", TARGETS)
async def test_background_response_can_be_cancelled_at_any_moment(target: str) -> None:
    statuses = set()
    for steps in range(0, 60, 2):
        store, clock, backend = (
            InterceptedStore(pass_with_checkpoints),
            Clock(),
            ScriptedBackend(["one ", outputs.Reasoning("two")]),
        )
        kit = ResponsesKit(backend, store=store, clock=clock)
        other = kit if target == "same kit" else ResponsesKit(ScriptedBackend(), store=store, clock=clock)
        with anyio.fail_after(BOUND):
            started = await kit.service.submit({"input": "Hi", "background": True})
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            answer = await try_cancel(other, started["id"])
            response = await read_final(other, started["id"])
        assert response == await kit.retrieve(started["id"])
        assert response["status"] == ("completed" if answer is None else "cancelled")
        assert answer in (None, response)
        statuses.add(response["status"])
        await check_records(store, clock)
    if target == "same kit":
        assert statuses == {"cancelled", "completed"}, "the steps did not cover both endings"


async def test_cancellation_at_start_does_not_wait_for_lease() -> None:
    """The cancellation shortens the new lease and interrupts the claim's update of the store."""

    async def intercept(name: str, call: Call) -> Any:
        answer = await call()
        if name == "update" and not has_failed:
            has_failed.append(name)
            await MemoryStore.cancel(store, "", started["id"], clock.now + 2)
            kit.service.leases.find(("", started["id"])).cancel()
            await anyio.lowlevel.checkpoint()
        return answer

    has_failed: list[str] = []
    store, clock = InterceptedStore(intercept), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    started = await kit.service.submit(BACKGROUND)
    assert (await read_final(kit, started["id"]))["status"] == "cancelled"
    assert has_failed


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["background", "resumable", "streamed", "whole"])
async def test_cancelled_response_frees_slot_and_all_views_agree(kind: str, target: str) -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store, resumable=kind == "resumable")
    other = kit if target == "same kit" else ResponsesKit(ScriptedBackend(), store=store)
    client, run = EventClient(), None
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if kind == "background":
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            else:
                run = await kit.service.create_run(ASK, streamed=kind != "whole")
                response_id = run.id
                group.start_soon(run.execute, client.emit)
            await backend.half_sent.wait()
            answer = await other.cancel(response_id)
            with anyio.fail_after(1.0):
                await backend.closed.wait()
        assert await other.cancel(response_id) == answer, "cancelling is not idempotent"
    check_response(answer)
    assert (answer["status"], answer["completed_at"]) == ("cancelled", None)
    assert answer["output"][0]["content"][0]["text"] == "half "
    assert answer == await kit.retrieve(response_id)
    if run is not None:
        assert check_stream(client.events) == answer
        assert client.events[-1]["type"] == "response.incomplete"
    if kind != "streamed":
        assert await read_final(other, response_id) == answer
    assert backend.turns[0].cancelled


async def test_concurrent_cancellations_return_the_same() -> None:
    for steps in range(0, 24, 3):
        store, clock = InterceptedStore(pass_with_checkpoints), Clock()
        kit = ResponsesKit(ScriptedBackend(["one ", Pause(60)]), store=store, clock=clock)
        others = [ResponsesKit(ScriptedBackend(), store=store, clock=clock) for _ in range(3)]
        answers: list[Any] = []

        async def cancel(kit: ResponsesKit, response_id: str, answers: list[Any]) -> None:
            answers.append(await kit.cancel(response_id))

        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as group:
                for one in (kit, *others, kit, *others):
                    group.start_soon(cancel, one, started["id"], answers)
        response = await read_final(kit, started["id"])
        assert answers == [response] * 8
        await check_records(store, clock)


@pytest.mark.parametrize("script", [["Hi"], ["Hi", outputs.Finish("max_output_tokens")], [LookupError("gone")]])
async def test_cancel_refuses_finished_response(script: list[Any]) -> None:
    kit = ResponsesKit(ScriptedBackend(script))
    started = await kit.service.submit(BACKGROUND)
    response = await read_final(kit, started["id"])
    for _ in range(2):
        with pytest.raises(errors.InvalidRequest) as caught:
            await kit.cancel(started["id"])
        assert (caught.value.status, caught.value.code) == (400, "response_already_ended")
        assert response["status"] in caught.value.message
    assert await kit.retrieve(started["id"]) == response
    assert await read_final(kit, started["id"]) == response


async def test_cancel_raises_not_found_for_unknown_and_foreign_ids() -> None:
    backend = GatedBackend()
    kit = ResponsesKit(backend)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(BACKGROUND, owner="ann")
        await backend.half_sent.wait()
        payloads = []
        for response_id, owner in ((started["id"], "bob"), (started["id"], ""), ("resp_unknown", "ann")):
            for method in (kit.cancel, kit.delete):
                with pytest.raises(errors.NotFound) as caught:
                    await method(response_id, owner=owner)
                payloads.append(caught.value.payload())
        assert all(payload == payloads[0] for payload in payloads)
        backend.resume.set()
        assert (await read_final(kit, started["id"], owner="ann"))["status"] == "completed"


async def test_queued_response_is_cancelled_without_worker() -> None:
    backend = ScriptedBackend(["Hi"])
    kit, _, (worker,) = create_workers(ScriptedBackend(), backend)
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        assert (await worker.cancel(started["id"]))["status"] == "cancelled"
        await worker.service.run_queued("", started["id"])
    assert (await read_final(kit, started["id"]))["status"] == "cancelled"
    assert backend.turns == []


async def test_cancellation_racing_with_worker_ends_response_once() -> None:
    for steps in range(0, 40, 2):
        backend, store, clock = ScriptedBackend(["Hi"]), InterceptedStore(pass_with_checkpoints), Clock()
        kit, _, (worker,) = create_workers(ScriptedBackend(), backend, store=store, clock=clock)
        started = await kit.service.submit(BACKGROUND)
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(worker.service.run_queued, "", started["id"])
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                answer = await try_cancel(kit, started["id"])
            response = await read_final(kit, started["id"])
        assert response["status"] == ("completed" if answer is None else "cancelled")
        assert answer in (None, response)
        await check_records(store, clock)


@pytest.mark.parametrize("target", TARGETS)
async def test_deleting_running_response_ends_it(target: str) -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    other = kit if target == "same kit" else ResponsesKit(ScriptedBackend(), store=store)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(BACKGROUND)
        await backend.half_sent.wait()
        assert (await other.delete(started["id"]))["deleted"] is True
        await backend.closed.wait()
        with pytest.raises(errors.NotFound):
            await other.delete(started["id"])
        await kit.aclose()
    assert len(store) == 0


async def test_response_of_hanging_worker_is_ended_after_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead or hanging worker does not confirm the cancellation."""
    monkeypatch.setattr(kit_module, "_CANCEL_TIMEOUT", 0.05)
    store = MemoryStore()
    kit = ResponsesKit(GatedBackend(), store=store)
    run = await kit.service.create_run(ASK)  # not executed before the cancellation
    other = ResponsesKit(ScriptedBackend(), store=store)
    with anyio.fail_after(BOUND):
        assert (await other.cancel(run.id))["status"] == "cancelled"
        client = EventClient()
        await run.execute(client.emit)
    assert (await kit.retrieve(run.id))["status"] == "cancelled"


# Idempotency keys.


@pytest.mark.parametrize("background", [False, True])
async def test_twenty_concurrent_requests_with_one_key_generate_once(background: bool) -> None:
    backend, store, clock = ScriptedBackend(SCRIPT), InterceptedStore(pass_with_checkpoints), Clock()
    kits = [ResponsesKit(backend, store=store, clock=clock) for _ in range(4)]
    answers: list[dict[str, Any]] = []
    streams: list[bytes] = []

    async def ask(number: int) -> None:
        kit = kits[number % 4]
        started = await kit.service.submit({**ASK, "background": background}, key="key")
        check_response(started)
        if number % 2:
            streams.append(await read_stream(kit, started["id"]))
        answers.append(await kit.wait(started["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, number)
        await ask(0)
    assert len(backend.turns) == 1
    assert answers == [answers[0]] * 21
    assert len(set(streams)) == 1
    assert replay_stream(streams[0]) == answers[0]
    assert len(store) == 1


@pytest.mark.parametrize("background", [False, True])
async def test_key_of_other_request_is_refused_ignoring_unknown_fields(
    background: bool,
) -> None:
    backend = ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend)
    first = await kit.service.submit({**ASK, "background": background}, key="key")
    again = await kit.service.submit(
        {**ASK, "background": background, "client_metadata": {"n": 1}, "top_p": None}, key="key"
    )
    assert again["id"] == first["id"]
    others = [{"input": "Other"}, {"metadata": {"k": "v"}}, {"background": not background}, {"temperature": 0.0}]
    for other in others:
        with pytest.raises(errors.IdempotencyKeyReused):
            await kit.service.submit({**ASK, "background": background, **other}, key="key")
    assert (await read_final(kit, first["id"]))["status"] == "completed"
    assert len(backend.turns) == 1


async def test_keys_are_scoped_to_owner() -> None:
    backend = ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend)
    started = [await kit.service.submit(ASK, owner=owner, key="key") for owner in ("ann", "bob", "")]
    assert len({response["id"] for response in started}) == 3
    for owner, response in zip(("ann", "bob", ""), started, strict=True):
        assert (await read_final(kit, response["id"], owner=owner))["status"] == "completed"
    with pytest.raises(errors.IdempotencyKeyReused):
        await kit.service.submit({"input": "Other"}, owner="ann", key="key")


@pytest.mark.parametrize("background", [False, True])
async def test_request_with_key_can_be_repeated_after_disconnect_at_any_moment(background: bool) -> None:
    for steps in range(30):
        backend, store, clock = ScriptedBackend(["Hi"]), InterceptedStore(pass_with_checkpoints), Clock()
        kit = ResponsesKit(backend, store=store, clock=clock)
        body = {**ASK, "background": background}
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:

                async def ask(kit: ResponsesKit, body: dict[str, Any]) -> None:
                    await kit.service.submit(body, key="key")

                group.start_soon(ask, kit, body)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            again = await kit.service.submit(body, key="key")
            response = await kit.wait(again["id"])
        assert response["status"] == "completed", f"left after {steps} steps"
        assert len(store) == 1
        assert len(backend.turns) == 1
        await check_records(store, clock)


async def test_failed_response_is_returned_for_its_key() -> None:
    backend = ScriptedBackend([LookupError("gone")], ["Hi"])
    kit = ResponsesKit(backend)
    first = await kit.service.submit(ASK, key="key")
    with pytest.raises(errors.ModelError) as caught:
        await kit.wait(first["id"])
    again = await kit.service.submit(ASK, key="key")
    assert (again["id"], again["status"]) == (first["id"], "failed")
    with pytest.raises(errors.ModelError) as repeated:
        await kit.wait(again["id"])
    assert repeated.value.payload() == caught.value.payload()
    assert len(backend.turns) == 1


async def test_refused_request_leaves_key_unused() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    with pytest.raises(errors.InvalidRequest):
        await kit.service.submit({"input": "Hi", "model": "other"}, key="key")
    started = await kit.service.submit(ASK, key="key")
    assert (await read_final(kit, started["id"]))["status"] == "completed"


@pytest.mark.parametrize("background", [False, True])
async def test_refused_admission_leaves_key_unused_or_failure_recorded(background: bool) -> None:
    class RefusingOnce(ScriptedBackend):
        refused = False

        async def admit(self, turn: Turn) -> None:
            if not self.refused:
                self.refused = True
                raise errors.TooManyRequests("All slots are taken.")

    kit = ResponsesKit(RefusingOnce(["Hi"]))
    body = {**ASK, "background": background}
    try:
        await read_final(kit, (await kit.service.submit(body, key="key"))["id"])
    except errors.TooManyRequests:
        assert not background
    again = await kit.service.submit(body, key="key")
    assert (await read_final(kit, again["id"]))["status"] == ("failed" if background else "completed")


async def test_deleting_response_frees_its_key() -> None:
    backend = ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend)
    first = await kit.service.submit(ASK, key="key")
    await read_final(kit, first["id"])
    await kit.delete(first["id"])
    second = await kit.service.submit({"input": "Other"}, key="key")
    assert second["id"] != first["id"]
    assert (await read_final(kit, second["id"]))["status"] == "completed"
    assert len(backend.turns) == 2


async def test_key_is_refused_with_store_false() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    with pytest.raises(errors.UnsupportedParameter) as caught:
        await kit.service.submit({"input": "Hi", "store": False}, key="key")
    assert caught.value.param == "store"
    assert "Idempotency-Key" in caught.value.message


async def test_response_with_key_can_be_continued_and_cancelled() -> None:
    backend = GatedBackend()
    kit = ResponsesKit(backend)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(ASK, key="key")
        assert (started["status"], started["background"]) == ("in_progress", False)
        await backend.half_sent.wait()
        assert (await kit.cancel(started["id"]))["status"] == "cancelled"
        again = await kit.service.submit(ASK, key="key")
    assert (again["id"], again["status"]) == (started["id"], "cancelled")


# Failing stores.


@pytest.mark.parametrize("fails_after_work", [False, True], ids=["before work", "after work"])
@pytest.mark.parametrize("target", ["here", "elsewhere"])
@pytest.mark.parametrize("times", [1, 2])
async def test_store_failure_at_any_call_leaves_nothing_in_progress(
    target: str, fails_after_work: bool, times: int
) -> None:
    for nth in range(100):
        failing, clock, runner = (
            StoreFailure(nth, fails_after_work=fails_after_work, times=times),
            Clock(),
            QueueRunner(),
        )
        store = InterceptedStore(failing)
        backend = ScriptedBackend(["one ", outputs.Reasoning("two")])
        kit = ResponsesKit(backend, store=store, clock=clock, runner=None if target == "here" else runner)
        started = None
        with anyio.fail_after(BOUND):
            try:
                started = await kit.service.submit({"input": "Hi", "background": True}, key="key")
                for job in runner.jobs:
                    await kit.service.run_queued(*job)
            except errors.StoreError:
                assert target == "elsewhere" or started is None
            await kit.aclose(BOUND)
        has_failed = failing.stop_failing()
        assert len(backend.turns) <= 1
        responses = await check_records(store, clock)
        if not has_failed:
            assert [response["status"] for response in responses] == ["completed"]
            break
    else:
        pytest.fail("the store was called without end")
    assert nth > 5


@pytest.mark.parametrize("fails_after_work", [False, True], ids=["before work", "after work"])
async def test_store_failure_during_cancellation_leaves_nothing_in_progress(
    fails_after_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "_CHECK_INTERVAL", 60.0)  # count no calls of the lease renewer
    monkeypatch.setattr(kit_module, "_CANCEL_TIMEOUT", 0.05)
    for nth in range(100):
        failing, clock, backend = StoreFailure(1000, fails_after_work=fails_after_work), Clock(), GatedBackend()
        store = InterceptedStore(failing)
        kit = ResponsesKit(backend, store=store, clock=clock)
        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            await backend.half_sent.wait()
            failing.failing_calls = range(failing.count + nth, failing.count + nth + 1)
            try:
                await kit.cancel(started["id"])
            except (errors.StoreError, errors.NotFound):  # a record that could not be made final is deleted
                await anyio.wait_all_tasks_blocked()
            has_failed = failing.stop_failing()
            if not backend.closed.is_set():
                assert (await kit.cancel(started["id"]))["status"] == "cancelled"
            await backend.closed.wait()
            await kit.aclose()
        responses = await check_records(store, clock)
        assert [response["status"] for response in responses] in (["cancelled"], [])
        if not has_failed:
            break
    else:
        pytest.fail("the store was called without end")
    assert nth > 3


# Property tests.

_OPERATIONS = [
    "cancel here",
    "cancel there",
    "delete there",
    "follow here",
    "follow there",
    "clock",
    "work",
    "close",
    "leave",
    "fail",
    "fail late",
]


@pytest.mark.timeout(300)
@given(
    kind=st.sampled_from(["here", "elsewhere", "keyed", "resumable", "streamed"]),
    operations=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(_OPERATIONS)), max_size=6),
)
async def test_response_ends_once_under_any_concurrent_operations(kind: str, operations: list[tuple[int, str]]) -> None:
    script = ["one ", outputs.Reasoning("two"), outputs.ToolCall("f"), "three"]
    failing, clock, runner, client = StoreFailure(10**9, fails_after_work=False), Clock(), QueueRunner(), EventClient()

    async def intercept(name: str, call: Call) -> Any:
        await anyio.lowlevel.checkpoint()
        answer = await failing(name, call)
        await anyio.lowlevel.checkpoint()
        return answer

    store, backends = InterceptedStore(intercept), [ScriptedBackend(script) for _ in range(2)]
    here = ResponsesKit(
        backends[0],
        store=store,
        clock=clock,
        resumable=kind == "resumable",
        runner=runner if kind == "elsewhere" else None,
    )
    there = ResponsesKit(backends[1], store=store, clock=clock)
    received: list[bytes] = []
    failed = has_expired = has_left = False
    run = None

    async def attempt(action: Callable[..., Awaitable[Any]], *args: Any) -> None:
        try:
            await action(*args)
        except (errors.NotFound, errors.ServerError, errors.EventsUnavailable):
            pass
        except errors.InvalidRequest as error:
            if error.code != "response_already_ended":
                raise

    async def receive(kit: ResponsesKit) -> None:
        follower = await kit.service.follow(response_id)
        received.append(b"")
        number = len(received) - 1
        async with aclosing(follower.pieces()) as pieces:
            async for piece in pieces:
                received[number] += piece

    with anyio.fail_after(BOUND):
        if kind in ("resumable", "streamed"):
            run = await here.service.create_run(ASK, streamed=True)
            response_id = run.id
        else:
            body = {**ASK, "background": kind != "keyed"}
            response_id = (await here.service.submit(body, key="key" if kind == "keyed" else None))["id"]
        async with anyio.create_task_group() as group:
            if run is not None:
                group.start_soon(run.execute, client.emit)
            if kind == "elsewhere":
                group.start_soon(attempt, here.service.run_queued, "", response_id)
            for steps, operation in operations:
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                kit = here if operation.endswith("here") else there
                if operation == "clock":
                    has_expired = True
                    clock.now += 1000
                    group.start_soon(attempt, there.service.repository.sweep)
                elif operation == "work":
                    group.start_soon(attempt, there.service.run_queued, "", response_id)
                elif operation == "close":
                    group.start_soon(here.aclose)
                elif operation == "leave":
                    has_left = True
                    if run is not None:
                        run.abort()
                elif operation.startswith("fail"):
                    failing.fails_after_work = operation == "fail late"
                    failed, failing.failing_calls = True, range(failing.count, failing.count + 1)
                elif operation.startswith("follow"):
                    group.start_soon(attempt, receive, kit)
                else:
                    group.start_soon(attempt, getattr(kit, operation.split()[0]), response_id)
            for _ in range(500):
                await anyio.lowlevel.checkpoint()
            failing.stop_failing()
            while not all(record.final for record in stored_records(store)):  # its lease has to expire
                has_expired = True
                clock.now += 1000
                await there.service.repository.sweep()
                await anyio.sleep(0.005)  # let a worker retry its claim
        await here.aclose(BOUND)
        await there.aclose(BOUND)
    responses = await check_records(store, clock)
    assert len(responses) <= 1
    assert sum(len(backend.turns) for backend in backends) <= 1
    if run is not None and not has_left:
        last_sent = check_replay(client.events)
        if responses and not failed and (kind == "resumable" or not has_expired):
            assert responses == [last_sent]
    whole = b""
    if responses and kind != "streamed":
        whole = await read_stream(there, response_id)
    for stream in received:
        if (failed or not backends[0].turns) and decode_events(stream)[-1]["type"] == "error":
            assert "close" in [operation for _, operation in operations]
            continue  # this server shut down first; the stream can be resumed on another one
        last = check_replay(decode_events(stream))
        if whole and not failed:
            assert stream == whole
        assert last["status"] in ("completed", "cancelled", "failed")
