"""Responses that go on by themselves: worked on here or elsewhere, cancelled, asked for twice, ended in time."""

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
from responses_kit.engine import repository as records_module
from responses_kit.kit import kit as kit_module
from responses_kit.protocol.ids import is_id
from responses_kit.protocol.sse import decode_events
from responses_kit.runners.base import LocalRunner
from responses_kit.schema.request import CreateRequest
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import Pause, ScriptedBackend

from ..engine.test_repository import ASK, SCRIPT, Gated, ended, rebuilt, told
from ..engine.test_run import BOUND, Audience, Call, Clock, Failing, Watched, check_kept, check_order, slow
from ..runners.test_runners import Elsewhere
from ..support.conformance import check_response, check_stream
from ..support.memory import kept

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(30)]

BACKGROUND = {**ASK, "background": True}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Whoever looks again and again does so soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "_POLL_SECONDS", (0.002, 0.01))
        patch.setattr(leases_module, "_LOOK_SECONDS", 0.005)
        patch.setattr(kit_module, "_CANCEL_POLL_INTERVAL", 0.002)
        patch.setattr(kit_module, "_CANCEL_TIMEOUT", 0.5)
        yield


async def aiter_of(kit: ResponsesKit, body: Any) -> AsyncIterator[Any]:
    async with kit.stream(body) as events:
        async for event in events:
            yield event


# Begun and left alone.


async def test_it_answers_at_once_that_the_response_is_queued() -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=Elsewhere())
    for ask in (kit.service.submit, kit.create):
        response = await ask({**BACKGROUND, "metadata": {"k": "v"}})
        check_response(response)
        assert (response["status"], response["output"], response["background"]) == ("queued", [], True)
        assert response["metadata"] == {"k": "v"}
        record = await store.get("", response["id"])
        assert record is not None
        assert json.loads(record.response) == response
    assert backend.turns == []


async def test_it_goes_on_after_whoever_asked_has_gone() -> None:
    backend = Gated()
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
        await backend.half.wait()
        backend.goes_on.set()
        for response_id in ids:
            assert (await ended(kit, response_id))["status"] == "completed"


async def test_its_record_says_where_it_stands_and_its_log_is_ahead_of_all_who_are_told() -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    started = await kit.service.submit(BACKGROUND)
    heard = b""
    with anyio.fail_after(BOUND):
        async with aclosing((await kit.service.follow(started["id"])).pieces()) as pieces:
            async for piece in pieces:
                heard += piece
                log = await store.events("", started["id"], -1)
                assert log is not None
                assert b"".join(part.data for part in log).startswith(heard)
                record = await store.get("", started["id"])
                assert record is not None
                status = json.loads(record.response)["status"]
                if b"response.in_progress" in piece:
                    assert status == "in_progress"
                    assert record.request == b""
                if b"event: response.completed" in heard:
                    assert (record.final, status) == (True, "completed")
                if record.final:
                    assert b"event: response.completed" in b"".join(part.data for part in log)
                if b"half " in piece:
                    backend.goes_on.set()
    assert rebuilt(heard) == await kit.retrieve(started["id"])


async def test_the_end_is_in_the_log_and_on_record_in_one_step() -> None:
    steps: list[tuple[str, bool, list[str]]] = []

    class Noting(MemoryStore):
        async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
            steps.append(("update", record.final, [] if log is None else kinds(log.data)))
            return await super().update(owner, record, log)

        async def append(self, owner: str, response_id: str, log: Log) -> bool:
            steps.append(("append", False, kinds(log.data)))
            return await super().append(owner, response_id, log)

    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=Noting())
    started = await kit.service.submit(BACKGROUND)
    await ended(kit, started["id"])
    assert steps[0] == ("append", False, ["created", "queued"])
    assert steps[1] == ("update", False, ["in_progress"])
    assert steps[-1] == ("update", True, ["completed"])
    assert all(name == "append" for name, _, _ in steps[2:-1])


def kinds(data: bytes) -> list[str]:
    return [event["type"].removeprefix("response.") for event in decode_events(data)]


async def test_a_stream_of_it_is_told_like_any_other_and_leaving_it_does_not_end_it() -> None:
    backend = Gated()
    kit = ResponsesKit(backend)
    heard: list[dict[str, Any]] = []
    with anyio.fail_after(BOUND):
        async with kit.stream(BACKGROUND) as events:
            async for event in events:
                heard.append(event)
                if "delta" in event:
                    break
        assert not backend.closed.is_set()
        backend.goes_on.set()
        left = await ended(kit, heard[0]["response"]["id"])
        async with kit.stream(BACKGROUND) as events:
            whole = [event async for event in events]
    assert left["status"] == check_stream(whole)["status"] == "completed"


@pytest.mark.parametrize("ask", ["submit", "create", "stream"])
async def test_what_is_not_to_be_stored_cannot_be_in_the_background(ask: str) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    body = {**BACKGROUND, "store": False}
    with pytest.raises(errors.InvalidRequest, match="background") as caught:
        await (
            anext(aiter_of(kit, body))
            if ask == "stream"
            else getattr(kit.service if ask == "submit" else kit, ask)(body)
        )
    assert caught.value.param == "background"
    assert len(store) == 0


