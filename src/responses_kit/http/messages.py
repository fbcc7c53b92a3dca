"""Requests and replies without a framework: bodies, JSON, queries and headers."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from ..engine.hooks import HostCaller, call_on_event_loop
from ..errors import (
    APIError,
    InvalidRequest,
    PayloadTooLarge,
    UnsupportedMediaType,
)
from ..protocol.sse import encode_json
from ..protocol.validation import parse_json

__all__ = [
    "Body",
    "Reply",
    "Request",
    "Send",
    "idempotency_key",
    "json_body",
    "json_reply",
    "parse_query",
    "parse_sequence_number",
]

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
        read: Reads the whole body, as `Body.finish` returns it; raises `ClientDisconnected` if the client leaves
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
    call: HostCaller = call_on_event_loop


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


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A JSON value, or its bytes, as a reply."""
    body = value if isinstance(value, bytes) else encode_json(value)
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


def parse_query(request: Request) -> dict[str, str]:
    """A request's query; of what is given several times, the last."""
    return {name: values[-1] for name, values in parse_qs(request.query).items()}


def parse_sequence_number(text: str, *, param: str, what: str) -> int:
    """The number of an event, as clients give it back.

    Raises:
        InvalidRequest: It is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
        raise InvalidRequest(f"{param} is the {what} of an event.", param=param)
    return int(text)


_LONGEST_NUMBER: Final = 15
