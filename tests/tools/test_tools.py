"""Hosted tools: what the model may write, what tools may do, and the loop in which the kit runs them."""

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


class Unit(Enum):
    """How warm is measured."""

    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Place(pydantic.BaseModel):
    """Where."""

    city: str
    country: str = "FR"


class Trip(pydantic.BaseModel):
    """A journey."""

    title: str
    stops: list[Place] = pydantic.Field(min_length=1)


class Even(pydantic.BaseModel):
    """A number that two divides."""

    n: int

    @pydantic.field_validator("n")
    @classmethod
    def even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("must be even")
        return value


def weather(city: str, day: date, unit: Unit = Unit.CELSIUS, *, hours: int = 24) -> str:
    """Tells the weather.

    Of any city.
    """
    return f"{city}|{day!r}|{unit!r}|{hours!r}"


def from_function(function: Callable[..., Any], **settings: Any) -> HostedTool:
    return HostedTool.from_function("acme:tool", function, **settings)


def turn_of(**settings: Any) -> Turn:
    return Turn(
        **({"model": "m", "items": [], "text_format": PlainText(), "owner": "ann", "response_id": "resp_1"} | settings)
    )


def called(tool: HostedTool, arguments: str | dict[str, Any], turn: Turn | None = None) -> Any:
    """What a plain tool returns for arguments as the model writes them."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return tool.call(tool.read(written), turn or turn_of())


def test_a_functions_schema_comes_from_its_annotations() -> None:
    tool = from_function(weather)
    assert (tool.type, tool.name) == ("acme:tool", "weather")
    assert tool.description == "Tells the weather.\n\nOf any city."
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    assert tool.parameters["type"] == "object"
    assert tool.parameters["required"] == ["city", "day"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.parameters["properties"]["city"] == {"type": "string"}
    assert tool.parameters["properties"]["day"] == {"type": "string", "format": "date"}
    assert tool.parameters["properties"]["hours"] == {"type": "integer"}
    assert "title" not in json.dumps(tool.parameters)


def test_a_function_gets_what_its_annotations_say() -> None:
    tool = from_function(weather)
    assert called(tool, {"city": "Rome", "day": "2024-02-29"}) == f"Rome|{date(2024, 2, 29)!r}|{Unit.CELSIUS!r}|24"
    assert called(tool, {"city": "Rome", "day": "2024-02-29", "unit": "fahrenheit", "hours": 1}).endswith(
        f"{Unit.FAHRENHEIT!r}|1"
    )


def test_name_and_description_can_be_said_otherwise() -> None:
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
        (Unit, "celsius", Unit.CELSIUS),
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
def test_types_that_are_json_and_models_of_them_are_understood(annotation: Any, written: Any, value: Any) -> None:
    def function(x):  # type: ignore[no-untyped-def]
        return x

    function.__annotations__ = {"x": annotation}
    tool = from_function(function)
    jsonschema.Draft202012Validator(tool.parameters).validate({"x": written})
    assert called(tool, {"x": written}) == value
    for wrong in ({}, {"x": written, "y": 1}, {"X": written}):
        with pytest.raises(errors.ToolError):
            called(tool, wrong)


def test_properties_with_the_name_title_are_kept_and_titles_of_schemas_are_not() -> None:
    def plan(trip: Trip, title: str) -> str:
        return f"{title}: {trip.title}"

    tool = from_function(plan)
    assert set(tool.parameters["properties"]) == {"trip", "title"}
    assert set(tool.parameters["$defs"]["Trip"]["properties"]) == {"title", "stops"}
    assert tool.parameters["$defs"]["Trip"]["required"] == ["title", "stops"]
    assert '"title": "' not in json.dumps(tool.parameters)
    assert called(tool, {"title": "a", "trip": {"title": "b", "stops": [{"city": "c"}]}}) == "a: b"


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
def test_any_parameter_name_will_do(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def function({name}: int, *, other: int = 2) -> int:\n    return {name} + other", space)
    tool = from_function(space["function"])
    assert set(tool.parameters["properties"]) == {name, "other"}
    assert called(tool, {name: 1}) == 3


def test_a_parameter_without_an_annotation_takes_any_json() -> None:
    def echo(x, y=2):  # type: ignore[no-untyped-def]
        return x, y

    tool = from_function(echo)
    assert (called(tool, {"x": [1]}), called(tool, {"x": None, "y": {}})) == (([1], 2), (None, {}))


def test_a_function_without_parameters_takes_none() -> None:
    tool = from_function(lambda: "done", name="do")
    for written in ("", " \n", "{}", " {} "):
        assert called(tool, written) == "done"
    with pytest.raises(errors.ToolError):
        called(tool, '{"x": 1}')


def test_the_turn_is_given_to_whoever_asks_for_it_and_never_shown() -> None:
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

    mine = turn_of(owner="bob")
    for function in (plain, named_otherwise, optional, annotated, textual):
        tool = from_function(function)
        assert set(tool.parameters["properties"]) == {"x"}
        assert tool.parameters["required"] == ["x"]
        assert called(tool, {"x": 1}, mine) == (mine, 1)
        with pytest.raises(errors.ToolError):
            called(tool, {"x": 1, "turn": {"owner": "eve"}}, mine)


def test_methods_of_objects_do_as_well() -> None:
    class Shop:
        def __init__(self, name: str) -> None:
            self.name = name

        def price(self, item: str) -> str:
            """Tells a price."""
            return f"{item} at {self.name}"

    tool = from_function(Shop("Ann's").price)
    assert (tool.name, tool.description) == ("price", "Tells a price.")
    assert called(tool, {"item": "tea"}) == "tea at Ann's"


class Opaque:
    """Says nothing of itself."""


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
def test_what_cannot_be_shown_to_a_model_is_refused_when_the_tool_is_made(function: Any) -> None:
    with pytest.raises(errors.ConfigurationError):
        from_function(function)


@pytest.mark.parametrize(
    "kind", ["", "weather", ":weather", "acme:", "acme weather:x", "acme:x\n", "a" * 65 + ":x", "acme:" + "x" * 129]
)
def test_a_tools_type_is_slug_and_name(kind: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="slug:name"):
        HostedTool(kind)


@pytest.mark.parametrize("name", ["", "a b", "größe", "x" * 65, "a.b", "x\n"])
def test_a_tools_name_is_one_that_a_model_can_call(name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="name"):
        HostedTool("acme:x", name=name)
    with pytest.raises(errors.ConfigurationError, match="name"):
        from_function(lambda: None)


def test_a_tools_name_comes_from_its_type_where_it_has_none() -> None:
    assert HostedTool("acme:weather").name == "weather"
    assert HostedTool("acme:web.search/v2").name == "web_search_v2"
    assert len(HostedTool("acme:" + "x" * 128).name) == 64


@pytest.mark.parametrize("parameters", [{"type": "secretword"}, {"$ref": "#/secretword"}, {"properties": 7}])
def test_a_tools_schema_has_to_be_one(parameters: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match="parameters"):
        HostedTool("acme:x", parameters=parameters)


# Arguments.


class Look(HostedTool):
    """A tool of one's own, and the arguments it was called with."""

    def __init__(self, **settings: Any) -> None:
        schema = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
        super().__init__("acme:look", **({"parameters": schema} | settings))
        self.calls: list[dict[str, Any]] = []

    async def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
        self.calls.append(arguments)
        return f"found {arguments['q']}"


