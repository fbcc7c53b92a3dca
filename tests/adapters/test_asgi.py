"""Tests of the code shared by ASGI hosts: pulled streams, WebSockets, and kits on the running loop."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from responses_kit import Backend, ResponsesKit, Timeouts, Turn, errors
from responses_kit.adapters.asgi import (
    Message,
    PullStream,
    read_headers,
    reject_websocket,
    serve_websocket,
    start_kit,
    stop_kit,
)
from responses_kit.http.messages import Reply, Request, Send
from responses_kit.http.open_responses import OpenResponses
from responses_kit.protocol.sse import decode_events
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend

from ..support.conformance import check_stream
from ..support.memory import stored_records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Writer:
    """A stream that sends given pieces, then fails or waits, and records its progress."""

    def __init__(self, *pieces: bytes, error: Exception | None = None, waits: bool = False) -> None:
        self.pieces, self.error, self.waits = pieces, error, waits
        self.sent = 0
        self.started, self.waiting, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, send: Send) -> None:
        self.started.set()
        try:
            for piece in self.pieces:
                await send(piece)
                self.sent += 1
            if self.error is not None:
                raise self.error
            if self.waits:
                self.waiting.set()
                await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)  # cleanup is asynchronous
            self.ended.set()


async def settle() -> None:
    """Let other tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def read_rest(pieces: PullStream) -> list[bytes]:
    with anyio.fail_after(BOUND):
        return [piece async for piece in pieces]


# Pieces.


async def test_pieces_are_yielded_in_order_until_the_end() -> None:
    pieces = PullStream(Writer(b"one", b"two", b"three"))
    assert await read_rest(pieces) == [b"one", b"two", b"three"]
    assert await read_rest(pieces) == []
    await pieces.aclose()


async def test_empty_stream_ends() -> None:
    assert await read_rest(PullStream(Writer())) == []


async def test_writer_waits_until_its_piece_was_sent() -> None:
    writer = Writer(b"one", b"two", b"three")
    pieces = PullStream(writer)
    assert not writer.started.is_set()
    with anyio.fail_after(BOUND):
        assert await anext(pieces) == b"one"
        await settle()
        assert writer.sent == 0
        assert await anext(pieces) == b"two"
        await settle()
        assert writer.sent == 1
    await pieces.aclose()


async def test_slow_reader_gets_all_pieces() -> None:
    writer = Writer(*(b"%d " % number for number in range(50)))
    received = b""
    with anyio.fail_after(BOUND):
        async for piece in PullStream(writer):
            received += piece
            await settle()
    assert received == b"".join(b"%d " % number for number in range(50))


async def test_concurrent_writers_lose_no_pieces() -> None:
    async def stream(send: Send) -> None:
        async def write(name: bytes) -> None:
            for _ in range(100):
                await send(name)
                await asyncio.sleep(0)

        await asyncio.gather(write(b"a"), write(b"b"), write(b"c"))

    assert sorted(await read_rest(PullStream(stream))) == sorted([b"a", b"b", b"c"] * 100)


async def test_cancelled_writer_does_not_block_the_next_one() -> None:
    """Keep-alives are cancelled if they are not sent in time."""

    async def stream(send: Send) -> None:
        await send(b"one")
        async with asyncio.TaskGroup() as group:
            group.create_task(send_with_timeout(send))
            await asyncio.sleep(0.03)
            await send(b"two")

    async def send_with_timeout(send: Send) -> None:
        for _ in range(3):
            with anyio.move_on_after(0.001):
                await send(b"keep-alive")

    pieces = PullStream(stream)
    assert await anext(pieces) == b"one"
    await asyncio.sleep(0.02)
    received = await read_rest(pieces)
    assert received[-1] == b"two"
    assert received.count(b"two") == 1


async def test_cancelled_reader_loses_no_pieces() -> None:
    proceed = asyncio.Event()

    async def stream(send: Send) -> None:
        for number in range(5):
            await proceed.wait()
            proceed.clear()
            await send(b"%d" % number)

    pieces = PullStream(stream)
    received = []
    with anyio.fail_after(BOUND):
        for number in range(5):
            with anyio.move_on_after(0.005):
                await anext(pieces)
                pytest.fail("there is no piece yet")
            proceed.set()
            if number % 2:
                await settle()  # the piece arrives before the next pull
            received.append(await anext(pieces))
    assert received == [b"0", b"1", b"2", b"3", b"4"]
    assert await read_rest(pieces) == []


