"""Everything that the API can do, as methods."""

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
from tests.support.memory import kept, soon_given_up

from ..engine.test_repository import Gated, ended, rebuilt, told
from ..engine.test_run import Audience, Call, Clock, Watched, check_kept, check_order, record_of, slow
from ..runners.test_runners import Elsewhere
from ..support.conformance import check_response, check_stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class Endless(Backend):
    """Talks until it is closed."""

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


# Creating.


async def test_create_returns_the_whole_response() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hello, ", "world.", outputs.Usage(3, 2)]), clock=lambda: 1_750_000_000.9)
    response = await kit.create({"model": "scripted", "input": "Hi", "metadata": {"k": "v"}})
    check_response(response)
    assert response["status"] == "completed"
    assert (response["created_at"], response["completed_at"]) == (1_750_000_000, 1_750_000_000)
    assert response["output"][0]["content"][0]["text"] == "Hello, world."
    assert response["usage"]["total_tokens"] == 5
    assert response["id"].startswith("resp_")
    assert len(response["id"]) >= 5 + 32, "128 random bits"


async def test_create_says_when_a_response_is_incomplete() -> None:
    response = await ResponsesKit(ScriptedBackend(["Once", outputs.Finish("max_output_tokens")])).create(
        {"input": "Hi"}
    )
    check_response(response)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_create_raises_what_made_the_response_fail_and_keeps_it() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half ", LookupError("gone")]), store=store)
    with pytest.raises(errors.ModelError):
        await kit.create({"input": "Hi"})
    assert len(store) == 1


async def test_create_refuses_what_is_no_request_before_anything_is_stored() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store)
    for body in ({"input": 1}, {"input": []}, {"input": "Hi", "model": "other"}, [], None):
        with pytest.raises(errors.InvalidRequest):
            await kit.create(body)
    assert len(store) == 0


async def test_a_text_with_lone_surrogates_is_refused_and_harms_nothing() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    for body in (
        {"input": "\ud83d"},
        {"input": "Hi", "instructions": "\ud83d"},
        {"input": "Hi", "metadata": {"\ud83d": ""}},
    ):
        with pytest.raises(errors.InvalidRequest):
            await kit.create(body)


@pytest.mark.parametrize("parameter", [{"x": "\ud83d"}, {"\ud83d": 1}, {"x": float("nan")}, {"x": object()}])
async def test_a_tool_whose_parameters_are_no_json_is_refused_or_does_no_harm(parameter: dict[str, Any]) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    body = {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": parameter}]}
    try:
        response = await kit.create(body)
    except errors.APIError:
        return
    assert (await kit.retrieve(response["id"]))["status"] == "completed"


# Streaming.


async def test_stream_tells_every_event_and_the_record_is_the_last_ones() -> None:
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("Hm."), "Hello, ", "world."]))
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            told = [event async for event in events]
    response = check_stream(told)
    assert await kit.retrieve(response["id"]) == response


async def test_raw_reasoning_and_extension_events_are_told_where_the_owner_wants_them() -> None:
    script = [outputs.Reasoning("Hm."), outputs.Event("acme:progress", {"percent": 50}), "Yes."]
    for wanted in (True, False):
        kit = ResponsesKit(ScriptedBackend(script), stream_reasoning=wanted, stream_extensions=wanted)
        async with kit.stream({"input": "Hi"}) as events:
            kinds = [event["type"] async for event in events]
        assert ("response.reasoning.delta" in kinds) is wanted
        assert ("acme:progress" in kinds) is wanted


async def test_each_event_is_told_before_the_next_output_is_made() -> None:
    log: list[str] = []

    class Logging(Backend):
        models = ("logging",)

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            for word in ("one", "two", "three"):
                log.append(f"made {word}")
                yield word

    async with ResponsesKit(Logging()).stream({"input": "Hi"}) as events:
        async for event in events:
            if "delta" in event:
                log.append(f"heard {event['delta']}")
    assert log.index("heard one") < log.index("made three")


async def test_leaving_a_stream_early_cancels_the_response() -> None:
    backend = Endless()
    kit = ResponsesKit(backend)
    heard: list[str] = []
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                heard.append(event.get("response", {}).get("id"))
                if "delta" in event:
                    break
    assert backend.closed
    stored = await kit.retrieve(heard[0])
    check_response(stored)
    assert stored["status"] == "cancelled"


