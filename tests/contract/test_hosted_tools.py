"""Hosted tools: their items, rounds and errors."""

from __future__ import annotations

import json
import time

import anyio
import pytest

from tests.support.conformance import check_item, check_response

from .client import call, functions, output_text, script
from .hosts import FASTEST, MAX_TOOL_CALLS
from .tools import CRASHES, SECRET

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST
MODELS = ["scripted", "scripted-sync"]
ADD = call("add", {"a": 1, "b": 2})
TRUNCATED = {"Finish": {"reason": "max_output_tokens"}}
ASK = {"role": "user", "content": "and?"}


def enabled(*names):
    """Return the tool definitions that enable these hosted tools."""
    return [{"type": f"test:{name}"} for name in names]


def rounds(*steps, run="none"):
    return script({"run": run}, {"rounds": steps})


def receipts(response):
    return [item for item in response["output"] if item["type"].startswith("test:")]


def outcomes(response):
    return [(item["name"], item["status"], item["output"]) for item in receipts(response)]


def kinds(response):
    return [item.get("name", item["type"]) for item in response["output"]]


async def test_hosted_call_is_item_of_tool_type(client):
    fields = {"input": rounds([ADD], ["It is 3."]), "tools": enabled("add")}
    async with client.stream(**fields) as stream:
        final = await stream.rest()
        types = [event["type"] for event in stream.events]
        started, ended = [event["item"] for event in stream.events if event.get("item", {}).get("name") == "add"]
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
    assert (started["type"], started["status"], started["output"]) == ("test:add", "in_progress", None)
    assert ended == {**started, "status": "completed", "output": "3"} == final["output"][0]
    assert json.loads(ended["arguments"]) == {"a": 1, "b": 2}


@pytest.mark.parametrize("model", MODELS)
async def test_model_is_called_until_it_answers(client, stream, context, model):
    steps = [[f"Step {step}. ", call("add", {"a": step, "b": 1})] for step in range(4)]
    fields = {"input": rounds(*steps, ["Done."]), "tools": enabled("add"), **context}
    final = await client.complete(stream, model=model, **fields)
    check_response(final)
    assert kinds(final) == ["message", "add"] * 4 + ["message"]
    assert outcomes(final) == [("add", "completed", str(step + 1)) for step in range(4)]
    assert output_text(final) == "Step 0. Step 1. Step 2. Step 3. Done."
    assert (await client.get(f"/responses/{final['id']}")).json() == final
    ids = [item[name] for item in receipts(final) for name in ("id", "call_id")]
    assert len(set(ids)) == 8


async def test_tool_result_reaches_model(client, stream, context):
    final = await client.complete(
        stream, input=rounds(["Hm. ", ADD], [{"tell": None}]), tools=enabled("add"), **context
    )
    turn = json.loads(final["output"][-1]["content"][0]["text"])
    assert turn["round"] == 1
    assert turn["items"][-2:] == final["output"][:-1]
    spoken, answer = turn["messages"][-2:]
    (call_ids,) = spoken["tool_calls"]
    assert (spoken["role"], spoken["content"], call_ids["function"]["name"]) == ("assistant", "Hm. ", "add")
    assert answer == {"role": "tool", "tool_call_id": call_ids["id"], "content": "3"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("text", "text"), ("", ""), ({"a": [1, None]}, '{"a":[1,null]}'), (None, "null"), (1.5, "1.5")],
)
async def test_tool_returns_text_or_json(client, stream, value, expected):
    final = await client.complete(stream, input=rounds([call("say", {"value": value})]), tools=enabled("say"))
    assert outcomes(final) == [("say", "completed", expected)]


async def test_hosted_call_arguments_may_be_chunked(client, stream):
    pieces = [call("add", "", call_id="x"), call("add", '{"a": 5', call_id="y")]
    pieces += [{"ToolArguments": {"delta": '{"a": 1, "b": 1}', "call_id": "x"}}]
    pieces += [{"ToolArguments": {"delta": ', "b": 5}', "call_id": "y"}}]
    final = await client.complete(stream, input=rounds(pieces, ["ok"]), tools=enabled("add"))
    assert outcomes(final) == [("add", "completed", "2"), ("add", "completed", "10")]
    chunked = await client.complete(stream, input=rounds(pieces, pieces), tools=enabled("add"), max_tool_calls=4)
    assert len({item["call_id"] for item in receipts(chunked)}) == 4