class PlainLook(Look):
    """The same, and it does not wait for anything."""

    def call(self, arguments: dict[str, Any], turn: Turn) -> Any:  # type: ignore[override]
        self.calls.append(arguments)
        return f"found {arguments['q']}"


@pytest.mark.parametrize(
    "written", ["", "{}", '{"q": 1}', "[]", "null", '{"q": "x"', "{'q': 1}", "\ud83d", '{"q": NaN}']
)
def test_arguments_that_are_not_valid_are_told_to_the_model(written: str) -> None:
    def look(q: str) -> str:
        return q

    for tool in (Look(), from_function(look)):
        with pytest.raises(errors.ToolError, match="not valid"):
            tool.read(written)


def test_arguments_are_an_object_whatever_the_schema_says() -> None:
    with pytest.raises(errors.ToolError, match="object"):
        HostedTool("acme:x", parameters={"type": "array"}).read("[]")


def test_what_a_functions_own_validation_refuses_is_told_to_the_model() -> None:
    def half(even: Even) -> int:
        return even.n // 2

    tool = from_function(half)
    assert called(tool, {"even": {"n": 4}}) == 2
    with pytest.raises(errors.ToolError, match=r"even\.n: .*must be even"):
        called(tool, {"even": {"n": 3}})


# Running.


class Told:
    """Hears how calls begin and end."""

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
    """Status and output of one call of each tool."""
    told = Told()
    calls = [HostedCall(tool, f"call_{number}", [arguments]) for number, tool in enumerate(tools)]
    with anyio.fail_after(BOUND):
        await run_hosted_calls(calls, turn or turn_of(), ThreadLimiter(threads), told)
    return told.ended


def tool_of(function: Callable[..., Any], **settings: Any) -> HostedTool:
    return from_function(function, name="tool", **settings)


