"""The rules of "Events": one state machine behind every transport."""

from __future__ import annotations

import json

import pytest

from tests.support.conformance import check_response

from .client import functions, output_text, script
from .hosts import ANY

pytestmark = pytest.mark.anyio

SERVED_BY = ANY

KINDS = ["puppet", "puppet-sync"]
"""A backend on the event loop, and one in a thread."""

LOGPROBS = [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top": [{"token": "ho", "logprob": -1.5}]}]

EVERYTHING = [
    {"ReasoningSummary": {"text": "First "}},
    {"ReasoningSummary": {"text": "thought."}},
    {"ReasoningSummary": {"text": "Second.", "new_part": True}},
    {"Reasoning": {"text": "Raw "}},
    {"Reasoning": {"text": "thought."}},
    {"Message": {"phase": "commentary"}},
    "Let me see. ",
    {"Annotation": {"url": "https://example.org/", "title": "Example", "start_index": 0, "end_index": 3}},
    "And see.",
    {"Refusal": {"text": "I'd rather "}},
    {"Refusal": {"text": "not."}},
    "But well.",
    {"Item": {"type": "acme:search", "fields": {"query": ["a", None, 1.5]}}},
    {"Event": {"type": "acme:trace", "fields": {"step": 1}}},
    {"ToolCall": {"name": "first", "call_id": "call_one"}},
    {"ToolCall": {"name": "second", "call_id": "call_two", "arguments": '{"b'}},
    {"ToolArguments": {"delta": '{"a"', "call_id": "call_one"}},
    {"ToolArguments": {"delta": '": 2}', "call_id": "call_two"}},
    {"ToolArguments": {"delta": ": 1}", "call_id": "call_one"}},
    {"ToolCall": {"name": "third"}},
    {"Message": {"phase": "final_answer"}},
    "Done.",
    {"Text": {"text": "hi", "logprobs": LOGPROBS}},
    {"Usage": {"input_tokens": 10, "output_tokens": 20, "cached_tokens": 4, "reasoning_tokens": 5}},
]

TOOLS = functions("f", "first", "second", "third")
"""What the scripts here call."""

SCRIPTS = {
    "nothing": [],
    "no text": [""],
    "one word": ["word"],
    "three words": ["one ", "two ", "three"],
    "everything": EVERYTHING,
    "reasoning alone": [{"Reasoning": {"text": "hm"}}],
    "a call alone": [{"ToolCall": {"name": "f", "arguments": "{}"}}],
    "a call without arguments": [{"ToolCall": {"name": "f"}}],
    "two messages": ["one", {"Message": {}}, "two"],
    "an empty message": [{"Message": {}}],
    "items that take turns": ["a", {"Reasoning": {"text": "b"}}, "c", {"ToolCall": {"name": "f"}}, "d"],
    "usage first": [{"Usage": {"input_tokens": 1, "output_tokens": 2}}, "a"],
    "cut text": ["a cut", {"Finish": {"reason": "max_output_tokens"}}],
    "cut at once": [{"Finish": {"reason": "max_output_tokens"}}],
    "cut reasoning": [{"Reasoning": {"text": "hm"}}, {"Finish": {"reason": "max_output_tokens"}}],
    "cut summary": [{"ReasoningSummary": {"text": "hm"}}, {"Finish": {"reason": "max_output_tokens"}}],
    "cut arguments": [{"ToolCall": {"name": "f", "arguments": '{"a'}}, {"Finish": {"reason": "max_output_tokens"}}],
    "cut JSON": ['{"a": [1, 2', {"Finish": {"reason": "max_output_tokens"}}],
    "filtered": ["something ", {"Finish": {"reason": "content_filter"}}],
    "filtered refusal": [{"Refusal": {"text": "no"}}, {"Finish": {"reason": "content_filter"}}],
    "cut, then usage": [
        "a",
        {"Finish": {"reason": "max_output_tokens"}},
        {"Usage": {"input_tokens": 1, "output_tokens": 1}},
    ],
}


def anonymous(response):
    """The response without what differs from one to the next: ids and times."""
    own = {"id", "created_at", "completed_at"}
    call_ids = {}

    def items():
        for item in response["output"]:
            shown = {key: value for key, value in item.items() if key != "id"}
            if item["type"] == "function_call" and item["call_id"] not in ("call_one", "call_two"):
                shown["call_id"] = call_ids.setdefault(item["call_id"], f"call {len(call_ids)}")
            yield shown

    return {**{key: value for key, value in response.items() if key not in own}, "output": list(items())}


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("moves", SCRIPTS.values(), ids=SCRIPTS)
async def test_a_stream_is_legal_and_ends_in_the_object_that_the_whole_answer_is(client, model, moves):
    streamed = await client.streamed(model=model, input=script(*moves), tools=TOOLS)
    whole = await client.create(model=model, input=script(*moves), tools=TOOLS)
    assert anonymous(streamed) == anonymous(whole)
    assert (await client.get(f"/responses/{streamed['id']}")).json() == streamed
    assert (await client.get(f"/responses/{whole['id']}")).json() == whole


async def test_a_plain_answer_has_exactly_these_events(client):
    async with client.stream(input=script("one ", "two")) as stream:
        await stream.rest()
        assert [event["type"] for event in stream.events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]


@pytest.mark.parametrize("model", [*KINDS, "puppet-plain"])
async def test_created_and_in_progress_arrive_before_a_slow_model_says_anything(client, hand, name, model):
    gate = name()
    async with client.stream(model=model, input=script({"gate": gate}, "at last")) as stream:
        assert (await stream.next(within=2))["type"] == "response.created"
        assert (await stream.next(within=2))["type"] == "response.in_progress"
        await hand.open(gate)
        assert output_text(await stream.rest()) == "at last"


@pytest.mark.parametrize("model", ["puppet-sync", "puppet-plain"])
async def test_a_backend_that_blocks_its_thread_holds_up_nobody_else(client, hand, name, model):
    gate = name()
    async with client.stream(model=model, input=script({"gate": gate}, "slow")) as stream:
        await stream.until("response.in_progress")
        assert output_text(await client.create(input=script("quick"))) == "quick"
        assert output_text(await client.create(model=model, input=script("as quick"))) == "as quick"
        await hand.open(gate)
        assert output_text(await stream.rest()) == "slow"


@pytest.mark.parametrize("model", KINDS)
async def test_each_delta_leaves_before_the_next_is_made(client, hand, name, model):
    gates = [name() for _ in range(4)]
    moves = [move for gate in gates for move in (f"before {gate}", {"gate": gate})]
    async with client.stream(model=model, input=script(*moves)) as stream:
        for gate in gates:
            event = await stream.until("response.output_text.delta", within=5)
            assert event["delta"] == f"before {gate}"
            await hand.open(gate)
        await stream.rest()


async def test_each_delta_of_arguments_and_summaries_leaves_at_once(client, hand, name):
    summary, call = name(), name()
    moves = [
        {"ReasoningSummary": {"text": "hm"}},
        {"gate": summary},
        {"ToolCall": {"name": "f", "arguments": '{"a":'}},
        {"gate": call},
        {"ToolArguments": {"delta": "1}"}},
    ]
    async with client.stream(input=script(*moves), tools=TOOLS) as stream:
        assert (await stream.until("response.reasoning_summary_text.delta"))["delta"] == "hm"
        await hand.open(summary)
        added = (await stream.until("response.output_item.added"))["item"]
        assert (await stream.until("response.function_call_arguments.delta"))["delta"] == '{"a":'
        await hand.open(call)
        final = await stream.rest()
    assert {key: added[key] for key in ("type", "name", "arguments", "status")} == {
        "type": "function_call",
        "name": "f",
        "arguments": "",
        "status": "in_progress",
    }
    done = final["output"][-1]
    assert (done["id"], done["call_id"], done["arguments"]) == (added["id"], added["call_id"], '{"a":1}')


async def test_parallel_calls_interleave_without_mixing(client, stream):
    final = await client.made(stream, input=script(*EVERYTHING), tools=TOOLS)
    calls = [item for item in final["output"] if item["type"] == "function_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("first", {"a": 1}),
        ("second", {"b": 2}),
        ("third", {}),
    ]
    assert [call["call_id"] for call in calls[:2]] == ["call_one", "call_two"]


async def test_items_and_parts_come_in_the_order_in_which_they_were_made(client, stream):
    final = await client.made(stream, input=script(*EVERYTHING), tools=TOOLS)
    kinds = [item["type"] for item in final["output"]]
    assert kinds == [
        "reasoning",
        "message",
        "acme:search",
        "function_call",
        "function_call",
        "function_call",
        "message",
    ]
    reasoning, commentary, extension = final["output"][:3]
    assert [part["text"] for part in reasoning["summary"]] == ["First thought.", "Second."]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Raw thought."}]
    assert (commentary["phase"], final["output"][-1]["phase"]) == ("commentary", "final_answer")
    assert [part.get("text", part.get("refusal")) for part in commentary["content"]] == [
        "Let me see. And see.",
        "I'd rather not.",
        "But well.",
    ]
    assert commentary["content"][0]["annotations"][0]["url"] == "https://example.org/"
    assert extension["query"] == ["a", None, 1.5]
    assert final["usage"]["total_tokens"] == 30


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_generation_that_is_cut_is_incomplete_with_its_reason(client, stream, reason):
    final = await client.made(stream, input=script("half a sen", {"Finish": {"reason": reason}}))
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert [item["status"] for item in final["output"]] == ["incomplete"]
    assert output_text(final) == "half a sen"


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("before", [[], ["some text"], [{"ToolCall": {"name": "f"}}], [{"Reasoning": {"text": "hm"}}]])
async def test_a_backend_that_raises_fails_its_stream_with_error_and_response_failed(client, model, before):
    moves = [*before, {"raise": "the password is hunter2"}]
    async with client.stream(model=model, input=script(*moves), tools=TOOLS) as stream:
        final = await stream.rest()
        error = stream.events[-2]["error"]
    assert (error["type"], error["code"], error["param"]) == ("model_error", "model_error", None)
    assert final["error"]["code"] == "model_error"
    assert "hunter2" not in json.dumps([error, final["error"]])
    kept = (await client.get(f"/responses/{final['id']}")).json()
    check_response(kept)
    assert kept == final


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("before", [[], ["some text"]])
async def test_a_backend_that_raises_is_an_http_error_where_nothing_streams(client, model, before):
    reply = await client.post(model=model, input=script(*before, {"raise": "the password is hunter2"}))
    reply.error(500, "model_error")
    assert b"hunter2" not in reply.body
    assert b"some text" not in reply.body


@pytest.mark.parametrize("model", KINDS)
async def test_an_error_that_a_backend_means_for_the_client_is_shown_as_it_is(client, model):
    moves = [{"refuse": "TooManyRequests", "message": "The queue is full.", "retry_after": 7}]
    reply = await client.post(model=model, input=script(*moves))
    error = reply.error(429, "too_many_requests")
    assert (error["type"], error["message"]) == ("too_many_requests", "The queue is full.")
    assert reply.headers["retry-after"] == "7"
    async with client.stream(model=model, input=script("text", *moves)) as stream:
        await stream.rest()
        assert stream.events[-2]["error"] == error


JUNK = {
    "a number": [{"junk": 42}],
    "null": [{"junk": None}],
    "bytes of a kind": [{"junk": ["a", "list"]}],
    "a text that is none": [{"Text": {"text": 7}}],
    "arguments without a call": [{"ToolArguments": {"delta": "x"}}],
    "arguments of an unknown call": [
        {"ToolCall": {"name": "f"}},
        {"ToolArguments": {"delta": "x", "call_id": "other"}},
    ],
    "arguments after the call": [{"ToolCall": {"name": "f"}}, "text", {"ToolArguments": {"delta": "x"}}],
    "a call_id twice": [{"ToolCall": {"name": "f", "call_id": "a"}}, {"ToolCall": {"name": "f", "call_id": "a"}}],
    "a call_id too long": [{"ToolCall": {"name": "f", "call_id": "a" * 65}}],
    "a tool without a name": [{"ToolCall": {"name": ""}}],
    "a tool's name with a space": [{"ToolCall": {"name": "a b"}}],
    "text after the end": [{"Finish": {}}, "text"],
    "an unknown reason": [{"Finish": {"reason": "tired"}}],
    "an unknown phase": [{"Message": {"phase": "prologue"}}],
    "an extension without a slug": [{"Item": {"type": "search"}}],
    "an extension that is the id": [{"Item": {"type": "acme:search", "fields": {"id": "mine"}}}],
    "fewer tokens than none": [{"Usage": {"input_tokens": -1, "output_tokens": 0}}],
}


@pytest.mark.parametrize("moves", JUNK.values(), ids=JUNK)
async def test_an_output_that_has_no_place_fails_its_own_response_alone(client, moves):
    for stream in (False, True):
        error = await client.fails(stream, input=script("fine, ", *moves), tools=TOOLS)
        assert error["type"] == "model_error"
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", KINDS)
async def test_a_backend_whose_output_was_refused_is_stopped(client, hand, name, model):
    run = name()
    moves = [{"run": run}, {"junk": 42}, {"gate": "never"}]
    (await client.post(model=model, input=script(*moves))).error(500, "model_error")
    await hand.seen(run, "ended", within=1)


async def test_extension_events_and_raw_reasoning_deltas_are_off_by_default(client):
    async with client.stream(input=script(*EVERYTHING), tools=TOOLS) as stream:
        final = await stream.rest()
        kinds = {event["type"] for event in stream.events}
    assert "acme:trace" not in kinds
    assert not [kind for kind in kinds if kind.startswith("response.reasoning.")]
    assert {"response.reasoning_summary_part.added", "response.reasoning_summary_text.delta"} <= kinds
    assert final["output"][0]["content"][0]["text"] == "Raw thought."


async def test_extension_events_and_raw_reasoning_deltas_can_be_switched_on(chatty):
    async with chatty.stream(input=script(*EVERYTHING), tools=TOOLS) as stream:
        await stream.rest()
        trace = [event for event in stream.events if event["type"] == "acme:trace"]
        raw = [event["delta"] for event in stream.events if event["type"] == "response.reasoning.delta"]
    assert [event["step"] for event in trace] == [1]
    assert raw == ["Raw ", "thought."]


async def test_logprobs_come_with_their_deltas_and_stand_in_the_final_text(client):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with client.stream(input=script("no ", {"Text": {"text": "hi", "logprobs": LOGPROBS}}), **fields) as stream:
        final = await stream.rest()
    (entry,) = final["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"][0]["token"]) == ("hi", -0.5, "ho")
    assert final["top_logprobs"] == 1


@pytest.mark.parametrize("logprob", ["-inf", "nan", "inf"])
async def test_what_is_no_number_never_reaches_the_wire(client, stream, logprob):
    moves = [{"Text": {"text": "a", "logprobs": [{"token": "a", "logprob": logprob, "bytes": [97]}]}}]
    fields = {"input": script(*moves), "include": ["message.output_text.logprobs"]}
    if stream:
        await client.streamed(**fields)  # reads JSON strictly, and numbers as the specification has them
    else:
        await client.create(**fields)