async def test_hosted_calls_run_concurrently_and_end_in_order(client, control, name):
    gates = [name() for _ in range(3)]
    steps = [
        call(tool, {"run": gate, "gate": gate}) for tool, gate in zip(["wait", "thread", "wait"], gates, strict=True)
    ]
    async with client.stream(input=rounds(steps, ["ok"]), tools=enabled("wait", "thread")) as stream:
        for gate in gates:
            await control.wait_for(gate, "tool started")
        for gate in reversed(gates):
            await control.open_gate(gate)
            await control.wait_for(gate, "tool ended")
        final = await stream.rest()
        item_events = [(event["type"][21:], event["output_index"]) for event in stream.events if "item" in event]
    assert item_events[:6] == [("added", 0), ("added", 1), ("added", 2), ("done", 0), ("done", 1), ("done", 2)]
    assert [item["output"] for item in receipts(final)] == [f"waited for {gate}" for gate in gates]


async def test_receipt_is_in_progress_while_tool_runs(client, control, name):
    gate = name()
    steps = [call("wait", {"run": gate, "gate": gate})]
    async with client.stream(input=rounds(steps, ["ok"]), tools=enabled("wait")) as stream:
        started = (await stream.until("response.output_item.added", within=2))["item"]
        assert (started["name"], started["status"]) == ("wait", "in_progress")
        assert output_text(await client.create(input=script("nobody waits"))) == "nobody waits"
        await control.open_gate(gate)
        assert output_text(await stream.rest()) == "ok"


async def test_stream_is_kept_alive_while_tool_runs(client, control, name):
    gate = name()
    steps = [call("wait", {"run": gate, "gate": gate})]
    async with client.stream(input=rounds(steps, ["ok"]), tools=enabled("wait")) as stream:
        await stream.until("response.output_item.added")
        assert (await stream.frame(within=2)).is_comment
        await control.open_gate(gate)
        assert output_text(await stream.rest()) == "ok"


@pytest.mark.parametrize("model", MODELS)
async def test_concurrent_tool_loops_do_not_mix(client, model):
    async def run_one(number):
        steps = [[call("say", {"value": [number, step]}), call("add", {"a": number, "b": step})] for step in range(3)]
        final = await client.complete(
            number % 2 == 0, model=model, input=rounds(*steps, [f"{number}"]), tools=enabled("say", "add")
        )
        expected = [(f"[{number},{step}]", str(number + step)) for step in range(3)]
        assert [output for _, _, output in outcomes(final)] == [output for pair in expected for output in pair]
        assert output_text(final) == f"{number}"

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(run_one, number)


async def test_usage_is_sum_of_all_rounds(client, stream):
    used = [
        {"Usage": {"input_tokens": 10, "output_tokens": 5, "cached_tokens": 2, "reasoning_tokens": 1}},
        {"Usage": {"input_tokens": 20, "output_tokens": 7, "cached_tokens": 8, "reasoning_tokens": 3}},
    ]
    final = await client.complete(stream, input=rounds([ADD, used[0]], [ADD, used[1]], ["ok"]), tools=enabled("add"))
    assert final["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 10},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 42,
    }


async def test_toolset_type_enables_all_its_tools(client, stream):
    turn = await client.describe_turn(stream, input="hi", tools=enabled("slow"))
    assert [tool["name"] for tool in turn["tools"]] == ["nap", "doze"]
    final = await client.complete(stream, input=script("hi"), tools=enabled("slow"))
    assert final["tools"] == enabled("slow")


@pytest.mark.parametrize("kind", ["test:unknown", "test:add:x", "nobody:add"])
async def test_unknown_tool_type_returns_400(client, stream, context, kind):
    reply = await client.post(stream=stream, input="hi", tools=[*enabled("add"), {"type": kind}], **context)
    reply.error(400, "unsupported_parameter", "tools[1].type")


# Errors of tools, which only the model sees.

TOOL_ERRORS = {
    "tool error": ("fail", {}, "There is no such city."),
    "tool error with reason": ("fail", {"reason": "Too far."}, "Too far."),
    "missing argument": ("add", {"a": 1}, "The arguments are not valid"),
    "argument of wrong type": ("add", {"a": 1, "b": "two"}, "The arguments are not valid"),
    "extra argument": ("add", {"a": 1, "b": 2, "c": 3}, "The arguments are not valid"),
    "arguments are not an object": ("add", "[1, 2]", "The arguments are not valid"),
    "arguments are not JSON": ("add", '{"a": 1', "The arguments are not valid"),
    "no arguments": ("add", "", "The arguments are not valid"),
    "rejected by tool": ("add", {"a": 99, "b": 2}, "These are too large."),
}