@anyio_both
@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("text", "text"),
        ("", ""),
        (None, "null"),
        (7, "7"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (["é"], '["é"]'),
        (Place(city="Rome"), '{"city":"Rome","country":"FR"}'),
        (date(2024, 2, 29), '"2024-02-29"'),
        (Unit.CELSIUS, '"celsius"'),
        ("\ud83d", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
async def test_what_a_tool_returns_is_shown_as_text_or_else_as_json(result: Any, shown: str) -> None:
    async def waits() -> Any:
        return result

    def plain() -> Any:
        return result

    def hands_on() -> Awaitable[Any]:
        return waits()

    assert await run(tool_of(waits), tool_of(plain), tool_of(hands_on)) == [("completed", shown)] * 3


@anyio_both
@pytest.mark.parametrize(
    "result",
    [object(), {"a": {1, object()}}, b"\xff", {"a": "\ud83d"}, lambda: 1, Opaque],
    ids=lambda result: type(result).__name__,
)
async def test_a_result_that_is_no_json_is_a_failure_of_the_tool(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def waits() -> Any:
        return result

    assert await run(tool_of(waits), tool_of(lambda: result)) == [("failed", "The tool failed.")] * 2
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert all("resp_1" in record.message and "tool" in record.message for record in caplog.records)


@anyio_both
async def test_a_result_that_is_too_long_is_cut_and_says_so() -> None:
    whole, long = "x" * 262_144, "x" * 262_145
    (first, second) = await run(tool_of(lambda: whole), tool_of(lambda: long))
    assert first == ("completed", whole)
    assert second[0] == "completed"
    assert second[1].startswith(whole)
    assert len(second[1]) < 263_000
    assert "1 more character" in second[1][-60:]


class Mine(BaseException):
    """A failure of nobody's kind."""


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
    lambda: Mine("secret"),
    lambda: ExceptionGroup("secret", [ValueError("secret")]),
    lambda: RecursionError("secret"),
]


@anyio_both
@pytest.mark.parametrize("number", range(len(FAILURES)))
async def test_whatever_a_tool_raises_the_model_learns_no_more_than_that_it_failed(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def waits() -> str:
        raise FAILURES[number]()

    async def waits_first() -> str:
        await anyio.lowlevel.checkpoint()
        raise FAILURES[number]()

    def plain() -> str:
        raise FAILURES[number]()

    tools = (tool_of(waits), tool_of(plain), tool_of(waits_first), tool_of(lambda: "fine"))
    assert await run(*tools) == [("failed", "The tool failed.")] * 3 + [("completed", "fine")]
    assert len([record for record in caplog.records if record.exc_info]) == 3, "the log has the reason"


@anyio_both
async def test_a_tool_error_is_told_to_the_model_in_its_own_words(caplog: pytest.LogCaptureFixture) -> None:
    async def waits() -> str:
        raise errors.ToolError("No such city. Try another one.")

    def plain() -> str:
        raise errors.ToolError("\ud83d" * 300_000)

    (first, second) = await run(tool_of(waits), tool_of(plain))
    assert first == ("failed", "No such city. Try another one.")
    assert second[0] == "failed"
    assert set(second[1]) == {"\ufffd"}
    assert len(second[1]) <= 262_144
    assert caplog.records == []


@anyio_both
async def test_a_tool_that_is_none_fails_like_any_other() -> None:
    assert await run(HostedTool("acme:nothing")) == [("failed", "The tool failed.")]


@anyio_both
async def test_invalid_arguments_never_reach_the_tool() -> None:
    tools = (Look(), PlainLook())
    ended = await run(*tools, arguments='{"q": 7}')
    assert [status for status, _ in ended] == ["failed", "failed"]
    assert all("not valid" in output and "q" in output for _, output in ended)
    assert [tool.calls for tool in tools] == [[], []]


@anyio_both
@pytest.mark.parametrize("written", ["", " ", "\n"])
async def test_arguments_that_were_never_written_are_an_empty_object(written: str) -> None:
    told = Told()
    await run_hosted_calls([HostedCall(tool_of(lambda: "done"), "c", [written])], turn_of(), ThreadLimiter(1), told)
    assert told.ended == [("completed", "done")]
    assert {json.dumps(json.loads(item.fields["arguments"])) for item in told.items} == {"{}"}


@anyio_both
async def test_a_receipt_says_how_the_tool_was_called_and_what_came_of_it() -> None:
    told = Told()
    one = HostedCall(Look(), "call_1", ['{"q"', ': "\ud83d"}'])
    await run_hosted_calls([one], turn_of(), ThreadLimiter(1), told)
    begun, ended = told.items
    how = {"call_id": "call_1", "name": "look", "arguments": '{"q": "\ufffd"}'}
    assert (begun.type, begun.status, begun.fields) == ("acme:look", "in_progress", how | {"output": None})
    assert (ended.type, ended.status, ended.fields) == ("acme:look", "completed", how | {"output": "found \ufffd"})
    assert begun.key == ended.key


# Time.


class Steps:
    """What happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.went_on = threading.Event()


@anyio_both
async def test_a_tool_that_takes_too_long_is_given_up_and_told_so(caplog: pytest.LogCaptureFixture) -> None:
    log: list[str] = []
    released = threading.Event()

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("closed")

    def plain(turn: Turn) -> None:
        released.wait(BOUND)
        log.append(f"cancelled: {turn.cancelled}")

    async def clumsy() -> None:
        try:
            await anyio.sleep_forever()
        except BaseException:
            raise ValueError("while it was given up") from None

    tools = [tool_of(function, timeout=0.05) for function in (waits, plain)]
    assert await run(*tools, tool_of(lambda: "fine")) == [("failed", "The tool took too long.")] * 2 + [
        ("completed", "fine")
    ]
    assert log == ["closed"]
    released.set()
    await until(lambda: log == ["closed", "cancelled: True"])
    ((status, output),) = await run(tool_of(clumsy, timeout=0.05))
    assert status == "failed"
    assert "while it was" not in output
    assert all("tool" in record.message for record in caplog.records)


@anyio_both
async def test_a_tool_with_a_timeout_of_its_own_is_not_taken_for_a_cancellation() -> None:
    async def impatient() -> str:
        with anyio.move_on_after(0.01):
            await anyio.sleep_forever()
        with anyio.fail_after(0.01):
            await anyio.sleep_forever()
        return "never"

    ((status, output),) = await run(tool_of(impatient))
    assert status == "failed"
    assert output


@anyio_both
async def test_a_turn_that_was_given_up_in_one_tool_is_whole_in_the_others() -> None:
    turn, seen = turn_of(), list[bool]()

    async def slow() -> None:
        await anyio.sleep_forever()

    async def later(turn: Turn) -> None:
        await anyio.sleep(0.1)
        seen.append(turn.cancelled)

    await run(tool_of(slow, timeout=0.02), tool_of(later), turn=turn)
    assert (seen, turn.cancelled) == ([False], False)


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something is so, but not for ever."""
    with anyio.fail_after(BOUND):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await anyio.sleep(0.005)


@anyio_both
async def test_calls_run_side_by_side_and_end_in_their_order() -> None:
    together = [anyio.Event() for _ in range(3)]
    told = Told()

    def meeting(number: int) -> HostedTool:
        async def meet() -> int:
            together[number].set()
            for event in together:
                await event.wait()
            return number

        return tool_of(meet)

    calls = [HostedCall(meeting(number), f"call_{number}") for number in range(3)]
    with anyio.fail_after(BOUND):
        await run_hosted_calls(calls, turn_of(), ThreadLimiter(1), told)
    keys = ["call_0", "call_1", "call_2"]
    assert [(item.key, item.status) for item in told.items] == [
        *((key, "in_progress") for key in keys),
        *((key, "completed") for key in keys),
    ]
    assert told.ended == [("completed", f"{number}") for number in range(3)]


@anyio_both
async def test_plain_functions_run_side_by_side_in_threads() -> None:
    barrier = threading.Barrier(3)

    def meet() -> int:
        return barrier.wait(BOUND)

    ended = await run(*[tool_of(meet)] * 3)
    assert sorted(ended) == [("completed", "0"), ("completed", "1"), ("completed", "2")]


@anyio_both
async def test_plain_functions_wait_for_a_thread_where_there_are_few() -> None:
    busy: list[int] = []
    most: list[int] = []

    def work() -> None:
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.005)
        busy.pop()

    assert await run(*[tool_of(work)] * 6, threads=2) == [("completed", "null")] * 6
    assert max(most) <= 2


@anyio_both
async def test_each_end_is_told_as_soon_as_those_before_it_have_ended() -> None:
    go_on, told = anyio.Event(), Told()

    async def slow() -> str:
        await go_on.wait()
        return "slow"

    calls = [HostedCall(tool_of(lambda: "quick"), "a"), HostedCall(tool_of(slow), "b")]
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run_hosted_calls, calls, turn_of(), ThreadLimiter(2), told)
            await until(lambda: len(told.items) == 3)
            assert told.ended == [("completed", "quick")]
            go_on.set()
    assert told.ended == [("completed", "quick"), ("completed", "slow")]


@anyio_both
async def test_a_cancellation_reaches_async_tools_at_once_and_frees_plain_ones() -> None:
    log: list[str] = []
    started, released = threading.Event(), threading.Event()
    turns: list[Turn] = []

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("closed")

    def plain(turn: Turn) -> None:
        turns.append(turn)
        started.set()
        released.wait(BOUND)

    told, limiter = Told(), ThreadLimiter(1)
    calls = [HostedCall(tool_of(waits), "a"), HostedCall(tool_of(plain), "b")]
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(run_hosted_calls, calls, turn_of(), limiter, told)
        await until(started.is_set)
        group.cancel_scope.cancel()
    assert anyio.current_time() - began < BOUND / 2, "nobody waits for the thread"
    assert log == ["closed"]
    assert told.ended == []
    assert turns[0].cancelled, "the thread can see that nobody waits any more"
    assert limiter.current().borrowed_tokens == 1, "the thread's place is taken until it ends"
    released.set()
    await until(lambda: limiter.current().borrowed_tokens == 0)


@anyio_both
async def test_whoever_cannot_be_told_ends_all_calls() -> None:
    log: list[str] = []

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("closed")

    async def leaves(item: outputs.Item) -> None:
        if item.status != "in_progress":
            raise errors.ClientDisconnected

    calls = [HostedCall(tool_of(lambda: "quick"), "a"), HostedCall(tool_of(waits), "b")]
    with anyio.fail_after(BOUND), pytest.raises(errors.ClientDisconnected):
        await run_hosted_calls(calls, turn_of(), ThreadLimiter(2), leaves)
    assert log == ["closed"]


# The loop.


LOOKING: dict[str, Any] = {"type": "acme:look"}
ADD: dict[str, Any] = {"type": "function", "name": "add"}
FOUND = call("look", '{"q": "x"}')


class Loop:
    """A kit with a hosted tool around a script."""

    def __init__(
        self, *scripts: Any, tools: Sequence[Any] | None = None, window: int | None = None, **settings: Any
    ) -> None:
        everything = Model("scripted", tools=True, reasoning=True, structured_output=True, context_window=window)
        self.backend = ScriptedBackend(*scripts, models=[everything, "plain"])
        self.look = Look()
        self.kit = ResponsesKit(self.backend, tools=[self.look] if tools is None else tools, **settings)

    async def ask(self, given: Any = "Look.", *, owner: str = "", **body: Any) -> dict[str, Any]:
        request = {"input": given, "tools": [LOOKING], **body}
        with anyio.fail_after(BOUND):
            async with self.kit.stream(request, owner=owner) as events:
                seen = [event async for event in events]
        return check_stream(seen)

    async def refused(self, given: Any = "Look.", **body: Any) -> errors.APIError:
        with pytest.raises(errors.InvalidRequest) as caught:
            await self.kit.create({"input": given, "tools": [LOOKING], **body})
        assert self.backend.turns == []
        return caught.value

    @property
    def turns(self) -> list[Turn]:
        return self.backend.turns


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


@anyio_both
async def test_the_model_is_shown_what_its_tools_found_and_asked_again() -> None:
    loop = Loop([outputs.Reasoning("Hm."), "Let me look.", FOUND], ["It is x."])
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
    assert response["tools"] == [LOOKING]
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
async def test_a_stream_shows_a_call_when_it_begins_and_when_it_ends() -> None:
    go_on = anyio.Event()

    class Slow(Look):
        async def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
            await go_on.wait()
            return "found"

    kit = ResponsesKit(ScriptedBackend([FOUND, FOUND], ["Done."]), tools=[Slow()])
    seen: list[dict[str, Any]] = []
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Look.", "tools": [LOOKING]}) as events:
            async for event in events:
                seen.append(event)
                if sum(one["type"] == "response.output_item.added" for one in seen) == 2:
                    go_on.set()
    response = check_stream(seen)
    told = [(event["type"].rpartition(".")[2], event["output_index"]) for event in seen if "item" in event]
    assert told[:4] == [("added", 0), ("added", 1), ("done", 0), ("done", 1)]
    assert kinds(response) == ["acme:look", "acme:look", "message"]


@anyio_both
async def test_a_failed_call_is_shown_to_the_model_which_may_try_again() -> None:
    loop = Loop([call("look", '{"x": 1}')], [FOUND], ["There."])
    response = await loop.ask()
    assert response["status"] == "completed"
    assert [item["status"] for item in response["output"]] == ["failed", "completed", "completed"]
    assert "not valid" in loop.turns[1].messages()[-1]["content"]
    assert [turn.round for turn in loop.turns] == [0, 1, 2]


@anyio_both
async def test_a_backend_may_use_the_same_ids_in_every_round() -> None:
    again = call("look", '{"q": "x"}', "call_0")
    loop = Loop([again], [again], ["Done."])
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
async def test_a_plain_backend_and_a_plain_tool_do_as_well() -> None:
    class Plain(Backend):
        models = (Model("plain", tools=True),)

        def generate(self, turn: Turn) -> Iterator[outputs.Output]:
            yield FOUND if turn.round == 0 else turn.messages()[-1]["content"]

    kit = ResponsesKit(Plain(), tools=[PlainLook()], limits=Limits(max_threads=1))
    with anyio.fail_after(BOUND):
        response = await kit.create({"input": "Look.", "tools": [LOOKING]})
    check_response(response)
    assert response["output"][1]["content"][0]["text"] == "found x"


@anyio_both
async def test_calls_of_the_client_hand_over_after_the_hosted_ones_have_run() -> None:
    loop = Loop([FOUND, call("add", "{}", "mine"), FOUND], ["Never said."])
    response = await loop.ask(tools=[LOOKING, ADD])
    assert response["status"] == "completed"
    assert sorted(kinds(response)) == ["acme:look", "acme:look", "function_call"]
    assert all(item["status"] == "completed" for item in response["output"])
    assert len(loop.turns) == 1
    output = {"type": "function_call_output", "call_id": "mine", "output": "2"}
    again = await loop.ask([output], tools=[LOOKING, ADD], previous_response_id=response["id"])
    assert again["status"] == "completed"
    answered = [message["tool_call_id"] for message in loop.turns[-1].messages() if message["role"] == "tool"]
    assert sorted(answered) == sorted(item["call_id"] for item in response["output"])


# What is spent, and what was demanded.


@anyio_both
async def test_usage_is_summed_over_the_rounds() -> None:
    loop = Loop(
        [FOUND, outputs.Usage(10, 5, 1, 2)],
        [FOUND, outputs.Usage(1, 1), outputs.Usage(20, 6, 15, 3)],
        ["Done.", outputs.Usage(30, 7)],
    )
    usage = (await loop.ask())["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (60, 18, 78)
    assert usage["input_tokens_details"] == {"cached_tokens": 16}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 5}


@anyio_both
async def test_max_output_tokens_are_spent_over_the_rounds() -> None:
    loop = Loop([FOUND, outputs.Usage(1, 10)], [FOUND, outputs.Usage(1, 6)], ["Done.", outputs.Usage(1, 2)])
    response = await loop.ask(max_output_tokens=20)
    assert response["status"] == "completed"
    assert response["max_output_tokens"] == 20
    assert [turn.max_output_tokens for turn in loop.turns] == [20, 10, 4]


@anyio_both
@pytest.mark.parametrize("used", [20, 25])
async def test_once_max_output_tokens_are_spent_the_response_is_incomplete_with_what_was_found(used: int) -> None:
    loop = Loop([FOUND, outputs.Usage(1, used)], ["Never said."])
    response = await loop.ask(max_output_tokens=20)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in response["output"]] == [("acme:look", "completed")]
    assert len(loop.turns) == 1


