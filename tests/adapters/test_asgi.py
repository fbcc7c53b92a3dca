"""What ASGI frameworks share: streams for those who pull them, WebSockets, and a kit's life on the running loop."""

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
from ..support.memory import kept

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Writer:
    """A stream that writes what the test says, and tells how far it has come."""

    def __init__(self, *pieces: bytes, error: Exception | None = None, waits: bool = False) -> None:
        self.pieces, self.error, self.waits = pieces, error, waits
        self.sent = 0
        self.begun, self.waiting, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, send: Send) -> None:
        self.begun.set()
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
            await asyncio.sleep(0)  # cleaning up takes a while
            self.ended.set()


async def settled() -> None:
    """Whoever can go on has gone on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def rest(pieces: PullStream) -> list[bytes]:
    with anyio.fail_after(BOUND):
        return [piece async for piece in pieces]


# Pieces.


async def test_they_come_one_by_one_and_then_end() -> None:
    pieces = PullStream(Writer(b"one", b"two", b"three"))
    assert await rest(pieces) == [b"one", b"two", b"three"]
    assert await rest(pieces) == []
    await pieces.aclose()


async def test_a_stream_of_nothing_ends() -> None:
    assert await rest(PullStream(Writer())) == []


async def test_the_writer_goes_on_when_its_piece_has_left_and_not_before() -> None:
    writer = Writer(b"one", b"two", b"three")
    pieces = PullStream(writer)
    assert not writer.begun.is_set()
    with anyio.fail_after(BOUND):
        assert await anext(pieces) == b"one"
        await settled()
        assert writer.sent == 0
        assert await anext(pieces) == b"two"
        await settled()
        assert writer.sent == 1
    await pieces.aclose()


async def test_a_reader_that_is_slower_than_the_writer_loses_nothing() -> None:
    writer = Writer(*(b"%d " % number for number in range(50)))
    told = b""
    with anyio.fail_after(BOUND):
        async for piece in PullStream(writer):
            told += piece
            await settled()
    assert told == b"".join(b"%d " % number for number in range(50))


async def test_two_may_write_at_once_and_nothing_is_lost() -> None:
    async def stream(send: Send) -> None:
        async def write(name: bytes) -> None:
            for _ in range(100):
                await send(name)
                await asyncio.sleep(0)

        await asyncio.gather(write(b"a"), write(b"b"), write(b"c"))

    assert sorted(await rest(PullStream(stream))) == sorted([b"a", b"b", b"c"] * 100)


async def test_a_writer_that_gives_up_waiting_leaves_the_others_their_turn() -> None:
    """As keep-alives do that nobody takes in time."""

    async def stream(send: Send) -> None:
        await send(b"one")
        async with asyncio.TaskGroup() as group:
            group.create_task(given_up(send))
            await asyncio.sleep(0.03)
            await send(b"two")

    async def given_up(send: Send) -> None:
        for _ in range(3):
            with anyio.move_on_after(0.001):
                await send(b"never mind")

    pieces = PullStream(stream)
    assert await anext(pieces) == b"one"
    await asyncio.sleep(0.02)
    told = await rest(pieces)
    assert told[-1] == b"two"
    assert told.count(b"two") == 1


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    go_on = asyncio.Event()

    async def stream(send: Send) -> None:
        for number in range(5):
            await go_on.wait()
            go_on.clear()
            await send(b"%d" % number)

    pieces = PullStream(stream)
    told = []
    with anyio.fail_after(BOUND):
        for number in range(5):
            with anyio.move_on_after(0.005):
                await anext(pieces)
                pytest.fail("there is nothing yet")
            go_on.set()
            if number % 2:
                await settled()  # it is there before it is asked for again
            told.append(await anext(pieces))
    assert told == [b"0", b"1", b"2", b"3", b"4"]
    assert await rest(pieces) == []


async def test_a_reader_that_is_cancelled_in_the_moment_in_which_a_piece_comes_loses_nothing() -> None:
    arriving: list[Send] = []

    async def stream(send: Send) -> None:
        arriving.append(send)
        await asyncio.sleep(3600)

    pieces = PullStream(stream)
    reading = asyncio.create_task(pieces.__anext__())
    await settled()
    sending = asyncio.create_task(arriving[0](b"one"))  # type: ignore[arg-type]  # it is a coroutine
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    with anyio.fail_after(BOUND):
        assert (b"one" if not reading.cancelled() else await anext(pieces)) == b"one"
    sending.cancel()
    await pieces.aclose()


async def test_a_stream_that_fails_ends_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    pieces = PullStream(Writer(b"one", error=LookupError("broken off")))
    assert await rest(pieces) == [b"one"]
    await pieces.aclose()
    (entry,) = caplog.records
    assert entry.levelno == logging.ERROR
    assert "broken off" in caplog.text


@pytest.mark.parametrize("taken", [1, 2])
async def test_whoever_closes_early_has_the_writer_ended_and_waits_for_that(taken: int) -> None:
    writer = Writer(b"one", b"two", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        for _ in range(taken):
            await anext(pieces)
        await pieces.aclose()
    assert writer.ended.is_set()
    assert await rest(pieces) == []
    await pieces.aclose()


async def test_closing_ends_a_reader_that_waits() -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        reading = asyncio.create_task(rest(pieces))
        await writer.waiting.wait()
        await pieces.aclose()
        assert await reading == [b"one"]


async def test_whoever_is_cancelled_while_it_closes_has_closed_all_the_same() -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        await anext(pieces)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await pieces.aclose()
        await writer.ended.wait()
    assert await rest(pieces) == []


@pytest.mark.parametrize("where", ["on the loop", "in another thread"])
async def test_it_can_be_closed_without_waiting_from_any_thread(where: str) -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        await anext(pieces)
        if where == "on the loop":
            pieces.close()
        else:
            await asyncio.to_thread(pieces.close)
        await writer.ended.wait()
        assert await rest(pieces) == []
        pieces.close()


def test_it_can_be_closed_when_its_loop_has_gone() -> None:
    async def begin() -> PullStream:
        pieces = PullStream(Writer(b"one", waits=True))
        assert await anext(pieces) == b"one"
        return pieces

    asyncio.run(begin()).close()


async def test_closing_in_the_moment_in_which_it_is_first_read_ends_it_too() -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        reading = asyncio.create_task(rest(pieces))
        await asyncio.sleep(0)
        pieces.close()
        await pieces.aclose()
        assert await reading in ([], [b"one"])


@pytest.mark.parametrize("kind", ["aclose", "close"])
async def test_one_that_was_never_iterated_can_be_closed_and_is_over(kind: str) -> None:
    writer = Writer(b"one", waits=True)
    pieces = PullStream(writer)
    with anyio.fail_after(BOUND):
        if kind == "aclose":
            await pieces.aclose()
        else:
            pieces.close()
            pieces.close()
    assert await rest(pieces) == []


async def test_nothing_is_left_of_one_that_was_read_to_its_end() -> None:
    writer = Writer(b"one", b"two")
    pieces = PullStream(writer)
    await rest(pieces)
    gone = weakref.ref(writer)
    del pieces, writer
    await settled()
    gc.collect()
    assert gone() is None


# Pieces of a kit's streams.


class Talking(Backend):
    """Talks until it is closed."""

    models = ("talking",)

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        try:
            while True:
                yield "on and on "
                await asyncio.sleep(0.001)
        finally:
            self.closed.set()


async def asked(kit: ResponsesKit) -> PullStream:
    async def read() -> bytes:
        return b'{"input": "Hi", "stream": true}'

    reply = await OpenResponses(kit).handle(Request("POST", "/responses", read=read))
    assert reply.stream is not None
    return PullStream(reply.stream)


def statuses(store: MemoryStore) -> list[str]:
    return [json.loads(record.response)["status"] for record in kept(store)]


async def test_a_whole_stream_is_a_legal_one_comments_aside() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hello", Pause(0.1), "."]), timeouts=Timeouts(keep_alive=0.01))
    told = await rest(await asked(kit))
    comments = [piece for piece in told if piece.startswith(b":")]
    assert len(comments) >= 3
    events = b"".join(piece for piece in told if not piece.startswith(b":"))
    assert events.endswith(b"data: [DONE]\n\n")
    assert check_stream(decode_events(events.removesuffix(b"data: [DONE]\n\n")))["status"] == "completed"


async def test_comments_and_events_at_once_to_a_slow_reader_come_whole_and_in_order() -> None:
    kit = ResponsesKit(ScriptedBackend(["word "] * 20), timeouts=Timeouts(keep_alive=0.001))
    events = b""
    with anyio.fail_after(BOUND):
        async for piece in await asked(kit):
            assert piece.endswith(b"\n\n")
            events += b"" if piece.startswith(b":") else piece
            await asyncio.sleep(0.003)
    assert check_stream(decode_events(events.removesuffix(b"data: [DONE]\n\n")))["status"] == "completed"


async def test_a_reader_that_closes_cancels_its_response() -> None:
    store, talking = MemoryStore(), Talking()
    pieces = await asked(ResponsesKit(talking, store=store))
    with anyio.fail_after(BOUND):
        async for piece in pieces:
            if b"delta" in piece:
                break
        await pieces.aclose()
    assert talking.closed.is_set()
    assert statuses(store) == ["cancelled"]


async def test_a_reader_that_forgets_it_is_given_up() -> None:
    store, talking = MemoryStore(), Talking()
    pieces = await asked(ResponsesKit(talking, store=store, timeouts=Timeouts(send=0.05)))
    with anyio.fail_after(BOUND):
        await anext(pieces)
        while statuses(store) != ["cancelled"]:  # noqa: ASYNC110  # the store rings no bell
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["aclose", "close", "both"])
async def test_a_stream_that_was_never_iterated_has_its_response_cancelled_when_it_is_closed(kind: str) -> None:
    """As frameworks do whose client has left by then, and middleware that answers with something else."""
    store = MemoryStore()
    backend = ScriptedBackend(["Hi"])
    pieces = await asked(ResponsesKit(backend, store=store))
    with anyio.fail_after(BOUND):
        if kind != "close":
            await pieces.aclose()
        if kind != "aclose":
            await asyncio.to_thread(pieces.close)
        while statuses(store) != ["cancelled"]:  # noqa: ASYNC110  # the store rings no bell
            await asyncio.sleep(0.005)
    assert backend.turns == []
    assert await rest(pieces) == []


# The kit's life.


class Counting(ResponsesKit):
    """Counts how often its life begins and ends."""

    begun = over = 0

    def lifespan(self, *, grace: float = 10.0) -> Any:
        @asynccontextmanager
        async def counted() -> AsyncIterator[None]:
            self.begun += 1
            try:
                async with ResponsesKit.lifespan(self, grace=grace):
                    yield
            finally:
                self.over += 1

        return counted()


async def test_a_kit_lives_once_on_a_loop_however_many_enter_it_at_once() -> None:
    kit = Counting(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        await asyncio.gather(*(start_kit(kit) for _ in range(20)))
        await start_kit(kit)
        assert (kit.begun, kit.over) == (1, 0)
        await asyncio.gather(*(stop_kit(kit) for _ in range(3)))
        await stop_kit(kit)
    assert (kit.begun, kit.over) == (1, 1)
    assert kit.lifecycle.is_closing


def test_it_lives_on_each_loop_for_itself_and_ends_with_it() -> None:
    kit = Counting(ScriptedBackend(["Hi"]))

    async def main() -> None:
        await start_kit(kit, grace=0.0)

    asyncio.run(main())
    assert (kit.begun, kit.over) == (1, 1)
    asyncio.run(main())
    assert (kit.begun, kit.over) == (2, 2)


def test_what_is_in_progress_when_the_loop_ends_is_ended() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half", Pause(60)]), store=store)

    async def main() -> None:
        await start_kit(kit, grace=0.0)
        await kit.service.submit({"input": "Hi", "background": True})
        await settled()

    asyncio.run(main())
    assert all(record.final for record in kept(store))
    assert len(store) == 1


def test_no_loop_is_held_by_a_kit_that_has_lived_on_it() -> None:
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


class Unready(MemoryStore):
    """A store that was not set up yet."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.ready = False

    async def get(self, owner: str, response_id: str) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        if not self.ready:
            raise errors.ConfigurationError("run the setup first")
        return await super().get(owner, response_id)


