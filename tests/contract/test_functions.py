"""Functions that the client runs: calls, tool choice, and outputs."""

from __future__ import annotations

import json

import pytest

from .client import call, functions, output_text, script
from .hosts import FASTEST
from .test_objects import WEATHER

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST
TOOLS = functions("f", "g", "h")
TRUNCATED = {"Finish": {"reason": "max_output_tokens"}}


def named(*names):
    return [{"type": "function", "name": name} for name in names]


def allowed(mode, *names):
    return {"type": "allowed_tools", "mode": mode, "tools": named(*names)}


def calls(response):
    items = [item for item in response["output"] if item["type"] == "function_call"]
    return [(item["name"], item["arguments"]) for item in items]


def results(response, *outputs):
    items = [item for item in response["output"] if item["type"] == "function_call"]
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": output}
        for item, output in zip(items, outputs, strict=True)
    ]


async def test_functions_reach_model_and_are_echoed_unchanged(client, stream, context):
    tools = [
        WEATHER,
        *functions("ping"),
        {"type": "test:add", "allowed_tools": ["add"]},
        *functions("pong", strict=False),
    ]
    turn = await client.describe_turn(stream, input="hi", tools=tools, **context)
    assert [tool["name"] for tool in turn["tools"]] == ["get_weather", "ping", "add", "pong"]
    assert turn["tools"][0] == WEATHER
    final = await client.complete(stream, input=script("hi"), tools=tools, **context)
    assert [final["tools"][0], final["tools"][2]] == [tools[0], tools[2]]
    blank = {"description": None, "parameters": None, "strict": None}
    assert [final["tools"][1], final["tools"][3]] == [{**blank, **tools[1]}, {**blank, **tools[3]}]


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_argument_deltas_keep_their_chunks(client, model):
    pieces = ['{"ci', 'ty": "Par', "is", '"}']
    steps = [call("f", pieces[0]), *({"ToolArguments": {"delta": piece}} for piece in pieces[1:])]
    async with client.stream(model=model, input=script(*steps), tools=TOOLS) as stream:
        final = await stream.rest()
        deltas = [event for event in stream.events if event["type"] == "response.function_call_arguments.delta"]
    assert [event["delta"] for event in deltas] == pieces
    assert calls(final) == [("f", "".join(pieces))]


async def test_call_without_arguments_has_empty_object(client, stream):
    final = await client.complete(stream, input=script(call("f"), call("g", " ")), tools=TOOLS)
    assert [json.loads(arguments) for _, arguments in calls(final)] == [{}, {}]


async def test_text_and_calls_keep_generation_order(client, stream, context):
    steps = ["Let me see.", call("f"), call("g"), "And now?", call("h")]
    final = await client.complete(stream, input=script(*steps), tools=TOOLS, **context)
    kinds = [item.get("name", item["type"]) for item in final["output"]]
    assert kinds == ["message", "f", "g", "message", "h"]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
async def test_outputs_are_paired_with_calls_in_any_order(client, stream, order):
    first = await client.complete(stream, input=script(call("f"), call("g"), call("h")), tools=TOOLS)
    outputs = results(first, "of f", "of g", "of h")
    ask = [*(outputs[place] for place in order), {"role": "user", "content": "?"}]
    turn = await client.describe_turn(stream, input=ask, previous_response_id=first["id"], tools=TOOLS)
    names = {item["id"]: item["function"]["name"] for item in turn["messages"][1]["tool_calls"]}
    answers = [message for message in turn["messages"] if message["role"] == "tool"]
    assert [f"of {names[answer['tool_call_id']]}" for answer in answers] == [answer["content"] for answer in answers]
    assert len(answers) == 3


async def test_previous_response_id_gives_same_context_as_full_input(client, stream):
    window, previous, ask = [], None, [{"role": "user", "content": script(call("f", {"n": 0}), call("g"))}]
    for turn in range(3):
        window += ask
        fields = {"tools": TOOLS, "input": ask, "previous_response_id": previous}
        stored = await client.complete(stream, **fields)
        window += stored["output"]
        ask = [*results(stored, f"f {turn}", f"g {turn}"), {"role": "user", "content": script(call("f"), call("g"))}]
        previous = stored["id"]
    ask[-1] = {"role": "user", "content": "Well?"}
    chained = await client.describe_turn(stream, input=ask, previous_response_id=previous, tools=TOOLS)
    sent = await client.describe_turn(stream, input=[*window, *ask], store=False, tools=TOOLS)
    assert sent["messages"] == chained["messages"]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "tool"] * 3 + ["user"]


@pytest.mark.parametrize("arguments", ["{", "not JSON", "[1]", '{"a": NaN}', "null"])
async def test_broken_arguments_are_passed_to_client_and_accepted_back(client, stream, arguments):
    first = await client.complete(stream, input=script(call("f", arguments)), tools=TOOLS)
    assert calls(first) == [("f", arguments)]
    ask = [*results(first, "these are broken"), {"role": "user", "content": "again"}]
    turn = await client.describe_turn(stream, input=ask, previous_response_id=first["id"])
    resent = await client.describe_turn(stream, input=[*first["output"], *ask], store=False)
    for messages in (turn["messages"][1:], resent["messages"]):
        assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


