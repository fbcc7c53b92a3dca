"""The rules of "Input" and of "Where real clients disagree": lenient on shape, loud on support."""

from __future__ import annotations

import json

import pytest

from .client import script
from .hosts import ANY
from .test_objects import WEATHER

pytestmark = pytest.mark.anyio

SERVED_BY = ANY

MARK = "Xyzzy-4711"
"""Something that no error message says by itself."""

PICTURE = "data:image/png;base64,iVBORw0KGgo="
ASK = {"role": "user", "content": "what do you see?"}


async def test_a_string_and_a_list_say_the_same(client, stream):
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
        told = await client.told(stream, input=shape)
        assert told["messages"] == [{"role": "user", "content": "hello"}], shape


async def test_every_role_is_understood(client, stream):
    roles = ["system", "developer", "user", "assistant", "user"]
    told = await client.told(stream, input=[{"role": role, "content": f"I am {role}"} for role in roles])
    assert [item["role"] for item in told["items"]] == roles
    assert [message["content"] for message in told["messages"]] == [f"I am {role}" for role in roles]


async def test_assistant_messages_of_every_maker_are_understood(client, stream):
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
        told = await client.told(stream, input=[shape, ASK])
        assert told["messages"][0] == {"role": "assistant", "content": "hi"}, shape


async def test_a_conversation_may_end_with_the_assistant_or_hold_empty_messages(client, stream):
    told = await client.told(stream, input=[{"role": "user", "content": ""}, ASK, {"role": "assistant", "content": []}])
    assert len(told["items"]) == 3


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
async def test_reasoning_is_accepted_alone_empty_or_sealed(client, stream, reasoning):
    told = await client.told(stream, input=[ASK, reasoning])
    assert [item["type"] for item in told["items"]] == ["message", "reasoning"]


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
        told = await client.told(stream, input=[*order, ASK])
        said = [(item.get("call_id"), item.get("output")) for item in told["items"]]
        assert said == [(item.get("call_id"), item.get("output")) for item in [*order, ASK]]


@pytest.mark.parametrize("arguments", ["", "{", "not JSON", "[]", '{"a": NaN}'])
async def test_arguments_in_history_may_be_empty_or_broken(client, stream, arguments):
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments, "status": "incomplete"}
    output = {"type": "function_call_output", "call_id": "a", "output": "broken"}
    told = await client.told(stream, input=[call, output, ASK])
    assert told["items"][0]["arguments"] == arguments


async def test_an_output_may_be_a_list_of_parts(client, stream):
    parts = [{"type": "input_text", "text": "see "}, {"type": "input_text", "text": "this"}]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    told = await client.told(
        stream, input=[call, {"type": "function_call_output", "call_id": "a", "output": parts}, ASK]
    )
    assert told["items"][1]["output"] == parts
    assert told["messages"][1] == {"role": "tool", "tool_call_id": "a", "content": "see this"}


async def test_an_output_without_its_call_is_a_400_that_names_it(client, stream):
    orphan = {"type": "function_call_output", "call_id": "call_lost", "output": MARK}
    error = (await client.post(stream=stream, input=[ASK, orphan])).error(400)
    assert "call_lost" in error["message"]
    assert error["param"] == "input[1].call_id"
    assert MARK not in error["message"]


async def test_pictures_and_files_reach_a_model_that_can_see(client, stream):
    parts = [
        {"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": PICTURE, "detail": None},
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="},
    ]
    told = await client.told(stream, input=[{"role": "user", "content": parts}])
    assert [part["type"] for part in told["items"][0]["content"]] == ["input_text", "input_image", "input_file"]
    assert told["items"][0]["content"][1]["image_url"] == PICTURE


async def test_extension_items_from_elsewhere_are_kept_whole(client, stream):
    item = {"type": "acme:search", "id": "s_1", "status": "done", "query": {"deep": [1, None]}}
    told = await client.told(stream, input=[item, ASK])
    assert {**told["items"][0], "id": "s_1"} == item


async def test_an_item_reference_stands_for_the_item(client, stream):
    first = await client.create(input=script("remember me"))
    (item,) = first["output"]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        told = await client.told(stream, input=[reference, ASK])
        assert told["items"][0]["content"][0]["text"] == "remember me"
        assert told["items"][0]["id"] == item["id"]