async def test_a_store_that_was_not_set_up_is_told_to_each_who_enters_until_it_is() -> None:
    store = Unready()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, secrets=["a secret that is long enough to be one"])
    with anyio.fail_after(BOUND):
        for times in (1, 2):
            found = await asyncio.gather(*(start_kit(kit) for _ in range(5)), return_exceptions=True)
            assert [type(error) for error in found] == [errors.ConfigurationError] * 5
            assert store.asked == times  # once for all who come at once
        store.ready = True
        await start_kit(kit)
        await stop_kit(kit)


async def test_whoever_is_cancelled_while_it_enters_takes_nobody_elses_life_away() -> None:
    kit = Counting(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        first = asyncio.create_task(start_kit(kit))
        await asyncio.sleep(0)
        second = asyncio.create_task(start_kit(kit))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await second
        assert (kit.begun, kit.over) == (1, 0)
        await stop_kit(kit)


async def test_a_failure_that_nobody_waits_for_any_more_is_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=Unready(), secrets=["a secret that is long enough to be one"])
    caplog.clear()
    entering = asyncio.create_task(start_kit(kit))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.wait([entering])
    await settled()
    gc.collect()
    await settled()
    assert "never retrieved" not in caplog.text


async def test_whoever_leaves_before_the_life_has_begun_has_it_ended() -> None:
    kit = Counting(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        entering = asyncio.create_task(start_kit(kit))
        await asyncio.sleep(0)
        await stop_kit(kit)
        await entering
    assert (kit.begun, kit.over) == (1, 1)


async def test_leaving_waits_until_what_is_in_progress_has_ended() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["half", Pause(60)]), store=store)
    with anyio.fail_after(BOUND):
        await start_kit(kit, grace=0.01)
        await kit.service.submit({"input": "Hi", "background": True})
        await stop_kit(kit)
    assert statuses(store) == ["failed"]


