"""A low-level client for HTTP (h11 over a socket, one connection per request) and WebSocket.

Client libraries hide details that the contract fixes: the boundaries of writes, the headers as sent, and the end of
a connection. Every wait has a timeout.
"""

from __future__ import annotations

import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import h11
from websockets.client import ClientProtocol
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.http11 import Response as UpgradeReply
from websockets.uri import parse_uri

from tests.support.conformance import check_error, check_response, check_stream

DEFAULT_TIMEOUT = 10.0
"""Seconds before an operation fails."""

Headers = Mapping[str, str] | Sequence[tuple[str, str]]
_UNSET: Any = object()


def strict_json(data: bytes | str) -> Any:
    """Parse JSON and reject NaN, infinities and duplicate keys."""

    def reject_constant(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        assert len(members) == len(pairs), f"duplicate key: {[key for key, _ in pairs]}"
        return members

    return json.loads(data, parse_constant=reject_constant, object_pairs_hook=reject_duplicates)


@dataclass
class Reply:
    """A complete HTTP reply."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.headers["content-type"].split(";")[0] == "application/json", self.headers
        return strict_json(self.body)

    def error(self, status: int, code: str | None = None, param: str | None = _UNSET) -> dict[str, Any]:
        """Check that the reply is this error, and return the error object."""
        assert self.status == status, f"{self.status} instead of {status}: {self.body[:500]!r}"
        body = self.json()
        check_error(body)
        error: dict[str, Any] = body["error"]
        assert code is None or error["code"] == code, error
        assert param is _UNSET or error["param"] == param, error
        return error


@dataclass
class Frame:
    """One block of a `text/event-stream`: an event or comments."""

    raw: bytes
    event: str | None = None
    data: str | None = None

    @property
    def is_comment(self) -> bool:
        return self.data is None

    @classmethod
    def parse(cls, raw: bytes) -> Frame:
        """Parse a block: comments only, an `event:` and a `data:` line, or `[DONE]` without an `event:` line."""
        lines = raw.decode("ascii").split("\n")
        if all(line.startswith(":") for line in lines):
            return cls(raw)
        if lines == ["data: [DONE]"]:
            return cls(raw, None, "[DONE]")
        assert len(lines) == 2, f"a block must be an event and a data line: {raw[:300]!r}"
        assert lines[0].startswith("event: "), raw[:300]
        assert lines[1].startswith("data: "), raw[:300]
        return cls(raw, lines[0].removeprefix("event: "), lines[1].removeprefix("data: "))


@dataclass
class Stream:
    """A reply that is streamed."""

    connection: Connection
    status: int
    headers: dict[str, str]
    chunks: list[bytes] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    done: bool = False
    ended: bool = False
    _pending: list[Frame] = field(default_factory=list)

    async def frame(self, within: float = DEFAULT_TIMEOUT) -> Frame | None:
        """Return the next block, or None at the end of the body."""
        with anyio.fail_after(within):
            while not self._pending:
                write = await self.connection.read_chunk()
                if write is None:
                    self.ended = True
                    return None
                self.chunks.append(write)
                assert write.endswith(b"\n\n"), f"a chunk ends within an event: …{write[-80:]!r}"
                assert b"\r" not in write, "lines must end with LF only"
                self._pending += [Frame.parse(block) for block in write[:-2].split(b"\n\n")]
        return self._pending.pop(0)

    async def next(self, within: float = DEFAULT_TIMEOUT) -> dict[str, Any] | None:
        """Return the next event, skipping comments, or None at the end of the body."""
        while frame := await self.frame(within):
            assert not self.done, f"data after [DONE]: {frame.raw!r}"
            if frame.is_comment:
                self.comments += 1
            elif frame.data == "[DONE]":
                self.done = True
            else:
                event = strict_json(frame.data or "")
                assert event["type"] == frame.event, f"event {frame.event} holds a {event['type']}"
                self.events.append(event)
                return event
        return None

    async def until(self, kind: str, within: float = DEFAULT_TIMEOUT) -> dict[str, Any]:
        """Return the next event of this type; `events` collects the ones before it."""
        with anyio.fail_after(within):
            while event := await self.next():
                if event["type"] == kind:
                    return event
        raise AssertionError(f"no {kind} in {[event['type'] for event in self.events]}")

    async def blocks(self) -> list[bytes]:
        """Read to the end and return the remaining blocks as bytes, without comments."""
        blocks = []
        with anyio.fail_after(3 * DEFAULT_TIMEOUT):
            while frame := await self.frame():
                if not frame.is_comment:
                    blocks.append(frame.raw)
        return blocks

    async def rest(self) -> dict[str, Any]:
        """Read to the end, check the whole stream and return its final object."""
        while await self.next():
            pass
        assert self.done, "the stream ended without [DONE]"
        return check_stream(self.events)

    def text(self) -> str:
        return "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")


class Connection:
    """One TCP connection to a server."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        self._chunk: list[bytes] = []

    def send(self, *events: Any) -> bytes:
        return b"".join(self._http.send(event) or b"" for event in events)

    async def send_bytes(self, data: bytes) -> None:
        await self._stream.send(data)

    async def event(self) -> Any:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            try:
                self._http.receive_data(await self._stream.receive(1 << 20))
            except anyio.EndOfStream:
                self._http.receive_data(b"")

    async def head(self) -> tuple[int, dict[str, str]]:
        event = await self.event()
        while isinstance(event, h11.InformationalResponse):
            event = await self.event()
        assert isinstance(event, h11.Response), f"no response: {event!r}"
        names = [name.decode() for name, _ in event.headers]
        assert len(set(names) - {"vary"}) == len([name for name in names if name != "vary"]), (
            f"duplicate header: {names}"
        )
        return event.status_code, {name.decode(): value.decode() for name, value in event.headers}

    async def read_chunk(self) -> bytes | None:
        """Return one chunk, which is one write of the server, or None at the end."""
        while True:
            event = await self.event()
            if isinstance(event, h11.EndOfMessage):
                assert not self._chunk, "the body ends within a chunk"
                return None
            assert isinstance(event, h11.Data), f"the connection broke: {event!r}"
            self._chunk.append(bytes(event.data))
            if event.chunk_end:
                write, self._chunk = b"".join(self._chunk), []
                return write

    async def body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage), f"the connection broke: {event!r}"
        return bytes(body)

    def next_cycle(self) -> None:
        """Prepare the connection for another request; fail if the server closes it."""
        self._http.start_next_cycle()

    @property
    def _socket(self) -> socket.socket:
        return self._stream.extra(anyio.abc.SocketAttribute.raw_socket)

    def shrink_receive_buffer(self) -> None:
        """Limit the unread data that the operating system buffers."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)

    async def disconnect(self, *, reset: bool = False) -> None:
        """Close the connection at once, with FIN or RST."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self._stream.aclose()


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
"""Headers that request an upgrade to a WebSocket."""


