from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from responses_kit import errors
from responses_kit.backends.local.grammar.builder import MANY
from responses_kit.backends.local.grammar.constraint import _shortest
from responses_kit.backends.parsing.formats import DIALECTS, HERMES, MISTRAL_ARGS, CallFormat
from responses_kit.protocol.json_schema import Schema
from responses_kit.schema.items import FunctionCall, FunctionCallOutput
from responses_kit.schema.tools import AllowedTools, NamedFunction

from .spelling import END, Spelling, asking, tool

TRIGGERED = [dialect for dialect in DIALECTS if dialect.trigger]
UNTRIGGERED = [dialect for dialect in DIALECTS if not dialect.trigger]
GOOD = '{"city": "Rome"}'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Spelling:
    return Spelling(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Spelling:
    markers = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
    return Spelling(tmp_path_factory.mktemp("marked"), *markers)


def calls(dialect: CallFormat, *made: tuple[str, str]) -> str:
    """Calls as a dialect writes them."""
    written = [f"{dialect.head}{name}{dialect.middle}{arguments}{dialect.tail}" for name, arguments in made]
    return f"{dialect.begin}{dialect.between.join(written)}{dialect.end}"


def by_dialect(dialects: Any = DIALECTS) -> Any:
    return pytest.mark.parametrize("dialect", dialects, ids=lambda dialect: dialect.name)


# Calls that have to be made.


@by_dialect()
def test_an_answer_that_must_call_is_nothing_but_calls(plain: Spelling, dialect: CallFormat):
    rules = plain.grammar(asking(tools=[tool("f"), tool("ff")], tool_choice="required"), dialect)
    assert plain.reads(rules, calls(dialect, ("f", GOOD))) == "whole"
    assert plain.reads(rules, calls(dialect, ("ff", GOOD), ("f", GOOD))) == "whole"
    assert plain.reads(rules, "") == "open"
    for refused in (
        "I",
        " " + calls(dialect, ("f", GOOD)),
        calls(dialect, ("f", GOOD)) + "I",
        calls(dialect, ("fff", GOOD)),
    ):
        assert plain.reads(rules, refused) == "refused"


@by_dialect()
@pytest.mark.parametrize("arguments", ["{}", '{"city": 1}', '{"town": "Rome"}', '{"city":"Rome"}', '"Rome"', "[]"])
def test_arguments_are_what_the_schema_says(plain: Spelling, dialect: CallFormat, arguments: str):
    rules = plain.grammar(asking(tools=[tool("f")], tool_choice="required"), dialect)
    assert plain.reads(rules, calls(dialect, ("f", arguments))) == "refused"


@by_dialect()
def test_only_the_tools_that_may_be_called_are(plain: Spelling, dialect: CallFormat):
    tools = [tool("f"), tool("g"), tool("h")]
    one, some = NamedFunction(name="g"), [NamedFunction(name="g"), NamedFunction(name="h")]
    for choice, may in ((one, "g"), (AllowedTools(tools=some, mode="required"), "gh")):
        rules = plain.grammar(asking(tools=tools, tool_choice=choice), dialect)
        taken = [name for name in "fgh" if plain.reads(rules, calls(dialect, (name, GOOD))) == "whole"]
        assert taken == list(may)


@by_dialect()
@pytest.mark.parametrize(
    ("asked", "most"), [({"parallel_tool_calls": False}, 1), ({"max_tool_calls": 2}, 2), ({}, MANY)]
)
def test_no_more_calls_than_may_be_made(plain: Spelling, dialect: CallFormat, asked: dict[str, Any], most: int):
    rules = plain.grammar(asking(tools=[tool("f")], tool_choice="required", **asked), dialect)
    assert plain.reads(rules, calls(dialect, *[("f", GOOD)] * most)) == "whole"
    assert plain.reads(rules, calls(dialect, *[("f", GOOD)] * (most + 1))) == "refused"


def test_a_function_without_parameters_takes_any_object_and_only_an_object(plain: Spelling):
    bare = tool("f").model_copy(update={"parameters": None})
    for one in (bare, tool("f", {}), tool("f", {"type": ["object", "null"]})):
        rules = plain.grammar(asking(tools=[one], tool_choice="required"))
        assert plain.reads(rules, calls(HERMES, ("f", '{"a": [1, null]}'))) == "whole"
        assert plain.reads(rules, calls(HERMES, ("f", "null"))) == "refused"


def test_parameters_may_be_a_reference_to_what_refers_to_itself(plain: Spelling):
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    rules = plain.grammar(
        asking(tools=[tool("f-2", {"$ref": "#/$defs/node", "$defs": {"node": node}})], tool_choice="required")
    )
    assert plain.reads(rules, calls(HERMES, ("f-2", '{"next": {"next": null}}'))) == "whole"
    assert plain.reads(rules, calls(HERMES, ("f-2", '{"next": 1}'))) == "refused"
    rules = plain.grammar(asking(tools=[tool("f-2"), tool("a_b")]))
    assert plain.reads(rules, '{"name": "f-2", "arguments": {}}') == "refused"


def test_a_function_that_takes_nothing_is_given_nothing(plain: Spelling):
    rules = plain.grammar(asking(tools=[tool("f", {"type": "object", "properties": {}})], tool_choice="required"))
    assert plain.reads(rules, calls(HERMES, ("f", "{}"))) == "whole"
    assert plain.reads(rules, calls(HERMES, ("f", '{"'))) == "refused"


# Calls that may be made.


@by_dialect(TRIGGERED)
def test_text_runs_free_up_to_a_call_and_nothing_follows_the_last_one(plain: Spelling, dialect: CallFormat):
    rules = plain.grammar(asking(tools=[tool("f")], max_tool_calls=2), dialect)
    call = calls(dialect, ("f", GOOD))
    for text in ("", "Hello!\nÀ bientôt <b>[x]</b> ", f"{dialect.trigger[:-1]} ", "a < b\n"):
        assert plain.reads(rules, text) == "whole"
        assert plain.reads(rules, text + call) == "whole"
    assert plain.reads(rules, "x" + calls(dialect, ("f", GOOD), ("f", GOOD))) == "whole"
    assert plain.reads(rules, "x" + calls(dialect, *[("f", GOOD)] * 3)) == "refused"
    assert plain.reads(rules, call + "x") == "refused"


@by_dialect(TRIGGERED)
@pytest.mark.parametrize("call", [("g", GOOD), ("f", "{}"), ("f", '{"city": "Rome", "x": 1}')])
def test_a_call_that_is_begun_in_text_is_a_valid_one(plain: Spelling, dialect: CallFormat, call: tuple[str, str]):
    rules = plain.grammar(asking(tools=[tool("f")]), dialect)
    assert plain.reads(rules, "Well. " + calls(dialect, call)) == "refused"
    assert plain.reads(rules, "Well. " + dialect.trigger) == "open"


@by_dialect(UNTRIGGERED)
def test_where_calls_have_no_trigger_an_answer_that_begins_like_one_is_one(plain: Spelling, dialect: CallFormat):
    rules = plain.grammar(asking(tools=[tool("f"), tool("ff")]), dialect)
    assert plain.reads(rules, calls(dialect, ("f", GOOD), ("ff", GOOD))) == "whole"
    assert plain.reads(rules, calls(dialect, ("f", "{}"))) == "refused"
    for text in ("Hello", '{"name": "Bob"}', '{"name": "fff"}', '{"a": 1}', 'Say {"name": "f"}'):
        assert plain.reads(rules, text) == "whole"


@by_dialect()
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
def test_a_call_in_other_words_does_not_get_by(plain: Spelling, dialect: CallFormat, other: str):
    rules = plain.grammar(asking(tools=[tool("f")]), dialect)
    assert plain.reads(rules, other) == "refused"


@by_dialect()
def test_who_has_called_and_may_not_any_more_cannot_go_on_as_text(plain: Spelling, dialect: CallFormat):
    turn = asking(tools=[tool("f")], max_tool_calls=0)
    turn.items = [FunctionCall(call_id="a", name="f", arguments=GOOD), FunctionCallOutput(call_id="a", output="fine")]
    rules = plain.grammar(turn, dialect)
    for text in ("It is fine.", 'The object {"a": 1} is none.', '{"city": "Rome"}', "<b>fine</b>", ""):
        assert plain.reads(rules, text) in ("open", "whole")
    for other in DIALECTS:
        assert plain.reads(rules, calls(other, ("f", GOOD))) == "refused"
    assert plain.reads(rules, "<tool_response>") == "refused"


def test_nothing_is_demanded_where_no_tool_may_be_called(plain: Spelling):
    tools = [tool("f")]
    assert plain.grammar(asking()) is None
    assert plain.grammar(asking(tools=tools, tool_choice="none")) is None
    assert plain.grammar(asking(tools=tools, max_tool_calls=0, tool_choice="required")) is None


# Forms of the answer.


def test_an_answer_in_a_form_is_exactly_that(plain: Spelling):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", 1, None]}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a"],
    }
    rules = plain.grammar(asking(schema=schema))
    for whole in ('{"a": "x"}', '{"a": 1, "b": []}', '{"a": null, "b": [true, false]}'):
        assert plain.reads(rules, whole) == "whole"
        assert plain.reads(rules, whole[:-1]) == "open"
        for refused in (
            whole + " ",
            " " + whole,
            whole.replace(": ", ":"),
            whole.replace("{", "{\n"),
            "```json\n" + whole,
        ):
            assert plain.reads(rules, refused) == "refused"
    for refused in ('{"a": 2}', "{}", '{"a": "x", "c": 1}', '{"a": "x", "a": "x"}', "[]", '{"b": [], "a": "x"}'):
        assert plain.reads(rules, refused) == "refused"


