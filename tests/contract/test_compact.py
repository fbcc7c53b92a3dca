"""`POST /responses/compact`: a conversation made short, and carried on with over every transport."""

from __future__ import annotations

import json

import pytest

from responses_kit.protocol.encryption import Encryptor
from tests.engine.test_compaction import check_compacted, summary_in

from .client import PATIENCE, call, functions, script
from .hosts import FARTHEST, SECRETS
from .puppet import WINDOW

pytestmark = pytest.mark.anyio

SERVED_BY = FARTHEST
OWNER = "Bearer alice"
ASK = {"role": "user", "content": "?"}
TALK = [
    {"type": "message", "role": "user", "content": "We agreed to launch on Tuesday and notify support first."},
    {"type": "message", "role": "assistant", "content": "Understood. The launch is Tuesday."},
]


async def post(client, within=PATIENCE, **fields):
    return await client.request("POST", "/responses/compact", json={"model": "puppet", **fields}, within=within)


async def compacted(client, **fields):
    """A compaction that has to be made; the puppet sums up what it is given by telling what it was given."""
    reply = await post(client, **fields)
    assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
    made = reply.json()
    check_compacted(made)
    return made


def summary_of(made, owner=OWNER):
    return summary_in(made, Encryptor(SECRETS), owner)


# What comes out.


@pytest.mark.parametrize("model", ["puppet", "puppet-sync", "puppet-plain"])
async def test_a_conversation_comes_back_as_its_user_messages_and_a_compaction(client, model):
    made = await compacted(client, model=model, input=TALK, prompt_cache_key="a-key", client_metadata={"a": 1})
    message, compaction = made["output"]
    assert message["content"] == [{"type": "input_text", "text": TALK[0]["content"]}]
    assert compaction.keys() == {"id", "type", "encrypted_content"}
    assert "Tuesday" not in json.dumps(compaction)
    told = json.loads(summary_of(made))
    assert told["messages"][-1]["content"] == (
        "The user: We agreed to launch on Tuesday and notify support first.\n"
        "The assistant: Understood. The launch is Tuesday."
    )
    assert (told["owner"], told["tools"], told["response_id"]) == (OWNER, [], made["id"])
    assert made["usage"]["total_tokens"] > 0


async def test_nothing_is_kept(client):
    made = await compacted(client, input=TALK)
    assert (await client.get(f"/responses/{made['id']}")).status == 404


async def test_a_trailing_slash_makes_no_difference_and_other_methods_are_refused(client):
    body = {"model": "puppet", "input": "Hi"}
    assert (await client.request("POST", "/responses/compact/", json=body)).status == 200
    for method in ("DELETE", "PUT"):
        (await client.request(method, "/responses/compact")).error(405, "method_not_allowed")


# Carried on with.


async def test_a_new_conversation_starts_from_what_came_out(client, stream):
    made = await compacted(client, input=TALK)
    told = await client.told(stream, input=[*made["output"], ASK])
    assert told["items"][:-1] == made["output"]
    assert told["messages"] == [
        {"role": "user", "content": TALK[0]["content"]},
        {"role": "assistant", "content": f"Summary of the conversation so far:\n{summary_of(made)}"},
        {"role": "user", "content": "?"},
    ]


async def test_it_stays_known_along_the_chain(client, stream):
    made = await compacted(client, input=TALK)
    first = await client.made(stream, input=[*made["output"], ASK])
    listed = (await client.get(f"/responses/{first['id']}/input_items?order=asc")).json()["data"]
    assert listed[:-1] == made["output"]
    told = await client.told(stream, input=[ASK], previous_response_id=first["id"])
    assert summary_of(made) in told["messages"][1]["content"]
    by_reference = [{"type": "item_reference", "id": item["id"]} for item in made["output"]]
    told = await client.told(stream, input=[*by_reference, ASK])
    assert told["items"][:-1] == made["output"]


@pytest.mark.sockets
@pytest.mark.parametrize("store", [False, True])
async def test_it_starts_a_new_chain_on_a_socket(client, store):
    made = await compacted(client, input=TALK)
    async with client.socket() as socket:
        told = await socket.told(input=[*made["output"], ASK], store=store, tools=[])
        assert summary_of(made) in told["messages"][1]["content"]
        first = await socket.made(input=[*made["output"], ASK], store=store)
        told = await socket.told(input=[ASK], previous_response_id=first["id"], store=store)
        assert summary_of(made) in told["messages"][1]["content"]
        await socket.ask(input=[{"type": "compaction", "encrypted_content": "sealed elsewhere"}, ASK], store=store)
        await socket.refused(400, "invalid_encrypted_content", "input[0].encrypted_content")


async def test_a_stored_conversation_is_compacted_by_its_id(client, stream):
    first = await client.made(stream, input=script("Noted."), instructions="Be a pirate.")
    made = await compacted(client, previous_response_id=first["id"], instructions="Mind the dates.")
    told = json.loads(summary_of(made))
    assert told["messages"][-1]["content"].endswith("The assistant: Noted.")
    assert "Mind the dates." in told["instructions"]
    assert "pirate" not in told["instructions"]


