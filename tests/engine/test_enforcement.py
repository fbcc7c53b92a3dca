"""Enforcement: any outputs of a backend satisfy the constraints of the request, or the response fails cleanly."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import HostedTool, Turn, errors, outputs
from responses_kit.context.constraints import Constraints
from responses_kit.engine.enforcement import Enforcer
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.json_schema import Schema
from responses_kit.protocol.state_machine import StateMachine
from responses_kit.schema.request import JsonObject, JsonSchema, PlainText
from responses_kit.schema.tools import AllowedTools, FunctionTool, NamedFunction

from ..protocol.test_state_machine import fresh_response
from ..support.conformance import check_stream
from ..support.strategies import any_outputs, legal_outputs

NOW = 1_750_000_000.0

NUMBER: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FREE = FunctionTool(name="free", parameters=NUMBER)
STRICT = FunctionTool(name="strict", parameters=NUMBER, strict=True)
LAX = FunctionTool(name="lax", strict=True, parameters={"type": "object"})
LOOK = HostedTool("acme:look")
SHOWN = FunctionTool(name="look", parameters=LOOK.parameters)
TOOLS = (FREE, STRICT, LAX, SHOWN)

TRUNCATING_REASONS = ["max_output_tokens", "content_filter"]


def turn_with(**constraints: Any) -> Turn:
    return Turn(**({"model": "scripted", "items": [], "tools": TOOLS, "text_format": PlainText()} | constraints))


class Round:
    """One round of a response with its turn, enforcer and events."""

    def __init__(
        self, schema: dict[str, Any] | None = None, *, previous_usage: outputs.Usage | None = None, **constraints: Any
    ) -> None:
        self.turn = turn_with(**constraints)
        self.state_machine = StateMachine(fresh_response(), new_id=new_id)
        strict = {tool.name: Schema(tool.parameters or {}) for tool in self.turn.tools if tool.strict}
        compiled = Constraints(None if schema is None else Schema(schema), strict, {"look": LOOK})
        self.enforcer = Enforcer(self.turn, compiled, self.state_machine.feed, previous_usage)
        self.events = self.state_machine.start()

    def play(self, script: Iterable[Any]) -> dict[str, Any]:
        """Feed the outputs and return the final response, with a finished item per hosted call; check the stream."""
        try:
            for output in script:
                self.events += self.enforcer.feed(output)
            self.enforcer.end()
        except (errors.ModelError, errors.IllegalOutput):
            check_stream(self.events + self.state_machine.fail(errors.ModelError("It failed.")))
            raise
        for call in self.enforcer.hosted_calls:
            self.events += self.state_machine.feed(call.receipt("completed", "done"))
        self.events += self.state_machine.close(NOW) + self.state_machine.end()
        return check_stream(self.events)


def check_passes(script: Iterable[Any], schema: dict[str, Any] | None = None, **constraints: Any) -> dict[str, Any]:
    return Round(schema, **constraints).play(script)


def check_fails(
    code: str, script: Iterable[Any], schema: dict[str, Any] | None = None, **constraints: Any
) -> errors.ModelError:
    with pytest.raises(errors.ModelError) as caught:
        Round(schema, **constraints).play(script)
    assert caught.value.code == code
    assert len(caught.value.message) < 200
    assert "secret" not in caught.value.message, "the message must not quote the model"
    return caught.value


def calls(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and arguments of all calls in a response, including hosted ones."""
    return [(item["name"], item["arguments"]) for item in response["output"] if "arguments" in item]


def texts(response: dict[str, Any]) -> list[str]:
    return [
        "".join(part.get("text", "") for part in item["content"])
        for item in response["output"]
        if item["type"] == "message"
    ]


call = outputs.ToolCall
more = outputs.ToolArguments


class StrSubclass(str):
    """A subclass of `str`."""


class TextSubclass(outputs.Text):
    """A subclass of `Text`."""


