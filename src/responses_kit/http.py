"""HTTP with no framework in it, and no dialect: a `Request` in, a `Reply` out.

A host makes a `Request`, whose body is read only once it is known that it counts (`Body` helps), has a `Dialect` handle
it, and sends the reply: either `body`, or what `stream` writes. It watches for the client's leaving and cancels around
both. Everything else is done here, and in the dialects, which are one module each: `open_responses`, `lmsp`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs

import anyio

from .companion import Companion
from .encoding import KEEP_ALIVE, SSE_HEADERS, encode
from .errors import (
    APIError,
    ClientGone,
    ConfigurationError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ServerError,
    UnsupportedMediaType,
)
from .kit import ResponsesKit
from .surroundings import Call, called_here
from .validation import parse_json

__all__ = [
    "Body",
    "Dialect",
    "Endpoint",
    "Put",
    "Reply",
    "Request",
    "Send",
    "idempotency_key",
    "json_body",
    "json_reply",
    "place_in_stream",
    "query_of",
    "stream_reply",
]

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


Endpoint = Callable[..., Awaitable[Reply]]
"""Answers a request: called with the kit, the request, its owner, and the values in its path."""


class Dialect:
    """What is spoken over a kit: which paths there are, and how it is said that something is wrong.

    Subclasses name themselves, list their endpoints, and say how they refuse. They keep nothing of their own, so that
    one may be made for each request.

    Args:
        kit: Answers the requests.

    Attributes:
        name: In lower case.
        routes: Endpoints by path and method. `*` in a path stands for one step of it, `**` for all that follow.
        sockets: Whether `GET /responses` may become a WebSocket; see `websocket`.
    """

    name: ClassVar[str]
    routes: ClassVar[Mapping[str, Mapping[str, Endpoint]]]
    sockets: ClassVar[bool] = False

    def __init__(self, kit: ResponsesKit) -> None:
        self.kit = kit

    @staticmethod
    def known(dialect: type[Dialect]) -> type[Dialect]:
        """The dialect that a host was told to speak.

        Raises:
            ConfigurationError: It is none.
        """
        if not (isinstance(dialect, type) and issubclass(dialect, Dialect)) or dialect is Dialect:
            raise ConfigurationError("dialect is a class, such as responses_kit.lmsp.LMSP")
        return dialect

    @classmethod
    def refuse(cls, error: APIError) -> Reply:
        """An error as a reply."""
        raise NotImplementedError(f"{cls.__name__} must define refuse(error)")

    async def handle(self, request: Request) -> Reply:
        """Answers one request; every error becomes a reply in the dialect's shape.

        Raises:
            ClientGone: The client left while its body was read.
        """
        try:
            if request.method == "OPTIONS":  # asked by browsers, before they send who asks
                return Reply(204, {"Allow": ", ".join(self._methods(request.path)[0])})
            owner = await self.kit.owner_of(request.host, request.call)
            endpoint, values = self._route(request.method, request.path)
            return await endpoint(self.kit, request, owner, *values)
        except APIError as error:
            return self.refuse(error)
        except ClientGone:
            raise
        except Exception as error:
            if (refused := request.refusal(error)) is not None:
                return self.refuse(refused)
            logger.error("the request failed", exc_info=error)
            return self.refuse(ServerError("The server failed. Its log has the reason."))

    def _route(self, method: str, path: str) -> tuple[Endpoint, list[str]]:
        """The endpoint for a request, and the values in its path."""
        methods, values = self._methods(path)
        endpoint = methods.get(method)
        if endpoint is None:
            raise MethodNotAllowed(
                f"This path answers {' and '.join(methods)} only.", headers={"Allow": ", ".join(methods)}
            )
        return endpoint, values

    def _methods(self, path: str) -> tuple[Mapping[str, Endpoint], list[str]]:
        """The endpoints at a path by their methods, and the values in it. A trailing slash makes no difference."""
        path = path.strip("/")
        first, _, rest = path.partition("/")
        value, slash, more = rest.partition("/")
        for pattern, values in (
            (path.replace("*", "no"), []),  # nobody is to name a pattern itself
            (f"{first}/**", [rest]),
            (f"{first}/*{slash}{more}", [value]),
        ):
            if pattern in self.routes and all(values):
                return self.routes[pattern], values
        raise NotFound("There is no such path in this API.")


# What endpoints are made of.


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A JSON value, or its bytes, as a reply."""
    body = value if isinstance(value, bytes) else encode(value)
    return Reply(status, {**_JSON_HEADERS, **(headers or {})}, body)


_JSON_HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "application/json",
    "Cache-Control": "private, no-store",  # it is somebody's, and changes
}


async def json_body(request: Request) -> Any:
    """The JSON value that a request carries.

    Raises:
        APIError: It carries none, or one that is too large.
    """
    # A page of another site can have a browser send a body of no type, without asking whether it may.
    unsaid = "" if "origin" in request.headers else "application/json"
    media = request.headers.get("content-type", unsaid).partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMediaType("Send the request as application/json.")
    return parse_json(await request.read())


def idempotency_key(request: Request) -> str | None:
    """The header `Idempotency-Key`, if there is one.

    Raises:
        InvalidRequest: It is empty, or too long.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= _LONGEST_KEY:
        raise InvalidRequest(f"An Idempotency-Key has 1 to {_LONGEST_KEY} characters.", param="Idempotency-Key")
    return key


_LONGEST_KEY: Final = 255


def query_of(request: Request) -> dict[str, str]:
    """A request's query; of what is given several times, the last."""
    return {name: values[-1] for name, values in parse_qs(request.query).items()}


def place_in_stream(text: str, *, param: str, what: str) -> int:
    """The number of an event, as clients give it back.

    Raises:
        InvalidRequest: It is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
        raise InvalidRequest(f"{param} is the {what} of an event.", param=param)
    return int(text)


_LONGEST_NUMBER: Final = 15


# Streams.

Put = Callable[[bytes], Awaitable[None]]
"""Sends whole events; raises `ClientGone` if the client has left."""


def stream_reply(
    kit: ResponsesKit, play: Callable[[Put], Awaitable[None]], give_up: Callable[[], None] = lambda: None
) -> Reply:
    """A reply that streams server-sent events.

    Args:
        kit: Says how long the silence may be, and how long a client may leave the stream unread.
        play: Puts the events.
        give_up: Called where the client leaves it unread for too long, before `play` is cancelled.
    """
    stream = _Stream(play, give_up, keep_alive=kit.keep_alive, patience=kit.patience)
    return Reply(200, SSE_HEADERS, stream=stream.write)


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
