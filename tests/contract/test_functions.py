"""Functions that the client runs: what is called, what may be called, and what goes back."""

from __future__ import annotations

import json

import pytest

from .client import call, functions, output_text, script
from .hosts import ANY
from .test_objects import WEATHER

pytestmark = pytest.mark.anyio

SERVED_BY = ANY
TOOLS = functions("f", "g", "h")
CUT = {"Finish": {"reason": "max_output_tokens"}}


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


async def test_functions_are_shown_to_the_model_and_echoed_as_they_were_defined(client, stream, context):
    tools = [
        WEATHER,
        *functions("ping"),
        {"type": "test:add", "allowed_tools": ["add"]},
        *functions("pong", strict=False),
    ]
    told = await client.told(stream, input="hi", tools=tools, **context)
    assert [tool["name"] for tool in told["tools"]] == ["get_weather", "ping", "add", "pong"]
    assert told["tools"][0] == WEATHER
    final = await client.made(stream, input=script("hi"), tools=tools, **context)
    assert [final["tools"][0], final["tools"][2]] == [tools[0], tools[2]]
    blank = {"description": None, "parameters": None, "strict": None}
    assert [final["tools"][1], final["tools"][3]] == [{**blank, **tools[1]}, {**blank, **tools[3]}]


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_arguments_leave_in_the_pieces_in_which_they_were_made(client, model):
    pieces = ['{"ci', 'ty": "Par', "is", '"}']
    moves = [call("f", pieces[0]), *({"ToolArguments": {"delta": piece}} for piece in pieces[1:])]
    async with client.stream(model=model, input=script(*moves), tools=TOOLS) as stream:
        final = await stream.rest()
        deltas = [event for event in stream.events if event["type"] == "response.function_call_arguments.delta"]
    assert [event["delta"] for event in deltas] == pieces
    assert calls(final) == [("f", "".join(pieces))]


async def test_a_call_without_arguments_has_an_empty_object(client, stream):
    final = await client.made(stream, input=script(call("f"), call("g", " ")), tools=TOOLS)
    assert [json.loads(arguments) for _, arguments in calls(final)] == [{}, {}]


async def test_text_and_calls_stand_in_the_order_in_which_they_were_made(client, stream, context):
    moves = ["Let me see.", call("f"), call("g"), "And now?", call("h")]
    final = await client.made(stream, input=script(*moves), tools=TOOLS, **context)
    kinds = [item.get("name", item["type"]) for item in final["output"]]
    assert kinds == ["message", "f", "g", "message", "h"]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
async def test_results_find_their_calls_in_whatever_order_they_come(client, stream, order):
    first = await client.made(stream, input=script(call("f"), call("g"), call("h")), tools=TOOLS)
    outputs = results(first, "of f", "of g", "of h")
    ask = [*(outputs[place] for place in order), {"role": "user", "content": "?"}]
    told = await client.told(stream, input=ask, previous_response_id=first["id"], tools=TOOLS)
    names = {item["id"]: item["function"]["name"] for item in told["messages"][1]["tool_calls"]}
    answers = [message for message in told["messages"] if message["role"] == "tool"]
    assert [f"of {names[answer['tool_call_id']]}" for answer in answers] == [answer["content"] for answer in answers]
    assert len(answers) == 3


async def test_a_loop_by_previous_response_id_tells_the_model_what_one_that_sends_everything_does(client, stream):
    window, previous, ask = [], None, [{"role": "user", "content": script(call("f", {"n": 0}), call("g"))}]
    for turn in range(3):
        window += ask
        fields = {"tools": TOOLS, "input": ask, "previous_response_id": previous}
        kept = await client.made(stream, **fields)
        window += kept["output"]
        ask = [*results(kept, f"f {turn}", f"g {turn}"), {"role": "user", "content": script(call("f"), call("g"))}]
        previous = kept["id"]
    ask[-1] = {"role": "user", "content": "Well?"}
    chained = await client.told(stream, input=ask, previous_response_id=previous, tools=TOOLS)
    sent = await client.told(stream, input=[*window, *ask], store=False, tools=TOOLS)
    assert sent["messages"] == chained["messages"]
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool", "tool"] * 3 + ["user"]


@pytest.mark.parametrize("arguments", ["{", "not JSON", "[1]", '{"a": NaN}', "null"])
async def test_broken_arguments_are_the_clients_to_judge_and_to_send_back(client, stream, arguments):
    first = await client.made(stream, input=script(call("f", arguments)), tools=TOOLS)
    assert calls(first) == [("f", arguments)]
    ask = [*results(first, "these are broken"), {"role": "user", "content": "again"}]
    told = await client.told(stream, input=ask, previous_response_id=first["id"])
    again = await client.told(stream, input=[*first["output"], *ask], store=False)
    for messages in (told["messages"][1:], again["messages"]):
        assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


