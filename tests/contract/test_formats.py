"""The form of the answer's text: held to it, or failed."""

from __future__ import annotations

import json

import anyio
import pytest

from .client import call, functions, output_text, script
from .hosts import ANY

pytestmark = pytest.mark.anyio

SERVED_BY = ANY
TOOLS = functions("f")
MARK = "Xyzzy-4711"


def schema(schema, **fields):
    return {"format": {"type": "json_schema", "name": "thing", "schema": schema, **fields}}


def thing(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


OBJECT = {"format": {"type": "json_object"}}
PERSON = schema(thing(name={"type": "string"}, age={"type": "integer", "minimum": 0}), strict=True)
TREE = schema(
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": thing(value={"type": "integer"}, nodes={"type": "array", "items": {"$ref": "#/$defs/node"}})},
    }
)
CHOICE = schema(thing(a={"anyOf": [{"type": "integer"}, {"type": "null"}, thing(b={"enum": ["x", "y", 3]})]}))
DATED = schema(thing(day={"type": "string", "format": "date"}, code={"type": "string", "pattern": "^[A-Z]{2}$"}))
LIST = schema({"type": "array", "items": {"type": "string"}, "minItems": 2})
NONE = {"format": {"type": "json_schema", "name": "any"}}
CONST = schema({"const": {"deep": [1, None]}}, strict=False)

RIGHT = {
    "an object": (OBJECT, '{"any": ["thing", null]}'),
    "an object with space around it": (OBJECT, ' \n{"a": 1}\n'),
    "an empty object": (OBJECT, "{}"),
    "any object": (NONE, '{"a": 1}'),
    "a person": (PERSON, '{"name": "\\u00d6", "age": 0}'),
    "a person, otherwise ordered": (PERSON, '{"age": 1e2, "name": "\u00d6\u2028"}'),
    "a leaf": (TREE, '{"value": 1, "nodes": []}'),
    "a tree": (TREE, '{"value": 1, "nodes": [{"value": 2, "nodes": [{"value": 3, "nodes": []}]}]}'),
    "a number of the choice": (CHOICE, '{"a": 5}'),
    "nothing of the choice": (CHOICE, '{"a": null}'),
    "an object of the choice": (CHOICE, '{"a": {"b": 3}}'),
    "a day": (DATED, '{"day": "2024-02-29", "code": "NO"}'),
    "a list": (LIST, '["a", "b"]'),
    "a constant": (CONST, '{"deep": [1, null]}'),
}

WRONG = {
    "text": (OBJECT, "Xyzzy-4711"),
    "a list for an object": (OBJECT, "[]"),
    "nothing": (OBJECT, ""),
    "an object and more": (OBJECT, "{} {}"),
    "an object in a fence": (OBJECT, '```json\n{"a": 1}\n```'),
    "half an object": (OBJECT, '{"a": 1'),
    "no number": (OBJECT, '{"a": NaN}'),
    "not any object": (NONE, "5"),
    "a person without age": (PERSON, '{"name": "Xyzzy-4711"}'),
    "a person with too much": (PERSON, '{"name": "x", "age": 1, "more": "Xyzzy-4711"}'),
    "a person before birth": (PERSON, '{"name": "x", "age": -1}'),
    "a person of half a year": (PERSON, '{"name": "x", "age": 0.5}'),
    "a tree with a broken leaf": (TREE, '{"value": 1, "nodes": [{"value": 2, "nodes": [{"value": "Xyzzy-4711"}]}]}'),
    "none of the choices": (CHOICE, '{"a": "Xyzzy-4711"}'),
    "none of the words": (CHOICE, '{"a": {"b": "Xyzzy-4711"}}'),
    "a day that is none": (DATED, '{"day": "2023-02-29", "code": "NO"}'),
    "a code that is none": (DATED, '{"day": "2024-02-29", "code": "no"}'),
    "a list too short": (LIST, '["Xyzzy-4711"]'),
    "another constant": (CONST, '{"deep": [1]}'),
}


@pytest.mark.parametrize(("text", "answer"), RIGHT.values(), ids=RIGHT)
async def test_an_answer_in_its_format_is_as_it_was_made(client, stream, text, answer):
    for pieces in (list(answer), [{"Text": {"text": answer}}, {"Finish": {}}]):
        final = await client.made(stream, input=script(*pieces), text=text)
        assert output_text(final) == answer
        assert final["text"]["format"]["type"] == text["format"]["type"] or text is NONE


