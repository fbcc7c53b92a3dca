"""Tools that the server runs itself: receipts, rounds, and what may go wrong."""

from __future__ import annotations

import json
import time

import anyio
import pytest

from tests.support.conformance import check_item, check_response

from .client import call, functions, output_text, script
from .hosts import ANY, MAX_TOOL_CALLS
from .tools import CRASHES, SECRET

pytestmark = pytest.mark.anyio

SERVED_BY = ANY
KINDS = ["puppet", "puppet-sync"]
ADD = call("add", {"a": 1, "b": 2})
CUT = {"Finish": {"reason": "max_output_tokens"}}
ASK = {"role": "user", "content": "and?"}


def on(*names):
    """The hosted tools of these names, switched on."""
    return [{"type": f"test:{name}"} for name in names]


def rounds(*moves, run="none"):
    return script({"run": run}, {"rounds": moves})


def receipts(response):
    return [item for item in response["output"] if item["type"].startswith("test:")]


def outcomes(response):
    return [(item["name"], item["status"], item["output"]) for item in receipts(response)]


def kinds(response):
    return [item.get("name", item["type"]) for item in response["output"]]


async def test_a_call_begins_and_ends_as_an_item_of_the_tools_type(client):
    fields = {"input": rounds([ADD], ["It is 3."]), "tools": on("add")}
    async with client.stream(**fields) as stream:
        final = await stream.rest()
        types = [event["type"] for event in stream.events]
        begun, ended = [event["item"] for event in stream.events if event.get("item", {}).get("name") == "add"]
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (begun["type"], begun["status"], begun["output"]) == ("test:add", "in_progress", None)
    assert ended == {**begun, "status": "completed", "output": "3"} == final["output"][0]
    assert json.loads(ended["arguments"]) == {"a": 1, "b": 2}


@pytest.mark.parametrize("model", KINDS)
async def test_the_model_is_asked_again_until_it_answers(client, stream, context, model):
    moves = [[f"Step {step}. ", call("add", {"a": step, "b": 1})] for step in range(4)]
    fields = {"input": rounds(*moves, ["Done."]), "tools": on("add"), **context}
    final = await client.made(stream, model=model, **fields)
    check_response(final)
    assert kinds(final) == ["message", "add"] * 4 + ["message"]
    assert outcomes(final) == [("add", "completed", str(step + 1)) for step in range(4)]
    assert output_text(final) == "Step 0. Step 1. Step 2. Step 3. Done."
    assert (await client.get(f"/responses/{final['id']}")).json() == final
    ids = [item[name] for item in receipts(final) for name in ("id", "call_id")]
    assert len(set(ids)) == 8


async def test_the_model_is_told_what_came_of_its_call(client, stream, context):
    final = await client.made(stream, input=rounds(["Hm. ", ADD], [{"tell": None}]), tools=on("add"), **context)
    told = json.loads(final["output"][-1]["content"][0]["text"])
    assert told["round"] == 1
    assert told["items"][-2:] == final["output"][:-1]
    spoken, answer = told["messages"][-2:]
    (made,) = spoken["tool_calls"]
    assert (spoken["role"], spoken["content"], made["function"]["name"]) == ("assistant", "Hm. ", "add")
    assert answer == {"role": "tool", "tool_call_id": made["id"], "content": "3"}


@pytest.mark.parametrize(
    ("value", "shown"), [("text", "text"), ("", ""), ({"a": [1, None]}, '{"a":[1,null]}'), (None, "null"), (1.5, "1.5")]
)
async def test_a_tool_gives_text_or_json(client, stream, value, shown):
    final = await client.made(stream, input=rounds([call("say", {"value": value})]), tools=on("say"))
    assert outcomes(final) == [("say", "completed", shown)]


async def test_arguments_may_come_in_pieces(client, stream):
    pieces = [call("add", "", call_id="x"), call("add", '{"a": 5', call_id="y")]
    pieces += [{"ToolArguments": {"delta": '{"a": 1, "b": 1}', "call_id": "x"}}]
    pieces += [{"ToolArguments": {"delta": ', "b": 5}', "call_id": "y"}}]
    final = await client.made(stream, input=rounds(pieces, ["ok"]), tools=on("add"))
    assert outcomes(final) == [("add", "completed", "2"), ("add", "completed", "10")]
    again = await client.made(stream, input=rounds(pieces, pieces), tools=on("add"), max_tool_calls=4)
    assert len({item["call_id"] for item in receipts(again)}) == 4