class ToolCallSubclass(outputs.ToolCall):
    """A subclass of `ToolCall`."""


# Allowed and required calls.


@pytest.mark.parametrize(
    ("constraints", "allowed"),
    [
        ({}, {"free", "strict", "lax", "look"}),
        ({"tool_choice": "required"}, {"free", "strict", "lax", "look"}),
        ({"tool_choice": "none"}, set()),
        ({"tools": ()}, set()),
        ({"tool_choice": NamedFunction(name="free")}, {"free"}),
        ({"tool_choice": NamedFunction(name="look")}, {"look"}),
        ({"tool_choice": AllowedTools(tools=[NamedFunction(name="look"), NamedFunction(name="lax")])}, {"look", "lax"}),
        ({"tool_choice": AllowedTools(tools=[NamedFunction(name="look")], mode="required")}, {"look"}),
        ({"tool_choice": AllowedTools(tools=[NamedFunction(name="look")], mode="none")}, set()),
    ],
)
def test_call_outside_tool_choice_fails(constraints: dict[str, Any], allowed: set[str]) -> None:
    for name in ("free", "strict", "lax", "look", "unknown"):
        for kind in (call, ToolCallSubclass):
            script = ["Well.", kind(name, '{"a": 1}')]
            if name in allowed:
                assert calls(check_passes(script, **constraints)) == [(name, '{"a": 1}')]
            else:
                check_fails("tool_not_allowed", script, **constraints)


def test_disallowed_call_fails_without_events() -> None:
    round_ = Round(tool_choice="none")
    with pytest.raises(errors.ModelError):
        round_.enforcer.feed(call("free", '{"secret": 1}'))
    assert round_.state_machine.fail(errors.ModelError("x"))[0]["type"] == "error", "an item was opened for the call"


@pytest.mark.parametrize(
    "choice",
    ["required", NamedFunction(name="free"), AllowedTools(tools=[NamedFunction(name="free")], mode="required")],
)
def test_missing_required_call_fails(choice: Any) -> None:
    for script in (
        [],
        ["Rather not."],
        [outputs.Reasoning("Hm.")],
        ["", outputs.Finish("stop")],
        [outputs.Usage(1, 1)],
    ):
        check_fails("tool_call_missing", script, tool_choice=choice)
    assert calls(check_passes(["First: ", call("free")], tool_choice=choice)) == [("free", "{}")]


def test_valid_answer_does_not_replace_required_call() -> None:
    check_fails("tool_call_missing", ["{}"], {"type": "object"}, tool_choice="required")


def test_hosted_call_satisfies_required_choice() -> None:
    assert calls(check_passes([call("look")], tool_choice="required")) == [("look", "{}")]


@pytest.mark.parametrize("reason", TRUNCATING_REASONS)
@pytest.mark.parametrize("choice", ["required", NamedFunction(name="strict")])
def test_truncation_before_required_call_is_incomplete(choice: Any, reason: Any) -> None:
    for script in ([], ["Let me"], [outputs.Reasoning("First")], [call("strict", '{"a"')]):
        assert check_passes([*script, outputs.Finish(reason)], tool_choice=choice)["status"] == "incomplete"


def test_refusal_replaces_required_call() -> None:
    assert check_passes([outputs.Refusal("No.")], tool_choice="required")["status"] == "completed"


# Limits on calls.


