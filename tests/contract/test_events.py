"""The contract's rules "Events"."""

from __future__ import annotations

import json

import pytest

from tests.support.conformance import check_response

from .client import functions, output_text, script
from .hosts import FASTEST

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST

MODELS = ["scripted", "scripted-sync"]
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
"""The functions that the scripts call."""

SCRIPTS = {
    "nothing": [],
    "no text": [""],
    "one word": ["word"],
    "three words": ["one ", "two ", "three"],
    "everything": EVERYTHING,
    "only reasoning": [{"Reasoning": {"text": "hm"}}],
    "only call": [{"ToolCall": {"name": "f", "arguments": "{}"}}],
    "call without arguments": [{"ToolCall": {"name": "f"}}],
    "two messages": ["one", {"Message": {}}, "two"],
    "empty message": [{"Message": {}}],
    "interleaved items": ["a", {"Reasoning": {"text": "b"}}, "c", {"ToolCall": {"name": "f"}}, "d"],
    "usage first": [{"Usage": {"input_tokens": 1, "output_tokens": 2}}, "a"],
    "truncated text": ["a cut", {"Finish": {"reason": "max_output_tokens"}}],
    "truncated at once": [{"Finish": {"reason": "max_output_tokens"}}],
    "truncated reasoning": [{"Reasoning": {"text": "hm"}}, {"Finish": {"reason": "max_output_tokens"}}],
    "truncated summary": [{"ReasoningSummary": {"text": "hm"}}, {"Finish": {"reason": "max_output_tokens"}}],
    "truncated arguments": [
        {"ToolCall": {"name": "f", "arguments": '{"a'}},
        {"Finish": {"reason": "max_output_tokens"}},
    ],
    "truncated JSON": ['{"a": [1, 2', {"Finish": {"reason": "max_output_tokens"}}],
    "filtered": ["something ", {"Finish": {"reason": "content_filter"}}],
    "filtered refusal": [{"Refusal": {"text": "no"}}, {"Finish": {"reason": "content_filter"}}],
    "truncated, then usage": [
        "a",
        {"Finish": {"reason": "max_output_tokens"}},
        {"Usage": {"input_tokens": 1, "output_tokens": 1}},
    ],
}


def without_ids(response):
    """Return the response without ids and times."""
    own = {"id", "created_at", "completed_at"}
    call_ids = {}

    def items():
        for item in response["output"]:
            members = {key: value for key, value in item.items() if key != "id"}
            if item["type"] == "function_call" and item["call_id"] not in ("call_one", "call_two"):
                members["call_id"] = call_ids.setdefault(item["call_id"], f"call {len(call_ids)}")
            yield members

    return {**{key: value for key, value in response.items() if key not in own}, "output": list(items())}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("steps", SCRIPTS.values(), ids=SCRIPTS)
async def test_stream_is_legal_and_ends_with_the_unstreamed_object(client, model, steps):
    streamed = await client.streamed(model=model, input=script(*steps), tools=TOOLS)
    response = await client.create(model=model, input=script(*steps), tools=TOOLS)
    assert without_ids(streamed) == without_ids(response)
    assert (await client.get(f"/responses/{streamed['id']}")).json() == streamed
    assert (await client.get(f"/responses/{response['id']}")).json() == response


async def test_text_response_has_exact_event_sequence(client):
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


@pytest.mark.parametrize("model", [*MODELS, "scripted-plain"])
async def test_created_and_in_progress_precede_slow_model_output(client, control, name, model):
    gate = name()
    async with client.stream(model=model, input=script({"gate": gate}, "at last")) as stream:
        assert (await stream.next(within=2))["type"] == "response.created"
        assert (await stream.next(within=2))["type"] == "response.in_progress"
        await control.open_gate(gate)
        assert output_text(await stream.rest()) == "at last"


