"""A small client that sees the bytes: HTTP by h11 over a plain socket, one connection a request, and WebSocket alike.

Real client libraries hide what the contract is about: where one write ends, which header was really sent, when
a connection is gone. Every wait here has a bound.
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
from websockets.frames import Frame as SocketFrame
from websockets.frames import Opcode
from websockets.http11 import Response as UpgradeReply
from websockets.uri import parse_uri

from tests.support.conformance import check_error, check_response, check_stream

PATIENCE = 10.0
"""Seconds that anything may take that is not measured."""

Headers = Mapping[str, str] | Sequence[tuple[str, str]]
_UNSET: Any = object()


def strict_json(data: bytes | str) -> Any:
    """JSON as its specification has it: no NaN, no infinity, no key twice."""

    def no_constants(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    def no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        assert len(members) == len(pairs), f"a key comes twice: {[key for key, _ in pairs]}"
        return members

    return json.loads(data, parse_constant=no_constants, object_pairs_hook=no_doubles)


@dataclass
class Reply:
    """An answer that has arrived whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        assert self.headers["content-type"].split(";")[0] == "application/json", self.headers
        return strict_json(self.body)

    def error(self, status: int, code: str | None = None, param: str | None = _UNSET) -> dict[str, Any]:
        """The error object, after everything about it was checked that is said."""
        assert self.status == status, f"{self.status} instead of {status}: {self.body[:500]!r}"
        body = self.json()
        check_error(body)
        error: dict[str, Any] = body["error"]
        assert code is None or error["code"] == code, error
        assert param is _UNSET or error["param"] == param, error
        return error


@dataclass
class Frame:
    """One block of a `text/event-stream`."""

    raw: bytes
    event: str | None = None
    data: str | None = None

    @property
    def comment(self) -> bool:
        return self.data is None

    @classmethod
    def parse(cls, raw: bytes) -> Frame:
        """Reads a block as this wire writes it: comments alone, or an `event:` and a `data:` line, `[DONE]` without."""
        lines = raw.decode("ascii").split("\n")
        if all(line.startswith(":") for line in lines):
            return cls(raw)
        if lines == ["data: [DONE]"]:
            return cls(raw, None, "[DONE]")
        assert len(lines) == 2, f"a block is an event and a data line: {raw[:300]!r}"
        assert lines[0].startswith("event: "), raw[:300]
        assert lines[1].startswith("data: "), raw[:300]
        return cls(raw, lines[0].removeprefix("event: "), lines[1].removeprefix("data: "))


@dataclass
class Stream:
    """An answer that is still arriving."""

    connection: Connection
    status: int
    headers: dict[str, str]
    writes: list[bytes] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    done: bool = False
    ended: bool = False
    _waiting: list[Frame] = field(default_factory=list)

    async def frame(self, within: float = PATIENCE) -> Frame | None:
        """The next block, or None at the body's end."""
        with anyio.fail_after(within):
            while not self._waiting:
                write = await self.connection.write()
                if write is None:
                    self.ended = True
                    return None
                self.writes.append(write)
                assert write.endswith(b"\n\n"), f"a write ends within an event: …{write[-80:]!r}"
                assert b"\r" not in write, "lines end in LF alone"
                self._waiting += [Frame.parse(block) for block in write[:-2].split(b"\n\n")]
        return self._waiting.pop(0)

    async def next(self, within: float = PATIENCE) -> dict[str, Any] | None:
        """The next event, comments aside; None at the body's end."""
        while frame := await self.frame(within):
            assert not self.done, f"something after [DONE]: {frame.raw!r}"
            if frame.comment:
                self.comments += 1
            elif frame.data == "[DONE]":
                self.done = True
            else:
                event = strict_json(frame.data or "")
                assert event["type"] == frame.event, f"event {frame.event} holds a {event['type']}"
                self.events.append(event)
                return event
        return None

    async def until(self, kind: str, within: float = PATIENCE) -> dict[str, Any]:
        """The next event of this type; those before it are kept in `events`."""
        with anyio.fail_after(within):
            while event := await self.next():
                if event["type"] == kind:
                    return event
        raise AssertionError(f"no {kind} in {[event['type'] for event in self.events]}")

    async def blocks(self) -> list[bytes]:
        """Reads to the end; what came from here on, byte for byte, comments aside."""
        blocks = []
        with anyio.fail_after(3 * PATIENCE):
            while frame := await self.frame():
                if not frame.comment:
                    blocks.append(frame.raw)
        return blocks

    async def rest(self) -> dict[str, Any]:
        """Reads to the end, checks the whole stream and returns its final object."""
        while await self.next():
            pass
        assert self.done, "no [DONE] at the end"
        return check_stream(self.events)

    def text(self) -> str:
        return "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")


