"""Tests of hosted tools: arguments, results, failures, and the loop that runs them."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import anyio
import anyio.lowlevel
import jsonschema
import pydantic
import pytest

from responses_kit import Backend, HostedTool, Limits, Model, ResponsesKit, Turn, errors, outputs
from responses_kit._concurrency.threads import ThreadLimiter
from responses_kit.schema.request import PlainText
from responses_kit.testing import Pause, ScriptedBackend
from responses_kit.tools import HostedCall, run_hosted_calls

from ..support.conformance import check_response, check_stream

pytestmark = pytest.mark.timeout(20)

anyio_both = pytest.mark.anyio

BOUND = 5.0

call = outputs.ToolCall


# From functions.


class TemperatureUnit(Enum):
    """A unit of temperature."""

    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Place(pydantic.BaseModel):
    """A place."""

    city: str
    country: str = "FR"


class Trip(pydantic.BaseModel):
    """A journey."""

    title: str
    stops: list[Place] = pydantic.Field(min_length=1)


class Even(pydantic.BaseModel):
    """An even number."""

    n: int

    @pydantic.field_validator("n")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


def weather(city: str, day: date, unit: TemperatureUnit = TemperatureUnit.CELSIUS, *, hours: int = 24) -> str:
    """Return the weather.

    Works for any city.
    """
    return f"{city}|{day!r}|{unit!r}|{hours!r}"


def from_function(function: Callable[..., Any], **settings: Any) -> HostedTool:
    return HostedTool.from_function("acme:tool", function, **settings)


def turn_of(**settings: Any) -> Turn:
    return Turn(
        **({"model": "m", "items": [], "text_format": PlainText(), "owner": "ann", "response_id": "resp_1"} | settings)
    )


def result_of(tool: HostedTool, arguments: str | dict[str, Any], turn: Turn | None = None) -> Any:
    """Return the result of a plain tool for the model's arguments."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return tool.call(tool.parse_arguments(written), turn or turn_of())