async def test_what_is_no_request_is_refused_at_once_and_leaves_nothing() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    for body in ({"input": 1}, {"model": "other"}, {"previous_response_id": "resp_none"}, {"input": []}):
        with pytest.raises(errors.InvalidRequest):
            await kit.service.submit({**BACKGROUND, **body})
    assert len(store) == 0


@pytest.mark.parametrize("script", [["half ", LookupError("gone")], [LookupError("gone")], [object()]])
async def test_a_failure_is_on_record_in_the_log_and_raised_for_who_waits(script: list[Any]) -> None:
    kit = ResponsesKit(ScriptedBackend(script))
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND), pytest.raises(errors.ModelError):
        await kit.wait(started["id"])
    response = await ended(kit, started["id"])
    assert response["error"]["code"] == "model_error"
    assert response == await kit.retrieve(started["id"])


async def test_a_backend_that_does_not_admit_it_fails_it() -> None:
    class Picky(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            raise errors.TooManyRequests("All slots are taken.", retry_after=3)

    kit = ResponsesKit(Picky(["Hi"]))
    started = await kit.service.submit(BACKGROUND)
    assert (await ended(kit, started["id"]))["error"]["code"] == "too_many_requests"
    with pytest.raises(errors.TooManyRequests):
        await kit.wait(started["id"])


async def test_a_response_with_more_events_than_are_kept_fails_and_its_log_ends_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_LARGEST_LOG", 5000)
    kit = ResponsesKit(ScriptedBackend(["word "] * 100))
    started = await kit.service.submit(BACKGROUND)
    response = await ended(kit, started["id"])
    assert (response["status"], response["error"]["code"]) == ("failed", "store_error")
    assert response == await kit.retrieve(started["id"])
    assert response["output"][0]["content"][0]["text"].startswith("word word ")


async def test_a_response_that_outgrows_the_store_leaves_nothing_in_progress() -> None:
    for words in (10, 60, 100, 1000):
        clock = Clock()
        store = MemoryStore(max_bytes=30_000)
        kit = ResponsesKit(ScriptedBackend(["word " * 20] * words), store=store, clock=clock)
        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            await kit.aclose(BOUND)
        (record,) = kept(store) or [None]
        if record is None:
            assert words > 60, "the record alone had room enough"
            continue
        assert record.final
        response = await kit.retrieve(started["id"])
        check_response(response)
        assert response["status"] == ("completed" if words == 10 else "failed")


async def test_waiting_for_an_unknown_or_a_deleted_response_ends() -> None:
    kit = ResponsesKit(Gated())
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        with pytest.raises(errors.NotFound):
            await kit.wait("resp_unknown")
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                try:  # cancelled first, then gone: either may be seen
                    seen.append((await kit.wait(started["id"]))["status"])
                except errors.NotFound:
                    seen.append("gone")

            seen: list[str] = []
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await kit.delete(started["id"])
    assert seen in (["gone"], ["cancelled"])


# Worked on elsewhere.


def elsewhere(backend: Backend, *backends: Backend, store: MemoryStore | None = None, **settings: Any) -> Any:
    """A kit whose runner does nothing by itself, that runner, and kits on the same store as its workers."""
    runner, store = Elsewhere(), MemoryStore() if store is None else store
    kit = ResponsesKit(backend, store=store, runner=runner, **settings)
    return kit, runner, [ResponsesKit(one, store=store, **settings) for one in backends]


async def test_a_worker_that_is_given_an_owner_and_an_id_makes_the_response() -> None:
    backend = ScriptedBackend(SCRIPT)
    kit, _, (worker,) = elsewhere(ScriptedBackend(), backend)
    started = await kit.service.submit({**BACKGROUND, "metadata": {"k": "v"}}, owner="ann")
    with anyio.fail_after(BOUND):
        for owner, response_id in (("bob", started["id"]), ("ann", "resp_unknown"), ("", started["id"])):
            await worker.service.run_queued(owner, response_id)
        assert backend.turns == []
        await worker.service.run_queued("ann", started["id"])
    (turn,) = backend.turns
    assert (turn.owner, turn.response_id) == ("ann", started["id"])
    response = await ended(kit, started["id"], owner="ann")
    assert response["status"] == "completed"
    unchanged = ("id", "created_at", "tools", "tool_choice", "metadata", "model", "background", "text", "store")
    assert {name: response[name] for name in unchanged} == {name: started[name] for name in unchanged}


@pytest.mark.parametrize("at_a_time", [False, True], ids=["at once", "one after the other"])
async def test_a_response_that_is_given_to_several_workers_is_made_once(at_a_time: bool) -> None:
    for steps in range(0, 12, 1):
        backends = [ScriptedBackend(["made ", f"by {number}"]) for number in range(5)]
        store, clock = Watched(slow), Clock()
        kit, _, workers = elsewhere(ScriptedBackend(), *backends, store=store, clock=clock)
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
            response = await ended(kit, started["id"])
        assert response["status"] == "completed"
        assert sum(len(backend.turns) for backend in backends) == 1
        await check_kept(store, clock)


async def test_a_worker_whose_store_fails_leaves_the_response_to_the_one_who_has_it() -> None:
    """Both have read it as queued; one begins; the other fails to."""

    async def around(name: str, call: Call) -> Any:
        if name == "update" and who[-1] == "second":
            raise OSError("the disk of secret-host is full")
        return await call()

    who, store, clock = ["first"], Watched(around), Clock()
    one = Gated()
    kit, _, (worker,) = elsewhere(Gated(), one, store=store, clock=clock)
    read, go = anyio.Event(), anyio.Event()

    class Waiting(Watched):
        async def get(self, owner: str, response_id: str) -> Record | None:
            record = await store.get(owner, response_id)
            if not go.is_set():
                read.set()
                await go.wait()
            return record

    waiting = Waiting(around)
    shared = {name: value for name, value in vars(store).items() if name != "around"}
    vars(waiting).update(shared)
    other = ResponsesKit(Gated(), store=waiting, clock=clock)
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(other.service.run_queued, "", started["id"])
            await read.wait()
            group.start_soon(worker.service.run_queued, "", started["id"])
            await one.half.wait()
            who.append("second")
            go.set()
            await anyio.wait_all_tasks_blocked()
            who.append("first")
            one.goes_on.set()
    assert (await ended(kit, started["id"]))["status"] == "completed"
    await check_kept(store, clock)


@pytest.mark.parametrize("unable", ["the model is unknown", "the previous response is gone"])
async def test_a_worker_that_cannot_make_it_leaves_the_response_to_the_one_who_has_it(unable: str) -> None:
    one, store, clock = Gated(), MemoryStore(), Clock()
    kit, _, (worker,) = elsewhere(Gated(), one, store=store, clock=clock)
    read, go = anyio.Event(), anyio.Event()

    class Waiting(MemoryStore):
        async def get(self, owner: str, response_id: str) -> Record | None:
            record = await super().get(owner, response_id)
            if not go.is_set():
                read.set()
                await go.wait()
            return record

    waiting = Waiting()
    vars(waiting).update(vars(store))
    first = await ResponsesKit(ScriptedBackend(["Hi"]), store=store).create({"input": "Hi"})
    backend = Gated()
    if unable == "the model is unknown":
        backend.models = (Model("other"),)
    other = ResponsesKit(backend, store=waiting, clock=clock)
    started = await kit.service.submit({**BACKGROUND, "model": "gated", "previous_response_id": first["id"]})
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(other.service.run_queued, "", started["id"])
            await read.wait()
            group.start_soon(worker.service.run_queued, "", started["id"])
            await one.half.wait()
            if unable == "the previous response is gone":
                await store.delete("", first["id"])
            go.set()
            await anyio.wait_all_tasks_blocked()
            one.goes_on.set()
    assert (await ended(kit, started["id"]))["status"] == "completed"
    assert backend.turns == []


async def test_a_run_that_is_stopped_before_it_began_leaves_the_response_to_the_one_who_has_it() -> None:
    store, clock, waiting, working = MemoryStore(), Clock(), Gated(), Gated()
    here = ResponsesKit(waiting, store=store, clock=clock, runner=LocalRunner(max_concurrent=1))
    there = ResponsesKit(working, store=store, clock=clock)
    with anyio.fail_after(BOUND):
        await here.service.submit(BACKGROUND)
        await waiting.half.wait()
        started = await here.service.submit(BACKGROUND)
        async with anyio.create_task_group() as group:
            group.start_soon(there.service.run_queued, "", started["id"])
            await working.half.wait()
            await here.aclose()
            working.goes_on.set()
    assert (await ended(there, started["id"]))["status"] == "completed"
    assert len(waiting.turns) == 1
    await check_kept(store, clock)


async def test_a_worker_asks_the_model_that_was_promised() -> None:
    backends = [ScriptedBackend(["Hi"], models=names) for names in (["a", "b"], ["b", "a"])]
    kit, _, (worker,) = elsewhere(*backends)
    started = await kit.service.submit({"input": "Hi", "background": True})
    assert started["model"] == "a"
    await worker.service.run_queued("", started["id"])
    assert (await ended(kit, started["id"]))["model"] == "a"
    assert backends[1].turns[0].model == "a"


async def test_a_previous_response_that_went_while_it_waited_fails_it_with_a_legal_stream() -> None:
    backend = ScriptedBackend(["Hi"])
    kit, _, (worker,) = elsewhere(ScriptedBackend(["Hi"]), backend)
    first = await kit.create({"input": "Hi"})
    started = await kit.service.submit({**BACKGROUND, "previous_response_id": first["id"]})
    await kit.delete(first["id"])
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    response = await ended(kit, started["id"])
    assert (response["status"], response["error"]["code"]) == ("failed", "previous_response_not_found")
    assert response["previous_response_id"] == first["id"]
    assert backend.turns == []


async def test_a_worker_of_another_make_fails_what_it_cannot_read_rather_than_leave_it() -> None:
    """Such as one of an older version, in the middle of a rollout."""
    store, clock = MemoryStore(), Clock()
    kit, _, (worker,) = elsewhere(ScriptedBackend(), ScriptedBackend(["Hi"]), store=store, clock=clock)
    for rubbish in (b'{"tools": [{"type": 7}]}', b"no JSON at all"):
        started = await kit.service.submit(BACKGROUND)
        record = await store.get("", started["id"])
        assert record is not None
        entry = store._live["", started["id"]]
        entry.record = type(record)(**{name: getattr(record, name) for name in Record.__slots__} | {"request": rubbish})
        with anyio.fail_after(BOUND):
            await worker.service.run_queued("", started["id"])
        assert (await ended(kit, started["id"]))["status"] == "failed"


async def test_a_worker_that_goes_down_leaves_what_is_queued_to_others() -> None:
    kit, _, (gone, worker) = elsewhere(ScriptedBackend(), ScriptedBackend(["no"]), ScriptedBackend(["Hi"]))
    await gone.aclose()
    started = await kit.service.submit(BACKGROUND)
    with pytest.raises(errors.ServerError, match="shutting down"):
        await gone.service.run_queued("", started["id"])
    assert (await kit.retrieve(started["id"]))["status"] == "queued"
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    assert (await ended(kit, started["id"]))["status"] == "completed"


async def test_a_worker_may_be_gone_in_the_middle_and_another_cannot_begin_again() -> None:
    clock = Clock()
    backend, second = Gated(), ScriptedBackend(["again"], models=["gated"])
    kit, _, (worker, other) = elsewhere(Gated(), backend, second, clock=clock)
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(worker.service.run_queued, "", started["id"])
            await backend.half.wait()
            await other.service.run_queued("", started["id"])
            assert second.turns == []
            assert (await kit.retrieve(started["id"]))["status"] == "in_progress"
            group.cancel_scope.cancel()
    assert (await ended(kit, started["id"]))["status"] == "cancelled"


# What was asked for is what the worker's backend is asked for.

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
    """The value as JSON with the ids that were made for it replaced by their order, so that two can be compared."""
    names: dict[str, str] = {}

    def rename(value: Any) -> Any:
        if isinstance(value, str):
            if value.startswith("rk1."):
                return "sealed"  # and never twice the same
            return names.setdefault(value, f"id {len(names)}") if is_id(value) else value
        if isinstance(value, dict):
            return {key: rename(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [rename(member) for member in value]
        return value.model_dump(mode="json") if hasattr(value, "model_dump") else value

    return rename(json.loads(json.dumps(value, default=lambda one: one.model_dump(mode="json"))))


def seen(turn: Turn) -> Any:
    """All that a backend is told."""
    return canonical({name: getattr(turn, name) for name in Turn.__dataclass_fields__})


def _look(place: str) -> str:
    return f"nothing at {place}"


async def _earlier(kit: ResponsesKit, backend: ScriptedBackend) -> dict[str, Any]:
    response = await kit.create({"input": "before", "include": ["reasoning.encrypted_content"], "model": "able"})
    backend.turns.clear()
    return response


def filled(body: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """A request with the names of what there was before."""
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
    # What is chosen is there to be chosen.
    for name, tool in (("f", {"type": "function", "name": "f"}), ("t:look", {"type": "t:look"})):
        if name in str(body.get("tool_choice")) and tool not in body.setdefault("tools", []):
            body["tools"] = [tool, *(other for other in body["tools"] if name not in other.values())]
    return body


@given(body=_requests, typed=st.booleans())
async def test_any_request_reaches_a_worker_as_it_would_reach_a_model_at_once(
    body: dict[str, Any], typed: bool
) -> None:
    def script(turn: Turn) -> list[Any]:
        calls = [outputs.ToolCall("f", '{"x": 1}')] if turn.callable_tools else []
        return [outputs.Reasoning("Hm."), *calls, "Yes."]

    able = Model("able", vision=True, tools=True, reasoning=True, structured_output=True, logprobs=True)
    backends = [ScriptedBackend(script, models=[able, Model("plain", temperature=0.3)]) for _ in range(2)]
    store, clock, secret = MemoryStore(), Clock(), "0123456789abcdef0123456789abcdef"
    tools = [HostedTool.from_function("t:look", _look, name="look")]
    kit, _, (worker,) = elsewhere(*backends, store=store, clock=clock, tools=tools, secrets=[secret])
    body = filled(body, await _earlier(kit, backends[0]))
    try:
        await kit.create(body)
    except errors.APIError as error:
        refused = error
    at_once = seen(backends[0].turns[0]) if backends[0].turns else None
    if at_once is None:
        with pytest.raises(type(refused)) as caught:
            await kit.service.submit({**body, "background": True})
        assert caught.value.payload() == refused.payload()
        return
    foreground = json.loads(kept(store)[-1].response)
    request: Any = {**body, "background": True}
    started = await kit.service.submit(CreateRequest.model_validate_json(json.dumps(request)) if typed else request)
    clock.now += 5
    queued = await store.get("", started["id"])
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    (turn, *_) = backends[1].turns
    assert seen(turn) == at_once
    final, record = await kit.retrieve(started["id"]), await store.get("", started["id"])
    assert queued is not None
    assert record is not None
    assert (turn.response_id, final["id"], final["created_at"]) == (started["id"], started["id"], started["created_at"])
    assert record.input == queued.input, "the input items are others, or have other ids"
    told_input = json.loads(record.input)
    assert [item["id"] for item in json.loads(json.dumps(seen_ids(turn)))][-len(told_input) or len(turn.items) :] == [
        item["id"] for item in told_input
    ]
    ignored = {"id", "created_at", "completed_at", "background"}
    assert canonical({key: final[key] for key in final.keys() - ignored}) == canonical(
        {key: foreground[key] for key in foreground.keys() - ignored}
    )


def seen_ids(turn: Turn) -> list[dict[str, str]]:
    return [{"id": item.id} for item in turn.items]


async def test_a_request_that_was_made_of_models_reaches_a_worker_too() -> None:
    from responses_kit.schema.request import JsonObject, TextOptions
    from responses_kit.schema.tools import AllowedTools, FunctionTool, NamedFunction

    backend = ScriptedBackend([outputs.ToolCall("f", "{}")])
    kit, _, (worker,) = elsewhere(ScriptedBackend(), backend)
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
    response = await ended(kit, started["id"])
    assert (response["status"], response["error"]) == ("completed", None)
    for name in ("text", "tools", "tool_choice"):
        assert response[name] == started[name]


@pytest.mark.parametrize("parameter", [{"x": float("nan")}, {"x": 2**70}, {"x": "\u2028"}, {"x": [None]}])
async def test_a_tool_whose_parameters_are_odd_is_refused_or_reaches_the_worker(parameter: dict[str, Any]) -> None:
    backend = ScriptedBackend(["Hi"])
    kit, _, (worker,) = elsewhere(ScriptedBackend(), backend)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "default": parameter}}
    try:
        started = await kit.service.submit({"input": "Hi", "background": True, "tools": [tool]})
    except errors.InvalidRequest:
        return
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("", started["id"])
    response = await ended(kit, started["id"])
    assert response["status"] == "completed"
    assert response["tools"] == started["tools"]


async def test_sealed_reasoning_that_a_client_brings_is_opened_by_the_worker() -> None:
    backend = ScriptedBackend(["Hi"])
    secret = "0123456789abcdef0123456789abcdef"
    kit, _, (worker,) = elsewhere(ScriptedBackend([outputs.Reasoning("Deep."), "Yes."]), backend, secrets=[secret])
    first = await kit.create({"input": "Hi", "store": False, "include": ["reasoning.encrypted_content"]}, owner="ann")
    sealed = {key: value for key, value in first["output"][0].items() if key != "content"}
    ask = {"role": "user", "content": "Go on."}
    started = await kit.service.submit({"input": [sealed, ask], "background": True}, owner="ann")
    with anyio.fail_after(BOUND):
        await worker.service.run_queued("ann", started["id"])
    assert backend.turns[0].items[0].text == "Deep."
    record = await kit.store.get("ann", started["id"])
    assert b"Deep." not in record.input + record.request + record.response


# Cancelled.

WHERE = ["the same kit", "another kit"]


async def cancelled(kit: ResponsesKit, response_id: str) -> dict[str, Any] | None:
    """Cancels; None where the response has ended already."""
    try:
        return await kit.cancel(response_id)
    except errors.InvalidRequest as error:
        if (error.status, error.code) != (400, "response_already_ended"):
            raise
        return None


@pytest.mark.parametrize("where", WHERE)
async def test_a_background_response_can_be_cancelled_at_any_moment(where: str) -> None:
    statuses = set()
    for steps in range(0, 60, 2):
        store, clock, backend = Watched(slow), Clock(), ScriptedBackend(["one ", outputs.Reasoning("two")])
        kit = ResponsesKit(backend, store=store, clock=clock)
        other = kit if where == "the same kit" else ResponsesKit(ScriptedBackend(), store=store, clock=clock)
        with anyio.fail_after(BOUND):
            started = await kit.service.submit({"input": "Hi", "background": True})
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            answer = await cancelled(other, started["id"])
            response = await ended(other, started["id"])
        assert response == await kit.retrieve(started["id"])
        assert response["status"] == ("completed" if answer is None else "cancelled")
        assert answer in (None, response)
        statuses.add(response["status"])
        await check_kept(store, clock)
    if where == "the same kit":
        assert statuses == {"cancelled", "completed"}, "the steps were too many or too few for both endings"


async def test_a_cancellation_that_meets_the_beginning_waits_for_no_lease() -> None:
    """It shortens the lease that was just taken, and cuts off the wait for the answer of the store."""

    async def around(name: str, call: Call) -> Any:
        answer = await call()
        if name == "update" and not met:
            met.append(name)
            await MemoryStore.cancel(store, "", started["id"], clock.now + 2)
            kit.service.leases.find(("", started["id"])).cancel()
            await anyio.lowlevel.checkpoint()
        return answer

    met: list[str] = []
    store, clock = Watched(around), Clock()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, clock=clock)
    started = await kit.service.submit(BACKGROUND)
    assert (await ended(kit, started["id"]))["status"] == "cancelled"
    assert met


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["background", "resumable", "streamed", "whole"])
async def test_a_response_that_is_cancelled_frees_its_slot_and_everybody_says_so(kind: str, where: str) -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store, resumable=kind == "resumable")
    other = kit if where == "the same kit" else ResponsesKit(ScriptedBackend(), store=store)
    audience, run = Audience(), None
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if kind == "background":
                response_id = (await kit.service.submit(BACKGROUND))["id"]
            else:
                run = await kit.service.create_run(ASK, streamed=kind != "whole")
                response_id = run.id
                group.start_soon(run.execute, audience.tell)
            await backend.half.wait()
            answer = await other.cancel(response_id)
            with anyio.fail_after(1.0):
                await backend.closed.wait()
        assert await other.cancel(response_id) == answer, "once more does no harm"
    check_response(answer)
    assert (answer["status"], answer["completed_at"]) == ("cancelled", None)
    assert answer["output"][0]["content"][0]["text"] == "half "
    assert answer == await kit.retrieve(response_id)
    if run is not None:
        assert check_stream(audience.events) == answer
        assert audience.events[-1]["type"] == "response.incomplete"
    if kind != "streamed":
        assert await ended(other, response_id) == answer
    assert backend.turns[0].cancelled


