"""The HTTP surface, with no framework in it: a `Request` in, a `Reply` out.

A host makes a `Request`, whose body is read only once it is known that it counts (`Body` helps), calls `handle`,
and sends the reply: either `body`, or what `stream` writes. It watches for the client's leaving and cancels around
both. Everything else is done here.

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
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

import anyio

from .companion import Companion
from .encoding import DONE, KEEP_ALIVE, SSE_HEADERS, encode, sse
from .errors import (
    APIError,
    ClientGone,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ServerError,
    UnsupportedMediaType,
    UpgradeRequired,
)
from .kit import ResponsesKit
from .machine import TERMINAL, Event
from .records import Follower
from .runs import Run
from .schema.request import CreateRequest
from .surroundings import Call, called_here
from .validation import parse_json, parse_request

__all__ = ["Body", "Reply", "Request", "Send", "error_reply", "handle"]

logger = logging.getLogger("responses_kit")

Send = Callable[[bytes], Awaitable[None]]
"""Puts bytes on their way; raises `OSError` if the client has left."""


async def _nothing() -> bytes:
    return b""


@dataclass(slots=True)
class Request:
    """A request as a host hands it over.

    Attributes:
        method: In upper case.
        path: Below the prefix, such as `/responses`; percent-encoding undone.
        query: The raw query string.
        headers: Names in lower case.
        read: Reads the whole body, as `Body.finish` returns it; raises `ClientGone` if the client leaves
            meanwhile, and what `Body` raises.
        host: The host's own request object, for the owner hook.
        refusal: Says what an exception of the host's own, raised by the owner hook, means on the wire; None if
            it is none of those.
        call: Calls the owner hook, where it is not to be called on the event loop.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[], Awaitable[bytes]] = _nothing
    host: Any = None
    refusal: Callable[[Exception], APIError | None] = lambda error: None
    call: Call = called_here