async def test_reader_cancelled_while_a_piece_arrives_loses_nothing() -> None:
    arriving: list[Send] = []

    async def stream(send: Send) -> None:
        arriving.append(send)
        await asyncio.sleep(3600)

    pieces = PullStream(stream)
    reading = asyncio.create_task(pieces.__anext__())
    await settle()
    sending = asyncio.create_task(arriving[0](b"one"))  # type: ignore[arg-type]  # it is a coroutine
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    with anyio.fail_after(BOUND):
        assert (b"one" if not reading.cancelled() else await anext(pieces)) == b"one"
    sending.cancel()
    await pieces.aclose()


async def test_failed_stream_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pieces = PullStream(Writer(b"one", error=LookupError("interrupted")))
    assert await read_rest(pieces) == [b"one"]
    await pieces.aclose()
    (entry,) = caplog.records
    assert entry.levelno == logging.ERROR
    assert "interrupted" in caplog.text


@pytest.mark.parametrize("taken", [1, 2])
async def test_aclose_waits_until_the_writer_has_ended(taken: int) -> None:
    writer = Writer(b"one", b"two", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        for _ in range(taken):
            await anext(pieces)
        await pieces.aclose()
    assert writer.ended.is_set()
    assert await read_rest(pieces) == []
    await pieces.aclose()


async def test_aclose_ends_waiting_reader() -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        reading = asyncio.create_task(read_rest(pieces))
        await writer.waiting.wait()
        await pieces.aclose()
        assert await reading == [b"one"]


async def test_cancelled_aclose_still_cancels_the_writer() -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        await anext(pieces)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pieces.aclose()
        await writer.ended.wait()
    assert await read_rest(pieces) == []


@pytest.mark.parametrize("where", ["on the loop", "in another thread"])
async def test_close_cancels_the_writer_from_any_thread(where: str) -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        await anext(pieces)
        if where == "on the loop":
            pieces.close()
        else:
            await asyncio.to_thread(pieces.close)
        await writer.ended.wait()
        assert await read_rest(pieces) == []
        pieces.close()


def test_close_is_harmless_after_the_loop() -> None:
    async def begin() -> PullStream:
        pieces = PullStream(Writer(b"one", waits=True))
        assert await anext(pieces) == b"one"
        return pieces

    asyncio.run(begin()).close()


async def test_close_during_the_first_read_ends_the_stream() -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        reading = asyncio.create_task(read_rest(pieces))
        await asyncio.sleep(0)
        pieces.close()
        await pieces.aclose()
        assert await reading in ([], [b"one"])


@pytest.mark.parametrize("kind", ["aclose", "close"])
async def test_unread_stream_can_be_closed(kind: str) -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        if kind == "aclose":
            await pieces.aclose()
        else:
            pieces.close()
            pieces.close()
    assert await read_rest(pieces) == []


async def test_finished_stream_is_garbage_collected() -> None:
    writer = Writer(b"one", b"two")
    pieces = PullStream(writer)
    await read_rest(pieces)
    disconnect = weakref.ref(writer)
    del pieces, writer
    await settle()
    gc.collect()
    assert disconnect() is None


# Pieces of a kit's streams.


class EndlessBackend(Backend):
    """A backend that yields outputs until it is closed."""

    models = ("endless",)

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        try:
            while True:
                yield "on and on "
                await asyncio.sleep(0.001)
        finally:
            self.closed.set()


async def open_stream(kit: ResponsesKit) -> PullStream:
    async def read() -> bytes:
        return b'{"input": "Hi", "stream": true}'

    reply = await OpenResponses(kit).handle(Request("POST", "/responses", read=read))
    assert reply.stream is not None
    return PullStream(reply.stream)


def statuses(store: MemoryStore) -> list[str]:
    return [json.loads(record.response)["status"] for record in stored_records(store)]


async def test_stream_with_keep_alive_comments_is_valid() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hello", Pause(0.1), "."]), timeouts=Timeouts(keep_alive=0.01))
    received = await read_rest(await open_stream(kit))
    comments = [piece for piece in received if piece.startswith(b":")]
    assert len(comments) >= 3
    events = b"".join(piece for piece in received if not piece.startswith(b":"))
    assert events.endswith(b"data: [DONE]\n\n")
    assert check_stream(decode_events(events.removesuffix(b"data: [DONE]\n\n")))["status"] == "completed"


async def test_comments_do_not_split_events_for_slow_reader() -> None:
    kit = ResponsesKit(ScriptedBackend(["word "] * 20), timeouts=Timeouts(keep_alive=0.001))
    events = b""
    with anyio.fail_after(BOUND):
        async for piece in await open_stream(kit):
            assert piece.endswith(b"\n\n")
            events += b"" if piece.startswith(b":") else piece
            await asyncio.sleep(0.003)
    assert check_stream(decode_events(events.removesuffix(b"data: [DONE]\n\n")))["status"] == "completed"


async def test_closed_stream_cancels_its_response() -> None:
    store, backend = MemoryStore(), EndlessBackend()
    pieces = await open_stream(ResponsesKit(backend, store=store))
    with anyio.fail_after(BOUND):
        async for piece in pieces:
            if b"delta" in piece:
                break
        await pieces.aclose()
    assert backend.closed.is_set()
    assert statuses(store) == ["cancelled"]


async def test_abandoned_stream_cancels_its_response_after_the_send_timeout() -> None:
    store, backend = MemoryStore(), EndlessBackend()
    pieces = await open_stream(ResponsesKit(backend, store=store, timeouts=Timeouts(send=0.05)))
    with anyio.fail_after(BOUND):
        await anext(pieces)
        while statuses(store) != ["cancelled"]:  # noqa: ASYNC110  # the store has no notifications
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["aclose", "close", "both"])
async def test_closed_unread_stream_cancels_its_response(kind: str) -> None:
    """Frameworks close a stream unread if the client has left, or if middleware replaces the reply."""
    store = MemoryStore()
    backend = ScriptedBackend(["Hi"])
    pieces = await open_stream(ResponsesKit(backend, store=store))
    with anyio.fail_after(BOUND):
        if kind != "close":
            await pieces.aclose()
        if kind != "aclose":
            await asyncio.to_thread(pieces.close)
        while statuses(store) != ["cancelled"]:  # noqa: ASYNC110  # the store has no notifications
            await asyncio.sleep(0.005)
    assert backend.turns == []
    assert await read_rest(pieces) == []


