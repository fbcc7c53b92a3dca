"""Whose it is: every path that takes an id, held against ids of every standing, in one table."""

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
from .hosts import FARTHEST

pytestmark = [pytest.mark.anyio, pytest.mark.unbound]

SERVED_BY = FARTHEST
ASK = {"role": "user", "content": "what do you see?"}
LONGER_THAN_ANYTHING_IS_KEPT = 25 * 60 * 60


@dataclass
class Belongings:
    """What somebody got from a server, or might have got.

    Attributes:
        response: The id of a response.
        item: The id of an item of its output.
        given: The id of an item of its input.
        thought: The sealed reasoning in it.
        summary: A sealed compaction; empty unless it is needed.
        key: What it was asked for with.
        request: The request itself.
    """

    response: str
    item: str
    given: str
    thought: str
    summary: str
    key: str
    request: dict[str, Any]


async def compacted(client: Client, **fields: Any) -> Reply:
    return await client.request("POST", "/responses/compact", json={"model": "puppet", **fields})


async def keyed(client: Client, their: Belongings, **fields: Any) -> Reply:
    request = {**their.request, **fields}
    return await client.request("POST", "/responses", json=request, headers={"Idempotency-Key": their.key})


async def over_a_socket(client: Client, **fields: Any) -> Reply:
    """What HTTP would have answered."""
    async with client.socket() as socket:
        answer = await socket.turn(**fields)
    status, body = (answer["status"], {"error": answer["error"]}) if answer.get("type") == "error" else (200, answer)
    return Reply(status, {"content-type": "application/json"}, json.dumps(body).encode())


def reference(item_id: str) -> dict[str, Any]:
    return {"input": [{"type": "item_reference", "id": item_id}, ASK]}


def reasoning(their: Belongings) -> dict[str, Any]:
    return {"input": [{"type": "reasoning", "summary": [], "encrypted_content": their.thought}, ASK]}


def summary(their: Belongings) -> dict[str, Any]:
    return {"input": [{"type": "compaction", "encrypted_content": their.summary}, ASK]}


Outcome = tuple[int, str | None, str | None]
"""A status; and, where it is an error, its code and param."""

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
        own: What comes of it with the asker's own.
        others: What comes of it with anything else.
        carried: Whether clients carry what is asked with: then it outlives what the server keeps.
    """

    ask: Callable[[Client, Belongings], Awaitable[Reply]]
    own: Outcome
    others: Outcome
    carried: bool = False


def get(path: str) -> Callable[[Client, Belongings], Awaitable[Reply]]:
    return lambda client, their: client.get(path.format(their.response))


PATHS = {
    "GET": Path(get("/responses/{}"), FINE, NO_RESPONSE),
    "GET stream": Path(get("/responses/{}?stream=true"), FINE, NO_RESPONSE),
    "GET stream from a place": Path(get("/responses/{}?stream=true&starting_after=1"), FINE, NO_RESPONSE),
    "GET stream beyond the end": Path(get("/responses/{}?stream=true&starting_after=9999"), FINE, NO_RESPONSE),
    "input_items": Path(get("/responses/{}/input_items"), FINE, NO_RESPONSE),
    "DELETE": Path(lambda client, their: client.delete(f"/responses/{their.response}"), FINE, NO_RESPONSE),
    "cancel": Path(lambda client, their: client.cancel(their.response), ENDED, NO_RESPONSE),
    **{
        f"previous_response_id, {mode}": Path(
            lambda client, their, fields=fields: client.post(input="on", previous_response_id=their.response, **fields),
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
    "item_reference to output": Path(lambda client, their: client.post(**reference(their.item)), FINE, NO_ITEM),
    "item_reference to input": Path(
        lambda client, their: client.post(stream=True, **reference(their.given)), FINE, NO_ITEM
    ),
    "reasoning payload": Path(lambda client, their: client.post(**reasoning(their)), FINE, NO_PAYLOAD, carried=True),
    "compaction payload": Path(lambda client, their: client.post(**summary(their)), FINE, NO_PAYLOAD, carried=True),
    "compact previous_response_id": Path(
        lambda client, their: compacted(client, previous_response_id=their.response), FINE, NO_PREVIOUS
    ),
    "compact item_reference": Path(lambda client, their: compacted(client, **reference(their.item)), FINE, NO_ITEM),
    "compact reasoning payload": Path(
        lambda client, their: compacted(client, **reasoning(their)), FINE, NO_PAYLOAD, carried=True
    ),
    "compact compaction payload": Path(
        lambda client, their: compacted(client, **summary(their)), FINE, NO_PAYLOAD, carried=True
    ),
    "socket previous_response_id": Path(
        lambda client, their: over_a_socket(client, input="on", previous_response_id=their.response),
        FINE,
        NO_PREVIOUS,
    ),
    "socket item_reference": Path(lambda client, their: over_a_socket(client, **reference(their.item)), FINE, NO_ITEM),
    "socket reasoning payload": Path(
        lambda client, their: over_a_socket(client, **reasoning(their)), FINE, NO_PAYLOAD, carried=True
    ),
    "socket compaction payload": Path(
        lambda client, their: over_a_socket(client, **summary(their)), FINE, NO_PAYLOAD, carried=True
    ),
    "Idempotency-Key": Path(keyed, FINE, FINE),
    "Idempotency-Key for another request": Path(
        lambda client, their: keyed(client, their, instructions="Be brief."), OTHER_REQUEST, FINE
    ),
}

STANDINGS = ["own", "foreign", "foreign in progress", "unknown", "deleted", "expired"]
CASES = [
    pytest.param(path, standing, marks=[pytest.mark.sockets] if path.startswith("socket") else [])
    for path, row in PATHS.items()
    for standing in STANDINGS
    if not (row.carried and standing == "foreign in progress")  # what is carried is made at the end
]


async def made(client: Client, key: str, *, summed_up: bool) -> Belongings:
    """The belongings of somebody who asked."""
    request = {
        "model": "puppet",
        "input": [ASK, {"role": "user", "content": script({"Reasoning": {"text": "a thought"}}, "a text")}],
        "include": ["reasoning.encrypted_content"],
    }
    headers = {"Idempotency-Key": key}
    response = (await client.request("POST", "/responses", json=request, headers=headers)).json()
    thought, message = response["output"]
    page = (await client.get(f"/responses/{response['id']}/input_items")).json()
    compaction = ""
    if summed_up:
        reply = await compacted(client, previous_response_id=response["id"])
        assert reply.status == 200, reply.body
        (compaction,) = [item["encrypted_content"] for item in reply.json()["output"] if item["type"] == "compaction"]
    return Belongings(
        response["id"], message["id"], page["data"][0]["id"], thought["encrypted_content"], compaction, key, request
    )


async def begun(client: Client, key: str, gate: str) -> Belongings:
    """The belongings of somebody whose response is being made: there is no output yet."""
    request = {"model": "puppet", "input": script({"gate": gate}, "a text"), "background": True}
    headers = {"Idempotency-Key": key}
    response = (await client.request("POST", "/responses", json=request, headers=headers)).json()
    page = (await client.get(f"/responses/{response['id']}/input_items")).json()
    given = page["data"][0]["id"]
    return Belongings(response["id"], given, given, "", "", key, request)


def imagined(like: Belongings, key: str) -> Belongings:
    """What looks like those belongings, and was never anybody's."""

    def other(name: str) -> str:
        return f"{name.partition('_')[0]}_{os.urandom(16).hex()}"

    def payload(sealed: str) -> str:
        head, _, body = sealed.rpartition(".")
        return f"{head}.{base64.urlsafe_b64encode(os.urandom(len(base64.urlsafe_b64decode(body)))).decode()}"

    return Belongings(
        *map(other, (like.response, like.item, like.given)),
        *map(payload, (like.thought, like.summary)),
        key,
        like.request,
    )