async def test_an_agent_compacts_in_the_middle_of_its_loop(client, stream):
    first = await client.made(stream, input=script(call("f", {"a": 1}), call("g")), tools=functions("f", "g"))
    answered, waiting = first["output"]
    result = {"type": "function_call_output", "call_id": answered["call_id"], "output": "4"}
    made = await compacted(client, input=[*TALK, *first["output"], result])
    assert made["output"][-1] == waiting
    read = json.loads(summary_of(made))["messages"][-1]["content"]
    assert read.endswith('The assistant called f({"a": 1})\nThe assistant called g({})\nf returned: 4')
    late = {"type": "function_call_output", "call_id": waiting["call_id"], "output": "5"}
    told = await client.told(stream, input=[*made["output"], late, ASK], tools=functions("f", "g"))
    assert [message["role"] for message in told["messages"]] == ["user", "assistant", "tool", "user"]
    assert told["messages"][1]["tool_calls"][0]["id"] == waiting["call_id"]


async def test_what_was_compacted_can_be_compacted_again(client):
    first = await compacted(client, input=TALK)
    second = await compacted(client, input=[*first["output"], {"role": "user", "content": "And then?"}])
    assert [item["type"] for item in second["output"]] == ["message", "message", "compaction"]
    assert json.loads(summary_of(second))["messages"][-1]["content"].startswith(f"The user: {TALK[0]['content']}\n")


# What is refused.


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": None, "input": TALK}, "invalid_request", "model"),
        ({"model": "other", "input": TALK}, "model_not_found", "model"),
        ({"input": []}, "invalid_request", "input"),
        ({}, "invalid_request", "input"),
        ({"input": 1}, "invalid_request", "input"),
        ({"input": [{"type": "message"}]}, "invalid_request", "input[0]"),
        ({"input": TALK, "instructions": 1}, "invalid_request", "instructions"),
        ({"input": TALK, "prompt_cache_key": "k" * 65}, "invalid_request", "prompt_cache_key"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_not_found", "previous_response_id"),
        ({"model": "puppet-small", "input": "word " * 100_000}, "context_length_exceeded", "input"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "sealed elsewhere"}]},
            "invalid_encrypted_content",
            "input[0].encrypted_content",
        ),
    ],
)
async def test_what_cannot_be_compacted_is_a_400_that_names_the_field(client, body, code, param):
    (await post(client, **body)).error(400, code, param)


async def test_a_model_that_has_to_be_named_is_not_guessed(client):
    reply = await client.request("POST", "/responses/compact", json={"input": TALK})
    reply.error(400, "invalid_request", "model")


async def test_what_is_not_even_a_request_is_refused_as_everywhere(client):
    (await client.request("POST", "/responses/compact", b"{")).error(400, "invalid_json")
    text = {"Content-Type": "text/plain"}
    (await client.request("POST", "/responses/compact", b"{}", headers=text)).error(415)


async def test_whoever_may_do_nothing_may_not_compact(client):
    (await post(client.other("Bearer stranger"), input=TALK)).error(401)


async def test_compactions_and_conversations_are_their_owners_alone(client, stream):
    mallory = client.other("Bearer mallory")
    made = await compacted(client, input=TALK)
    stolen = [*made["output"], ASK]
    (await mallory.post(stream=stream, input=stolen)).error(
        400, "invalid_encrypted_content", "input[1].encrypted_content"
    )
    (await post(mallory, input=stolen)).error(400, "invalid_encrypted_content", "input[1].encrypted_content")
    first = await client.made(stream, input=stolen)
    (await post(mallory, previous_response_id=first["id"])).error(400, "previous_response_not_found")


_, KEY, DATA = Encryptor(SECRETS).encrypt('{"summary": "We met."}', kind="compaction", owner=OWNER).split(".")
FORGED = {
    "a bit changed": f"rk1.{KEY}.{DATA[:-6]}{'A' if DATA[-6] != 'A' else 'B'}{DATA[-5:]}",
    "cut": f"rk1.{KEY}.{DATA[:-4]}",
    "another key's name": f"rk1.00000000.{DATA}",
    "another purpose": Encryptor(SECRETS).encrypt("We met.", kind="reasoning", owner=OWNER),
    "another secret": Encryptor(["somebody else's secret"]).encrypt("{}", kind="compaction", owner=OWNER),
    "another server": "gAAAAABpM0Yj-",
}


@pytest.mark.parametrize("payload", FORGED.values(), ids=FORGED)
async def test_a_compaction_that_does_not_open_is_a_400_that_says_what_to_do(client, stream, payload):
    reply = await client.post(stream=stream, input=[ASK, {"type": "compaction", "encrypted_content": payload}, ASK])
    error = reply.error(400, "invalid_encrypted_content", "input[1].encrypted_content")
    assert "Send the messages" in error["message"]
    assert payload not in error["message"]


async def test_what_an_older_secret_has_sealed_still_opens(client):
    sealed = Encryptor(SECRETS[1:]).encrypt('{"summary": "We met."}', kind="compaction", owner=OWNER)
    told = await client.told(input=[{"type": "compaction", "encrypted_content": sealed}, ASK])
    assert told["messages"][0]["content"].endswith("We met.")


@pytest.mark.unbound
async def test_a_compaction_outlives_truncation(client, stream):
    sealed = Encryptor(SECRETS).encrypt('{"summary": "We met."}', kind="compaction", owner=OWNER)
    long = {"role": "user", "content": "word " * WINDOW}
    talk = [{"type": "compaction", "encrypted_content": sealed}, long, TALK[1], ASK]
    told = await client.told(stream, model="puppet-small", input=talk, truncation="auto", max_output_tokens=16)
    assert [message["role"] for message in told["messages"]] == ["assistant", "user"]
    assert told["messages"][0]["content"].endswith("We met.")
