from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from responses_kit import errors
from responses_kit.backends.local.grammar.builder import DEFAULT_MAX_CALLS
from responses_kit.backends.local.grammar.constraint import _count_tokens_to_completion
from responses_kit.backends.parsing.formats import CALL_FORMATS, HERMES, MISTRAL_ARGS, CallFormat
from responses_kit.protocol.json_schema import Schema
from responses_kit.schema.items import FunctionCall, FunctionCallOutput
from responses_kit.schema.tools import AllowedTools, NamedFunction

from .byte_vocabulary import END, ByteVocabulary, make_turn, tool

WITH_OPENER = [call_format for call_format in CALL_FORMATS if call_format.opener]
WITHOUT_OPENER = [call_format for call_format in CALL_FORMATS if not call_format.opener]
GOOD = '{"city": "Rome"}'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ByteVocabulary:
    return ByteVocabulary(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> ByteVocabulary:
    markers = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
    return ByteVocabulary(tmp_path_factory.mktemp("marked"), *markers)


def calls(call_format: CallFormat, *pairs: tuple[str, str]) -> str:
    """Return calls as text in a format."""
    written = [
        f"{call_format.before_name}{name}{call_format.before_arguments}{arguments}{call_format.after_arguments}"
        for name, arguments in pairs
    ]
    return f"{call_format.before_calls}{call_format.separator.join(written)}{call_format.after_calls}"


def with_call_formats(call_formats: Any = CALL_FORMATS) -> Any:
    return pytest.mark.parametrize("call_format", call_formats, ids=lambda call_format: call_format.name)


# Required calls.


@with_call_formats()
def test_required_answer_consists_of_calls(plain: ByteVocabulary, call_format: CallFormat):
    rules = plain.grammar(make_turn(tools=[tool("f"), tool("ff")], tool_choice="required"), call_format)
    assert plain.match(rules, calls(call_format, ("f", GOOD))) == "complete"
    assert plain.match(rules, calls(call_format, ("ff", GOOD), ("f", GOOD))) == "complete"
    assert plain.match(rules, "") == "partial"
    for refused in (
        "I",
        " " + calls(call_format, ("f", GOOD)),
        calls(call_format, ("f", GOOD)) + "I",
        calls(call_format, ("fff", GOOD)),
    ):
        assert plain.match(rules, refused) == "refused"


@with_call_formats()
@pytest.mark.parametrize("arguments", ["{}", '{"city": 1}', '{"town": "Rome"}', '{"city":"Rome"}', '"Rome"', "[]"])
def test_arguments_follow_schema(plain: ByteVocabulary, call_format: CallFormat, arguments: str):
    rules = plain.grammar(make_turn(tools=[tool("f")], tool_choice="required"), call_format)
    assert plain.match(rules, calls(call_format, ("f", arguments))) == "refused"


@with_call_formats()
def test_only_callable_tools_are_allowed(plain: ByteVocabulary, call_format: CallFormat):
    tools = [tool("f"), tool("g"), tool("h")]
    one, some = NamedFunction(name="g"), [NamedFunction(name="g"), NamedFunction(name="h")]
    for choice, allowed in ((one, "g"), (AllowedTools(tools=some, mode="required"), "gh")):
        rules = plain.grammar(make_turn(tools=tools, tool_choice=choice), call_format)
        called = [name for name in "fgh" if plain.match(rules, calls(call_format, (name, GOOD))) == "complete"]
        assert called == list(allowed)


@with_call_formats()
@pytest.mark.parametrize(
    ("settings", "limit"), [({"parallel_tool_calls": False}, 1), ({"max_tool_calls": 2}, 2), ({}, DEFAULT_MAX_CALLS)]
)
def test_calls_are_limited(plain: ByteVocabulary, call_format: CallFormat, settings: dict[str, Any], limit: int):
    rules = plain.grammar(make_turn(tools=[tool("f")], tool_choice="required", **settings), call_format)
    assert plain.match(rules, calls(call_format, *[("f", GOOD)] * limit)) == "complete"
    assert plain.match(rules, calls(call_format, *[("f", GOOD)] * (limit + 1))) == "refused"


def test_function_without_parameters_takes_any_object(plain: ByteVocabulary):
    bare = tool("f").model_copy(update={"parameters": None})
    for function in (bare, tool("f", {}), tool("f", {"type": ["object", "null"]})):
        rules = plain.grammar(make_turn(tools=[function], tool_choice="required"))
        assert plain.match(rules, calls(HERMES, ("f", '{"a": [1, null]}'))) == "complete"
        assert plain.match(rules, calls(HERMES, ("f", "null"))) == "refused"


def test_recursive_parameters_are_supported(plain: ByteVocabulary):
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    rules = plain.grammar(
        make_turn(tools=[tool("f-2", {"$ref": "#/$defs/node", "$defs": {"node": node}})], tool_choice="required")
    )
    assert plain.match(rules, calls(HERMES, ("f-2", '{"next": {"next": null}}'))) == "complete"
    assert plain.match(rules, calls(HERMES, ("f-2", '{"next": 1}'))) == "refused"
    rules = plain.grammar(make_turn(tools=[tool("f-2"), tool("a_b")]))
    assert plain.match(rules, '{"name": "f-2", "arguments": {}}') == "refused"


def test_function_with_empty_parameters_takes_empty_object(plain: ByteVocabulary):
    rules = plain.grammar(make_turn(tools=[tool("f", {"type": "object", "properties": {}})], tool_choice="required"))
    assert plain.match(rules, calls(HERMES, ("f", "{}"))) == "complete"
    assert plain.match(rules, calls(HERMES, ("f", '{"'))) == "refused"


# Optional calls.


@with_call_formats(WITH_OPENER)
def test_text_is_free_until_call_and_ends_after_last_call(plain: ByteVocabulary, call_format: CallFormat):
    rules = plain.grammar(make_turn(tools=[tool("f")], max_tool_calls=2), call_format)
    call = calls(call_format, ("f", GOOD))
    for text in ("", "Hello!\nÀ bientôt <b>[x]</b> ", f"{call_format.opener[:-1]} ", "a < b\n"):
        assert plain.match(rules, text) == "complete"
        assert plain.match(rules, text + call) == "complete"
    assert plain.match(rules, "x" + calls(call_format, ("f", GOOD), ("f", GOOD))) == "complete"
    assert plain.match(rules, "x" + calls(call_format, *[("f", GOOD)] * 3)) == "refused"
    assert plain.match(rules, call + "x") == "refused"


@with_call_formats(WITH_OPENER)
@pytest.mark.parametrize("call", [("g", GOOD), ("f", "{}"), ("f", '{"city": "Rome", "x": 1}')])
def test_call_started_in_text_is_valid(plain: ByteVocabulary, call_format: CallFormat, call: tuple[str, str]):
    rules = plain.grammar(make_turn(tools=[tool("f")]), call_format)
    assert plain.match(rules, "Well. " + calls(call_format, call)) == "refused"
    assert plain.match(rules, "Well. " + call_format.opener) == "partial"


@with_call_formats(WITHOUT_OPENER)
def test_answer_starting_like_bare_call_is_call(plain: ByteVocabulary, call_format: CallFormat):
    rules = plain.grammar(make_turn(tools=[tool("f"), tool("ff")]), call_format)
    assert plain.match(rules, calls(call_format, ("f", GOOD), ("ff", GOOD))) == "complete"
    assert plain.match(rules, calls(call_format, ("f", "{}"))) == "refused"
    for text in ("Hello", '{"name": "Bob"}', '{"name": "fff"}', '{"a": 1}', 'Say {"name": "f"}'):
        assert plain.match(rules, text) == "complete"


@with_call_formats()
@pytest.mark.parametrize(
    "other",
    [
        '{"name":"f","arguments":{}}',
        ' {"arguments": {}, "name" : "f"}',
        '[{"name": "f", "arguments": {}}]',
        '```json\n{"name": "f", "arguments": {}}\n```',
        '{"type": "function", "function": {"name": "f", "arguments": {}}}',
        '<|python_tag|>{"name": "f", "parameters": {}}',
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}]',
        "[TOOL_CALLS]f[ARGS]{}",
        '<tool_call>{"name": "f", "arguments": {}}',
    ],
)
def test_call_in_other_spelling_is_disallowed(plain: ByteVocabulary, call_format: CallFormat, other: str):
    rules = plain.grammar(make_turn(tools=[tool("f")]), call_format)
    assert plain.match(rules, other) == "refused"