async def test_calls_run_side_by_side_and_end_in_order(client, hand, name):
    gates = [name() for _ in range(3)]
    moves = [
        call(tool, {"run": gate, "gate": gate}) for tool, gate in zip(["wait", "thread", "wait"], gates, strict=True)
    ]
    async with client.stream(input=rounds(moves, ["ok"]), tools=on("wait", "thread")) as stream:
        for gate in gates:
            await hand.seen(gate, "begun")
        for gate in reversed(gates):
            await hand.open(gate)
            await hand.seen(gate, "over")
        final = await stream.rest()
        seen = [(event["type"][21:], event["output_index"]) for event in stream.events if "item" in event]
    assert seen[:6] == [("added", 0), ("added", 1), ("added", 2), ("done", 0), ("done", 1), ("done", 2)]
    assert [item["output"] for item in receipts(final)] == [f"waited for {gate}" for gate in gates]


async def test_a_receipt_in_progress_is_seen_while_its_tool_works(client, hand, name):
    gate = name()
    moves = [call("wait", {"run": gate, "gate": gate})]
    async with client.stream(input=rounds(moves, ["ok"]), tools=on("wait")) as stream:
        begun = (await stream.until("response.output_item.added", within=2))["item"]
        assert (begun["name"], begun["status"]) == ("wait", "in_progress")
        assert output_text(await client.create(input=script("nobody waits"))) == "nobody waits"
        await hand.open(gate)
        assert output_text(await stream.rest()) == "ok"


async def test_a_stream_is_kept_alive_while_a_tool_works(client, hand, name):
    gate = name()
    moves = [call("wait", {"run": gate, "gate": gate})]
    async with client.stream(input=rounds(moves, ["ok"]), tools=on("wait")) as stream:
        await stream.until("response.output_item.added")
        assert (await stream.frame(within=2)).comment
        await hand.open(gate)
        assert output_text(await stream.rest()) == "ok"


@pytest.mark.parametrize("model", KINDS)
async def test_many_loops_at_once_do_not_mix(client, model):
    async def one(number):
        moves = [[call("say", {"value": [number, step]}), call("add", {"a": number, "b": step})] for step in range(3)]
        final = await client.made(
            number % 2 == 0, model=model, input=rounds(*moves, [f"{number}"]), tools=on("say", "add")
        )
        said = [(f"[{number},{step}]", str(number + step)) for step in range(3)]
        assert [output for _, _, output in outcomes(final)] == [output for pair in said for output in pair]
        assert output_text(final) == f"{number}"

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(one, number)


async def test_usage_is_the_sum_of_all_rounds(client, stream):
    used = [
        {"Usage": {"input_tokens": 10, "output_tokens": 5, "cached_tokens": 2, "reasoning_tokens": 1}},
        {"Usage": {"input_tokens": 20, "output_tokens": 7, "cached_tokens": 8, "reasoning_tokens": 3}},
    ]
    final = await client.made(stream, input=rounds([ADD, used[0]], [ADD, used[1]], ["ok"]), tools=on("add"))
    assert final["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 10},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 42,
    }


async def test_a_type_of_several_tools_switches_all_of_them_on(client, stream):
    told = await client.told(stream, input="hi", tools=on("slow"))
    assert [tool["name"] for tool in told["tools"]] == ["nap", "doze"]
    final = await client.made(stream, input=script("hi"), tools=on("slow"))
    assert final["tools"] == on("slow")


@pytest.mark.parametrize("kind", ["test:unknown", "test:add:x", "nobody:add"])
async def test_a_type_that_is_not_there_is_a_400(client, stream, context, kind):
    reply = await client.post(stream=stream, input="hi", tools=[*on("add"), {"type": kind}], **context)
    reply.error(400, "unsupported_parameter", "tools[1].type")


# What goes wrong with a tool is for the model to see, and for nobody else.

WRONG = {
    "it says no": ("fail", {}, "There is no such city."),
    "it says no for a reason": ("fail", {"reason": "Too far."}, "Too far."),
    "an argument is missing": ("add", {"a": 1}, "The arguments are not valid"),
    "an argument is of the wrong type": ("add", {"a": 1, "b": "two"}, "The arguments are not valid"),
    "an argument too many": ("add", {"a": 1, "b": 2, "c": 3}, "The arguments are not valid"),
    "arguments that are no object": ("add", "[1, 2]", "The arguments are not valid"),
    "arguments that are no JSON": ("add", '{"a": 1', "The arguments are not valid"),
    "no arguments": ("add", "", "The arguments are not valid"),
    "what the tool itself refuses": ("add", {"a": 99, "b": 2}, "These are too large."),
}


