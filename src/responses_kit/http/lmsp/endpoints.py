"""LMSP 1.0 over HTTP.

============================================  ===========================================
``POST /responses``                           create a response, streamed or not
``GET /responses/{id}``                       retrieve a stored response
``POST /tasks``                               create a task: a response in the background
``GET /tasks/{id}``                           retrieve a task, with its result
``GET /tasks/{id}/events``                    stream a task's events; resumable
``POST /tasks/{id}/cancel``                   cancel a task
============================================  ===========================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Final

import anyio.lowlevel

from ...engine.follower import EventFollower
from ...engine.run import Run
from ...errors import APIError, NotFound, UnsupportedParameter
from ...kit import ResponsesKit
from ...protocol.sse import KEEP_ALIVE
from ...protocol.state_machine import Event
from ...protocol.validation import validate
from ...schema.request import CreateRequest
from ..messages import Reply, Request, json_reply, parse_idempotency_key, parse_query, parse_sequence_number, read_json
from ..router import Endpoint, WireProtocol
from ..streaming import SendEvents, stream_reply
from .assumptions import (
    VERSION,
    check_version,
    encode_error_event,
    render_problem,
    render_task,
    resolve_store,
    task_not_found,
    to_response_id,
)
from .rendering import EventRenderer, render_response
from .requests import ResponseRequest, to_create_request

__all__ = ["LMSP"]

_YIELD_INTERVAL: Final = 64
"""Pieces of a log that are skipped before other tasks may run; well below a millisecond's work."""


async def _create(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    key = parse_idempotency_key(request)
    required_by = None if key is None else "when an Idempotency-Key is sent"
    body = _parse_request(kit, await read_json(request), required_by=required_by)
    if key is not None:
        return await _create_once(kit, body, owner, key)
    run = await kit.service.create_run(body, owner=owner)
    if body.stream:
        return stream_reply(kit, functools.partial(_stream_run, run), run.abort)
    await run.complete()
    return json_reply(render_response(run.response))


async def _create_once(kit: ResponsesKit, body: CreateRequest, owner: str, key: str) -> Reply:
    """Reply with a response that continues when the client leaves, as other requests may wait for it."""
    response_id = (await kit.service.submit(body, owner=owner, key=key))["id"]
    if body.stream:
        follower = await kit.service.follow(response_id, owner=owner, synthesize=True)
        return stream_reply(kit, functools.partial(_stream_log, follower, 0))
    return json_reply(render_response(await kit.wait(response_id, owner=owner)))


def _parse_request(kit: ResponsesKit, body: Any, *, required_by: str | None, **overrides: Any) -> CreateRequest:
    lmsp_request = validate(ResponseRequest, body)
    model = kit.service.models().get(lmsp_request.model)
    conversations = model is not None and model.conversations
    store = resolve_store(lmsp_request.store, conversations=conversations, required_by=required_by)
    return to_create_request(lmsp_request, store=store, **overrides)


async def _retrieve(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return json_reply(render_response(await kit.retrieve(response_id, owner=owner)))


# Tasks.


async def _create_task(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    key = parse_idempotency_key(request)
    if kit.backend.is_request_bound:
        raise UnsupportedParameter("Tasks are not supported by this server.")
    body = _parse_request(kit, await read_json(request), required_by="for a task", background=True, stream=False)
    return json_reply(render_task(render_response(await kit.service.submit(body, owner=owner, key=key))), status=202)


def _task_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint for a task's path; it calls `endpoint` with the task's response, or raises `NotFound`."""

    async def respond(kit: ResponsesKit, request: Request, owner: str, task_id: str) -> Reply:
        try:
            response = await kit.retrieve(to_response_id(task_id), owner=owner)
            if response["background"]:
                return await endpoint(kit, request, owner, response)
        except NotFound:
            pass
        raise task_not_found()

    return respond


@_task_endpoint
async def _retrieve_task(kit: ResponsesKit, request: Request, owner: str, response: dict[str, Any]) -> Reply:
    return json_reply(render_task(render_response(response)))


@_task_endpoint
async def _cancel_task(kit: ResponsesKit, request: Request, owner: str, response: dict[str, Any]) -> Reply:
    return json_reply(render_task(render_response(await kit.cancel(response["id"], owner=owner))))


@_task_endpoint
async def _follow_task(kit: ResponsesKit, request: Request, owner: str, response: dict[str, Any]) -> Reply:
    after = _parse_position(request)
    follower = await kit.service.follow(response["id"], owner=owner)
    return stream_reply(kit, functools.partial(_stream_log, follower, after))


def _parse_position(request: Request) -> int:
    """Return the id of the last event that the client has received, or 0.

    The query takes precedence over the header (LMSP 1.0, 6.4).
    """
    positions = {"after": parse_query(request).get("after"), "Last-Event-ID": request.headers.get("last-event-id")}
    for param, position in positions.items():
        if position:
            return parse_sequence_number(position, param=param, kind="id")
    return 0


# Streams.


async def _stream_run(run: Run, send: SendEvents) -> None:
    renderer = EventRenderer()

    async def emit(events: list[Event]) -> None:
        if data := renderer.render(events):
            await send(data)

    await run.execute(emit)


async def _stream_log(follower: EventFollower, after: int, send: SendEvents) -> None:
    renderer, skipped = EventRenderer(after), 0
    await send(KEEP_ALIVE)  # so that the status and headers are sent at once
    async with aclosing(follower.pieces()) as pieces:
        async for piece in pieces:
            # Without the log the events are synthesized, with other numbers, so that the stream cannot be resumed.
            if follower.error is not None and (after or not follower.is_complete):
                await send(encode_error_event(follower.error))
                return
            if data := renderer.render(renderer.decode_new_events(piece)):
                await send(data)
            elif (skipped := skipped + 1) % _YIELD_INTERVAL == 0:
                await anyio.lowlevel.checkpoint()


class LMSP(WireProtocol):
    """The Local Model Service Protocol 1.0 (draft)."""

    name = "lmsp"
    routes: ClassVar[Mapping[str, Mapping[str, Endpoint]]] = {
        "responses": {"POST": _create},
        "responses/*": {"GET": _retrieve},
        "tasks": {"POST": _create_task},
        "tasks/*": {"GET": _retrieve_task},
        "tasks/*/events": {"GET": _follow_task},
        "tasks/*/cancel": {"POST": _cancel_task},
    }

    @classmethod
    def render_error(cls, error: APIError) -> Reply:
        """Return an error as a reply with a problem document (RFC 9457)."""
        document = render_problem(error)
        headers = {**error.headers, "Content-Type": "application/problem+json", "LMSP-Version": VERSION}
        return json_reply(document, status=document["status"], headers=headers)

    async def handle(self, request: Request) -> Reply:
        """Answer a request; every reply has the `LMSP-Version` header.

        Raises:
            ClientDisconnected: The client left while its body was read.
        """
        try:
            check_version(request.headers)
        except APIError as error:
            return self.render_error(error)
        reply = await super().handle(request)
        return replace(reply, headers={**reply.headers, "LMSP-Version": VERSION})