@pytest.mark.parametrize(
    ("constraints", "max_calls"),
    [
        ({}, 5),
        ({"max_tool_calls": 5}, 5),
        ({"max_tool_calls": 2}, 2),
        ({"max_tool_calls": 1}, 1),
        ({"max_tool_calls": 0}, 0),
        ({"parallel_tool_calls": False}, 1),
        ({"parallel_tool_calls": False, "max_tool_calls": 3}, 1),
        ({"parallel_tool_calls": False, "max_tool_calls": 0}, 0),
    ],
)
@pytest.mark.parametrize("names", [["free"] * 5, ["look"] * 5, ["free", "look", "strict", "look", "lax"]])
def test_calls_beyond_limit_are_suppressed(names: list[str], constraints: dict[str, Any], max_calls: int) -> None:
    script = [call(name, '{"a": ', f"call_{number}") for number, name in enumerate(names)]
    script += [more(f"{number}}}", f"call_{number}") for number in range(5)]  # type: ignore[misc]
    round_ = Round(**constraints)
    response = round_.play(script)
    assert sorted(calls(response)) == sorted(
        (name, f'{{"a": {number}}}') for number, name in enumerate(names[:max_calls])
    )
    assert round_.enforcer.call_count == max_calls
    assert len(round_.enforcer.hosted_calls) == names[:max_calls].count("look")


def test_suppressed_call_drops_only_its_own_arguments() -> None:
    script = [
        call("free", '{"a": ', "a"),
        call("free", '{"secret": ', "b"),
        more("7}"),
        more("1", "a"),
        more("8", "b"),
        more("}", "a"),
    ]
    assert calls(check_passes(script, max_tool_calls=1)) == [("free", '{"a": 1}')]


def test_suppressed_call_is_not_validated() -> None:
    script = [call("free", '{"a": 1}'), call("unknown"), call("no name at all!", "no JSON"), more("]")]
    assert calls(check_passes(script, max_tool_calls=1)) == [("free", '{"a": 1}')]


def test_sequential_calls_are_counted_like_parallel_ones() -> None:
    script = [call("free", '{"a": 1}'), "Then: ", call("free", '{"a": 2}'), "At last.", call("look")]
    assert len(calls(check_passes(script, max_tool_calls=2))) == 2
    assert len(calls(check_passes(script, parallel_tool_calls=False))) == 1


def test_call_is_suppressed_when_no_calls_remain() -> None:
    response = check_passes([call("free"), "So be it."], max_tool_calls=0)
    assert (calls(response), texts(response)) == ([], ["So be it."])


def test_suppressed_call_is_not_counted() -> None:
    round_ = Round(max_tool_calls=0)
    round_.play([call("look"), call("free"), "Well."])
    assert (round_.enforcer.call_count, round_.enforcer.has_client_calls) == (0, False)


# Arguments.


def test_strict_arguments_must_match_schema() -> None:
    good = ['{"a": 1}', ' {"a": -5} ', '{"a": 1.0}', '{"a": 1, "a": 2}']
    bad = ["", "{}", '{"a": "1"}', '{"a": 1, "secret": 2}', "[]", "null", "1", '{"a": 1', '{"a": NaN}', "{'a': 1}"]
    for arguments in good:
        assert calls(check_passes([call("strict", arguments)])) == [("strict", arguments)]
    for arguments in bad:
        check_fails("invalid_tool_arguments", [call("strict", arguments)])
        check_fails("invalid_tool_arguments", [call("strict", arguments), "Done."])
        check_fails("invalid_tool_arguments", [call("strict", arguments), outputs.Finish()])
        assert check_passes([call("free", arguments)])["status"] == "completed", (
            "arguments of a non-strict function were validated"
        )


@pytest.mark.parametrize("arguments", [[], [""], [" ", "\n"]])
def test_missing_arguments_are_empty_object(arguments: list[str]) -> None:
    script = [call("lax"), *(more(piece) for piece in arguments)]
    ((_, written),) = calls(check_passes(script))
    assert json.loads(written) == {}


def test_argument_failure_names_only_the_keyword() -> None:
    assert "`required`" in check_fails("invalid_tool_arguments", [call("strict", "{}")]).message
    assert "`type`" in check_fails("invalid_tool_arguments", [call("strict", '{"a": "secret"}')]).message
    assert "`json`" in check_fails("invalid_tool_arguments", [call("strict", '{"secret')]).message