@pytest.mark.parametrize(("tool", "arguments", "said"), WRONG.values(), ids=WRONG)
async def test_what_a_tool_cannot_do_the_model_is_told(client, stream, tool, arguments, said):
    final = await client.made(stream, input=rounds([call(tool, arguments)], [{"tell": None}]), tools=on(tool))
    ((_, status, output),) = outcomes(final)
    assert status == "failed"
    assert output.startswith(said)
    assert json.loads(output_text(final))["messages"][-1]["content"] == output


@pytest.mark.parametrize("tool", ["crash", "crash_in_thread"])
@pytest.mark.parametrize("kind", CRASHES)
async def test_what_a_tool_raises_stays_in_the_house(client, stream, tool, kind):
    fields = {"input": rounds([call(tool, {"kind": kind})], [{"tell": None}]), "tools": on(tool)}
    final = await client.made(stream, **fields)
    assert outcomes(final) == [(tool, "failed", "The tool failed.")]
    assert final["status"] == "completed"
    assert SECRET not in json.dumps(final)


@pytest.mark.parametrize("tool", ["nap", "doze"])
async def test_a_tool_that_takes_too_long_is_given_up_and_told(client, hand, name, stream, tool):
    run = name()
    with anyio.fail_after(5):
        final = await client.made(
            stream, input=rounds([call(tool, {"run": run}), ADD], ["ok"]), tools=on("slow", "add")
        )
    assert outcomes(final) == [(tool, "failed", "The tool took too long."), ("add", "completed", "3")]
    assert output_text(final) == "ok"
    # It holds a thread as long as it goes on; so it has to hear of it, even when the response is over.
    await hand.seen(run, "over", within=1)


async def test_a_model_that_fails_after_a_tool_keeps_the_receipt(client, stream):
    moves = rounds([ADD], ["so ", {"raise": SECRET}])
    assert (await client.fails(stream, input=moves, tools=on("add")))["code"] == "model_error"
    async with client.stream(input=moves, tools=on("add")) as failing:
        final = await failing.rest()
    assert outcomes(final) == [("add", "completed", "3")]
    told = await client.told(stream, input=[ASK], previous_response_id=final["id"])
    assert [message["role"] for message in told["messages"]][1:3] == ["assistant", "tool"]


# How many calls, and which.


@pytest.mark.parametrize("model", KINDS)
async def test_calls_beyond_the_limit_are_left_out_over_all_rounds(client, stream, context, model):
    moves = rounds([ADD], [ADD, ADD, ADD], [ADD, {"tell": None}], ["never"])
    final = await client.made(stream, model=model, input=moves, tools=on("add"), max_tool_calls=3, **context)
    assert len(receipts(final)) == final["max_tool_calls"] == 3
    told = json.loads(output_text(final))
    assert (told["max_tool_calls"], told["callable_tools"], told["round"]) == (0, [], 2)


@pytest.mark.parametrize("asked", [None, 10**6])
async def test_a_model_that_calls_for_ever_comes_to_an_end(client, stream, asked):
    moves = rounds(*[[call("add", {"a": step, "b": 1})] for step in range(MAX_TOOL_CALLS + 5)])
    final = await client.made(stream, input=moves, tools=on("add"), max_tool_calls=asked)
    assert len(receipts(final)) == MAX_TOOL_CALLS


async def test_a_model_that_makes_the_same_call_again_and_again_has_to_speak(client, stream):
    moves = rounds([ADD], [ADD], [ADD], [ADD, {"tell": None}], ["never"])
    final = await client.made(stream, input=moves, tools=on("add", "say"))
    assert outcomes(final) == [("add", "completed", "3")] * 3
    assert json.loads(output_text(final))["callable_tools"] == []
    other = call("say", {"value": "ok"})
    final = await client.made(stream, input=rounds([ADD], [ADD], [other], [ADD], [ADD], ["ok"]), tools=on("add", "say"))
    assert (len(receipts(final)), output_text(final)) == (5, "ok")


async def test_one_call_at_a_time_is_one_a_round(client, stream):
    moves = rounds([ADD, ADD, ADD], [ADD, ADD], ["ok"])
    final = await client.made(stream, input=moves, tools=on("add"), parallel_tool_calls=False)
    assert kinds(final) == ["add", "add", "message"]


async def test_a_choice_is_kept_in_the_first_round_and_done_with_after_it(client, stream, context):
    tools = [*on("add", "say"), *functions("f")]
    for choice in ("required", {"type": "test:add"}):
        fields = {"tools": tools, "tool_choice": choice, **context}
        final = await client.made(stream, input=rounds([ADD], ["ok"]), **fields)
        assert (output_text(final), final["tool_choice"]) == ("ok", choice)
        assert (await client.fails(stream, input=rounds(["no"]), **fields))["code"] == "tool_call_missing"
    error = await client.fails(stream, input=rounds([call("f")]), **fields)
    assert error["code"] == "tool_not_allowed"


