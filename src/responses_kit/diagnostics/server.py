"""HTTP and WebSocket client of the checked server; every request is bounded in seconds and bytes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import anyio
import httpx
from httpcore import NetworkError, ProtocolError

from ..errors import ConfigurationError
from ..protocol.state_machine import TERMINAL_EVENT_TYPES
from .answers import Answer, CheckFailed, CheckSkipped, parse_object, shorten
from .streams import DONE, Stream

MAX_RESPONSE_BYTES: Final = 16 * 1024 * 1024

_BASE: Final = r"https?://(\[[\da-fA-F:.]+\]|[^\s/?#@:\[\]]+)(:(?P<port>\d{1,5}))?(/[^\s?#]*)?"
_HEADER: Final = r"[\w.-]+:[ -~]*"


class _Interrupted(CheckFailed):
    """A reply was interrupted."""


class Server:
    """The checked server.

    Args:
        url: Base URL of the API.
        key: Sent as a bearer token.
        headers: Sent with every request.
        timeout: Seconds for each request.

    Raises:
        ConfigurationError: The URL or a header is not valid.
    """

    def __init__(self, url: str, key: str | None, headers: Mapping[str, str], timeout: float) -> None:
        if not (matched := re.fullmatch(_BASE, url, re.ASCII)) or int(matched["port"] or 0) > 65535:
            raise ConfigurationError(
                "The URL must be the base URL of the API, such as http://127.0.0.1:8000/v1, without a password."
            )
        given = [*([("Authorization", f"Bearer {key}")] if key else []), *headers.items()]
        if not all(re.fullmatch(_HEADER, f"{name}:{value}", re.ASCII) for name, value in given):
            raise ConfigurationError(
                "Header names must consist of letters, digits and dashes, and header values of ASCII characters."
            )
        self.base, self._timeout = url.rstrip("/"), timeout
        self.latency = timeout  # the shortest time to the first byte: network latency
        sent = httpx.Headers()
        for name, value in given:
            sent[name] = value  # replaces a header that differs only in case
        words = {word for word in re.split(r"[\s;,=]+", " ".join(sent.values())) if len(word) >= 8}
        secrets = words | {sent.get("authorization", "").rpartition(" ")[2]} - {""}
        self._secrets = sorted(secrets, key=len, reverse=True)
        self.client = httpx.AsyncClient(
            headers={"user-agent": "responses-kit", **sent},
            timeout=None,  # noqa: S113  # `_open` limits the whole request
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def redact(self, detail: str) -> str:
        """Return a detail without secrets and terminal control characters."""
        for secret in self._secrets:
            detail = detail.replace(secret, "…")
        return "".join(letter if letter.isprintable() else " " for letter in detail)[:700]

    async def request(self, request: str, **options: Any) -> Answer:
        """Send a request and return the complete reply."""
        async with self._open(request, **options) as response:
            return await _read_answer(request, response)

    async def read_stream(self, stream: Stream, request: str, **options: Any) -> Answer | None:
        """Read a stream until it ends; return the reply if it is not a stream."""
        try:
            async with self._open(request, **options) as response:
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    return await _read_answer(request, response)
                stream.encoding = response.headers.get("content-encoding", "identity")
                async for chunk in _chunks(request, response):
                    stream.feed(chunk)
        except _Interrupted as cut:
            stream.problem = str(cut)
        return None

    async def read_websocket(self, stream: Stream, request: str, message: object) -> Answer | None:
        """Read the events of one WebSocket message; return the reply if the upgrade is refused."""
        try:
            from websockets.frames import Frame, Opcode
            from websockets.protocol import CLIENT, Protocol
        except ModuleNotFoundError:
            raise CheckSkipped("The package websockets is not installed here.") from None
        protocol = Protocol(CLIENT, max_size=MAX_RESPONSE_BYTES)
        protocol.send_text(json.dumps(message).encode())
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        upgrade |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": f"{'A' * 22}=="}
        async with self._open(request, headers=upgrade) as response:
            if response.status_code != 101:
                return await _read_answer(request, response)
            line = response.extensions["network_stream"]
            text, size, kind = bytearray(), 0, ""
            while kind not in {*TERMINAL_EVENT_TYPES, "error"}:
                await line.write(b"".join(protocol.data_to_send()))  # the message first, then pongs
                chunk = await line.read(65536)
                size += len(chunk)
                if not chunk or size > MAX_RESPONSE_BYTES:
                    return None
                protocol.receive_data(chunk)
                for frame in protocol.events_received():
                    if isinstance(frame, Frame) and frame.opcode in (Opcode.TEXT, Opcode.CONT):
                        text += frame.data
                        if frame.fin:
                            kind = str(parse_object(bytes(text)).get("type"))
                            stream.events.append((kind, text.decode(errors="replace"), time.monotonic()))
                            text.clear()
        stream.events.append(("", DONE, time.monotonic()))  # WebSockets send no [DONE]
        return None

    @asynccontextmanager
    async def _open(
        self, request: str, *, base: str = "", of: str = "", **options: Any
    ) -> AsyncIterator[httpx.Response]:
        """Open a request within the timeout; `of` replaces `{id}` in the path."""
        method, _, path = request.partition(" ")
        url = (base or self.base) + path.replace("{id}", quote(of, safe=""))
        started = time.monotonic()
        try:
            with anyio.fail_after(self._timeout):
                async with self.client.stream(method, url, follow_redirects=False, **options) as response:
                    self.latency = min(self.latency, time.monotonic() - started)
                    if response.next_request is not None:
                        target = response.next_request.url.copy_with(userinfo=b"", query=None, fragment=None)
                        raise CheckFailed(
                            f"{request} is redirected ({response.status_code}) to {target}. Clients do not follow "
                            "redirects: use the URL of the API itself, and exempt it from redirects such as a login."
                        )
                    yield response
        except TimeoutError:
            raise _Interrupted(
                f"{request} took more than {self._timeout:g} s. For a slow model, raise the timeout."
            ) from None
        except httpx.ConnectError as error:
            raise CheckFailed(
                f"No connection to {url}: {shorten(error)}. Check the URL, and that the server is running."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, NetworkError, ProtocolError) as error:
            raise _Interrupted(f"{request} was interrupted: {shorten(error) or type(error).__name__}.") from None


async def _chunks(request: str, response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for chunk in response.aiter_bytes():
        size += len(chunk)
        if size > MAX_RESPONSE_BYTES:
            raise _Interrupted(f"{request} returned more than {MAX_RESPONSE_BYTES} bytes.")
        yield chunk


async def _read_answer(request: str, response: httpx.Response) -> Answer:
    body = b"".join([chunk async for chunk in _chunks(request, response)])
    media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return Answer(request, response.status_code, media, parse_object(body) if media == "application/json" else {})