def test_parallel_strict_calls_are_validated_separately() -> None:
    pieces = [more('{"a"', "x"), more('{"a"', "y"), more(": 1}", "x"), more(": 2}", "y")]
    script = [call("strict", "", "x"), call("strict", "", "y"), *pieces]
    assert calls(check_passes(script)) == [("strict", '{"a": 1}'), ("strict", '{"a": 2}')]
    check_fails("invalid_tool_arguments", [call("strict", "", "x"), call("strict", "", "y"), *pieces[:3]])
    check_fails("invalid_tool_arguments", [call("strict", "", "x"), call("strict", "", "y"), *pieces[1:]])


def test_arguments_are_assigned_by_call_id() -> None:
    round_ = Round()
    script = [
        call("look", "[", "h"),
        call("strict", "", "c"),
        more("1,", "h"),
        more('{"a": 1}', "c"),
        more("2]", "h"),
        call("look", '{"last": '),
        more("true}"),
    ]
    response = round_.play(script)
    assert sorted(calls(response)) == [("look", "[1,2]"), ("look", '{"last": true}'), ("strict", '{"a": 1}')]


@pytest.mark.parametrize("name", ["free", "strict", "look"])
def test_arguments_without_open_call_are_illegal(name: str) -> None:
    whole = call(name, '{"a": 1}', "a")
    for script in (
        [more("{}")],
        [whole, more("{}", "b")],
        [whole, "text", more("", "a")],
        [whole, outputs.Item("a:b"), more("")],
    ):
        with pytest.raises(errors.IllegalOutput):
            check_passes(script)


@pytest.mark.parametrize("name", ["free", "strict", "look"])
def test_events_and_usage_do_not_interrupt_arguments(name: str) -> None:
    script = [call(name, '{"a"'), outputs.Event("acme:trace"), outputs.Usage(1, 1), more(": 1}")]
    assert calls(check_passes(script)) == [(name, '{"a": 1}')]


@pytest.mark.parametrize("name", ["free", "strict", "look"])
@pytest.mark.parametrize("value", [7, None, b"{}", ["{}"], {"a": 1}])
def test_non_text_arguments_are_illegal(name: str, value: Any) -> None:
    for script in ([call(name, value)], [call(name), more(value)], [call(name, "{}", "a"), more(value, "a")]):
        with pytest.raises(errors.IllegalOutput):
            check_passes(script)


@pytest.mark.parametrize("value", [7, None, b"free", ["free"], {"free": 1}])
def test_non_text_tool_name_is_rejected(value: Any) -> None:
    with pytest.raises((errors.IllegalOutput, errors.ModelError)):
        check_passes([call(value)])


# Hosted calls.


def test_hosted_calls_are_collected_without_events() -> None:
    round_ = Round()
    assert round_.enforcer.feed(call("look", '{"q": 1}', "mine")) == []
    round_.enforcer.end()
    (collected,) = round_.enforcer.hosted_calls
    assert (collected.tool, "".join(collected.pieces)) == (LOOK, '{"q": 1}')
    assert not round_.enforcer.has_client_calls


def test_hosted_calls_get_unique_ids_when_backend_reuses_ids() -> None:
    ids = []
    for _ in range(2):
        round_ = Round()
        round_.play([call("look", "{}", "call_0"), call("look", "{}", "call_0")])
        ids += [one.call_id for one in round_.enforcer.hosted_calls]
    assert len(set(ids)) == 4


def test_function_calls_beside_hosted_calls_end_the_response() -> None:
    for script, has_client_calls in (
        ([call("look")], False),
        ([call("look"), call("free")], True),
        ([call("free"), call("look")], True),
        ([call("free")], True),
        ([], False),
    ):
        round_ = Round()
        round_.play(script)
        assert round_.enforcer.has_client_calls is has_client_calls


def test_finish_after_hosted_calls_does_not_end_response() -> None:
    round_ = Round()
    round_.enforcer.feed(call("look"))
    assert round_.enforcer.feed(outputs.Finish("stop")) == []
    round_.enforcer.end()
    round_.state_machine.feed("The next round may go on.")