class Connection:
    """One TCP connection to a server."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        self._write: list[bytes] = []

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
        assert len(set(names) - {"vary"}) == len([name for name in names if name != "vary"]), f"a header twice: {names}"
        return event.status_code, {name.decode(): value.decode() for name, value in event.headers}

    async def write(self) -> bytes | None:
        """What the server put into one chunk, which is what it wrote at once; None at the end."""
        while True:
            event = await self.event()
            if isinstance(event, h11.EndOfMessage):
                assert not self._write, "the body ends within a chunk"
                return None
            assert isinstance(event, h11.Data), f"the connection broke: {event!r}"
            self._write.append(bytes(event.data))
            if event.chunk_end:
                write, self._write = b"".join(self._write), []
                return write

    async def body(self) -> bytes:
        body = bytearray()
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage), f"the connection broke: {event!r}"
        return bytes(body)

    def next_cycle(self) -> None:
        """Makes the connection ready for a further request; fails where the server closes it."""
        self._http.start_next_cycle()

    @property
    def _socket(self) -> socket.socket:
        return self._stream.extra(anyio.abc.SocketAttribute.raw_socket)

    def narrow(self) -> None:
        """Lets the operating system take in little that nobody has read yet."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)

    async def leave(self, *, reset: bool = False) -> None:
        """Closes the connection now, by FIN or by RST."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self._stream.aclose()


UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
"""What makes a GET ask for a WebSocket."""


class Socket:
    """An open WebSocket, frame by frame.

    Attributes:
        code: What the server closed it with; None while it is open, 1006 if the connection broke.
        pings: How many the server has sent.
    """

    def __init__(self, stream: anyio.abc.SocketStream, protocol: ClientProtocol) -> None:
        self.connection = Connection(stream)
        self.code: int | None = None
        self.pings = 0
        self._stream, self._protocol = stream, protocol
        self._arrived: list[Any] = []

    async def _flush(self) -> None:
        data = b"".join(self._protocol.data_to_send())
        if data:
            await self._stream.send(data)

    async def event(self) -> Any:
        """What the protocol makes of the bytes that come; None at their end."""
        while not self._arrived:
            try:
                self._protocol.receive_data(await self._stream.receive(1 << 20))
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return None
            self._arrived += self._protocol.events_received()
            with suppress(anyio.BrokenResourceError):  # an answer to a close or a ping may come too late
                await self._flush()
        return self._arrived.pop(0)

    async def send(self, frame: Any) -> None:
        """Sends bytes as a binary frame, a str as a text frame, and anything else as JSON."""
        if isinstance(frame, bytes):
            self._protocol.send_binary(frame)
        else:
            self._protocol.send_text((frame if isinstance(frame, str) else json.dumps(frame)).encode())
        await self._flush()

    async def ask(self, **fields: Any) -> None:
        """Sends a request and waits for nothing."""
        await self.send({"type": "response.create", "model": "puppet", "store": False, **fields})

    async def next(self, within: float = PATIENCE) -> dict[str, Any] | None:
        """The next frame's JSON, or None once the server has closed."""
        with anyio.fail_after(within):
            while (event := await self.event()) is not None:
                assert isinstance(event, SocketFrame), event
                if event.opcode is Opcode.CLOSE:
                    received = self._protocol.close_rcvd
                    self.code = None if received is None else received.code
                    return None
                if event.opcode is Opcode.PING:
                    self.pings += 1
                    continue
                assert event.opcode is Opcode.TEXT, f"a frame that is no text: {event}"
                assert event.fin, "an event is one frame"
                assert event.data.isascii()
                frame: dict[str, Any] = strict_json(bytes(event.data))
                return frame
        self.code = 1006
        return None

    async def until(self, kind: str, within: float = PATIENCE) -> dict[str, Any]:
        """The next frame of this type; those before it are dropped."""
        with anyio.fail_after(within):
            while frame := await self.next():
                if frame["type"] == kind:
                    return frame
        raise AssertionError(f"closed with {self.code} before a {kind} came")

    async def answer(self, within: float = PATIENCE) -> dict[str, Any]:
        """Reads one answer whole and checks it: the final object, or the error frame of one that never began."""
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

    async def turn(self, **fields: Any) -> dict[str, Any]:
        """A request and its answer, which may be of any kind."""
        await self.ask(**fields)
        return await self.answer()

    async def made(self, **fields: Any) -> dict[str, Any]:
        """A request whose answer has to be made."""
        response = await self.turn(**fields)
        assert response.get("status") in ("completed", "incomplete"), response.get("error")
        return response

    async def told(self, **fields: Any) -> dict[str, Any]:
        """What the backend was given for this request; the last user text must not be a script."""
        told: dict[str, Any] = json.loads(output_text(await self.made(**fields)))
        return told

    async def refused(self, status: int, code: str | None = None, param: str | None = _UNSET) -> dict[str, Any]:
        """The error frame that comes next, after everything about it was checked that is said."""
        frame = await self.answer()
        assert frame.get("type") == "error", f"a response where an error should be: {frame}"
        error: dict[str, Any] = frame["error"]
        assert frame["status"] == status, frame
        assert code is None or error["code"] == code, error
        assert param is _UNSET or error["param"] == param, error
        return error

    async def close(self) -> None:
        """Closes as clients do; the server's answer is not waited for."""
        self._protocol.send_close(1000)
        await self._flush()


