"""The format of the text: enforced, or the response fails."""

from __future__ import annotations

import json

import anyio
import pytest

from .client import call, functions, output_text, script
from .hosts import FASTEST

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST
TOOLS = functions("f")
MARK = "Xyzzy-4711"


def schema(schema, **fields):
    return {"format": {"type": "json_schema", "name": "thing", "schema": schema, **fields}}


def object_schema(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


OBJECT = {"format": {"type": "json_object"}}
PERSON = schema(object_schema(name={"type": "string"}, age={"type": "integer", "minimum": 0}), strict=True)
TREE = schema(
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": object_schema(value={"type": "integer"}, nodes={"type": "array", "items": {"$ref": "#/$defs/node"}})
        },
    }
)
CHOICE = schema(
    object_schema(a={"anyOf": [{"type": "integer"}, {"type": "null"}, object_schema(b={"enum": ["x", "y", 3]})]})
)
DATED = schema(
    object_schema(day={"type": "string", "format": "date"}, code={"type": "string", "pattern": "^[A-Z]{2}$"})
)
LIST = schema({"type": "array", "items": {"type": "string"}, "minItems": 2})
NONE = {"format": {"type": "json_schema", "name": "any"}}
CONST = schema({"const": {"deep": [1, None]}}, strict=False)

VALID_ANSWERS = {
    "object": (OBJECT, '{"any": ["thing", null]}'),
    "object with surrounding space": (OBJECT, ' \n{"a": 1}\n'),
    "empty object": (OBJECT, "{}"),
    "any object": (NONE, '{"a": 1}'),
    "person": (PERSON, '{"name": "\\u00d6", "age": 0}'),
    "person in other order": (PERSON, '{"age": 1e2, "name": "\u00d6\u2028"}'),
    "leaf": (TREE, '{"value": 1, "nodes": []}'),
    "tree": (TREE, '{"value": 1, "nodes": [{"value": 2, "nodes": [{"value": 3, "nodes": []}]}]}'),
    "choice: number": (CHOICE, '{"a": 5}'),
    "choice: null": (CHOICE, '{"a": null}'),
    "choice: object": (CHOICE, '{"a": {"b": 3}}'),
    "date and pattern": (DATED, '{"day": "2024-02-29", "code": "NO"}'),
    "list": (LIST, '["a", "b"]'),
    "constant": (CONST, '{"deep": [1, null]}'),
}

INVALID_ANSWERS = {
    "text": (OBJECT, "Xyzzy-4711"),
    "list instead of object": (OBJECT, "[]"),
    "nothing": (OBJECT, ""),
    "two objects": (OBJECT, "{} {}"),
    "object in code fence": (OBJECT, '```json\n{"a": 1}\n```'),
    "half an object": (OBJECT, '{"a": 1'),
    "NaN": (OBJECT, '{"a": NaN}'),
    "number instead of object": (NONE, "5"),
    "person without age": (PERSON, '{"name": "Xyzzy-4711"}'),
    "person with extra member": (PERSON, '{"name": "x", "age": 1, "more": "Xyzzy-4711"}'),
    "person with negative age": (PERSON, '{"name": "x", "age": -1}'),
    "person with fractional age": (PERSON, '{"name": "x", "age": 0.5}'),
    "tree with a broken leaf": (TREE, '{"value": 1, "nodes": [{"value": 2, "nodes": [{"value": "Xyzzy-4711"}]}]}'),
    "choice: string": (CHOICE, '{"a": "Xyzzy-4711"}'),
    "choice: not in enum": (CHOICE, '{"a": {"b": "Xyzzy-4711"}}'),
    "invalid date": (DATED, '{"day": "2023-02-29", "code": "NO"}'),
    "pattern mismatch": (DATED, '{"day": "2024-02-29", "code": "no"}'),
    "too short list": (LIST, '["Xyzzy-4711"]'),
    "other constant": (CONST, '{"deep": [1]}'),
}


@pytest.mark.parametrize(("text", "answer"), VALID_ANSWERS.values(), ids=VALID_ANSWERS)
async def test_valid_json_answer_is_unchanged(client, stream, text, answer):
    for pieces in (list(answer), [{"Text": {"text": answer}}, {"Finish": {}}]):
        final = await client.complete(stream, input=script(*pieces), text=text)
        assert output_text(final) == answer
        assert final["text"]["format"]["type"] == text["format"]["type"] or text is NONE