@pytest.mark.parametrize(("text", "answer"), WRONG.values(), ids=WRONG)
async def test_an_answer_that_is_not_in_its_format_fails_honestly(client, stream, context, text, answer):
    error = await client.fails(stream, input=script(answer), text=text, **context)
    assert (error["type"], error["code"], error["param"]) == ("model_error", "invalid_output_format", None)
    assert MARK not in error["message"]


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_a_backend_in_a_thread_is_held_to_the_format_too(client, stream, model):
    assert output_text(await client.made(stream, model=model, input=script("{", "}"), text=OBJECT)) == "{}"
    assert (await client.fails(stream, model=model, input=script("{", "x"), text=OBJECT))["type"] == "model_error"


@pytest.mark.parametrize("strict", [True, False, None])
async def test_strict_or_not_a_schema_is_held_to(client, stream, strict):
    wanted = schema(thing(a={"type": "integer"}), strict=strict)
    final = await client.made(stream, input=script('{"a": 1}'), text=wanted)
    assert final["text"]["format"] == {**wanted["format"], "description": None, "strict": bool(strict), "schema": None}
    await client.fails(stream, input=script('{"a": "1"}'), text=wanted)


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
@pytest.mark.parametrize(
    "moves", [['{"na'], ["no JSON"], [], [{"Reasoning": {"text": "hm"}}], ['{"name": "x", "age": 1}']]
)
async def test_a_cut_answer_is_incomplete_and_not_failed(client, stream, context, reason, moves):
    moves = [*moves, {"Finish": {"reason": reason}}]
    final = await client.made(stream, input=script(*moves), text=PERSON, **context)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})


async def test_a_model_that_refuses_need_not_do_it_in_json(client, stream, context):
    for moves in (
        [{"Refusal": {"text": "I'd rather "}}, {"Refusal": {"text": "not."}}],
        ['{"na', {"Refusal": {"text": "No."}}],
    ):
        final = await client.made(stream, input=script(*moves), text=PERSON, **context)
        assert final["status"] == "completed"
        assert final["output"][0]["content"][-1]["type"] == "refusal"


async def test_an_answer_that_never_comes_fails(client, stream, context):
    for moves in ([], [{"Reasoning": {"text": "{}"}}], [{"Message": {}}], [{"Item": {"type": "acme:thing"}}]):
        error = await client.fails(stream, input=script(*moves), text=OBJECT, **context)
        assert error["code"] == "invalid_output_format"


async def test_what_is_no_answer_is_held_to_no_format(client, stream, context):
    moves = [
        {"ReasoningSummary": {"text": "first"}},
        {"Reasoning": {"text": "hm"}},
        {"Message": {"phase": "commentary"}},
        "Let me see.",
        {"Item": {"type": "acme:thing"}},
        {"Message": {"phase": "final_answer"}},
        '{"name": "x", ',
        {"Annotation": {"url": "https://example.org/"}},
        '"age": 1}',
        {"Usage": {"input_tokens": 1, "output_tokens": 1}},
    ]
    final = await client.made(stream, input=script(*moves), text=PERSON, **context)
    assert output_text(final) == 'Let me see.{"name": "x", "age": 1}'


@pytest.mark.parametrize(
    "before", [[{"Message": {}}], [{"Reasoning": {"text": "hm"}}], [{"Item": {"type": "acme:thing"}}], [call("f")]]
)
async def test_every_message_of_an_answer_is_held_to_the_format(client, stream, before):
    for moves in (["{}", *before, "no"], ["no", *before, "{}"]):
        error = await client.fails(stream, input=script(*moves), text=OBJECT, tools=TOOLS)
        assert error["code"] == "invalid_output_format"
    final = await client.made(stream, input=script("{}", *before, '{"a": 1}'), text=OBJECT, tools=TOOLS)
    assert output_text(final) == '{}{"a": 1}'


@pytest.mark.parametrize("between", [[call("f")], [{"Reasoning": {"text": "hm"}}], [{"Item": {"type": "acme:thing"}}]])
async def test_a_remark_excuses_no_message_after_it(client, stream, between):
    moves = [{"Message": {"phase": "commentary"}}, "Let me see.", *between, "no JSON"]
    error = await client.fails(stream, input=script(*moves), text=OBJECT, tools=TOOLS)
    assert error["code"] == "invalid_output_format"


async def test_a_call_needs_no_answer_beside_it(client, stream, context):
    final = await client.made(stream, input=script(call("f")), text=PERSON, tools=TOOLS, **context)
    (made,) = final["output"]
    answer = {"type": "function_call_output", "call_id": made["call_id"], "output": "no JSON"}
    ask = {"role": "user", "content": script('{"name": "x", "age": 1}')}
    fields = {"input": [answer, ask], "previous_response_id": final["id"], "text": PERSON, "tools": TOOLS}
    assert output_text(await client.made(stream, **fields)) == '{"name": "x", "age": 1}'


