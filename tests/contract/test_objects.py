"""The rules of "Objects": complete, true, and accepted back."""

from __future__ import annotations

import re
import time

import pytest

from .client import output_text, script
from .hosts import FARTHEST, FLASK_VIEW
from .test_events import EVERYTHING, TOOLS

pytestmark = pytest.mark.anyio

SERVED_BY = [*FARTHEST, FLASK_VIEW]

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}


async def test_a_request_that_says_nothing_is_answered_with_the_defaults(client, stream):
    before = int(time.time())
    final = await client.made(stream, input="hi")
    expected = {
        "object": "response",
        "status": "completed",
        "model": "puppet",
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
    assert before <= final["created_at"] <= final["completed_at"] <= time.time()


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


async def test_what_is_echoed_is_what_was_asked_for(client, stream):
    moves = [{"ToolCall": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]
    final = await client.made(stream, input=script(*moves), **ECHOED)
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
    final = await client.made(stream, input=script("no need"), tools=[WEATHER], tool_choice=choice)
    assert final["tool_choice"] == choice


async def test_a_tool_with_a_name_alone_is_echoed_with_all_members(client, stream):
    final = await client.made(stream, input="hi", tools=[{"type": "function", "name": "ping"}])
    (tool,) = final["tools"]
    assert set(tool) == {"type", "name", "description", "parameters", "strict"}
    assert (tool["name"], tool["description"], tool["parameters"]) == ("ping", None, None)


async def test_a_models_own_sampling_values_are_applied_and_echoed(client, stream):
    final = await client.made(stream, model="puppet-text", input="hi")
    assert (final["temperature"], final["top_p"]) == (0.25, 0.5)
    told = await client.told(stream, model="puppet-text", input="hi", temperature=1.5)
    assert (told["temperature"], told["top_p"]) == (1.5, 0.5)


async def test_a_request_without_a_model_goes_to_the_first_one(client, stream):
    assert (await client.made(stream, input="hi", model=None))["model"] == "puppet"


async def test_a_json_schema_format_is_echoed_without_its_schema(client, stream):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "thing", "description": "A thing.", "schema": schema, "strict": True}
    final = await client.made(stream, input=script('{"a": 1}'), text={"format": wanted})
    assert final["text"] == {"format": {**wanted, "schema": None}}


async def test_verbosity_is_echoed_where_it_was_said_and_left_out_where_it_was_not(client, stream):
    # Whether a model heeds it is its own affair, so a server may also refuse; it may not pretend.
    final = await client.made(stream, input=script("{}"), text={"format": {"type": "json_object"}, "verbosity": None})
    assert final["text"] == {"format": {"type": "json_object"}}


@pytest.mark.parametrize("format", [{"type": "json_schema"}, {"type": "json_schema", "name": "x", "schema": None}])
async def test_a_json_schema_format_without_a_schema_means_any_object(client, stream, format):  # noqa: A002
    final = await client.made(stream, input=script('{"any": ["thing"]}'), text={"format": format})
    assert output_text(final) == '{"any": ["thing"]}'


async def test_usage_is_complete_or_null(client, stream):
    said = {"Usage": {"input_tokens": 7, "output_tokens": 5, "cached_tokens": 3, "reasoning_tokens": 2}}
    assert (await client.made(stream, input=script("a", said)))["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert (await client.made(stream, input=script("a")))["usage"] is None


async def test_ids_are_made_by_the_server_and_cannot_be_guessed(client):
    mine = "resp_of_my_own"
    ids = []
    for _ in range(4):
        response = await client.create(input=script(*EVERYTHING), tools=TOOLS, id=mine, response_id=mine)
        ids += [response["id"], *(item["id"] for item in response["output"])]
        ids += [item["call_id"] for item in response["output"] if item.get("name") == "third"]
    assert len(set(ids)) == len(ids)
    for made in ids:
        assert re.fullmatch(r"[a-z]+_[A-Za-z0-9_-]{22,61}", made), made
        assert len(made) <= 64
    # 128 bits drawn anew each time: no two share a beginning, which counters and clocks would.
    beginnings = [made.split("_", 1)[1][:8] for made in ids]
    assert len(set(beginnings)) == len(beginnings)


async def test_ids_of_input_items_are_the_servers_too(client):
    mine = {"role": "user", "id": "msg_of_my_own", "content": "hi"}
    final = await client.create(input=[mine])
    (item,) = (await client.get(f"/responses/{final['id']}/input_items")).json()["data"]
    assert re.fullmatch(r"[a-z]+_[A-Za-z0-9_-]{22,61}", item["id"])


async def test_every_item_that_is_emitted_is_accepted_back_unchanged(client, stream):
    first = await client.made(stream, input=script(*EVERYTHING), tools=TOOLS)
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    history = [*first["output"], *outputs, {"role": "user", "content": "what did you see?"}]
    told = await client.told(stream, input=history)
    # Ids are the server's to make: it may give what comes back a new one.
    for emitted, given in zip(first["output"], told["items"], strict=False):
        assert {**given, "id": ""} == {**emitted, "id": ""}
    assert len(told["items"]) == len(history)


async def test_a_cut_item_is_accepted_back_too(client, stream):
    cut = [{"ToolCall": {"name": "f", "arguments": '{"a'}}, {"Finish": {"reason": "max_output_tokens"}}]
    first = await client.made(stream, input=script(*cut), tools=TOOLS)
    (call,) = first["output"]
    told = await client.told(stream, input=[call, {"role": "user", "content": "go on"}])
    assert {**told["items"][0], "id": call["id"]} == call


async def test_a_call_id_from_elsewhere_is_accepted_back(client, stream):
    call_id = "x" * 64
    first = await client.made(stream, input=script({"ToolCall": {"name": "f", "call_id": call_id}}), tools=TOOLS)
    assert first["output"][0]["call_id"] == call_id
    answer = {"type": "function_call_output", "call_id": call_id, "output": "42"}
    told = await client.told(stream, input=[answer, {"role": "user", "content": "?"}], previous_response_id=first["id"])
    assert [item["type"] for item in told["items"]] == [
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


async def test_the_models_are_listed_and_found(client):
    listed = (await client.get("/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [
        "puppet",
        "puppet-sync",
        "puppet-plain",
        "puppet-text",
        "puppet-forgetful",
        "puppet-small",
        "qwen3:14b-q4_k_m",
        "acme/puppet",
    ]
    for model in listed["data"]:
        assert (model["object"], type(model["created"]), type(model["owned_by"])) == ("model", int, str)
        assert (await client.get(f"/models/{model['id']}")).json() == model
    assert (await client.get("/models/acme%2Fpuppet")).json()["id"] == "acme/puppet"
    (await client.get("/models/no-such-model")).error(404, "model_not_found")
