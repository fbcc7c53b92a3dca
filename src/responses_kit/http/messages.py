"""Requests and replies without a framework: bodies, JSON, queries and headers."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs

from ..engine.hooks import HostCaller, call_on_event_loop
from ..errors import APIError, InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from ..protocol.sse import encode_json
from ..protocol.validation import parse_json

__all__ = [
    "Body",
    "Reply",
    "Request",
    "Send",
    "json_reply",
    "parse_idempotency_key",
    "parse_query",
    "parse_sequence_number",
    "read_json",
]

Send = Callable[[bytes], Awaitable[None]]
"""Sends bytes to the client. Raises `OSError` if the client has left."""

_JSON_HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "application/json",
    "Cache-Control": "private, no-store",  # responses belong to one owner and change
}

_MAX_KEY_LENGTH: Final = 255
"""Characters of an idempotency key; longer ones are refused."""

_MAX_SEQUENCE_DIGITS: Final = 15
"""Digits of an event's number that a client sends; longer numbers are refused."""

_MAX_GZIP_MEMBERS: Final = 16
"""Concatenated gzip members (RFC 1952, 2.2) in one body; each costs a copy of the data behind it."""


async def _read_nothing() -> bytes:
    return b""


@dataclass(slots=True)
class Request:
    """An HTTP request, independent of the host's framework.

    Attributes:
        method: The method in upper case.
        path: The decoded path below the prefix, such as `/responses`.
        query: The raw query string.
        headers: The headers, with names in lower case.
        read: Reads the whole body, see `Body.finish`. Raises `ClientDisconnected` if the client leaves meanwhile, and
            the errors of `Body`.
        host_request: The host's own request object, for the owner hook.
        translate_error: Translates an exception of the host, raised by the owner hook, to an `APIError`. Returns None
            for any other exception, which is then a server error.
        call_hook: Calls the owner hook; by default on the event loop.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[], Awaitable[bytes]] = _read_nothing
    host_request: Any = None
    translate_error: Callable[[Exception], APIError | None] = lambda error: None
    call_hook: HostCaller = call_on_event_loop


@dataclass(slots=True)
class Reply:
    """The reply for the host to send.

    Attributes:
        status: The status code.
        headers: The headers.
        body: The whole body, unless `stream` is set.
        stream: Writes the body piece by piece, and returns at its end.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: Callable[[Send], Awaitable[None]] | None = None


class Body:
    """A request's body, collected chunk by chunk and decompressed at the end.

    Args:
        headers: The request's headers, with names in lower case.
        limit: Maximum size in bytes, both compressed and decompressed.

    Raises:
        PayloadTooLarge: The Content-Length exceeds the limit.
        UnsupportedMediaType: The Content-Encoding is neither gzip nor deflate.
    """

    __slots__ = ("_chunks", "_is_compressed", "_limit", "_size")

    def __init__(self, headers: Mapping[str, str], *, limit: int) -> None:
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise _payload_too_large(limit)
        encoding = headers.get("content-encoding", "identity").strip().lower()
        self._is_compressed = encoding not in ("", "identity")
        if self._is_compressed and encoding not in ("gzip", "x-gzip", "deflate"):
            raise UnsupportedMediaType("'Content-Encoding' must be gzip, deflate or identity.")
        self._chunks: list[bytes] = []
        self._size = 0
        self._limit = limit

    def feed(self, chunk: bytes) -> None:
        """Append the next chunk.

        Raises:
            PayloadTooLarge: The chunks exceed the limit.
        """
        self._size += len(chunk)
        if self._size > self._limit:
            raise _payload_too_large(self._limit)
        self._chunks.append(chunk)

    def finish(self) -> bytes:
        """Return the whole body, decompressed.

        Raises:
            PayloadTooLarge: The decompressed body exceeds the limit.
            InvalidRequest: The compressed data are malformed or truncated.
        """
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        return _decompress(body, self._limit) if self._is_compressed else body


def _decompress(data: bytes, limit: int) -> bytes:
    body = bytearray()
    for _ in range(_MAX_GZIP_MEMBERS):
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: detect gzip and zlib headers
        try:
            body += decompressor.decompress(data, limit + 1 - len(body))
        except zlib.error:
            break
        if len(body) > limit:
            raise _payload_too_large(limit)
        data = decompressor.unused_data
        if not decompressor.eof:
            break
        if not data:
            return bytes(body)
    raise InvalidRequest("The compressed body is malformed or truncated.", code="invalid_encoding")


def _payload_too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body must not be larger than {limit} bytes.")


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a reply with a JSON value, given as such or as encoded bytes."""
    body = value if isinstance(value, bytes) else encode_json(value)
    return Reply(status, {**_JSON_HEADERS, **(headers or {})}, body)


async def read_json(request: Request) -> Any:
    """Read a request's body and parse it as JSON.

    Raises:
        APIError: The body is not JSON, or too large.
        ClientDisconnected: The client left.
    """
    # A browser sends a body without a Content-Type across origins without a CORS preflight, so that such requests
    # must not be accepted as JSON (Fetch standard, CORS-safelisted request headers).
    default = "" if "origin" in request.headers else "application/json"
    media_type = request.headers.get("content-type", default).partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("'Content-Type' must be application/json.")
    return parse_json(await request.read())


def parse_idempotency_key(request: Request) -> str | None:
    """Return the `Idempotency-Key` header, or None if it was not sent.

    Raises:
        InvalidRequest: The key is empty or too long.
    """
    key = request.headers.get("idempotency-key")
    if key is not None and not 1 <= len(key) <= _MAX_KEY_LENGTH:
        raise InvalidRequest(f"'Idempotency-Key' must have 1 to {_MAX_KEY_LENGTH} characters.", param="Idempotency-Key")
    return key


def parse_query(request: Request) -> dict[str, str]:
    """Return the query parameters; the last value of a repeated one counts."""
    return {name: values[-1] for name, values in parse_qs(request.query).items()}


def parse_sequence_number(text: str, *, param: str, kind: str) -> int:
    """Return the number of an event that a client resumes after.

    Args:
        text: The number as sent by the client.
        param: The parameter or header that carries it.
        kind: The member of events that holds the number.

    Raises:
        InvalidRequest: The text is not such a number.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_SEQUENCE_DIGITS):
        raise InvalidRequest(f"'{param}' must be the {kind} of an event.", param=param)
    return int(text)
