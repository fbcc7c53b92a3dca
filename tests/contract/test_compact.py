"""`POST /responses/compact`: compaction, and continuation over every transport."""

from __future__ import annotations

import json

import pytest

from responses_kit.protocol.encryption import Encryptor
from tests.engine.test_compaction import check_compacted, decrypt_summary

from .client import DEFAULT_TIMEOUT, call, functions, script
from .hosts import DISSIMILAR, SECRETS
from .scripted import WINDOW

pytestmark = pytest.mark.anyio

SERVED_BY = DISSIMILAR
OWNER = "Bearer alice"
ASK = {"role": "user", "content": "?"}
CONVERSATION = [
    {"type": "message", "role": "user", "content": "We agreed to launch on Tuesday and notify support first."},
    {"type": "message", "role": "assistant", "content": "Understood. The launch is Tuesday."},
]


async def post(client, within=DEFAULT_TIMEOUT, **fields):
    return await client.request("POST", "/responses/compact", json={"model": "scripted", **fields}, within=within)


async def compact(client, **fields):
    """Create a compaction; the backend's summary is a description of its turn."""
    reply = await post(client, **fields)
    assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
    compaction = reply.json()
    check_compacted(compaction)
    return compaction


def summary_of(compaction, owner=OWNER):
    return decrypt_summary(compaction, Encryptor(SECRETS), owner)


# Output.


@pytest.mark.parametrize("model", ["scripted", "scripted-sync", "scripted-plain"])
async def test_compact_returns_user_messages_and_compaction_item(client, model):
    result = await compact(client, model=model, input=CONVERSATION, prompt_cache_key="a-key", client_metadata={"a": 1})
    message, compaction = result["output"]
    assert message["content"] == [{"type": "input_text", "text": CONVERSATION[0]["content"]}]
    assert compaction.keys() == {"id", "type", "encrypted_content"}
    assert "Tuesday" not in json.dumps(compaction)
    turn = json.loads(summary_of(result))
    assert turn["messages"][-1]["content"] == (
        "The user: We agreed to launch on Tuesday and notify support first.\n"
        "The assistant: Understood. The launch is Tuesday."
    )
    assert (turn["owner"], turn["tools"], turn["response_id"]) == (OWNER, [], result["id"])
    assert result["usage"]["total_tokens"] > 0


async def test_compact_stores_nothing(client):
    compaction = await compact(client, input=CONVERSATION)
    assert (await client.get(f"/responses/{compaction['id']}")).status == 404


async def test_compact_accepts_trailing_slash_and_refuses_other_methods(client):
    body = {"model": "scripted", "input": "Hi"}
    assert (await client.request("POST", "/responses/compact/", json=body)).status == 200
    for method in ("DELETE", "PUT"):
        (await client.request(method, "/responses/compact")).error(405, "method_not_allowed")


# Continuation.


async def test_compaction_starts_new_conversation(client, stream):
    compaction = await compact(client, input=CONVERSATION)
    turn = await client.describe_turn(stream, input=[*compaction["output"], ASK])
    assert turn["items"][:-1] == compaction["output"]
    assert turn["messages"] == [
        {"role": "user", "content": CONVERSATION[0]["content"]},
        {"role": "assistant", "content": f"Summary of the conversation so far:\n{summary_of(compaction)}"},
        {"role": "user", "content": "?"},
    ]


async def test_compaction_stays_in_context_along_chain(client, stream):
    compaction = await compact(client, input=CONVERSATION)
    first = await client.complete(stream, input=[*compaction["output"], ASK])
    listed = (await client.get(f"/responses/{first['id']}/input_items?order=asc")).json()["data"]
    assert listed[:-1] == compaction["output"]
    turn = await client.describe_turn(stream, input=[ASK], previous_response_id=first["id"])
    assert summary_of(compaction) in turn["messages"][1]["content"]
    by_reference = [{"type": "item_reference", "id": item["id"]} for item in compaction["output"]]
    turn = await client.describe_turn(stream, input=[*by_reference, ASK])
    assert turn["items"][:-1] == compaction["output"]


@pytest.mark.websockets
@pytest.mark.parametrize("store", [False, True])
async def test_compaction_starts_new_chain_on_websocket(client, store):
    compaction = await compact(client, input=CONVERSATION)
    async with client.websocket() as socket:
        turn = await socket.describe_turn(input=[*compaction["output"], ASK], store=store, tools=[])
        assert summary_of(compaction) in turn["messages"][1]["content"]
        first = await socket.complete(input=[*compaction["output"], ASK], store=store)
        turn = await socket.describe_turn(input=[ASK], previous_response_id=first["id"], store=store)
        assert summary_of(compaction) in turn["messages"][1]["content"]
        await socket.send_request(
            input=[{"type": "compaction", "encrypted_content": "sealed elsewhere"}, ASK], store=store
        )
        await socket.read_error(400, "invalid_encrypted_content", "input[0].encrypted_content")


async def test_stored_conversation_is_compacted_by_id(client, stream):
    first = await client.complete(stream, input=script("Noted."), instructions="Be a pirate.")
    compaction = await compact(client, previous_response_id=first["id"], instructions="Mind the dates.")
    turn = json.loads(summary_of(compaction))
    assert turn["messages"][-1]["content"].endswith("The assistant: Noted.")
    assert "Mind the dates." in turn["instructions"]
    assert "pirate" not in turn["instructions"]