@with_call_formats()
def test_text_after_last_call_is_disallowed(plain: ByteVocabulary, call_format: CallFormat):
    turn = make_turn(tools=[tool("f")], max_tool_calls=0)
    turn.items = [FunctionCall(call_id="a", name="f", arguments=GOOD), FunctionCallOutput(call_id="a", output="fine")]
    rules = plain.grammar(turn, call_format)
    for text in ("It is fine.", 'The object {"a": 1} is none.', '{"city": "Rome"}', "<b>fine</b>", ""):
        assert plain.match(rules, text) in ("partial", "complete")
    for other in CALL_FORMATS:
        assert plain.match(rules, calls(other, ("f", GOOD))) == "refused"
    assert plain.match(rules, "<tool_response>") == "refused"


def test_no_grammar_without_callable_tools(plain: ByteVocabulary):
    tools = [tool("f")]
    assert plain.grammar(make_turn()) is None
    assert plain.grammar(make_turn(tools=tools, tool_choice="none")) is None
    assert plain.grammar(make_turn(tools=tools, max_tool_calls=0, tool_choice="required")) is None


# Text formats.


def test_answer_follows_schema_exactly(plain: ByteVocabulary):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", 1, None]}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a"],
    }
    rules = plain.grammar(make_turn(schema=schema))
    for answer in ('{"a": "x"}', '{"a": 1, "b": []}', '{"a": null, "b": [true, false]}'):
        assert plain.match(rules, answer) == "complete"
        assert plain.match(rules, answer[:-1]) == "partial"
        for refused in (
            answer + " ",
            " " + answer,
            answer.replace(": ", ":"),
            answer.replace("{", "{\n"),
            "```json\n" + answer,
        ):
            assert plain.match(rules, refused) == "refused"
    for refused in ('{"a": 2}', "{}", '{"a": "x", "c": 1}', '{"a": "x", "a": "x"}', "[]", '{"b": [], "a": "x"}'):
        assert plain.match(rules, refused) == "refused"


