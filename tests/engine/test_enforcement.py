"""Control: whatever a backend yields, what passes is what the request demands, or a clean error."""

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

CUTS = ["max_output_tokens", "content_filter"]


def turn_with(**demands: Any) -> Turn:
    return Turn(**({"model": "scripted", "items": [], "tools": TOOLS, "text_format": PlainText()} | demands))


class Round:
    """One round of a response: a turn, what its outputs made, and what came of it in the end."""

    def __init__(
        self, form: dict[str, Any] | None = None, *, before: outputs.Usage | None = None, **demands: Any
    ) -> None:
        self.turn = turn_with(**demands)
        self.machine = StateMachine(fresh_response(), new_id=new_id)
        strict = {tool.name: Schema(tool.parameters or {}) for tool in self.turn.tools if tool.strict}
        compiled = Constraints(None if form is None else Schema(form), strict, {"look": LOOK})
        self.control = Enforcer(self.turn, compiled, self.machine.feed, before)
        self.events = self.machine.start()

    def play(self, script: Iterable[Any]) -> dict[str, Any]:
        """The final response, with a receipt for each hosted call; whatever happens, the stream is legal."""
        try:
            for output in script:
                self.events += self.control.feed(output)
            self.control.end()
        except (errors.ModelError, errors.IllegalOutput):
            check_stream(self.events + self.machine.fail(errors.ModelError("It failed.")))
            raise
        for call in self.control.hosted:
            self.events += self.machine.feed(call.receipt("completed", "done"))
        self.events += self.machine.close(NOW) + self.machine.end()
        return check_stream(self.events)


def passes(script: Iterable[Any], form: dict[str, Any] | None = None, **demands: Any) -> dict[str, Any]:
    return Round(form, **demands).play(script)


def fails(code: str, script: Iterable[Any], form: dict[str, Any] | None = None, **demands: Any) -> errors.ModelError:
    with pytest.raises(errors.ModelError) as caught:
        Round(form, **demands).play(script)
    assert caught.value.code == code
    assert len(caught.value.message) < 200
    assert "secret" not in caught.value.message, "what the model said is nobody's business"
    return caught.value