async def test_an_input_item_can_be_referred_to_as_well(client, stream):
    first = await client.create(input="an input to remember")
    page = (await client.get(f"/responses/{first['id']}/input_items")).json()
    told = await client.told(stream, input=[{"type": "item_reference", "id": page["data"][0]["id"]}, ASK])
    assert told["items"][0]["content"][0]["text"] == "an input to remember"


async def test_an_unknown_item_reference_is_a_400_with_its_place(client, stream):
    reply = await client.post(stream=stream, input=[ASK, {"type": "item_reference", "id": "msg_of_nobody"}])
    error = reply.error(400)
    assert error["param"].startswith("input[1]")


async def test_an_item_that_comes_twice_reaches_the_model_once(client, stream):
    first = await client.create(input=script("said once"))
    (item,) = first["output"]
    twice = [item, {"type": "item_reference", "id": item["id"]}, ASK]
    told = await client.told(stream, input=twice, previous_response_id=first["id"])
    assert [entry["id"] for entry in told["items"]].count(item["id"]) == 1
    assert len(told["items"]) == 3


async def test_an_item_and_a_reference_to_it_reach_the_model_once(client, stream):
    first = await client.create(input=script("said once"))
    (item,) = first["output"]
    told = await client.told(stream, input=[item, {"type": "item_reference", "id": item["id"]}, ASK])
    assert [entry["role"] for entry in told["items"]] == ["assistant", "user"]


async def test_a_developer_message_of_20000_characters_is_nothing_special(client, stream):
    told = await client.told(
        stream, input=[{"role": "developer", "content": "x" * 20_000}, {"role": "user", "content": "?"}]
    )
    assert len(told["messages"][0]["content"]) == 20_000


async def test_unknown_fields_are_ignored_everywhere(client, stream):
    told = await client.told(
        stream,
        input=[{"role": "user", "content": [{"type": "input_text", "text": "hi", "cache": 1}], "extra": True}],
        tools=[{**WEATHER, "vendor": {}}],
        client_metadata={"session": "1"},
        conversation_hint=None,
        n=1,
        logit_bias={},
        text={"format": {"type": "text", "style": "plain"}},
    )
    assert told["messages"] == [{"role": "user", "content": "hi"}]


async def test_null_says_the_same_as_leaving_a_field_out(client, stream):
    names = """
        previous_response_id instructions include tools tool_choice parallel_tool_calls text max_tool_calls
        temperature top_p presence_penalty frequency_penalty max_output_tokens top_logprobs reasoning truncation
        metadata stream_options background store service_tier safety_identifier prompt_cache_key user
    """
    nulls = dict.fromkeys(names.split())
    plain, nulled = [await client.made(stream, input=script("same"), **fields) for fields in ({}, nulls)]
    own = ("id", "created_at", "completed_at", "output")
    assert {key: plain[key] for key in plain if key not in own} == {
        key: nulled[key] for key in nulled if key not in own
    }
    assert nulled["store"] is True


async def test_a_wish_for_sealed_reasoning_is_no_fault(client, stream):
    final = await client.made(stream, input="hi", include=["reasoning.encrypted_content"], store=False)
    assert final["status"] == "completed"


async def test_tools_that_the_client_runs_itself_are_left_out_of_prompt_and_echo(client, stream):
    tools = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "more", "tools": []},
        {"type": "local_shell"},
        WEATHER,
    ]
    final = await client.made(stream, input="hi", tools=tools)
    assert [tool["name"] for tool in final["tools"]] == ["get_weather"]
    told = await client.told(stream, input="hi", tools=tools)
    assert [tool["name"] for tool in told["tools"]] == ["get_weather"]


@pytest.mark.parametrize(
    "kind", ["web_search", "web_search_preview", "file_search", "mcp", "code_interpreter", "acme:search"]
)
async def test_a_tool_that_the_server_would_have_to_run_is_refused(client, stream, kind):
    error = (await client.post(stream=stream, input="hi", tools=[WEATHER, {"type": kind}])).error(
        400, "unsupported_parameter"
    )
    assert error["param"].startswith("tools[1]")


