"""Generated requests and model outputs: every reply follows the contract."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.conformance import check_error, check_item, check_response, check_stream
from tests.support.strategies import json_values

from . import hosts
from .client import Client, Stream, call, functions, script
from .test_reasoning import FORGED, VALID_PAYLOAD

pytestmark = pytest.mark.anyio

BOUND = 5.0
"""Seconds that one request may take."""

# Requests: valid ones, and some with one invalid field.

BROKEN_SCHEMAS = [
    {"type": "nonsense"},
    {"$ref": "https://example.org/"},
    {"$ref": "#/$defs/nowhere"},
    {"pattern": "("},
    {"enum": 5},
    {"properties": []},
    {"required": "a"},
    {"anyOf": []},
    {"minimum": "x"},
]
SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            {"type": "object"},
            {"type": "integer", "minimum": 1},
            {"type": ["string", "null"], "maxLength": 2},
            {"enum": ["x", 1, None]},
            {"$ref": "#"},
            {"pattern": "^(a+)+$"},
            {"format": "date"},
            {"const": {"a": 1}},
        ]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
                "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
                "additionalProperties": inner | st.booleans(),
            },
        ),
        st.builds(lambda key, schema: {key: schema}, st.sampled_from(["not", "items", "if"]), inner),
        st.builds(
            lambda key, schemas: {key: schemas},
            st.sampled_from(["anyOf", "allOf", "oneOf", "prefixItems"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=4,
)
LOOSE_SCHEMAS = st.sampled_from([{}, {"type": "object"}])
"""Schemas that random output may satisfy."""

NAMES = ["f", "g", "add", "say", "fail", "crash"]
TYPES = {name: {"type": f"test:{name}"} for name in NAMES[2:]}
TOOLS = st.one_of(
    st.sampled_from(list(TYPES.values())),
    st.fixed_dictionaries(
        {"type": st.just("function"), "name": st.sampled_from(NAMES[:2])},
        optional={"strict": st.booleans(), "parameters": LOOSE_SCHEMAS | SCHEMAS, "description": st.just("d")},
    ),
)
FORMATS = st.one_of(
    st.sampled_from([{"type": "text"}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    st.fixed_dictionaries(
        {"type": st.just("json_schema"), "name": st.just("n"), "schema": LOOSE_SCHEMAS | SCHEMAS},
        optional={"strict": st.booleans()},
    ),
)


def _name(tool):
    return tool.get("name", tool["type"].removeprefix("test:"))


@st.composite
def _choices(draw, tools):
    mode = draw(st.sampled_from(["auto", "auto", "none", "required", "one", "allowed"]))
    named = [TYPES.get(_name(tool), {"type": "function", "name": _name(tool)}) for tool in tools]
    if not named or mode in ("auto", "none", "required"):
        return mode if named or mode == "none" else "auto"
    if mode == "one":
        return draw(st.sampled_from(named))
    some = draw(st.lists(st.sampled_from(named), min_size=1, max_size=3))
    return {"type": "allowed_tools", "tools": some, "mode": draw(st.sampled_from(["auto", "required", "none"]))}


FIELDS = {
    "model": st.sampled_from(["scripted", "scripted-small"]),
    "text": st.builds(lambda wanted: {"format": wanted}, FORMATS),
    "parallel_tool_calls": st.booleans(),
    "max_tool_calls": st.sampled_from([1, 2, 3]),
    "max_output_tokens": st.sampled_from([16, 40]),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "include": st.lists(st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs"]), max_size=2),
    "reasoning": st.sampled_from([{"effort": "low"}, {"summary": "auto"}, {}]),
    "instructions": st.sampled_from(["Be brief.", ""]),
    "store": st.booleans(),
}
INVALID_FIELDS = {
    "model": st.sampled_from(["scripted-text", "nobody"]),
    "tools": st.lists(
        TOOLS | st.sampled_from([{"type": "test:unknown"}, {"type": "function"}, {"type": "custom", "name": "f"}]),
        max_size=4,
    )
    | st.builds(
        lambda schema: [{"type": "function", "name": "f", "strict": True, "parameters": schema}],
        st.sampled_from(BROKEN_SCHEMAS),
    ),
    "tool_choice": st.sampled_from([{"type": "function", "name": "x"}, {"type": "test:x"}, "any", {"type": "mcp"}])
    | st.builds(
        lambda tools: {"type": "allowed_tools", "tools": tools}, st.lists(st.just({"type": "x:y"}), max_size=1)
    ),
    "text": st.builds(
        lambda schema: {"format": {"type": "json_schema", "schema": schema}}, st.sampled_from(BROKEN_SCHEMAS)
    ),
    "max_tool_calls": st.sampled_from([0, -1, 10**30, 1.5]),
    "top_logprobs": st.sampled_from([21, -1]),
    "instructions": st.just("word " * 99),
}


@st.composite
def _requests(draw):
    tools = draw(st.lists(TOOLS, max_size=4, unique_by=_name))
    request = draw(st.fixed_dictionaries({}, optional=FIELDS)) | {"tools": tools}
    if draw(st.booleans()):
        request["tool_choice"] = draw(_choices(tools))
    if draw(st.integers(0, 3)) == 0:
        field = draw(st.sampled_from(sorted({*FIELDS, *INVALID_FIELDS})))
        request[field] = draw(json_values | INVALID_FIELDS.get(field, json_values))
    return request


REQUESTS = _requests()

CALL_IDS = st.sampled_from(["a", "b", "", None])
ITEMS = st.one_of(
    st.sampled_from(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": []},
            {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"},
            {"type": "reasoning", "summary": []},
            {"type": "reasoning", "encrypted_content": VALID_PAYLOAD},
            {"type": "test:add", "call_id": "a", "name": "add", "arguments": "{", "output": "3", "status": "failed"},
            {"type": "acme:thing", "status": "in_progress"},
        ]
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call_output"),
            "call_id": CALL_IDS,
            "output": st.sampled_from(["42", "", [], [{"type": "input_text", "text": "x"}], None, {}]),
        }
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["test:add", "test:unknown", "acme:thing", "no:", "item"])},
        optional={
            "call_id": CALL_IDS,
            "name": st.sampled_from([*NAMES, "no name"]),
            "arguments": st.sampled_from(["{}", "", "{", None, {}]),
            "output": st.sampled_from(["3", "", None, 5]),
            "status": st.sampled_from(["completed", "failed", "in_progress", "", None, 5]),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning")},
        optional={
            "summary": st.sampled_from([[], None, [{"type": "summary_text", "text": "s"}], "s"]),
            "content": st.sampled_from([[], None, [{"type": "reasoning_text", "text": "r"}], "r"]),
            "encrypted_content": st.sampled_from([VALID_PAYLOAD, "foreign", "", None, 5, *FORGED.values()]),
        },
    ),
    json_values,
)

# Model outputs.

ARGUMENTS = st.sampled_from(
    ["", " ", "{}", '{"a": 1, "b": 2}', '{"value": [1]}', '{"kind": "KeyError"}', "{", "[]", "null", '{"a": "x"}']
)
STEPS = st.one_of(
    st.sampled_from(["", "hi", "{}", '{"a": 1}', "null", "1", "{", '"x"']),
    st.builds(call, st.sampled_from([*NAMES, "x"]), ARGUMENTS, call_id=st.sampled_from(["c1", "c2", None])),
    st.sampled_from(
        [
            {"ToolArguments": {"delta": '{"a": 1, "b": 2}', "call_id": "c1"}},
            {"ToolArguments": {"delta": "}"}},
            {"Reasoning": {"text": "hm"}},
            {"ReasoningSummary": {"text": "hm", "new_part": True}},
            {"Refusal": {"text": "no"}},
            {"Message": {"phase": "commentary"}},
            {"Message": {}},
            {"Annotation": {"url": "https://example.org/"}},
            {"Item": {"type": "acme:thing", "fields": {"a": 1}}},
            {"Item": {"type": "acme:thing", "status": "in_progress", "key": "k"}},
            {"Item": {"type": "acme:thing", "status": "completed", "key": "k"}},
            {"Event": {"type": "acme:event"}},
            {"Usage": {"input_tokens": 3, "output_tokens": 9, "cached_tokens": 1, "reasoning_tokens": 2}},
            {"Finish": {}},
            {"Finish": {"reason": "max_output_tokens"}},
            {"Finish": {"reason": "content_filter"}},
            {"raise": "no"},
            {"junk": 5},
        ]
    ),
)
SCRIPTS = st.builds(
    lambda rounds: {"role": "user", "content": script({"rounds": rounds})},
    st.lists(st.lists(STEPS, max_size=5), min_size=1, max_size=4),
)


@asynccontextmanager
async def alice(start):
    """A client of a server that must not log faults."""
    server = start(hosts.settings_host(), "loop")
    yield Client(server.port)
    server.check_log()


def check_reply(reply):
    """Check a reply that was not streamed, and return its status and body."""
    body = reply.json()
    if reply.status == 200:
        check_response(body)
        assert body["status"] in ("completed", "incomplete")
        return body["status"], body
    check_error(body)
    error = body["error"]
    expected = {400: "invalid_request", 500: "model_error"}
    assert reply.status in expected, body
    assert error["type"] == expected[reply.status], body
    return reply.status, error


async def send_in_both_modes(client, body):
    """Send a request in both modes, check that the outcomes are equal, and return them."""
    with anyio.fail_after(BOUND):
        status, answer = check_reply(await client.request("POST", "/responses", json=body))
        async with client.open_request({**body, "stream": True}) as connection:
            head, headers = await connection.head()
            if head != 200:
                error = json.loads(await connection.body())
                check_error(error)
                assert (head, error["error"]) == (status, answer)
                return status, answer
            stream = Stream(connection, head, headers)
            final = await stream.rest()
    check_stream(stream.events)
    if final["status"] == "failed":
        error = stream.events[-2]["error"]
        assert (error["code"], error["type"]) == (answer["code"], answer["type"])
    else:
        assert final["status"] == status
        assert [item["type"] for item in final["output"]] == [item["type"] for item in answer["output"]]
    return final["status"], final


@given(request=REQUESTS, items=st.lists(ITEMS, max_size=2), steps=SCRIPTS)
async def test_any_request_gets_same_answer_in_both_modes(start, request, items, steps):
    async with alice(start) as client:
        body = {"model": "scripted", **request, "input": [*items, steps]}
        status, final = await send_in_both_modes(client, body)
        if status in ("completed", "incomplete", "failed") and body.get("store") is not False:
            assert (await client.get(f"/responses/{final['id']}")).json() == final
            page = (await client.get(f"/responses/{final['id']}/input_items")).json()
            for item in page["data"]:
                check_item(item)


@given(request=REQUESTS, steps=st.lists(SCRIPTS, min_size=2, max_size=2))
async def test_any_model_output_can_be_continued(start, request, steps):
    tools = [*functions("f", "g"), *TYPES.values()]
    async with alice(start) as client:
        previous, window = None, []
        for step in steps:
            fields = {"model": "scripted", "tools": tools, "include": ["reasoning.encrypted_content"]}
            stored, final = await send_in_both_modes(
                client, {**fields, "input": [step], "previous_response_id": previous}
            )
            sent, _ = await send_in_both_modes(client, {**fields, "input": [*window, step], "store": False})
            assert stored == sent
            if stored == 500:
                break
            previous, window = final["id"], [*window, step, *final["output"]]
        ask = {"role": "user", "content": "?"}
        chained = await client.describe_turn(input=[ask], previous_response_id=previous)
        assert chained["messages"] == (await client.describe_turn(input=[*window, ask]))["messages"]
        status, _ = await send_in_both_modes(
            client, {**request, "input": [*window, ask], "previous_response_id": previous}
        )
        assert status != 500