class WebSocket:
    """An open WebSocket, frame by frame.

    Attributes:
        code: The close code; None while the WebSocket is open, 1006 if the connection broke.
        pings: Number of pings received.
    """

    def __init__(self, stream: anyio.abc.SocketStream, protocol: ClientProtocol) -> None:
        self.connection = Connection(stream)
        self.code: int | None = None
        self.pings = 0
        self._stream, self._protocol = stream, protocol
        self._pending: list[Any] = []

    async def _flush(self) -> None:
        data = b"".join(self._protocol.data_to_send())
        if data:
            await self._stream.send(data)

    async def event(self) -> Any:
        """Return the next event of the protocol, or None at the end of the connection."""
        while not self._pending:
            try:
                self._protocol.receive_data(await self._stream.receive(1 << 20))
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return None
            self._pending += self._protocol.events_received()
            with suppress(anyio.BrokenResourceError):  # the server may be gone before the reply to a close or ping
                await self._flush()
        return self._pending.pop(0)

    async def send(self, frame: Any) -> None:
        """Send bytes as a binary frame, a str as a text frame, and anything else as JSON."""
        if isinstance(frame, bytes):
            self._protocol.send_binary(frame)
        else:
            self._protocol.send_text((frame if isinstance(frame, str) else json.dumps(frame)).encode())
        await self._flush()

    async def send_request(self, **fields: Any) -> None:
        """Send a request without waiting for its response."""
        await self.send({"type": "response.create", "model": "scripted", "store": False, **fields})

    async def next(self, within: float = DEFAULT_TIMEOUT) -> dict[str, Any] | None:
        """Return the next frame's JSON, or None after the server has closed."""
        with anyio.fail_after(within):
            while (event := await self.event()) is not None:
                assert isinstance(event, WebSocketFrame), event
                if event.opcode is Opcode.CLOSE:
                    received = self._protocol.close_rcvd
                    self.code = None if received is None else received.code
                    return None
                if event.opcode is Opcode.PING:
                    self.pings += 1
                    continue
                assert event.opcode is Opcode.TEXT, f"not a text frame: {event}"
                assert event.fin, "an event must be one frame"
                assert event.data.isascii()
                frame: dict[str, Any] = strict_json(bytes(event.data))
                return frame
        self.code = 1006
        return None

    async def until(self, kind: str, within: float = DEFAULT_TIMEOUT) -> dict[str, Any]:
        """Return the next frame of this type and discard the ones before it."""
        with anyio.fail_after(within):
            while frame := await self.next():
                if frame["type"] == kind:
                    return frame
        raise AssertionError(f"closed with {self.code} before a {kind} event")

    async def read_response(self, within: float = DEFAULT_TIMEOUT) -> dict[str, Any]:
        """Read and check a whole response; return its final object, or the error frame of a rejected request."""
        events: list[dict[str, Any]] = []
        with anyio.fail_after(within):
            while frame := await self.next():
                if frame["type"] == "error":
                    assert not events, "an error in the middle of a response"
                    check_error({"error": frame["error"]})
                    assert set(frame) == {"type", "status", "error"}, frame
                    assert 400 <= frame["status"] < 600, frame
                    return frame
                events.append(frame)
                if "response" in frame and frame["response"]["status"] not in ("queued", "in_progress"):
                    return check_stream(events, error_events=False)
        raise AssertionError(f"closed with {self.code} after {[event['type'] for event in events]}")

    async def exchange(self, **fields: Any) -> dict[str, Any]:
        """Send a request and return its response or error frame."""
        await self.send_request(**fields)
        return await self.read_response()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Send a request and return its response, which must not fail."""
        response = await self.exchange(**fields)
        assert response.get("status") in ("completed", "incomplete"), response.get("error")
        return response

    async def describe_turn(self, **fields: Any) -> dict[str, Any]:
        """Send a request whose last user text is not a script, and return the description of its turn."""
        turn: dict[str, Any] = json.loads(output_text(await self.complete(**fields)))
        return turn

    async def read_error(self, status: int, code: str | None = None, param: str | None = _UNSET) -> dict[str, Any]:
        """Check that the next reply is this error frame, and return its error object."""
        frame = await self.read_response()
        assert frame.get("type") == "error", f"a response instead of an error: {frame}"
        error: dict[str, Any] = frame["error"]
        assert frame["status"] == status, frame
        assert code is None or error["code"] == code, error
        assert param is _UNSET or error["param"] == param, error
        return error

    async def close(self) -> None:
        """Close the WebSocket without waiting for the server's close frame."""
        self._protocol.send_close(1000)
        await self._flush()


