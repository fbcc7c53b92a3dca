"""The Open Responses API over HTTP (specification, revisions 2026-01-15 and 2026-04-24).

============================================  ===========================================
``POST /responses``                           create a response, streamed or not
``GET, DELETE /responses/{id}``               the stored response; its events with `stream=true`
``POST /responses/{id}/cancel``               cancel it
``GET /responses/{id}/input_items``           its input, by pages
``POST /responses/compact``                   a conversation, summed up
``GET /models``, ``GET /models/{id}``         what can be asked
============================================  ===========================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import aclosing
from typing import ClassVar

from ..engine.repository import EventFollower
from ..engine.run import Run
from ..errors import APIError, UpgradeRequired
from ..kit import ResponsesKit
from ..protocol.sse import DONE, KEEP_ALIVE, encode_sse
from ..protocol.state_machine import TERMINAL, Event
from ..protocol.validation import parse_request
from ..schema.request import CreateRequest
from .messages import Reply, Request, idempotency_key, json_body, json_reply, parse_query, parse_sequence_number
from .router import Endpoint, WireProtocol
from .streaming import SendEvents, stream_reply

__all__ = ["OpenResponses"]


async def _create(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    body = parse_request(await json_body(request))
    key = idempotency_key(request)
    if body.background or key is not None:
        return await _start(kit, body, owner, key)
    run = await kit.service.create_run(body, owner=owner)
    if body.stream:
        return stream_reply(kit, functools.partial(_tell_run, run), run.abort)
    await run.complete()
    return json_reply(run.encoded())


async def _start(kit: ResponsesKit, body: CreateRequest, owner: str, key: str | None) -> Reply:
    """A response that does not end with its client."""
    response = await kit.service.submit(body, owner=owner, key=key)
    if body.stream:
        follower = await kit.service.follow(response["id"], owner=owner, synthesize=True)
        return stream_reply(kit, functools.partial(_tell_pieces, follower))
    if not body.background:
        response = await kit.wait(response["id"], owner=owner)
    return json_reply(response)


async def _upgrade(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    raise UpgradeRequired("GET this path as a WebSocket, or POST to it.", headers={"Upgrade": "websocket"})


async def _retrieve(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    query = parse_query(request)
    if query.get("stream", "false") not in ("false", "0"):
        after = None
        if "starting_after" in query:
            after = parse_sequence_number(query["starting_after"], param="starting_after", what="sequence_number")
        follower = await kit.service.follow(response_id, owner=owner, after=after)
        return stream_reply(kit, functools.partial(_tell_pieces, follower))
    return json_reply(await kit.retrieve(response_id, owner=owner))


async def _cancel(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return json_reply(await kit.cancel(response_id, owner=owner))


async def _compact(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    return json_reply(await kit.compact(await json_body(request), owner=owner))


async def _delete(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return json_reply(await kit.delete(response_id, owner=owner))


async def _input_items(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    query = parse_query(request)
    limit = query.get("limit", "20")
    page = await kit.input_items(
        response_id,
        owner=owner,
        limit=int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 3 else 0,  # which is refused
        order=query.get("order", "desc"),
        after=query.get("after"),
    )
    return json_reply(page)


async def _models(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    return json_reply(kit.models())


async def _model(kit: ResponsesKit, request: Request, owner: str, name: str) -> Reply:
    return json_reply(kit.model(name))


async def _tell_run(run: Run, put: SendEvents) -> None:
    async def tell(events: list[Event]) -> None:
        data = encode_sse(events[0]) if len(events) == 1 else b"".join(map(encode_sse, events))
        await put(data + DONE if events[-1]["type"] in TERMINAL else data)

    await run.execute(tell)


async def _tell_pieces(follower: EventFollower, put: SendEvents) -> None:
    if follower.idle:
        await put(KEEP_ALIVE)  # with which the reply's head goes out
    async with aclosing(follower.pieces()) as pieces:
        async for piece in pieces:
            await put(piece)
    await put(DONE)


class OpenResponses(WireProtocol):
    """The dialect that the kit itself thinks in."""

    name = "responses"
    sockets = True
    routes: ClassVar[Mapping[str, Mapping[str, Endpoint]]] = {
        "responses": {"POST": _create, "GET": _upgrade},
        "responses/compact": {"POST": _compact},
        "responses/*": {"GET": _retrieve, "DELETE": _delete},
        "responses/*/cancel": {"POST": _cancel},
        "responses/*/input_items": {"GET": _input_items},
        "models": {"GET": _models},
        "models/**": {"GET": _model},
    }

    @classmethod
    def render_error(cls, error: APIError) -> Reply:
        """An error as a reply: `{"error": {type, code, message, param}}`."""
        return json_reply({"error": error.payload()}, status=error.status, headers=error.headers)