@pytest.mark.parametrize("reason", TRUNCATING_REASONS)
def test_hosted_calls_of_truncated_round_are_dropped_except_the_incomplete_one(reason: Any) -> None:
    whole, cut = call("look", '{"a": 1}', "a"), call("look", '{"b', "b")
    for script, shown in (
        ([whole, cut], [("incomplete", '{"b')]),
        ([cut], [("incomplete", '{"b')]),
        ([whole, call("free", '{"c')], [("incomplete", '{"c')]),
        ([whole, "That was"], [("incomplete", None)]),
        ([whole, outputs.Reasoning("Hm")], [("incomplete", None)]),
    ):
        round_ = Round()
        response = round_.play([*script, outputs.Finish(reason)])
        assert round_.enforcer.hosted_calls == []
        assert [(item["status"], item.get("arguments")) for item in response["output"]] == shown
        assert all(item.get("output") is None for item in response["output"])
        assert response["incomplete_details"] == {"reason": reason}


@pytest.mark.parametrize("reason", TRUNCATING_REASONS)
def test_truncated_function_call_beside_hosted_call_is_incomplete(reason: Any) -> None:
    cut, hosted = call("free", '{"a', "c"), call("look", "{}", "h")
    for script in ([cut, hosted], [hosted, cut]):
        response = check_passes([*script, outputs.Finish(reason)])
        assert [item["status"] for item in response["output"] if item["type"] == "function_call"] == ["incomplete"]


# The format of the answer.


SCHEMAS = [{"type": "object"}, NUMBER]


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize(
    "script",
    [
        ['{"a": 1}'],
        ["", '{"a"', "", ": 1", "}"],
        [StrSubclass('{"a"'), ": 1}"],
        [outputs.Text('{"a"'), ": ", TextSubclass("1}")],
        [outputs.Reasoning("An object?"), outputs.ReasoningSummary("Yes."), ' {"a": 1}\n'],
        ['{"a": 1', outputs.Annotation("https://example.org"), "}"],
        ['{"a": 1}', outputs.Finish("stop"), outputs.Usage(1, 1)],
        [outputs.Message("final_answer"), '{"a": 1}'],
        [outputs.Message("commentary"), "Let me see.", outputs.Message("final_answer"), '{"a": 1}'],
        [outputs.Message("commentary"), "Let me see.", outputs.Message(), '{"a": 1}'],
        [outputs.Message("commentary"), "Let me see.", outputs.Reasoning("Hm."), '{"a": 1}'],
        [outputs.Message("commentary"), "Hm.", outputs.Item("acme:x"), '{"a": 1}', outputs.Message("commentary"), "!"],
        ['{"a": 1}', outputs.Message(), '{"a": 2}', outputs.Item("acme:x"), '{"a": 3}'],
        [outputs.Refusal("No.")],
        ['{"a": ', outputs.Refusal("No.")],
        [call("free")],
        [call("look")],
        ['{"a": 1}', call("free"), '{"a": 1}'],
    ],
)
def test_answer_that_matches_format_passes(script: list[Any], schema: dict[str, Any]) -> None:
    assert check_passes(script, schema)["status"] == "completed"


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize(
    "script",
    [
        [],
        [""],
        ["secret"],
        ["[1]"],
        ["null"],
        ['{"a": NaN}'],
        ['{"a": 1}{"a": 1}'],
        ['{"a": 1', outputs.Finish("stop")],
        ['```json\n{"a": 1}\n```'],
        [StrSubclass("secret")],
        [TextSubclass("secret")],
        ['{"a"', outputs.Message(), ": 1}"],
        ['{"a"', outputs.Reasoning("Hm."), ": 1}"],
        ['{"a"', outputs.Item("acme:x"), ": 1}"],
        ['{"a"', call("free"), ": 1}"],
        ['{"a": 1}', outputs.Message(), "secret"],
        ["secret", outputs.Message(), '{"a": 1}'],
        ["secret", call("free")],
        [call("free"), "secret"],
        [outputs.Reasoning('{"a": 1}')],
        [outputs.Message("final_answer")],
        [outputs.Message("commentary"), '{"a": 1}'],
        [outputs.Message("commentary"), "Hm.", outputs.Message(), "secret"],
        [outputs.Message("commentary"), "Hm.", outputs.Reasoning("Hm."), "secret"],
        [outputs.Message("commentary"), "Hm.", outputs.Item("acme:x"), "secret"],
        [outputs.Message("commentary"), "Hm.", call("free"), "secret"],
        [outputs.Item("acme:x")],
        [outputs.Usage(1, 1)],
    ],
)
def test_answer_that_violates_format_fails(script: list[Any], schema: dict[str, Any]) -> None:
    assert "format" in check_fails("invalid_output_format", script, schema).message