def test_function_schema_comes_from_annotations() -> None:
    tool = from_function(weather)
    assert (tool.type, tool.name) == ("acme:tool", "weather")
    assert tool.description == "Return the weather.\n\nWorks for any city."
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    assert tool.parameters["type"] == "object"
    assert tool.parameters["required"] == ["city", "day"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.parameters["properties"]["city"] == {"type": "string"}
    assert tool.parameters["properties"]["day"] == {"type": "string", "format": "date"}
    assert tool.parameters["properties"]["hours"] == {"type": "integer"}
    assert "title" not in json.dumps(tool.parameters)


def test_function_receives_annotated_types() -> None:
    tool = from_function(weather)
    assert (
        result_of(tool, {"city": "Rome", "day": "2024-02-29"})
        == f"Rome|{date(2024, 2, 29)!r}|{TemperatureUnit.CELSIUS!r}|24"
    )
    assert result_of(tool, {"city": "Rome", "day": "2024-02-29", "unit": "fahrenheit", "hours": 1}).endswith(
        f"{TemperatureUnit.FAHRENHEIT!r}|1"
    )


def test_name_and_description_can_be_overridden() -> None:
    tool = from_function(weather, name="forecast", description="", timeout=1.5)
    assert (tool.name, tool.description, tool.timeout) == ("forecast", "", 1.5)
    assert from_function(lambda: None, name="nothing").description == ""


@pytest.mark.parametrize(
    ("annotation", "written", "value"),
    [
        (int, 3, 3),
        (float, 1, 1.0),
        (bool, True, True),
        (str, "", ""),
        (None, None, None),
        (int | None, None, None),
        (Literal["a", "b"], "b", "b"),
        (list[int], [1, 2], [1, 2]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (set[int], [1, 2], {1, 2}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (TemperatureUnit, "celsius", TemperatureUnit.CELSIUS),
        (date, "2024-02-29", date(2024, 2, 29)),
        (datetime, "2024-02-29T12:00:00Z", datetime(2024, 2, 29, 12, tzinfo=UTC)),
        (UUID, "2eb8aa08-aa98-41ea-b4aa-73b441d16380", UUID("2eb8aa08-aa98-41ea-b4aa-73b441d16380")),
        (Decimal, "1.5", Decimal("1.5")),
        (Place, {"city": "Rome"}, Place(city="Rome")),
        (Trip, {"title": "x", "stops": [{"city": "Rome"}]}, Trip(title="x", stops=[Place(city="Rome")])),
        (list[Place], [{"city": "Rome"}], [Place(city="Rome")]),
        (Annotated[int, pydantic.Field(ge=1, description="How many.")], 1, 1),
        (Any, {"a": [1, None]}, {"a": [1, None]}),
    ],
    ids=str,
)
def test_json_types_and_models_are_supported(annotation: Any, written: Any, value: Any) -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return x

    function.__annotations__ = {"x": annotation}
    tool = from_function(function)
    jsonschema.Draft202012Validator(tool.parameters).validate({"x": written})
    assert result_of(tool, {"x": written}) == value
    for wrong in ({}, {"x": written, "y": 1}, {"X": written}):
        with pytest.raises(errors.ToolError):
            result_of(tool, wrong)


def test_property_named_title_is_kept_and_schema_titles_are_dropped() -> None:
    def plan(trip: Trip, title: str) -> str:
        return f"{title}: {trip.title}"

    tool = from_function(plan)
    assert set(tool.parameters["properties"]) == {"trip", "title"}
    assert set(tool.parameters["$defs"]["Trip"]["properties"]) == {"title", "stops"}
    assert tool.parameters["$defs"]["Trip"]["required"] == ["title", "stops"]
    assert '"title": "' not in json.dumps(tool.parameters)
    assert result_of(tool, {"title": "a", "trip": {"title": "b", "stops": [{"city": "c"}]}}) == "a: b"


@pytest.mark.parametrize(
    "name",
    [
        "self",
        "cls",
        "schema",
        "model_config",
        "type",
        "title",
        "copy",
        "json",
        "arguments",
        "turn",
        "_private",
        "__x",
        "größe",
    ],
)
def test_any_parameter_name_is_accepted(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def function({name}: int, *, other: int = 2) -> int:\n    return {name} + other", space)
    tool = from_function(space["function"])
    assert set(tool.parameters["properties"]) == {name, "other"}
    assert result_of(tool, {name: 1}) == 3


def test_parameter_without_annotation_takes_any_json() -> None:
    def echo(x, y=2):  # type: ignore[no-untyped-def]
        return x, y

    tool = from_function(echo)
    assert (result_of(tool, {"x": [1]}), result_of(tool, {"x": None, "y": {}})) == (([1], 2), (None, {}))


def test_function_without_parameters_takes_none() -> None:
    tool = from_function(lambda: "done", name="do")
    for written in ("", " \n", "{}", " {} "):
        assert result_of(tool, written) == "done"
    with pytest.raises(errors.ToolError):
        result_of(tool, '{"x": 1}')


def test_turn_parameter_is_injected_and_hidden() -> None:
    def plain(turn: Turn, x: int) -> Any:
        return turn, x

    def named_otherwise(x: int, *, request: Turn) -> Any:
        return request, x

    def optional(x: int, turn: Turn | None = None) -> Any:
        return turn, x

    def annotated(x: int, turn: Annotated[Turn, "the request"]) -> Any:
        return turn, x

    def textual(x: int, turn: Turn) -> Any:
        return turn, x

    given_turn = turn_of(owner="bob")
    for function in (plain, named_otherwise, optional, annotated, textual):
        tool = from_function(function)
        assert set(tool.parameters["properties"]) == {"x"}
        assert tool.parameters["required"] == ["x"]
        assert result_of(tool, {"x": 1}, given_turn) == (given_turn, 1)
        with pytest.raises(errors.ToolError):
            result_of(tool, {"x": 1, "turn": {"owner": "eve"}}, given_turn)


def test_methods_are_supported() -> None:
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        def price(self, item: str) -> str:
            """Return a price."""
            return f"{item} at {self.name}"

    tool = from_function(Shop("Ann's").price)
    assert (tool.name, tool.description) == ("price", "Return a price.")
    assert result_of(tool, {"item": "tea"}) == "tea at Ann's"


class Opaque:
    """A class without a JSON schema."""


def _starred(*args: int) -> None: ...
def _double_starred(**more: int) -> None: ...
def _positional(x: int, /) -> None: ...
def _opaque(x: Opaque) -> None: ...
def _callback(x: Callable[[], int]) -> None: ...
def _forward(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def _complex(x: complex) -> None: ...
def _nested(x: list[Opaque]) -> None: ...


@pytest.mark.parametrize(
    "function", [_starred, _double_starred, _positional, _opaque, _callback, _forward, _nested, max, "weather", 7, None]
)
def test_unsupported_annotation_is_refused(function: Any) -> None:
    with pytest.raises(errors.ConfigurationError):
        from_function(function)


@pytest.mark.parametrize(
    "kind", ["", "weather", ":weather", "acme:", "acme weather:x", "acme:x\n", "a" * 65 + ":x", "acme:" + "x" * 129]
)
def test_tool_type_must_be_slug_and_name(kind: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="slug:name"):
        HostedTool(kind)


@pytest.mark.parametrize("name", ["", "a b", "größe", "x" * 65, "a.b", "x\n"])
def test_tool_name_must_be_valid(name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="name"):
        HostedTool("acme:x", name=name)
    with pytest.raises(errors.ConfigurationError, match="name"):
        from_function(lambda: None)


def test_tool_name_defaults_to_type() -> None:
    assert HostedTool("acme:weather").name == "weather"
    assert HostedTool("acme:web.search/v2").name == "web_search_v2"
    assert len(HostedTool("acme:" + "x" * 128).name) == 64


@pytest.mark.parametrize("parameters", [{"type": "secretword"}, {"$ref": "#/secretword"}, {"properties": 7}])
def test_tool_schema_must_be_valid(parameters: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match="parameters"):
        HostedTool("acme:x", parameters=parameters)


# Arguments.


class RecordingTool(HostedTool):
    """An async tool that records its arguments."""

    def __init__(self, **settings: Any) -> None:
        schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
        super().__init__("acme:look", **({"parameters": schema} | settings))
        self.calls: list[dict[str, Any]] = []

    async def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
        self.calls.append(arguments)
        return f"found {arguments['q']}"


class SyncRecordingTool(RecordingTool):
    """A sync tool that records its arguments."""

    def call(self, arguments: dict[str, Any], turn: Turn) -> Any:  # type: ignore[override]
        self.calls.append(arguments)
        return f"found {arguments['q']}"


@pytest.mark.parametrize(
    "written", ["", "{}", '{"q": 1}', "[]", "null", '{"q": "x"', "{'q': 1}", "\ud83d", '{"q": NaN}']
)
def test_invalid_arguments_are_reported_to_model(written: str) -> None:
    def look(q: str) -> str:
        return q

    for tool in (RecordingTool(), from_function(look)):
        with pytest.raises(errors.ToolError, match="not valid"):
            tool.parse_arguments(written)


def test_arguments_must_be_object() -> None:
    with pytest.raises(errors.ToolError, match="object"):
        HostedTool("acme:x", parameters={"type": "array"}).parse_arguments("[]")


def test_validation_error_of_function_is_reported_to_model() -> None:
    def half(even: Even) -> int:
        return even.n // 2

    tool = from_function(half)
    assert result_of(tool, {"even": {"n": 4}}) == 2
    with pytest.raises(errors.ToolError, match=r"even\.n: .*must be even"):
        result_of(tool, {"even": {"n": 3}})


# Running.


class RecordingEmit:
    """Records emitted items."""

    def __init__(self) -> None:
        self.items: list[outputs.Item] = []

    async def __call__(self, item: outputs.Item) -> None:
        self.items.append(item)

    @property
    def ended(self) -> list[tuple[str, str]]:
        return [(item.status, item.fields["output"]) for item in self.items if item.status != "in_progress"]


async def run(
    *tools: HostedTool, arguments: str = "{}", turn: Turn | None = None, threads: int = 4
) -> list[tuple[str, str]]:
    """Return the status and output of one call of each tool."""
    emitted = RecordingEmit()
    calls = [HostedCall(tool, f"call_{number}", [arguments]) for number, tool in enumerate(tools)]
    with anyio.fail_after(BOUND):
        await run_hosted_calls(calls, turn or turn_of(), ThreadLimiter(threads), emitted)
    return emitted.ended


def tool_of(function: Callable[..., Any], **settings: Any) -> HostedTool:
    return from_function(function, name="tool", **settings)


@anyio_both
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("text", "text"),
        ("", ""),
        (None, "null"),
        (7, "7"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (["é"], '["é"]'),
        (Place(city="Rome"), '{"city":"Rome","country":"FR"}'),
        (date(2024, 2, 29), '"2024-02-29"'),
        (TemperatureUnit.CELSIUS, '"celsius"'),
        ("\ud83d", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
async def test_result_is_shown_as_text_or_json(result: Any, expected: str) -> None:
    async def coroutine() -> Any:
        return result

    def plain() -> Any:
        return result

    def returns_awaitable() -> Awaitable[Any]:
        return coroutine()

    assert await run(tool_of(coroutine), tool_of(plain), tool_of(returns_awaitable)) == [("completed", expected)] * 3


@anyio_both
@pytest.mark.parametrize(
    "result",
    [object(), {"a": {1, object()}}, b"\xff", {"a": "\ud83d"}, lambda: 1, Opaque],
    ids=lambda result: type(result).__name__,
)
async def test_result_other_than_json_fails_call(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def coroutine() -> Any:
        return result

    assert await run(tool_of(coroutine), tool_of(lambda: result)) == [("failed", "The tool failed.")] * 2
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert all("resp_1" in record.message and "tool" in record.message for record in caplog.records)


@anyio_both
async def test_long_result_is_truncated_with_notice() -> None:
    whole, long = "x" * 262_144, "x" * 262_145
    (first, second) = await run(tool_of(lambda: whole), tool_of(lambda: long))
    assert first == ("completed", whole)
    assert second[0] == "completed"
    assert second[1].startswith(whole)
    assert len(second[1]) < 263_000
    assert "1 more character" in second[1][-60:]


class UnusualError(BaseException):
    """An exception that is not an Exception."""


FAILURES: list[Callable[[], BaseException]] = [
    lambda: ValueError("secret"),
    lambda: errors.ModelError("secret"),
    lambda: errors.IllegalOutput("secret"),
    lambda: errors.ClientDisconnected("secret"),
    lambda: asyncio.CancelledError("secret"),
    lambda: StopIteration("secret"),
    lambda: StopAsyncIteration("secret"),
    lambda: GeneratorExit("secret"),
    lambda: SystemExit("secret"),
    lambda: UnusualError("secret"),
    lambda: ExceptionGroup("secret", [ValueError("secret")]),
    lambda: RecursionError("secret"),
]


@anyio_both
@pytest.mark.parametrize("number", range(len(FAILURES)))
async def test_tool_exception_is_not_disclosed_to_model(number: int, caplog: pytest.LogCaptureFixture) -> None:
    async def coroutine() -> str:
        raise FAILURES[number]()

    async def late_coroutine() -> str:
        await anyio.lowlevel.checkpoint()
        raise FAILURES[number]()

    def plain() -> str:
        raise FAILURES[number]()

    tools = (tool_of(coroutine), tool_of(plain), tool_of(late_coroutine), tool_of(lambda: "fine"))
    assert await run(*tools) == [("failed", "The tool failed.")] * 3 + [("completed", "fine")]
    assert len([record for record in caplog.records if record.exc_info]) == 3, "the log has the reason"


@anyio_both
async def test_tool_error_message_reaches_model(caplog: pytest.LogCaptureFixture) -> None:
    async def coroutine() -> str:
        raise errors.ToolError("No such city. Try another one.")

    def plain() -> str:
        raise errors.ToolError("\ud83d" * 300_000)

    (first, second) = await run(tool_of(coroutine), tool_of(plain))
    assert first == ("failed", "No such city. Try another one.")
    assert second[0] == "failed"
    assert set(second[1]) == {"\ufffd"}
    assert len(second[1]) <= 262_144
    assert caplog.records == []


@anyio_both
async def test_broken_tool_fails_call() -> None:
    assert await run(HostedTool("acme:nothing")) == [("failed", "The tool failed.")]


@anyio_both
async def test_invalid_arguments_never_reach_tool() -> None:
    tools = (RecordingTool(), SyncRecordingTool())
    ended = await run(*tools, arguments='{"q": 7}')
    assert [status for status, _ in ended] == ["failed", "failed"]
    assert all("not valid" in output and "q" in output for _, output in ended)
    assert [tool.calls for tool in tools] == [[], []]


@anyio_both
@pytest.mark.parametrize("written", ["", " ", "\n"])
async def test_missing_arguments_are_empty_object(written: str) -> None:
    emitted = RecordingEmit()
    await run_hosted_calls([HostedCall(tool_of(lambda: "done"), "c", [written])], turn_of(), ThreadLimiter(1), emitted)
    assert emitted.ended == [("completed", "done")]
    assert {json.dumps(json.loads(item.fields["arguments"])) for item in emitted.items} == {"{}"}


@anyio_both
async def test_receipt_holds_arguments_and_result() -> None:
    emitted = RecordingEmit()
    one = HostedCall(RecordingTool(), "call_1", ['{"q"', ': "\ud83d"}'])
    await run_hosted_calls([one], turn_of(), ThreadLimiter(1), emitted)
    started, ended = emitted.items
    how = {"call_id": "call_1", "name": "look", "arguments": '{"q": "\ufffd"}'}
    assert (started.type, started.status, started.fields) == ("acme:look", "in_progress", how | {"output": None})
    assert (ended.type, ended.status, ended.fields) == ("acme:look", "completed", how | {"output": "found \ufffd"})
    assert started.key == ended.key


# Time.


class StepLog:
    """A log of steps."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.finished = threading.Event()


@anyio_both
async def test_slow_tool_times_out_and_model_is_informed(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    released = threading.Event()

    async def coroutine() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("closed")

    def plain(turn: Turn) -> None:
        released.wait(BOUND)
        log.append(f"cancelled: {turn.cancelled}")

    async def raises_on_cancel() -> None:
        try:
            await anyio.sleep_forever()
        except BaseException:
            raise ValueError("raised on cancellation") from None

    tools = [tool_of(function, timeout=0.05) for function in (coroutine, plain)]
    assert await run(*tools, tool_of(lambda: "fine")) == [("failed", "The tool took too long.")] * 2 + [
        ("completed", "fine")
    ]
    assert log == ["closed"]
    released.set()
    await until(lambda: log == ["closed", "cancelled: True"])
    ((status, output),) = await run(tool_of(raises_on_cancel, timeout=0.05))
    assert status == "failed"
    assert "raised on" not in output
    assert all("tool" in record.message for record in caplog.records)


@anyio_both
async def test_timeout_error_of_tool_is_not_cancellation() -> None:
    async def times_out() -> str:
        with anyio.move_on_after(0.01):
            await anyio.sleep_forever()
        with anyio.fail_after(0.01):
            await anyio.sleep_forever()
        return "never"

    ((status, output),) = await run(tool_of(times_out))
    assert status == "failed"
    assert output


@anyio_both
async def test_timed_out_tool_does_not_cancel_turn_of_others() -> None:
    turn, seen = turn_of(), list[bool]()

    async def slow() -> None:
        await anyio.sleep_forever()

    async def later(turn: Turn) -> None:
        await anyio.sleep(0.1)
        seen.append(turn.cancelled)

    await run(tool_of(slow, timeout=0.02), tool_of(later), turn=turn)
    assert (seen, turn.cancelled) == ([False], False)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, for a limited time."""
    with anyio.fail_after(BOUND):
        while not condition():  # noqa: ASYNC110  # no event signals it
            await anyio.sleep(0.005)


@anyio_both
async def test_calls_run_concurrently_and_end_in_order() -> None:
    together = [anyio.Event() for _ in range(3)]
    emitted = RecordingEmit()

    def meeting(number: int) -> HostedTool:
        async def meet() -> int:
            together[number].set()
            for event in together:
                await event.wait()
            return number

        return tool_of(meet)

    calls = [HostedCall(meeting(number), f"call_{number}") for number in range(3)]
    with anyio.fail_after(BOUND):
        await run_hosted_calls(calls, turn_of(), ThreadLimiter(1), emitted)
    keys = ["call_0", "call_1", "call_2"]
    assert [(item.key, item.status) for item in emitted.items] == [
        *((key, "in_progress") for key in keys),
        *((key, "completed") for key in keys),
    ]
    assert emitted.ended == [("completed", f"{number}") for number in range(3)]


@anyio_both
async def test_sync_functions_run_concurrently_in_threads() -> None:
    barrier = threading.Barrier(3)

    def meet() -> int:
        return barrier.wait(BOUND)

    ended = await run(*[tool_of(meet)] * 3)
    assert sorted(ended) == [("completed", "0"), ("completed", "1"), ("completed", "2")]


@anyio_both
async def test_sync_functions_wait_for_free_thread() -> None:
    busy: list[int] = []
    busy_counts: list[int] = []

    def work() -> None:
        busy.append(1)
        busy_counts.append(len(busy))
        time.sleep(0.005)
        busy.pop()

    assert await run(*[tool_of(work)] * 6, threads=2) == [("completed", "null")] * 6
    assert max(busy_counts) <= 2


@anyio_both
async def test_each_result_is_emitted_once_earlier_ones_are() -> None:
    go_on, emitted = anyio.Event(), RecordingEmit()

    async def slow() -> str:
        await go_on.wait()
        return "slow"

    calls = [HostedCall(tool_of(lambda: "quick"), "a"), HostedCall(tool_of(slow), "b")]
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run_hosted_calls, calls, turn_of(), ThreadLimiter(2), emitted)
            await until(lambda: len(emitted.items) == 3)
            assert emitted.ended == [("completed", "quick")]
            go_on.set()
    assert emitted.ended == [("completed", "quick"), ("completed", "slow")]


@anyio_both
async def test_cancellation_reaches_async_tools_and_abandons_sync_ones() -> None:
    log: list[str] = []
    started, released = threading.Event(), threading.Event()
    turns: list[Turn] = []

    async def coroutine() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("closed")

    def plain(turn: Turn) -> None:
        turns.append(turn)
        started.set()
        released.wait(BOUND)

    emitted, limiter = RecordingEmit(), ThreadLimiter(1)
    calls = [HostedCall(tool_of(coroutine), "a"), HostedCall(tool_of(plain), "b")]
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(run_hosted_calls, calls, turn_of(), limiter, emitted)
        await until(started.is_set)
        group.cancel_scope.cancel()
    assert anyio.current_time() - began < BOUND / 2, "nobody coroutine for the thread"
    assert log == ["closed"]
    assert emitted.ended == []
    assert turns[0].cancelled, "the thread can see that nobody coroutine any more"
    assert limiter.current().borrowed_tokens == 1, "the thread's place is taken until it ends"
    released.set()
    await until(lambda: limiter.current().borrowed_tokens == 0)


@anyio_both
async def test_failing_emit_ends_all_calls() -> None:
    log: list[str] = []

    async def coroutine() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("closed")

    async def leaves(item: outputs.Item) -> None:
        if item.status != "in_progress":
            raise errors.ClientDisconnected

    calls = [HostedCall(tool_of(lambda: "quick"), "a"), HostedCall(tool_of(coroutine), "b")]
    with anyio.fail_after(BOUND), pytest.raises(errors.ClientDisconnected):
        await run_hosted_calls(calls, turn_of(), ThreadLimiter(2), leaves)
    assert log == ["closed"]


# The loop.


LOOK: dict[str, Any] = {"type": "acme:look"}
ADD: dict[str, Any] = {"type": "function", "name": "add"}
LOOK_CALL = call("look", '{"q": "x"}')


class ToolLoop:
    """A kit with a scripted backend and a hosted tool."""

    def __init__(
        self, *scripts: Any, tools: Sequence[Any] | None = None, window: int | None = None, **settings: Any
    ) -> None:
        everything = Model("scripted", tools=True, reasoning=True, structured_output=True, context_window=window)
        self.backend = ScriptedBackend(*scripts, models=[everything, "plain"])
        self.look = RecordingTool()
        self.kit = ResponsesKit(self.backend, tools=[self.look] if tools is None else tools, **settings)

    async def ask(self, given: Any = "Look.", *, owner: str = "", **body: Any) -> dict[str, Any]:
        request = {"input": given, "tools": [LOOK], **body}
        with anyio.fail_after(BOUND):
            async with self.kit.stream(request, owner=owner) as events:
                seen = [event async for event in events]
        return check_stream(seen)

    async def refused(self, given: Any = "Look.", **body: Any) -> errors.APIError:
        with pytest.raises(errors.InvalidRequest) as caught:
            await self.kit.create({"input": given, "tools": [LOOK], **body})
        assert self.backend.turns == []
        return caught.value

    @property
    def turns(self) -> list[Turn]:
        return self.backend.turns


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


@anyio_both
async def test_model_is_called_again_with_tool_results() -> None:
    loop = ToolLoop([outputs.Reasoning("Hm."), "Let me look.", LOOK_CALL], ["It is x."])
    response = await loop.ask(owner="ann")
    assert (response["status"], kinds(response)) == ("completed", ["reasoning", "message", "acme:look", "message"])
    receipt = response["output"][2]
    assert receipt == {
        "type": "acme:look",
        "id": receipt["id"],
        "status": "completed",
        "call_id": receipt["call_id"],
        "name": "look",
        "arguments": '{"q": "x"}',
        "output": "found x",
    }
    assert response["tools"] == [LOOK]
    assert [turn.round for turn in loop.turns] == [0, 1]
    first, second = loop.turns
    assert [tool.name for tool in first.tools] == [tool.name for tool in second.tools] == ["look"]
    assert first.tools[0].parameters == loop.look.parameters
    assert [message["role"] for message in second.messages()] == ["user", "assistant", "tool"]
    assert second.messages()[1]["content"] == "Let me look."
    assert second.messages()[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": "x"}'}
    assert second.messages()[2] == {"role": "tool", "tool_call_id": receipt["call_id"], "content": "found x"}
    assert [item.id for item in second.items[1:]] == [item["id"] for item in response["output"][:3]]
    assert (second.owner, second.response_id) == ("ann", response["id"])
    assert loop.look.calls == [{"q": "x"}]


@anyio_both
async def test_stream_shows_start_and_end_of_call() -> None:
    go_on = anyio.Event()

    class Slow(RecordingTool):
        async def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
            await go_on.wait()
            return "found"

    kit = ResponsesKit(ScriptedBackend([LOOK_CALL, LOOK_CALL], ["Done."]), tools=[Slow()])
    seen: list[dict[str, Any]] = []
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Look.", "tools": [LOOK]}) as events:
            async for event in events:
                seen.append(event)
                if sum(one["type"] == "response.output_item.added" for one in seen) == 2:
                    go_on.set()
    response = check_stream(seen)
    emitted = [(event["type"].rpartition(".")[2], event["output_index"]) for event in seen if "item" in event]
    assert emitted[:4] == [("added", 0), ("added", 1), ("done", 0), ("done", 1)]
    assert kinds(response) == ["acme:look", "acme:look", "message"]


@anyio_both
async def test_failed_call_is_shown_to_model() -> None:
    loop = ToolLoop([call("look", '{"x": 1}')], [LOOK_CALL], ["There."])
    response = await loop.ask()
    assert response["status"] == "completed"
    assert [item["status"] for item in response["output"]] == ["failed", "completed", "completed"]
    assert "not valid" in loop.turns[1].messages()[-1]["content"]
    assert [turn.round for turn in loop.turns] == [0, 1, 2]


@anyio_both
async def test_backend_may_reuse_call_ids_in_every_round() -> None:
    again = call("look", '{"q": "x"}', "call_0")
    loop = ToolLoop([again], [again], ["Done."])
    response = await loop.ask()
    assert len({item["call_id"] for item in response["output"][:2]}) == 2
    assert [message["role"] for message in loop.turns[-1].messages()] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]


@anyio_both
async def test_sync_backend_and_sync_tool_work() -> None:
    class Plain(Backend):
        models = (Model("plain", tools=True),)

        def generate(self, turn: Turn) -> Iterator[outputs.Output]:
            yield LOOK_CALL if turn.round == 0 else turn.messages()[-1]["content"]

    kit = ResponsesKit(Plain(), tools=[SyncRecordingTool()], limits=Limits(max_threads=1))
    with anyio.fail_after(BOUND):
        response = await kit.create({"input": "Look.", "tools": [LOOK]})
    check_response(response)
    assert response["output"][1]["content"][0]["text"] == "found x"


@anyio_both
async def test_client_calls_are_returned_after_hosted_calls_ran() -> None:
    loop = ToolLoop([LOOK_CALL, call("add", "{}", "client_call"), LOOK_CALL], ["Never sent."])
    response = await loop.ask(tools=[LOOK, ADD])
    assert response["status"] == "completed"
    assert sorted(kinds(response)) == ["acme:look", "acme:look", "function_call"]
    assert all(item["status"] == "completed" for item in response["output"])
    assert len(loop.turns) == 1
    output = {"type": "function_call_output", "call_id": "client_call", "output": "2"}
    again = await loop.ask([output], tools=[LOOK, ADD], previous_response_id=response["id"])
    assert again["status"] == "completed"
    answered = [message["tool_call_id"] for message in loop.turns[-1].messages() if message["role"] == "tool"]
    assert sorted(answered) == sorted(item["call_id"] for item in response["output"])


# Limits and constraints across rounds.


@anyio_both
async def test_usage_is_summed_over_rounds() -> None:
    loop = ToolLoop(
        [LOOK_CALL, outputs.Usage(10, 5, 1, 2)],
        [LOOK_CALL, outputs.Usage(1, 1), outputs.Usage(20, 6, 15, 3)],
        ["Done.", outputs.Usage(30, 7)],
    )
    usage = (await loop.ask())["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (60, 18, 78)
    assert usage["input_tokens_details"] == {"cached_tokens": 16}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 5}


@anyio_both
async def test_max_output_tokens_apply_to_all_rounds() -> None:
    loop = ToolLoop([LOOK_CALL, outputs.Usage(1, 10)], [LOOK_CALL, outputs.Usage(1, 6)], ["Done.", outputs.Usage(1, 2)])
    response = await loop.ask(max_output_tokens=20)
    assert response["status"] == "completed"
    assert response["max_output_tokens"] == 20
    assert [turn.max_output_tokens for turn in loop.turns] == [20, 10, 4]


@anyio_both
@pytest.mark.parametrize("used", [20, 25])
async def test_response_is_incomplete_once_max_output_tokens_are_spent(used: int) -> None:
    loop = ToolLoop([LOOK_CALL, outputs.Usage(1, used)], ["Never sent."])
    response = await loop.ask(max_output_tokens=20)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in response["output"]] == [("acme:look", "completed")]
    assert len(loop.turns) == 1


@anyio_both
@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_truncated_round_runs_no_tool(reason: Any) -> None:
    loop = ToolLoop([LOOK_CALL, call("look", '{"q'), outputs.Finish(reason)], ["Never sent."])
    response = await loop.ask()
    assert (response["status"], len(loop.turns), loop.look.calls) == ("incomplete", 1, [])


@anyio_both
async def test_finish_stop_after_hosted_call_continues() -> None:
    loop = ToolLoop([LOOK_CALL, outputs.Finish("stop"), outputs.Usage(1, 1)], ["Done.", outputs.Finish("stop")])
    assert kinds(await loop.ask()) == ["acme:look", "message"]


@anyio_both
async def test_max_tool_calls_applies_to_whole_response() -> None:
    loop = ToolLoop([LOOK_CALL, LOOK_CALL], [LOOK_CALL, LOOK_CALL], [LOOK_CALL, "So be it."])
    response = await loop.ask(max_tool_calls=3)
    assert kinds(response) == ["acme:look"] * 3 + ["message"]
    assert response["max_tool_calls"] == 3
    assert [turn.max_tool_calls for turn in loop.turns] == [3, 1, 0]
    assert [len(turn.callable_tools) for turn in loop.turns] == [1, 1, 0]


@anyio_both
@pytest.mark.parametrize(("requested", "applied"), [(None, 4), (2, 2), (9, 4)])
async def test_endless_tool_loop_is_stopped(requested: int | None, applied: int) -> None:
    def script(turn: Turn) -> list[outputs.Output]:
        another = call("look", json.dumps({"q": f"{turn.round}"}))
        return [another] if turn.callable_tools else [another, "Enough."]

    loop = ToolLoop(script, limits=Limits(max_tool_calls=4))
    response = await loop.ask(max_tool_calls=requested)
    assert kinds(response) == ["acme:look"] * applied + ["message"]
    assert response["max_tool_calls"] == (None if requested is None else applied), "the applied limit is not echoed"


@anyio_both
async def test_repeated_identical_calls_are_disallowed() -> None:
    loop = ToolLoop(lambda turn: [LOOK_CALL] if turn.callable_tools else ["Enough."])
    response = await loop.ask(tool_choice="required")
    assert (response["status"], kinds(response)) == ("completed", ["acme:look"] * 3 + ["message"])
    other = call("look", '{"q": "y"}')
    varied = ToolLoop([LOOK_CALL], [other], [LOOK_CALL], [LOOK_CALL], [other, LOOK_CALL], [other], ["Done."])
    assert kinds(await varied.ask()) == ["acme:look"] * 7 + ["message"], "what changes is no circle"


@anyio_both
async def test_kit_limit_applies_to_hosted_tools_only() -> None:
    loop = ToolLoop([call("add", "{}", f"call_{number}") for number in range(6)], limits=Limits(max_tool_calls=4))
    assert len((await loop.ask(tools=[ADD]))["output"]) == 6
    assert loop.turns[0].max_tool_calls is None


@anyio_both
async def test_without_parallel_calls_each_round_has_one() -> None:
    loop = ToolLoop([LOOK_CALL, LOOK_CALL], [LOOK_CALL, LOOK_CALL], ["Done."])
    assert kinds(await loop.ask(parallel_tool_calls=False)) == ["acme:look", "acme:look", "message"]


@anyio_both
@pytest.mark.parametrize(
    ("choice", "first", "later"),
    [
        ("auto", "auto", "auto"),
        ("required", "required", "auto"),
        ({"type": "acme:look"}, "function", "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "acme:look"}]}, "required", "allowed"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "acme:look"}]}, "allowed", "allowed"),
    ],
)
async def test_tool_choice_applies_to_first_round_only(choice: Any, first: str, later: str) -> None:
    loop = ToolLoop([LOOK_CALL], ["Done."])
    response = await loop.ask(tools=[ADD, LOOK], tool_choice=choice)
    assert response["tool_choice"] == choice
    assert kinds(response) == ["acme:look", "message"]
    one, two = loop.turns
    assert (one.must_call, two.must_call) == (first in ("required", "function"), False)
    everything = ["add", "look"]
    assert [tool.name for tool in one.callable_tools] == (everything if choice in ("auto", "required") else ["look"])
    assert [tool.name for tool in two.callable_tools] == (["look"] if later == "allowed" else everything)


@anyio_both
@pytest.mark.parametrize("choice", ["required", {"type": "acme:look"}])
async def test_missing_required_hosted_call_fails_response(choice: Any) -> None:
    assert (await ToolLoop(["Rather not."]).ask(tool_choice=choice))["error"]["code"] == "tool_call_missing"


@anyio_both
async def test_allowed_tools_apply_to_every_round() -> None:
    choice = {"type": "allowed_tools", "tools": [{"type": "acme:look"}]}
    loop = ToolLoop([LOOK_CALL], [call("add")])
    response = await loop.ask(tools=[LOOK, ADD], tool_choice=choice)
    assert response["error"]["code"] == "tool_not_allowed"
    assert [item["status"] for item in response["output"]] == ["completed"], "finished items are missing"
    response = await ToolLoop([LOOK_CALL]).ask(tools=[LOOK, ADD], tool_choice={"type": "function", "name": "add"})
    assert response["error"]["code"] == "tool_not_allowed"


@anyio_both
async def test_tool_choice_none_shows_tool_and_forbids_calls() -> None:
    loop = ToolLoop(["No."])
    assert (await loop.ask(tool_choice="none"))["status"] == "completed"
    assert ([tool.name for tool in loop.turns[0].tools], loop.turns[0].callable_tools) == (["look"], ())
    assert (await ToolLoop([LOOK_CALL]).ask(tool_choice="none"))["error"]["code"] == "tool_not_allowed"


@anyio_both
async def test_format_applies_to_final_round() -> None:
    form = {"format": {"type": "json_object"}}
    assert (await ToolLoop([LOOK_CALL], ['{"a": 1}']).ask(text=form))["status"] == "completed"
    assert (await ToolLoop([LOOK_CALL], ["secret"]).ask(text=form))["error"]["code"] == "invalid_output_format"
    assert (await ToolLoop([LOOK_CALL], []).ask(text=form))["error"]["code"] == "invalid_output_format"


# Requests for hosted tools.


@anyio_both
async def test_tool_not_requested_is_unavailable() -> None:
    loop = ToolLoop([LOOK_CALL])
    response = await loop.ask(tools=[])
    assert response["error"]["code"] == "tool_not_allowed"
    assert (list(loop.turns[0].tools), response["tools"]) == ([], [])


@anyio_both
@pytest.mark.parametrize("name", ["documents", "name", "parameters", "description"])
async def test_unknown_tool_setting_is_refused(name: str) -> None:
    loop = ToolLoop(["Hi"])
    with pytest.raises(errors.UnsupportedParameter) as caught:
        await loop.kit.create({"input": "Hi", "tools": [LOOK | {name: "other"}]})
    assert caught.value.param == f"tools[0].{name}"


@anyio_both
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"tools": [LOOK, {"type": "acme:other"}]}, "unsupported_parameter", "tools[1].type"),
        ({"tools": [LOOK, {"type": "web_search"}]}, "unsupported_parameter", "tools[1].type"),
        ({"tools": [{"type": "function", "name": "look"}, LOOK]}, "invalid_request", "tools[1]"),
        ({"tools": [LOOK, {"type": "function", "name": "look"}]}, "invalid_request", "tools[1]"),
        ({"tools": [LOOK, LOOK]}, "invalid_request", "tools[1]"),
        ({"tools": [ADD], "tool_choice": {"type": "acme:look"}}, "invalid_request", "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "invalid_request", "tool_choice.name"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "acme:look"}, {"type": "acme:other"}]}},
            "invalid_request",
            "tool_choice.tools[1].type",
        ),
        ({"model": "plain"}, "unsupported_parameter", "tools"),
        ({"max_tool_calls": 0}, "invalid_request", "max_tool_calls"),
    ],
)
async def test_contradictory_request_is_refused_with_param(body: dict[str, Any], code: str, param: str) -> None:
    error = await ToolLoop(["Hi"]).refused(**body)
    assert (error.status, error.code, error.param) == (400, code, param)


# Receipts as input.


@anyio_both
async def test_earlier_receipts_become_calls_and_outputs() -> None:
    loop = ToolLoop([LOOK_CALL], ["It is x."], ["Again."])
    first = await loop.ask()
    await loop.ask("And?", previous_response_id=first["id"])
    chained = loop.turns[-1].messages()
    assert [message["role"] for message in chained] == ["user", "assistant", "tool", "assistant", "user"]
    assert chained[2]["content"] == "found x"
    await loop.ask([{"role": "user", "content": "Look."}, *first["output"], {"role": "user", "content": "And?"}])
    assert loop.turns[-1].messages() == chained
    carried = [{key: value for key, value in item.items() if key != "id"} for item in first["output"]]
    await loop.ask([{"role": "user", "content": "Look."}, *carried, {"role": "user", "content": "And?"}], tools=[])
    assert loop.turns[-1].messages() == chained


@anyio_both
async def test_other_extension_items_are_kept_and_hidden() -> None:
    loop = ToolLoop(["Hi"])
    foreign = [
        {"type": "other:chart", "points": [1, 2], "status": "drawn"},
        {"type": "acme:look", "name": "look", "call_id": "c", "arguments": '{"q": "x"}', "output": None},
        {"type": "acme:look", "name": "look", "call_id": "c", "arguments": {"q": "x"}, "output": "found"},
        {"type": "acme:look"},
    ]
    response = await loop.ask([{"role": "user", "content": "Hi"}, *foreign])
    assert [message["role"] for message in loop.turns[-1].messages()] == ["user"]
    stored = (await loop.kit.input_items(response["id"], order="asc"))["data"][1:]
    assert [{key: one[key] for key in given} for one, given in zip(stored, foreign, strict=True)] == foreign


# Disconnection and shutdown.


@anyio_both
@pytest.mark.parametrize("plain", [True, False])
async def test_disconnect_ends_tool_and_is_recorded(plain: bool) -> None:
    log: list[str] = []
    started, released = threading.Event(), threading.Event()

    async def coroutine(turn: Turn) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            log.append("cancelled")

    def blocks(turn: Turn) -> None:
        started.set()
        while not turn.cancelled and not released.wait(0.005):
            pass
        log.append("cancelled" if turn.cancelled else "released")

    tool = HostedTool.from_function("acme:look", blocks if plain else coroutine, name="look")
    kit = ResponsesKit(ScriptedBackend([call("look")], ["Done."]), tools=[tool])
    response_id = ""
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Look.", "tools": [LOOK]}) as events:
            async for event in events:
                response_id = response_id or event["response"]["id"]
                if event["type"] == "response.output_item.added":
                    await until(started.is_set)
                    break
    await until(lambda: log != [])
    released.set()
    assert log == ["cancelled"]
    stored = await kit.retrieve(response_id)
    check_response(stored)
    assert stored["status"] == "cancelled"
    assert [item["status"] for item in stored["output"]] == ["incomplete"]


@anyio_both
async def test_close_ends_tools_and_closes_toolsets_once() -> None:
    log: list[str] = []
    started = anyio.Event()

    class Slow(RecordingTool):
        async def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                log.append("cancelled")

        async def aclose(self) -> None:
            log.append("closed")

    kit = ResponsesKit(ScriptedBackend([LOOK_CALL]), tools=[Slow()])
    failures: list[errors.APIError] = []

    async def ask() -> None:
        try:
            await kit.create({"input": "Look.", "tools": [LOOK]})
        except errors.APIError as error:
            failures.append(error)

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await started.wait()
            await kit.aclose()
            await kit.aclose()
    assert log == ["cancelled", "closed"]
    assert [error.message for error in failures] == ["The server is shutting down. Try again."]


@anyio_both
async def test_concurrent_tool_loops_do_not_mix() -> None:
    async def look(q: str, turn: Turn) -> str:
        await anyio.lowlevel.checkpoint()
        return f"{q} for {turn.owner}"

    tool = HostedTool.from_function("acme:look", look, name="look")

    def script(turn: Turn) -> list[outputs.Output | Pause]:
        if turn.round == 0:
            return [call("look", json.dumps({"q": turn.text})), Pause(0)]
        return [turn.messages()[-1]["content"]]

    kit = ResponsesKit(ScriptedBackend(script), tools=[tool])
    answers: dict[str, str] = {}

    async def ask(name: str) -> None:
        response = await kit.create({"input": f"q{name}", "tools": [LOOK]}, owner=name)
        answers[name] = response["output"][-1]["content"][0]["text"]

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, f"{number}")
    assert answers == {f"{number}": f"q{number} for {number}" for number in range(20)}


# Toolsets and configuration.


class ToolGroup:
    """A toolset with several tools of one type."""

    def __init__(self, *tools: HostedTool, failure: Exception | None = None) -> None:
        self.type = "acme:set"
        self.all = tools
        self.failure = failure

    async def tools(self) -> Sequence[HostedTool]:
        if self.failure is not None:
            raise self.failure
        return self.all

    async def aclose(self) -> None:
        """Release nothing."""


def numbered(number: int) -> HostedTool:
    async def found() -> int:
        return number

    return HostedTool.from_function("acme:set", found, name=f"tool_{number}")


@anyio_both
async def test_toolset_type_enables_all_its_tools() -> None:
    loop = ToolLoop([call("tool_1"), call("tool_0")], ["Done."], tools=[ToolGroup(numbered(0), numbered(1))])
    response = await loop.ask(tools=[{"type": "acme:set"}], tool_choice={"type": "acme:set"})
    assert [tool.name for tool in loop.turns[0].tools] == ["tool_0", "tool_1"]
    assert loop.turns[0].must_call
    assert kinds(response) == ["acme:set", "acme:set", "message"]
    assert [(item["name"], item["output"]) for item in response["output"][:2]] == [("tool_1", "1"), ("tool_0", "0")]


@anyio_both
async def test_same_name_in_two_toolsets_is_refused() -> None:
    loop = ToolLoop(["Hi"], tools=[ToolGroup(HostedTool("acme:set", name="look")), RecordingTool()])
    error = await loop.refused(tools=[{"type": "acme:set"}, LOOK])
    assert (error.code, error.param) == ("invalid_request", "tools[1]")


@anyio_both
@pytest.mark.parametrize(
    "narrowed",
    [
        {"tools": [{"type": "acme:set", "allowed_tools": ["tool_1"]}]},
        {"tools": [{"type": "acme:set"}], "tool_choice": {"type": "acme:set", "name": "tool_1"}},
        {
            "tools": [{"type": "acme:set"}],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "acme:set", "name": "tool_1"}], "mode": "auto"},
        },
    ],
)
async def test_toolset_may_be_narrowed(narrowed: dict[str, Any]) -> None:
    loop = ToolLoop([call("tool_1")], ["Done."], tools=[ToolGroup(numbered(0), numbered(1))])
    response = await loop.ask(**narrowed)
    assert {name: response[name] for name in narrowed} == narrowed
    assert [tool.name for tool in loop.turns[0].callable_tools] == ["tool_1"]
    loop = ToolLoop([call("tool_0")], ["Done."], tools=[ToolGroup(numbered(0), numbered(1))])
    with pytest.raises(errors.ModelError, match="does not allow"):
        await loop.kit.create({"input": "Hi", **narrowed})