class Client:
    """Someone with a key, talking to one server."""

    def __init__(self, port: int, key: str = "Bearer alice", prefix: str = "/v1") -> None:
        self.port, self.key, self.prefix = port, key, prefix

    def other(self, key: str) -> Client:
        """The same server, seen by somebody else."""
        return Client(self.port, key, self.prefix)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        with anyio.fail_after(PATIENCE):
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
        """A request as bytes; headers given here replace those a plain client sends, a value of "" removes one."""
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
        given = {name.lower() for name, _ in pairs}
        defaults = {"Host": f"127.0.0.1:{self.port}", "Authorization": self.key, "Accept": "application/json"}
        if body is not None:
            defaults["Content-Type"] = "application/json"
            framing = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(len(body))}
            defaults |= framing
        wanted = [(name, value) for name, value in defaults.items() if name.lower() not in given]
        pairs = [*wanted, *((name, value) for name, value in pairs if value != "")]
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
        within: float = PATIENCE,
    ) -> Reply:
        """One request and its whole answer. Paths are below the prefix unless `host_path` is set."""
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
        """`POST /responses`, whatever comes of it."""
        return await self.request("POST", "/responses", json={"model": "puppet", **fields})

    async def create(self, **fields: Any) -> dict[str, Any]:
        """A response that has to be made, not streamed."""
        reply = await self.post(**fields)
        assert reply.status == 200, f"{reply.status}: {reply.body[:500]!r}"
        response: dict[str, Any] = reply.json()
        check_response(response)
        return response

    async def streamed(self, **fields: Any) -> dict[str, Any]:
        """The same, streamed and checked; returns the final object."""
        async with self.stream(**fields) as stream:
            return await stream.rest()

    async def made(self, stream: bool, **fields: Any) -> dict[str, Any]:
        """A response in either mode, that has not failed."""
        response = await (self.streamed(**fields) if stream else self.create(**fields))
        assert response["status"] in ("completed", "incomplete"), response["error"]
        return response

    async def fails(self, stream: bool, **fields: Any) -> dict[str, Any]:
        """The error of a response that has to fail once its model speaks, in either mode."""
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

    async def told(self, stream: bool = False, **fields: Any) -> dict[str, Any]:
        """What the backend was given for this request; the last user text must not be a script."""
        told: dict[str, Any] = json.loads(output_text(await self.made(stream, **fields)))
        return told

    @asynccontextmanager
    async def stream(self, headers: Headers = (), **fields: Any) -> AsyncIterator[Stream]:
        """A stream that has to begin."""
        body = to_bytes({"model": "puppet", "stream": True, **fields})
        async with self.begun("POST", "/responses", body, headers) as (connection, reply_headers):
            yield Stream(connection, 200, reply_headers)

    @asynccontextmanager
    async def follow(self, response_id: str, after: int | None = None) -> AsyncIterator[Stream]:
        """The stream of a response that exists, from its first event on or from the one after `after`."""
        path = f"/responses/{response_id}?stream=true" + ("" if after is None else f"&starting_after={after}")
        async with self.begun("GET", path) as (connection, reply_headers):
            yield Stream(connection, 200, reply_headers)

    @asynccontextmanager
    async def begun(
        self, method: str, path: str, body: bytes | None = None, headers: Headers = ()
    ) -> AsyncIterator[tuple[Connection, dict[str, str]]]:
        """A connection on which an answer has begun, which has to be a 200, and its headers."""
        async with self.connect() as connection:
            await connection.send_bytes(self.request_bytes(connection, method, self.prefix + path, body, headers))
            with anyio.fail_after(PATIENCE):
                status, reply_headers = await connection.head()
            assert status == 200, f"{status}: {(await connection.body())[:500]!r}"
            yield connection, reply_headers

    async def cancel(self, response_id: str, **more: Any) -> Reply:
        return await self.request("POST", f"/responses/{response_id}/cancel", **more)

    async def reaches(self, response_id: str, *statuses: str, within: float = PATIENCE) -> dict[str, Any]:
        """The response once it has one of these statuses, asked for again and again."""
        with anyio.fail_after(within):
            while True:
                response: dict[str, Any] = (await self.get(f"/responses/{response_id}")).json()
                check_response(response)
                if response["status"] in statuses:
                    return response
                await anyio.sleep(0.01)

    async def ended(self, response_id: str, within: float = PATIENCE) -> dict[str, Any]:
        """The response once it has ended, however it has."""
        return await self.reaches(response_id, "completed", "incomplete", "failed", "cancelled", within=within)

    @asynccontextmanager
    async def open(self, body: Any, headers: Headers = ()) -> AsyncIterator[Connection]:
        """A connection on which `POST /responses` was sent and nothing has been read."""
        async with self.connect() as connection:
            path = f"{self.prefix}/responses"
            await connection.send_bytes(self.request_bytes(connection, "POST", path, to_bytes(body), headers))
            yield connection

    @asynccontextmanager
    async def socket(self, headers: Headers = (), path: str = "/responses") -> AsyncIterator[Socket]:
        """A WebSocket that has to be let in. Others can be asked for with `get` and `UPGRADE`."""
        uri = parse_uri(f"ws://127.0.0.1:{self.port}{self.prefix}{path}")
        async with self.connect() as connection:
            protocol = ClientProtocol(uri, max_size=1 << 28)
            request = protocol.connect()
            for name, value in {"Authorization": self.key, **dict(headers)}.items():
                request.headers[name] = value
            protocol.send_request(request)
            socket = Socket(connection._stream, protocol)
            with anyio.fail_after(PATIENCE):
                await socket._flush()
                reply = await socket.event()
            assert isinstance(reply, UpgradeReply), f"no answer to the upgrade: {reply!r}"
            assert reply.status_code == 101, f"{reply.status_code}: {bytes(reply.body or b'')[:500]!r}"
            yield socket