@pytest.mark.parametrize("model", ["scripted-sync", "scripted-plain"])
async def test_blocking_backend_does_not_delay_other_requests(client, control, name, model):
    gate = name()
    async with client.stream(model=model, input=script({"gate": gate}, "slow")) as stream:
        await stream.until("response.in_progress")
        assert output_text(await client.create(input=script("quick"))) == "quick"
        assert output_text(await client.create(model=model, input=script("as quick"))) == "as quick"
        await control.open_gate(gate)
        assert output_text(await stream.rest()) == "slow"


@pytest.mark.parametrize("model", MODELS)
async def test_stream_sends_each_delta_before_the_next_is_generated(client, control, name, model):
    gates = [name() for _ in range(4)]
    steps = [step for gate in gates for step in (f"before {gate}", {"gate": gate})]
    async with client.stream(model=model, input=script(*steps)) as stream:
        for gate in gates:
            event = await stream.until("response.output_text.delta", within=5)
            assert event["delta"] == f"before {gate}"
            await control.open_gate(gate)
        await stream.rest()


async def test_argument_and_summary_deltas_are_sent_immediately(client, control, name):
    summary, call = name(), name()
    steps = [
        {"ReasoningSummary": {"text": "hm"}},
        {"gate": summary},
        {"ToolCall": {"name": "f", "arguments": '{"a":'}},
        {"gate": call},
        {"ToolArguments": {"delta": "1}"}},
    ]
    async with client.stream(input=script(*steps), tools=TOOLS) as stream:
        assert (await stream.until("response.reasoning_summary_text.delta"))["delta"] == "hm"
        await control.open_gate(summary)
        added = (await stream.until("response.output_item.added"))["item"]
        assert (await stream.until("response.function_call_arguments.delta"))["delta"] == '{"a":'
        await control.open_gate(call)
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
    final = await client.complete(stream, input=script(*EVERYTHING), tools=TOOLS)
    calls = [item for item in final["output"] if item["type"] == "function_call"]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("first", {"a": 1}),
        ("second", {"b": 2}),
        ("third", {}),
    ]
    assert [call["call_id"] for call in calls[:2]] == ["call_one", "call_two"]


async def test_items_and_parts_keep_generation_order(client, stream):
    final = await client.complete(stream, input=script(*EVERYTHING), tools=TOOLS)
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
async def test_truncated_generation_is_incomplete_with_reason(client, stream, reason):
    final = await client.complete(stream, input=script("half a sen", {"Finish": {"reason": reason}}))
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert [item["status"] for item in final["output"]] == ["incomplete"]
    assert output_text(final) == "half a sen"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefix", [[], ["some text"], [{"ToolCall": {"name": "f"}}], [{"Reasoning": {"text": "hm"}}]])
async def test_failing_backend_ends_stream_with_error_and_response_failed(client, model, prefix):
    steps = [*prefix, {"raise": "the password is hunter2"}]
    async with client.stream(model=model, input=script(*steps), tools=TOOLS) as stream:
        final = await stream.rest()
        error = stream.events[-2]["error"]
    assert (error["type"], error["code"], error["param"]) == ("model_error", "model_error", None)
    assert final["error"]["code"] == "model_error"
    assert "hunter2" not in json.dumps([error, final["error"]])
    stored = (await client.get(f"/responses/{final['id']}")).json()
    check_response(stored)
    assert stored == final


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefix", [[], ["some text"]])
async def test_failing_backend_returns_http_error_without_stream(client, model, prefix):
    reply = await client.post(model=model, input=script(*prefix, {"raise": "the password is hunter2"}))
    reply.error(500, "model_error")
    assert b"hunter2" not in reply.body
    assert b"some text" not in reply.body


@pytest.mark.parametrize("model", MODELS)
async def test_api_error_of_backend_is_shown_unchanged(client, model):
    steps = [{"refuse": "TooManyRequests", "message": "The queue is full.", "retry_after": 7}]
    reply = await client.post(model=model, input=script(*steps))
    error = reply.error(429, "too_many_requests")
    assert (error["type"], error["message"]) == ("too_many_requests", "The queue is full.")
    assert reply.headers["retry-after"] == "7"
    async with client.stream(model=model, input=script("text", *steps)) as stream:
        await stream.rest()
        assert stream.events[-2]["error"] == error