async def test_leaving_a_stream_at_once_leaves_nothing_in_progress() -> None:
    store = MemoryStore()
    kit = ResponsesKit(Endless(), store=store)
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}):
            pass
    (record,) = kept(store)
    assert record.final


async def test_leaving_a_stream_does_not_wait_for_a_backend_that_is_silent() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi", Pause(60)]))
    heard: list[dict[str, Any]] = []
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                heard.append(event)
                if "delta" in event:
                    await anyio.wait_all_tasks_blocked()
                    break
    assert (await kit.retrieve(heard[0]["response"]["id"]))["status"] == "cancelled"


async def test_leaving_a_stream_after_its_last_event_leaves_it_completed() -> None:
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
async def test_the_callers_own_exception_comes_out_as_it_is(error: Exception) -> None:
    backend = Endless()
    kit = ResponsesKit(backend)

    async def hear_and_raise() -> None:
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                if "delta" in event:
                    raise error

    with anyio.fail_after(BOUND), pytest.raises(type(error)) as caught:
        await hear_and_raise()
    assert caught.value is error
    assert backend.closed


async def test_a_cancelled_caller_closes_the_stream() -> None:
    backend = Endless()
    kit = ResponsesKit(backend)
    heard: list[str] = []
    with anyio.fail_after(BOUND), anyio.CancelScope() as scope:
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                heard.append(event.get("response", {}).get("id", ""))
                if "delta" in event:
                    scope.cancel()
    assert scope.cancelled_caught
    assert backend.closed
    assert (await kit.retrieve(heard[0]))["status"] == "cancelled"


async def test_a_bad_request_is_raised_when_the_stream_is_opened() -> None:
    with pytest.raises(errors.InvalidRequest):
        async with ResponsesKit(ScriptedBackend(["Hi"])).stream({"input": 1}):
            pytest.fail("the stream was opened")


async def test_what_fails_later_is_told_and_not_raised() -> None:
    kit = ResponsesKit(ScriptedBackend(["half ", LookupError("gone")]))
    async with kit.stream({"input": "Hi"}) as events:
        told = [event async for event in events]
    assert check_stream(told)["status"] == "failed"


async def test_plain_generators_stream_too_and_are_closed() -> None:
    closed = threading.Event()

    class Plain(Backend):
        models = ("plain",)

        def generate(self, turn: Turn) -> Iterator[str]:
            try:
                while not turn.cancelled:
                    yield "more "
            finally:
                closed.set()

    with anyio.fail_after(BOUND):
        async with ResponsesKit(Plain()).stream({"input": "Hi"}) as events:
            async for event in events:
                if "delta" in event:
                    break
        assert await anyio.to_thread.run_sync(closed.wait, BOUND)


# Stored responses.


async def test_retrieve_gives_exactly_what_create_gave_to_its_owner_alone() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi ", outputs.ToolCall("f"), outputs.Item("acme:x", {"y": None})]))
    response = await kit.create({"input": "Hi", "tools": [{"type": "function", "name": "f"}]}, owner="ann")
    assert await kit.retrieve(response["id"], owner="ann") == response
    for stranger in ("bob", ""):
        with pytest.raises(errors.NotFound) as foreign:
            await kit.retrieve(response["id"], owner=stranger)
        with pytest.raises(errors.NotFound) as unknown:
            await kit.retrieve("resp_unknown", owner=stranger)
        assert foreign.value.payload() == unknown.value.payload()


async def test_what_is_changed_outside_does_not_change_what_is_stored() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    body: dict[str, Any] = {"input": [{"role": "user", "content": "Hi"}], "metadata": {"k": "v"}}
    response = await kit.create(body)
    response["output"].clear()
    body["metadata"]["k"] = "changed"
    kept = await kit.retrieve(response["id"])
    kept["output"].clear()
    kept = await kit.retrieve(response["id"])
    assert (len(kept["output"]), kept["metadata"]) == (1, {"k": "v"})