# Starting and stopping a kit.


class CountingKit(ResponsesKit):
    """A kit that counts the starts and ends of its lifespan."""

    started = stopped = 0

    def lifespan(self, *, grace: float = 10.0) -> Any:
        @asynccontextmanager
        async def count_lifespan() -> AsyncIterator[None]:
            self.started += 1
            try:
                async with ResponsesKit.lifespan(self, grace=grace):
                    yield
            finally:
                self.stopped += 1

        return count_lifespan()


async def test_kit_is_started_once_per_loop_by_concurrent_callers() -> None:
    kit = CountingKit(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        await asyncio.gather(*(start_kit(kit) for _ in range(20)))
        await start_kit(kit)
        assert (kit.started, kit.stopped) == (1, 0)
        await asyncio.gather(*(stop_kit(kit) for _ in range(3)))
        await stop_kit(kit)
    assert (kit.started, kit.stopped) == (1, 1)
    assert kit.lifecycle.is_closing


def test_kit_is_started_on_each_loop_and_stopped_with_it() -> None:
    kit = CountingKit(ScriptedBackend(["Hi"]))

    async def main() -> None:
        await start_kit(kit, grace=0.0)

    asyncio.run(main())
    assert (kit.started, kit.stopped) == (1, 1)
    asyncio.run(main())
    assert (kit.started, kit.stopped) == (2, 2)


def test_running_responses_are_finished_when_the_loop_ends() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half", Pause(60)]), store=store)

    async def main() -> None:
        await start_kit(kit, grace=0.0)
        await kit.service.submit({"input": "Hi", "background": True})
        await settle()

    asyncio.run(main())
    assert all(record.final for record in stored_records(store))
    assert len(store) == 1


def test_stopped_kit_holds_no_reference_to_its_loop() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    loops: list[weakref.ref[Any]] = []

    async def main(leaves: bool) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await start_kit(kit, grace=0.0)
        if leaves:
            await stop_kit(kit)

    for leaves in (True, False):
        asyncio.run(main(leaves))
    gc.collect()
    assert [loop() for loop in loops] == [None, None]


class UnreadyStore(MemoryStore):
    """A store that is not set up yet."""

    def __init__(self) -> None:
        super().__init__()
        self.gets = 0
        self.ready = False

    async def get(self, owner: str, response_id: str) -> Any:
        self.gets += 1
        await asyncio.sleep(0)
        if not self.ready:
            raise errors.ConfigurationError("run the setup first")
        return await super().get(owner, response_id)


async def test_start_fails_for_each_caller_until_the_store_is_set_up() -> None:
    store = UnreadyStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, secrets=["a-secret-of-sufficient-length"])
    with anyio.fail_after(BOUND):
        for times in (1, 2):
            found = await asyncio.gather(*(start_kit(kit) for _ in range(5)), return_exceptions=True)
            assert [type(error) for error in found] == [errors.ConfigurationError] * 5
            assert store.gets == times  # once for concurrent callers
        store.ready = True
        await start_kit(kit)
        await stop_kit(kit)