def test_json_object_allows_objects_only(plain: ByteVocabulary):
    for schema in (True, {}):
        rules = plain.grammar(make_turn(schema=schema if schema is True else {"type": "object"}))
        assert plain.match(rules, '{"a": {"b": [1, "é", {}]}}') == "complete"
        assert plain.match(rules, "[") == "refused"


def test_format_without_schema_allows_any_object(plain: ByteVocabulary):
    turn = make_turn(schema={})
    turn.text_format = turn.text_format.model_copy(update={"schema_": None})
    rules = plain.grammar(turn)
    assert plain.match(rules, "{}") == "complete"
    assert plain.match(rules, "1") == "refused"


@with_call_formats()
def test_format_with_tools_allows_calls_or_format(plain: ByteVocabulary, call_format: CallFormat):
    rules = plain.grammar(make_turn(tools=[tool("f")], schema={"enum": [[1, 2]]}), call_format)
    assert plain.match(rules, "[1, 2]") == "complete"
    assert plain.match(rules, calls(call_format, ("f", GOOD))) == "complete"
    assert plain.match(rules, "Hello") == "refused"
    assert plain.match(rules, "[1, 2]" + calls(call_format, ("f", GOOD))) == "refused"


@with_call_formats()
def test_format_resembling_call_is_distinguished(plain: ByteVocabulary, call_format: CallFormat):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["name"],
    }
    rules = plain.grammar(make_turn(tools=[tool("f"), tool("ff")], schema=schema), call_format)
    for answer in ('{"name": "Bob"}', '{"name": "fg", "n": 1}', calls(call_format, ("ff", GOOD), ("f", GOOD))):
        assert plain.match(rules, answer) == "complete"
    assert plain.match(rules, calls(call_format, ("f", "{}"))) == "refused"


@with_call_formats()
def test_any_object_is_distinguished_from_call(plain: ByteVocabulary, call_format: CallFormat):
    rules = plain.grammar(make_turn(tools=[tool("f")], schema=True), call_format)
    assert plain.match(rules, '{"title": "f", "more": {"name": "f"}}') == "complete"
    assert plain.match(rules, calls(call_format, ("f", GOOD))) == "complete"
    for other in ('{"name": "f", "arguments": {}}', '{"a": 1, "name": "f"}', '{"function": {"name": "f"}}'):
        assert plain.match(rules, other) == "refused"


# Control tokens and reasoning.