@pytest.mark.parametrize(("tool", "arguments", "message"), TOOL_ERRORS.values(), ids=TOOL_ERRORS)
async def test_tool_error_message_reaches_model(client, stream, tool, arguments, message):
    final = await client.complete(stream, input=rounds([call(tool, arguments)], [{"tell": None}]), tools=enabled(tool))
    ((_, status, output),) = outcomes(final)
    assert status == "failed"
    assert output.startswith(message)
    assert json.loads(output_text(final))["messages"][-1]["content"] == output


@pytest.mark.parametrize("tool", ["crash", "crash_in_thread"])
@pytest.mark.parametrize("kind", CRASHES)
async def test_tool_exception_is_not_disclosed(client, stream, tool, kind):
    fields = {"input": rounds([call(tool, {"kind": kind})], [{"tell": None}]), "tools": enabled(tool)}
    final = await client.complete(stream, **fields)
    assert outcomes(final) == [(tool, "failed", "The tool failed.")]
    assert final["status"] == "completed"
    assert SECRET not in json.dumps(final)


@pytest.mark.parametrize("tool", ["nap", "doze"])
async def test_tool_timeout_is_reported_to_model(client, control, name, stream, tool):
    run = name()
    with anyio.fail_after(5):
        final = await client.complete(
            stream, input=rounds([call(tool, {"run": run}), ADD], ["ok"]), tools=enabled("slow", "add")
        )
    assert outcomes(final) == [(tool, "failed", "The tool took too long."), ("add", "completed", "3")]
    assert output_text(final) == "ok"
    # The tool occupies a thread, so it must see the cancellation even after the end of the response.
    await control.wait_for(run, "tool ended", within=1)


async def test_receipt_remains_if_model_fails_after_tool(client, stream):
    steps = rounds([ADD], ["so ", {"raise": SECRET}])
    assert (await client.expect_failure(stream, input=steps, tools=enabled("add")))["code"] == "model_error"
    async with client.stream(input=steps, tools=enabled("add")) as failing:
        final = await failing.rest()
    assert outcomes(final) == [("add", "completed", "3")]
    turn = await client.describe_turn(stream, input=[ASK], previous_response_id=final["id"])
    assert [message["role"] for message in turn["messages"]][1:3] == ["assistant", "tool"]


# Limits and tool choice.


@pytest.mark.parametrize("model", MODELS)
async def test_max_tool_calls_applies_to_all_rounds(client, stream, context, model):
    steps = rounds([ADD], [ADD, ADD, ADD], [ADD, {"tell": None}], ["never"])
    final = await client.complete(stream, model=model, input=steps, tools=enabled("add"), max_tool_calls=3, **context)
    assert len(receipts(final)) == final["max_tool_calls"] == 3
    turn = json.loads(output_text(final))
    assert (turn["max_tool_calls"], turn["callable_tools"], turn["round"]) == (0, [], 2)


@pytest.mark.parametrize("fields", [None, 10**6])
async def test_endless_tool_loop_is_ended(client, stream, fields):
    steps = rounds(*[[call("add", {"a": step, "b": 1})] for step in range(MAX_TOOL_CALLS + 5)])
    final = await client.complete(stream, input=steps, tools=enabled("add"), max_tool_calls=fields)
    assert len(receipts(final)) == MAX_TOOL_CALLS


async def test_repeated_identical_calls_are_disallowed(client, stream):
    steps = rounds([ADD], [ADD], [ADD], [ADD, {"tell": None}], ["never"])
    final = await client.complete(stream, input=steps, tools=enabled("add", "say"))
    assert outcomes(final) == [("add", "completed", "3")] * 3
    assert json.loads(output_text(final))["callable_tools"] == []
    other_call = call("say", {"value": "ok"})
    final = await client.complete(
        stream, input=rounds([ADD], [ADD], [other_call], [ADD], [ADD], ["ok"]), tools=enabled("add", "say")
    )
    assert (len(receipts(final)), output_text(final)) == (5, "ok")


async def test_without_parallel_calls_each_round_has_one_call(client, stream):
    steps = rounds([ADD, ADD, ADD], [ADD, ADD], ["ok"])
    final = await client.complete(stream, input=steps, tools=enabled("add"), parallel_tool_calls=False)
    assert kinds(final) == ["add", "add", "message"]


async def test_tool_choice_applies_to_first_round_only(client, stream, context):
    tools = [*enabled("add", "say"), *functions("f")]
    for choice in ("required", {"type": "test:add"}):
        fields = {"tools": tools, "tool_choice": choice, **context}
        final = await client.complete(stream, input=rounds([ADD], ["ok"]), **fields)
        assert (output_text(final), final["tool_choice"]) == ("ok", choice)
        assert (await client.expect_failure(stream, input=rounds(["no"]), **fields))["code"] == "tool_call_missing"
    error = await client.expect_failure(stream, input=rounds([call("f")]), **fields)
    assert error["code"] == "tool_not_allowed"


