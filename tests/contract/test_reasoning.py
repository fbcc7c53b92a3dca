"""Reasoning: raw, as a summary, or encrypted for the client to carry."""

from __future__ import annotations

import base64
import json

import pytest

from responses_kit.protocol.encryption import Encryptor

from .client import call, functions, output_text, script
from .hosts import FASTEST, SECRETS

pytestmark = pytest.mark.anyio

SERVED_BY = FASTEST
ASK = {"role": "user", "content": "?"}
INCLUDE_ENCRYPTED = ["reasoning.encrypted_content"]
REASONING_STEPS = [{"Reasoning": {"text": "Two and "}}, {"Reasoning": {"text": "two."}}, "Four."]
OWNER = "Bearer alice"


def encrypted_reasoning(text, *, secret=SECRETS[0], kind="reasoning", owner=OWNER):
    """Return an encrypted reasoning item."""
    return {
        "type": "reasoning",
        "summary": [],
        "encrypted_content": Encryptor([secret]).encrypt(text, kind=kind, owner=owner),
    }


@pytest.mark.parametrize("model", ["scripted", "scripted-sync"])
async def test_raw_reasoning_is_in_finished_item(client, stream, context, model):
    final = await client.complete(stream, model=model, input=script(*REASONING_STEPS), **context)
    thought, answer = final["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Two and two."}]
    assert (thought["type"], thought["status"], thought["summary"]) == ("reasoning", "completed", [])
    assert "encrypted_content" not in thought
    assert answer["type"] == "message"


async def test_summaries_have_their_own_parts(client, stream, context):
    steps = [
        {"ReasoningSummary": {"text": "First "}},
        {"ReasoningSummary": {"text": "this."}},
        {"ReasoningSummary": {"text": "Then that.", "new_part": True}},
        {"Reasoning": {"text": "hm"}},
        {"ReasoningSummary": {"text": "At last."}},
        "Four.",
    ]
    final = await client.complete(stream, input=script(*steps), reasoning={"summary": "auto"}, **context)
    assert [part["text"] for part in final["output"][0]["summary"]] == ["First this.", "Then that.", "At last."]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert final["reasoning"] == {"effort": None, "summary": "auto"}


async def test_interleaved_reasoning_makes_separate_items(client, stream):
    steps = [{"Reasoning": {"text": "a"}}, call("f"), {"Reasoning": {"text": "b"}}, "c", {"Reasoning": {"text": "d"}}]
    final = await client.complete(stream, input=script(*steps), tools=functions("f"))
    assert [item["type"] for item in final["output"]] == [
        "reasoning",
        "function_call",
        "reasoning",
        "message",
        "reasoning",
    ]


async def test_truncated_reasoning_is_incomplete(client, stream, context):
    steps = [{"Reasoning": {"text": "Two and"}}, {"Finish": {"reason": "max_output_tokens"}}]
    final = await client.complete(stream, input=script(*steps), include=INCLUDE_ENCRYPTED, **context)
    (thought,) = final["output"]
    assert (final["status"], thought["status"]) == ("incomplete", "incomplete")
    turn = await client.describe_turn(stream, input=[{**thought, "content": []}, ASK])
    assert turn["items"][0]["content"][0]["text"] == "Two and"


async def test_every_effort_is_echoed(client, stream):
    for effort in ("none", "low", "medium", "high", "xhigh"):
        final = await client.complete(stream, input="hi", reasoning={"effort": effort})
        assert final["reasoning"] == {"effort": effort, "summary": None}
    assert (await client.complete(stream, input="hi"))["reasoning"] is None


async def test_raw_reasoning_streams_only_with_setting(client, extended):
    raw = {"response.content_part.added", "response.reasoning.delta", "response.reasoning.done"}
    for one_client, expected in ((client, set()), (extended, raw)):
        for include in ([], INCLUDE_ENCRYPTED):
            async with one_client.stream(input=script(*REASONING_STEPS[:2]), include=include) as stream:
                final = await stream.rest()
                deltas = [event["delta"] for event in stream.events if event["type"] == "response.reasoning.delta"]
            assert {event["type"] for event in stream.events} & raw == expected
            assert deltas == (["Two and ", "two."] if expected else [])
            assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "Two and two."}]


# Encrypted reasoning.


async def test_raw_reasoning_is_encrypted_on_request(client, stream, context):
    steps = [{"ReasoningSummary": {"text": "hm"}}, *REASONING_STEPS, {"ReasoningSummary": {"text": "hm"}}]
    final = await client.complete(stream, input=script(*steps), include=INCLUDE_ENCRYPTED, **context)
    thought, _, summary = final["output"]
    payload = thought["encrypted_content"]
    assert "Two and" not in payload
    for encoded in payload.split("."):
        assert b"Two and" not in base64.urlsafe_b64decode(encoded + "==")
    assert "encrypted_content" not in summary  # a summary is not secret
    second = await client.complete(stream, input=script(*steps), include=INCLUDE_ENCRYPTED, **context)
    assert second["output"][0]["encrypted_content"] != payload


