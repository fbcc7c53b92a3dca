"""What a model thinks: shown raw, summed up, or sealed for the client to carry."""

from __future__ import annotations

import base64
import json

import pytest

from responses_kit.protocol.encryption import Encryptor

from .client import call, functions, output_text, script
from .hosts import ANY, SECRETS

pytestmark = pytest.mark.anyio

SERVED_BY = ANY
ASK = {"role": "user", "content": "?"}
SEALED = ["reasoning.encrypted_content"]
THOUGHT = [{"Reasoning": {"text": "Two and "}}, {"Reasoning": {"text": "two."}}, "Four."]
OWNER = "Bearer alice"


def sealed(text, *, secret=SECRETS[0], kind="reasoning", owner=OWNER):
    """Reasoning as somebody may have sealed it."""
    return {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": Encryptor([secret]).encrypt(text, kind=kind, owner=owner),
    }


@pytest.mark.parametrize("model", ["puppet", "puppet-sync"])
async def test_raw_reasoning_arrives_whole_in_its_item(client, stream, context, model):
    final = await client.made(stream, model=model, input=script(*THOUGHT), **context)
    thought, answer = final["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert "encrypted_content" not in thought
    assert answer["type"] == "message"


async def test_summaries_have_parts_of_their_own(client, stream, context):
    moves = [
        {"ReasoningSummary": {"text": "First "}},
        {"ReasoningSummary": {"text": "this."}},
        {"ReasoningSummary": {"text": "Then that.", "new_part": True}},
        {"Reasoning": {"text": "hm"}},
        {"ReasoningSummary": {"text": "At last."}},
        "Four.",
    ]
    final = await client.made(stream, input=script(*moves), reasoning={"summary": "auto"}, **context)
    assert [part["text"] for part in final["output"][0]["summary"]] == ["First this.", "Then that.", "At last."]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert final["reasoning"] == {"effort": None, "summary": "auto"}


async def test_thoughts_between_calls_and_answers_are_items_of_their_own(client, stream):
    moves = [{"Reasoning": {"text": "a"}}, call("f"), {"Reasoning": {"text": "b"}}, "c", {"Reasoning": {"text": "d"}}]
    final = await client.made(stream, input=script(*moves), tools=functions("f"))
    assert [item["type"] for item in final["output"]] == [
        "reasoning",
        "function_call",
        "reasoning",
        "message",
        "reasoning",
    ]


async def test_thinking_that_was_cut_is_incomplete(client, stream, context):
    moves = [{"Reasoning": {"text": "Two and"}}, {"Finish": {"reason": "max_output_tokens"}}]
    final = await client.made(stream, input=script(*moves), include=SEALED, **context)
    (thought,) = final["output"]
    assert (final["status"], thought["status"]) == ("incomplete", "incomplete")
    told = await client.told(stream, input=[{**thought, "content": []}, ASK])
    assert told["items"][0]["content"][0]["text"] == "Two and"


async def test_every_effort_is_echoed(client, stream):
    for effort in ("none", "low", "medium", "high", "xhigh"):
        final = await client.made(stream, input="hi", reasoning={"effort": effort})
        assert final["reasoning"] == {"effort": effort, "summary": None}
    assert (await client.made(stream, input="hi"))["reasoning"] is None


async def test_raw_reasoning_streams_only_where_the_server_was_told_to(client, chatty):
    raw = {"response.content_part.added", "response.reasoning.delta", "response.reasoning.done"}
    for somebody, wanted in ((client, set()), (chatty, raw)):
        for include in ([], SEALED):
            async with somebody.stream(input=script(*THOUGHT[:2]), include=include) as stream:
                final = await stream.rest()
                deltas = [event["delta"] for event in stream.events if event["type"] == "response.reasoning.delta"]
            assert {event["type"] for event in stream.events} & raw == wanted
            assert deltas == (["Two and ", "two."] if wanted else [])
            assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two and two."}]


# Sealed.


async def test_raw_reasoning_is_sealed_where_the_client_asks_for_it(client, stream, context):
    moves = [{"ReasoningSummary": {"text": "hm"}}, *THOUGHT, {"ReasoningSummary": {"text": "hm"}}]
    final = await client.made(stream, input=script(*moves), include=SEALED, **context)
    thought, _, summary = final["output"]
    payload = thought["encrypted_content"]
    assert "Two and" not in payload
    for encoded in payload.split("."):
        assert b"Two and" not in base64.urlsafe_b64decode(encoded + "==")
    assert "encrypted_content" not in summary  # there is nothing to hide
    again = await client.made(stream, input=script(*moves), include=SEALED, **context)
    assert again["output"][0]["encrypted_content"] != payload


async def test_sealed_reasoning_is_opened_for_the_model_and_for_nobody_else(client, stream):
    first = await client.made(stream, input=script(*THOUGHT), include=SEALED, store=False)
    thought, answer = first["output"]
    # What a client that must not keep the text sends back.
    carried = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for back in (
        carried,
        {**carried, "content": None},
        {**carried, "content": []},
        {**thought, "content": []},
        thought,
    ):
        told = await client.told(stream, input=[ASK, back, answer, ASK], store=False)
        assert told["messages"][1] == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    final = await client.made(stream, input=[ASK, carried, ASK], include=SEALED)
    (_, listed, _) = (await client.get(f"/responses/{final['id']}/input_items")).json()["data"]
    assert (listed.get("content"), listed["encrypted_content"]) in [([], carried["encrypted_content"])]
    told = await client.told(stream, input=[ASK], previous_response_id=final["id"])
    assert told["items"][1]["content"] == [{"type": "reasoning_text", "text": "Two and two."}]


async def test_a_continuation_tells_the_model_what_it_thought(client, stream):
    for include in ([], SEALED):
        first = await client.made(stream, input=script(*THOUGHT), include=include)
        told = await client.told(stream, input=[ASK], previous_response_id=first["id"])
        assert told["messages"][1] == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
        assert told["items"][1] == first["output"][0]
        by_reference = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        told = await client.told(stream, input=[*by_reference, ASK])
        assert told["items"][0] == first["output"][0]


async def test_reasoning_between_calls_is_carried_through_a_loop(client, stream):
    first = await client.made(
        stream, input=script({"Reasoning": {"text": "Ask."}}, call("f")), tools=functions("f"), include=SEALED
    )
    thought, made = first["output"]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "4"}
    told = await client.told(stream, input=[{**thought, "content": []}, made, result, ASK], store=False)
    assert told["messages"][0]["reasoning_content"] == "Ask."
    assert told["messages"][0]["tool_calls"][0]["id"] == made["call_id"]