async def test_allowed_tools_apply_to_every_round(client, stream):
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "test:add"}]}
    fields = {"tools": enabled("add", "say"), "tool_choice": choice}
    final = await client.complete(stream, input=rounds([ADD], [{"tell": None}]), **fields)
    assert json.loads(output_text(final))["callable_tools"] == ["add"]
    assert final["tool_choice"] == choice
    error = await client.expect_failure(stream, input=rounds([ADD], [call("say", {"value": 1})]), **fields)
    assert error["code"] == "tool_not_allowed"


async def test_toolset_type_is_chosen_as_a_whole(client, stream, name):
    fields = {"tools": enabled("slow", "add"), "tool_choice": {"type": "test:slow"}}
    for tool in ("nap", "doze"):
        assert outcomes(await client.complete(stream, input=rounds([call(tool, {"run": name()})]), **fields))
    assert (await client.expect_failure(stream, input=rounds([ADD]), **fields))["code"] == "tool_not_allowed"


@pytest.mark.parametrize("choice", ["none", {"type": "allowed_tools", "mode": "none", "tools": enabled("add")}])
async def test_disallowed_hosted_tool_is_not_run(client, stream, choice, control, name):
    run = name()
    steps = rounds([call("wait", {"run": run})])
    error = await client.expect_failure(stream, input=steps, tools=enabled("wait", "add"), tool_choice=choice)
    assert error["code"] == "tool_not_allowed"
    assert await control.trace(run) == []


# Truncated output.


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_hosted_calls_of_truncated_output_are_not_run(client, stream, control, name, reason):
    run = name()
    steps = ["Hm. ", call("wait", {"run": run}), {"Finish": {"reason": reason}}]
    final = await client.complete(stream, input=rounds(steps, ["never"]), tools=enabled("wait"))
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert outcomes(final) == [("wait", "incomplete", None)]
    assert output_text(final) == "Hm. "
    assert await control.trace(run) == []


@pytest.mark.parametrize(
    "steps", [[ADD, call("f", '{"a'), TRUNCATED], [call("f", '{"a'), ADD, call("f", '{"b'), TRUNCATED]]
)
async def test_truncated_client_call_beside_hosted_call_is_incomplete(client, stream, steps):
    final = await client.complete(stream, input=rounds(steps), tools=[*enabled("add"), *functions("f")])
    assert final["status"] == "incomplete"
    cut = [item for item in final["output"] if item["type"] == "function_call"]
    assert [item["status"] for item in cut] == ["incomplete"] * len(cut)


async def test_max_output_tokens_is_reduced_by_earlier_rounds(client, stream):
    used = {"Usage": {"input_tokens": 1, "output_tokens": 12}}
    steps = rounds([ADD, used], [{"tell": None}, used], ["never"])
    final = await client.complete(stream, input=steps, tools=enabled("add"), max_output_tokens=20)
    assert json.loads(output_text(final))["max_output_tokens"] == 8
    spent = rounds([ADD, used], [ADD, used], ["never"])
    final = await client.complete(stream, input=spent, tools=enabled("add"), max_output_tokens=20)
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert kinds(final) == ["add", "add"]
    assert final["max_output_tokens"] == 20


# Disconnects.


