"""The contract's rules "Input" and "Where real clients disagree": shapes are lenient, missing support is an error."""

from __future__ import annotations

import json

import pytest

from .client import script
from .hosts import FASTEST
from .test_objects import WEATHER

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST

MARK = "Xyzzy-4711"
"""A text that no error message contains."""

IMAGE_URL = "data:image/png;base64,iVBORw0KGgo="
ASK = {"role": "user", "content": "what do you see?"}


async def test_string_and_list_input_are_equivalent(client, stream):
    shapes = [
        "hello",
        [{"role": "user", "content": "hello"}],
        [{"type": "message", "role": "user", "content": "hello"}],
        [{"type": None, "role": "user", "content": "hello"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        [{"type": "message", "role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [{"type": "message", "role": "user", "id": "msg_mine", "status": "completed", "content": "hello"}],
        [{"type": "message", "role": "user", "id": None, "status": None, "phase": None, "content": "hello"}],
    ]
    for shape in shapes:
        turn = await client.describe_turn(stream, input=shape)
        assert turn["messages"] == [{"role": "user", "content": "hello"}], shape


async def test_every_role_is_accepted(client, stream):
    roles = ["system", "developer", "user", "assistant", "user"]
    turn = await client.describe_turn(stream, input=[{"role": role, "content": f"I am {role}"} for role in roles])
    assert [item["role"] for item in turn["items"]] == roles
    assert [message["content"] for message in turn["messages"]] == [f"I am {role}" for role in roles]


async def test_assistant_messages_of_other_servers_are_accepted(client, stream):
    parts = {"type": "output_text", "text": "hi", "annotations": None, "logprobs": None}
    shapes = [
        {"role": "assistant", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_0",
            "status": "completed",
            "phase": None,
            "content": [parts],
        },
        {"role": "assistant", "phase": "commentary", "content": "hi"},
        {"role": "assistant", "status": "incomplete", "content": "hi"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "hi"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hi", "annotations": [{"type": "file_path"}]}],
        },
        {"role": "assistant", "content": "hi", "unknown": {"member": 1}},
    ]
    for shape in shapes:
        turn = await client.describe_turn(stream, input=[shape, ASK])
        assert turn["messages"][0] == {"role": "assistant", "content": "hi"}, shape


async def test_final_assistant_message_and_empty_messages_are_accepted(client, stream):
    turn = await client.describe_turn(
        stream, input=[{"role": "user", "content": ""}, ASK, {"role": "assistant", "content": []}]
    )
    assert len(turn["items"]) == 3


@pytest.mark.parametrize(
    "reasoning",
    [
        {"type": "reasoning", "summary": []},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None, "status": None},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "summary": None, "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "sealed elsewhere"},
    ],
)
async def test_orphan_empty_and_encrypted_reasoning_is_accepted(client, stream, reasoning):
    turn = await client.describe_turn(stream, input=[ASK, reasoning])
    assert [item["type"] for item in turn["items"]] == ["message", "reasoning"]


async def test_calls_and_outputs_pair_by_call_id_in_any_order(client, stream):
    def call(call_id):
        return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}

    def output(call_id):
        return {"type": "function_call_output", "call_id": call_id, "output": f"of {call_id}"}

    orders = [
        [call("a"), output("a"), call("b"), output("b")],
        [call("a"), call("b"), output("b"), output("a")],
        [call("a"), call("b"), {"role": "assistant", "content": "wait"}, output("a"), output("b")],
    ]
    for order in orders:
        turn = await client.describe_turn(stream, input=[*order, ASK])
        pairs = [(item.get("call_id"), item.get("output")) for item in turn["items"]]
        assert pairs == [(item.get("call_id"), item.get("output")) for item in [*order, ASK]]


@pytest.mark.parametrize("arguments", ["", "{", "not JSON", "[]", '{"a": NaN}'])
async def test_empty_and_broken_arguments_in_history_are_accepted(client, stream, arguments):
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments, "status": "incomplete"}
    output = {"type": "function_call_output", "call_id": "a", "output": "broken"}
    turn = await client.describe_turn(stream, input=[call, output, ASK])
    assert turn["items"][0]["arguments"] == arguments


async def test_function_output_may_be_list_of_parts(client, stream):
    parts = [{"type": "input_text", "text": "see "}, {"type": "input_text", "text": "this"}]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    turn = await client.describe_turn(
        stream, input=[call, {"type": "function_call_output", "call_id": "a", "output": parts}, ASK]
    )
    assert turn["items"][1]["output"] == parts
    assert turn["messages"][1] == {"role": "tool", "tool_call_id": "a", "content": "see this"}


async def test_output_without_call_returns_400_with_param(client, stream):
    orphan = {"type": "function_call_output", "call_id": "call_lost", "output": MARK}
    error = (await client.post(stream=stream, input=[ASK, orphan])).error(400)
    assert error["param"] == "input[1].call_id"
    assert "call_lost" in error["message"]
    assert MARK not in error["message"]


async def test_images_and_files_reach_vision_model(client, stream):
    parts = [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": IMAGE_URL, "detail": None},
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="},
    ]
    turn = await client.describe_turn(stream, input=[{"role": "user", "content": parts}])
    assert [part["type"] for part in turn["items"][0]["content"]] == ["input_text", "input_image", "input_file"]
    assert turn["items"][0]["content"][1]["image_url"] == IMAGE_URL


async def test_foreign_extension_items_are_kept_unchanged(client, stream):
    item = {"type": "acme:search", "id": "s_1", "status": "done", "query": {"deep": [1, None]}}
    turn = await client.describe_turn(stream, input=[item, ASK])
    assert {**turn["items"][0], "id": "s_1"} == item


async def test_item_reference_resolves_to_output_item(client, stream):
    first = await client.create(input=script("remember me"))
    (item,) = first["output"]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        turn = await client.describe_turn(stream, input=[reference, ASK])
        assert turn["items"][0]["content"][0]["text"] == "remember me"
        assert turn["items"][0]["id"] == item["id"]


async def test_item_reference_resolves_to_input_item(client, stream):
    first = await client.create(input="an input to remember")
    page = (await client.get(f"/responses/{first['id']}/input_items")).json()
    turn = await client.describe_turn(stream, input=[{"type": "item_reference", "id": page["data"][0]["id"]}, ASK])
    assert turn["items"][0]["content"][0]["text"] == "an input to remember"


async def test_unknown_item_reference_returns_400_with_param(client, stream):
    reply = await client.post(stream=stream, input=[ASK, {"type": "item_reference", "id": "msg_of_nobody"}])
    error = reply.error(400)
    assert error["param"].startswith("input[1]")


async def test_duplicate_item_reaches_model_once(client, stream):
    first = await client.create(input=script("said once"))
    (item,) = first["output"]
    twice = [item, {"type": "item_reference", "id": item["id"]}, ASK]
    turn = await client.describe_turn(stream, input=twice, previous_response_id=first["id"])
    assert [entry["id"] for entry in turn["items"]].count(item["id"]) == 1
    assert len(turn["items"]) == 3


async def test_item_and_its_reference_reach_model_once(client, stream):
    first = await client.create(input=script("said once"))
    (item,) = first["output"]
    turn = await client.describe_turn(stream, input=[item, {"type": "item_reference", "id": item["id"]}, ASK])
    assert [entry["role"] for entry in turn["items"]] == ["assistant", "user"]


async def test_developer_message_of_20000_characters_is_accepted(client, stream):
    turn = await client.describe_turn(
        stream, input=[{"role": "developer", "content": "x" * 20_000}, {"role": "user", "content": "?"}]
    )
    assert len(turn["messages"][0]["content"]) == 20_000


async def test_unknown_fields_are_ignored(client, stream):
    turn = await client.describe_turn(
        stream,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "hi", "cache": 1}], "extra": True}],
        tools=[{**WEATHER, "vendor": {}}],
        client_metadata={"session": "1"},
        conversation_hint=None,
        n=1,
        logit_bias={},
        text={"format": {"type": "text", "style": "plain"}},
    )
    assert turn["messages"] == [{"role": "user", "content": "hi"}]