async def test_many_who_cancel_at_once_hear_the_same() -> None:
    for steps in range(0, 24, 3):
        store, clock = Watched(slow), Clock()
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
        response = await ended(kit, started["id"])
        assert answers == [response] * 8
        await check_kept(store, clock)


@pytest.mark.parametrize("script", [["Hi"], ["Hi", outputs.Finish("max_output_tokens")], [LookupError("gone")]])
async def test_what_has_ended_otherwise_cannot_be_cancelled(script: list[Any]) -> None:
    kit = ResponsesKit(ScriptedBackend(script))
    started = await kit.service.submit(BACKGROUND)
    response = await ended(kit, started["id"])
    for _ in range(2):
        with pytest.raises(errors.InvalidRequest) as caught:
            await kit.cancel(started["id"])
        assert (caught.value.status, caught.value.code) == (400, "response_already_ended")
        assert response["status"] in caught.value.message
    assert await kit.retrieve(started["id"]) == response
    assert await ended(kit, started["id"]) == response


async def test_an_unknown_and_a_foreign_response_cannot_be_cancelled() -> None:
    backend = Gated()
    kit = ResponsesKit(backend)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(BACKGROUND, owner="ann")
        await backend.half.wait()
        payloads = []
        for response_id, owner in ((started["id"], "bob"), (started["id"], ""), ("resp_unknown", "ann")):
            for method in (kit.cancel, kit.delete):
                with pytest.raises(errors.NotFound) as caught:
                    await method(response_id, owner=owner)
                payloads.append(caught.value.payload())
        assert all(payload == payloads[0] for payload in payloads)
        backend.goes_on.set()
        assert (await ended(kit, started["id"], owner="ann"))["status"] == "completed"