def test_json_object_is_any_object_and_nothing_else(plain: Spelling):
    for schema in (True, {}):
        rules = plain.grammar(asking(schema=schema if schema is True else {"type": "object"}))
        assert plain.reads(rules, '{"a": {"b": [1, "é", {}]}}') == "whole"
        assert plain.reads(rules, "[") == "refused"


def test_a_form_without_a_schema_is_any_object(plain: Spelling):
    asked = asking(schema={})
    asked.text_format = asked.text_format.model_copy(update={"schema_": None})
    rules = plain.grammar(asked)
    assert plain.reads(rules, "{}") == "whole"
    assert plain.reads(rules, "1") == "refused"


@by_dialect()
def test_with_a_form_and_tools_an_answer_is_calls_or_the_form(plain: Spelling, dialect: CallFormat):
    rules = plain.grammar(asking(tools=[tool("f")], schema={"enum": [[1, 2]]}), dialect)
    assert plain.reads(rules, "[1, 2]") == "whole"
    assert plain.reads(rules, calls(dialect, ("f", GOOD))) == "whole"
    assert plain.reads(rules, "Hello") == "refused"
    assert plain.reads(rules, "[1, 2]" + calls(dialect, ("f", GOOD))) == "refused"


@by_dialect()
def test_a_form_that_begins_like_a_call_is_told_from_one(plain: Spelling, dialect: CallFormat):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["name"],
    }
    rules = plain.grammar(asking(tools=[tool("f"), tool("ff")], schema=schema), dialect)
    for whole in ('{"name": "Bob"}', '{"name": "fg", "n": 1}', calls(dialect, ("ff", GOOD), ("f", GOOD))):
        assert plain.reads(rules, whole) == "whole"
    assert plain.reads(rules, calls(dialect, ("f", "{}"))) == "refused"