async def test_null_equals_missing_field(client, stream):
    names = """
        previous_response_id instructions include tools tool_choice parallel_tool_calls text max_tool_calls
        temperature top_p presence_penalty frequency_penalty max_output_tokens top_logprobs reasoning truncation
        metadata stream_options background store service_tier safety_identifier prompt_cache_key user
    """
    nulls = dict.fromkeys(names.split())
    plain, nulled = [await client.complete(stream, input=script("same"), **fields) for fields in ({}, nulls)]
    own = ("id", "created_at", "completed_at", "output")
    assert {key: plain[key] for key in plain if key not in own} == {
        key: nulled[key] for key in nulled if key not in own
    }
    assert nulled["store"] is True


async def test_include_encrypted_reasoning_is_accepted(client, stream):
    final = await client.complete(stream, input="hi", include=["reasoning.encrypted_content"], store=False)
    assert final["status"] == "completed"


async def test_unknown_client_tools_are_left_out_of_prompt_and_echo(client, stream):
    tools = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "more", "tools": []},
        {"type": "local_shell"},
        WEATHER,
    ]
    final = await client.complete(stream, input="hi", tools=tools)
    assert [tool["name"] for tool in final["tools"]] == ["get_weather"]
    turn = await client.describe_turn(stream, input="hi", tools=tools)
    assert [tool["name"] for tool in turn["tools"]] == ["get_weather"]