@dataclass(slots=True)
class Reply:
    """What the host sends: `body`, or, where `stream` is set, whatever that writes until it returns."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: Callable[[Send], Awaitable[None]] | None = None


class Body:
    """Takes in a request's body piece by piece, and unpacks it at the end.

    Args:
        headers: Names in lower case; `content-length` and `content-encoding` are looked at.
        limit: Most bytes, packed and unpacked.

    Raises:
        PayloadTooLarge: More than that is announced.
        UnsupportedMediaType: The encoding is neither gzip nor deflate.
    """

    __slots__ = ("_limit", "_packed", "_pieces", "_size")

    def __init__(self, headers: Mapping[str, str], *, limit: int) -> None:
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        self._packed = encoding not in ("", "identity")
        if self._packed and encoding not in ("gzip", "x-gzip", "deflate"):
            raise UnsupportedMediaType("Send the body plain, or with Content-Encoding gzip or deflate.")
        self._pieces: list[bytes] = []
        self._size = 0
        self._limit = limit

    def feed(self, piece: bytes) -> None:
        """Takes the next piece.

        Raises:
            PayloadTooLarge: There is more than the limit.
        """
        self._size += len(piece)
        if self._size > self._limit:
            raise _too_large(self._limit)
        self._pieces.append(piece)

    def finish(self) -> bytes:
        """The whole body, unpacked.

        Raises:
            PayloadTooLarge: There is more than the limit in it.
            InvalidRequest: The packed data are broken.
        """
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return _unpack(body, self._limit) if self._packed else body


def _unpack(packed: bytes, limit: int) -> bytes:
    body = bytearray()
    for _ in range(_MOST_MEMBERS):
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: tell gzip and zlib apart by their headers
        try:
            body += unpacker.decompress(packed, limit + 1 - len(body))
        except zlib.error:
            break
        if len(body) > limit:
            raise _too_large(limit)
        packed = unpacker.unused_data
        if not unpacker.eof:
            break
        if not packed:
            return bytes(body)
    raise InvalidRequest("The compressed body is broken or cut off.", code="invalid_encoding")


_MOST_MEMBERS: Final = 16  # a gzip file may be several in a row; each costs a copy of what follows it


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than the {limit} bytes that this server accepts.")


async def handle(kit: ResponsesKit, request: Request) -> Reply:
    """Answers one request; every error becomes a reply in the specification's shape.

    Raises:
        ClientGone: The client left while its body was read.
    """
    try:
        if request.method == "OPTIONS":  # asked by browsers, before they send who asks
            return Reply(204, {"Allow": ", ".join(_methods(request.path)[0])})
        owner = await kit.owner_of(request.host, request.call)
        endpoint, values = _route(request.method, request.path)
        return await endpoint(kit, request, owner, *values)
    except APIError as error:
        return error_reply(error)
    except ClientGone:
        raise
    except Exception as error:
        if (refused := request.refusal(error)) is not None:
            return error_reply(refused)
        logger.error("the request failed", exc_info=error)
        return error_reply(ServerError("The server failed. Its log has the reason."))


def error_reply(error: APIError) -> Reply:
    """An error as a reply: `{"error": {type, code, message, param}}`."""
    return _json({"error": error.payload()}, status=error.status, headers=error.headers)


def _json(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, {**_JSON_HEADERS, **(headers or {})}, encode(value))


_JSON_HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "application/json",
    "Cache-Control": "private, no-store",  # it is somebody's, and changes
}


# Routes.

Endpoint = Callable[..., Awaitable[Reply]]


def _route(method: str, path: str) -> tuple[Endpoint, list[str]]:
    """The endpoint for a request, and the values in its path."""
    methods, values = _methods(path)
    endpoint = methods.get(method)
    if endpoint is None:
        raise MethodNotAllowed(
            f"This path answers {' and '.join(methods)} only.", headers={"Allow": ", ".join(methods)}
        )
    return endpoint, values


def _methods(path: str) -> tuple[Mapping[str, Endpoint], list[str]]:
    """The endpoints at a path by their methods, and the values in it. A trailing slash makes no difference."""
    steps = path.strip("/").split("/")
    if steps[0] == "models" and len(steps) > 2:
        steps = ["models", "/".join(steps[1:])]  # a model's name may hold slashes
    value = steps[1:2]
    methods = None if "*" in steps else _ROUTES.get("/".join(steps))
    if methods is not None:
        value = []
    else:
        methods = _ROUTES.get("/".join("*" if place == 1 and step else step for place, step in enumerate(steps)))
    if methods is None:
        raise NotFound("There is no such path in this API.")
    return methods, value


async def _create(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    body = parse_request(await _json_body(request))
    key = _idempotency_key(request)
    if body.background or key is not None:
        return await _start(kit, body, owner, key)
    run = await kit.begin(body, owner=owner)
    if body.stream:
        return _streamed(kit, functools.partial(_tell_run, run), run.abandon)
    await run.collect()
    return Reply(200, _JSON_HEADERS, run.encoded())


async def _start(kit: ResponsesKit, body: CreateRequest, owner: str, key: str | None) -> Reply:
    """A response that does not end with its client."""
    response = await kit.start(body, owner=owner, key=key)
    if body.stream:
        follower = await kit.follow(response["id"], owner=owner, rebuilt=True)
        return _streamed(kit, functools.partial(_tell_pieces, follower))
    if not body.background:
        response = await kit.result(response["id"], owner=owner)
    return _json(response)


async def _json_body(request: Request) -> Any:
    # A page of another site can have a browser send a body of no type, without asking whether it may.
    unsaid = "" if "origin" in request.headers else "application/json"
    media = request.headers.get("content-type", unsaid).partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMediaType("Send the request as application/json.")
    return parse_json(await request.read())


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= _LONGEST_KEY:
        raise InvalidRequest(f"An Idempotency-Key has 1 to {_LONGEST_KEY} characters.", param="Idempotency-Key")
    return key


_LONGEST_KEY: Final = 255


async def _upgrade(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    raise UpgradeRequired("GET this path as a WebSocket, or POST to it.", headers={"Upgrade": "websocket"})


async def _retrieve(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    query = _query(request)
    if query.get("stream", "false") not in ("false", "0"):
        after = query.get("starting_after")
        if after is not None and not (after.isascii() and after.isdigit() and len(after) <= _LONGEST_NUMBER):
            raise InvalidRequest("starting_after is the sequence_number of an event.", param="starting_after")
        follower = await kit.follow(response_id, owner=owner, after=None if after is None else int(after))
        return _streamed(kit, functools.partial(_tell_pieces, follower))
    return _json(await kit.retrieve(response_id, owner=owner))


_LONGEST_NUMBER: Final = 15


def _query(request: Request) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(request.query).items()}


async def _cancel(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return _json(await kit.cancel(response_id, owner=owner))


async def _compact(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    return _json(await kit.compact(await _json_body(request), owner=owner))


async def _delete(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    return _json(await kit.delete(response_id, owner=owner))


async def _input_items(kit: ResponsesKit, request: Request, owner: str, response_id: str) -> Reply:
    query = _query(request)
    limit = query.get("limit", "20")
    page = await kit.input_items(
        response_id,
        owner=owner,
        limit=int(limit) if limit.isascii() and limit.isdigit() and len(limit) <= 3 else 0,  # which is refused
        order=query.get("order", "desc"),
        after=query.get("after"),
    )
    return _json(page)


async def _models(kit: ResponsesKit, request: Request, owner: str) -> Reply:
    return _json(kit.models())


async def _model(kit: ResponsesKit, request: Request, owner: str, name: str) -> Reply:
    return _json(kit.model(name))


_ROUTES: Final[Mapping[str, Mapping[str, Endpoint]]] = {
    "responses": {"POST": _create, "GET": _upgrade},
    "responses/compact": {"POST": _compact},
    "responses/*": {"GET": _retrieve, "DELETE": _delete},
    "responses/*/cancel": {"POST": _cancel},
    "responses/*/input_items": {"GET": _input_items},
    "models": {"GET": _models},
    "models/*": {"GET": _model},
}


# Streams.

Put = Callable[[bytes], Awaitable[None]]
"""Sends whole events; raises `ClientGone` if the client has left."""


def _streamed(
    kit: ResponsesKit, play: Callable[[Put], Awaitable[None]], give_up: Callable[[], None] = lambda: None
) -> Reply:
    stream = _Stream(play, give_up, keep_alive=kit.keep_alive, patience=kit.patience)
    return Reply(200, SSE_HEADERS, stream=stream.write)


async def _tell_run(run: Run, put: Put) -> None:
    async def tell(events: list[Event]) -> None:
        data = sse(events[0]) if len(events) == 1 else b"".join(map(sse, events))
        await put(data + DONE if events[-1]["type"] in TERMINAL else data)

    await run.execute(tell)


async def _tell_pieces(follower: Follower, put: Put) -> None:
    if follower.idle:
        await put(KEEP_ALIVE)  # with which the reply's head goes out
    async with aclosing(follower.pieces()) as pieces:
        async for piece in pieces:
            await put(piece)
    await put(DONE)


class _Stream:
    """One response as server-sent events, with comments while nothing happens."""

    def __init__(
        self,
        play: Callable[[Put], Awaitable[None]],
        give_up: Callable[[], None],
        *,
        keep_alive: float,
        patience: float,
    ) -> None:
        self._play, self._give_up = play, give_up
        self._keep_alive, self._patience = keep_alive, patience
        self._sent = 0
        self._sending = False

    async def write(self, send: Send) -> None:
        async def put(data: bytes) -> None:
            self._sending = True
            try:
                await send(data)
            except OSError:
                raise ClientGone from None
            self._sending = False
            self._sent += 1

        with anyio.CancelScope() as playing:
            async with Companion(self._watch, send, playing.cancel) as watching:
                watching.begin()
                with suppress(ClientGone):
                    await self._play(put)

    async def _watch(self, send: Send, stop: Callable[[], None]) -> None:
        """Fills silence with comments, and ends the stream of a client that leaves it unread."""
        pause = min(self._keep_alive, self._patience)
        waited = 0.0
        while True:
            sent = self._sent
            await anyio.sleep(pause)
            waited = waited + pause if sent == self._sent else 0.0
            if self._sending:
                if waited >= self._patience:
                    self._give_up()
                    stop()
            elif waited >= self._keep_alive:
                waited = 0.0
                try:
                    with anyio.fail_after(self._patience):
                        await send(KEEP_ALIVE)
                except OSError:  # a TimeoutError is one
                    self._give_up()
                    stop()