def test_control_token_markers_are_used(marked: ByteVocabulary):
    ids = marked.tokenizer.control_tokens
    rules = marked.grammar(make_turn(tools=[tool("f")], tool_choice="required"))
    body = f'\n{{"name": "f", "arguments": {GOOD}}}\n'
    assert marked.match(rules, ids["<tool_call>"], body, ids["</tool_call>"]) == "complete"
    assert marked.match(rules, "<tool_call>") == "refused"
    assert marked.match(rules, ids["<tool_call>"], body, "<") == "refused"
    rules = marked.grammar(make_turn(tools=[tool("f")], tool_choice="required"), MISTRAL_ARGS)
    assert marked.match(rules, ids["[TOOL_CALLS]"], "f", ids["[ARGS]"], GOOD) == "complete"


def test_call_in_text_is_valid_with_token_or_spelled_marker(marked: ByteVocabulary):
    ids = marked.tokenizer.control_tokens
    rules = marked.grammar(make_turn(tools=[tool("f")]))
    for marker in ("<tool_call>", ids["<tool_call>"]):
        assert marked.match(rules, "Well ", marker) == "partial"
        assert marked.match(rules, "Well ", marker, "x") == "refused"
        assert (
            marked.match(rules, "Well ", marker, f'\n{{"name": "f", "arguments": {GOOD}}}\n', ids["</tool_call>"])
            == "complete"
        )
    assert marked.match(rules, "Well ", ids["[ARGS]"]) == "refused"


@pytest.mark.parametrize("as_token", [True, False])
@pytest.mark.parametrize("settings", [{"schema": {"enum": [1]}}, {"tools": [tool("f")], "tool_choice": "required"}])
def test_reasoning_may_precede_answer(
    plain: ByteVocabulary, marked: ByteVocabulary, as_token: bool, settings: dict[str, Any]
):
    vocabulary = marked if as_token else plain
    ids = marked.tokenizer.control_tokens
    opener, closer = (ids["<think>"], ids["</think>"]) if as_token else ("<think>", "</think>")
    call: list[str | int] = [calls(HERMES, ("f", GOOD))]
    if as_token:
        call = [ids["<tool_call>"], call[0][11:-12], ids["</tool_call>"]]  # type: ignore[index]  # it is a str
    answer: list[str | int] = ["1"] if "schema" in settings else call
    rules = vocabulary.grammar(make_turn(**settings), may_reason=True)
    for reasoning in ([], [opener, "Hm.\n<tool_call> 2 {", closer], [opener, "\n", closer, "\n\n"]):
        assert vocabulary.match(rules, *reasoning, *answer) == "complete"
        assert vocabulary.match(rules, *reasoning, "x") == "refused"
    assert vocabulary.match(rules, opener, "Hm.", closer) == "partial"
    assert vocabulary.match(vocabulary.grammar(make_turn(**settings)), opener) == "refused"


@pytest.mark.parametrize("tools", [[], [tool("f")]])
def test_reasoning_opened_by_prompt_is_closed_before_answer(plain: ByteVocabulary, tools: list[Any]):
    schema = {"enum": [1]}
    rules = plain.grammar(make_turn(tools=tools, schema=schema), in_reasoning=True)
    assert plain.match(rules, "Hm.</think>\n\n1") == "complete"
    assert plain.match(rules, "1") == "partial"


def test_reasoning_and_calls_combine(plain: ByteVocabulary):
    rules = plain.grammar(make_turn(tools=[tool("f")]), may_reason=True)
    assert plain.match(rules, "<think>I could <tool_call> </think>\n\nHello") == "complete"
    assert plain.match(rules, "<think>x</think>" + calls(HERMES, ("f", GOOD))) == "complete"
    assert plain.match(rules, "<think>x</think>" + calls(HERMES, ("f", "{}"))) == "refused"


# Schemas.