@anyio_both
@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_a_round_that_was_cut_runs_no_tool(reason: Any) -> None:
    loop = Loop([FOUND, call("look", '{"q'), outputs.Finish(reason)], ["Never said."])
    response = await loop.ask()
    assert (response["status"], len(loop.turns), loop.look.calls) == ("incomplete", 1, [])


@anyio_both
async def test_finish_stop_after_a_hosted_call_is_no_end_of_the_response() -> None:
    loop = Loop([FOUND, outputs.Finish("stop"), outputs.Usage(1, 1)], ["Done.", outputs.Finish("stop")])
    assert kinds(await loop.ask()) == ["acme:look", "message"]


@anyio_both
async def test_max_tool_calls_holds_for_the_whole_response() -> None:
    loop = Loop([FOUND, FOUND], [FOUND, FOUND], [FOUND, "So be it."])
    response = await loop.ask(max_tool_calls=3)
    assert kinds(response) == ["acme:look"] * 3 + ["message"]
    assert response["max_tool_calls"] == 3
    assert [turn.max_tool_calls for turn in loop.turns] == [3, 1, 0]
    assert [len(turn.callable_tools) for turn in loop.turns] == [1, 1, 0]


@anyio_both
@pytest.mark.parametrize(("asked", "most"), [(None, 4), (2, 2), (9, 4)])
async def test_a_model_that_never_stops_calling_is_stopped_by_the_kit(asked: int | None, most: int) -> None:
    def script(turn: Turn) -> list[outputs.Output]:
        another = call("look", json.dumps({"q": f"{turn.round}"}))
        return [another] if turn.callable_tools else [another, "Enough."]

    loop = Loop(script, limits=Limits(max_tool_calls=4))
    response = await loop.ask(max_tool_calls=asked)
    assert kinds(response) == ["acme:look"] * most + ["message"]
    assert response["max_tool_calls"] == (None if asked is None else most), "what was applied is echoed"