REFUSED = {
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}]},
        "input[0]",
    ),
    "a file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://example.org"}]}]},
        "input[0]",
    ),
    "a tool": ({"tools": [WEATHER]}, "tools"),
    "a format": ({"text": {"format": {"type": "json_object"}}}, "text"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include"),
    "top logprobs": ({"top_logprobs": 3}, "top_logprobs"),
    "thinking harder": ({"reasoning": {"effort": "high"}}, "reasoning"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
async def test_what_a_model_cannot_do_is_refused_and_not_ignored(client, stream, fields, param):
    request = {"model": "puppet-text", "input": "hi", **fields}
    error = (await client.post(stream=stream, **request)).error(400, "unsupported_parameter")
    assert error["param"].startswith(param)
    assert (await client.post(**{**request, "model": "puppet"})).status == 200


async def test_an_unknown_model_is_a_400_that_names_the_field(client, stream):
    reply = await client.post(stream=stream, model=f"no-{MARK}", input="hi")
    assert reply.error(400, "model_not_found", "model")["type"] == "invalid_request"
    assert MARK.encode() not in reply.body


WRONG = {
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


@pytest.mark.parametrize(("param", "value"), WRONG.items(), ids=WRONG)
async def test_a_field_of_the_wrong_kind_is_a_400_that_names_it_and_repeats_nothing(client, param, value):
    field = param.split(".")[0].split("[")[0]
    reply = await client.post(**{"input": "hi", field: value})
    error = reply.error(400)
    assert error["type"] == "invalid_request"
    assert error["param"].startswith(param) or param.startswith(error["param"])
    assert MARK.encode() not in reply.body


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999", "-1e999", "12345678901234567890", "0.5"])
async def test_numbers_beyond_measure_are_refused(client, number):
    body = b'{"model": "puppet", "input": "hi", "max_output_tokens": %s}' % number.encode()
    (await client.request("POST", "/responses", body)).error(400)


async def test_a_request_for_nothing_is_refused(client, stream):
    for fields in ({}, {"input": None}, {"input": []}):
        error = (await client.post(stream=stream, **fields)).error(400)
        assert error["param"] == "input"


LIMITS = {
    "16 pairs of metadata": (
        {"metadata": {str(i): "" for i in range(16)}},
        {"metadata": {str(i): "" for i in range(17)}},
    ),
    "64 characters a metadata key": ({"metadata": {"k" * 64: ""}}, {"metadata": {"k" * 65: ""}}),
    "512 characters a metadata value": ({"metadata": {"k": "v" * 512}}, {"metadata": {"k": "v" * 513}}),
    "512 characters, not bytes": ({"metadata": {"k": "\u00e9" * 512}}, {"metadata": {"k": "\U0001f600" * 513}}),
    "64 characters a tool name": (
        {"tools": [{"type": "function", "name": "a" * 64}]},
        {"tools": [{"type": "function", "name": "a" * 65}]},
    ),
    "characters of a tool name": (
        {"tools": [{"type": "function", "name": "aZ09_-"}]},
        {"tools": [{"type": "function", "name": "a.b"}]},
    ),
    "an end of line in a tool name": (
        {"tools": [{"type": "function", "name": "a"}]},
        {"tools": [{"type": "function", "name": "a\n"}]},
    ),
    "temperature": ({"temperature": 2}, {"temperature": 2.001}),
    "no temperature": ({"temperature": 0}, {"temperature": -0.001}),
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
async def test_the_edge_is_accepted_and_one_beyond_is_refused(client, edge, beyond):
    (field,) = edge
    final = await client.create(**{"input": "hi", **edge})
    assert field not in final or field == "tools" or final[field] == edge[field]
    assert (await client.post(**{"input": "hi", **beyond})).error(400)["param"].startswith(field)


async def test_a_text_of_10485760_characters_is_accepted_and_one_more_is_refused(client):
    edge = {"model": "puppet", "store": False, "input": "x" * 10_485_760}
    assert json.loads((await client.create(**edge))["output"][0]["content"][0]["text"]) == 10_485_760
    error = (await client.post(**{**edge, "input": edge["input"] + "x"})).error(400)
    assert error["param"] == "input"