async def test_the_answer_after_a_hosted_tool_is_held_to_the_format(client, stream):
    fields = {"text": PERSON, "tools": [{"type": "test:add"}]}
    add = call("add", {"a": 1, "b": 2})
    right, wrong = [script({"rounds": [[add], [answer]]}) for answer in ('{"name": "x", "age": 3}', "It is 3.")]
    assert json.loads(output_text(await client.made(stream, input=right, **fields))) == {"name": "x", "age": 3}
    assert (await client.fails(stream, input=wrong, **fields))["code"] == "invalid_output_format"


async def test_a_format_is_this_requests_alone(client, stream):
    first = await client.made(stream, input=script("{}"), text=OBJECT)
    final = await client.made(stream, input=script("free again"), previous_response_id=first["id"])
    assert (output_text(final), final["text"]) == ("free again", {"format": {"type": "text"}})


async def test_a_model_is_told_the_format(client, stream, context):
    told = await client.told(stream, input="hi", text=schema({"type": "object"}, strict=True), **context)
    assert told["text_format"]["schema"] == {"type": "object"}
    assert told["text_format"]["strict"] is True


# Schemas that are none.

NO_SCHEMA = {
    "a type that is none": ({"type": "Xyzzy-4711"}, "type"),
    "deep inside": (thing(**{MARK: {"items": {"minimum": MARK}}}), "minimum"),
    "required that is no list": ({"type": "object", "required": MARK}, "required"),
    "a pattern that is none": ({"pattern": "("}, "pattern"),
    "an enum that is none": ({"enum": MARK}, "enum"),
    "properties that are none": ({"properties": [MARK]}, "properties"),
    "a property that is none": ({"properties": {MARK: 5}}, "properties"),
    "a need of a property that is none": ({"dependentRequired": {MARK: 5}}, "dependentRequired"),
    "a reference that is none": ({"$ref": 5}, "$ref"),
    "a draft that is none": ({"$schema": 5}, "$schema"),
    "a reference to what is not there": ({"$ref": "#/$defs/Xyzzy-4711"}, None),
    "a reference to elsewhere": ({"$ref": "https://example.org/Xyzzy-4711"}, None),
    "a file": ({"$ref": "file:///etc/passwd"}, None),
    "a draft of nobody": ({"$schema": "https://example.org/Xyzzy-4711"}, None),
}


@pytest.mark.parametrize(("wanted", "keyword"), NO_SCHEMA.values(), ids=NO_SCHEMA)
async def test_a_schema_that_is_none_is_a_400_that_names_its_keyword(client, stream, wanted, keyword):
    reply = await client.post(stream=stream, input=script("{}"), text=schema(wanted))
    error = reply.error(400, "invalid_schema", "text.format.schema")
    assert keyword is None or f"`{keyword}`" in error["message"]
    assert MARK not in error["message"]


LEVELS = 27
"""Enough that each doubling counts, few enough that a server which is caught comes back."""


def bomb(reference, **names):
    """A schema of some lines with 2 to the 27th ways through it."""
    defs = {f"a{n}": {"allOf": [{"$ref": reference.format(n + 1)}] * 2} for n in range(LEVELS)}
    defs[f"a{LEVELS}"] = {"type": "object"}
    for n in range(LEVELS + 1):
        defs[f"a{n}"] |= {name: value.format(n) for name, value in names.items()}
    return {"$id": "https://example.org/", "$defs": defs, "$ref": reference.format(0)}


def nested(levels, **fields):
    """A schema within a schema within a schema."""
    wanted = {"properties": {"a": True}}
    for _ in range(levels):
        wanted = {"allOf": [wanted], **fields}
    return wanted


BOMBS = {
    "by pointer": bomb("#/$defs/a{}"),
    "by encoded pointer": bomb("#/%24defs/a{}"),
    "by anchor": bomb("#here{}", **{"$anchor": "here{}"}),
    "by id": bomb("here{}", **{"$id": "here{}"}),
    "by address": bomb("https://example.org/#/$defs/a{}"),
    "by depth": nested(80),
    "by what is left over": nested(18, unevaluatedProperties=False),
}


@pytest.mark.parametrize("wanted", BOMBS.values(), ids=BOMBS)
async def test_a_schema_that_multiplies_itself_stops_nobody(client, stream, wanted):
    with anyio.fail_after(20):  # and not 64 seconds, or half a day
        reply = await client.post(stream=stream, input=script('{"a": {"a": 1}}'), text=schema(wanted))
    assert reply.status == 200 or reply.error(reply.status)["type"] in ("invalid_request", "model_error")


async def test_a_pattern_that_goes_back_for_ever_stops_nobody(client, stream):
    wanted = schema(thing(a={"pattern": "^(a+)+$"}))
    with anyio.fail_after(20):
        error = await client.fails(stream, input=script(json.dumps({"a": "a" * 5000 + "b"})), text=wanted)
    assert error["type"] == "model_error"