def calls(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and arguments of all calls that a response shows, hosted ones included."""
    return [(item["name"], item["arguments"]) for item in response["output"] if "arguments" in item]


def texts(response: dict[str, Any]) -> list[str]:
    return [
        "".join(part.get("text", "") for part in item["content"])
        for item in response["output"]
        if item["type"] == "message"
    ]


call = outputs.ToolCall
more = outputs.ToolArguments


class Words(str):
    """A str of somebody's own."""


class Talk(outputs.Text):
    """A Text of somebody's own."""


class Call(outputs.ToolCall):
    """A ToolCall of somebody's own."""


# What may be called.


@pytest.mark.parametrize(
    ("demands", "allowed"),
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
def test_only_what_the_tool_choice_allows_may_be_called(demands: dict[str, Any], allowed: set[str]) -> None:
    for name in ("free", "strict", "lax", "look", "unknown"):
        for kind in (call, Call):
            script = ["Well.", kind(name, '{"a": 1}')]
            if name in allowed:
                assert calls(passes(script, **demands)) == [(name, '{"a": 1}')]
            else:
                fails("tool_not_allowed", script, **demands)


def test_a_call_that_is_not_allowed_fails_before_anything_of_it_is_told() -> None:
    played = Round(tool_choice="none")
    with pytest.raises(errors.ModelError):
        played.control.feed(call("free", '{"secret": 1}'))
    assert played.machine.fail(errors.ModelError("x"))[0]["type"] == "error", "no item was opened for it"


@pytest.mark.parametrize(
    "choice",
    ["required", NamedFunction(name="free"), AllowedTools(tools=[NamedFunction(name="free")], mode="required")],
)
def test_a_call_that_has_to_be_made_is_made_or_the_response_fails(choice: Any) -> None:
    for script in (
        [],
        ["Rather not."],
        [outputs.Reasoning("Hm.")],
        ["", outputs.Finish("stop")],
        [outputs.Usage(1, 1)],
    ):
        fails("tool_call_missing", script, tool_choice=choice)
    assert calls(passes(["First: ", call("free")], tool_choice=choice)) == [("free", "{}")]


def test_an_answer_in_its_format_is_no_call_that_had_to_be_made() -> None:
    fails("tool_call_missing", ["{}"], {"type": "object"}, tool_choice="required")


def test_a_hosted_call_is_a_call_that_had_to_be_made() -> None:
    assert calls(passes([call("look")], tool_choice="required")) == [("look", "{}")]


@pytest.mark.parametrize("reason", CUTS)
@pytest.mark.parametrize("choice", ["required", NamedFunction(name="strict")])
def test_a_model_that_was_cut_before_its_call_is_incomplete_and_no_failure(choice: Any, reason: Any) -> None:
    for script in ([], ["Let me"], [outputs.Reasoning("First")], [call("strict", '{"a"')]):
        assert passes([*script, outputs.Finish(reason)], tool_choice=choice)["status"] == "incomplete"


def test_a_model_that_refuses_need_not_call() -> None:
    assert passes([outputs.Refusal("No.")], tool_choice="required")["status"] == "completed"


# How often.


@pytest.mark.parametrize(
    ("demands", "most"),
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
def test_calls_beyond_what_was_asked_for_are_suppressed(names: list[str], demands: dict[str, Any], most: int) -> None:
    script = [call(name, '{"a": ', f"call_{number}") for number, name in enumerate(names)]
    script += [more(f"{number}}}", f"call_{number}") for number in range(5)]  # type: ignore[misc]
    played = Round(**demands)
    response = played.play(script)
    assert sorted(calls(response)) == sorted((name, f'{{"a": {number}}}') for number, name in enumerate(names[:most]))
    assert played.control.made == most
    assert len(played.control.hosted) == names[:most].count("look")


def test_a_suppressed_call_takes_its_arguments_along_and_leaves_the_others_alone() -> None:
    script = [
        call("free", '{"a": ', "a"),
        call("free", '{"secret": ', "b"),
        more("7}"),
        more("1", "a"),
        more("8", "b"),
        more("}", "a"),
    ]
    assert calls(passes(script, max_tool_calls=1)) == [("free", '{"a": 1}')]


def test_a_suppressed_call_may_have_any_name_and_any_arguments() -> None:
    script = [call("free", '{"a": 1}'), call("unknown"), call("no name at all!", "no JSON"), more("]")]
    assert calls(passes(script, max_tool_calls=1)) == [("free", '{"a": 1}')]


def test_calls_in_sequence_are_counted_like_calls_side_by_side() -> None:
    script = [call("free", '{"a": 1}'), "Then: ", call("free", '{"a": 2}'), "At last.", call("look")]
    assert len(calls(passes(script, max_tool_calls=2))) == 2
    assert len(calls(passes(script, parallel_tool_calls=False))) == 1


def test_once_all_calls_are_spent_a_call_is_suppressed_and_not_an_error() -> None:
    response = passes([call("free"), "So be it."], max_tool_calls=0)
    assert (calls(response), texts(response)) == ([], ["So be it."])


def test_a_suppressed_call_does_not_count_as_the_call_that_had_to_be_made() -> None:
    played = Round(max_tool_calls=0)
    played.play([call("look"), call("free"), "Well."])
    assert (played.control.made, played.control.handed_over) == (0, False)


# Arguments.


def test_arguments_of_a_strict_function_have_to_be_what_its_schema_says() -> None:
    good = ['{"a": 1}', ' {"a": -5} ', '{"a": 1.0}', '{"a": 1, "a": 2}']
    bad = ["", "{}", '{"a": "1"}', '{"a": 1, "secret": 2}', "[]", "null", "1", '{"a": 1', '{"a": NaN}', "{'a': 1}"]
    for arguments in good:
        assert calls(passes([call("strict", arguments)])) == [("strict", arguments)]
    for arguments in bad:
        fails("invalid_tool_arguments", [call("strict", arguments)])
        fails("invalid_tool_arguments", [call("strict", arguments), "Done."])
        fails("invalid_tool_arguments", [call("strict", arguments), outputs.Finish()])
        assert passes([call("free", arguments)])["status"] == "completed", "nobody said that it was strict"


@pytest.mark.parametrize("arguments", [[], [""], [" ", "\n"]])
def test_arguments_that_were_never_written_are_an_empty_object(arguments: list[str]) -> None:
    script = [call("lax"), *(more(piece) for piece in arguments)]
    ((_, written),) = calls(passes(script))
    assert json.loads(written) == {}


def test_the_failure_names_the_keyword_and_nothing_that_the_model_wrote() -> None:
    assert "`required`" in fails("invalid_tool_arguments", [call("strict", "{}")]).message
    assert "`type`" in fails("invalid_tool_arguments", [call("strict", '{"a": "secret"}')]).message
    assert "`json`" in fails("invalid_tool_arguments", [call("strict", '{"secret')]).message


def test_arguments_of_calls_side_by_side_are_judged_each_for_itself() -> None:
    pieces = [more('{"a"', "x"), more('{"a"', "y"), more(": 1}", "x"), more(": 2}", "y")]
    script = [call("strict", "", "x"), call("strict", "", "y"), *pieces]
    assert calls(passes(script)) == [("strict", '{"a": 1}'), ("strict", '{"a": 2}')]
    fails("invalid_tool_arguments", [call("strict", "", "x"), call("strict", "", "y"), *pieces[:3]])
    fails("invalid_tool_arguments", [call("strict", "", "x"), call("strict", "", "y"), *pieces[1:]])


def test_arguments_go_to_the_call_that_they_name_hosted_or_not() -> None:
    played = Round()
    script = [
        call("look", "[", "h"),
        call("strict", "", "c"),
        more("1,", "h"),
        more('{"a": 1}', "c"),
        more("2]", "h"),
        call("look", '{"last": '),
        more("true}"),
    ]
    response = played.play(script)
    assert sorted(calls(response)) == [("look", "[1,2]"), ("look", '{"last": true}'), ("strict", '{"a": 1}')]


@pytest.mark.parametrize("name", ["free", "strict", "look"])
def test_arguments_for_no_open_call_are_the_backends_fault(name: str) -> None:
    whole = call(name, '{"a": 1}', "a")
    for script in (
        [more("{}")],
        [whole, more("{}", "b")],
        [whole, "text", more("", "a")],
        [whole, outputs.Item("a:b"), more("")],
    ):
        with pytest.raises(errors.IllegalOutput):
            passes(script)


@pytest.mark.parametrize("name", ["free", "strict", "look"])
def test_events_and_usage_between_arguments_interrupt_nothing(name: str) -> None:
    script = [call(name, '{"a"'), outputs.Event("acme:trace"), outputs.Usage(1, 1), more(": 1}")]
    assert calls(passes(script)) == [(name, '{"a": 1}')]


@pytest.mark.parametrize("name", ["free", "strict", "look"])
@pytest.mark.parametrize("junk", [7, None, b"{}", ["{}"], {"a": 1}])
def test_arguments_that_are_no_text_are_the_backends_fault(name: str, junk: Any) -> None:
    for script in ([call(name, junk)], [call(name), more(junk)], [call(name, "{}", "a"), more(junk, "a")]):
        with pytest.raises(errors.IllegalOutput):
            passes(script)


@pytest.mark.parametrize("junk", [7, None, b"free", ["free"], {"free": 1}])
def test_a_name_that_is_no_text_is_no_name_of_a_tool(junk: Any) -> None:
    with pytest.raises((errors.IllegalOutput, errors.ModelError)):
        passes([call(junk)])


# Hosted calls.


def test_hosted_calls_are_collected_and_not_told_as_function_calls() -> None:
    played = Round()
    assert played.control.feed(call("look", '{"q": 1}', "mine")) == []
    played.control.end()
    (collected,) = played.control.hosted
    assert (collected.tool, "".join(collected.pieces)) == (LOOK, '{"q": 1}')
    assert not played.control.handed_over


def test_hosted_calls_get_ids_of_their_own_since_a_backend_may_use_its_ids_again() -> None:
    ids = []
    for _ in range(2):
        played = Round()
        played.play([call("look", "{}", "call_0"), call("look", "{}", "call_0")])
        ids += [one.call_id for one in played.control.hosted]
    assert len(set(ids)) == 4


def test_functions_beside_hosted_tools_hand_the_response_over_to_the_client() -> None:
    for script, handed_over in (
        ([call("look")], False),
        ([call("look"), call("free")], True),
        ([call("free"), call("look")], True),
        ([call("free")], True),
        ([], False),
    ):
        played = Round()
        played.play(script)
        assert played.control.handed_over is handed_over


def test_a_round_that_ends_with_hosted_calls_is_not_the_end_of_the_response() -> None:
    played = Round()
    played.control.feed(call("look"))
    assert played.control.feed(outputs.Finish("stop")) == []
    played.control.end()
    played.machine.feed("The next round may go on.")


@pytest.mark.parametrize("reason", CUTS)
def test_hosted_calls_of_a_round_that_was_cut_are_never_run_and_only_what_was_cut_is_shown(reason: Any) -> None:
    whole, cut = call("look", '{"a": 1}', "a"), call("look", '{"b', "b")
    for script, shown in (
        ([whole, cut], [("incomplete", '{"b')]),
        ([cut], [("incomplete", '{"b')]),
        ([whole, call("free", '{"c')], [("incomplete", '{"c')]),
        ([whole, "That was"], [("incomplete", None)]),
        ([whole, outputs.Reasoning("Hm")], [("incomplete", None)]),
    ):
        played = Round()
        response = played.play([*script, outputs.Finish(reason)])
        assert played.control.hosted == []
        assert [(item["status"], item.get("arguments")) for item in response["output"]] == shown
        assert all(item.get("output") is None for item in response["output"])
        assert response["incomplete_details"] == {"reason": reason}


@pytest.mark.parametrize("reason", CUTS)
def test_a_functions_call_that_was_cut_beside_a_hosted_one_is_not_taken_for_whole(reason: Any) -> None:
    cut, hosted = call("free", '{"a', "c"), call("look", "{}", "h")
    for script in ([cut, hosted], [hosted, cut]):
        response = passes([*script, outputs.Finish(reason)])
        assert [item["status"] for item in response["output"] if item["type"] == "function_call"] == ["incomplete"]


# The form of the answer.


FORMS = [{"type": "object"}, NUMBER]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "script",
    [
        ['{"a": 1}'],
        ["", '{"a"', "", ": 1", "}"],
        [Words('{"a"'), ": 1}"],
        [outputs.Text('{"a"'), ": ", Talk("1}")],
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
def test_an_answer_in_its_format_passes(script: list[Any], form: dict[str, Any]) -> None:
    assert passes(script, form)["status"] == "completed"


@pytest.mark.parametrize("form", FORMS)
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
        [Words("secret")],
        [Talk("secret")],
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
def test_an_answer_that_is_not_in_its_format_fails(script: list[Any], form: dict[str, Any]) -> None:
    assert "format" in fails("invalid_output_format", script, form).message


@pytest.mark.parametrize("name", ["free", "look"])
def test_texts_on_both_sides_of_a_call_that_is_not_told_are_one_text_if_they_are_one_message(name: str) -> None:
    form = {"type": "object"}
    played = Round(form, max_tool_calls=0 if name == "free" else None)
    with suppress(errors.ModelError):
        assert texts(played.play(["{}", call(name), "{}"])) == ["{}", "{}"]


def test_a_failure_of_the_format_names_the_keyword() -> None:
    assert "`required`" in fails("invalid_output_format", ["{}"], NUMBER).message
    assert "`json`" in fails("invalid_output_format", ["secret"], NUMBER).message


@pytest.mark.parametrize("reason", CUTS)
@pytest.mark.parametrize("script", [[], ['{"a'], [outputs.Reasoning("Hm")], [outputs.Message("commentary"), "x"]])
def test_an_answer_that_was_cut_may_stay_unfinished(script: list[Any], reason: Any) -> None:
    assert passes([*script, outputs.Finish(reason)], NUMBER)["status"] == "incomplete"


@pytest.mark.parametrize("reason", CUTS)
def test_what_was_whole_before_the_cut_is_judged_all_the_same(reason: Any) -> None:
    fails("invalid_output_format", ["secret", outputs.Message(), '{"a', outputs.Finish(reason)], NUMBER)
    fails("invalid_tool_arguments", [call("strict", "{}"), "And now", outputs.Finish(reason)])
    fails("invalid_output_format", ["secret", call("look", '{"a'), outputs.Finish(reason)], NUMBER)
    script = [call("strict", '{"b": 1}', "x"), call("strict", '{"a', "y"), outputs.Finish(reason)]
    fails("invalid_tool_arguments", script)


def test_text_is_judged_as_it_is_shown() -> None:
    response = passes(['{"a": "\ud83d\ude00"}'], {"type": "object"})
    assert json.loads(texts(response)[0]) == {"a": "\U0001f600"}


def test_without_a_format_any_text_passes() -> None:
    response = passes(["secret", Words(" {"), outputs.Text("]"), call("free"), "\ud83d"])
    assert texts(response) == ["secret {]", "\ufffd"]


# The end.


@pytest.mark.parametrize("reason", ["stop", *CUTS])
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
        passes([first, outputs.Finish(reason), late])
    assert passes([first, outputs.Finish(reason), outputs.Usage(3, 4)])["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("script", [[], [call("look")], [call("free")], ["text"]])
def test_a_reason_that_is_none_is_the_backends_fault(script: list[Any]) -> None:
    for reason in ("length", "", None, 7, ["stop"]):
        with pytest.raises(errors.IllegalOutput):
            passes([*script, outputs.Finish(reason)])  # type: ignore[arg-type]


# Usage.


def test_usage_of_earlier_rounds_is_added_and_within_a_round_the_last_one_counts() -> None:
    played = Round(before=outputs.Usage(10, 5, 4, 3))
    assert played.control.usage == outputs.Usage(10, 5, 4, 3)
    response = played.play(["text", outputs.Usage(1, 1), outputs.Usage(20, 7, 2, 1)])
    assert played.control.usage == outputs.Usage(30, 12, 6, 4)
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 6},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 42,
    }


def test_without_usage_there_is_none() -> None:
    played = Round()
    assert played.play(["text"])["usage"] is None
    assert played.control.usage is None


@pytest.mark.parametrize("before", [None, outputs.Usage(10, 10, 5, 5)])
@pytest.mark.parametrize(
    "counts", [(-1, 0), (0, 1.5), (True, 0), ("1", 0), (None, 0), (0, 0, 1), (0, 0, 0, 1), (1, 1, -1), ([], [])]
)
def test_usage_that_cannot_be_true_is_refused_in_every_round(before: outputs.Usage | None, counts: Any) -> None:
    with pytest.raises(errors.IllegalOutput):
        Round(before=before).play([outputs.Usage(*counts)])


# Any outputs and any demands at all.


_JSON = st.sampled_from(["{}", '{"a": 1}', '{"a"', ": 1}", '{"a": "x"}', "", " ", "[]", "{", "}"])
_NAMES = st.sampled_from([tool.name for tool in TOOLS] + ["unknown"])
_IDS = st.none() | st.sampled_from(["x", "y"])
_likely = st.one_of(
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
_written = st.sampled_from(
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
_ends = st.sampled_from([[], [], ["{"], [call("strict", "{")], [outputs.Finish("stop")]]) | st.builds(
    lambda last, reason: [*last, outputs.Finish(reason), outputs.Usage(1, 1)],
    st.sampled_from([[], ['{"a'], [call("strict", '{"a')], [call("look", '{"a')], [outputs.Reasoning("Hm")]]),
    st.sampled_from(CUTS),
)
_scripts = st.one_of(
    st.builds(lambda parts, end: [*chain.from_iterable(parts), *end], st.lists(_written, max_size=4), _ends),
    st.lists(st.one_of(_likely, _likely, _likely, legal_outputs, any_outputs), max_size=9),
)
_named = st.sampled_from(TOOLS).map(lambda tool: NamedFunction(name=tool.name))
_choices = st.one_of(
    st.sampled_from(["none", "auto", "required"]),
    _named,
    st.builds(
        lambda tools, mode: AllowedTools(tools=tools, mode=mode),
        st.lists(_named, min_size=1, max_size=3),
        st.sampled_from(["none", "auto", "required"]),
    ),
)


def permitted(turn: Turn) -> set[str]:
    """The names that may be called, as the specification says it."""
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


def valid(text: str, schema: dict[str, Any]) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def check_demands(response: dict[str, Any], turn: Turn, form: dict[str, Any] | None) -> None:
    """Holds what a client was shown against what it had asked for, knowing nothing of how that was enforced."""
    shown = [item for item in response["output"] if item["type"] in ("function_call", LOOK.type)]
    assert {item["name"] for item in shown} <= permitted(turn)
    assert turn.max_tool_calls is None or len(shown) <= turn.max_tool_calls
    assert turn.parallel_tool_calls or len(shown) <= 1
    schemas = {tool.name: tool.parameters or {} for tool in turn.tools if tool.strict}
    for item in shown:
        if item["type"] == "function_call" and item["status"] == "completed" and item["name"] in schemas:
            assert valid(item["arguments"], schemas[item["name"]]), item["arguments"]
    messages = [item for item in response["output"] if item["type"] == "message"]
    refused = any(part["type"] == "refusal" for item in messages for part in item["content"])
    if response["status"] == "completed" and not refused:
        choice = turn.tool_choice
        required = isinstance(choice, NamedFunction) or "required" in (choice, getattr(choice, "mode", None))
        assert shown or not required, "a call was required"
    if form is None:
        return
    judged = 0
    for item in messages:
        parts = [part["type"] for part in item["content"]]
        text = "".join(part.get("text", "") for part in item["content"])
        if item.get("phase") == "commentary" or "refusal" in parts or not text or item["status"] != "completed":
            continue
        assert valid(text, form), text
        judged += 1
    assert judged or shown or refused or response["status"] != "completed", "there is no answer"


@given(
    script=_scripts,
    choice=st.just("auto") | _choices,
    form=st.sampled_from([None, *FORMS]),
    parallel=st.booleans(),
    most=st.sampled_from([None, None, 0, 1, 2]),
    before=st.sampled_from([None, outputs.Usage(3, 2, 1, 1)]),
)
def test_any_outputs_obey_every_demand_or_fail_cleanly(
    script: Sequence[Any],
    choice: Any,
    form: dict[str, Any] | None,
    parallel: bool,
    most: int | None,
    before: outputs.Usage | None,
) -> None:
    formats = {None: PlainText(), "object": JsonObject(), "number": JsonSchema(name="number", schema=NUMBER)}
    played = Round(
        form,
        before=before,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        max_tool_calls=most,
        text_format=formats[None if form is None else "number" if form is NUMBER else "object"],
    )
    try:
        response = played.play(script)
    except (errors.ModelError, errors.IllegalOutput):
        return
    check_demands(response, played.turn, form)
