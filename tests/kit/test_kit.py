"""The kit's methods, settings and shutdown."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from responses_kit import Backend, Limits, Model, ResponsesKit, Timeouts, Turn, errors, outputs
from responses_kit.protocol.sse import decode_events
from responses_kit.runners.base import LocalRunner
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import Pause, ScriptedBackend
from tests.support.memory import shorten_cleanup, stored_records

from ..engine.test_repository import GatedBackend, read_final, read_stream, replay_stream
from ..engine.test_run import (
    Call,
    Clock,
    EventClient,
    InterceptedStore,
    check_records,
    check_replay,
    pass_with_checkpoints,
    stored_response,
)
from ..runners.test_runners import QueueRunner
from ..support.conformance import check_response, check_stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class EndlessBackend(Backend):
    """Generates without end, until it is closed."""

    models = ("endless",)

    def __init__(self) -> None:
        self.closed = False

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        try:
            while True:
                yield "more "
                await anyio.lowlevel.checkpoint()
        finally:
            self.closed = True


# Creation.


async def test_create_returns_whole_response() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hello, ", "world.", outputs.Usage(3, 2)]), clock=lambda: 1_750_000_000.9)
    response = await kit.create({"model": "scripted", "input": "Hi", "metadata": {"k": "v"}})
    check_response(response)
    assert response["status"] == "completed"
    assert (response["created_at"], response["completed_at"]) == (1_750_000_000, 1_750_000_000)
    assert response["output"][0]["content"][0]["text"] == "Hello, world."
    assert response["usage"]["total_tokens"] == 5
    assert response["id"].startswith("resp_")
    assert len(response["id"]) >= 5 + 32, "an id has 128 random bits"


async def test_create_returns_incomplete_response() -> None:
    response = await ResponsesKit(ScriptedBackend(["Once", outputs.Finish("max_output_tokens")])).create(
        {"input": "Hi"}
    )
    check_response(response)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_create_raises_failure_and_stores_it() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half ", LookupError("gone")]), store=store)
    with pytest.raises(errors.ModelError):
        await kit.create({"input": "Hi"})
    assert len(store) == 1


async def test_create_refuses_invalid_request_and_stores_nothing() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    for body in ({"input": 1}, {"input": []}, {"input": "Hi", "model": "other"}, [], None):
        with pytest.raises(errors.InvalidRequest):
            await kit.create(body)
    assert len(store) == 0


async def test_create_refuses_lone_surrogates() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    for body in (
        {"input": "\ud83d"},
        {"input": "Hi", "instructions": "\ud83d"},
        {"input": "Hi", "metadata": {"\ud83d": ""}},
    ):
        with pytest.raises(errors.InvalidRequest):
            await kit.create(body)


@pytest.mark.parametrize("parameter", [{"x": "\ud83d"}, {"\ud83d": 1}, {"x": float("nan")}, {"x": object()}])
async def test_create_handles_tool_parameters_that_are_not_json(parameter: dict[str, Any]) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    body = {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": parameter}]}
    try:
        response = await kit.create(body)
    except errors.APIError:
        return
    assert (await kit.retrieve(response["id"]))["status"] == "completed"


# Streaming.


async def test_stream_yields_every_event_and_record_equals_last_event() -> None:
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("Hm."), "Hello, ", "world."]))
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            sent = [event async for event in events]
    response = check_stream(sent)
    assert await kit.retrieve(response["id"]) == response


async def test_stream_settings_enable_raw_reasoning_and_extension_events() -> None:
    script = [outputs.Reasoning("Hm."), outputs.Event("acme:progress", {"percent": 50}), "Yes."]
    for is_enabled in (True, False):
        kit = ResponsesKit(ScriptedBackend(script), stream_reasoning=is_enabled, stream_extensions=is_enabled)
        async with kit.stream({"input": "Hi"}) as events:
            kinds = [event["type"] async for event in events]
        assert ("response.reasoning.delta" in kinds) is is_enabled
        assert ("acme:progress" in kinds) is is_enabled


async def test_stream_yields_each_event_before_the_next_output() -> None:
    log: list[str] = []

    class LoggingBackend(Backend):
        models = ("logging",)

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            for word in ("one", "two", "three"):
                log.append(f"generated {word}")
                yield word

    async with ResponsesKit(LoggingBackend()).stream({"input": "Hi"}) as events:
        async for event in events:
            if "delta" in event:
                log.append(f"received {event['delta']}")
    assert log.index("received one") < log.index("generated three")


async def test_leaving_stream_early_cancels_response() -> None:
    backend = EndlessBackend()
    kit = ResponsesKit(backend)
    received: list[str] = []
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                received.append(event.get("response", {}).get("id"))
                if "delta" in event:
                    break
    assert backend.closed
    stored = await kit.retrieve(received[0])
    check_response(stored)
    assert stored["status"] == "cancelled"


async def test_leaving_stream_immediately_leaves_nothing_in_progress() -> None:
    store = MemoryStore()
    kit = ResponsesKit(EndlessBackend(), store=store)
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}):
            pass
    (record,) = stored_records(store)
    assert record.final


async def test_leaving_stream_does_not_wait_for_silent_backend() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi", Pause(60)]))
    received: list[dict[str, Any]] = []
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                received.append(event)
                if "delta" in event:
                    await anyio.wait_all_tasks_blocked()
                    break
    assert (await kit.retrieve(received[0]["response"]["id"]))["status"] == "cancelled"


async def test_leaving_stream_after_last_event_keeps_response_completed() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    async with kit.stream({"input": "Hi"}) as events:
        async for event in events:
            last = event
            if event["type"] == "response.completed":
                break
    assert (await kit.retrieve(last["response"]["id"]))["status"] == "completed"


@pytest.mark.parametrize(
    "error", [LookupError("mine"), errors.InvalidRequest("mine"), ExceptionGroup("mine", [ValueError()])]
)
async def test_stream_propagates_caller_exception_unchanged(error: Exception) -> None:
    backend = EndlessBackend()
    kit = ResponsesKit(backend)

    async def raise_from_stream() -> None:
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                if "delta" in event:
                    raise error

    with anyio.fail_after(BOUND), pytest.raises(type(error)) as caught:
        await raise_from_stream()
    assert caught.value is error
    assert backend.closed


async def test_cancelled_caller_closes_stream() -> None:
    backend = EndlessBackend()
    kit = ResponsesKit(backend)
    received: list[str] = []
    with anyio.fail_after(BOUND), anyio.CancelScope() as scope:
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                received.append(event.get("response", {}).get("id", ""))
                if "delta" in event:
                    scope.cancel()
    assert scope.cancelled_caught
    assert backend.closed
    assert (await kit.retrieve(received[0]))["status"] == "cancelled"


async def test_stream_raises_invalid_request_when_opened() -> None:
    with pytest.raises(errors.InvalidRequest):
        async with ResponsesKit(ScriptedBackend(["Hi"])).stream({"input": 1}):
            pytest.fail("the stream was opened")


async def test_stream_emits_later_failure_as_event() -> None:
    kit = ResponsesKit(ScriptedBackend(["half ", LookupError("gone")]))
    async with kit.stream({"input": "Hi"}) as events:
        sent = [event async for event in events]
    assert check_stream(sent)["status"] == "failed"


async def test_synchronous_generators_stream_and_are_closed() -> None:
    closed = threading.Event()

    class SyncBackend(Backend):
        models = ("plain",)

        def generate(self, turn: Turn) -> Iterator[str]:
            try:
                while not turn.cancelled:
                    yield "more "
            finally:
                closed.set()

    with anyio.fail_after(BOUND):
        async with ResponsesKit(SyncBackend()).stream({"input": "Hi"}) as events:
            async for event in events:
                if "delta" in event:
                    break
        assert await anyio.to_thread.run_sync(closed.wait, BOUND)


# Stored responses.


async def test_retrieve_returns_created_response_to_owner_only() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi ", outputs.ToolCall("f"), outputs.Item("acme:x", {"y": None})]))
    response = await kit.create({"input": "Hi", "tools": [{"type": "function", "name": "f"}]}, owner="ann")
    assert await kit.retrieve(response["id"], owner="ann") == response
    for other_owner in ("bob", ""):
        with pytest.raises(errors.NotFound) as foreign:
            await kit.retrieve(response["id"], owner=other_owner)
        with pytest.raises(errors.NotFound) as unknown:
            await kit.retrieve("resp_unknown", owner=other_owner)
        assert foreign.value.payload() == unknown.value.payload()


async def test_changes_to_returned_objects_do_not_affect_store() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    body: dict[str, Any] = {"input": [{"role": "user", "content": "Hi"}], "metadata": {"k": "v"}}
    response = await kit.create(body)
    response["output"].clear()
    body["metadata"]["k"] = "changed"
    stored = await kit.retrieve(response["id"])
    stored["output"].clear()
    stored = await kit.retrieve(response["id"])
    assert (len(stored["output"]), stored["metadata"]) == (1, {"k": "v"})


async def test_retrieve_returns_response_in_progress() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi", Pause(60)]))
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                stored = await kit.retrieve(event["response"]["id"])
                check_response(stored)
                assert (stored["status"], stored["output"]) == ("in_progress", [])
                break


async def test_delete_removes_response_once() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    response = await kit.create({"input": "Hi"}, owner="ann")
    with pytest.raises(errors.NotFound):
        await kit.delete(response["id"], owner="bob")
    assert await kit.delete(response["id"], owner="ann") == {
        "id": response["id"],
        "object": "response",
        "deleted": True,
    }
    for method in (kit.delete, kit.retrieve, kit.input_items):
        with pytest.raises(errors.NotFound):
            await method(response["id"], owner="ann")


async def test_input_items_are_paginated_in_both_orders() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    first = await kit.create({"input": "before"})
    body = {"input": [{"role": "user", "content": f"{n}"} for n in range(25)], "previous_response_id": first["id"]}
    response_id = (await kit.create(body))["id"]

    def texts(page: dict[str, Any]) -> list[str]:
        return [item["content"][0]["text"] for item in page["data"]]

    newest = await kit.input_items(response_id)
    assert texts(newest) == [f"{n}" for n in range(24, 4, -1)], (
        "the page must hold 20 items of this response, newest first"
    )
    assert (newest["object"], newest["has_more"]) == ("list", True)
    assert (newest["first_id"], newest["last_id"]) == (newest["data"][0]["id"], newest["data"][-1]["id"])
    rest = await kit.input_items(response_id, after=newest["last_id"])
    assert (texts(rest), rest["has_more"]) == (["4", "3", "2", "1", "0"], False)
    oldest = await kit.input_items(response_id, order="asc", limit=2)
    assert (texts(oldest), oldest["has_more"]) == (["0", "1"], True)
    assert texts(await kit.input_items(response_id, order="asc", limit=100, after=oldest["last_id"])) == [
        f"{n}" for n in range(2, 25)
    ]
    end = await kit.input_items(response_id, after=rest["last_id"])
    assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    exactly = await kit.input_items(response_id, limit=25)
    assert exactly["has_more"] is False


@pytest.mark.parametrize(
    ("page", "param"),
    [({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"order": "random"}, "order"), ({"after": "msg_x"}, "after")],
)
async def test_invalid_page_is_refused(page: dict[str, Any], param: str) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    response = await kit.create({"input": "Hi"})
    with pytest.raises(errors.InvalidRequest) as caught:
        await kit.input_items(response["id"], **page)
    assert caught.value.param == param


@pytest.mark.parametrize("method", ["get", "chain", "items", "delete"])
async def test_unreachable_store_raises_store_error_without_details(method: str) -> None:
    class FailingStore(MemoryStore):
        pass

    async def fail(*_: Any) -> Any:
        raise ConnectionError("secret-host refused")

    setattr(FailingStore, method, fail)
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=FailingStore())
    known = await kit.create({"input": "Hi"})
    ask = {
        "get": lambda: kit.retrieve("resp_1"),
        "chain": lambda: kit.create({"input": "Hi", "previous_response_id": "resp_1"}),
        "items": lambda: kit.create({"input": [{"type": "item_reference", "id": "msg_" + "0" * 32}]}),
        "delete": lambda: kit.delete(known["id"]),
    }[method]
    with pytest.raises(errors.StoreError) as caught:
        await ask()
    assert "secret" not in caught.value.message


# Models, owners and settings.


async def test_models_are_listed_and_retrieved_by_name() -> None:
    models = ["plain", Model("org/big", owned_by="acme")]
    kit = ResponsesKit(ScriptedBackend(models=models), clock=lambda: 5.5)
    listed = kit.models()
    assert listed == {
        "object": "list",
        "data": [
            {"id": "plain", "object": "model", "created": 5, "owned_by": "responses-kit"},
            {"id": "org/big", "object": "model", "created": 5, "owned_by": "acme"},
        ],
    }
    assert kit.model("org/big") == listed["data"][1]
    with pytest.raises(errors.NotFound):
        kit.model("other")


async def test_close_ends_running_responses_and_refuses_new_ones() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half ", Pause(60)]), store=store)
    sent: list[dict[str, Any]] = []
    async with anyio.create_task_group() as group:

        async def read_events() -> None:
            async with kit.stream({"input": "Hi"}) as events:
                sent.extend([event async for event in events])

        group.start_soon(read_events)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(BOUND):
            await kit.aclose()
    assert check_stream(sent)["status"] == "failed"
    assert (await kit.retrieve(sent[0]["response"]["id"]))["status"] == "failed"
    with pytest.raises(errors.ServerError, match="shutting down"):
        await kit.create({"input": "Hi again"})


async def test_close_stops_response_that_starts_meanwhile() -> None:
    admitted, resume = anyio.Event(), anyio.Event()

    class SlowBackend(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            admitted.set()
            await resume.wait()

    kit = ResponsesKit(SlowBackend([Pause(60)]))
    failures: list[errors.APIError] = []

    async def ask() -> None:
        try:
            await kit.create({"input": "Hi"})
        except errors.APIError as error:
            failures.append(error)

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await admitted.wait()
            group.start_soon(kit.aclose)
            await anyio.wait_all_tasks_blocked()
            resume.set()
    assert [error.message for error in failures] == ["The server is shutting down. Try again."]


async def test_concurrent_closes_close_backend_once() -> None:
    closed: list[str] = []

    class ClosingBackend(ScriptedBackend):
        def close(self) -> None:
            closed.append("closed")

    kit = ResponsesKit(ClosingBackend([Pause(60)]))
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                with pytest.raises(errors.ServerError):
                    await kit.create({"input": "Hi"})

            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(kit.aclose)
            group.start_soon(kit.aclose)
    assert closed == ["closed"]


class BackendWithoutGenerate(Backend):
    models = ("unfinished",)


class BackendWithModels(ScriptedBackend):
    def __init__(self, models: Any) -> None:
        super().__init__(["Hi"])
        self.models = models


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        (BackendWithoutGenerate(), r"must define generate\(self, turn\)"),
        (ScriptedBackend, r"not the class: use ScriptedBackend\(\)"),
        ("smollm2", "instance of a subclass of Backend"),
        (object(), "instance of a subclass of Backend"),
        (BackendWithModels([]), "models = "),
        (BackendWithModels("parrot"), "models = "),
        (BackendWithModels(Model("parrot")), "models = "),
        (BackendWithModels(name for name in ["parrot"]), "models = "),
        (BackendWithModels([""]), "different names"),
        (BackendWithModels(["a", "a"]), "different names"),
        (BackendWithModels(["a", Model("a")]), "different names"),
        (BackendWithModels([1]), "different names"),
    ],
)
def test_invalid_backend_is_refused_with_remedy(backend: Any, remedy: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=remedy):
        ResponsesKit(backend)


@pytest.mark.parametrize("settings", [{"store": {}}, {"store": MemoryStore}, {"owner": "ann"}])
def test_invalid_store_or_hook_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError):
        ResponsesKit(ScriptedBackend(["Hi"]), **settings)


@pytest.mark.parametrize("owner", ["", None, False, 0, ()])
async def test_empty_owner_is_unauthorized(owner: Any) -> None:
    with pytest.raises(errors.Unauthorized):
        await ResponsesKit(ScriptedBackend(["Hi"]), owner=lambda request: owner).service.resolve_owner(object())


@pytest.mark.parametrize("owner", [7, True, b"ann", ["ann"]])
async def test_owner_hook_must_return_string(owner: Any) -> None:
    with pytest.raises(errors.ConfigurationError, match=type(owner).__name__):
        await ResponsesKit(ScriptedBackend(["Hi"]), owner=lambda request: owner).service.resolve_owner(object())


@pytest.mark.parametrize("field", ["conversation", "prompt"])
async def test_unsupported_field_is_refused(field: str) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    with pytest.raises(errors.UnsupportedParameter) as caught:
        await kit.create({"input": "Hi", field: {"id": "x"}})
    assert caught.value.param == field
    await kit.create({"input": "Hi", field: None})


async def test_model_defaults_are_used_and_echoed() -> None:
    defaults = {
        "temperature": 0.2,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.3,
        "max_output_tokens": 99,
    }
    backend = ScriptedBackend(["Hi"], models=[Model("small", **defaults)])
    kit = ResponsesKit(backend)
    explicit = dict.fromkeys(defaults, 0.0) | {"max_output_tokens": 16}
    for fields, applied in (({}, defaults), (explicit, explicit)):
        response = await kit.create({"input": "Hi", **fields})
        assert {name: response[name] for name in defaults} == applied
        assert {name: getattr(backend.turns[-1], name) for name in defaults} == applied


async def test_owner_hook_may_be_sync_or_async_and_may_refuse() -> None:
    async def resolve_async(request: Any) -> str | None:
        await anyio.lowlevel.checkpoint()
        return request["user"]

    def refuse(request: Any) -> str:
        raise errors.Unauthorized("Your key has expired.")

    backend = ScriptedBackend(["Hi"])
    for hook in (lambda request: request["user"], resolve_async):
        kit = ResponsesKit(backend, owner=hook)
        assert await kit.service.resolve_owner({"user": "ann"}) == "ann"
        with pytest.raises(errors.Unauthorized):
            await kit.service.resolve_owner({"user": None})
    with pytest.raises(errors.Unauthorized, match="expired"):
        await ResponsesKit(backend, owner=refuse).service.resolve_owner({})
    with pytest.raises(KeyError):
        await ResponsesKit(backend, owner=resolve_async).service.resolve_owner({})
    assert await ResponsesKit(backend).service.resolve_owner(object()) == ""


async def test_close_closes_backend() -> None:
    closed: list[str] = []

    class ClosingBackend(ScriptedBackend):
        def close(self) -> None:
            closed.append("closed")

    await ResponsesKit(ClosingBackend(["Hi"])).aclose()
    assert closed == ["closed"]


def test_kit_serves_several_event_loops(anyio_backend_name: str) -> None:
    class SyncBackend(Backend):
        models = ("plain",)

        def generate(self, turn: Turn) -> Iterator[str]:
            yield turn.text

    kit = ResponsesKit(SyncBackend(), limits=Limits(max_threads=1))

    async def main() -> list[str]:
        ids: list[str] = []

        async def ask() -> None:
            ids.append((await kit.create({"input": "Hi"}))["id"])

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask)
        return ids

    ids = [response_id for _ in range(2) for response_id in anyio.run(main, backend=anyio_backend_name)]
    both: list[str] = []
    threads = [
        threading.Thread(target=lambda: both.extend(anyio.run(main, backend=anyio_backend_name))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert len({*ids, *both}) == 12

    async def check_stored() -> None:
        for response_id in (*ids, *both):
            assert (await kit.retrieve(response_id))["status"] == "completed"

    anyio.run(check_stored, backend=anyio_backend_name)


async def test_response_can_be_continued_at_its_terminal_event() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    async with kit.stream({"input": "one"}) as events:
        async for event in events:
            if event["type"] == "response.completed":
                continued = await kit.create({"input": "two", "previous_response_id": event["response"]["id"]})
    check_response(continued)


async def test_custom_store_receives_owner_with_every_call() -> None:
    owners: list[tuple[str, str]] = []

    class RecordingStore(MemoryStore):
        async def create(self, owner: str, record: Record) -> Record | None:
            owners.append(("create", owner))
            return await super().create(owner, record)

        async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
            owners.append(("update", owner))
            return await super().update(owner, record, log)

    await ResponsesKit(ScriptedBackend(["Hi"]), store=RecordingStore()).create({"input": "Hi"}, owner="ann")
    assert owners == [("create", "ann"), ("update", "ann")]


# Shutdown.


async def test_grace_completes_responses_in_time_and_fails_the_rest() -> None:
    class TwoTurnBackend(Backend):
        models = ("two",)

        def __init__(self) -> None:
            self.resume = anyio.Event()
            self.started_turns: list[str] = []

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            self.started_turns.append(turn.text)
            yield "half "
            await (self.resume.wait() if turn.text == "quick" else anyio.sleep_forever())
            yield "whole"

    backend, store, clock = TwoTurnBackend(), MemoryStore(), Clock()
    kit = ResponsesKit(backend, store=store, clock=clock, runner=LocalRunner(max_concurrent=2, max_queued=10))
    ids = {}
    for name in ("quick", "slow", "queued", "queued too"):
        ids[name] = (await kit.service.submit({"input": name, "background": True}))["id"]
        await anyio.wait_all_tasks_blocked()
    client = EventClient()
    with anyio.fail_after(BOUND):
        run = await kit.service.create_run({"input": "slow"}, streamed=True)
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(kit.aclose, 0.2)
            await anyio.wait_all_tasks_blocked()
            assert kit.lifecycle.is_closing
            for ask in (kit.service.submit, kit.create):
                with pytest.raises(errors.ServerError, match="shutting down"):
                    await ask({"input": "late", "background": ask == kit.service.submit})
            backend.resume.set()
    statuses = {name: (await read_final(kit, response_id))["status"] for name, response_id in ids.items()}
    assert statuses.pop("quick") == "completed"
    assert set(statuses.values()) == {"failed"}
    assert check_stream(client.events) == await stored_response(run, store)
    assert client.events[-1]["response"]["error"]["message"] == "The server is shutting down. Try again."
    assert set(backend.started_turns) == {"quick", "slow"} | (set(backend.started_turns) & {"queued", "queued too"})
    assert len(store) == 5
    await check_records(store, clock)


async def test_close_without_grace_ends_all_responses_immediately() -> None:
    backend, store = GatedBackend(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=LocalRunner(max_concurrent=1, max_queued=100))
    ids = [(await kit.service.submit({"input": "Hi", "background": True}))["id"] for _ in range(20)]
    with anyio.fail_after(BOUND):
        await backend.half_sent.wait()
        await kit.aclose()
    assert len(backend.turns) == 1, "the backend was asked for queued responses"
    for response_id in ids:
        assert (await read_final(kit, response_id))["status"] == "failed"


@pytest.mark.parametrize("grace", [0.0, 60.0])
async def test_shutdown_at_any_moment_leaves_nothing_in_progress(grace: float) -> None:
    for steps in range(60):
        store, clock = InterceptedStore(pass_with_checkpoints), Clock()
        kit = ResponsesKit(ScriptedBackend(["one ", outputs.Reasoning("two")]), store=store, clock=clock)
        refused: list[str] = []

        async def ask(kit: ResponsesKit, refused: list[str]) -> None:
            try:
                await kit.service.submit({"input": "Hi", "background": True})
            except errors.APIError as refusal:
                refused.append(refusal.message)

        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask, kit, refused)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.start_soon(kit.aclose, grace)
        assert len(store) + len(refused) == 3
        assert set(refused) <= {"The server is shutting down. Try again."}
        assert all(record.final for record in stored_records(store)), f"closed after {steps} steps"
        statuses = {response["status"] for response in await check_records(store, clock)}
        assert statuses <= ({"completed"} if grace else {"completed", "failed"})


@pytest.mark.parametrize("grace", [0.0, 60.0])
async def test_followers_receive_end_at_shutdown(grace: float) -> None:
    for steps in range(0, 80, 2):
        store, clock = InterceptedStore(pass_with_checkpoints), Clock()
        kit = ResponsesKit(ScriptedBackend(["one ", outputs.Reasoning("two")]), store=store, clock=clock)
        received: list[bytes] = []

        async def receive(kit: ResponsesKit, response_id: str, received: list[bytes]) -> None:
            received.append(await read_stream(kit, response_id))

        with anyio.fail_after(BOUND):
            started = await kit.service.submit({"input": "Hi", "background": True})
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(receive, kit, started["id"], received)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.start_soon(kit.aclose, grace)
        (response,) = await check_records(store, clock)
        assert [check_replay(decode_events(stream)) for stream in received] == [response] * 2, (
            f"closed after {steps} steps"
        )


async def test_followers_receive_end_of_response_deleted_at_shutdown() -> None:
    async def intercept(name: str, call: Call) -> Any:
        if name == "get" and kit.lifecycle.is_closing:
            await MemoryStore.delete(store, "", started["id"])
        return await call()

    store, received = InterceptedStore(intercept), list[bytes]()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=QueueRunner())
    started = await kit.service.submit({"input": "Hi", "background": True})

    async def receive() -> None:
        received.append(await read_stream(kit, started["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(receive)
            await anyio.wait_all_tasks_blocked()
            await kit.aclose()
    assert replay_stream(received[0])["error"]["code"] == "response_not_found"


async def test_hanging_backend_does_not_block_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_cleanup(monkeypatch, 0.05)

    class HangingBackend(Backend):
        models = ("clinging",)

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            try:
                yield "half "
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await release.wait()

    release, store = anyio.Event(), MemoryStore()
    kit = ResponsesKit(HangingBackend(), store=store)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit({"input": "Hi", "background": True})
        await anyio.wait_all_tasks_blocked()
        await kit.aclose()
        release.set()
        assert (await read_final(ResponsesKit(HangingBackend(), store=store), started["id"]))["status"] == "failed"


def test_event_loop_ending_without_close_leaves_nothing_in_progress(anyio_backend_name: str) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["half ", Pause(60)]), store=store, clock=clock)

    async def main(action: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.fail_after(BOUND):
            return await action()

    async def start() -> str:
        started = await kit.service.submit({"input": "Hi", "background": True})
        await anyio.wait_all_tasks_blocked()
        return str(started["id"])

    async def check_stored() -> str:
        clock.now += 1000
        response = await kit.retrieve(response_id)
        check_response(response)
        assert replay_stream(await read_stream(kit, response_id)) == response
        return str(response["status"])

    response_id = anyio.run(main, start, backend=anyio_backend_name)
    assert anyio.run(main, check_stored, backend=anyio_backend_name) in ("cancelled", "failed")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Limits, {"max_body_bytes": "1MB"}),
        (Limits, {"max_threads": 0}),
        (Limits, {"max_tool_calls": -1}),
        (Limits, {"max_websockets": True}),
        (Limits, {"max_websockets": 1.5}),
        *(
            (Timeouts, {name: value})
            for name in ("keep_alive", "send", "lease", "websocket")
            for value in ("15", 0, -1, True)
        ),
    ],
    ids=str,
)
def test_limits_and_timeouts_refuse_bad_numbers_by_name(kind: type[Any], settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"^'{next(iter(settings))}' must be a"):
        kind(**settings)


# Derived kits and maintenance.


async def test_with_settings_shares_store_and_secrets() -> None:
    reasoning_backend = ScriptedBackend(
        [outputs.Reasoning("secret"), "Hi."], models=[Model("scripted", reasoning=True)]
    )
    kit = ResponsesKit(reasoning_backend, limits=Limits(max_tool_calls=3))
    other = kit.with_settings(backend=ScriptedBackend(["Hello."]), limits=Limits(max_tool_calls=4))
    encrypted_request = {"include": ["reasoning.encrypted_content"], "input": "Hi"}
    created = await kit.create(encrypted_request, owner="ann")
    assert (await other.retrieve(created["id"], owner="ann")) == created
    continued = await other.create({"input": [*created["output"], {"role": "user", "content": "Hi"}]}, owner="ann")
    assert (continued["status"], continued["max_tool_calls"]) == ("completed", None)
    assert other.store is kit.store


async def test_with_settings_validates_settings() -> None:
    with pytest.raises(errors.ConfigurationError, match="threads"):
        ResponsesKit(ScriptedBackend(["Hi"])).with_settings(limits=Limits(max_threads=0))


async def test_prune_ends_orphaned_and_deletes_expired_responses() -> None:
    class PruningStore(MemoryStore):
        async def prune(self) -> int:
            return 7

    assert await ResponsesKit(ScriptedBackend(["Hi"]), store=PruningStore()).prune() == (7, 0)


async def test_request_bound_backend_refuses_background_and_keys() -> None:
    class RequestBoundBackend(ScriptedBackend):
        is_request_bound = True

    kit = ResponsesKit(RequestBoundBackend(["Hi."], ["Hi."]))
    with pytest.raises(errors.UnsupportedParameter) as refused:
        await kit.create({"input": "Hi", "background": True})
    assert refused.value.param == "background"
    with pytest.raises(errors.UnsupportedParameter) as refused:
        await kit.service.submit({"input": "Hi"}, key="a key")
    assert refused.value.param == "Idempotency-Key"
    assert (await kit.create({"input": "Hi"}))["status"] == "completed"


# Events and tokens.


async def test_events_yields_logged_events_then_new_ones() -> None:
    kit = ResponsesKit(ScriptedBackend(["One ", Pause(0.05), "two."]))
    started = await kit.create({"input": "Hi", "background": True}, owner="ann")
    events = [event async for event in kit.events(started["id"], owner="ann")]
    assert check_stream(events)["output"][0]["content"][0]["text"] == "One two."
    assert [event async for event in kit.events(started["id"], owner="ann", after=3)] == events[4:]
    assert [event async for event in kit.events(started["id"], owner="ann", after=len(events))] == []
    with pytest.raises(errors.NotFound):
        await anext(kit.events(started["id"], owner="bob"))


async def test_abandoned_events_do_not_end_response() -> None:
    kit = ResponsesKit(ScriptedBackend(["One ", Pause(0.05), "two."]))
    started = await kit.create({"input": "Hi", "background": True})
    events = kit.events(started["id"])
    assert (await anext(events))["type"] == "response.created"
    await events.aclose()
    assert (await kit.wait(started["id"]))["status"] == "completed"


class CountingBackend(ScriptedBackend):
    async def count_tokens(self, turn: Turn) -> int:
        return sum(len(message["content"]) for message in turn.messages())


async def test_count_tokens_counts_whole_conversation_and_stores_nothing() -> None:
    store = MemoryStore()
    kit = ResponsesKit(CountingBackend(["four"]), store=store)
    first = await kit.create({"input": "1234567"}, owner="ann")
    stored = len(store)
    body = {"input": "12", "previous_response_id": first["id"], "instructions": "123"}
    assert await kit.count_tokens(body, owner="ann") == 3 + 7 + 4 + 2
    assert len(store) == stored
    with pytest.raises(errors.PreviousResponseNotFound):
        await kit.count_tokens(body, owner="bob")


async def test_count_tokens_raises_model_error_without_details_if_backend_fails() -> None:
    class Failing(ScriptedBackend):
        async def count_tokens(self, turn: Turn) -> int:
            raise RuntimeError("hunter2")

    with pytest.raises(errors.ModelError) as raised:
        await ResponsesKit(Failing(["Hi"])).count_tokens({"input": "Hi"})
    assert "hunter2" not in str(raised.value)


async def test_count_tokens_is_refused_after_close() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    await kit.aclose()
    with pytest.raises(errors.ServerError):
        await kit.count_tokens({"input": "Hi"})


async def test_count_tokens_returns_none_if_backend_cannot_count() -> None:
    assert await ResponsesKit(ScriptedBackend(["Hi"])).count_tokens({"input": "Hi"}) is None