async def test_a_list_of_allowed_tools_holds_in_every_round(client, stream):
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "test:add"}]}
    fields = {"tools": on("add", "say"), "tool_choice": choice}
    final = await client.made(stream, input=rounds([ADD], [{"tell": None}]), **fields)
    assert json.loads(output_text(final))["callable_tools"] == ["add"]
    assert final["tool_choice"] == choice
    error = await client.fails(stream, input=rounds([ADD], [call("say", {"value": 1})]), **fields)
    assert error["code"] == "tool_not_allowed"


async def test_a_type_of_several_tools_is_chosen_as_a_whole(client, stream, name):
    fields = {"tools": on("slow", "add"), "tool_choice": {"type": "test:slow"}}
    for tool in ("nap", "doze"):
        assert outcomes(await client.made(stream, input=rounds([call(tool, {"run": name()})]), **fields))
    assert (await client.fails(stream, input=rounds([ADD]), **fields))["code"] == "tool_not_allowed"


@pytest.mark.parametrize("choice", ["none", {"type": "allowed_tools", "mode": "none", "tools": on("add")}])
async def test_a_tool_that_may_not_be_called_is_not_run(client, stream, choice, hand, name):
    run = name()
    moves = rounds([call("wait", {"run": run})])
    error = await client.fails(stream, input=moves, tools=on("wait", "add"), tool_choice=choice)
    assert error["code"] == "tool_not_allowed"
    assert await hand.record(run) == []


# Cut answers.


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_calls_of_an_answer_that_was_cut_are_not_made(client, stream, hand, name, reason):
    run = name()
    moves = ["Hm. ", call("wait", {"run": run}), {"Finish": {"reason": reason}}]
    final = await client.made(stream, input=rounds(moves, ["never"]), tools=on("wait"))
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert outcomes(final) == [("wait", "incomplete", None)]
    assert output_text(final) == "Hm. "
    assert await hand.record(run) == []


@pytest.mark.parametrize("moves", [[ADD, call("f", '{"a'), CUT], [call("f", '{"a'), ADD, call("f", '{"b'), CUT]])
async def test_a_clients_call_that_was_cut_beside_a_tools_is_incomplete(client, stream, moves):
    final = await client.made(stream, input=rounds(moves), tools=[*on("add"), *functions("f")])
    assert final["status"] == "incomplete"
    cut = [item for item in final["output"] if item["type"] == "function_call"]
    assert [item["status"] for item in cut] == ["incomplete"] * len(cut)


async def test_what_earlier_rounds_have_used_is_taken_from_the_tokens_that_are_left(client, stream):
    used = {"Usage": {"input_tokens": 1, "output_tokens": 12}}
    moves = rounds([ADD, used], [{"tell": None}, used], ["never"])
    final = await client.made(stream, input=moves, tools=on("add"), max_output_tokens=20)
    assert json.loads(output_text(final))["max_output_tokens"] == 8
    spent = rounds([ADD, used], [ADD, used], ["never"])
    final = await client.made(stream, input=spent, tools=on("add"), max_output_tokens=20)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert kinds(final) == ["add", "add"]
    assert final["max_output_tokens"] == 20


# Clients that leave.