@anyio_both
async def test_a_model_that_goes_round_in_circles_has_to_speak_at_last() -> None:
    loop = Loop(lambda turn: [FOUND] if turn.callable_tools else ["Enough."])
    response = await loop.ask(tool_choice="required")
    assert (response["status"], kinds(response)) == ("completed", ["acme:look"] * 3 + ["message"])
    other = call("look", '{"q": "y"}')
    varied = Loop([FOUND], [other], [FOUND], [FOUND], [other, FOUND], [other], ["Done."])
    assert kinds(await varied.ask()) == ["acme:look"] * 7 + ["message"], "what changes is no circle"


@anyio_both
async def test_without_hosted_tools_the_kits_own_limit_is_none() -> None:
    loop = Loop([call("add", "{}", f"call_{number}") for number in range(6)], limits=Limits(max_tool_calls=4))
    assert len((await loop.ask(tools=[ADD]))["output"]) == 6
    assert loop.turns[0].max_tool_calls is None


@anyio_both
async def test_without_parallel_calls_there_is_one_a_round() -> None:
    loop = Loop([FOUND, FOUND], [FOUND, FOUND], ["Done."])
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
async def test_what_was_demanded_first_is_done_after_the_first_round(choice: Any, first: str, later: str) -> None:
    loop = Loop([FOUND], ["Done."])
    response = await loop.ask(tools=[ADD, LOOKING], tool_choice=choice)
    assert response["tool_choice"] == choice
    assert kinds(response) == ["acme:look", "message"]
    one, two = loop.turns
    assert (one.must_call, two.must_call) == (first in ("required", "function"), False)
    everything = ["add", "look"]
    assert [tool.name for tool in one.callable_tools] == (everything if choice in ("auto", "required") else ["look"])
    assert [tool.name for tool in two.callable_tools] == (["look"] if later == "allowed" else everything)