EXAMPLES: list[tuple[Any, list[str], list[str]]] = [
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, ["null"], ["1"]),
    (
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        ['{"next": {"next": {"next": null}}}'],
        ['{"next": 1}'],
    ),
    ({"anyOf": [{"type": "boolean"}, {"const": "x"}]}, ["true", '"x"'], ['"y"', "1"]),
    ({"type": ["integer", "null"]}, ["-17", "null"], ["1.5", '"1"']),
    ({"type": "string", "pattern": r"^[A-Z]{2}-\d+$"}, ['"AB-12"'], ['"AB-x', '"ab']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"abé"', '"a\\n"'], ['"a"', '"abcd']),
    ({"type": "string", "format": "date"}, ['"2024-12-31"'], ['"2024-13', '"2023-02-29"']),
    ({"type": "string", "format": "date-time"}, ['"2024-12-31T23:59:59Z"'], ['"2024-12-31T23:59:60Z"']),
    ({"type": "string", "format": "uri-reference"}, ['"http://a.b/c"'], ['"<']),
    ({"type": "string", "format": "colour", "description": "x"}, ['"any thing"'], ["1"]),
    ({"type": "integer", "minimum": 3, "maximum": 12, "multipleOf": 3}, ["3", "12"], ["15", "4 "]),
    ({"type": "number"}, ["0", "-1.25", "1000000000000000"], ["1e9", "01", "10000000000000000", "NaN"]),
    ({"type": "integer", "minimum": 10**16}, ["10000000000000000"], ["1 "]),
    ({"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 1]"], ["[]", "[1, 1, 1]"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": False}, ["[1]"], ["[1, 2]"]),
    ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, ["[1, 1]"], ["1"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"x": 1, "y": 2}'], ['{"x": "1"}']),
    (
        {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]},
        ['{"a": 1, "b": 2}'],
        ['{"a": 2'],
    ),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["null"]),
    (
        {
            "discriminator": {"propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {
                "cat": {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat"}}},
                "dog": {"type": "object", "properties": {"kind": {"enum": ["dog"]}, "size": {"type": "integer"}}},
            },
        },
        ['{"kind": "cat"}', '{"kind": "dog", "size": 1}'],
        ["{}", '{"kind": "cat", "size": 1}'],
    ),
    ({"type": "string", "format": "date", "enum": ["2024-02-29"]}, ['"2024-02-29"'], ['"2024-02-28"']),
    ({"enum": [{"a": [1, 2.5]}, "é\u2028"]}, ['{"a": [1, 2.5]}', '"é\u2028"'], ['{"a": [1, 3']),
    ({"type": "object", "properties": {"é": {"const": 1}}, "required": ["é"]}, ['{"é": 1}'], ["{}"]),
    ({"type": "object", "x-guidance": {"whitespace_flexible": True}, "properties": {}}, ["{}"], ["{ "]),
    ({"type": "string", "description": '%json } "start: x" \\'}, ['"a"'], ["1"]),
]


@pytest.mark.parametrize(("schema", "accepted", "refused"), EXAMPLES, ids=lambda value: json.dumps(value)[:50])
def test_schema_examples_are_enforced(plain: ByteVocabulary, schema: Any, accepted: list[str], refused: list[str]):
    rules = plain.grammar(make_turn(schema=schema))
    assert [plain.match(rules, text) for text in accepted] == ["complete"] * len(accepted)
    assert [plain.match(rules, text) for text in refused] == ["refused"] * len(refused)


UNSUPPORTED: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "`not`"),
    ({"type": "array", "uniqueItems": True}, "`uniqueItems`"),
    ({"type": "array", "contains": {"const": 1}}, "`contains`"),
    ({"if": {"const": 1}, "then": {"const": 1}}, "`if`"),
    ({"type": "object", "propertyNames": {"pattern": "^s3cret"}}, "`propertyNames`"),
    ({"type": "object", "dependentRequired": {"s3cret": ["b"]}}, "`dependentRequired`"),
    ({"type": "object", "unevaluatedProperties": False}, "`unevaluatedProperties`"),
    ({"oneOf": [{"minLength": 3, "type": "string"}, {"type": "string", "const": "s3cret"}]}, "`oneOf`"),
    ({"type": "string", "pattern": "^(?=s3cret)a"}, "`pattern`"),
    ({"type": "string", "pattern": "(s3cret"}, "`pattern`"),
    ({"type": "string", "pattern": r"^(s3cret)\1$"}, "`pattern`"),
    (
        {"patternProperties": {"^s3cret": {"type": "string"}, "a$": {"type": "null"}}, "type": "object"},
        "`patternProperties`",
    ),
    ({"type": "object", "properties": {"a": {}, "s3cret": {}}, "minProperties": 1}, "`minProperties`"),
    ({"type": "integer", "minimum": 1e300}, "`minimum`"),
    ({"type": "integer", "multipleOf": 999_983}, "`multipleOf`"),
    ({"type": "integer", "multipleOf": 0}, "`multipleOf`"),
    ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"}, "`multipleOf`"),
    ({"$ref": "https://example.com/s3cret.json"}, "`$ref`"),
    ({"$ref": "#/$defs/s3cret"}, "`$ref`"),
    ({"type": "s3cret"}, "`type`"),
    ({"type": 5}, "`type`"),
    ({"properties": "s3cret"}, "`properties`"),
    ({"type": "string", "minLength": "s3cret"}, "`minLength`"),
    ({"type": "object", "required": "s3cret"}, "`required`"),
    ({"enum": "s3cret"}, "`enum`"),
    ({"allOf": [{"const": "s3cret"}, {"const": "other"}]}, "no value"),
    ({"type": "object", "properties": {"s3cret": False}, "required": ["s3cret"]}, "no value"),
    ({"enum": []}, "no value"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no value"),
    ({"$ref": "#"}, "no value"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no value"),
    ({"type": "object", "properties": {"s3cret": {"$ref": "#"}}, "required": ["s3cret"]}, "no value"),
]


@pytest.mark.parametrize(("schema", "message"), UNSUPPORTED, ids=lambda value: json.dumps(value)[:50])
def test_inexpressible_keyword_is_refused_by_name(plain: ByteVocabulary, schema: Any, message: str):
    nested = {"type": "object", "properties": {"inner": schema}, "required": ["inner"]}
    for tested in (schema, nested) if "#" not in json.dumps(schema) else (schema,):
        with pytest.raises(errors.UnsupportedParameter) as caught:
            plain.grammar(make_turn(schema=tested))
        assert message in caught.value.message
        assert (caught.value.status, caught.value.param) == (400, "text.format.schema")
        assert "s3cret" not in caught.value.message
        strict = tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]}, strict=True)
        if "#" not in json.dumps(schema):
            with pytest.raises(errors.UnsupportedParameter) as caught:
                plain.grammar(make_turn(tools=[tool("g"), strict]))
            assert caught.value.param == "tools[1].parameters"