@anyio_both
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "acme:set", "allowed_tools": ["tool_2"]}]}, "tools[0].allowed_tools"),
        ({"tools": [{"type": "acme:set", "allowed_tools": "tool_1"}]}, "tools[0].allowed_tools"),
        ({"tools": [{"type": "acme:set", "readonly": True}]}, "tools[0].readonly"),
        (
            {"tools": [{"type": "acme:set"}], "tool_choice": {"type": "acme:set", "name": "tool_2"}},
            "tool_choice.name",
        ),
    ],
)
async def test_invalid_toolset_narrowing_is_refused(body: dict[str, Any], param: str) -> None:
    loop = ToolLoop(["Hi"], tools=[ToolGroup(numbered(0), numbered(1))])
    with pytest.raises(errors.InvalidRequest) as caught:
        await loop.kit.create({"input": "Hi", **body})
    assert caught.value.param == param


@anyio_both
async def test_unavailable_toolset_fails_request_up_front() -> None:
    loop = ToolLoop(["Hi"], tools=[ToolGroup(failure=errors.ServerError("The tools are out of reach."))])
    with pytest.raises(errors.ServerError, match="out of reach"):
        await loop.kit.create({"input": "Hi", "tools": [{"type": "acme:set"}]})
    assert loop.turns == []
    await loop.ask(tools=[])