class Hand:
    """The hand that holds the puppet's strings, from the test's side."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def _order(self, **order: Any) -> Any:
        with anyio.fail_after(PATIENCE):
            async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
                await stream.send(json.dumps(order).encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    answer += await stream.receive(1 << 20)
        return json.loads(answer)

    async def open(self, gate: str) -> None:
        """Lets a puppet go on that waits at this gate, now or later."""
        await self._order(do="open", gate=gate)

    async def seen(self, run: str, what: str, within: float = 5.0) -> dict[str, Any]:
        """The first note of this kind in the run's record, waited for."""
        record = await self._order(do="wait", run=run, what=what, timeout=within)
        assert record is not None, f"the backend was not {what} within {within} s"
        note: dict[str, Any] = next(note for note in record if note["what"] == what)
        return note

    async def peak(self) -> int:
        """The most memory that the server has had so far, in MB."""
        return int(await self._order(do="peak")) // 1024

    async def later(self, seconds: float) -> None:
        """Turns the clock of the server's store forward."""
        await self._order(do="later", seconds=seconds)

    async def record(self, run: str) -> list[str]:
        """What the run has noted so far."""
        return [note["what"] for note in await self._order(do="record", run=run)]


def to_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def script(*moves: Any) -> str:
    """The user text that makes the puppet do these moves; see `puppet`."""
    return json.dumps(moves)


def functions(*names: str, **fields: Any) -> list[dict[str, Any]]:
    """Definitions of functions that take anything."""
    return [{"type": "function", "name": name, **fields} for name in names]


def call(name: str, arguments: Any = "", **fields: Any) -> dict[str, Any]:
    """The puppet's move that calls a tool; arguments that are no text become JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"ToolCall": {"name": name, "arguments": text, **fields}}


def output_text(response: Mapping[str, Any]) -> str:
    """All text of a response's messages."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text"
    )