CHANGING = re.compile(rb'\b[a-z]{2,5}_[0-9a-f]{32}\b|"(?:created|completed)_at":\s*\d+|rk1\.[\w.=-]+')


def comparable(reply: Reply) -> tuple[int, set[str], bytes]:
    """A reply but for ids and payloads that were made for it, and times."""
    return reply.status, set(reply.headers), CHANGING.sub(b"*", reply.body)


@pytest.mark.parametrize(("path", "standing"), CASES)
async def test_what_is_not_ones_own_is_unknown_on_every_path(client, server, hand, name, path, standing):
    if standing == "expired" and not server.host.clock:
        return
    row, bob, gate = PATHS[path], client.other("Bearer bob"), name()
    holder = bob if standing.startswith("foreign") else client
    if standing == "foreign in progress":
        their = await begun(holder, name(), gate)
    else:
        their = await made(holder, name(), summed_up="compaction payload" in path)
    unknown = imagined(their, name())
    kept = (await holder.get(f"/responses/{their.response}")).body
    if standing == "deleted":
        assert (await client.delete(f"/responses/{their.response}")).status == 200
    elif standing == "expired":
        await hand.later(LONGER_THAN_ANYTHING_IS_KEPT)

    reply = await row.ask(client, unknown if standing == "unknown" else their)

    mine = standing == "own" or (row.carried and standing in ("deleted", "expired"))
    status, code, param = row.own if mine else row.others
    if status == 200:
        assert reply.status == 200, reply.body
    else:
        reply.error(status, code, param)
    if not mine:
        assert comparable(reply) == comparable(await row.ask(client, imagined(their, name())))
        assert their.response.encode() not in reply.body
    elif path == "Idempotency-Key":
        assert reply.json()["id"] == their.response
    if standing == "foreign in progress":
        # Nothing has happened to it.
        assert (await holder.get(f"/responses/{their.response}")).json()["status"] in ("queued", "in_progress")
        await hand.open(gate)
        assert (await holder.ended(their.response))["status"] == "completed"
    elif standing == "foreign":
        assert (await holder.get(f"/responses/{their.response}")).body == kept


@pytest.mark.parametrize("path", [path for path in PATHS if "socket" not in path])
async def test_who_is_nobody_is_told_so_on_every_path(client, name, path):
    their = await made(client, name(), summed_up="compaction payload" in path)
    replies = [
        await PATHS[path].ask(client.other("Bearer stranger"), belongings)
        for belongings in (their, imagined(their, name()))
    ]
    for reply in replies:
        reply.error(401, "invalid_api_key")
    assert replies[0].body == replies[1].body
    assert (await client.get(f"/responses/{their.response}")).status == 200