async def test_a_response_can_be_retrieved_while_it_is_made() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi", Pause(60)]))
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                stored = await kit.retrieve(event["response"]["id"])
                check_response(stored)
                assert (stored["status"], stored["output"]) == ("in_progress", [])
                break


async def test_delete_forgets_once() -> None:
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


async def test_input_items_come_by_pages_in_both_orders() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    first = await kit.create({"input": "before"})
    body = {"input": [{"role": "user", "content": f"{n}"} for n in range(25)], "previous_response_id": first["id"]}
    response_id = (await kit.create(body))["id"]

    def texts(page: dict[str, Any]) -> list[str]:
        return [item["content"][0]["text"] for item in page["data"]]

    newest = await kit.input_items(response_id)
    assert texts(newest) == [f"{n}" for n in range(24, 4, -1)], "twenty, newest first, and nothing of what came before"
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
async def test_a_page_that_cannot_be_is_refused(page: dict[str, Any], param: str) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    response = await kit.create({"input": "Hi"})
    with pytest.raises(errors.InvalidRequest) as caught:
        await kit.input_items(response["id"], **page)
    assert caught.value.param == param


@pytest.mark.parametrize("method", ["get", "chain", "items", "delete"])
async def test_a_store_out_of_reach_is_a_store_error_that_says_no_more(method: str) -> None:
    class Gone(MemoryStore):
        pass

    async def fail(*_: Any) -> Any:
        raise ConnectionError("secret-host refused")

    setattr(Gone, method, fail)
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=Gone())
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


# Models, owners, set-up.


async def test_models_are_listed_and_found_by_name() -> None:
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


async def test_closing_ends_what_is_open_tells_so_and_refuses_what_comes_later() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half ", Pause(60)]), store=store)
    told: list[dict[str, Any]] = []
    async with anyio.create_task_group() as group:

        async def listen() -> None:
            async with kit.stream({"input": "Hi"}) as events:
                told.extend([event async for event in events])

        group.start_soon(listen)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(BOUND):
            await kit.aclose()
    assert check_stream(told)["status"] == "failed"
    assert (await kit.retrieve(told[0]["response"]["id"]))["status"] == "failed"
    with pytest.raises(errors.ServerError, match="shutting down"):
        await kit.create({"input": "Hi again"})


async def test_a_response_that_begins_while_the_kit_is_closed_is_stopped_with_the_others() -> None:
    admitted, go_on = anyio.Event(), anyio.Event()

    class Slow(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            admitted.set()
            await go_on.wait()

    kit = ResponsesKit(Slow([Pause(60)]))
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
            go_on.set()
    assert [error.message for error in failures] == ["The server is shutting down. Try again."]


async def test_closing_twice_at_once_closes_the_backend_once() -> None:
    closed: list[str] = []

    class Closing(ScriptedBackend):
        def close(self) -> None:
            closed.append("closed")

    kit = ResponsesKit(Closing([Pause(60)]))
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


class Unfinished(Backend):
    models = ("unfinished",)


class Nameless(ScriptedBackend):
    def __init__(self, models: Any) -> None:
        super().__init__(["Hi"])
        self.models = models


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        (Unfinished(), r"must define generate\(self, turn\)"),
        (ScriptedBackend, r"not the class: use ScriptedBackend\(\)"),
        ("smollm2", "instance of a subclass of Backend"),
        (object(), "instance of a subclass of Backend"),
        (Nameless([]), "models = "),
        (Nameless("parrot"), "models = "),
        (Nameless(Model("parrot")), "models = "),
        (Nameless(name for name in ["parrot"]), "models = "),
        (Nameless([""]), "different names"),
        (Nameless(["a", "a"]), "different names"),
        (Nameless(["a", Model("a")]), "different names"),
        (Nameless([1]), "different names"),
    ],
)
def test_what_is_no_backend_is_refused_at_once_with_the_remedy(backend: Any, remedy: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=remedy):
        ResponsesKit(backend)


@pytest.mark.parametrize("settings", [{"store": {}}, {"store": MemoryStore}, {"owner": "ann"}])
def test_what_is_no_store_or_no_hook_is_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError):
        ResponsesKit(ScriptedBackend(["Hi"]), **settings)