@anyio_both
@pytest.mark.parametrize("choice", ["required", {"type": "acme:look"}])
async def test_a_hosted_tool_that_had_to_be_called_and_was_not_fails_the_response(choice: Any) -> None:
    assert (await Loop(["Rather not."]).ask(tool_choice=choice))["error"]["code"] == "tool_call_missing"


@anyio_both
async def test_allowed_tools_hold_in_every_round() -> None:
    choice = {"type": "allowed_tools", "tools": [{"type": "acme:look"}]}
    loop = Loop([FOUND], [call("add")])
    response = await loop.ask(tools=[LOOKING, ADD], tool_choice=choice)
    assert response["error"]["code"] == "tool_not_allowed"
    assert [item["status"] for item in response["output"]] == ["completed"], "what was done is still shown"
    response = await Loop([FOUND]).ask(tools=[LOOKING, ADD], tool_choice={"type": "function", "name": "add"})
    assert response["error"]["code"] == "tool_not_allowed"


@anyio_both
async def test_a_tool_choice_of_none_shows_the_tool_and_lets_nobody_call_it() -> None:
    loop = Loop(["No."])
    assert (await loop.ask(tool_choice="none"))["status"] == "completed"
    assert ([tool.name for tool in loop.turns[0].tools], loop.turns[0].callable_tools) == (["look"], ())
    assert (await Loop([FOUND]).ask(tool_choice="none"))["error"]["code"] == "tool_not_allowed"