@pytest.mark.parametrize("name", ["free", "look"])
def test_texts_around_hidden_call_are_validated_per_message(name: str) -> None:
    schema = {"type": "object"}
    round_ = Round(schema, max_tool_calls=0 if name == "free" else None)
    with suppress(errors.ModelError):
        assert texts(round_.play(["{}", call(name), "{}"])) == ["{}", "{}"]


def test_format_failure_names_the_keyword() -> None:
    assert "`required`" in check_fails("invalid_output_format", ["{}"], NUMBER).message
    assert "`json`" in check_fails("invalid_output_format", ["secret"], NUMBER).message


@pytest.mark.parametrize("reason", TRUNCATING_REASONS)
@pytest.mark.parametrize("script", [[], ['{"a'], [outputs.Reasoning("Hm")], [outputs.Message("commentary"), "x"]])
def test_truncated_answer_may_be_incomplete(script: list[Any], reason: Any) -> None:
    assert check_passes([*script, outputs.Finish(reason)], NUMBER)["status"] == "incomplete"


@pytest.mark.parametrize("reason", TRUNCATING_REASONS)
def test_complete_items_before_truncation_are_validated(reason: Any) -> None:
    check_fails("invalid_output_format", ["secret", outputs.Message(), '{"a', outputs.Finish(reason)], NUMBER)
    check_fails("invalid_tool_arguments", [call("strict", "{}"), "And now", outputs.Finish(reason)])
    check_fails("invalid_output_format", ["secret", call("look", '{"a'), outputs.Finish(reason)], NUMBER)
    script = [call("strict", '{"b": 1}', "x"), call("strict", '{"a', "y"), outputs.Finish(reason)]
    check_fails("invalid_tool_arguments", script)


def test_text_with_surrogate_pairs_is_validated_as_sent() -> None:
    response = check_passes(['{"a": "\ud83d\ude00"}'], {"type": "object"})
    assert json.loads(texts(response)[0]) == {"a": "\U0001f600"}


def test_any_text_passes_without_format() -> None:
    response = check_passes(["secret", StrSubclass(" {"), outputs.Text("]"), call("free"), "\ud83d"])
    assert texts(response) == ["secret {]", "\ufffd"]


# Finish.