# What may and what must be called.

FINE = {
    "auto: a call": ("auto", [call("f")]),
    "auto: an answer": ("auto", ["hi"]),
    "none: an answer": ("none", ["hi"]),
    "required: a call": ("required", [call("g")]),
    "required: an answer and a call": ("required", ["hi", call("g")]),
    "required: a refusal": ("required", [{"Refusal": {"text": "No."}}]),
    "required: cut before the call": ("required", ["Let me", CUT]),
    "required: filtered": ("required", [{"Finish": {"reason": "content_filter"}}]),
    "named: its call": (named("f")[0], [call("f"), call("f")]),
    "allowed: its call": (allowed("auto", "f", "g"), [call("g")]),
    "allowed: an answer": (allowed("auto", "f"), ["hi"]),
    "allowed and required: a call": (allowed("required", "f", "g"), [call("g")]),
    "allowed, but none: an answer": (allowed("none", "f"), ["hi"]),
}


@pytest.mark.parametrize(("choice", "moves"), FINE.values(), ids=FINE)
async def test_what_the_choice_allows_is_done(client, stream, context, choice, moves):
    final = await client.made(stream, input=script(*moves), tools=TOOLS, tool_choice=choice, **context)
    assert final["tool_choice"] == choice
    assert len(calls(final)) == sum("ToolCall" in move for move in moves)


FORBIDDEN = {
    "none: a call": ("none", [call("f", {"city": "Paris"})]),
    "auto: a tool that is not there": ("auto", [call("x", {"city": "Paris"})]),
    "auto: a hosted tool that was not switched on": ("auto", [call("add", {"city": "Paris"})]),
    "named: another call": (named("f")[0], [call("g", {"city": "Paris"})]),
    "allowed: another call": (allowed("auto", "f"), [call("g", {"city": "Paris"})]),
    "allowed: the right one and another": (allowed("auto", "f"), [call("f"), call("g", {"city": "Paris"})]),
    "allowed, but none: a call": (allowed("none", "f"), [call("f", {"city": "Paris"})]),
}


@pytest.mark.parametrize(("choice", "moves"), FORBIDDEN.values(), ids=FORBIDDEN)
async def test_a_call_that_is_not_allowed_fails_and_nothing_of_it_is_shown(client, stream, context, choice, moves):
    fields = {"input": script("Look: ", *moves), "tools": TOOLS, "tool_choice": choice, **context}
    error = await client.fails(stream, **fields)
    assert (error["type"], error["code"], error["param"]) == ("model_error", "tool_not_allowed", None)
    assert "Paris" not in str(error)
    if stream:
        async with client.stream(**fields) as streaming:
            final = await streaming.rest()
        assert output_text(final) == "Look: "
        assert [name for name, _ in calls(final)] == [move["ToolCall"]["name"] for move in moves[:-1]]
        assert b"Paris" not in b"".join(streaming.writes)


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_a_backend_in_a_thread_is_held_to_the_choice_and_stopped(client, hand, name, stream, model):
    run = name()
    moves = [{"run": run}, "Look: ", call("g"), {"forever": "on and on ", "every": 0.01}]
    error = await client.fails(stream, model=model, input=script(*moves), tools=TOOLS, tool_choice=named("f")[0])
    assert error["code"] == "tool_not_allowed"
    await hand.seen(run, "ended", within=1)


@pytest.mark.parametrize("choice", ["required", named("f")[0], allowed("required", "f", "g")])
@pytest.mark.parametrize("moves", [["hi"], [], [{"Reasoning": {"text": "hm"}}], ["hi", {"Finish": {}}]])
async def test_a_call_that_has_to_be_made_and_is_not_fails(client, stream, choice, moves):
    error = await client.fails(stream, input=script(*moves), tools=TOOLS, tool_choice=choice)
    assert (error["type"], error["code"], error["param"]) == ("model_error", "tool_call_missing", None)


OWN = [{"type": "custom", "name": "f"}]
NO_SUCH_CHOICE = {
    "a function": (named("x")[0], TOOLS, "tool_choice.name"),
    "a function among others": (allowed("auto", "f", "x"), TOOLS, "tool_choice.tools[1].name"),
    "a hosted tool that is not switched on": ({"type": "test:add"}, TOOLS, "tool_choice.type"),
    "a hosted tool among others": (
        {"type": "allowed_tools", "tools": [*named("f"), {"type": "test:add"}]},
        TOOLS,
        "tool_choice.tools[1].type",
    ),
    "a hosted tool as a function": (named("add")[0], [{"type": "test:add"}], "tool_choice.name"),
    "any, where there are none": ("required", [], "tool_choice"),
    "any, where all are the client's own": ("required", OWN, "tool_choice"),
    "one of the client's own": (named("f")[0], OWN, "tool_choice.name"),
    "no name": ({"type": "function"}, TOOLS, "tool_choice.name"),
    "a type that is none": ({"type": "web_search"}, TOOLS, "tool_choice"),
    "no type": ({"name": "f"}, TOOLS, "tool_choice"),
    "none of none": (allowed("auto"), TOOLS, "tool_choice.tools"),
    "a mode that is none": (allowed("maybe", "f"), TOOLS, "tool_choice.mode"),
    "a word that is none": ("any", TOOLS, "tool_choice"),
    "a list": (["f"], TOOLS, "tool_choice"),
    "a number": (1, TOOLS, "tool_choice"),
}