async def test_encrypted_reasoning_is_decrypted_for_model_only(client, stream):
    first = await client.complete(stream, input=script(*REASONING_STEPS), include=INCLUDE_ENCRYPTED, store=False)
    thought, answer = first["output"]
    # A client that must not store the text sends back only the payload.
    carried = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for back in (
        carried,
        {**carried, "content": None},
        {**carried, "content": []},
        {**thought, "content": []},
        thought,
    ):
        turn = await client.describe_turn(stream, input=[ASK, back, answer, ASK], store=False)
        assert turn["messages"][1] == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    final = await client.complete(stream, input=[ASK, carried, ASK], include=INCLUDE_ENCRYPTED)
    (_, listed, _) = (await client.get(f"/responses/{final['id']}/input_items")).json()["data"]
    assert (listed.get("content"), listed["encrypted_content"]) in [([], carried["encrypted_content"])]
    turn = await client.describe_turn(stream, input=[ASK], previous_response_id=final["id"])
    assert turn["items"][1]["content"] == [{"type": "reasoning_text", "text": "Two and two."}]


async def test_continuation_includes_earlier_reasoning(client, stream):
    for include in ([], INCLUDE_ENCRYPTED):
        first = await client.complete(stream, input=script(*REASONING_STEPS), include=include)
        turn = await client.describe_turn(stream, input=[ASK], previous_response_id=first["id"])
        assert turn["messages"][1] == {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
        assert turn["items"][1] == first["output"][0]
        by_reference = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        turn = await client.describe_turn(stream, input=[*by_reference, ASK])
        assert turn["items"][0] == first["output"][0]


async def test_reasoning_between_calls_is_carried_through_loop(client, stream):
    first = await client.complete(
        stream,
        input=script({"Reasoning": {"text": "Ask."}}, call("f")),
        tools=functions("f"),
        include=INCLUDE_ENCRYPTED,
    )
    thought, function_call = first["output"]
    result = {"type": "function_call_output", "call_id": function_call["call_id"], "output": "4"}
    turn = await client.describe_turn(
        stream, input=[{**thought, "content": []}, function_call, result, ASK], store=False
    )
    assert turn["messages"][0]["reasoning_content"] == "Ask."
    assert turn["messages"][0]["tool_calls"][0]["id"] == function_call["call_id"]


async def test_reasoning_of_rotated_secret_is_decrypted(client, stream):
    turn = await client.describe_turn(stream, input=[encrypted_reasoning("long ago", secret=SECRETS[1]), ASK])
    assert turn["items"][0]["content"][0]["text"] == "long ago"


@pytest.mark.parametrize("payload", ["sealed elsewhere", "gAAAAABo", "", "rk2.x.y", "\u00e9\u2028", "x" * 100_000])
async def test_foreign_encrypted_reasoning_is_ignored(client, stream, context, payload):
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": payload}
    turn = await client.describe_turn(stream, input=[foreign, ASK], **context)
    assert (turn["items"][-2].get("content"), turn["items"][-2]["encrypted_content"]) == ([], payload)


VALID_PAYLOAD = encrypted_reasoning("a thought")["encrypted_content"]
_, KEY, DATA = VALID_PAYLOAD.split(".")
FORGED = {
    "modified ciphertext": f"rk1.{KEY}.{DATA[:-6]}{'A' if DATA[-6] != 'A' else 'B'}{DATA[-5:]}",
    "modified nonce": f"rk1.{KEY}.{'A' if DATA[0] != 'A' else 'B'}{DATA[1:]}",
    "truncated": VALID_PAYLOAD[:-4],
    "nonce only": f"rk1.{KEY}.{DATA[:16]}",
    "empty payload": f"rk1.{KEY}.",
    "no payload": f"rk1.{KEY}",
    "prefix only": "rk1.",
    "extra data": VALID_PAYLOAD + "AAAA",
    "unknown key id": f"rk1.00000000.{DATA}",
    "invalid base64": f"rk1.{KEY}.???",
    "not ASCII": f"rk1.{KEY}.\u00e9\U0001f600",
    "other secret": encrypted_reasoning("a thought", secret="somebody else's secret")["encrypted_content"],
    "other kind": encrypted_reasoning("a thought", kind="compaction")["encrypted_content"],
    "other owner": encrypted_reasoning("a thought", owner="Bearer bob")["encrypted_content"],
    "no owner": encrypted_reasoning("a thought", owner="")["encrypted_content"],
}


@pytest.mark.parametrize("payload", FORGED.values(), ids=FORGED)
async def test_undecryptable_reasoning_returns_400_with_param(client, stream, payload):
    forged = {"type": "reasoning", "summary": [], "encrypted_content": payload}
    reply = await client.post(stream=stream, input=[ASK, forged, ASK])
    error = reply.error(400, "invalid_encrypted_content", "input[1].encrypted_content")
    assert payload[4:] not in error["message"] or len(payload) < 5


async def test_encrypted_reasoning_is_bound_to_owner(client, stream):
    first = await client.complete(stream, input=script(*REASONING_STEPS), include=INCLUDE_ENCRYPTED)
    stolen = {**first["output"][0], "content": []}
    reply = await client.with_key("Bearer mallory").post(stream=stream, input=[stolen, ASK])
    reply.error(400, "invalid_encrypted_content", "input[0].encrypted_content")
    assert json.loads(output_text(await client.complete(stream, input=[stolen, ASK])))["items"][0]["content"]