@pytest.mark.parametrize("reason", ["stop", *TRUNCATING_REASONS])
@pytest.mark.parametrize("first", ["text", call("free"), call("look")])
@pytest.mark.parametrize(
    "late",
    [
        "",
        "more",
        outputs.Text("x"),
        call("free"),
        call("look"),
        more("{}"),
        outputs.Finish(),
        outputs.Item("a:b"),
        outputs.Event("a:b"),
    ],
)
def test_only_usage_may_follow_finish(first: Any, reason: Any, late: Any) -> None:
    with pytest.raises(errors.IllegalOutput, match="Finish"):
        check_passes([first, outputs.Finish(reason), late])
    assert check_passes([first, outputs.Finish(reason), outputs.Usage(3, 4)])["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("script", [[], [call("look")], [call("free")], ["text"]])
def test_unknown_finish_reason_is_illegal(script: list[Any]) -> None:
    for reason in ("length", "", None, 7, ["stop"]):
        with pytest.raises(errors.IllegalOutput):
            check_passes([*script, outputs.Finish(reason)])  # type: ignore[arg-type]


# Usage.


def test_usage_adds_earlier_rounds_and_last_value_of_a_round_counts() -> None:
    round_ = Round(previous_usage=outputs.Usage(10, 5, 4, 3))
    assert round_.enforcer.usage == outputs.Usage(10, 5, 4, 3)
    response = round_.play(["text", outputs.Usage(1, 1), outputs.Usage(20, 7, 2, 1)])
    assert round_.enforcer.usage == outputs.Usage(30, 12, 6, 4)
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 6},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 42,
    }


def test_usage_is_none_when_backend_reports_none() -> None:
    round_ = Round()
    assert round_.play(["text"])["usage"] is None
    assert round_.enforcer.usage is None


@pytest.mark.parametrize("previous_usage", [None, outputs.Usage(10, 10, 5, 5)])
@pytest.mark.parametrize(
    "counts", [(-1, 0), (0, 1.5), (True, 0), ("1", 0), (None, 0), (0, 0, 1), (0, 0, 0, 1), (1, 1, -1), ([], [])]
)
def test_invalid_usage_is_illegal(previous_usage: outputs.Usage | None, counts: Any) -> None:
    with pytest.raises(errors.IllegalOutput):
        Round(previous_usage=previous_usage).play([outputs.Usage(*counts)])


# Property tests.


_JSON = st.sampled_from(["{}", '{"a": 1}', '{"a"', ": 1}", '{"a": "x"}', "", " ", "[]", "{", "}"])
_NAMES = st.sampled_from([tool.name for tool in TOOLS] + ["unknown"])
_IDS = st.none() | st.sampled_from(["x", "y"])
_plausible_output = st.one_of(
    _JSON,
    st.builds(outputs.Text, _JSON),
    st.builds(call, _NAMES, _JSON, _IDS),
    st.builds(call, _NAMES, st.just('{"a": 1}')),
    st.builds(more, _JSON, _IDS),
    st.builds(outputs.Message, st.sampled_from([None, "commentary", "final_answer"])),
    st.builds(outputs.Reasoning, st.just("Hm.")),
    st.builds(outputs.Annotation, st.just("https://example.org")),
    st.builds(outputs.Refusal, st.just("No.")),
    st.builds(outputs.Item, st.just("acme:x")),
)
_parts = st.sampled_from(
    [
        ['{"a": 1}'],
        ["{", '"a": 1', "}"],
        [outputs.Message("commentary"), "Let me see."],
        [outputs.Message("commentary"), "Let me see.", outputs.Message("final_answer"), '{"a": 1}'],
        [outputs.Reasoning("Hm."), '{"a": 2}'],
        [outputs.Reasoning("Hm.")],
        [outputs.Usage(3, 2)],
        [outputs.Event("acme:trace")],
        [outputs.Item("acme:x")],
        [call("free", '{"a": 1}')],
        [call("strict", '{"a"'), more(": 1}")],
        [call("strict", "{}")],
        [call("lax")],
        [call("look", '{"a": 1}')],
        [call("look", "["), call("free", "{}", "z"), more("}", "z"), outputs.Message(), '{"a": 1}'],
        [call("free", "{"), call("look", "["), more("]")],
    ]
)
_endings = st.sampled_from([[], [], ["{"], [call("strict", "{")], [outputs.Finish("stop")]]) | st.builds(
    lambda last, reason: [*last, outputs.Finish(reason), outputs.Usage(1, 1)],
    st.sampled_from([[], ['{"a'], [call("strict", '{"a')], [call("look", '{"a')], [outputs.Reasoning("Hm")]]),
    st.sampled_from(TRUNCATING_REASONS),
)
_scripts = st.one_of(
    st.builds(lambda parts, end: [*chain.from_iterable(parts), *end], st.lists(_parts, max_size=4), _endings),
    st.lists(
        st.one_of(_plausible_output, _plausible_output, _plausible_output, legal_outputs, any_outputs), max_size=9
    ),
)
_named_function = st.sampled_from(TOOLS).map(lambda tool: NamedFunction(name=tool.name))
_choices = st.one_of(
    st.sampled_from(["none", "auto", "required"]),
    _named_function,
    st.builds(
        lambda tools, mode: AllowedTools(tools=tools, mode=mode),
        st.lists(_named_function, min_size=1, max_size=3),
        st.sampled_from(["none", "auto", "required"]),
    ),
)