@pytest.mark.parametrize("tool", ["wait", "thread"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_disconnect_cancels_hosted_tools(client, control, name, stream, tool, reset):
    runs = [name(), name()]
    steps = rounds([ADD], [call(tool, {"run": run}) for run in runs], ["never"], run=name())
    body = {
        "model": "scripted",
        "input": steps,
        "tools": enabled(tool, "add"),
        "stream": stream,
        "metadata": {"x": runs[0]},
    }
    async with client.open_request(body) as connection:
        for run in runs:
            await control.wait_for(run, "tool started")
        disconnected_at = time.monotonic()
        await connection.disconnect(reset=reset)
        for run in runs:
            assert (await control.wait_for(run, "tool ended", within=5))["at"] - disconnected_at < 1.0
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("tool", ["wait", "thread"])
async def test_record_after_disconnect_shows_tool_progress(client, control, name, tool):
    run = name()
    steps = rounds([ADD], [call(tool, {"run": run})], ["never"])
    async with client.stream(input=steps, tools=enabled(tool, "add")) as stream:
        response_id = (await stream.next())["response"]["id"]
        await control.wait_for(run, "tool started")
    with anyio.fail_after(2):
        while (stored := (await client.get(f"/responses/{response_id}")).json())["status"] == "in_progress":
            await anyio.lowlevel.checkpoint()
    check_response(stored)
    assert stored["status"] == "cancelled"
    assert [status for _, status, _ in outcomes(stored)] == ["completed", "incomplete"]
    turn = await client.describe_turn(input=[ASK], previous_response_id=response_id)
    assert [message["role"] for message in turn["messages"]] == ["user", "assistant", "tool", "user"]


# Functions of the client, and continuation.


@pytest.mark.parametrize("steps", [[ADD, call("f")], [call("f"), ADD], [call("f"), ADD, call("f"), ADD]])
async def test_mixed_calls_are_run_here_and_returned_to_client(client, stream, context, steps):
    tools = [*enabled("add"), *functions("f")]
    first = await client.complete(stream, input=rounds(steps, ["never"]), tools=tools, **context)
    own = [item for item in first["output"] if item["type"] == "function_call"]
    assert len(own) == len(receipts(first)) == len(steps) // 2
    assert {status for _, status, _ in outcomes(first)} == {"completed"}
    answers = [{"type": "function_call_output", "call_id": item["call_id"], "output": "of f"} for item in own]
    turn = await client.describe_turn(stream, input=[*answers, ASK], previous_response_id=first["id"], tools=tools)
    call_ids = [call_ids["id"] for message in turn["messages"] for call_ids in message.get("tool_calls", ())]
    answered = {
        message["tool_call_id"]: message["content"] for message in turn["messages"] if "tool_call_id" in message
    }
    assert sorted(answered) == sorted(call_ids)
    assert sorted(answered.values()) == ["3"] * len(own) + ["of f"] * len(own)


async def test_receipt_gives_same_context_stored_or_sent_back(client, stream):
    first = await client.complete(
        stream, input=rounds(["Hm. ", ADD, call("fail")], ["So."]), tools=enabled("add", "fail")
    )
    stored = await client.describe_turn(stream, input=[ASK], previous_response_id=first["id"], tools=enabled("add"))
    sent = await client.describe_turn(stream, input=[*first["output"], ASK], store=False, tools=enabled("add"))
    plain = await client.describe_turn(stream, input=[*first["output"], ASK], store=False)
    assert stored["messages"][1:] == sent["messages"] == plain["messages"]
    assert [item["type"] for item in sent["items"]] == [
        item["type"] for item in [*first["output"], {"type": "message"}]
    ]
    for emitted, received in zip(first["output"], sent["items"], strict=False):
        assert {**received, "id": ""} == {**emitted, "id": ""}
    chained = stored["items"][1 : 1 + len(first["output"])]
    assert chained == first["output"]


async def test_receipt_is_accepted_as_input_item_and_by_reference(client, stream):
    first = await client.create(input=rounds([ADD]), tools=enabled("add"))
    (receipt,) = receipts(first)
    reference = {"type": "item_reference", "id": receipt["id"]}
    turn = await client.describe_turn(stream, input=[reference, ASK])
    assert turn["items"][0] == receipt
    assert [message["role"] for message in turn["messages"]] == ["assistant", "tool", "user"]
    second = await client.complete(stream, input=[receipt, ASK])
    (_, listed) = (await client.get(f"/responses/{second['id']}/input_items")).json()["data"]
    check_item(listed)
    assert {**listed, "id": receipt["id"]} == receipt
    once = await client.describe_turn(stream, input=[receipt, reference, ASK], previous_response_id=first["id"])
    assert [item["id"] for item in once["items"]].count(receipt["id"]) == 1
    other_call = await client.with_key("Bearer mallory").post(stream=stream, input=[reference, ASK])
    other_call.error(400, "item_not_found", "input[0].id")


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
async def test_modified_receipt_never_causes_server_error(client, stream, broken):
    receipt = {"type": "test:add", "call_id": "a", "name": "add", "arguments": "{}", "output": "0", "status": "failed"}
    reply = await client.post(stream=stream, input=[{**receipt, **broken}, ASK])
    assert reply.status == 200 or reply.error(400)["param"].startswith("input[0]")


async def test_hosted_tool_items_are_not_stored_with_store_false(client, stream):
    final = await client.complete(stream, input=rounds([ADD], ["ok"]), tools=enabled("add"), store=False)
    assert outcomes(final) == [("add", "completed", "3")]
    (await client.get(f"/responses/{final['id']}")).error(404)
    (await client.post(input=[{"type": "item_reference", "id": receipts(final)[0]["id"]}])).error(400)
