"""The contract's rules "Objects": complete, correct, and accepted as input."""

from __future__ import annotations

import re
import time

import pytest

from .client import output_text, script
from .hosts import DISSIMILAR, FLASK_VIEW
from .test_events import EVERYTHING, TOOLS

pytestmark = pytest.mark.anyio

SERVED_BY = [*DISSIMILAR, FLASK_VIEW]

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


async def test_minimal_request_is_answered_with_defaults(client, stream):
    earliest = int(time.time())
    final = await client.complete(stream, input="hi")
    expected = {
        "object": "response",
        "status": "completed",
        "model": "scripted",
        "previous_response_id": None,
        "instructions": None,
        "error": None,
        "incomplete_details": None,
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "top_p": 1.0,
        "temperature": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_logprobs": 0,
        "usage": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "store": True,
        "background": False,
        "service_tier": "default",
        "metadata": {},
        "safety_identifier": None,
        "prompt_cache_key": None,
    }
    assert {key: final[key] for key in expected} == expected
    assert earliest <= final["created_at"] <= final["completed_at"] <= time.time()


ECHOED = {
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "max_output_tokens": 99,
    "max_tool_calls": 3,
    "instructions": "Be brief.",
    "metadata": {"key": "value", "empty": ""},
    "parallel_tool_calls": False,
    "truncation": "auto",
    "store": False,
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "name": "get_weather"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "safety_identifier": "someone",
    "prompt_cache_key": "somewhere",
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs"],
}


async def test_request_parameters_are_echoed(client, stream):
    steps = [{"ToolCall": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]
    final = await client.complete(stream, input=script(*steps), **ECHOED)
    assert {key: final[key] for key in ECHOED if key != "include"} == {
        key: value for key, value in ECHOED.items() if key != "include"
    }


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "auto",
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
    ids=["none", "auto", "allowed"],
)
async def test_every_tool_choice_is_echoed(client, stream, choice):
    final = await client.complete(stream, input=script("no need"), tools=[WEATHER], tool_choice=choice)
    assert final["tool_choice"] == choice


async def test_minimal_tool_is_echoed_with_all_members(client, stream):
    final = await client.complete(stream, input="hi", tools=[{"type": "function", "name": "ping"}])
    (tool,) = final["tools"]
    assert set(tool) == {"type", "name", "description", "parameters", "strict"}
    assert (tool["name"], tool["description"], tool["parameters"]) == ("ping", None, None)


async def test_model_sampling_defaults_are_applied_and_echoed(client, stream):
    final = await client.complete(stream, model="scripted-text", input="hi")
    assert (final["temperature"], final["top_p"]) == (0.25, 0.5)
    turn = await client.describe_turn(stream, model="scripted-text", input="hi", temperature=1.5)
    assert (turn["temperature"], turn["top_p"]) == (1.5, 0.5)


async def test_request_without_model_uses_first_model(client, stream):
    assert (await client.complete(stream, input="hi", model=None))["model"] == "scripted"


async def test_json_schema_format_is_echoed_without_schema(client, stream):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text_format = {"type": "json_schema", "name": "thing", "description": "A thing.", "schema": schema, "strict": True}
    final = await client.complete(stream, input=script('{"a": 1}'), text={"format": text_format})
    assert final["text"] == {"format": {**text_format, "schema": None}}


async def test_verbosity_is_echoed_only_if_sent(client, stream):
    # A server may reject verbosity, but must not echo a value that it ignores.
    final = await client.complete(
        stream, input=script("{}"), text={"format": {"type": "json_object"}, "verbosity": None}
    )
    assert final["text"] == {"format": {"type": "json_object"}}


@pytest.mark.parametrize("format", [{"type": "json_schema"}, {"type": "json_schema", "name": "x", "schema": None}])
async def test_json_schema_format_without_schema_means_any_object(client, stream, format):  # noqa: A002
    final = await client.complete(stream, input=script('{"any": ["thing"]}'), text={"format": format})
    assert output_text(final) == '{"any": ["thing"]}'