@pytest.mark.parametrize(("choice", "tools", "param"), NO_SUCH_CHOICE.values(), ids=NO_SUCH_CHOICE)
async def test_a_choice_of_what_is_not_there_is_a_400_that_names_its_place(client, stream, choice, tools, param):
    fields = {"input": script("hi"), "tools": tools, "tool_choice": choice}
    (await client.post(stream=stream, **fields)).error(400, "invalid_request", param)


async def test_a_choice_that_leaves_all_out_shows_all_to_the_model(client, stream, context):
    for choice in ("none", allowed("auto", "g")):
        told = await client.told(stream, input="hi", tools=TOOLS, tool_choice=choice, **context)
        assert [tool["name"] for tool in told["tools"]] == ["f", "g", "h"]
        assert told["callable_tools"] == ([] if choice == "none" else ["g"])


@pytest.mark.parametrize("second", [functions("f"), [{"type": "test:add"}], functions("add")])
async def test_two_tools_of_one_name_are_a_400(client, stream, second):
    first = [{"type": "test:add"}, *functions("f")]
    (await client.post(stream=stream, input="hi", tools=[*first, *second])).error(400, param="tools[2]")


# How many calls.

MANY = [
    call("f", '{"a"', call_id="one"),
    call("g", '{"b"', call_id="two"),
    {"ToolArguments": {"delta": ": 2}", "call_id": "two"}},
    {"ToolArguments": {"delta": ": 1}", "call_id": "one"}},
    call("f", {"c": 3}),
    "Done.",
]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, 3),
        ({"parallel_tool_calls": False}, 1),
        ({"max_tool_calls": 1}, 1),
        ({"max_tool_calls": 2}, 2),
        ({"max_tool_calls": 9}, 3),
        ({"max_tool_calls": 2, "parallel_tool_calls": False}, 1),
    ],
)
async def test_calls_beyond_the_limit_are_left_out_without_a_trace(client, stream, context, limits, left):
    final = await client.made(stream, input=script(*MANY), tools=TOOLS, **limits, **context)
    assert calls(final) == [("f", '{"a": 1}'), ("g", '{"b": 2}'), ("f", '{"c": 3}')][:left]
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
async def test_arguments_that_a_strict_function_does_not_take_fail(client, stream, arguments):
    moves = [call("f", {"city": "Oslo"}), call("f", arguments), call("f", {"city": "Oslo"})]
    error = await client.fails(stream, input=script(*moves), tools=STRICT)
    assert (error["type"], error["code"]) == ("model_error", "invalid_tool_arguments")
    assert "Atlantis" not in error["message"]
    loose = [{**STRICT[0], "strict": False}]
    assert len(calls(await client.made(stream, input=script(*moves), tools=loose))) == 3


async def test_arguments_that_a_strict_function_takes_are_as_they_were_made(client, stream, context):
    arguments = '{"city":\n "\u00d6sl\u00f8", "when": "now"}'
    moves = [call("f", arguments[:9]), {"ToolArguments": {"delta": arguments[9:]}}]
    final = await client.made(stream, input=script(*moves), tools=STRICT, **context)
    assert calls(final) == [("f", arguments)]
    bare = functions("f", strict=True)
    assert calls(await client.made(stream, input=script(call("f", "[")), tools=bare)) == [("f", "[")]


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_strict_arguments_that_were_cut_are_incomplete_and_no_failure(client, stream, context, reason):
    moves = [call("f", '{"city": "Os'), {"Finish": {"reason": reason}}]
    final = await client.made(stream, input=script(*moves), tools=STRICT, **context)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert final["output"][0]["status"] == "incomplete"


async def test_a_strict_function_whose_schema_is_none_is_a_400_and_a_loose_one_is_not(client, stream):
    for parameters in ({"type": "any"}, {"$ref": "https://example.org/schema"}, {"properties": [MARK]}):
        tools = [*TOOLS, *functions("z", strict=True, parameters=parameters)]
        reply = await client.post(stream=stream, input="hi", tools=tools)
        error = reply.error(400, "invalid_schema", "tools[3].parameters")
        assert MARK not in error["message"]
        await client.made(stream, input="hi", tools=functions("z", parameters=parameters))


MARK = "Xyzzy-4711"