# WebSockets.


class Connection:
    """A connection as a server offers it."""

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
        self.hangs_at = ""

    async def receive(self) -> Message:
        if not self.frames:
            await asyncio.sleep(3600)
        return self.frames.pop(0)

    async def send(self, message: Message) -> None:
        if message["type"] == self.hangs_at:
            await asyncio.sleep(3600)
        if self.error is not None and message["type"] == "websocket.send":
            raise self.error
        self.sent.append(message)

    @property
    def kinds(self) -> list[str]:
        return [message["type"] for message in self.sent]


async def ann() -> str:
    return "ann"


ASK = {"type": "response.create", "input": "Hi", "store": False}
GONE = {"type": "websocket.disconnect", "code": 1006}


async def held(kit: ResponsesKit, connection: Connection, admitted: Callable[[], Awaitable[str]] = ann) -> None:
    with anyio.fail_after(BOUND):
        await serve_websocket(kit, connection.scope, connection.receive, connection.send, admitted=admitted)


async def test_a_socket_is_accepted_and_its_frames_are_answered_whatever_they_are() -> None:
    connection = Connection(ASK, {"type": "websocket.receive", "bytes": json.dumps(ASK).encode()}, GONE)
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    gone = connection.frames.pop()

    async def send(message: Message) -> None:
        await connection.send(message)
        if "Send text frames" in message.get("text", ""):
            left.set()

    async def receive() -> Message:
        if connection.frames:
            return connection.frames.pop(0)
        await left.wait()
        return gone

    left = asyncio.Event()
    with anyio.fail_after(BOUND):
        await serve_websocket(kit, connection.scope, receive, send, admitted=ann)
    assert connection.kinds[0] == "websocket.accept"
    assert {*connection.kinds[1:]} == {"websocket.send"}
    assert sum("response.completed" in message.get("text", "") for message in connection.sent) == 1