@pytest.mark.parametrize(("text", "answer"), INVALID_ANSWERS.values(), ids=INVALID_ANSWERS)
async def test_answer_outside_format_fails_response(client, stream, context, text, answer):
    error = await client.expect_failure(stream, input=script(answer), text=text, **context)
    assert (error["type"], error["code"], error["param"]) == ("model_error", "invalid_output_format", None)
    assert MARK not in error["message"]


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_format_is_enforced_for_synchronous_backend(client, stream, model):
    assert output_text(await client.complete(stream, model=model, input=script("{", "}"), text=OBJECT)) == "{}"
    assert (await client.expect_failure(stream, model=model, input=script("{", "x"), text=OBJECT))[
        "type"
    ] == "model_error"


@pytest.mark.parametrize("strict", [True, False, None])
async def test_schema_is_enforced_with_and_without_strict(client, stream, strict):
    format_schema = schema(object_schema(a={"type": "integer"}), strict=strict)
    final = await client.complete(stream, input=script('{"a": 1}'), text=format_schema)
    assert final["text"]["format"] == {
        **format_schema["format"],
        "description": None,
        "strict": bool(strict),
        "schema": None,
    }
    await client.expect_failure(stream, input=script('{"a": "1"}'), text=format_schema)


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
@pytest.mark.parametrize(
    "steps", [['{"na'], ["no JSON"], [], [{"Reasoning": {"text": "hm"}}], ['{"name": "x", "age": 1}']]
)
async def test_truncated_json_answer_is_incomplete(client, stream, context, reason, steps):
    steps = [*steps, {"Finish": {"reason": reason}}]
    final = await client.complete(stream, input=script(*steps), text=PERSON, **context)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})


async def test_refusal_is_exempt_from_format(client, stream, context):
    for steps in (
        [{"Refusal": {"text": "I'd rather "}}, {"Refusal": {"text": "not."}}],
        ['{"na', {"Refusal": {"text": "No."}}],
    ):
        final = await client.complete(stream, input=script(*steps), text=PERSON, **context)
        assert final["status"] == "completed"
        assert final["output"][0]["content"][-1]["type"] == "refusal"


async def test_missing_answer_fails_response(client, stream, context):
    for steps in ([], [{"Reasoning": {"text": "{}"}}], [{"Message": {}}], [{"Item": {"type": "acme:thing"}}]):
        error = await client.expect_failure(stream, input=script(*steps), text=OBJECT, **context)
        assert error["code"] == "invalid_output_format"