async def test_cancelled_start_does_not_stop_concurrent_ones() -> None:
    kit = CountingKit(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        first = asyncio.create_task(start_kit(kit))
        await asyncio.sleep(0)
        second = asyncio.create_task(start_kit(kit))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await second
        assert (kit.started, kit.stopped) == (1, 0)
        await stop_kit(kit)


async def test_failure_of_cancelled_start_is_not_reported_by_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=UnreadyStore(), secrets=["a-secret-of-sufficient-length"])
    caplog.clear()
    starting = asyncio.create_task(start_kit(kit))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    await settle()
    gc.collect()
    await settle()
    assert "never retrieved" not in caplog.text


async def test_stop_during_start_stops_the_kit() -> None:
    kit = CountingKit(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        starting = asyncio.create_task(start_kit(kit))
        await asyncio.sleep(0)
        await stop_kit(kit)
        await starting
    assert (kit.started, kit.stopped) == (1, 1)


async def test_stop_waits_for_running_responses() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half", Pause(60)]), store=store)
    with anyio.fail_after(BOUND):
        await start_kit(kit, grace=0.01)
        await kit.service.submit({"input": "Hi", "background": True})
        await stop_kit(kit)
    assert statuses(store) == ["failed"]


# WebSockets.


class Connection:
    """An ASGI connection of a server."""

    def __init__(self, *frames: Any, denial: bool = True, **scope: Any) -> None:
        self.scope: dict[str, Any] = {"type": "websocket", "headers": [], **scope}
        if denial:
            self.scope["extensions"] = {"websocket.http.response": {}}
        self.frames = [
            {"type": "websocket.connect"},
            *(frame if "type" in frame and frame["type"].startswith("websocket.") else {
                "type": "websocket.receive", "text": json.dumps(frame)} for frame in frames),
        ]  # fmt: skip
        self.sent: list[Message] = []
        self.error: Exception | None = None
        self.hanging_type = ""

    async def receive(self) -> Message:
        if not self.frames:
            await asyncio.sleep(3600)
        return self.frames.pop(0)

    async def send(self, message: Message) -> None:
        if message["type"] == self.hanging_type:
            await asyncio.sleep(3600)
        if self.error is not None and message["type"] == "websocket.send":
            raise self.error
        self.sent.append(message)

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.sent]


async def return_ann() -> str:
    return "ann"


ASK = {"type": "response.create", "input": "Hi", "store": False}
GONE = {"type": "websocket.disconnect", "code": 1006}


async def serve(
    kit: ResponsesKit, connection: Connection, authorize: Callable[[], Awaitable[str]] = return_ann
) -> None:
    with anyio.fail_after(BOUND):
        await serve_websocket(kit, connection.scope, connection.receive, connection.send, authorize=authorize)