async def test_a_client_that_leaves_before_it_is_let_in_is_asked_nothing() -> None:
    connection = Connection()
    connection.frames = [dict(GONE)]

    async def nobody() -> str:
        raise AssertionError

    await held(ResponsesKit(ScriptedBackend(["Hi"])), connection, nobody)
    assert connection.sent == []


@pytest.mark.parametrize("denial", [True, False], ids=["with a reply", "bare"])
@pytest.mark.parametrize("by", ["an error", "a reply"])
async def test_an_upgrade_may_be_refused(by: str, denial: bool) -> None:
    async def refused() -> str:
        raise errors.Unauthorized("Who?")

    connection = Connection(denial=denial)
    if by == "an error":
        await held(ResponsesKit(ScriptedBackend(["Hi"])), connection, refused)
    else:
        reply = Reply(401, {"WWW-Authenticate": "Bearer"}, b"Who?")
        await reject_websocket(connection.scope, connection.receive, connection.send, reply=reply)
    if not denial:
        assert connection.kinds == ["websocket.close"]
        return
    start, body = connection.sent
    assert (start["status"], b"Who?" in body["body"]) == (401, True)
    assert (b"content-length", str(len(body["body"])).encode()) in start["headers"]
    assert all(name == name.lower() for name, _ in start["headers"])