def allowed_names(turn: Turn) -> set[str]:
    """Return the names of the tools that may be called according to the specification."""
    names = {tool.name for tool in turn.tools}
    choice = turn.tool_choice
    if choice == "none":
        return set()
    if isinstance(choice, NamedFunction):
        return names & {choice.name}
    if isinstance(choice, AllowedTools):
        listed = {tool.name for tool in choice.tools if isinstance(tool, NamedFunction)}
        return set() if choice.mode == "none" else names & listed
    return names


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def check_constraints(response: dict[str, Any], turn: Turn, schema: dict[str, Any] | None) -> None:
    """Check a response against its request, independently of the enforcer."""
    shown = [item for item in response["output"] if item["type"] in ("function_call", LOOK.type)]
    assert {item["name"] for item in shown} <= allowed_names(turn)
    assert turn.max_tool_calls is None or len(shown) <= turn.max_tool_calls
    assert turn.parallel_tool_calls or len(shown) <= 1
    schemas = {tool.name: tool.parameters or {} for tool in turn.tools if tool.strict}
    for item in shown:
        if item["type"] == "function_call" and item["status"] == "completed" and item["name"] in schemas:
            assert is_valid(item["arguments"], schemas[item["name"]]), item["arguments"]
    messages = [item for item in response["output"] if item["type"] == "message"]
    refused = any(part["type"] == "refusal" for item in messages for part in item["content"])
    if response["status"] == "completed" and not refused:
        choice = turn.tool_choice
        required = isinstance(choice, NamedFunction) or "required" in (choice, getattr(choice, "mode", None))
        assert shown or not required, "a call was required"
    if schema is None:
        return
    checked_count = 0
    for item in messages:
        parts = [part["type"] for part in item["content"]]
        text = "".join(part.get("text", "") for part in item["content"])
        if item.get("phase") == "commentary" or "refusal" in parts or not text or item["status"] != "completed":
            continue
        assert is_valid(text, schema), text
        checked_count += 1
    assert checked_count or shown or refused or response["status"] != "completed", "there is no answer"


@given(
    script=_scripts,
    choice=st.just("auto") | _choices,
    schema=st.sampled_from([None, *SCHEMAS]),
    parallel=st.booleans(),
    max_calls=st.sampled_from([None, None, 0, 1, 2]),
    previous_usage=st.sampled_from([None, outputs.Usage(3, 2, 1, 1)]),
)
def test_any_outputs_satisfy_constraints_or_fail(
    script: Sequence[Any],
    choice: Any,
    schema: dict[str, Any] | None,
    parallel: bool,
    max_calls: int | None,
    previous_usage: outputs.Usage | None,
) -> None:
    formats = {None: PlainText(), "object": JsonObject(), "number": JsonSchema(name="number", schema=NUMBER)}
    round_ = Round(
        schema,
        previous_usage=previous_usage,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        max_tool_calls=max_calls,
        text_format=formats[None if schema is None else "number" if schema is NUMBER else "object"],
    )
    try:
        response = round_.play(script)
    except (errors.ModelError, errors.IllegalOutput):
        return
    check_constraints(response, round_.turn, schema)