async def test_accepted_websocket_answers_text_and_binary_frames() -> None:
    connection = Connection(ASK, {"type": "websocket.receive", "bytes": json.dumps(ASK).encode()}, GONE)
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    disconnect = connection.frames.pop()

    async def send(message: Message) -> None:
        await connection.send(message)
        if "Frames must be text" in message.get("text", ""):
            left.set()

    async def receive() -> Message:
        if connection.frames:
            return connection.frames.pop(0)
        await left.wait()
        return disconnect

    left = asyncio.Event()
    with anyio.fail_after(BOUND):
        await serve_websocket(kit, connection.scope, receive, send, authorize=return_ann)
    assert connection.kinds[0] == "websocket.accept"
    assert {*connection.kinds[1:]} == {"websocket.send"}
    assert sum("response.completed" in message.get("text", "") for message in connection.sent) == 1


async def test_client_that_leaves_before_the_upgrade_is_not_authorized() -> None:
    connection = Connection()
    connection.frames = [dict(GONE)]

    async def authorize_never() -> str:
        raise AssertionError

    await serve(ResponsesKit(ScriptedBackend(["Hi"])), connection, authorize_never)
    assert connection.sent == []


@pytest.mark.parametrize("denial", [True, False], ids=["with a reply", "bare"])
@pytest.mark.parametrize("by", ["an error", "a reply"])
async def test_upgrade_is_refused(by: str, denial: bool) -> None:
    async def refuse() -> str:
        raise errors.Unauthorized("Unknown key.")

    connection = Connection(denial=denial)
    if by == "an error":
        await serve(ResponsesKit(ScriptedBackend(["Hi"])), connection, refuse)
    else:
        reply = Reply(401, {"WWW-Authenticate": "Bearer"}, b"Unknown key.")
        await reject_websocket(connection.scope, connection.receive, connection.send, reply=reply)
    if not denial:
        assert connection.kinds == ["websocket.close"]
        return
    start, body = connection.sent
    assert (start["status"], b"Unknown key." in body["body"]) == (401, True)
    assert (b"content-length", str(len(body["body"])).encode()) in start["headers"]
    assert all(name == name.lower() for name, _ in start["headers"])


async def test_disconnected_client_gets_no_refusal() -> None:
    connection = Connection()
    connection.frames = [dict(GONE)]
    await reject_websocket(connection.scope, connection.receive, connection.send, reply=Reply(403, {}))
    assert connection.sent == []


@pytest.mark.parametrize("error", [RuntimeError("already closed"), OSError()])
async def test_session_ends_when_the_server_has_closed_the_socket(error: Exception) -> None:
    backend = EndlessBackend()
    kit = ResponsesKit(backend)
    connection = Connection(ASK)
    connection.error = error
    await serve(kit, connection)
    assert connection.kinds == ["websocket.accept"]


async def test_disconnect_cancels_the_response() -> None:
    ended: list[str] = []
    kit = ResponsesKit(
        EndlessBackend(), on_response_end=lambda owner, response: ended.append(f"{owner} {response['status']}")
    )
    connection, streaming = Connection(ASK), asyncio.Event()

    async def send(message: Message) -> None:
        await connection.send(message)
        if "delta" in message.get("text", ""):
            streaming.set()

    async def receive() -> Message:
        if connection.frames:
            return connection.frames.pop(0)
        await streaming.wait()
        return dict(GONE)

    with anyio.fail_after(BOUND):
        await serve_websocket(kit, connection.scope, receive, send, authorize=return_ann)
    assert ended == ["ann cancelled"]


async def test_hanging_close_is_bounded_by_the_send_timeout() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), timeouts=Timeouts(websocket=0.01, send=0.05))
    connection = Connection()
    connection.hanging_type = "websocket.close"
    await serve(kit, connection)
    assert connection.kinds == ["websocket.accept"] or "websocket.close" not in connection.kinds


def test_headers_are_lower_case_and_duplicate_origins_null() -> None:
    scope = {"headers": [(b"X-Key", b"caf\xe9"), (b"origin", b"https://a.example")]}
    assert read_headers(scope) == {"x-key": "café", "origin": "https://a.example"}
    scope["headers"].append((b"Origin", b"https://b.example"))
    assert read_headers(scope)["origin"] == "null"


def test_start_kit_requires_a_running_loop() -> None:
    found: list[BaseException] = []

    def work() -> None:
        starting = start_kit(ResponsesKit(ScriptedBackend(["Hi"])))
        try:
            starting.send(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(BOUND)
    assert isinstance(found[0], RuntimeError)