@pytest.mark.parametrize(
    ("schema", "message"),
    [case for case in UNSUPPORTED if case[1].strip("`") not in ("$ref", "type", "properties", "enum")],
)
def test_inexpressible_keyword_is_ignored_for_loose_functions(plain: ByteVocabulary, schema: Any, message: str):
    if message == "no value":
        with pytest.raises(errors.UnsupportedParameter):
            plain.grammar(make_turn(tools=[tool("f", {"type": "object", **schema})]))
        return
    lenient = tool("f", {"type": "object", "properties": {"a": schema, "b": {"type": "null"}}, "required": ["b"]})
    rules = plain.grammar(make_turn(tools=[lenient], tool_choice="required"))
    assert plain.match(rules, calls(HERMES, ("f", '{"b": null}'))) == "complete"
    assert plain.match(rules, calls(HERMES, ("f", '{"b": 1}'))) == "refused"


def test_parameters_must_be_object(plain: ByteVocabulary):
    with pytest.raises(errors.UnsupportedParameter, match="must be the schema of an object"):
        plain.grammar(make_turn(tools=[tool("f", {"type": "string"})]))


def test_uncallable_tools_need_no_expressible_schema(plain: ByteVocabulary):
    tools = [tool("f", {"type": "object", "not": {}}, strict=True), tool("g")]
    assert plain.grammar(make_turn(tools=tools, tool_choice=NamedFunction(name="g"))) is not None
    assert plain.grammar(make_turn(tools=tools, tool_choice="none")) is None


def deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


HOSTILE = {
    "repeated repetition": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "nested repetition": {"type": "string", "pattern": "((a{100}){100}){100}"},
    "backtracking": {"type": "string", "pattern": "^(x+x+)+y$"},
    "many states": {"type": "string", "pattern": "^(.*a.{20})*$"},
    "endless string": {"type": "string", "minLength": 10**9},
    "more than any number": {"type": "string", "minLength": 10**30},
    "endless list": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "long list": {"type": "array", "items": {"type": "string"}, "maxItems": 10**9},
    "huge enum": {"enum": [f"value number {i}" for i in range(10_000)]},
    "many members": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}},
    "too much": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50_000)}},
    "deep": deep(40),
    "too deep": deep(95),
    "combinations": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(3)]} for i in range(15)]
    },
    "many choices": {"oneOf": [{"type": "object", "properties": {"k": {"const": i}}} for i in range(300)]},
    "many primes": {"allOf": [{"multipleOf": prime} for prime in (9973, 9967, 9949)], "type": "integer"},
    "huge number": {"type": "number", "multipleOf": 1e-300, "maximum": 1e308},
    "circles": {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"$ref": f"#/$defs/a{(i + 1) % 50}"} for i in range(50)}},
}


