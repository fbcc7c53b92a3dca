"""Ownership: every path that accepts an id, with ids of every status, in one table."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from .client import Client, Reply, script
from .hosts import DISSIMILAR

pytestmark = [pytest.mark.anyio, pytest.mark.independent]

SERVED_BY = DISSIMILAR
ASK = {"role": "user", "content": "what do you see?"}
LONGER_THAN_TTL = 25 * 60 * 60


@dataclass
class Belongings:
    """Ids and payloads of one response.

    Attributes:
        response: The id of a response.
        item: The id of an item of its output.
        input_item: The id of an item of its input.
        thought: Its encrypted reasoning.
        summary: An encrypted compaction; empty unless it is needed.
        key: Its Idempotency-Key.
        request: The request that created it.
    """

    response: str
    item: str
    input_item: str
    thought: str
    summary: str
    key: str
    request: dict[str, Any]


async def compact(client: Client, **fields: Any) -> Reply:
    return await client.request("POST", "/responses/compact", json={"model": "scripted", **fields})


async def post_with_key(client: Client, belongings: Belongings, **fields: Any) -> Reply:
    request = {**belongings.request, **fields}
    return await client.request("POST", "/responses", json=request, headers={"Idempotency-Key": belongings.key})


async def send_over_websocket(client: Client, **fields: Any) -> Reply:
    """Send a request over a WebSocket and return the reply as if over HTTP."""
    async with client.websocket() as socket:
        answer = await socket.exchange(**fields)
    status, body = (answer["status"], {"error": answer["error"]}) if answer.get("type") == "error" else (200, answer)
    return Reply(status, {"content-type": "application/json"}, json.dumps(body).encode())


def reference(item_id: str) -> dict[str, Any]:
    return {"input": [{"type": "item_reference", "id": item_id}, ASK]}


def reasoning(belongings: Belongings) -> dict[str, Any]:
    return {"input": [{"type": "reasoning", "summary": [], "encrypted_content": belongings.thought}, ASK]}


def summary(belongings: Belongings) -> dict[str, Any]:
    return {"input": [{"type": "compaction", "encrypted_content": belongings.summary}, ASK]}


Outcome = tuple[int, str | None, str | None]
"""The status; and the code and param of an error."""

FINE: Outcome = (200, None, None)
NO_RESPONSE: Outcome = (404, "response_not_found", None)
NO_PREVIOUS: Outcome = (400, "previous_response_not_found", "previous_response_id")
NO_ITEM: Outcome = (400, "item_not_found", "input[0].id")
NO_PAYLOAD: Outcome = (400, "invalid_encrypted_content", "input[0].encrypted_content")
ENDED: Outcome = (400, "response_already_ended", None)
OTHER_REQUEST: Outcome = (409, "idempotency_key_reused", None)


@dataclass
class Path:
    """One row of the table.

    Attributes:
        ask: Sends the request.
        own: The outcome for the client's own id.
        foreign: The outcome for any other id.
        carried: Whether the id is a payload that clients carry, which outlives the record.
    """

    ask: Callable[[Client, Belongings], Awaitable[Reply]]
    own: Outcome
    foreign: Outcome
    carried: bool = False


def get(path: str) -> Callable[[Client, Belongings], Awaitable[Reply]]:
    return lambda client, belongings: client.get(path.format(belongings.response))


PATHS = {
    "GET": Path(get("/responses/{}"), FINE, NO_RESPONSE),
    "GET stream": Path(get("/responses/{}?stream=true"), FINE, NO_RESPONSE),
    "GET stream from position": Path(get("/responses/{}?stream=true&starting_after=1"), FINE, NO_RESPONSE),
    "GET stream beyond the end": Path(get("/responses/{}?stream=true&starting_after=9999"), FINE, NO_RESPONSE),
    "input_items": Path(get("/responses/{}/input_items"), FINE, NO_RESPONSE),
    "DELETE": Path(lambda client, belongings: client.delete(f"/responses/{belongings.response}"), FINE, NO_RESPONSE),
    "cancel": Path(lambda client, belongings: client.cancel(belongings.response), ENDED, NO_RESPONSE),
    **{
        f"previous_response_id, {mode}": Path(
            lambda client, belongings, fields=fields: client.post(
                input="on", previous_response_id=belongings.response, **fields
            ),
            FINE,
            NO_PREVIOUS,
        )
        for mode, fields in {
            "whole": {},
            "streamed": {"stream": True},
            "in the background": {"background": True},
            "not stored": {"store": False},
        }.items()
    },
    "item_reference to output": Path(
        lambda client, belongings: client.post(**reference(belongings.item)), FINE, NO_ITEM
    ),
    "item_reference to input": Path(
        lambda client, belongings: client.post(stream=True, **reference(belongings.input_item)), FINE, NO_ITEM
    ),
    "reasoning payload": Path(
        lambda client, belongings: client.post(**reasoning(belongings)), FINE, NO_PAYLOAD, carried=True
    ),
    "compaction payload": Path(
        lambda client, belongings: client.post(**summary(belongings)), FINE, NO_PAYLOAD, carried=True
    ),
    "compact previous_response_id": Path(
        lambda client, belongings: compact(client, previous_response_id=belongings.response), FINE, NO_PREVIOUS
    ),
    "compact item_reference": Path(
        lambda client, belongings: compact(client, **reference(belongings.item)), FINE, NO_ITEM
    ),
    "compact reasoning payload": Path(
        lambda client, belongings: compact(client, **reasoning(belongings)), FINE, NO_PAYLOAD, carried=True
    ),
    "compact compaction payload": Path(
        lambda client, belongings: compact(client, **summary(belongings)), FINE, NO_PAYLOAD, carried=True
    ),
    "WebSocket previous_response_id": Path(
        lambda client, belongings: send_over_websocket(client, input="on", previous_response_id=belongings.response),
        FINE,
        NO_PREVIOUS,
    ),
    "WebSocket item_reference": Path(
        lambda client, belongings: send_over_websocket(client, **reference(belongings.item)), FINE, NO_ITEM
    ),
    "WebSocket reasoning payload": Path(
        lambda client, belongings: send_over_websocket(client, **reasoning(belongings)), FINE, NO_PAYLOAD, carried=True
    ),
    "WebSocket compaction payload": Path(
        lambda client, belongings: send_over_websocket(client, **summary(belongings)), FINE, NO_PAYLOAD, carried=True
    ),
    "Idempotency-Key": Path(post_with_key, FINE, FINE),
    "Idempotency-Key for another request": Path(
        lambda client, belongings: post_with_key(client, belongings, instructions="Be brief."), OTHER_REQUEST, FINE
    ),
}

STANDINGS = ["own", "foreign", "foreign in progress", "unknown", "deleted", "expired"]
CASES = [
    pytest.param(path, standing, marks=[pytest.mark.websockets] if path.startswith("WebSocket") else [])
    for path, row in PATHS.items()
    for standing in STANDINGS
    if not (row.carried and standing == "foreign in progress")  # payloads exist only after the end
]


async def create_belongings(client: Client, key: str, *, with_summary: bool) -> Belongings:
    """Create a response and return its belongings."""
    request = {
        "model": "scripted",
        "input": [ASK, {"role": "user", "content": script({"Reasoning": {"text": "a thought"}}, "a text")}],
        "include": ["reasoning.encrypted_content"],
    }
    headers = {"Idempotency-Key": key}
    response = (await client.request("POST", "/responses", json=request, headers=headers)).json()
    thought, message = response["output"]
    page = (await client.get(f"/responses/{response['id']}/input_items")).json()
    compaction = ""
    if with_summary:
        reply = await compact(client, previous_response_id=response["id"])
        assert reply.status == 200, reply.body
        (compaction,) = [item["encrypted_content"] for item in reply.json()["output"] if item["type"] == "compaction"]
    return Belongings(
        response["id"], message["id"], page["data"][0]["id"], thought["encrypted_content"], compaction, key, request
    )


async def start_belongings(client: Client, key: str, gate: str) -> Belongings:
    """Start a response and return its belongings; it has no output yet."""
    request = {"model": "scripted", "input": script({"gate": gate}, "a text"), "background": True}
    headers = {"Idempotency-Key": key}
    response = (await client.request("POST", "/responses", json=request, headers=headers)).json()
    page = (await client.get(f"/responses/{response['id']}/input_items")).json()
    input_item = page["data"][0]["id"]
    return Belongings(response["id"], input_item, input_item, "", "", key, request)


def invent_belongings(like: Belongings, key: str) -> Belongings:
    """Return belongings that look like these but never existed."""

    def random_id(name: str) -> str:
        return f"{name.partition('_')[0]}_{os.urandom(16).hex()}"

    def random_payload(encrypted: str) -> str:
        head, _, body = encrypted.rpartition(".")
        return f"{head}.{base64.urlsafe_b64encode(os.urandom(len(base64.urlsafe_b64decode(body)))).decode()}"

    return Belongings(
        *map(random_id, (like.response, like.item, like.input_item)),
        *map(random_payload, (like.thought, like.summary)),
        key,
        like.request,
    )


VARYING = re.compile(rb'\b[a-z]{2,5}_[0-9a-f]{32}\b|"(?:created|completed)_at":\s*\d+|rk1\.[\w.=-]+')


def comparable(reply: Reply) -> tuple[int, set[str], bytes]:
    """Return a reply without ids, payloads and times."""
    return reply.status, set(reply.headers), VARYING.sub(b"*", reply.body)


@pytest.mark.parametrize(("path", "standing"), CASES)
async def test_foreign_ids_are_unknown_on_every_path(client, server, control, name, path, standing):
    if standing == "expired" and not server.host.has_test_clock:
        return
    row, bob, gate = PATHS[path], client.with_key("Bearer bob"), name()
    holder = bob if standing.startswith("foreign") else client
    if standing == "foreign in progress":
        belongings = await start_belongings(holder, name(), gate)
    else:
        belongings = await create_belongings(holder, name(), with_summary="compaction payload" in path)
    unknown = invent_belongings(belongings, name())
    record_body = (await holder.get(f"/responses/{belongings.response}")).body
    if standing == "deleted":
        assert (await client.delete(f"/responses/{belongings.response}")).status == 200
    elif standing == "expired":
        await control.advance_clock(LONGER_THAN_TTL)

    reply = await row.ask(client, unknown if standing == "unknown" else belongings)

    is_own = standing == "own" or (row.carried and standing in ("deleted", "expired"))
    status, code, param = row.own if is_own else row.foreign
    if status == 200:
        assert reply.status == 200, reply.body
    else:
        reply.error(status, code, param)
    if not is_own:
        assert comparable(reply) == comparable(await row.ask(client, invent_belongings(belongings, name())))
        assert belongings.response.encode() not in reply.body
    elif path == "Idempotency-Key":
        assert reply.json()["id"] == belongings.response
    if standing == "foreign in progress":
        # The foreign response is unchanged.
        assert (await holder.get(f"/responses/{belongings.response}")).json()["status"] in ("queued", "in_progress")
        await control.open_gate(gate)
        assert (await holder.wait_for_end(belongings.response))["status"] == "completed"
    elif standing == "foreign":
        assert (await holder.get(f"/responses/{belongings.response}")).body == record_body


@pytest.mark.parametrize("path", [path for path in PATHS if "WebSocket" not in path])
async def test_unauthenticated_requests_return_401_on_every_path(client, name, path):
    belongings = await create_belongings(client, name(), with_summary="compaction payload" in path)
    replies = [
        await PATHS[path].ask(client.with_key("Bearer stranger"), belongings)
        for belongings in (belongings, invent_belongings(belongings, name()))
    ]
    for reply in replies:
        reply.error(401, "invalid_api_key")
    assert replies[0].body == replies[1].body
    assert (await client.get(f"/responses/{belongings.response}")).status == 200
