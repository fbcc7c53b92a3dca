"""What is looked at, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from .answers import Failed, Skipped, judged, members, quoted
from .server import Server
from .streams import Stream

_QUESTION: Final = "Say hello."
_LONG_QUESTION: Final = "Tell me a story of about 150 words."  # long enough to see whether events come one by one
_MOST_TOKENS: Final = 256  # for models that ramble; an answer that is cut off is one, too
_INVALID: Final = {"input": 5}
_JSON: Final = {"Content-Type": "application/json"}
_READS: Final = 4  # each over a connection of its own, so that any of the processes may get it


class Steps:
    """What is looked at, and what was learnt on the way. A step gives the detail of what is as it should be."""

    def __init__(self, server: Server, key: str | None, model: str | None) -> None:
        self._server, self._ask, self._given_key, self._model = server, server.ask, key, model
        self._kept: dict[str, Any] = {}
        self._long = Stream()

    def all(self) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
        """The steps, by the names of their findings."""
        asked = [self._models, self._key, self._answer, self._stream, self._pace]
        kept = [self._stored, self._continued, self._input_items, self._stream_again, self._deleted]
        return [
            *((step.__name__.strip("_").replace("_", " "), step) for step in asked + kept),
            ("invalid request", partial(self._refused, "POST /responses", 400, json=_INVALID)),
            ("malformed body", partial(self._refused, "POST /responses", 400, content=b'{"input": ', headers=_JSON)),
            ("unknown path", partial(self._refused, "GET /no/such/path", 404)),
            ("websocket", self._websocket),
        ]

    def _request(self, question: str = _QUESTION, **fields: Any) -> dict[str, Any]:
        return {"model": self._model, "input": question, "max_output_tokens": _MOST_TOKENS, **fields}

    @property
    def _id(self) -> str:
        if not self._kept:
            raise Skipped("There is no stored response to try it with.")
        return str(self._kept["id"])

    async def _models(self) -> str:
        answer = await self._ask("GET /models")
        names = answer.models
        if answer.status in (401, 403):
            answer.expect()
        if names is None:
            raise Failed(f"{answer}, which is no list of models. {await self._elsewhere()}")
        if not names:
            raise Failed("GET /models lists none. The backend has to name at least one model.")
        self._model = self._model or names[0]
        if self._model not in names:
            raise Failed(f"There is no model {quoted(self._model)}, but {quoted(', '.join(names))}.")
        return f"{len(names)} listed; {quoted(self._model)} is asked."

    async def _elsewhere(self) -> str:
        base = self._server.base
        origin = "/".join(base.split("/")[:3])
        for near in (f"{base}/v1", base.removesuffix("/responses").removesuffix("/models"), f"{origin}/v1"):
            with suppress(Failed):
                answer = await self._ask("GET /models", base=near)
                if answer.models is not None or (answer.status == 401 and answer.error):
                    return f"The API is at {near}: give that as the URL."
        return f"The API is not at {base}: give the URL at which it is mounted, such as {origin}/v1."

    async def _key(self) -> str:
        if not self._given_key:
            raise Skipped("No key was given, and none was needed: whoever reaches this server may ask it.")
        answer = await self._ask("POST /responses", json=_INVALID, headers={"Authorization": "Bearer made-up"})
        if answer.status == 400:
            raise Failed(
                "A made-up key is as good as the one that was given: no owner hook, in Django no setting AUTH, is in "
                "effect. If the API is to be open, check it without a key."
            )
        answer.expect(403 if answer.status == 403 else 401)
        return f"A made-up key is refused with {answer.status}."

    async def _answer(self) -> str:
        response = (await self._ask("POST /responses", json=self._request())).expect()
        if not isinstance(response.get("id"), str):
            raise Failed("POST /responses was answered with JSON that is no response. Is it a server of this API?")
        self._kept = response
        return f"The response is {judged(response)}."

    async def _stream(self) -> str:
        self._long = Stream()
        request = self._request(_LONG_QUESTION, stream=True, store=False)
        if answer := await self._server.follow(self._long, "POST /responses", json=request):
            if answer.status == 200:
                raise Failed(f"{answer}, not with text/event-stream: does something on the way change it?")
            answer.expect()
        return _told(self._long)

    async def _pace(self) -> str:
        return self._long.pace(self._server.latency)

    async def _stored(self) -> str:
        for _ in range(_READS):
            found = (await self._ask("GET /responses/{id}", of=self._id)).expect()
            if found.get("output") != self._kept.get("output"):
                raise Failed("The stored response has another output than the answer had.")
        return f"Read {_READS} times, over connections of their own."

    async def _continued(self) -> str:
        request = self._request("Say it again.", previous_response_id=self._id, store=False)
        response = (await self._ask("POST /responses", json=request)).expect()
        return f"The response is {judged(response)}."

    async def _input_items(self) -> str:
        listed = (await self._ask("GET /responses/{id}/input_items", of=self._id)).expect()
        if _QUESTION not in str(listed):
            raise Failed("GET /responses/{id}/input_items does not list the question that was asked.")
        return "The question is listed."

    async def _stream_again(self) -> str:
        stream = Stream()
        if answer := await self._server.follow(stream, "GET /responses/{id}?stream=true", of=self._id):
            answer.expect(400)
            return "Refused, as it may be: its events are not kept."
        stream.last()
        return f"Told again, {len(stream.events) - 1} events."

    async def _deleted(self) -> str:
        (await self._ask("DELETE /responses/{id}", of=self._id)).expect()
        (await self._ask("GET /responses/{id}", of=self._id)).expect(404)
        return "Deleted, and not found any more."

    async def _refused(self, asked: str, status: int, **options: Any) -> str:
        (await self._ask(asked, **options)).expect(status)
        return f"Refused with {status} and an error of the API."

    async def _websocket(self) -> str:
        stream = Stream()
        request = self._request(type="response.create", store=False)
        if answer := await self._server.converse(stream, "GET /responses", request):
            if answer.status in (404, 405, 426, 501) and answer.error:
                raise Skipped(
                    f"{answer}. No WebSocket gets through: of WSGI servers only gunicorn and Flask's own can, ASGI "
                    "servers need a package for them, and every proxy has to pass the upgrade on."
                )
            answer.expect(101)
        return _told(stream)


def _told(stream: Stream) -> str:
    said = judged(members(stream.last().get("response")))
    return f"{len(stream.events) - 1} events; the response is {said}."