@pytest.mark.parametrize(
    "kind", ["web_search", "web_search_preview", "file_search", "mcp", "code_interpreter", "acme:search"]
)
async def test_unavailable_server_tool_returns_400(client, stream, kind):
    error = (await client.post(stream=stream, input="hi", tools=[WEATHER, {"type": kind}])).error(
        400, "unsupported_parameter"
    )
    assert error["param"].startswith("tools[1]")


REFUSED = {
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE_URL}]}]},
        "input[0]",
    ),
    "file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://example.org"}]}]},
        "input[0]",
    ),
    "tool": ({"tools": [WEATHER]}, "tools"),
    "format": ({"text": {"format": {"type": "json_object"}}}, "text"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include"),
    "top logprobs": ({"top_logprobs": 3}, "top_logprobs"),
    "reasoning effort": ({"reasoning": {"effort": "high"}}, "reasoning"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
async def test_unsupported_features_return_400(client, stream, fields, param):
    request = {"model": "scripted-text", "input": "hi", **fields}
    error = (await client.post(stream=stream, **request)).error(400, "unsupported_parameter")
    assert error["param"].startswith(param)
    assert (await client.post(**{**request, "model": "scripted"})).status == 200


async def test_unknown_model_returns_400_with_param(client, stream):
    reply = await client.post(stream=stream, model=f"no-{MARK}", input="hi")
    assert reply.error(400, "model_not_found", "model")["type"] == "invalid_request"
    assert MARK.encode() not in reply.body


WRONG_TYPES = {
    "model": 5,
    "input": 5,
    "input[0]": [[]],
    "input[0].role": [{"type": "message", "role": MARK, "content": "x"}],
    "instructions": [MARK],
    "stream": "true",
    "store": "no",
    "temperature": MARK,
    "top_p": 2,
    "presence_penalty": -3,
    "frequency_penalty": 3,
    "max_output_tokens": 1,
    "max_tool_calls": 0,
    "top_logprobs": 21,
    "tools": {"a": MARK},
    "tools[0]": [MARK],
    "tools[0].name": [{"type": "function", "name": f"{MARK} with spaces"}],
    "tools[0].parameters": [{"type": "function", "name": "f", "parameters": MARK}],
    "tool_choice": MARK,
    "parallel_tool_calls": MARK,
    "metadata": {MARK: 5},
    "text": MARK,
    "text.format": {"format": {"type": MARK}},
    "truncation": MARK,
    "reasoning": MARK,
    "reasoning.effort": {"effort": MARK},
    "include": [MARK],
    "previous_response_id": {MARK: MARK},
    "service_tier": MARK,
    "background": MARK,
    "safety_identifier": MARK * 10,
}


@pytest.mark.parametrize(("param", "value"), WRONG_TYPES.items(), ids=WRONG_TYPES)
async def test_wrong_type_returns_400_with_param_without_echo(client, param, value):
    field = param.split(".")[0].split("[")[0]
    reply = await client.post(**{"input": "hi", field: value})
    error = reply.error(400)
    assert error["type"] == "invalid_request"
    assert error["param"].startswith(param) or param.startswith(error["param"])
    assert MARK.encode() not in reply.body


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "-1e999", "12345678901234567890", "0.5"])
async def test_out_of_range_numbers_return_400(client, number):
    body = b'{"model": "scripted", "input": "hi", "max_output_tokens": %s}' % number.encode()
    (await client.request("POST", "/responses", body)).error(400)


