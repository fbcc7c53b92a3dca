"""The checks, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from .answers import CheckFailed, CheckSkipped, as_object, describe_response, shorten
from .server import Server
from .streams import Stream

_PROMPT: Final = "Say hello."
_LONG_PROMPT: Final = "Write a story of about 150 words."  # long enough to measure the pace of events
_MAX_OUTPUT_TOKENS: Final = 256  # limits models that ramble; an incomplete response passes
_INVALID_BODY: Final = {"input": 5}
_JSON_HEADERS: Final = {"Content-Type": "application/json"}
_READ_COUNT: Final = 4  # on separate connections, so that several processes are reached


class Checks:
    """The checks of one server; each returns the detail of its finding.

    Args:
        server: The checked server.
        key: The key that is sent, if any.
        model: The model to ask; None for the first one.
    """

    def __init__(self, server: Server, key: str | None, model: str | None) -> None:
        self._server, self._request_answer, self._api_key, self._model = server, server.request, key, model
        self._stored_response: dict[str, Any] = {}
        self._stream_to_pace = Stream()

    def all(self) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
        """Return the names of the findings and their checks, in order."""
        first = [self._models, self._key, self._answer, self._stream, self._pace]
        stored = [self._stored, self._continued, self._input_items, self._stream_again, self._deleted]
        return [
            *((step.__name__.strip("_").replace("_", " "), step) for step in first + stored),
            ("invalid request", partial(self._check_refusal, "POST /responses", 400, json=_INVALID_BODY)),
            (
                "malformed body",
                partial(self._check_refusal, "POST /responses", 400, content=b'{"input": ', headers=_JSON_HEADERS),
            ),
            ("unknown path", partial(self._check_refusal, "GET /no/such/path", 404)),
            ("websocket", self._websocket),
        ]

    def _body(self, question: str = _PROMPT, **fields: Any) -> dict[str, Any]:
        return {"model": self._model, "input": question, "max_output_tokens": _MAX_OUTPUT_TOKENS, **fields}

    @property
    def _id(self) -> str:
        if not self._stored_response:
            raise CheckSkipped("There is no stored response to check.")
        return str(self._stored_response["id"])

    async def _models(self) -> str:
        answer = await self._request_answer("GET /models")
        names = answer.models
        if answer.status in (401, 403):
            answer.require()
        if names is None:
            raise CheckFailed(f"{answer}, which is not a list of models. {await self._suggest_url()}")
        if not names:
            raise CheckFailed("GET /models lists no models. The backend must name at least one.")
        self._model = self._model or names[0]
        if self._model not in names:
            raise CheckFailed(
                f"There is no model {shorten(self._model)}. The server lists {shorten(', '.join(names))}."
            )
        return f"{len(names)} listed; {shorten(self._model)} is used."

    async def _suggest_url(self) -> str:
        base = self._server.base
        origin = "/".join(base.split("/")[:3])
        for near in (f"{base}/v1", base.removesuffix("/responses").removesuffix("/models"), f"{origin}/v1"):
            with suppress(CheckFailed):
                answer = await self._request_answer("GET /models", base=near)
                if answer.models is not None or (answer.status == 401 and answer.error):
                    return f"The API is at {near}: use that URL."
        return f"The API is not at {base}: use the URL at which it is mounted, such as {origin}/v1."

    async def _key(self) -> str:
        if not self._api_key:
            raise CheckSkipped(
                "No key was given, and none was needed: any client that can reach this server may use it."
            )
        answer = await self._request_answer(
            "POST /responses", json=_INVALID_BODY, headers={"Authorization": "Bearer made-up"}
        )
        if answer.status == 400:
            raise CheckFailed(
                "A made-up key is accepted like the given one: no owner hook (in Django the setting AUTH) is active. "
                "If the API is meant to be open, check it without a key."
            )
        answer.require(403 if answer.status == 403 else 401)
        return f"A made-up key is refused with {answer.status}."

    async def _answer(self) -> str:
        response = (await self._request_answer("POST /responses", json=self._body())).require()
        if not isinstance(response.get("id"), str):
            raise CheckFailed(
                "POST /responses returned JSON that is not a response. Check that the URL is a server of this API."
            )
        self._stored_response = response
        return f"The response is {describe_response(response)}."

    async def _stream(self) -> str:
        self._stream_to_pace = Stream()
        request = self._body(_LONG_PROMPT, stream=True, store=False)
        if answer := await self._server.read_stream(self._stream_to_pace, "POST /responses", json=request):
            if answer.status == 200:
                raise CheckFailed(f"{answer}, not with text/event-stream; something in front of the API may change it.")
            answer.require()
        return _describe_stream(self._stream_to_pace)

    async def _pace(self) -> str:
        return self._stream_to_pace.describe_pace(self._server.latency)

    async def _stored(self) -> str:
        for _ in range(_READ_COUNT):
            found = (await self._request_answer("GET /responses/{id}", of=self._id)).require()
            if found.get("output") != self._stored_response.get("output"):
                raise CheckFailed("The stored response has a different output than the reply.")
        return f"Read {_READ_COUNT} times, on separate connections."

    async def _continued(self) -> str:
        request = self._body("Say it again.", previous_response_id=self._id, store=False)
        response = (await self._request_answer("POST /responses", json=request)).require()
        return f"The response is {describe_response(response)}."

    async def _input_items(self) -> str:
        listed = (await self._request_answer("GET /responses/{id}/input_items", of=self._id)).require()
        if _PROMPT not in str(listed):
            raise CheckFailed("GET /responses/{id}/input_items does not list the input.")
        return "The input is listed."

    async def _stream_again(self) -> str:
        stream = Stream()
        if answer := await self._server.read_stream(stream, "GET /responses/{id}?stream=true", of=self._id):
            answer.require(400)
            return "Refused, which is allowed: the events are not logged."
        stream.terminal_event()
        return f"Replayed with {len(stream.events) - 1} events."

    async def _deleted(self) -> str:
        (await self._request_answer("DELETE /responses/{id}", of=self._id)).require()
        (await self._request_answer("GET /responses/{id}", of=self._id)).require(404)
        return "Deleted, and not found afterwards."

    async def _check_refusal(self, request: str, status: int, **options: Any) -> str:
        (await self._request_answer(request, **options)).require(status)
        return f"Refused with {status} and an error of the API."

    async def _websocket(self) -> str:
        stream = Stream()
        request = self._body(type="response.create", store=False)
        if answer := await self._server.read_websocket(stream, "GET /responses", request):
            if answer.status in (404, 405, 426, 501) and answer.error:
                raise CheckSkipped(
                    f"{answer}. WebSockets are not available: of WSGI servers only gunicorn and Flask's own support "
                    "them, ASGI servers need a package for them, and every proxy must pass on the upgrade."
                )
            answer.require(101)
        return _describe_stream(stream)


def _describe_stream(stream: Stream) -> str:
    described = describe_response(as_object(stream.terminal_event().get("response")))
    return f"{len(stream.events) - 1} events; the response is {described}."