class Client:
    """A client of one server, with an API key."""

    def __init__(self, port: int, key: str = "Bearer alice", prefix: str = "/v1") -> None:
        self.port, self.key, self.prefix = port, key, prefix

    def with_key(self, key: str) -> Client:
        """Return a client of the same server with another key."""
        return Client(self.port, key, self.prefix)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        with anyio.fail_after(DEFAULT_TIMEOUT):
            stream = await anyio.connect_tcp("127.0.0.1", self.port)
        try:
            yield Connection(stream)
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    def request_bytes(
        self,
        connection: Connection,
        method: str,
        path: str,
        body: bytes | None,
        headers: Headers,
        *,
        chunked: bool = False,
    ) -> bytes:
        """Return a request as bytes; `headers` replace the default ones, an empty value removes one."""
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
        own_names = {name.lower() for name, _ in pairs}
        defaults = {"Host": f"127.0.0.1:{self.port}", "Authorization": self.key, "Accept": "application/json"}
        if body is not None:
            defaults["Content-Type"] = "application/json"
            framing = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
            defaults |= framing
        remaining_defaults = [(name, value) for name, value in defaults.items() if name.lower() not in own_names]
        pairs = [*remaining_defaults, *((name, value) for name, value in pairs if value != "")]
        events: list[Any] = [h11.Request(method=method, target=path, headers=pairs)]
        if chunked and body is not None:
            middle = len(body) // 2
            events += [h11.Data(body[:middle]), h11.Data(body[middle:])]
        elif body:
            events.append(h11.Data(body))
        return connection.send(*events, h11.EndOfMessage())

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        json: Any = _UNSET,
        headers: Headers = (),
        chunked: bool = False,
        host_path: bool = False,
        within: float = DEFAULT_TIMEOUT,
    ) -> Reply:
        """Send a request and return the whole reply. Paths are below the prefix unless `host_path` is set."""
        if json is not _UNSET:
            body = to_bytes(json)
        path = path if host_path else self.prefix + path
        with anyio.fail_after(within):
            async with self.connect() as connection:
                await connection.send_bytes(
                    self.request_bytes(connection, method, path, body, headers, chunked=chunked)
                )
                status, reply_headers = await connection.head()
                content = await connection.body()
        if reply_headers.get("content-encoding") == "gzip":
            content = gzip.decompress(content)
        return Reply(status, reply_headers, content)

    async def get(self, path: str, **more: Any) -> Reply:
        return await self.request("GET", path, **more)

    async def delete(self, path: str) -> Reply:
        return await self.request("DELETE", path)

    async def post(self, **fields: Any) -> Reply:
        """Send `POST /responses` and return the reply, whatever its status."""
        return await self.request("POST", "/responses", json={"model": "scripted", **fields})

    async def create(self, **fields: Any) -> dict[str, Any]:
        """Create a response without streaming; fail on an error."""
        reply = await self.post(**fields)
        assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
        response: dict[str, Any] = reply.json()
        check_response(response)
        return response

    async def streamed(self, **fields: Any) -> dict[str, Any]:
        """Create a response with streaming, check the stream and return the final object."""
        async with self.stream(**fields) as stream:
            return await stream.rest()

    async def complete(self, stream: bool, **fields: Any) -> dict[str, Any]:
        """Create a response in either mode; fail if the response fails."""
        response = await (self.streamed(**fields) if stream else self.create(**fields))
        assert response["status"] in ("completed", "incomplete"), response["error"]
        return response

    async def expect_failure(self, stream: bool, **fields: Any) -> dict[str, Any]:
        """Create a response that must fail during generation, in either mode, and return its error."""
        if not stream:
            reply = await self.post(**fields)
            return reply.error(reply.status)
        async with self.stream(**fields) as failing:
            final = await failing.rest()
        assert final["status"] == "failed", f"{final['status']}: {final['output']}"
        error: dict[str, Any] = failing.events[-2]["error"]
        assert final["error"] == {"code": error["code"], "message": error["message"]}
        assert (await self.get(f"/responses/{final['id']}")).json() == final
        return error

    async def describe_turn(self, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """Send a request whose last user text is not a script, and return the description of its turn."""
        turn: dict[str, Any] = json.loads(output_text(await self.complete(stream, **fields)))
        return turn

    @asynccontextmanager
    async def stream(self, headers: Headers = (), **fields: Any) -> AsyncIterator[Stream]:
        """Create a response and yield its stream."""
        body = to_bytes({"model": "scripted", "stream": True, **fields})
        async with self.open_response("POST", "/responses", body, headers) as (connection, reply_headers):
            yield Stream(connection, 200, reply_headers)

    @asynccontextmanager
    async def follow(self, response_id: str, after: int | None = None) -> AsyncIterator[Stream]:
        """Yield the stream of an existing response, from its first event or the one after `after`."""
        path = f"/responses/{response_id}?stream=true" + ("" if after is None else f"&starting_after={after}")
        async with self.open_response("GET", path) as (connection, reply_headers):
            yield Stream(connection, 200, reply_headers)

    @asynccontextmanager
    async def open_response(
        self, method: str, path: str, body: bytes | None = None, headers: Headers = ()
    ) -> AsyncIterator[tuple[Connection, dict[str, str]]]:
        """Send a request and yield the connection and the headers of its reply, which must be a 200."""
        async with self.connect() as connection:
            await connection.send_bytes(self.request_bytes(connection, method, self.prefix + path, body, headers))
            with anyio.fail_after(DEFAULT_TIMEOUT):
                status, reply_headers = await connection.head()
            assert status == 200, f"{status}: {(await connection.body())[:500]!r}"
            yield connection, reply_headers

    async def cancel(self, response_id: str, **more: Any) -> Reply:
        return await self.request("POST", f"/responses/{response_id}/cancel", **more)

    async def wait_for_status(
        self, response_id: str, *statuses: str, within: float = DEFAULT_TIMEOUT
    ) -> dict[str, Any]:
        """Poll a response until it has one of these statuses, and return it."""
        with anyio.fail_after(within):
            while True:
                response: dict[str, Any] = (await self.get(f"/responses/{response_id}")).json()
                check_response(response)
                if response["status"] in statuses:
                    return response
                await anyio.sleep(0.01)

    async def wait_for_end(self, response_id: str, within: float = DEFAULT_TIMEOUT) -> dict[str, Any]:
        """Poll a response until it has ended, and return it."""
        return await self.wait_for_status(response_id, "completed", "incomplete", "failed", "cancelled", within=within)

    @asynccontextmanager
    async def open_request(self, body: Any, headers: Headers = ()) -> AsyncIterator[Connection]:
        """Send `POST /responses` and yield the connection without reading from it."""
        async with self.connect() as connection:
            path = f"{self.prefix}/responses"
            await connection.send_bytes(self.request_bytes(connection, "POST", path, to_bytes(body), headers))
            yield connection

    @asynccontextmanager
    async def websocket(self, headers: Headers = (), path: str = "/responses") -> AsyncIterator[WebSocket]:
        """Open a WebSocket. To test a refusal, use `get` with the headers `UPGRADE`."""
        uri = parse_uri(f"ws://127.0.0.1:{self.port}{self.prefix}{path}")
        async with self.connect() as connection:
            protocol = ClientProtocol(uri, max_size=1 << 28)
            request = protocol.connect()
            for name, value in {"Authorization": self.key, **dict(headers)}.items():
                request.headers[name] = value
            protocol.send_request(request)
            socket = WebSocket(connection._stream, protocol)
            with anyio.fail_after(DEFAULT_TIMEOUT):
                await socket._flush()
                reply = await socket.event()
            assert isinstance(reply, UpgradeReply), f"no reply to the upgrade: {reply!r}"
            assert reply.status_code == 101, f"{reply.status_code}: {bytes(reply.body or b'')[:500]!r}"
            yield socket


class ControlClient:
    """The test\'s side of the control channel; see `scripted`."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def _send(self, **order: Any) -> Any:
        with anyio.fail_after(DEFAULT_TIMEOUT):
            async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
                await stream.send(json.dumps(order).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    answer += await stream.receive(1 << 20)
        return json.loads(answer)

    async def open_gate(self, gate: str) -> None:
        """Open a gate, for a backend that waits there now or will later."""
        await self._send(do="open", gate=gate)

    async def wait_for(self, run: str, what: str, within: float = 5.0) -> dict[str, Any]:
        """Wait for the first entry of this kind in the run's trace, and return it."""
        record = await self._send(do="wait", run=run, what=what, timeout=within)
        assert record is not None, f"no {what!r} entry within {within} s"
        note: dict[str, Any] = next(note for note in record if note["what"] == what)
        return note

    async def peak_memory(self) -> int:
        """Return the server's peak memory in MB."""
        return int(await self._send(do="peak")) // 1024

    async def advance_clock(self, seconds: float) -> None:
        """Advance the clock of the server's store."""
        await self._send(do="later", seconds=seconds)

    async def trace(self, run: str) -> list[str]:
        """Return the kinds of the entries in the run's trace."""
        return [note["what"] for note in await self._send(do="record", run=run)]


def to_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def script(*steps: Any) -> str:
    """Return the user text that makes the backend execute these steps; see `scripted`."""
    return json.dumps(steps)


def functions(*names: str, **fields: Any) -> list[dict[str, Any]]:
    """Return definitions of functions with these names and any arguments."""
    return [{"type": "function", "name": name, **fields} for name in names]


def call(name: str, arguments: Any = "", **fields: Any) -> dict[str, Any]:
    """Return the step that calls a tool; arguments other than text are encoded as JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"ToolCall": {"name": name, "arguments": text, **fields}}


def output_text(response: Mapping[str, Any]) -> str:
    """Return the text of all messages of a response."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    )