async def test_whoever_has_left_is_not_refused() -> None:
    connection = Connection()
    connection.frames = [dict(GONE)]
    await reject_websocket(connection.scope, connection.receive, connection.send, reply=Reply(403, {}))
    assert connection.sent == []


@pytest.mark.parametrize("error", [RuntimeError("already closed"), OSError()])
async def test_a_server_that_has_closed_the_socket_ends_the_session_and_its_response(error: Exception) -> None:
    talking = Talking()
    kit = ResponsesKit(talking)
    connection = Connection(ASK)
    connection.error = error
    await held(kit, connection)
    assert connection.kinds == ["websocket.accept"]


async def test_a_client_that_leaves_has_its_response_cancelled() -> None:
    told: list[str] = []
    kit = ResponsesKit(Talking(), on_response_end=lambda owner, response: told.append(f"{owner} {response['status']}"))
    connection, speaking = Connection(ASK), asyncio.Event()

    async def send(message: Message) -> None:
        await connection.send(message)
        if "delta" in message.get("text", ""):
            speaking.set()

    async def receive() -> Message:
        if connection.frames:
            return connection.frames.pop(0)
        await speaking.wait()
        return dict(GONE)

    with anyio.fail_after(BOUND):
        await serve_websocket(kit, connection.scope, receive, send, admitted=ann)
    assert told == ["ann cancelled"]


async def test_a_close_that_nobody_takes_is_not_waited_for_for_ever() -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), timeouts=Timeouts(websocket=0.01, send=0.05))
    connection = Connection()
    connection.hangs_at = "websocket.close"
    await held(kit, connection)
    assert connection.kinds == ["websocket.accept"] or "websocket.close" not in connection.kinds


def test_headers_have_names_in_lower_case_and_two_origins_are_none() -> None:
    scope = {"headers": [(b"X-Key", b"caf\xe9"), (b"origin", b"https://a.example")]}
    assert read_headers(scope) == {"x-key": "café", "origin": "https://a.example"}
    scope["headers"].append((b"Origin", b"https://b.example"))
    assert read_headers(scope)["origin"] == "null"


def test_a_thread_without_a_loop_cannot_enter() -> None:
    found: list[BaseException] = []

    def work() -> None:
        entering = start_kit(ResponsesKit(ScriptedBackend(["Hi"])))
        try:
            entering.send(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(BOUND)
    assert isinstance(found[0], RuntimeError)