async def test_usage_is_complete_or_null(client, stream):
    usage_step = {"Usage": {"input_tokens": 7, "output_tokens": 5, "cached_tokens": 3, "reasoning_tokens": 2}}
    assert (await client.complete(stream, input=script("a", usage_step)))["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert (await client.complete(stream, input=script("a")))["usage"] is None


async def test_ids_are_made_by_server_and_unguessable(client):
    own_id = "resp_of_my_own"
    ids = []
    for _ in range(4):
        response = await client.create(input=script(*EVERYTHING), tools=TOOLS, id=own_id, response_id=own_id)
        ids += [response["id"], *(item["id"] for item in response["output"])]
        ids += [item["call_id"] for item in response["output"] if item.get("name") == "third"]
    assert len(set(ids)) == len(ids)
    for one_id in ids:
        assert re.fullmatch(r"[a-z]+_[A-Za-z0-9_-]{22,61}", one_id), one_id
        assert len(one_id) <= 64
    # 128 random bits: no two ids share a prefix, as ids from counters or clocks would.
    beginnings = [one_id.split("_", 1)[1][:8] for one_id in ids]
    assert len(set(beginnings)) == len(beginnings)


async def test_input_item_ids_are_made_by_server(client):
    own_id = {"role": "user", "id": "msg_of_my_own", "content": "hi"}
    final = await client.create(input=[own_id])
    (item,) = (await client.get(f"/responses/{final['id']}/input_items")).json()["data"]
    assert re.fullmatch(r"[a-z]+_[A-Za-z0-9_-]{22,61}", item["id"])


async def test_emitted_items_are_accepted_back_unchanged(client, stream):
    first = await client.complete(stream, input=script(*EVERYTHING), tools=TOOLS)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    history = [*first["output"], *outputs, {"role": "user", "content": "what did you see?"}]
    turn = await client.describe_turn(stream, input=history)
    # The server may assign new ids to items that the client sends back.
    for emitted, received in zip(first["output"], turn["items"], strict=False):
        assert {**received, "id": ""} == {**emitted, "id": ""}
    assert len(turn["items"]) == len(history)


async def test_incomplete_item_is_accepted_back(client, stream):
    cut = [{"ToolCall": {"name": "f", "arguments": '{"a'}}, {"Finish": {"reason": "max_output_tokens"}}]
    first = await client.complete(stream, input=script(*cut), tools=TOOLS)
    (call,) = first["output"]
    turn = await client.describe_turn(stream, input=[call, {"role": "user", "content": "go on"}])
    assert {**turn["items"][0], "id": call["id"]} == call


async def test_foreign_call_id_is_accepted_back(client, stream):
    call_id = "x" * 64
    first = await client.complete(stream, input=script({"ToolCall": {"name": "f", "call_id": call_id}}), tools=TOOLS)
    assert first["output"][0]["call_id"] == call_id
    answer = {"type": "function_call_output", "call_id": call_id, "output": "42"}
    turn = await client.describe_turn(
        stream, input=[answer, {"role": "user", "content": "?"}], previous_response_id=first["id"]
    )
    assert [item["type"] for item in turn["items"]] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


async def test_models_are_listed_and_retrieved(client):
    listed = (await client.get("/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [
        "scripted",
        "scripted-sync",
        "scripted-plain",
        "scripted-text",
        "scripted-stateless",
        "scripted-small",
        "qwen3:14b-q4_k_m",
        "acme/scripted",
    ]
    for model in listed["data"]:
        assert (model["object"], type(model["created"]), type(model["owned_by"])) == ("model", int, str)
        assert (await client.get(f"/models/{model['id']}")).json() == model
    assert (await client.get("/models/acme%2Fscripted")).json()["id"] == "acme/scripted"
    (await client.get("/models/no-such-model")).error(404, "model_not_found")