@by_dialect()
def test_any_object_cannot_be_mistaken_for_a_call(plain: Spelling, dialect: CallFormat):
    rules = plain.grammar(asking(tools=[tool("f")], schema=True), dialect)
    assert plain.reads(rules, '{"title": "f", "more": {"name": "f"}}') == "whole"
    assert plain.reads(rules, calls(dialect, ("f", GOOD))) == "whole"
    for other in ('{"name": "f", "arguments": {}}', '{"a": 1, "name": "f"}', '{"function": {"name": "f"}}'):
        assert plain.reads(rules, other) == "refused"


# Control tokens and reasoning.


def test_markers_that_are_control_tokens_come_as_these(marked: Spelling):
    ids = marked.tokenizer.control
    rules = marked.grammar(asking(tools=[tool("f")], tool_choice="required"))
    body = f'\n{{"name": "f", "arguments": {GOOD}}}\n'
    assert marked.reads(rules, ids["<tool_call>"], body, ids["</tool_call>"]) == "whole"
    assert marked.reads(rules, "<tool_call>") == "refused"
    assert marked.reads(rules, ids["<tool_call>"], body, "<") == "refused"
    rules = marked.grammar(asking(tools=[tool("f")], tool_choice="required"), MISTRAL_ARGS)
    assert marked.reads(rules, ids["[TOOL_CALLS]"], "f", ids["[ARGS]"], GOOD) == "whole"


