"""LMSP 1.0 over HTTP.

============================================  ===========================================
``POST /responses``                           create a response, streamed or not
``GET /responses/{id}``                       the stored response
``POST /tasks``                               create a response that goes on by itself
``GET /tasks/{id}``                           the task, with its result
``GET /tasks/{id}/events``                    its events, from any of them on
``POST /tasks/{id}/cancel``                   cancel it
============================================  ===========================================
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Final

import anyio.lowlevel

from ...engine.repository import EventFollower
from ...engine.run import Run
from ...errors import APIError, NotFound, UnsupportedParameter
from ...kit import ResponsesKit
from ...protocol.sse import KEEP_ALIVE
from ...protocol.state_machine import Event
from ...protocol.validation import validate
from ...schema.request import CreateRequest
from ..messages import Reply, Request, idempotency_key, json_body, json_reply, parse_query, parse_sequence_number
from ..router import Endpoint, WireProtocol
from ..streaming import SendEvents, stream_reply
from .inferred import VERSION, check_version, error_event, is_kept, problem, response_id_of, task, unknown_task
from .rendering import Rendering, response_in_lmsp
from .requests import ResponseRequest, translated

__all__ = ["LMSP"]


async def _create(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    key = idempotency_key(request)
    needed = None if key is None else "What has an Idempotency-Key"
    body = _translated(kit, await json_body(request), needed=needed)
    if key is not None:
        return await _create_once(kit, body, owner, key)
    run = await kit.service.create_run(body, owner=owner)
    if body.stream:
        return stream_reply(kit, functools.partial(_tell_run, run), run.abort)
    await run.complete()
    return json_reply(response_in_lmsp(run.response))


async def _create_once(kit: ResponsesKit, body: CreateRequest, owner: str, key: str) -> Reply:
    """A response that does not end with its client, since another request may wait for it as well."""
    response_id = (await kit.service.submit(body, owner=owner, key=key))["id"]
    if body.stream:
        follower = await kit.service.follow(response_id, owner=owner, synthesize=True)
        return stream_reply(kit, functools.partial(_tell_followed, follower, 0))
    return json_reply(response_in_lmsp(await kit.wait(response_id, owner=owner)))


def _translated(kit: ResponsesKit, body: Any, *, needed: str | None, **decided: Any) -> CreateRequest:
    asked = validate(ResponseRequest, body)
    model = kit.service.models().get(asked.model)
    store = is_kept(asked.store, conversations=model is not None and model.conversations, needed=needed)
    return translated(asked, store=store, **decided)


async def _retrieve(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return json_reply(response_in_lmsp(await kit.retrieve(response_id, owner=owner)))


# Tasks.


async def _create_task(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    key = idempotency_key(request)
    if kit.backend.is_request_bound:
        raise UnsupportedParameter("This server answers while its clients wait: it has no tasks.")
    body = _translated(kit, await json_body(request), needed="A task", background=True, stream=False)
    return json_reply(task(response_in_lmsp(await kit.service.submit(body, owner=owner, key=key))), status=202)


def _of_task(endpoint: Endpoint) -> Endpoint:
    """An endpoint that is given the response that a task makes. Whenever there is none, there is no task."""

    async def respond(kit: ResponsesKit, request: Request, owner: str, task_id: str) -> Reply:
        try:
            response = await kit.retrieve(response_id_of(task_id), owner=owner)
            if response["background"]:
                return await endpoint(kit, request, owner, response)
        except NotFound:
            pass
        raise unknown_task()

    return respond


@_of_task
async def _retrieve_task(kit: ResponsesKit, request: Request, owner: str, response: dict[str, Any]) -> Reply:
    return json_reply(task(response_in_lmsp(response)))


@_of_task
async def _cancel_task(kit: ResponsesKit, request: Request, owner: str, response: dict[str, Any]) -> Reply:
    return json_reply(task(response_in_lmsp(await kit.cancel(response["id"], owner=owner))))


@_of_task
async def _follow_task(kit: ResponsesKit, request: Request, owner: str, response: dict[str, Any]) -> Reply:
    after = _known(request)
    follower = await kit.service.follow(response["id"], owner=owner)
    return stream_reply(kit, functools.partial(_tell_followed, follower, after))


def _known(request: Request) -> int:
    """The number of the last event that the client has; the query counts before the header (LMSP 1.0, 6.4)."""
    places = {"after": parse_query(request).get("after"), "Last-Event-ID": request.headers.get("last-event-id")}
    for param, place in places.items():
        if place:
            return parse_sequence_number(place, param=param, what="id")
    return 0


# Streams.


async def _tell_run(run: Run, put: SendEvents) -> None:
    rendering = Rendering()

    async def tell(events: list[Event]) -> None:
        if data := rendering.render(events):
            await put(data)

    await run.execute(tell)


_QUIET_PIECES: Final = 64
"""Pieces of a log that are read at once while there is nothing in them to tell; well below a millisecond's work."""


async def _tell_followed(follower: EventFollower, after: int, put: SendEvents) -> None:
    rendering, quiet = Rendering(after), 0
    await put(KEEP_ALIVE)  # with which the reply's head goes out, though there may be nothing to tell for a while
    async with aclosing(follower.pieces()) as pieces:
        async for piece in pieces:
            # What is told in the log's place has other numbers: whoever knows some of the log's has no use for it.
            if follower.lost is not None and (after or not follower.whole):
                await put(error_event(follower.lost))
                return
            if data := rendering.render(rendering.unknown(piece)):
                await put(data)
            elif (quiet := quiet + 1) % _QUIET_PIECES == 0:
                await anyio.lowlevel.checkpoint()  # a long log that is known holds nobody else up


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
        """An error as a reply: a problem document (RFC 9457)."""
        document = problem(error)
        headers = {**error.headers, "Content-Type": "application/problem+json", "LMSP-Version": VERSION}
        return json_reply(document, status=document["status"], headers=headers)

    async def handle(self, request: Request) -> Reply:
        """As `WireProtocol.handle`; every answer says its version.

        Raises:
            ClientGone: The client left while its body was read.
        """
        try:
            check_version(request.headers)
        except APIError as error:
            return self.render_error(error)
        reply = await super().handle(request)
        return replace(reply, headers={**reply.headers, "LMSP-Version": VERSION})
