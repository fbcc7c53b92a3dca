"""A window of words: what does not fit is refused, or the oldest goes."""

from __future__ import annotations

import json

import pytest

from .client import call, functions, output_text, script
from .hosts import ANY
from .puppet import WINDOW

pytestmark = [pytest.mark.anyio, pytest.mark.unbound]

SERVED_BY = ANY
SMALL = {"model": "puppet-small"}
RECITE = [{"type": "test:recite"}]
ASK = {"role": "user", "content": "?"}
ROOM = WINDOW - WINDOW // 4
"""Words of a prompt that truncation leaves, where the client says nothing of the answer."""


def words(text, count):
    return " ".join([text] * count)


def said(role, text, count):
    return {"role": role, "content": words(text, count)}


def talk(count, size=5):
    return [
        message
        for turn in range(count)
        for message in (said("user", f"question-{turn}", size), said("assistant", f"answer-{turn}", size))
    ]


def seen(told):
    """The first word of everything that the model was shown."""
    return [str(message["content"]).split(" ")[0] for message in told["messages"]]


async def test_what_does_not_fit_is_a_400_before_anything_else(client, stream, context):
    for fields in (
        {"input": [said("user", "long", WINDOW - 1), ASK]},
        {"input": words("long", WINDOW)},
        {"input": "short", "instructions": words("long", WINDOW - 1)},
        {"input": [said("system", "long", WINDOW), ASK], "truncation": "disabled"},
        {"input": words("long", WINDOW), "stream": stream, "store": False},
    ):
        reply = await client.post(**{**SMALL, "stream": stream, **fields, **context})
        error = reply.error(400, "context_length_exceeded", "input")
        assert error["type"] == "invalid_request"
        assert "long" not in error["message"].split()


async def test_what_just_fits_is_whole(client, stream):
    for mode in ("disabled", None):
        fields = {"input": [*talk(9), said("user", "last", WINDOW - 91)], **SMALL, "truncation": mode}
        told = await client.told(stream, **fields)
        assert len(told["items"]) == 19
        one_more = [*fields["input"], ASK]
        (await client.post(**{**fields, "input": one_more, "stream": stream})).error(400, "context_length_exceeded")


async def test_a_model_without_a_window_takes_everything(client, stream):
    told = await client.told(stream, input=[said("user", "long", WINDOW * 10), ASK])
    assert len(told["items"]) == 2


async def test_the_oldest_turns_go_where_the_client_allows_it(client, stream):
    history = talk(20)
    told = await client.told(stream, **SMALL, input=[*history, ASK], truncation="auto")
    # 7 turns of 10 words, and the question.
    assert seen(told) == [message["content"].split(" ")[0] for message in history[-14:]] + ["?"]
    final = await client.made(stream, **SMALL, input=[*history, ASK], truncation="auto")
    assert final["truncation"] == "auto"


async def test_nothing_goes_where_all_fits(client, stream):
    told = await client.told(stream, **SMALL, input=[*talk(7), said("user", "?", ROOM - 70)], truncation="auto")
    assert len(told["items"]) == 15
    told = await client.told(stream, **SMALL, input=[*talk(7), said("user", "?", ROOM - 69)], truncation="auto")
    assert len(told["items"]) == 13


@pytest.mark.parametrize(("tokens", "turns"), [(None, 7), (16, 8), (40, 5), (50, 4), (1000, 4)])
async def test_room_is_left_for_the_answer(client, stream, tokens, turns):
    told = await client.told(stream, **SMALL, input=[*talk(20), ASK], truncation="auto", max_output_tokens=tokens)
    assert len(told["items"]) == 2 * turns + 1


async def test_system_messages_and_instructions_stay(client, stream):
    history = [said("system", "rule", 10), *talk(4), said("developer", "hint", 10), *talk(4)]
    told = await client.told(stream, **SMALL, input=[*history, ASK], truncation="auto", instructions=words("order", 10))
    assert seen(told)[:2] == ["order", "rule"]
    assert seen(told)[-1] == "?"
    assert seen(told).count("hint") == 1
    assert len(told["items"]) < len(history)


async def test_the_last_question_stays_whatever_its_length(client, stream):
    last = [said("user", "first-half", 40), said("user", "second-half", WINDOW - 41)]
    told = await client.told(stream, **SMALL, input=[*talk(20), *last], truncation="auto")
    assert seen(told) == ["first-half", "second-half"]
    reply = await client.post(**SMALL, stream=stream, input=[*talk(20), *last, ASK], truncation="auto")
    reply.error(400, "context_length_exceeded", "input")