def test_in_text_a_call_is_valid_whether_its_marker_is_a_token_or_spelled(marked: Spelling):
    ids = marked.tokenizer.control
    rules = marked.grammar(asking(tools=[tool("f")]))
    for marker in ("<tool_call>", ids["<tool_call>"]):
        assert marked.reads(rules, "Well ", marker) == "open"
        assert marked.reads(rules, "Well ", marker, "x") == "refused"
        assert (
            marked.reads(rules, "Well ", marker, f'\n{{"name": "f", "arguments": {GOOD}}}\n', ids["</tool_call>"])
            == "whole"
        )
    assert marked.reads(rules, "Well ", ids["[ARGS]"]) == "refused"


@pytest.mark.parametrize("as_token", [True, False])
@pytest.mark.parametrize("asked", [{"schema": {"enum": [1]}}, {"tools": [tool("f")], "tool_choice": "required"}])
def test_a_model_that_reasons_may_do_so_first(plain: Spelling, marked: Spelling, as_token: bool, asked: dict[str, Any]):
    spelling = marked if as_token else plain
    ids = marked.tokenizer.control
    opener, closer = (ids["<think>"], ids["</think>"]) if as_token else ("<think>", "</think>")
    called: list[str | int] = [calls(HERMES, ("f", GOOD))]
    if as_token:
        called = [ids["<tool_call>"], called[0][11:-12], ids["</tool_call>"]]  # type: ignore[index]  # it is a str
    answer: list[str | int] = ["1"] if "schema" in asked else called
    rules = spelling.grammar(asking(**asked), reasons=True)
    for thought in ([], [opener, "Hm.\n<tool_call> 2 {", closer], [opener, "\n", closer, "\n\n"]):
        assert spelling.reads(rules, *thought, *answer) == "whole"
        assert spelling.reads(rules, *thought, "x") == "refused"
    assert spelling.reads(rules, opener, "Hm.", closer) == "open"
    assert spelling.reads(spelling.grammar(asking(**asked)), opener) == "refused"


@pytest.mark.parametrize("tools", [[], [tool("f")]])
def test_reasoning_that_the_prompt_has_opened_is_closed_before_the_answer(plain: Spelling, tools: list[Any]):
    schema = {"enum": [1]}
    rules = plain.grammar(asking(tools=tools, schema=schema), thinking=True)
    assert plain.reads(rules, "Hm.</think>\n\n1") == "whole"
    assert plain.reads(rules, "1") == "open"


def test_a_model_that_reasons_and_may_call_can_do_both(plain: Spelling):
    rules = plain.grammar(asking(tools=[tool("f")]), reasons=True)
    assert plain.reads(rules, "<think>I could <tool_call> </think>\n\nHello") == "whole"
    assert plain.reads(rules, "<think>x</think>" + calls(HERMES, ("f", GOOD))) == "whole"
    assert plain.reads(rules, "<think>x</think>" + calls(HERMES, ("f", "{}"))) == "refused"


# Schemas.