async def test_compact_keeps_pending_calls_of_agent(client, stream):
    first = await client.complete(stream, input=script(call("f", {"a": 1}), call("g")), tools=functions("f", "g"))
    answered, waiting = first["output"]
    result = {"type": "function_call_output", "call_id": answered["call_id"], "output": "4"}
    compaction = await compact(client, input=[*CONVERSATION, *first["output"], result])
    assert compaction["output"][-1] == waiting
    read = json.loads(summary_of(compaction))["messages"][-1]["content"]
    assert read.endswith('The assistant called f({"a": 1})\nThe assistant called g({})\nf returned: 4')
    late = {"type": "function_call_output", "call_id": waiting["call_id"], "output": "5"}
    turn = await client.describe_turn(stream, input=[*compaction["output"], late, ASK], tools=functions("f", "g"))
    assert [message["role"] for message in turn["messages"]] == ["user", "assistant", "tool", "user"]
    assert turn["messages"][1]["tool_calls"][0]["id"] == waiting["call_id"]


async def test_compaction_can_be_compacted_again(client):
    first = await compact(client, input=CONVERSATION)
    second = await compact(client, input=[*first["output"], {"role": "user", "content": "And then?"}])
    assert [item["type"] for item in second["output"]] == ["message", "message", "compaction"]
    assert json.loads(summary_of(second))["messages"][-1]["content"].startswith(
        f"The user: {CONVERSATION[0]['content']}\n"
    )


# Errors.


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": None, "input": CONVERSATION}, "invalid_request", "model"),
        ({"model": "other", "input": CONVERSATION}, "model_not_found", "model"),
        ({"input": []}, "invalid_request", "input"),
        ({}, "invalid_request", "input"),
        ({"input": 1}, "invalid_request", "input"),
        ({"input": [{"type": "message"}]}, "invalid_request", "input[0]"),
        ({"input": CONVERSATION, "instructions": 1}, "invalid_request", "instructions"),
        ({"input": CONVERSATION, "prompt_cache_key": "k" * 65}, "invalid_request", "prompt_cache_key"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_not_found", "previous_response_id"),
        ({"model": "scripted-small", "input": "word " * 100_000}, "context_length_exceeded", "input"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "sealed elsewhere"}]},
            "invalid_encrypted_content",
            "input[0].encrypted_content",
        ),
    ],
)
async def test_invalid_compact_request_returns_400_with_param(client, body, code, param):
    (await post(client, **body)).error(400, code, param)


async def test_compact_requires_model(client):
    reply = await client.request("POST", "/responses/compact", json={"input": CONVERSATION})
    reply.error(400, "invalid_request", "model")


async def test_malformed_compact_request_is_refused(client):
    (await client.request("POST", "/responses/compact", b"{")).error(400, "invalid_json")
    text = {"Content-Type": "text/plain"}
    (await client.request("POST", "/responses/compact", b"{}", headers=text)).error(415)


async def test_compact_requires_authentication(client):
    (await post(client.with_key("Bearer stranger"), input=CONVERSATION)).error(401)


async def test_compaction_is_bound_to_its_owner(client, stream):
    mallory = client.with_key("Bearer mallory")
    compaction = await compact(client, input=CONVERSATION)
    stolen = [*compaction["output"], ASK]
    (await mallory.post(stream=stream, input=stolen)).error(
        400, "invalid_encrypted_content", "input[1].encrypted_content"
    )
    (await post(mallory, input=stolen)).error(400, "invalid_encrypted_content", "input[1].encrypted_content")
    first = await client.complete(stream, input=stolen)
    (await post(mallory, previous_response_id=first["id"])).error(400, "previous_response_not_found")


_, KEY, DATA = Encryptor(SECRETS).encrypt('{"summary": "We met."}', kind="compaction", owner=OWNER).split(".")
FORGED = {
    "modified ciphertext": f"rk1.{KEY}.{DATA[:-6]}{'A' if DATA[-6] != 'A' else 'B'}{DATA[-5:]}",
    "truncated": f"rk1.{KEY}.{DATA[:-4]}",
    "unknown key id": f"rk1.00000000.{DATA}",
    "other kind": Encryptor(SECRETS).encrypt("We met.", kind="reasoning", owner=OWNER),
    "other secret": Encryptor(["somebody else's secret"]).encrypt("{}", kind="compaction", owner=OWNER),
    "foreign format": "gAAAAABpM0Yj-",
}


@pytest.mark.parametrize("payload", FORGED.values(), ids=FORGED)
async def test_undecryptable_compaction_returns_400_with_remedy(client, stream, payload):
    reply = await client.post(stream=stream, input=[ASK, {"type": "compaction", "encrypted_content": payload}, ASK])
    error = reply.error(400, "invalid_encrypted_content", "input[1].encrypted_content")
    assert "Send the messages" in error["message"]
    assert payload not in error["message"]


async def test_compaction_of_rotated_secret_is_decrypted(client):
    sealed = Encryptor(SECRETS[1:]).encrypt('{"summary": "We met."}', kind="compaction", owner=OWNER)
    turn = await client.describe_turn(input=[{"type": "compaction", "encrypted_content": sealed}, ASK])
    assert turn["messages"][0]["content"].endswith("We met.")


@pytest.mark.independent
async def test_compaction_survives_truncation(client, stream):
    sealed = Encryptor(SECRETS).encrypt('{"summary": "We met."}', kind="compaction", owner=OWNER)
    long = {"role": "user", "content": "word " * WINDOW}
    history = [{"type": "compaction", "encrypted_content": sealed}, long, CONVERSATION[1], ASK]
    turn = await client.describe_turn(
        stream, model="scripted-small", input=history, truncation="auto", max_output_tokens=16
    )
    assert [message["role"] for message in turn["messages"]] == ["assistant", "user"]
    assert turn["messages"][0]["content"].endswith("We met.")
