"""Context windows: oversize prompts are rejected, or the oldest turns are dropped."""

from __future__ import annotations

import json

import pytest

from .client import call, functions, output_text, script
from .hosts import FASTEST
from .scripted import WINDOW

pytestmark = [pytest.mark.anyio, pytest.mark.independent]

SERVED_BY = FASTEST
SMALL = {"model": "scripted-small"}
RECITE = [{"type": "test:recite"}]
ASK = {"role": "user", "content": "?"}
ROOM = WINDOW - WINDOW // 4
"""Words that truncation leaves in a prompt if the request has no 'max_output_tokens'."""


def words(text, count):
    return " ".join([text] * count)


def text_message(role, text, count):
    return {"role": role, "content": words(text, count)}


def conversation(count, size=5):
    return [
        message
        for turn in range(count)
        for message in (
            text_message("user", f"question-{turn}", size),
            text_message("assistant", f"answer-{turn}", size),
        )
    ]


def first_words(turn):
    """Return the first word of every message in a turn."""
    return [str(message["content"]).split(" ")[0] for message in turn["messages"]]


async def test_oversize_prompt_returns_400_before_generation(client, stream, context):
    for fields in (
        {"input": [text_message("user", "long", WINDOW - 1), ASK]},
        {"input": words("long", WINDOW)},
        {"input": "short", "instructions": words("long", WINDOW - 1)},
        {"input": [text_message("system", "long", WINDOW), ASK], "truncation": "disabled"},
        {"input": words("long", WINDOW), "stream": stream, "store": False},
    ):
        reply = await client.post(**{**SMALL, "stream": stream, **fields, **context})
        error = reply.error(400, "context_length_exceeded", "input")
        assert error["type"] == "invalid_request"
        assert "long" not in error["message"].split()


async def test_prompt_that_just_fits_is_kept_whole(client, stream):
    for mode in ("disabled", None):
        fields = {"input": [*conversation(9), text_message("user", "last", WINDOW - 91)], **SMALL, "truncation": mode}
        turn = await client.describe_turn(stream, **fields)
        assert len(turn["items"]) == 19
        one_more = [*fields["input"], ASK]
        (await client.post(**{**fields, "input": one_more, "stream": stream})).error(400, "context_length_exceeded")


async def test_model_without_window_accepts_any_prompt(client, stream):
    turn = await client.describe_turn(stream, input=[text_message("user", "long", WINDOW * 10), ASK])
    assert len(turn["items"]) == 2


async def test_auto_truncation_drops_oldest_turns(client, stream):
    history = conversation(20)
    turn = await client.describe_turn(stream, **SMALL, input=[*history, ASK], truncation="auto")
    # Seven turns of 10 words, and the question.
    assert first_words(turn) == [message["content"].split(" ")[0] for message in history[-14:]] + ["?"]
    final = await client.complete(stream, **SMALL, input=[*history, ASK], truncation="auto")
    assert final["truncation"] == "auto"


async def test_auto_truncation_drops_nothing_if_prompt_fits(client, stream):
    turn = await client.describe_turn(
        stream, **SMALL, input=[*conversation(7), text_message("user", "?", ROOM - 70)], truncation="auto"
    )
    assert len(turn["items"]) == 15
    turn = await client.describe_turn(
        stream, **SMALL, input=[*conversation(7), text_message("user", "?", ROOM - 69)], truncation="auto"
    )
    assert len(turn["items"]) == 13


@pytest.mark.parametrize(("tokens", "turns"), [(None, 7), (16, 8), (40, 5), (50, 4), (1000, 4)])
async def test_truncation_reserves_room_for_answer(client, stream, tokens, turns):
    turn = await client.describe_turn(
        stream, **SMALL, input=[*conversation(20), ASK], truncation="auto", max_output_tokens=tokens
    )
    assert len(turn["items"]) == 2 * turns + 1


async def test_truncation_keeps_system_messages_and_instructions(client, stream):
    history = [
        text_message("system", "rule", 10),
        *conversation(4),
        text_message("developer", "hint", 10),
        *conversation(4),
    ]
    turn = await client.describe_turn(
        stream, **SMALL, input=[*history, ASK], truncation="auto", instructions=words("order", 10)
    )
    assert first_words(turn)[:2] == ["order", "rule"]
    assert first_words(turn)[-1] == "?"
    assert first_words(turn).count("hint") == 1
    assert len(turn["items"]) < len(history)