@pytest.mark.parametrize("owner", ["", None, False, 0, ()])
async def test_an_owner_without_a_name_is_nobody(owner: Any) -> None:
    with pytest.raises(errors.Unauthorized):
        await ResponsesKit(ScriptedBackend(["Hi"]), owner=lambda request: owner).service.resolve_owner(object())


@pytest.mark.parametrize("owner", [7, True, b"ann", ["ann"]])
async def test_an_owner_that_is_no_string_is_the_hooks_fault(owner: Any) -> None:
    with pytest.raises(errors.ConfigurationError, match=type(owner).__name__):
        await ResponsesKit(ScriptedBackend(["Hi"]), owner=lambda request: owner).service.resolve_owner(object())


@pytest.mark.parametrize("field", ["conversation", "prompt"])
async def test_a_field_that_would_change_the_answer_is_refused_rather_than_ignored(field: str) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    with pytest.raises(errors.UnsupportedParameter) as caught:
        await kit.create({"input": "Hi", field: {"id": "x"}})
    assert caught.value.param == field
    await kit.create({"input": "Hi", field: None})


async def test_a_models_own_values_are_used_and_echoed_where_a_request_says_none() -> None:
    own = {"temperature": 0.2, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.3, "max_output_tokens": 99}
    backend = ScriptedBackend(["Hi"], models=[Model("small", **own)])
    kit = ResponsesKit(backend)
    asked = dict.fromkeys(own, 0.0) | {"max_output_tokens": 16}
    for said, applied in (({}, own), (asked, asked)):
        response = await kit.create({"input": "Hi", **said})
        assert {name: response[name] for name in own} == applied
        assert {name: getattr(backend.turns[-1], name) for name in own} == applied


async def test_the_owner_hook_may_be_plain_or_async_and_may_refuse() -> None:
    async def later(request: Any) -> str | None:
        await anyio.lowlevel.checkpoint()
        return request["user"]

    def refuses(request: Any) -> str:
        raise errors.Unauthorized("Your key has expired.")

    backend = ScriptedBackend(["Hi"])
    for hook in (lambda request: request["user"], later):
        kit = ResponsesKit(backend, owner=hook)
        assert await kit.service.resolve_owner({"user": "ann"}) == "ann"
        with pytest.raises(errors.Unauthorized):
            await kit.service.resolve_owner({"user": None})
    with pytest.raises(errors.Unauthorized, match="expired"):
        await ResponsesKit(backend, owner=refuses).service.resolve_owner({})
    with pytest.raises(KeyError):
        await ResponsesKit(backend, owner=later).service.resolve_owner({})
    assert await ResponsesKit(backend).service.resolve_owner(object()) == ""


async def test_closing_the_kit_closes_the_backend() -> None:
    closed: list[str] = []

    class Closing(ScriptedBackend):
        def close(self) -> None:
            closed.append("closed")

    await ResponsesKit(Closing(["Hi"])).aclose()
    assert closed == ["closed"]


def test_one_kit_serves_several_event_loops(anyio_backend_name: str) -> None:
    class Plain(Backend):
        models = ("plain",)

        def generate(self, turn: Turn) -> Iterator[str]:
            yield turn.text

    kit = ResponsesKit(Plain(), limits=Limits(max_threads=1))

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

    async def look() -> None:
        for response_id in (*ids, *both):
            assert (await kit.retrieve(response_id))["status"] == "completed"

    anyio.run(look, backend=anyio_backend_name)


async def test_the_next_request_can_build_on_a_response_the_moment_its_end_is_told() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    async with kit.stream({"input": "one"}) as events:
        async for event in events:
            if event["type"] == "response.completed":
                again = await kit.create({"input": "two", "previous_response_id": event["response"]["id"]})
    check_response(again)


async def test_a_store_of_ones_own_is_given_the_owner_with_every_call() -> None:
    owners: list[tuple[str, str]] = []

    class Watching(MemoryStore):
        async def create(self, owner: str, record: Record) -> Record | None:
            owners.append(("create", owner))
            return await super().create(owner, record)

        async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
            owners.append(("update", owner))
            return await super().update(owner, record, log)

    await ResponsesKit(ScriptedBackend(["Hi"]), store=Watching()).create({"input": "Hi"}, owner="ann")
    assert owners == [("create", "ann"), ("update", "ann")]