@anyio_both
async def test_the_answers_format_holds_in_the_round_that_answers() -> None:
    form = {"format": {"type": "json_object"}}
    assert (await Loop([FOUND], ['{"a": 1}']).ask(text=form))["status"] == "completed"
    assert (await Loop([FOUND], ["secret"]).ask(text=form))["error"]["code"] == "invalid_output_format"
    assert (await Loop([FOUND], []).ask(text=form))["error"]["code"] == "invalid_output_format"


# What the client may ask for.


@anyio_both
async def test_a_tool_that_the_client_did_not_switch_on_is_not_there() -> None:
    loop = Loop([FOUND])
    response = await loop.ask(tools=[])
    assert response["error"]["code"] == "tool_not_allowed"
    assert (list(loop.turns[0].tools), response["tools"]) == ([], [])


@anyio_both
@pytest.mark.parametrize("name", ["documents", "name", "parameters", "description"])
async def test_what_a_client_cannot_set_of_a_tool_is_refused(name: str) -> None:
    loop = Loop(["Hi"])
    with pytest.raises(errors.UnsupportedParameter) as caught:
        await loop.kit.create({"input": "Hi", "tools": [LOOKING | {name: "other"}]})
    assert caught.value.param == f"tools[0].{name}"


@anyio_both
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"tools": [LOOKING, {"type": "acme:other"}]}, "unsupported_parameter", "tools[1].type"),
        ({"tools": [LOOKING, {"type": "web_search"}]}, "unsupported_parameter", "tools[1].type"),
        ({"tools": [{"type": "function", "name": "look"}, LOOKING]}, "invalid_request", "tools[1]"),
        ({"tools": [LOOKING, {"type": "function", "name": "look"}]}, "invalid_request", "tools[1]"),
        ({"tools": [LOOKING, LOOKING]}, "invalid_request", "tools[1]"),
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
async def test_a_request_that_makes_no_sense_is_refused_with_the_field(
    body: dict[str, Any], code: str, param: str
) -> None:
    error = await Loop(["Hi"]).refused(**body)
    assert (error.status, error.code, error.param) == (400, code, param)


# Receipts come back.


@anyio_both
async def test_receipts_of_earlier_responses_are_calls_and_outputs_again() -> None:
    loop = Loop([FOUND], ["It is x."], ["Again."])
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
async def test_extension_items_that_are_no_receipts_are_kept_and_not_shown() -> None:
    loop = Loop(["Hi"])
    foreign = [
        {"type": "other:chart", "points": [1, 2], "status": "drawn"},
        {"type": "acme:look", "name": "look", "call_id": "c", "arguments": '{"q": "x"}', "output": None},
        {"type": "acme:look", "name": "look", "call_id": "c", "arguments": {"q": "x"}, "output": "found"},
        {"type": "acme:look"},
    ]
    response = await loop.ask([{"role": "user", "content": "Hi"}, *foreign])
    assert [message["role"] for message in loop.turns[-1].messages()] == ["user"]
    kept = (await loop.kit.input_items(response["id"], order="asc"))["data"][1:]
    assert [{key: one[key] for key in given} for one, given in zip(kept, foreign, strict=True)] == foreign


# Leaving, and closing.


@anyio_both
@pytest.mark.parametrize("plain", [True, False])
async def test_a_client_that_leaves_ends_the_tool_and_its_record_says_so(plain: bool) -> None:
    log: list[str] = []
    started, released = threading.Event(), threading.Event()

    async def waits(turn: Turn) -> None:
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

    tool = HostedTool.from_function("acme:look", blocks if plain else waits, name="look")
    kit = ResponsesKit(ScriptedBackend([call("look")], ["Done."]), tools=[tool])
    response_id = ""
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Look.", "tools": [LOOKING]}) as events:
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
async def test_closing_the_kit_ends_a_tool_and_closes_each_toolset_once() -> None:
    log: list[str] = []
    started = anyio.Event()

    class Slow(Look):
        async def call(self, arguments: dict[str, Any], turn: Turn) -> Any:
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                log.append("cancelled")

        async def aclose(self) -> None:
            log.append("closed")

    kit = ResponsesKit(ScriptedBackend([FOUND]), tools=[Slow()])
    failures: list[errors.APIError] = []

    async def ask() -> None:
        try:
            await kit.create({"input": "Look.", "tools": [LOOKING]})
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
async def test_many_responses_with_tools_at_once_keep_apart() -> None:
    async def look(q: str, turn: Turn) -> str:
        await anyio.lowlevel.checkpoint()
        return f"{q} for {turn.owner}"

    tool = HostedTool.from_function("acme:look", look, name="look")

    def script(turn: Turn) -> list[outputs.Output | Pause]:
        if turn.round == 0:
            return [call("look", json.dumps({"q": turn.text})), Pause(0)]
        return [turn.messages()[-1]["content"]]

    kit = ResponsesKit(ScriptedBackend(script), tools=[tool])
    said: dict[str, str] = {}

    async def ask(name: str) -> None:
        response = await kit.create({"input": f"q{name}", "tools": [LOOKING]}, owner=name)
        said[name] = response["output"][-1]["content"][0]["text"]

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(ask, f"{number}")
    assert said == {f"{number}": f"q{number} for {number}" for number in range(20)}