async def test_what_waits_for_a_worker_is_cancelled_without_one_and_no_worker_takes_it() -> None:
    backend = ScriptedBackend(["Hi"])
    kit, _, (worker,) = elsewhere(ScriptedBackend(), backend)
    started = await kit.service.submit(BACKGROUND)
    with anyio.fail_after(BOUND):
        assert (await worker.cancel(started["id"]))["status"] == "cancelled"
        await worker.service.run_queued("", started["id"])
    assert (await ended(kit, started["id"]))["status"] == "cancelled"
    assert backend.turns == []


async def test_what_is_cancelled_as_a_worker_takes_it_ends_once_and_as_all_say() -> None:
    for steps in range(0, 40, 2):
        backend, store, clock = ScriptedBackend(["Hi"]), Watched(slow), Clock()
        kit, _, (worker,) = elsewhere(ScriptedBackend(), backend, store=store, clock=clock)
        started = await kit.service.submit(BACKGROUND)
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(worker.service.run_queued, "", started["id"])
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                answer = await cancelled(kit, started["id"])
            response = await ended(kit, started["id"])
        assert response["status"] == ("completed" if answer is None else "cancelled")
        assert answer in (None, response)
        await check_kept(store, clock)


@pytest.mark.parametrize("where", WHERE)
async def test_deleting_what_is_in_progress_ends_it_and_leaves_nothing(where: str) -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store)
    other = kit if where == "the same kit" else ResponsesKit(ScriptedBackend(), store=store)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(BACKGROUND)
        await backend.half.wait()
        assert (await other.delete(started["id"]))["deleted"] is True
        await backend.closed.wait()
        with pytest.raises(errors.NotFound):
            await other.delete(started["id"])
        await kit.aclose()
    assert len(store) == 0