# The server goes down.


async def test_what_ends_in_time_is_completed_and_the_rest_is_failed_queued_ones_too() -> None:
    class Two(Backend):
        models = ("two",)

        def __init__(self) -> None:
            self.goes_on = anyio.Event()
            self.begun: list[str] = []

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            self.begun.append(turn.text)
            yield "half "
            await (self.goes_on.wait() if turn.text == "quick" else anyio.sleep_forever())
            yield "whole"

    backend, store, clock = Two(), MemoryStore(), Clock()
    kit = ResponsesKit(backend, store=store, clock=clock, runner=LocalRunner(max_concurrent=2, max_queued=10))
    ids = {}
    for name in ("quick", "slow", "queued", "queued too"):
        ids[name] = (await kit.service.submit({"input": name, "background": True}))["id"]
        await anyio.wait_all_tasks_blocked()
    audience = Audience()
    with anyio.fail_after(BOUND):
        run = await kit.service.create_run({"input": "slow"}, streamed=True)
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(kit.aclose, 0.2)
            await anyio.wait_all_tasks_blocked()
            assert kit.lifecycle.is_closing
            for ask in (kit.service.submit, kit.create):
                with pytest.raises(errors.ServerError, match="shutting down"):
                    await ask({"input": "late", "background": ask == kit.service.submit})
            backend.goes_on.set()
    statuses = {name: (await ended(kit, response_id))["status"] for name, response_id in ids.items()}
    assert statuses.pop("quick") == "completed"
    assert set(statuses.values()) == {"failed"}
    assert check_stream(audience.events) == await record_of(run, store)
    assert audience.events[-1]["response"]["error"]["message"] == "The server is shutting down. Try again."
    assert set(backend.begun) == {"quick", "slow"} | (set(backend.begun) & {"queued", "queued too"})
    assert len(store) == 5
    await check_kept(store, clock)


async def test_without_grace_all_is_ended_at_once_and_the_backend_is_not_asked_for_what_waited() -> None:
    backend, store = Gated(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=LocalRunner(max_concurrent=1, max_queued=100))
    ids = [(await kit.service.submit({"input": "Hi", "background": True}))["id"] for _ in range(20)]
    with anyio.fail_after(BOUND):
        await backend.half.wait()
        await kit.aclose()
    assert len(backend.turns) == 1, "the backend was asked for responses that were to end"
    for response_id in ids:
        assert (await ended(kit, response_id))["status"] == "failed"


@pytest.mark.parametrize("grace", [0.0, 60.0])
async def test_whatever_moment_the_server_goes_down_at_nothing_stays_in_progress(grace: float) -> None:
    for steps in range(60):
        store, clock = Watched(slow), Clock()
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
        assert all(record.final for record in kept(store)), f"closed after {steps} steps"
        statuses = {response["status"] for response in await check_kept(store, clock)}
        assert statuses <= ({"completed"} if grace else {"completed", "failed"})


@pytest.mark.parametrize("grace", [0.0, 60.0])
async def test_whoever_follows_a_response_when_its_server_goes_down_hears_its_end(grace: float) -> None:
    for steps in range(0, 80, 2):
        store, clock = Watched(slow), Clock()
        kit = ResponsesKit(ScriptedBackend(["one ", outputs.Reasoning("two")]), store=store, clock=clock)
        heard: list[bytes] = []

        async def hear(kit: ResponsesKit, response_id: str, heard: list[bytes]) -> None:
            heard.append(await told(kit, response_id))

        with anyio.fail_after(BOUND):
            started = await kit.service.submit({"input": "Hi", "background": True})
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(hear, kit, started["id"], heard)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.start_soon(kit.aclose, grace)
        (response,) = await check_kept(store, clock)
        assert [check_order(decode_events(stream)) for stream in heard] == [response] * 2, f"closed after {steps} steps"