async def test_empty_request_returns_400(client, stream):
    for fields in ({}, {"input": None}, {"input": []}):
        error = (await client.post(stream=stream, **fields)).error(400)
        assert error["param"] == "input"


LIMITS = {
    "16 pairs of metadata": (
        {"metadata": {str(i): "" for i in range(16)}},
        {"metadata": {str(i): "" for i in range(17)}},
    ),
    "64 characters in metadata key": ({"metadata": {"k" * 64: ""}}, {"metadata": {"k" * 65: ""}}),
    "512 characters in metadata value": ({"metadata": {"k": "v" * 512}}, {"metadata": {"k": "v" * 513}}),
    "512 characters, not bytes": ({"metadata": {"k": "\u00e9" * 512}}, {"metadata": {"k": "\U0001f600" * 513}}),
    "64 characters in tool name": (
        {"tools": [{"type": "function", "name": "a" * 64}]},
        {"tools": [{"type": "function", "name": "a" * 65}]},
    ),
    "characters of a tool name": (
        {"tools": [{"type": "function", "name": "aZ09_-"}]},
        {"tools": [{"type": "function", "name": "a.b"}]},
    ),
    "newline in tool name": (
        {"tools": [{"type": "function", "name": "a"}]},
        {"tools": [{"type": "function", "name": "a\n"}]},
    ),
    "temperature": ({"temperature": 2}, {"temperature": 2.001}),
    "zero temperature": ({"temperature": 0}, {"temperature": -0.001}),
    "top_p": ({"top_p": 1}, {"top_p": 1.001}),
    "16 tokens": ({"max_output_tokens": 16}, {"max_output_tokens": 15}),
    "20 logprobs": ({"top_logprobs": 20}, {"top_logprobs": 21}),
    "64 characters of prompt_cache_key": ({"prompt_cache_key": "a" * 64}, {"prompt_cache_key": "a" * 65}),
    "64 characters of a call_id": (
        {"input": [{"type": "function_call", "call_id": "a" * 64, "name": "f", "arguments": ""}]},
        {"input": [{"type": "function_call", "call_id": "a" * 65, "name": "f", "arguments": ""}]},
    ),
}


@pytest.mark.parametrize(("edge", "beyond"), LIMITS.values(), ids=LIMITS)
async def test_limits_are_inclusive(client, edge, beyond):
    (field,) = edge
    final = await client.create(**{"input": "hi", **edge})
    assert field not in final or field == "tools" or final[field] == edge[field]
    assert (await client.post(**{"input": "hi", **beyond})).error(400)["param"].startswith(field)


async def test_text_limit_is_10485760_characters(client):
    edge = {"model": "scripted", "store": False, "input": "x" * 10_485_760}
    assert json.loads((await client.create(**edge))["output"][0]["content"][0]["text"]) == 10_485_760
    error = (await client.post(**{**edge, "input": edge["input"] + "x"})).error(400)
    assert error["param"] == "input"