async def test_what_an_older_secret_has_sealed_still_opens(client, stream):
    told = await client.told(stream, input=[sealed("long ago", secret=SECRETS[1]), ASK])
    assert told["items"][0]["content"][0]["text"] == "long ago"


@pytest.mark.parametrize("payload", ["sealed elsewhere", "gAAAAABo", "", "rk2.x.y", "\u00e9\u2028", "x" * 100_000])
async def test_what_another_server_has_sealed_is_passed_on_unopened(client, stream, context, payload):
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": payload}
    told = await client.told(stream, input=[foreign, ASK], **context)
    assert (told["items"][-2].get("content"), told["items"][-2]["encrypted_content"]) == ([], payload)


GOOD = sealed("a thought")["encrypted_content"]
_, KEY, DATA = GOOD.split(".")
FORGED = {
    "a bit changed": f"rk1.{KEY}.{DATA[:-6]}{'A' if DATA[-6] != 'A' else 'B'}{DATA[-5:]}",
    "the nonce changed": f"rk1.{KEY}.{'A' if DATA[0] != 'A' else 'B'}{DATA[1:]}",
    "cut": GOOD[:-4],
    "cut to the nonce": f"rk1.{KEY}.{DATA[:16]}",
    "cut to nothing": f"rk1.{KEY}.",
    "no payload": f"rk1.{KEY}",
    "the mark alone": "rk1.",
    "more": GOOD + "AAAA",
    "another key's name": f"rk1.00000000.{DATA}",
    "no base64": f"rk1.{KEY}.???",
    "not ASCII": f"rk1.{KEY}.\u00e9\U0001f600",
    "another secret": sealed("a thought", secret="somebody else's secret")["encrypted_content"],
    "another purpose": sealed("a thought", kind="compaction")["encrypted_content"],
    "another owner": sealed("a thought", owner="Bearer bob")["encrypted_content"],
    "nobody": sealed("a thought", owner="")["encrypted_content"],
}


@pytest.mark.parametrize("payload", FORGED.values(), ids=FORGED)
async def test_a_payload_that_does_not_open_is_a_400_that_names_its_place(client, stream, payload):
    forged = {"type": "reasoning", "summary": [], "encrypted_content": payload}
    reply = await client.post(stream=stream, input=[ASK, forged, ASK])
    error = reply.error(400, "invalid_encrypted_content", "input[1].encrypted_content")
    assert payload[4:] not in error["message"] or len(payload) < 5


async def test_a_payload_opens_for_its_owner_alone(client, stream):
    first = await client.made(stream, input=script(*THOUGHT), include=SEALED)
    stolen = {**first["output"][0], "content": []}
    reply = await client.other("Bearer mallory").post(stream=stream, input=[stolen, ASK])
    reply.error(400, "invalid_encrypted_content", "input[0].encrypted_content")
    assert json.loads(output_text(await client.made(stream, input=[stolen, ASK])))["items"][0]["content"]