FITTING: list[tuple[Any, list[str], list[str]]] = [
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


@pytest.mark.parametrize(("schema", "whole", "refused"), FITTING, ids=lambda value: json.dumps(value)[:50])
def test_what_a_schema_says_is_what_comes(plain: Spelling, schema: Any, whole: list[str], refused: list[str]):
    rules = plain.grammar(asking(schema=schema))
    assert [plain.reads(rules, text) for text in whole] == ["whole"] * len(whole)
    assert [plain.reads(rules, text) for text in refused] == ["refused"] * len(refused)


UNFIT: list[tuple[Any, str]] = [
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
    ({"allOf": [{"const": "s3cret"}, {"const": "other"}]}, "No value"),
    ({"type": "object", "properties": {"s3cret": False}, "required": ["s3cret"]}, "No value"),
    ({"enum": []}, "No value"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "No value"),
    ({"$ref": "#"}, "No value"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "No value"),
    ({"type": "object", "properties": {"s3cret": {"$ref": "#"}}, "required": ["s3cret"]}, "No value"),
]


@pytest.mark.parametrize(("schema", "says"), UNFIT, ids=lambda value: json.dumps(value)[:50])
def test_what_a_grammar_cannot_express_is_refused_by_the_keywords_name(plain: Spelling, schema: Any, says: str):
    nested = {"type": "object", "properties": {"inner": schema}, "required": ["inner"]}
    for whole in (schema, nested) if "#" not in json.dumps(schema) else (schema,):
        with pytest.raises(errors.UnsupportedParameter) as caught:
            plain.grammar(asking(schema=whole))
        assert says in caught.value.message
        assert (caught.value.status, caught.value.param) == (400, "text.format.schema")
        assert "s3cret" not in caught.value.message
        strict = tool("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]}, strict=True)
        if "#" not in json.dumps(schema):
            with pytest.raises(errors.UnsupportedParameter) as caught:
                plain.grammar(asking(tools=[tool("g"), strict]))
            assert caught.value.param == "tools[1].parameters"


@pytest.mark.parametrize(
    ("schema", "says"), [case for case in UNFIT if case[1].strip("`") not in ("$ref", "type", "properties", "enum")]
)
def test_a_function_that_is_not_strict_does_without_what_cannot_be_expressed(plain: Spelling, schema: Any, says: str):
    if says == "No value":
        with pytest.raises(errors.UnsupportedParameter):
            plain.grammar(asking(tools=[tool("f", {"type": "object", **schema})]))
        return
    lenient = tool("f", {"type": "object", "properties": {"a": schema, "b": {"type": "null"}}, "required": ["b"]})
    rules = plain.grammar(asking(tools=[lenient], tool_choice="required"))
    assert plain.reads(rules, calls(HERMES, ("f", '{"b": null}'))) == "whole"
    assert plain.reads(rules, calls(HERMES, ("f", '{"b": 1}'))) == "refused"


def test_parameters_that_are_no_object_are_refused(plain: Spelling):
    with pytest.raises(errors.UnsupportedParameter, match="must be an object"):
        plain.grammar(asking(tools=[tool("f", {"type": "string"})]))


def test_only_the_tools_that_may_be_called_need_a_schema_that_fits(plain: Spelling):
    tools = [tool("f", {"type": "object", "not": {}}, strict=True), tool("g")]
    assert plain.grammar(asking(tools=tools, tool_choice=NamedFunction(name="g"))) is not None
    assert plain.grammar(asking(tools=tools, tool_choice="none")) is None


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
def test_whatever_is_sent_as_a_schema_is_refused_or_works(plain: Spelling, schema: dict[str, Any], strict: bool):
    for asked in (asking(schema=schema), asking(tools=[tool("f", schema, strict=strict)], tool_choice="required")):
        with contextlib.suppress(errors.UnsupportedParameter):
            rules = plain.grammar(asked)
            assert rules is not None
            assert not plain.grammars.constraint(rules).ended


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_works_in_bounded_time(plain: Spelling, name: str):
    started = time.monotonic()
    for asked in (
        asking(schema=HOSTILE[name]),
        asking(tools=[tool("f", {"type": "object", "properties": {"a": HOSTILE[name]}})]),
    ):
        with contextlib.suppress(errors.UnsupportedParameter):
            rules = plain.grammar(asked)
            assert rules is not None
            plain.grammars.constraint(rules)
    assert time.monotonic() - started < 20


def test_many_schemas_together_are_refused_once_they_are_too_much(plain: Spelling):
    wide = {"type": "object", "properties": {"a": {"enum": [f"{i:0100}" for i in range(1000)]}}}
    rules = plain.grammar(asking(tools=[tool(f"f{i}", wide) for i in range(12)]))
    assert rules is not None
    with pytest.raises(errors.InvalidRequest, match="too large together"):
        plain.grammars.constraint(rules)


# Whatever comes is valid.

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
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"$defs": {"one": one}, "type": "object", "properties": {"a": one}}, inner),
    ),
    max_leaves=6,
)


@given(SCHEMAS, st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_whatever_a_model_says_is_valid_and_whole_if_there_is_room(plain: Spelling, schema: Any, seed: int, room: int):
    rules = plain.grammar(asking(schema=schema))
    assert rules is not None
    least = _shortest(plain.grammars.constraint(rules)._matcher, plain.grammars._marks, 2000)
    text = said_at_random(plain, rules, seed, least + room)
    assert Schema(schema).fault(text) is None


def said_at_random(spelling: Spelling, rules: str, seed: int, limit: int) -> str:
    """An answer of a model that chooses by chance; fails where it is not whole within the limit."""
    chance = np.random.default_rng(seed)
    constraint = spelling.grammars.constraint(rules)
    said: list[int] = []
    while len(said) < limit and not constraint.ended:
        tokens = constraint.forced(limit - len(said), 32)
        if not tokens:
            logits = chance.standard_normal(len(spelling.tokenizer.pieces)).astype(np.float32)
            constraint.mask(logits)
            tokens = [constraint.accept(int(logits.argmax()))]
        if tokens == [END]:
            return spelling.text(said)
        said += tokens
    assert constraint.complete
    return spelling.text(said)