async def test_a_response_that_is_deleted_as_the_server_goes_down_ends_for_whoever_follows_it() -> None:
    async def around(name: str, call: Call) -> Any:
        if name == "get" and kit.lifecycle.is_closing:
            await MemoryStore.delete(store, "", started["id"])
        return await call()

    store, heard = Watched(around), list[bytes]()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=Elsewhere())
    started = await kit.service.submit({"input": "Hi", "background": True})

    async def hear() -> None:
        heard.append(await told(kit, started["id"]))

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(hear)
            await anyio.wait_all_tasks_blocked()
            await kit.aclose()
    assert rebuilt(heard[0])["error"]["code"] == "response_not_found"


async def test_a_backend_that_never_lets_go_does_not_hold_the_server_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    soon_given_up(monkeypatch, 0.05)

    class Clinging(Backend):
        models = ("clinging",)

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            try:
                yield "half "
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await let_go.wait()

    let_go, store = anyio.Event(), MemoryStore()
    kit = ResponsesKit(Clinging(), store=store)
    with anyio.fail_after(BOUND):
        started = await kit.service.submit({"input": "Hi", "background": True})
        await anyio.wait_all_tasks_blocked()
        await kit.aclose()
        let_go.set()
        assert (await ended(ResponsesKit(Clinging(), store=store), started["id"]))["status"] == "failed"


def test_a_loop_that_ends_without_closing_leaves_nothing_in_progress_for_ever(anyio_backend_name: str) -> None:
    store, clock = MemoryStore(), Clock()
    kit = ResponsesKit(ScriptedBackend(["half ", Pause(60)]), store=store, clock=clock)

    async def main(act: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.fail_after(BOUND):
            return await act()

    async def begin() -> str:
        started = await kit.service.submit({"input": "Hi", "background": True})
        await anyio.wait_all_tasks_blocked()
        return str(started["id"])

    async def look() -> str:
        clock.now += 1000
        response = await kit.retrieve(response_id)
        check_response(response)
        assert rebuilt(await told(kit, response_id)) == response
        return str(response["status"])

    response_id = anyio.run(main, begin, backend=anyio_backend_name)
    assert anyio.run(main, look, backend=anyio_backend_name) in ("cancelled", "failed")


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


# Kits of kits, and upkeep.


async def test_a_kit_with_other_settings_shares_the_store_and_what_is_sealed() -> None:
    thinks = ScriptedBackend([outputs.Reasoning("secret"), "Hi."], models=[Model("scripted", reasoning=True)])
    one = ResponsesKit(thinks, limits=Limits(max_tool_calls=3))
    other = one.with_settings(backend=ScriptedBackend(["Hello."]), limits=Limits(max_tool_calls=4))
    sealed = {"include": ["reasoning.encrypted_content"], "input": "Hi"}
    made = await one.create(sealed, owner="ann")
    assert (await other.retrieve(made["id"], owner="ann")) == made
    again = await other.create({"input": [*made["output"], {"role": "user", "content": "Hi"}]}, owner="ann")
    assert (again["status"], again["max_tool_calls"]) == ("completed", None)
    assert other.store is one.store


async def test_a_kit_with_other_settings_is_checked_as_any() -> None:
    with pytest.raises(errors.ConfigurationError, match="threads"):
        ResponsesKit(ScriptedBackend(["Hi"])).with_settings(limits=Limits(max_threads=0))


async def test_pruning_ends_what_has_lost_its_worker_and_removes_what_has_outlived_its_time() -> None:
    class Counting(MemoryStore):
        async def prune(self) -> int:
            return 7

    assert await ResponsesKit(ScriptedBackend(["Hi"]), store=Counting()).prune() == (7, 0)


async def test_a_backend_that_is_bound_to_its_request_is_asked_for_nothing_that_outlives_it() -> None:
    class Bound(ScriptedBackend):
        is_request_bound = True

    kit = ResponsesKit(Bound(["Hi."], ["Hi."]))
    with pytest.raises(errors.UnsupportedParameter) as refused:
        await kit.create({"input": "Hi", "background": True})
    assert refused.value.param == "background"
    with pytest.raises(errors.UnsupportedParameter) as refused:
        await kit.service.submit({"input": "Hi"}, key="a key")
    assert refused.value.param == "Idempotency-Key"
    assert (await kit.create({"input": "Hi"}))["status"] == "completed"