async def test_truncation_keeps_last_user_message(client, stream):
    last = [text_message("user", "first-half", 40), text_message("user", "second-half", WINDOW - 41)]
    turn = await client.describe_turn(stream, **SMALL, input=[*conversation(20), *last], truncation="auto")
    assert first_words(turn) == ["first-half", "second-half"]
    reply = await client.post(**SMALL, stream=stream, input=[*conversation(20), *last, ASK], truncation="auto")
    reply.error(400, "context_length_exceeded", "input")


def rounds(count, size):
    """Return calls and their outputs, with a message before each."""
    return [
        item
        for turn in range(count)
        for item in (
            {"role": "assistant", "content": f"look-{turn}"},
            {"type": "function_call", "call_id": f"call-{turn}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"call-{turn}", "output": words(f"result-{turn}", size)},
        )
    ]


@pytest.mark.parametrize("earlier", [[], conversation(3)], ids=["first turn", "later turn"])
async def test_truncation_drops_calls_with_their_outputs(client, stream, earlier):
    history = [*earlier, ASK, *rounds(20, 8)]
    turn = await client.describe_turn(stream, **SMALL, input=history, truncation="auto")
    call_ids = [item["call_id"] for item in turn["items"] if item["type"] == "function_call"]
    answered = [item["call_id"] for item in turn["items"] if item["type"] == "function_call_output"]
    assert call_ids == answered
    assert call_ids[-1] == "call-19"
    assert 0 < len(call_ids) < 20
    assert turn["messages"][0]["role"] == "user"


async def test_truncation_drops_call_with_late_output(client, stream):
    late = [
        text_message("user", "old", 30),
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        text_message("user", "newer", 30),
        {"type": "function_call_output", "call_id": "a", "output": "late"},
        text_message("user", "last", 30),
    ]
    turn = await client.describe_turn(stream, **SMALL, input=late, truncation="auto")
    kinds = [item["type"] for item in turn["items"]]
    assert kinds.count("function_call") == kinds.count("function_call_output")
    assert first_words(turn)[-1] == "last"


async def test_truncation_does_not_change_stored_conversation(client, stream):
    previous = None
    for turn in range(9):
        ask = [text_message("user", f"question-{turn}", 10), {"role": "user", "content": script(f"answer-{turn}")}]
        final = await client.complete(stream, **SMALL, input=ask, previous_response_id=previous, truncation="auto")
        previous = final["id"]
    fields = {"input": [ASK], "previous_response_id": previous, **SMALL}
    seen_turn = await client.describe_turn(stream, **fields, truncation="auto")
    assert "question-0" not in first_words(seen_turn)
    assert first_words(seen_turn)[-4:] == ["question-8", '["answer-8"]', "answer-8", "?"]
    (await client.post(**fields, stream=stream)).error(400, "context_length_exceeded", "input")
    full_turn = await client.describe_turn(stream, **{**fields, "model": "scripted"})
    assert first_words(full_turn)[0] == "question-0"
    assert len(full_turn["items"]) == 28
    page = (await client.get(f"/responses/{previous}/input_items")).json()
    assert len(page["data"]) == 2


async def test_truncation_counts_hosted_tool_results(client, stream):
    recite = call("recite", {"words": 40})
    fields = {**SMALL, "input": script({"rounds": [[recite], [recite], [recite], ["ok"]]}), "tools": RECITE}
    error = await client.expect_failure(stream, **fields)
    assert (error["type"], error["code"]) == ("invalid_request", "context_length_exceeded")


async def test_auto_truncation_drops_oldest_hosted_tool_rounds(client, stream):
    steps = script({"rounds": [*([call("recite", {"words": 20 + step})] for step in range(6)), [{"tell": None}]]})
    final = await client.complete(stream, **SMALL, input=steps, tools=RECITE, truncation="auto")
    receipts = [item for item in final["output"] if item["type"] == "test:recite"]
    turn = json.loads(output_text(final))
    assert [item["id"] for item in turn["items"][1:]] == [item["id"] for item in receipts[-len(turn["items"]) + 1 :]]
    assert len(receipts) == 6
    assert 0 < len(turn["items"][1:]) < 6


async def test_client_tool_loop_is_unbounded_with_truncation(client, stream):
    tools = functions("f")
    ask = [{"role": "user", "content": script({"rounds": [[call("f", {"n": "x"})]]})}]
    previous = None
    for turn in range(12):
        fields = {"input": ask, "previous_response_id": previous, "tools": tools, "truncation": "auto"}
        final = await client.complete(stream, **SMALL, **fields)
        (call_ids,) = final["output"]
        ask = [{"type": "function_call_output", "call_id": call_ids["call_id"], "output": words(f"result-{turn}", 20)}]
        previous = final["id"]
    assert final["status"] == "completed"