@pytest.mark.parametrize(
    "tools",
    [
        [RecordingTool],
        [weather],
        ["acme:look"],
        [{"type": "acme:look"}],
        [None],
        [RecordingTool(), RecordingTool()],
        [RecordingTool(), numbered(0), numbered(1)],
        [HostedTool("acme:does_nothing")],
    ],
)
def test_invalid_or_duplicate_tools_are_refused(tools: list[Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match="tool"):
        ResponsesKit(ScriptedBackend(["Hi"]), tools=tools)


def test_tool_may_be_listed_twice_and_shared_by_kits() -> None:
    tool = RecordingTool()
    for _ in range(2):
        ResponsesKit(ScriptedBackend(["Hi"]), tools=[tool, tool])


def test_kit_with_tools_serves_several_event_loops(anyio_backend_name: str) -> None:
    kit = ResponsesKit(
        ScriptedBackend(lambda turn: [LOOK_CALL] if turn.round == 0 else ["Done."]),
        tools=[RecordingTool(), numbered(0)],
    )
    ask = functools.partial(kit.create, {"input": "Look.", "tools": [LOOK]})
    for _ in range(2):
        assert kinds(anyio.run(ask, backend=anyio_backend_name)) == ["acme:look", "message"]


@anyio_both
async def test_close_closes_every_toolset(caplog: pytest.LogCaptureFixture) -> None:
    first, second = ToolGroup(failure=RuntimeError("it is stuck")), RecordingTool()
    closed: list[str] = []

    async def fail() -> None:
        closed.append("first")
        raise RuntimeError("it is stuck")

    async def note() -> None:
        closed.append("second")

    first.aclose, second.aclose = fail, note  # type: ignore[method-assign]
    kit = ResponsesKit(ScriptedBackend(["Hi"]), tools=[first, second])
    await kit.aclose()
    assert closed == ["first", "second"]
    with pytest.raises(errors.ServerError, match="shutting down"):  # not the first toolset's failure
        await kit.create({"input": "Hi", "tools": [{"type": first.type}]})