# Tool choice.

ALLOWED_CALLS = {
    "auto: call": ("auto", [call("f")]),
    "auto: text": ("auto", ["hi"]),
    "none: text": ("none", ["hi"]),
    "required: call": ("required", [call("g")]),
    "required: text and call": ("required", ["hi", call("g")]),
    "required: refusal": ("required", [{"Refusal": {"text": "No."}}]),
    "required: truncated before call": ("required", ["Let me", TRUNCATED]),
    "required: filtered": ("required", [{"Finish": {"reason": "content_filter"}}]),
    "named: its calls": (named("f")[0], [call("f"), call("f")]),
    "allowed: call": (allowed("auto", "f", "g"), [call("g")]),
    "allowed: text": (allowed("auto", "f"), ["hi"]),
    "allowed and required: call": (allowed("required", "f", "g"), [call("g")]),
    "allowed and none: text": (allowed("none", "f"), ["hi"]),
}


@pytest.mark.parametrize(("choice", "steps"), ALLOWED_CALLS.values(), ids=ALLOWED_CALLS)
async def test_allowed_call_is_emitted(client, stream, context, choice, steps):
    final = await client.complete(stream, input=script(*steps), tools=TOOLS, tool_choice=choice, **context)
    assert final["tool_choice"] == choice
    assert len(calls(final)) == sum("ToolCall" in step for step in steps)


DISALLOWED_CALLS = {
    "none: call": ("none", [call("f", {"city": "Paris"})]),
    "auto: unknown tool": ("auto", [call("x", {"city": "Paris"})]),
    "auto: disabled hosted tool": ("auto", [call("add", {"city": "Paris"})]),
    "named: other call": (named("f")[0], [call("g", {"city": "Paris"})]),
    "allowed: other call": (allowed("auto", "f"), [call("g", {"city": "Paris"})]),
    "allowed: allowed and other call": (allowed("auto", "f"), [call("f"), call("g", {"city": "Paris"})]),
    "allowed and none: call": (allowed("none", "f"), [call("f", {"city": "Paris"})]),
}


@pytest.mark.parametrize(("choice", "steps"), DISALLOWED_CALLS.values(), ids=DISALLOWED_CALLS)
async def test_disallowed_call_fails_response_and_is_not_shown(client, stream, context, choice, steps):
    fields = {"input": script("Look: ", *steps), "tools": TOOLS, "tool_choice": choice, **context}
    error = await client.expect_failure(stream, **fields)
    assert (error["type"], error["code"], error["param"]) == ("model_error", "tool_not_allowed", None)
    assert "Paris" not in str(error)
    if stream:
        async with client.stream(**fields) as streaming:
            final = await streaming.rest()
        assert output_text(final) == "Look: "
        assert [name for name, _ in calls(final)] == [step["ToolCall"]["name"] for step in steps[:-1]]
        assert b"Paris" not in b"".join(streaming.chunks)


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_tool_choice_is_enforced_for_synchronous_backend(client, control, name, stream, model):
    run = name()
    steps = [{"run": run}, "Look: ", call("g"), {"forever": "on and on ", "every": 0.01}]
    error = await client.expect_failure(
        stream, model=model, input=script(*steps), tools=TOOLS, tool_choice=named("f")[0]
    )
    assert error["code"] == "tool_not_allowed"
    await control.wait_for(run, "ended", within=1)


@pytest.mark.parametrize("choice", ["required", named("f")[0], allowed("required", "f", "g")])
@pytest.mark.parametrize("steps", [["hi"], [], [{"Reasoning": {"text": "hm"}}], ["hi", {"Finish": {}}]])
async def test_missing_required_call_fails_response(client, stream, choice, steps):
    error = await client.expect_failure(stream, input=script(*steps), tools=TOOLS, tool_choice=choice)
    assert (error["type"], error["code"], error["param"]) == ("model_error", "tool_call_missing", None)


OWN = [{"type": "custom", "name": "f"}]
UNKNOWN_CHOICES = {
    "unknown function": (named("x")[0], TOOLS, "tool_choice.name"),
    "unknown function in allowed tools": (allowed("auto", "f", "x"), TOOLS, "tool_choice.tools[1].name"),
    "disabled hosted tool": ({"type": "test:add"}, TOOLS, "tool_choice.type"),
    "disabled hosted tool in allowed tools": (
        {"type": "allowed_tools", "tools": [*named("f"), {"type": "test:add"}]},
        TOOLS,
        "tool_choice.tools[1].type",
    ),
    "hosted tool as a function": (named("add")[0], [{"type": "test:add"}], "tool_choice.name"),
    "required without tools": ("required", [], "tool_choice"),
    "required with unknown tools only": ("required", OWN, "tool_choice"),
    "unknown kind of client tool": (named("f")[0], OWN, "tool_choice.name"),
    "no name": ({"type": "function"}, TOOLS, "tool_choice.name"),
    "unknown type": ({"type": "web_search"}, TOOLS, "tool_choice"),
    "no type": ({"name": "f"}, TOOLS, "tool_choice"),
    "empty allowed tools": (allowed("auto"), TOOLS, "tool_choice.tools"),
    "unknown mode": (allowed("maybe", "f"), TOOLS, "tool_choice.mode"),
    "unknown string": ("any", TOOLS, "tool_choice"),
    "list": (["f"], TOOLS, "tool_choice"),
    "number": (1, TOOLS, "tool_choice"),
}