# Setting up.


class Set:
    """A toolset of several tools, under one type."""

    def __init__(self, *tools: HostedTool, failure: Exception | None = None) -> None:
        self.type = "acme:set"
        self.all = tools
        self.failure = failure

    async def tools(self) -> Sequence[HostedTool]:
        if self.failure is not None:
            raise self.failure
        return self.all

    async def aclose(self) -> None:
        """Frees nothing."""


def numbered(number: int) -> HostedTool:
    async def found() -> int:
        return number

    return HostedTool.from_function("acme:set", found, name=f"tool_{number}")


@anyio_both
async def test_a_toolset_is_switched_on_by_one_type_and_each_of_its_tools_may_be_called() -> None:
    loop = Loop([call("tool_1"), call("tool_0")], ["Done."], tools=[Set(numbered(0), numbered(1))])
    response = await loop.ask(tools=[{"type": "acme:set"}], tool_choice={"type": "acme:set"})
    assert [tool.name for tool in loop.turns[0].tools] == ["tool_0", "tool_1"]
    assert loop.turns[0].must_call
    assert kinds(response) == ["acme:set", "acme:set", "message"]
    assert [(item["name"], item["output"]) for item in response["output"][:2]] == [("tool_1", "1"), ("tool_0", "0")]


@anyio_both
async def test_tools_of_different_toolsets_with_one_name_clash() -> None:
    loop = Loop(["Hi"], tools=[Set(HostedTool("acme:set", name="look")), Look()])
    error = await loop.refused(tools=[{"type": "acme:set"}, LOOKING])
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
async def test_some_of_a_toolset_may_be_allowed_alone(narrowed: dict[str, Any]) -> None:
    loop = Loop([call("tool_1")], ["Done."], tools=[Set(numbered(0), numbered(1))])
    response = await loop.ask(**narrowed)
    assert {name: response[name] for name in narrowed} == narrowed
    assert [tool.name for tool in loop.turns[0].callable_tools] == ["tool_1"]
    loop = Loop([call("tool_0")], ["Done."], tools=[Set(numbered(0), numbered(1))])
    with pytest.raises(errors.ModelError, match="may not call"):
        await loop.kit.create({"input": "Hi", **narrowed})


@anyio_both
@pytest.mark.parametrize(
    ("asked", "param"),
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
async def test_what_a_toolset_cannot_be_narrowed_to_is_refused(asked: dict[str, Any], param: str) -> None:
    loop = Loop(["Hi"], tools=[Set(numbered(0), numbered(1))])
    with pytest.raises(errors.InvalidRequest) as caught:
        await loop.kit.create({"input": "Hi", **asked})
    assert caught.value.param == param


@anyio_both
async def test_a_toolset_that_cannot_be_had_now_says_so_and_nothing_is_generated() -> None:
    loop = Loop(["Hi"], tools=[Set(failure=errors.ServerError("The tools are out of reach."))])
    with pytest.raises(errors.ServerError, match="out of reach"):
        await loop.kit.create({"input": "Hi", "tools": [{"type": "acme:set"}]})
    assert loop.turns == []
    await loop.ask(tools=[])


@pytest.mark.parametrize(
    "tools",
    [
        [Look],
        [weather],
        ["acme:look"],
        [{"type": "acme:look"}],
        [None],
        [Look(), Look()],
        [Look(), numbered(0), numbered(1)],
        [HostedTool("acme:does_nothing")],
    ],
)
def test_what_is_no_tool_or_is_there_twice_is_refused_when_the_kit_is_made(tools: list[Any]) -> None:
    with pytest.raises(errors.ConfigurationError, match="tool"):
        ResponsesKit(ScriptedBackend(["Hi"]), tools=tools)


def test_one_tool_may_be_named_twice_and_serves_several_kits() -> None:
    tool = Look()
    for _ in range(2):
        ResponsesKit(ScriptedBackend(["Hi"]), tools=[tool, tool])


def test_one_kit_with_tools_serves_several_event_loops(anyio_backend_name: str) -> None:
    kit = ResponsesKit(
        ScriptedBackend(lambda turn: [FOUND] if turn.round == 0 else ["Done."]), tools=[Look(), numbered(0)]
    )
    ask = functools.partial(kit.create, {"input": "Look.", "tools": [LOOKING]})
    for _ in range(2):
        assert kinds(anyio.run(ask, backend=anyio_backend_name)) == ["acme:look", "message"]


@anyio_both
async def test_closing_closes_every_toolset_and_starts_none_again(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Set(failure=RuntimeError("it is stuck")), Look()
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
    with pytest.raises(errors.ServerError, match="shutting down"):  # and not what the first one says when it is asked
        await kit.create({"input": "Hi", "tools": [{"type": first.type}]})