@pytest.mark.parametrize("tool", ["wait", "thread"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_client_that_leaves_takes_its_tools_along(client, hand, name, stream, tool, reset):
    runs = [name(), name()]
    moves = rounds([ADD], [call(tool, {"run": run}) for run in runs], ["never"], run=name())
    body = {"model": "puppet", "input": moves, "tools": on(tool, "add"), "stream": stream, "metadata": {"x": runs[0]}}
    async with client.open(body) as connection:
        for run in runs:
            await hand.seen(run, "begun")
        left = time.monotonic()
        await connection.leave(reset=reset)
        for run in runs:
            assert (await hand.seen(run, "over", within=5))["at"] - left < 1.0
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("tool", ["wait", "thread"])
async def test_the_record_of_a_client_that_left_says_how_far_its_tools_came(client, hand, name, tool):
    run = name()
    moves = rounds([ADD], [call(tool, {"run": run})], ["never"])
    async with client.stream(input=moves, tools=on(tool, "add")) as stream:
        response_id = (await stream.next())["response"]["id"]
        await hand.seen(run, "begun")
    with anyio.fail_after(2):
        while (kept := (await client.get(f"/responses/{response_id}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(kept)
    assert kept["status"] == "cancelled"
    assert [status for _, status, _ in outcomes(kept)] == ["completed", "incomplete"]
    told = await client.told(input=[ASK], previous_response_id=response_id)
    assert [message["role"] for message in told["messages"]] == ["user", "assistant", "tool", "user"]


# Beside functions of the client, and in what follows.


@pytest.mark.parametrize("moves", [[ADD, call("f")], [call("f"), ADD], [call("f"), ADD, call("f"), ADD]])
async def test_calls_for_both_sides_are_answered_here_and_handed_over(client, stream, context, moves):
    tools = [*on("add"), *functions("f")]
    first = await client.made(stream, input=rounds(moves, ["never"]), tools=tools, **context)
    own = [item for item in first["output"] if item["type"] == "function_call"]
    assert len(own) == len(receipts(first)) == len(moves) // 2
    assert {status for _, status, _ in outcomes(first)} == {"completed"}
    answers = [{"type": "function_call_output", "call_id": item["call_id"], "output": "of f"} for item in own]
    told = await client.told(stream, input=[*answers, ASK], previous_response_id=first["id"], tools=tools)
    made = [made["id"] for message in told["messages"] for made in message.get("tool_calls", ())]
    answered = {
        message["tool_call_id"]: message["content"] for message in told["messages"] if "tool_call_id" in message
    }
    assert sorted(answered) == sorted(made)
    assert sorted(answered.values()) == ["3"] * len(own) + ["of f"] * len(own)


async def test_a_receipt_says_the_same_whether_it_was_kept_or_sent_back(client, stream):
    first = await client.made(stream, input=rounds(["Hm. ", ADD, call("fail")], ["So."]), tools=on("add", "fail"))
    kept = await client.told(stream, input=[ASK], previous_response_id=first["id"], tools=on("add"))
    sent = await client.told(stream, input=[*first["output"], ASK], store=False, tools=on("add"))
    plain = await client.told(stream, input=[*first["output"], ASK], store=False)
    assert kept["messages"][1:] == sent["messages"] == plain["messages"]
    assert [item["type"] for item in sent["items"]] == [
        item["type"] for item in [*first["output"], {"type": "message"}]
    ]
    for emitted, given in zip(first["output"], sent["items"], strict=False):
        assert {**given, "id": ""} == {**emitted, "id": ""}
    chained = kept["items"][1 : 1 + len(first["output"])]
    assert chained == first["output"]


async def test_a_receipt_comes_back_as_an_input_item_and_by_reference(client, stream):
    first = await client.create(input=rounds([ADD]), tools=on("add"))
    (receipt,) = receipts(first)
    reference = {"type": "item_reference", "id": receipt["id"]}
    told = await client.told(stream, input=[reference, ASK])
    assert told["items"][0] == receipt
    assert [message["role"] for message in told["messages"]] == ["assistant", "tool", "user"]
    second = await client.made(stream, input=[receipt, ASK])
    (_, listed) = (await client.get(f"/responses/{second['id']}/input_items")).json()["data"]
    check_item(listed)
    assert {**listed, "id": receipt["id"]} == receipt
    once = await client.told(stream, input=[receipt, reference, ASK], previous_response_id=first["id"])
    assert [item["id"] for item in once["items"]].count(receipt["id"]) == 1
    other = await client.other("Bearer mallory").post(stream=stream, input=[reference, ASK])
    other.error(400, "item_not_found", "input[0].id")


@pytest.mark.parametrize(
    "broken",
    [
        {"output": None},
        {"output": 5},
        {"call_id": None},
        {"call_id": "x" * 65},
        {"name": "no name"},
        {"arguments": {"a": 1}},
        {"arguments": "{"},
        {"status": "in_progress"},
        {"status": None},
    ],
    ids=str,
)
async def test_a_receipt_that_was_changed_is_never_a_servers_fault(client, stream, broken):
    receipt = {"type": "test:add", "call_id": "a", "name": "add", "arguments": "{}", "output": "0", "status": "failed"}
    reply = await client.post(stream=stream, input=[{**receipt, **broken}, ASK])
    assert reply.status == 200 or reply.error(400)["param"].startswith("input[0]")


async def test_nothing_of_a_tool_is_kept_where_nothing_is_to_be_kept(client, stream):
    final = await client.made(stream, input=rounds([ADD], ["ok"]), tools=on("add"), store=False)
    assert outcomes(final) == [("add", "completed", "3")]
    (await client.get(f"/responses/{final['id']}")).error(404)
    (await client.post(input=[{"type": "item_reference", "id": receipts(final)[0]["id"]}])).error(400)