async def test_a_response_that_its_worker_never_ends_is_ended_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker elsewhere that is dead, or hangs, gives no sign."""
    monkeypatch.setattr(kit_module, "_CANCEL_TIMEOUT", 0.05)
    store = MemoryStore()
    kit = ResponsesKit(Gated(), store=store)
    run = await kit.service.create_run(ASK)  # and is never executed
    other = ResponsesKit(ScriptedBackend(), store=store)
    with anyio.fail_after(BOUND):
        assert (await other.cancel(run.id))["status"] == "cancelled"
        run_audience = Audience()
        await run.execute(run_audience.tell)
    assert (await kit.retrieve(run.id))["status"] == "cancelled"


# Asked for twice.


@pytest.mark.parametrize("background", [False, True])
async def test_what_is_asked_twenty_times_at_once_with_one_key_is_made_once(background: bool) -> None:
    backend, store, clock = ScriptedBackend(SCRIPT), Watched(slow), Clock()
    kits = [ResponsesKit(backend, store=store, clock=clock) for _ in range(4)]
    answers: list[dict[str, Any]] = []
    streams: list[bytes] = []

    async def ask(number: int) -> None:
        kit = kits[number % 4]
        started = await kit.service.submit({**ASK, "background": background}, key="key")
        check_response(started)
        if number % 2:
            streams.append(await told(kit, started["id"]))
        answers.append(await kit.wait(started["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, number)
        await ask(0)
    assert len(backend.turns) == 1
    assert answers == [answers[0]] * 21
    assert len(set(streams)) == 1
    assert rebuilt(streams[0]) == answers[0]
    assert len(store) == 1


@pytest.mark.parametrize("background", [False, True])
async def test_another_request_with_the_same_key_is_refused_and_unknown_fields_make_none_another(
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
    assert (await ended(kit, first["id"]))["status"] == "completed"
    assert len(backend.turns) == 1


async def test_keys_are_their_owners_own() -> None:
    backend = ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend)
    started = [await kit.service.submit(ASK, owner=owner, key="key") for owner in ("ann", "bob", "")]
    assert len({response["id"] for response in started}) == 3
    for owner, response in zip(("ann", "bob", ""), started, strict=True):
        assert (await ended(kit, response["id"], owner=owner))["status"] == "completed"
    with pytest.raises(errors.IdempotencyKeyReused):
        await kit.service.submit({"input": "Other"}, owner="ann", key="key")


@pytest.mark.parametrize("background", [False, True])
async def test_a_client_may_leave_at_any_moment_and_ask_again_with_its_key(background: bool) -> None:
    for steps in range(30):
        backend, store, clock = ScriptedBackend(["Hi"]), Watched(slow), Clock()
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
        await check_kept(store, clock)


async def test_what_failed_stays_failed_for_its_key() -> None:
    backend = ScriptedBackend([LookupError("gone")], ["Hi"])
    kit = ResponsesKit(backend)
    first = await kit.service.submit(ASK, key="key")
    with pytest.raises(errors.ModelError) as caught:
        await kit.wait(first["id"])
    again = await kit.service.submit(ASK, key="key")
    assert (again["id"], again["status"]) == (first["id"], "failed")
    with pytest.raises(errors.ModelError) as once_more:
        await kit.wait(again["id"])
    assert once_more.value.payload() == caught.value.payload()
    assert len(backend.turns) == 1


async def test_a_request_that_was_refused_leaves_its_key_free() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    with pytest.raises(errors.InvalidRequest):
        await kit.service.submit({"input": "Hi", "model": "other"}, key="key")
    started = await kit.service.submit(ASK, key="key")
    assert (await ended(kit, started["id"]))["status"] == "completed"


@pytest.mark.parametrize("background", [False, True])
async def test_a_turn_that_was_not_admitted_leaves_its_key_free_or_its_failure_on_record(background: bool) -> None:
    class Once(ScriptedBackend):
        refused = False

        async def admit(self, turn: Turn) -> None:
            if not self.refused:
                self.refused = True
                raise errors.TooManyRequests("All slots are taken.")

    kit = ResponsesKit(Once(["Hi"]))
    body = {**ASK, "background": background}
    try:
        await ended(kit, (await kit.service.submit(body, key="key"))["id"])
    except errors.TooManyRequests:
        assert not background
    again = await kit.service.submit(body, key="key")
    assert (await ended(kit, again["id"]))["status"] == ("failed" if background else "completed")


async def test_deleting_a_response_frees_its_key() -> None:
    backend = ScriptedBackend(["Hi"])
    kit = ResponsesKit(backend)
    first = await kit.service.submit(ASK, key="key")
    await ended(kit, first["id"])
    await kit.delete(first["id"])
    second = await kit.service.submit({"input": "Other"}, key="key")
    assert second["id"] != first["id"]
    assert (await ended(kit, second["id"]))["status"] == "completed"
    assert len(backend.turns) == 2


async def test_a_key_is_no_way_to_what_is_not_stored() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    with pytest.raises(errors.UnsupportedParameter) as caught:
        await kit.service.submit({"input": "Hi", "store": False}, key="key")
    assert caught.value.param == "store"
    assert "Idempotency-Key" in caught.value.message


async def test_what_was_asked_for_with_a_key_can_be_continued_and_cancelled_like_any_other() -> None:
    backend = Gated()
    kit = ResponsesKit(backend)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit(ASK, key="key")
        assert (started["status"], started["background"]) == ("in_progress", False)
        await backend.half.wait()
        assert (await kit.cancel(started["id"]))["status"] == "cancelled"
        again = await kit.service.submit(ASK, key="key")
    assert (again["id"], again["status"]) == (started["id"], "cancelled")


# The store fails.


@pytest.mark.parametrize("done", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_store_that_fails_at_any_call_leaves_nothing_in_progress(where: str, done: bool, times: int) -> None:
    for nth in range(100):
        failing, clock, runner = Failing(nth, done=done, times=times), Clock(), Elsewhere()
        store = Watched(failing)
        backend = ScriptedBackend(["one ", outputs.Reasoning("two")])
        kit = ResponsesKit(backend, store=store, clock=clock, runner=None if where == "here" else runner)
        started = None
        with anyio.fail_after(BOUND):
            try:
                started = await kit.service.submit({"input": "Hi", "background": True}, key="key")
                for job in runner.jobs:
                    await kit.service.run_queued(*job)
            except errors.StoreError:
                assert where == "elsewhere" or started is None
            await kit.aclose(BOUND)
        met = failing.heal()
        assert len(backend.turns) <= 1
        responses = await check_kept(store, clock)
        if not met:
            assert [response["status"] for response in responses] == ["completed"]
            break
    else:
        pytest.fail("the store was called for ever")
    assert nth > 5


@pytest.mark.parametrize("done", [False, True], ids=["before its work", "after its work"])
async def test_a_store_that_fails_at_any_call_while_a_response_is_cancelled_leaves_nothing_in_progress(
    done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "_LOOK_SECONDS", 60.0)  # so that only the calls that are meant are counted
    monkeypatch.setattr(kit_module, "_CANCEL_TIMEOUT", 0.05)
    for nth in range(100):
        failing, clock, backend = Failing(1000, done=done), Clock(), Gated()
        store = Watched(failing)
        kit = ResponsesKit(backend, store=store, clock=clock)
        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            await backend.half.wait()
            failing.failing = range(failing.count + nth, failing.count + nth + 1)
            try:
                await kit.cancel(started["id"])
            except (errors.StoreError, errors.NotFound):  # what could not be kept as it ended is gone
                await anyio.wait_all_tasks_blocked()
            met = failing.heal()
            if not backend.closed.is_set():
                assert (await kit.cancel(started["id"]))["status"] == "cancelled"
            await backend.closed.wait()
            await kit.aclose()
        responses = await check_kept(store, clock)
        assert [response["status"] for response in responses] in (["cancelled"], [])
        if not met:
            break
    else:
        pytest.fail("the store was called for ever")
    assert nth > 3


# All of it at once.

_MOVES = [
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
    moves=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(_MOVES)), max_size=6),
)
async def test_whatever_meets_a_response_it_ends_once_and_as_everybody_says(
    kind: str, moves: list[tuple[int, str]]
) -> None:
    script = ["one ", outputs.Reasoning("two"), outputs.ToolCall("f"), "three"]
    failing, clock, runner, audience = Failing(10**9, done=False), Clock(), Elsewhere(), Audience()

    async def around(name: str, call: Call) -> Any:
        await anyio.lowlevel.checkpoint()
        answer = await failing(name, call)
        await anyio.lowlevel.checkpoint()
        return answer

    store, backends = Watched(around), [ScriptedBackend(script) for _ in range(2)]
    here = ResponsesKit(
        backends[0],
        store=store,
        clock=clock,
        resumable=kind == "resumable",
        runner=runner if kind == "elsewhere" else None,
    )
    there = ResponsesKit(backends[1], store=store, clock=clock)
    heard: list[bytes] = []
    failed = given_up = gone = False
    run = None

    async def attempt(act: Callable[..., Awaitable[Any]], *args: Any) -> None:
        try:
            await act(*args)
        except (errors.NotFound, errors.ServerError, errors.EventsUnavailable):
            pass
        except errors.InvalidRequest as error:
            if error.code != "response_already_ended":
                raise

    async def hear(kit: ResponsesKit) -> None:
        follower = await kit.service.follow(response_id)
        heard.append(b"")
        number = len(heard) - 1
        async with aclosing(follower.pieces()) as pieces:
            async for piece in pieces:
                heard[number] += piece

    with anyio.fail_after(BOUND):
        if kind in ("resumable", "streamed"):
            run = await here.service.create_run(ASK, streamed=True)
            response_id = run.id
        else:
            body = {**ASK, "background": kind != "keyed"}
            response_id = (await here.service.submit(body, key="key" if kind == "keyed" else None))["id"]
        async with anyio.create_task_group() as group:
            if run is not None:
                group.start_soon(run.execute, audience.tell)
            if kind == "elsewhere":
                group.start_soon(attempt, here.service.run_queued, "", response_id)
            for steps, move in moves:
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                kit = here if move.endswith("here") else there
                if move == "clock":
                    given_up = True
                    clock.now += 1000
                    group.start_soon(attempt, there.service.repository.sweep)
                elif move == "work":
                    group.start_soon(attempt, there.service.run_queued, "", response_id)
                elif move == "close":
                    group.start_soon(here.aclose)
                elif move == "leave":
                    gone = True
                    if run is not None:
                        run.abort()
                elif move.startswith("fail"):
                    failing.done = move == "fail late"
                    failed, failing.failing = True, range(failing.count, failing.count + 1)
                elif move.startswith("follow"):
                    group.start_soon(attempt, hear, kit)
                else:
                    group.start_soon(attempt, getattr(kit, move.split()[0]), response_id)
            for _ in range(500):
                await anyio.lowlevel.checkpoint()
            failing.heal()
            while not all(record.final for record in kept(store)):  # it was left to its lease
                given_up = True
                clock.now += 1000
                await there.service.repository.sweep()
                await anyio.sleep(0.005)  # a worker that looks now and then whether its store is back
        await here.aclose(BOUND)
        await there.aclose(BOUND)
    responses = await check_kept(store, clock)
    assert len(responses) <= 1
    assert sum(len(backend.turns) for backend in backends) <= 1
    if run is not None and not gone:
        told_last = check_order(audience.events)
        if responses and not failed and (kind == "resumable" or not given_up):
            assert responses == [told_last]
    whole = b""
    if responses and kind != "streamed":
        whole = await told(there, response_id)
    for stream in heard:
        if (failed or not backends[0].turns) and decode_events(stream)[-1]["type"] == "error":
            assert "close" in [move for _, move in moves]
            continue  # of a server that went down while another worked, or was to work: to be resumed there
        last = check_order(decode_events(stream))
        if whole and not failed:
            assert stream == whole
        assert last["status"] in ("completed", "cancelled", "failed")