async def test_reasoning_and_commentary_are_exempt_from_format(client, stream, context):
    steps = [
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
    final = await client.complete(stream, input=script(*steps), text=PERSON, **context)
    assert output_text(final) == 'Let me see.{"name": "x", "age": 1}'


@pytest.mark.parametrize(
    "prefix", [[{"Message": {}}], [{"Reasoning": {"text": "hm"}}], [{"Item": {"type": "acme:thing"}}], [call("f")]]
)
async def test_format_is_enforced_for_every_message(client, stream, prefix):
    for steps in (["{}", *prefix, "no"], ["no", *prefix, "{}"]):
        error = await client.expect_failure(stream, input=script(*steps), text=OBJECT, tools=TOOLS)
        assert error["code"] == "invalid_output_format"
    final = await client.complete(stream, input=script("{}", *prefix, '{"a": 1}'), text=OBJECT, tools=TOOLS)
    assert output_text(final) == '{}{"a": 1}'


@pytest.mark.parametrize("between", [[call("f")], [{"Reasoning": {"text": "hm"}}], [{"Item": {"type": "acme:thing"}}]])
async def test_format_is_enforced_after_commentary(client, stream, between):
    steps = [{"Message": {"phase": "commentary"}}, "Let me see.", *between, "no JSON"]
    error = await client.expect_failure(stream, input=script(*steps), text=OBJECT, tools=TOOLS)
    assert error["code"] == "invalid_output_format"


async def test_call_without_answer_is_accepted(client, stream, context):
    final = await client.complete(stream, input=script(call("f")), text=PERSON, tools=TOOLS, **context)
    (function_call,) = final["output"]
    answer = {"type": "function_call_output", "call_id": function_call["call_id"], "output": "no JSON"}
    ask = {"role": "user", "content": script('{"name": "x", "age": 1}')}
    fields = {"input": [answer, ask], "previous_response_id": final["id"], "text": PERSON, "tools": TOOLS}
    assert output_text(await client.complete(stream, **fields)) == '{"name": "x", "age": 1}'


async def test_format_is_enforced_after_hosted_tool(client, stream):
    fields = {"text": PERSON, "tools": [{"type": "test:add"}]}
    add = call("add", {"a": 1, "b": 2})
    right, wrong = [script({"rounds": [[add], [answer]]}) for answer in ('{"name": "x", "age": 3}', "It is 3.")]
    assert json.loads(output_text(await client.complete(stream, input=right, **fields))) == {"name": "x", "age": 3}
    assert (await client.expect_failure(stream, input=wrong, **fields))["code"] == "invalid_output_format"


async def test_format_does_not_carry_over_to_next_request(client, stream):
    first = await client.complete(stream, input=script("{}"), text=OBJECT)
    final = await client.complete(stream, input=script("free again"), previous_response_id=first["id"])
    assert (output_text(final), final["text"]) == ("free again", {"format": {"type": "text"}})


async def test_turn_holds_format(client, stream, context):
    turn = await client.describe_turn(stream, input="hi", text=schema({"type": "object"}, strict=True), **context)
    assert turn["text_format"]["schema"] == {"type": "object"}
    assert turn["text_format"]["strict"] is True


# Invalid schemas.

INVALID_SCHEMAS = {
    "unknown type": ({"type": "Xyzzy-4711"}, "type"),
    "nested": (object_schema(**{MARK: {"items": {"minimum": MARK}}}), "minimum"),
    "required is not a list": ({"type": "object", "required": MARK}, "required"),
    "invalid pattern": ({"pattern": "("}, "pattern"),
    "enum is not a list": ({"enum": MARK}, "enum"),
    "properties is not an object": ({"properties": [MARK]}, "properties"),
    "property is not a schema": ({"properties": {MARK: 5}}, "properties"),
    "dependentRequired is not a list": ({"dependentRequired": {MARK: 5}}, "dependentRequired"),
    "reference is not a string": ({"$ref": 5}, "$ref"),
    "$schema is not a string": ({"$schema": 5}, "$schema"),
    "unresolvable reference": ({"$ref": "#/$defs/Xyzzy-4711"}, None),
    "remote reference": ({"$ref": "https://example.org/Xyzzy-4711"}, None),
    "file reference": ({"$ref": "file:///etc/passwd"}, None),
    "unknown draft": ({"$schema": "https://example.org/Xyzzy-4711"}, None),
}


@pytest.mark.parametrize(("format_schema", "keyword"), INVALID_SCHEMAS.values(), ids=INVALID_SCHEMAS)
async def test_invalid_schema_returns_400_with_keyword(client, stream, format_schema, keyword):
    reply = await client.post(stream=stream, input=script("{}"), text=schema(format_schema))
    error = reply.error(400, "invalid_schema", "text.format.schema")
    assert keyword is None or f"`{keyword}`" in error["message"]
    assert MARK not in error["message"]


LEVELS = 27
"""Enough for exponential time to show, few enough for a slow server to recover."""


def exponential_schema(reference, **names):
    """Return a short schema with 2 to the 27th paths."""
    defs = {f"a{n}": {"allOf": [{"$ref": reference.format(n + 1)}] * 2} for n in range(LEVELS)}
    defs[f"a{LEVELS}"] = {"type": "object"}
    for n in range(LEVELS + 1):
        defs[f"a{n}"] |= {name: value.format(n) for name, value in names.items()}
    return {"$id": "https://example.org/", "$defs": defs, "$ref": reference.format(0)}


def nested(levels, **fields):
    """Return a schema that is nested to this depth."""
    format_schema = {"properties": {"a": True}}
    for _ in range(levels):
        format_schema = {"allOf": [format_schema], **fields}
    return format_schema


EXPONENTIAL_SCHEMAS = {
    "by pointer": exponential_schema("#/$defs/a{}"),
    "by encoded pointer": exponential_schema("#/%24defs/a{}"),
    "by anchor": exponential_schema("#here{}", **{"$anchor": "here{}"}),
    "by id": exponential_schema("here{}", **{"$id": "here{}"}),
    "by URL": exponential_schema("https://example.org/#/$defs/a{}"),
    "by depth": nested(80),
    "by unevaluatedProperties": nested(18, unevaluatedProperties=False),
}


@pytest.mark.parametrize("format_schema", EXPONENTIAL_SCHEMAS.values(), ids=EXPONENTIAL_SCHEMAS)
async def test_exponential_schema_does_not_block_server(client, stream, format_schema):
    with anyio.fail_after(20):  # naive validation takes 64 seconds to half a day
        reply = await client.post(stream=stream, input=script('{"a": {"a": 1}}'), text=schema(format_schema))
    assert reply.status == 200 or reply.error(reply.status)["type"] in ("invalid_request", "model_error")


async def test_backtracking_pattern_does_not_block_server(client, stream):
    format_schema = schema(object_schema(a={"pattern": "^(a+)+$"}))
    with anyio.fail_after(20):
        error = await client.expect_failure(
            stream, input=script(json.dumps({"a": "a" * 5000 + "b"})), text=format_schema
        )
    assert error["type"] == "model_error"
