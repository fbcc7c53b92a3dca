"""The client of the server that is looked at. Every request is bounded, in seconds and in bytes."""

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
from ..protocol.state_machine import TERMINAL
from .answers import Answer, Failed, Skipped, parsed, quoted
from .streams import DONE, Stream

MOST_BYTES: Final = 16 * 1024 * 1024

_BASE: Final = r"https?://(\[[\da-fA-F:.]+\]|[^\s/?#@:\[\]]+)(:(?P<port>\d{1,5}))?(/[^\s?#]*)?"
_HEADER: Final = r"[\w.-]+:[ -~]*"


class _Cut(Failed):
    """An answer did not come to its end."""


class Server:
    """The server that is looked at."""

    def __init__(self, url: str, key: str | None, headers: Mapping[str, str], seconds: float) -> None:
        if not (matched := re.fullmatch(_BASE, url, re.ASCII)) or int(matched["port"] or 0) > 65535:
            raise ConfigurationError(
                "The URL has to be the API's base, such as http://127.0.0.1:8000/v1; a password is sent as a header."
            )
        given = [*([("Authorization", f"Bearer {key}")] if key else []), *headers.items()]
        if not all(re.fullmatch(_HEADER, f"{name}:{value}", re.ASCII) for name, value in given):
            raise ConfigurationError("The name of a header has letters, digits and dashes only, its value only ASCII.")
        self.base, self._seconds = url.rstrip("/"), seconds
        self.latency = seconds  # in which it answers at best: what the network takes
        sent = httpx.Headers()
        for name, value in given:
            sent[name] = value  # in place of one that is only spelt otherwise
        words = {word for word in re.split(r"[\s;,=]+", " ".join(sent.values())) if len(word) >= 8}
        secrets = words | {sent.get("authorization", "").rpartition(" ")[2]} - {""}
        self._secrets = sorted(secrets, key=len, reverse=True)
        self.client = httpx.AsyncClient(
            headers={"user-agent": "responses-kit", **sent},
            timeout=None,  # noqa: S113  # `_asking` bounds the whole of a request
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def clean(self, detail: str) -> str:
        """A detail without secrets, nor anything that a terminal would obey."""
        for secret in self._secrets:
            detail = detail.replace(secret, "…")
        return "".join(letter if letter.isprintable() else " " for letter in detail)[:700]

    async def ask(self, asked: str, **options: Any) -> Answer:
        """Asks, and takes in the whole answer."""
        async with self._asking(asked, **options) as response:
            return await _whole(asked, response)

    async def follow(self, stream: Stream, asked: str, **options: Any) -> Answer | None:
        """Reads a stream as far as it comes; gives the answer if it is no stream."""
        try:
            async with self._asking(asked, **options) as response:
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    return await _whole(asked, response)
                stream.encoding = response.headers.get("content-encoding", "identity")
                async for piece in _pieces(asked, response):
                    stream.feed(piece)
        except _Cut as cut:
            stream.problem = str(cut)
        return None

    async def converse(self, stream: Stream, asked: str, message: object) -> Answer | None:
        """Reads as a stream what is answered over a WebSocket; gives the answer if there is none."""
        try:
            from websockets.frames import Frame, Opcode
            from websockets.protocol import CLIENT, Protocol
        except ModuleNotFoundError:
            raise Skipped("The package websockets is not installed here.") from None
        protocol = Protocol(CLIENT, max_size=MOST_BYTES)
        protocol.send_text(json.dumps(message).encode())
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        upgrade |= {"Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": f"{'A' * 22}=="}
        async with self._asking(asked, headers=upgrade) as response:
            if response.status_code != 101:
                return await _whole(asked, response)
            line = response.extensions["network_stream"]
            text, size, kind = bytearray(), 0, ""
            while kind not in {*TERMINAL, "error"}:
                await line.write(b"".join(protocol.data_to_send()))  # the message first, then what pings call for
                piece = await line.read(65536)
                size += len(piece)
                if not piece or size > MOST_BYTES:
                    return None
                protocol.receive_data(piece)
                for frame in protocol.events_received():
                    if isinstance(frame, Frame) and frame.opcode in (Opcode.TEXT, Opcode.CONT):
                        text += frame.data
                        if frame.fin:
                            kind = str(parsed(bytes(text)).get("type"))
                            stream.events.append((kind, text.decode(errors="replace"), time.monotonic()))
                            text.clear()
        stream.events.append(("", DONE, time.monotonic()))  # which a WebSocket does without
        return None

    @asynccontextmanager
    async def _asking(
        self, asked: str, *, base: str = "", of: str = "", **options: Any
    ) -> AsyncIterator[httpx.Response]:
        """Lets the answer be read until the time is up; `of` is what `{id}` stands for."""
        method, _, path = asked.partition(" ")
        url = (base or self.base) + path.replace("{id}", quote(of, safe=""))
        began = time.monotonic()
        try:
            with anyio.fail_after(self._seconds):
                async with self.client.stream(method, url, follow_redirects=False, **options) as response:
                    self.latency = min(self.latency, time.monotonic() - began)
                    if response.next_request is not None:
                        there = response.next_request.url.copy_with(userinfo=b"", query=None, fragment=None)
                        raise Failed(
                            f"{asked} is redirected ({response.status_code}) to {there}. Clients do not follow: give "
                            "the URL where the API is, and let nothing on the way, such as a log-in, redirect it."
                        )
                    yield response
        except TimeoutError:
            raise _Cut(f"{asked} took more than {self._seconds:g} s. If the model is slow, allow more time.") from None
        except httpx.ConnectError as error:
            raise Failed(f"No connection to {url}: {quoted(error)}. Is the server running, the URL right?") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, NetworkError, ProtocolError) as error:
            raise _Cut(f"{asked} broke off: {quoted(error) or type(error).__name__}.") from None


async def _pieces(asked: str, response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for piece in response.aiter_bytes():
        size += len(piece)
        if size > MOST_BYTES:
            raise _Cut(f"{asked} was answered with more than {MOST_BYTES} bytes.")
        yield piece


async def _whole(asked: str, response: httpx.Response) -> Answer:
    body = b"".join([piece async for piece in _pieces(asked, response)])
    media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return Answer(asked, response.status_code, media, parsed(body) if media == "application/json" else {})