JUNK = {
    "number": [{"junk": 42}],
    "null": [{"junk": None}],
    "list": [{"junk": ["a", "list"]}],
    "text that is a number": [{"Text": {"text": 7}}],
    "arguments without a call": [{"ToolArguments": {"delta": "x"}}],
    "arguments of an unknown call": [
        {"ToolCall": {"name": "f"}},
        {"ToolArguments": {"delta": "x", "call_id": "other"}},
    ],
    "arguments after the call": [{"ToolCall": {"name": "f"}}, "text", {"ToolArguments": {"delta": "x"}}],
    "duplicate call_id": [{"ToolCall": {"name": "f", "call_id": "a"}}, {"ToolCall": {"name": "f", "call_id": "a"}}],
    "too long call_id": [{"ToolCall": {"name": "f", "call_id": "a" * 65}}],
    "empty tool name": [{"ToolCall": {"name": ""}}],
    "tool name with space": [{"ToolCall": {"name": "a b"}}],
    "text after the end": [{"Finish": {}}, "text"],
    "unknown finish reason": [{"Finish": {"reason": "tired"}}],
    "unknown phase": [{"Message": {"phase": "prologue"}}],
    "extension without a slug": [{"Item": {"type": "search"}}],
    "extension with reserved field": [{"Item": {"type": "acme:search", "fields": {"id": "mine"}}}],
    "negative tokens": [{"Usage": {"input_tokens": -1, "output_tokens": 0}}],
}


@pytest.mark.parametrize("steps", JUNK.values(), ids=JUNK)
async def test_illegal_output_fails_only_its_own_response(client, steps):
    for stream in (False, True):
        error = await client.expect_failure(stream, input=script("fine, ", *steps), tools=TOOLS)
        assert error["type"] == "model_error"
    assert output_text(await client.create(input=script("still here"))) == "still here"


@pytest.mark.parametrize("model", MODELS)
async def test_backend_is_stopped_after_illegal_output(client, control, name, model):
    run = name()
    steps = [{"run": run}, {"junk": 42}, {"gate": "never"}]
    (await client.post(model=model, input=script(*steps))).error(500, "model_error")
    await control.wait_for(run, "ended", within=1)


async def test_extension_events_and_raw_reasoning_deltas_are_off_by_default(client):
    async with client.stream(input=script(*EVERYTHING), tools=TOOLS) as stream:
        final = await stream.rest()
        kinds = {event["type"] for event in stream.events}
    assert "acme:trace" not in kinds
    assert not [kind for kind in kinds if kind.startswith("response.reasoning.")]
    assert {"response.reasoning_summary_part.added", "response.reasoning_summary_text.delta"} <= kinds
    assert final["output"][0]["content"][0]["text"] == "Raw thought."


async def test_extension_events_and_raw_reasoning_deltas_can_be_switched_on(extended):
    async with extended.stream(input=script(*EVERYTHING), tools=TOOLS) as stream:
        await stream.rest()
        trace = [event for event in stream.events if event["type"] == "acme:trace"]
        raw = [event["delta"] for event in stream.events if event["type"] == "response.reasoning.delta"]
    assert [event["step"] for event in trace] == [1]
    assert raw == ["Raw ", "thought."]


async def test_logprobs_are_in_deltas_and_final_text(client):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    async with client.stream(input=script("no ", {"Text": {"text": "hi", "logprobs": LOGPROBS}}), **fields) as stream:
        final = await stream.rest()
    (entry,) = final["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"], entry["top_logprobs"][0]["token"]) == ("hi", -0.5, "ho")
    assert final["top_logprobs"] == 1


@pytest.mark.parametrize("logprob", ["-inf", "nan", "inf"])
async def test_non_finite_numbers_never_reach_wire(client, stream, logprob):
    steps = [{"Text": {"text": "a", "logprobs": [{"token": "a", "logprob": logprob, "bytes": [97]}]}}]
    fields = {"input": script(*steps), "include": ["message.output_text.logprobs"]}
    if stream:
        await client.streamed(**fields)  # the client rejects NaN and infinities
    else:
        await client.create(**fields)