@pytest.mark.parametrize(("choice", "tools", "param"), UNKNOWN_CHOICES.values(), ids=UNKNOWN_CHOICES)
async def test_unknown_tool_choice_returns_400_with_param(client, stream, choice, tools, param):
    fields = {"input": script("hi"), "tools": tools, "tool_choice": choice}
    (await client.post(stream=stream, **fields)).error(400, "invalid_request", param)


async def test_empty_allowed_tools_still_shows_tools_to_model(client, stream, context):
    for choice in ("none", allowed("auto", "g")):
        turn = await client.describe_turn(stream, input="hi", tools=TOOLS, tool_choice=choice, **context)
        assert [tool["name"] for tool in turn["tools"]] == ["f", "g", "h"]
        assert turn["callable_tools"] == ([] if choice == "none" else ["g"])


@pytest.mark.parametrize("second", [functions("f"), [{"type": "test:add"}], functions("add")])
async def test_duplicate_tool_name_returns_400(client, stream, second):
    first = [{"type": "test:add"}, *functions("f")]
    (await client.post(stream=stream, input="hi", tools=[*first, *second])).error(400, param="tools[2]")


# Limits on calls.

MANY = [
    call("f", '{"a"', call_id="one"),
    call("g", '{"b"', call_id="two"),
    {"ToolArguments": {"delta": ": 2}", "call_id": "two"}},
    {"ToolArguments": {"delta": ": 1}", "call_id": "one"}},
    call("f", {"c": 3}),
    "Done.",
]


@pytest.mark.parametrize(
    ("limits", "remaining"),
    [
        ({}, 3),
        ({"parallel_tool_calls": False}, 1),
        ({"max_tool_calls": 1}, 1),
        ({"max_tool_calls": 2}, 2),
        ({"max_tool_calls": 9}, 3),
        ({"max_tool_calls": 2, "parallel_tool_calls": False}, 1),
    ],
)
async def test_calls_beyond_limit_are_suppressed(client, stream, context, limits, remaining):
    final = await client.complete(stream, input=script(*MANY), tools=TOOLS, **limits, **context)
    assert calls(final) == [("f", '{"a": 1}'), ("g", '{"b": 2}'), ("f", '{"c": 3}')][:remaining]
    assert output_text(final) == "Done."
    assert {name: final[name] for name in limits} == limits


# Strict functions.

STRICT = functions(
    "f",
    strict=True,
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "when": {"enum": ["now", "later"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)


@pytest.mark.parametrize(
    "arguments",
    ["", "{}", "{", "[]", "Atlantis", '{"city": 5}', '{"city": "Atlantis", "x": 1}', '{"city": "A", "when": "never"}'],
)
async def test_invalid_strict_arguments_fail_response(client, stream, arguments):
    steps = [call("f", {"city": "Oslo"}), call("f", arguments), call("f", {"city": "Oslo"})]
    error = await client.expect_failure(stream, input=script(*steps), tools=STRICT)
    assert (error["type"], error["code"]) == ("model_error", "invalid_tool_arguments")
    assert "Atlantis" not in error["message"]
    loose = [{**STRICT[0], "strict": False}]
    assert len(calls(await client.complete(stream, input=script(*steps), tools=loose))) == 3


async def test_valid_strict_arguments_are_unchanged(client, stream, context):
    arguments = '{"city":\n "\u00d6sl\u00f8", "when": "now"}'
    steps = [call("f", arguments[:9]), {"ToolArguments": {"delta": arguments[9:]}}]
    final = await client.complete(stream, input=script(*steps), tools=STRICT, **context)
    assert calls(final) == [("f", arguments)]
    bare = functions("f", strict=True)
    assert calls(await client.complete(stream, input=script(call("f", "[")), tools=bare)) == [("f", "[")]


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_truncated_strict_arguments_are_incomplete(client, stream, context, reason):
    steps = [call("f", '{"city": "Os'), {"Finish": {"reason": reason}}]
    final = await client.complete(stream, input=script(*steps), tools=STRICT, **context)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert final["output"][0]["status"] == "incomplete"


async def test_invalid_schema_is_refused_for_strict_functions_only(client, stream):
    for parameters in ({"type": "any"}, {"$ref": "https://example.org/schema"}, {"properties": [MARK]}):
        tools = [*TOOLS, *functions("z", strict=True, parameters=parameters)]
        reply = await client.post(stream=stream, input="hi", tools=tools)
        error = reply.error(400, "invalid_schema", "tools[3].parameters")
        assert MARK not in error["message"]
        await client.complete(stream, input="hi", tools=functions("z", parameters=parameters))


MARK = "Xyzzy-4711"