def rounds(count, size):
    """Calls and their results, with a remark before each."""
    return [
        item
        for turn in range(count)
        for item in (
            {"role": "assistant", "content": f"look-{turn}"},
            {"type": "function_call", "call_id": f"call-{turn}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"call-{turn}", "output": words(f"result-{turn}", size)},
        )
    ]


@pytest.mark.parametrize("before", [[], talk(3)], ids=["first turn", "later turn"])
async def test_calls_and_their_results_go_together(client, stream, before):
    history = [*before, ASK, *rounds(20, 8)]
    told = await client.told(stream, **SMALL, input=history, truncation="auto")
    made = [item["call_id"] for item in told["items"] if item["type"] == "function_call"]
    answered = [item["call_id"] for item in told["items"] if item["type"] == "function_call_output"]
    assert made == answered
    assert made[-1] == "call-19"
    assert 0 < len(made) < 20
    assert told["messages"][0]["role"] == "user"


async def test_a_call_whose_result_comes_turns_later_is_not_left_alone(client, stream):
    late = [
        said("user", "old", 30),
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        said("user", "newer", 30),
        {"type": "function_call_output", "call_id": "a", "output": "late"},
        said("user", "last", 30),
    ]
    told = await client.told(stream, **SMALL, input=late, truncation="auto")
    kinds = [item["type"] for item in told["items"]]
    assert kinds.count("function_call") == kinds.count("function_call_output")
    assert seen(told)[-1] == "last"


async def test_a_conversation_that_was_kept_is_truncated_for_the_model_alone(client, stream):
    previous = None
    for turn in range(9):
        ask = [said("user", f"question-{turn}", 10), {"role": "user", "content": script(f"answer-{turn}")}]
        final = await client.made(stream, **SMALL, input=ask, previous_response_id=previous, truncation="auto")
        previous = final["id"]
    fields = {"input": [ASK], "previous_response_id": previous, **SMALL}
    told = await client.told(stream, **fields, truncation="auto")
    assert "question-0" not in seen(told)
    assert seen(told)[-4:] == ["question-8", '["answer-8"]', "answer-8", "?"]
    (await client.post(**fields, stream=stream)).error(400, "context_length_exceeded", "input")
    whole = await client.told(stream, **{**fields, "model": "puppet"})
    assert seen(whole)[0] == "question-0"
    assert len(whole["items"]) == 28
    page = (await client.get(f"/responses/{previous}/input_items")).json()
    assert len(page["data"]) == 2


async def test_the_results_of_hosted_tools_count(client, stream):
    recite = call("recite", {"words": 40})
    fields = {**SMALL, "input": script({"rounds": [[recite], [recite], [recite], ["ok"]]}), "tools": RECITE}
    error = await client.fails(stream, **fields)
    assert (error["type"], error["code"]) == ("invalid_request", "context_length_exceeded")


async def test_the_oldest_rounds_of_hosted_tools_go_where_the_client_allows_it(client, stream):
    moves = script({"rounds": [*([call("recite", {"words": 20 + step})] for step in range(6)), [{"tell": None}]]})
    final = await client.made(stream, **SMALL, input=moves, tools=RECITE, truncation="auto")
    receipts = [item for item in final["output"] if item["type"] == "test:recite"]
    told = json.loads(output_text(final))
    assert [item["id"] for item in told["items"][1:]] == [item["id"] for item in receipts[-len(told["items"]) + 1 :]]
    assert len(receipts) == 6
    assert 0 < len(told["items"][1:]) < 6


async def test_a_loop_of_the_client_goes_on_for_ever_with_truncation(client, stream):
    tools = functions("f")
    ask = [{"role": "user", "content": script({"rounds": [[call("f", {"n": "x"})]]})}]
    previous = None
    for turn in range(12):
        fields = {"input": ask, "previous_response_id": previous, "tools": tools, "truncation": "auto"}
        final = await client.made(stream, **SMALL, **fields)
        (made,) = final["output"]
        ask = [{"type": "function_call_output", "call_id": made["call_id"], "output": words(f"result-{turn}", 20)}]
        previous = final["id"]
    assert final["status"] == "completed"
