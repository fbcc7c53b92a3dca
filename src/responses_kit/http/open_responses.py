"""The Open Responses API over HTTP (specification, revisions 2026-01-15 and 2026-04-24).

============================================  ===========================================
``POST /responses``                           create a response, streamed or not
``GET /responses/{id}``                       retrieve a response; its events with `stream=true`
``DELETE /responses/{id}``                    delete a response
``POST /responses/{id}/cancel``               cancel a response
``GET /responses/{id}/input_items``           list a response's input items by pages
``POST /responses/compact``                   compact a conversation
``GET /models``, ``GET /models/{id}``         list the models, retrieve one
============================================  ===========================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import aclosing
from typing import ClassVar

from ..engine.follower import EventFollower
from ..engine.run import Run
from ..errors import APIError, UpgradeRequired
from ..kit import ResponsesKit
from ..protocol.sse import DONE, KEEP_ALIVE, encode_sse
from ..protocol.state_machine import TERMINAL_EVENT_TYPES, Event
from ..protocol.validation import parse_request
from ..schema.request import CreateRequest
from .messages import Reply, Request, json_reply, parse_idempotency_key, parse_query, parse_sequence_number, read_json
from .router import Endpoint, WireProtocol
from .streaming import SendEvents, stream_reply

__all__ = ["OpenResponses"]


async def _create(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    body = parse_request(await read_json(request))
    key = parse_idempotency_key(request)
    if body.background or key is not None:
        return await _submit(kit, body, owner, key)
    run = await kit.service.create_run(body, owner=owner)
    if body.stream:
        return stream_reply(kit, functools.partial(_stream_run, run), run.abort)
    await run.complete()
    return json_reply(run.encoded())


async def _submit(kit: ResponsesKit, body: CreateRequest, owner: str, key: str | None) -> Reply:
    """Reply with a response that continues when the client leaves."""
    response = await kit.service.submit(body, owner=owner, key=key)
    if body.stream:
        follower = await kit.service.follow(response["id"], owner=owner, synthesize=True)
        return stream_reply(kit, functools.partial(_stream_log, follower))
    if not body.background:
        response = await kit.wait(response["id"], owner=owner)
    return json_reply(response)


async def _upgrade(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    raise UpgradeRequired("GET needs a WebSocket upgrade. Use POST otherwise.", headers={"Upgrade": "websocket"})


async def _retrieve(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    query = parse_query(request)
    if query.get("stream", "false") not in ("false", "0"):
        after = None
        if "starting_after" in query:
            after = parse_sequence_number(query["starting_after"], param="starting_after", kind="sequence_number")
        follower = await kit.service.follow(response_id, owner=owner, after=after)
        return stream_reply(kit, functools.partial(_stream_log, follower))
    return json_reply(await kit.retrieve(response_id, owner=owner))


async def _cancel(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return json_reply(await kit.cancel(response_id, owner=owner))


async def _compact(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    return json_reply(await kit.compact(await read_json(request), owner=owner))


async def _delete(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return json_reply(await kit.delete(response_id, owner=owner))


async def _input_items(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    query = parse_query(request)
    limit = query.get("limit", "20")
    page = await kit.input_items(
        response_id,
        owner=owner,
        limit=int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 3 else 0,  # refused as out of range
        order=query.get("order", "desc"),
        after=query.get("after"),
    )
    return json_reply(page)


async def _models(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    return json_reply(kit.models())


async def _model(kit: ResponsesKit, request: Request, owner: str, name: str) -> Reply:
    return json_reply(kit.model(name))


async def _stream_run(run: Run, send: SendEvents) -> None:
    async def emit(events: list[Event]) -> None:
        data = encode_sse(events[0]) if len(events) == 1 else b"".join(map(encode_sse, events))
        await send(data + DONE if events[-1]["type"] in TERMINAL_EVENT_TYPES else data)

    await run.execute(emit)


async def _stream_log(follower: EventFollower, send: SendEvents) -> None:
    if follower.is_idle:
        await send(KEEP_ALIVE)  # so that the status and headers are sent at once
    async with aclosing(follower.pieces()) as pieces:
        async for piece in pieces:
            await send(piece)
    await send(DONE)


class OpenResponses(WireProtocol):
    """The Open Responses API."""

    name = "responses"
    has_websocket = True
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
        """Return an error as a reply: `{"error": {type, code, message, param}}`."""
        return json_reply({"error": error.payload()}, status=error.status, headers=error.headers)