KEYWORDS = [
    *("type", "properties", "required", "items", "prefixItems", "additionalProperties", "patternProperties", "enum"),
    *("const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "minimum", "maximum", "exclusiveMinimum"),
    *("multipleOf", "minLength", "maxLength", "pattern", "format", "minItems", "uniqueItems", "minProperties"),
    *("x-guidance", "$schema", "$id", "$anchor", "discriminator"),
]
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 20),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(
            ["object", "string", "integer", "array", "#", "#/$defs/a", "a", "^a+$", "date", "(", "\\", "é/"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYWORDS), st.sampled_from("abc")), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=5), st.booleans())
@example({"type": None, "multipleOf": True}, False)
def test_any_schema_is_refused_or_works(plain: ByteVocabulary, schema: dict[str, Any], strict: bool):
    for turn in (make_turn(schema=schema), make_turn(tools=[tool("f", schema, strict=strict)], tool_choice="required")):
        with contextlib.suppress(errors.UnsupportedParameter):
            rules = plain.grammar(turn)
            assert rules is not None
            assert not plain.compiler.compile(rules).is_finished


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_is_handled_in_bounded_time(plain: ByteVocabulary, name: str):
    started = time.monotonic()
    for turn in (
        make_turn(schema=HOSTILE[name]),
        make_turn(tools=[tool("f", {"type": "object", "properties": {"a": HOSTILE[name]}})]),
    ):
        with contextlib.suppress(errors.UnsupportedParameter):
            rules = plain.grammar(turn)
            assert rules is not None
            plain.compiler.compile(rules)
    assert time.monotonic() - started < 20


def test_schemas_are_bounded_together(plain: ByteVocabulary):
    wide = {"type": "object", "properties": {"a": {"enum": [f"{i:0100}" for i in range(1000)]}}}
    rules = plain.grammar(make_turn(tools=[tool(f"f{i}", wide) for i in range(12)]))
    assert rules is not None
    with pytest.raises(errors.InvalidRequest, match="too large together"):
        plain.compiler.compile(rules)


# Random sampling.

NAMES = st.sampled_from(["a", "b", "é", 'q"\\', "x-y", ""])
LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "ipv6"},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 40},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "multipleOf": 0.25, "maximum": 9},
        {"type": ["boolean", "null"]},
        {"enum": ["x", 1, None, {"a": [1]}]},
        {"const": "é"},
        {},
    ]
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(NAMES, inner, max_size=3)
    more = st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
    return st.builds(
        lambda members, more, needed: {
            "type": "object",
            "properties": members,
            "required": sorted(members)[:needed],
            **more,
        },
        members,
        more,
        st.integers(0, 3),
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items, count: {"type": "array", "items": items, "minItems": count}, inner, st.integers(0, 2)),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"$defs": {"one": one}, "type": "object", "properties": {"a": one}}, inner),
    ),
    max_leaves=6,
)


@given(SCHEMAS, st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_any_sampling_gives_valid_output(plain: ByteVocabulary, schema: Any, seed: int, slack: int):
    rules = plain.grammar(make_turn(schema=schema))
    assert rules is not None
    min_tokens = _count_tokens_to_completion(plain.compiler.compile(rules)._matcher, plain.compiler._syntax, 2000)
    text = generate_randomly(plain, rules, seed, min_tokens + slack)
    assert Schema(schema).validate(text) is None


def generate_randomly(vocabulary: ByteVocabulary, rules: str, seed: int, limit: int) -> str:
    """Return the answer of a model that samples at random, and assert that it is complete within the limit."""
    random = np.random.default_rng(seed)
    constraint = vocabulary.compiler.compile(rules)
    tokens: list[int] = []
    while len(tokens) < limit and not constraint.is_finished:
        accepted = constraint.accept_forced(limit - len(tokens), 32)
        if not accepted:
            logits = random.standard_normal(len(vocabulary.tokenizer.token_bytes)).astype(np.float32)
            constraint.mask(logits)
            accepted = [constraint.accept(int(logits.argmax()))]
        if accepted == [END]:
            return vocabulary.text(tokens)
        tokens += accepted
    assert constraint.is_complete
    return vocabulary.text(tokens)
