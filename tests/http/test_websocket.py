"""Tests of WebSocket sessions with a client in memory."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from responses_kit import Backend, Limits, ResponsesKit, Timeouts, Turn, errors, outputs
from responses_kit.engine.run import Run
from responses_kit.errors import ClientDisconnected
from responses_kit.http import websocket
from responses_kit.protocol.sse import decode_events
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_error, check_stream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class Peer:
    """The client's end of a WebSocket.

    Args:
        slow: Whether frames are delivered one at a time, only when the client reads.
    """

    def __init__(self, *, slow: bool = False) -> None:
        self._to_server, self._from_client = anyio.create_memory_object_stream[str | bytes](math.inf)
        self._to_client, self._from_server = anyio.create_memory_object_stream[str](0 if slow else math.inf)
        self.code: int | None = None
        self.ended = anyio.Event()

    # The server's side.

    async def receive(self) -> str | bytes:
        try:
            return await self._from_client.receive()
        except anyio.EndOfStream:
            raise ClientDisconnected from None

    async def write(self, text: str) -> None:
        try:
            await self._to_client.send(text)
        except anyio.BrokenResourceError:
            raise ConnectionResetError from None

    # The client's side.

    def send(self, frame: Any) -> None:
        self._to_server.send_nowait(frame if isinstance(frame, (str, bytes)) else json.dumps(frame))

    def ask(self, text: Any = "Hi", **fields: Any) -> None:
        self.send({"type": "response.create", "store": False, "input": text, **fields})

    async def next(self) -> dict[str, Any]:
        with anyio.fail_after(BOUND):
            frame: dict[str, Any] = json.loads(await self._from_server.receive())
        return frame

    async def until(self, kind: str) -> dict[str, Any]:
        while (frame := await self.next())["type"] != kind:
            pass
        return frame

    async def answer(self) -> dict[str, Any]:
        """Return the final response, after checking its events, or the error frame."""
        events: list[dict[str, Any]] = []
        while True:
            frame = await self.next()
            if frame["type"] == "error":
                assert not events
                assert set(frame) == {"type", "status", "error"}
                check_error({"error": frame["error"]})
                return frame
            events.append(frame)
            if "response" in frame and frame["response"]["status"] != "in_progress":
                return check_stream(events, error_events=False)

    async def turn(self, text: Any = "Hi", **fields: Any) -> dict[str, Any]:
        self.ask(text, **fields)
        return await self.answer()

    async def refused(self, status: int, code: str, param: str | None = None) -> dict[str, Any]:
        frame = await self.answer()
        assert frame["type"] == "error", frame
        assert (frame["status"], frame["error"]["code"], frame["error"]["param"]) == (status, code, param)
        error: dict[str, Any] = frame["error"]
        return error

    def silent(self) -> bool:
        """Return whether there is nothing to read."""
        return self._from_server.statistics().current_buffer_used == 0

    def leave(self) -> None:
        self._to_server.close()
        self._from_server.close()

    def destroy(self) -> None:
        for stream in (self._to_server, self._from_client, self._to_client, self._from_server):
            stream.close()

    async def closed(self) -> int | None:
        """Return the close code of the session."""
        with anyio.fail_after(BOUND):
            await self.ended.wait()
        return self.code


@asynccontextmanager
async def connected(kit: ResponsesKit, owner: str = "ann", *, slow: bool = False) -> AsyncIterator[Peer]:
    """Yield the client of an open session; it leaves at the end of the block."""
    peer = Peer(slow=slow)

    async def session() -> None:
        peer.code = await websocket.serve_session(kit, owner, receive=peer.receive, send=peer.write)
        peer.ended.set()

    try:
        with anyio.fail_after(4 * BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(session)
                yield peer
                peer.leave()
    finally:
        peer.destroy()


class RecordingBackend(Backend):
    """A backend that repeats its input, and records its turns."""

    models = ("watched",)

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.running = self.max_running = self.ended = 0
        self.started, self.gate = anyio.Event(), anyio.Event()

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.turns.append(turn)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        self.started.set()
        try:
            yield f"You sent {turn.text}"
            if turn.text == "wait":
                await self.gate.wait()
                yield " and waited"
            if turn.text == "fail":
                raise LookupError
            while turn.text == "talk":
                yield " more"
        finally:
            self.running -= 1
            self.ended += 1


def text_of(response: dict[str, Any]) -> str:
    assert response["status"] == "completed", response
    text: str = response["output"][0]["content"][0]["text"]
    return text


def new_kit(*script: Any, **settings: Any) -> ResponsesKit:
    return ResponsesKit(ScriptedBackend(list(script) or ["Hi."]), **settings)


# Responses.


async def test_request_is_answered_with_response_events() -> None:
    store = MemoryStore()
    kit = ResponsesKit(RecordingBackend(), store=store)
    async with connected(kit) as peer:
        response = await peer.turn("Hi", store=True)
        assert text_of(response) == "You sent Hi"
        assert peer.silent()
    assert await kit.retrieve(response["id"], owner="ann") == response
    assert peer.code is None


async def test_events_equal_those_over_http() -> None:
    script = [outputs.Reasoning("Hm."), "1 \u2028 \U0001f600 \ud83d [DONE] data: ", outputs.ToolCall("f", "{}")]
    tools = [{"type": "function", "name": "f"}]
    kit = new_kit(*script)
    async with kit.stream({"input": "Hi", "tools": tools}) as events:
        received = [event["type"] async for event in events]
    async with connected(kit) as peer:
        peer.ask(tools=tools)
        assert [(await peer.next())["type"] for _ in received] == received
        assert peer.silent()


async def test_websocket_response_can_be_resumed_over_http() -> None:
    kit = new_kit("one ", "two", resumable=True)
    async with connected(kit) as peer:
        peer.ask(store=True)
        received = []
        while not received or received[-1]["type"] != "response.completed":
            received.append(await peer.next())
        follower = await kit.service.follow(received[-1]["response"]["id"], owner="ann")
        assert decode_events(b"".join([piece async for piece in follower.pieces()])) == received


async def test_frames_are_single_lines_of_text() -> None:
    async with connected(new_kit("a\nb")) as peer:
        peer.ask()
        text = ""
        while '"response.completed"' not in text:
            text = await peer._from_server.receive()
            assert text.isascii()
            assert (text[0], text[-1]) == ("{", "}")
            assert "\n" not in text


async def test_requests_are_answered_in_order() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend)) as peer:
        peer.ask("wait")
        for number in range(20):
            peer.ask(f"{number}")
        await peer.until("response.output_text.delta")
        backend.gate.set()
        await peer.until("response.completed")
        for number in range(20):
            assert text_of(await peer.answer()) == f"You sent {number}"
    assert backend.max_running == 1


async def test_websockets_are_independent() -> None:
    backend = RecordingBackend()
    kit = ResponsesKit(backend)
    async with connected(kit) as one, connected(kit) as other:
        one.ask("wait")
        await one.until("response.output_text.delta")
        assert text_of(await other.turn("Hi")) == "You sent Hi"
        backend.gate.set()
        await one.until("response.completed")


async def test_http_only_fields_are_ignored() -> None:
    async with connected(ResponsesKit(RecordingBackend())) as peer:
        for fields in (
            {"stream": True},
            {"stream": False},
            {"stream": None, "background": None},
            {"stream_options": {"include_obfuscation": True}, "background": False},
            {"stream": "yes", "stream_options": 1, "stream_id": "lane", "client_metadata": {"a": "b"}},
        ):
            assert text_of(await peer.turn("Hi", **fields)) == "You sent Hi"


async def test_background_responses_are_refused() -> None:
    async with connected(new_kit()) as peer:
        peer.ask(background=True, store=True)
        await peer.refused(400, "unsupported_parameter", "background")


BAD_FRAMES: list[tuple[Any, int, str, str | None]] = [
    ("", 400, "invalid_json", None),
    ("{", 400, "invalid_json", None),
    ("\ud83d", 400, "invalid_json", None),
    ('{"type": "response.create", "input": "Hi", "temperature": NaN}', 400, "invalid_json", None),
    ("[]", 400, "invalid_request", None),
    ("null", 400, "invalid_request", None),
    ('"response.create"', 400, "invalid_request", None),
    (b"", 400, "invalid_request", None),
    (b'{"type": "response.create", "input": "Hi"}', 400, "invalid_request", None),
    ({}, 400, "invalid_request", "type"),
    ({"input": "Hi"}, 400, "invalid_request", "type"),
    ({"type": "response.cancel"}, 400, "invalid_request", "type"),
    ({"type": ["response.create"], "input": "Hi"}, 400, "invalid_request", "type"),
    ({"type": "response.create", "input": 1}, 400, "invalid_request", "input"),
    ({"type": "response.create", "input": "Hi", "generate": 0}, 400, "invalid_request", "generate"),
    ({"type": "response.create", "input": "Hi", "generate": "no"}, 400, "invalid_request", "generate"),
    ({"type": "response.create", "input": "Hi", "model": "other"}, 400, "model_not_found", "model"),
    ("x" * 3000, 413, "payload_too_large", None),
    ("\u00e9" * 1500, 413, "payload_too_large", None),
]


@pytest.mark.parametrize(("frame", "status", "code", "param"), BAD_FRAMES)
async def test_websocket_survives_bad_frame_with_error(frame: Any, status: int, code: str, param: str | None) -> None:
    async with connected(ResponsesKit(RecordingBackend(), limits=Limits(max_body_bytes=2500))) as peer:
        peer.send(frame)
        error = await peer.refused(status, code, param)
        assert "x" * 50 not in error["message"]
        assert text_of(await peer.turn("Hi")) == "You sent Hi"


async def test_bad_frames_are_answered_in_order() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend)) as peer:
        peer.ask("wait")
        peer.send(b"binary")
        peer.send("{")
        peer.ask("Hi")
        await peer.until("response.output_text.delta")
        assert peer.silent()
        backend.gate.set()
        await peer.until("response.completed")
        await peer.refused(400, "invalid_request")
        await peer.refused(400, "invalid_json")
        assert text_of(await peer.answer()) == "You sent Hi"


async def test_too_many_waiting_requests_are_refused() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend)) as peer:
        peer.ask("wait")
        with anyio.fail_after(BOUND):
            await backend.started.wait()
        for number in range(100):
            peer.ask(f"{number}")
        await anyio.wait_all_tasks_blocked()
        backend.gate.set()
        await peer.until("response.completed")
        for number in range(32):
            assert text_of(await peer.answer()) == f"You sent {number}"
        for _ in range(68):
            await peer.refused(429, "too_many_requests")
        assert text_of(await peer.turn("again")) == "You sent again"
    assert len(backend.turns) == 34


async def test_waiting_requests_are_bounded_in_bytes() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend, limits=Limits(max_body_bytes=10_000))) as peer:
        peer.ask("wait")
        with anyio.fail_after(BOUND):
            await backend.started.wait()
        for number in range(4):
            peer.ask(f"{number}" * 4_000)
        peer.ask("small")
        await anyio.wait_all_tasks_blocked()
        backend.gate.set()
        await peer.until("response.completed")
        assert text_of(await peer.answer()) == "You sent " + "0" * 4_000
        assert text_of(await peer.answer()) == "You sent " + "1" * 4_000
        await peer.refused(429, "too_many_requests")
        await peer.refused(429, "too_many_requests")
        assert text_of(await peer.answer()) == "You sent small"
        for _ in range(3):
            assert len(text_of(await peer.turn("2" * 4_000))) > 4_000


# Endings.


async def test_failed_response_sends_one_terminal_frame() -> None:
    async with connected(new_kit("half ", LookupError())) as peer:
        response = await peer.turn()
        assert (response["status"], response["error"]["code"]) == ("failed", "model_error")
        assert peer.silent()


async def test_failing_final_save_sends_one_terminal_frame() -> None:
    class Broken(MemoryStore):
        async def update(self, *args: Any, **more: Any) -> bool:
            raise ConnectionError

    async with connected(new_kit(store=Broken())) as peer:
        response = await peer.turn(store=True)
        assert (response["status"], response["error"]["code"]) == ("failed", "store_error")
        assert peer.silent()


async def test_refused_request_sends_error_frame() -> None:
    class Full(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            raise errors.TooManyRequests("All slots are taken.")

    async with connected(ResponsesKit(Full(["Hi."]))) as peer:
        peer.ask()
        await peer.refused(429, "too_many_requests")
        assert peer.silent()


async def test_internal_error_sends_error_frame_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(ScriptedBackend):
        @property
        def models(self) -> Any:
            if self.fails:
                raise LookupError("hunter2")
            return ["scripted"]

        @models.setter
        def models(self, value: Any) -> None:
            self.fails = False

    kit = ResponsesKit(backend := Odd(["Hi."]))
    backend.fails = True
    async with connected(kit) as peer:
        peer.ask()
        error = await peer.refused(500, "server_error")
        assert "hunter2" not in error["message"]
    assert "the request failed" in caplog.text


@pytest.mark.parametrize("reason", ["max_output_tokens", "content_filter"])
async def test_incomplete_response_sends_incomplete_event(reason: Any) -> None:
    async with connected(new_kit("Once", outputs.Finish(reason))) as peer:
        response = await peer.turn()
        assert response["incomplete_details"] == {"reason": reason}


async def test_deleted_or_cancelled_response_ends() -> None:
    kit = ResponsesKit(RecordingBackend())
    async with connected(kit) as peer:
        for ending in (kit.cancel, kit.delete):
            peer.ask("wait", store=True)
            created = await peer.until("response.created")
            await peer.until("response.output_text.delta")
            await ending(created["response"]["id"], owner="ann")
            last = await peer.until("response.incomplete")
            assert last["response"]["status"] == "cancelled"
            await anyio.wait_all_tasks_blocked()
            assert peer.silent()
            assert text_of(await peer.turn("Hi")) == "You sent Hi"


async def test_response_without_terminal_event_ends_with_error_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async def execute(run: Run, emit: Any) -> None:
        await emit(run.state_machine.start())

    monkeypatch.setattr(Run, "execute", execute)
    async with connected(new_kit()) as peer:
        peer.ask()
        await peer.until("response.in_progress")
        assert (await peer.next())["error"]["code"] == "server_error"


# Continuing.


async def test_unstored_response_is_continued_on_its_websocket_only() -> None:
    backend = RecordingBackend()
    store = MemoryStore()
    kit = ResponsesKit(backend, store=store)
    async with connected(kit) as peer, connected(kit) as other, connected(kit, "bob") as other_peer:
        first = await peer.turn("one")
        second = await peer.turn("two", previous_response_id=first["id"])
        await peer.turn("three", previous_response_id=second["id"])
        texts = [message["content"] for message in backend.turns[-1].messages()]
        assert texts == ["one", "You sent one", "two", "You sent two", "three"]
        assert len(store) == 0
        for caller in (other, other_peer):
            caller.ask(previous_response_id=first["id"])
            await caller.refused(400, "previous_response_not_found", "previous_response_id")
        with pytest.raises(errors.PreviousResponseNotFound):
            await kit.create({"input": "Hi", "previous_response_id": first["id"]}, owner="ann")
        with pytest.raises(errors.NotFound):
            await kit.retrieve(first["id"], owner="ann")
    async with connected(kit) as peer:
        peer.ask(previous_response_id=first["id"])
        await peer.refused(400, "previous_response_not_found", "previous_response_id")


async def test_stored_conversation_is_continued_unstored() -> None:
    backend = RecordingBackend()
    store = MemoryStore()
    kit = ResponsesKit(backend, store=store)
    first = await kit.create({"input": "one"}, owner="ann")
    async with connected(kit) as peer, connected(kit, "bob") as other_peer:
        second = await peer.turn("two", previous_response_id=first["id"])
        await peer.turn("three", previous_response_id=second["id"])
        texts = [message["content"] for message in backend.turns[-1].messages()]
        assert texts == ["one", "You sent one", "two", "You sent two", "three"]
        assert len(store) == 1
        other_peer.ask(previous_response_id=first["id"])
        await other_peer.refused(400, "previous_response_not_found", "previous_response_id")


async def test_stored_and_unstored_items_can_be_referenced() -> None:
    backend = RecordingBackend()
    kit = ResponsesKit(backend)
    kept = await kit.create({"input": "kept"}, owner="ann")
    async with connected(kit) as peer, connected(kit) as other:
        local = await peer.turn("local")
        references = [{"type": "item_reference", "id": response["output"][0]["id"]} for response in (kept, local)]
        await peer.turn([*references, {"role": "user", "content": "Hi"}])
        texts = [message["content"] for message in backend.turns[-1].messages()]
        assert texts == ["You sent kept", "You sent local", "Hi"]
        other.ask(references)
        await other.refused(400, "item_not_found", "input[1].id")


@pytest.mark.parametrize(
    "failing",
    [
        {"text": [{"type": "function_call_output", "call_id": "call_missing", "output": "?"}]},
        {"text": "fail"},
        {"text": "Hi", "temperature": 99},
        {"text": "Hi", "background": True},
        {"text": "Hi", "model": "other"},
    ],
)
async def test_failed_continuation_evicts_previous_response(failing: dict[str, Any]) -> None:
    kit = ResponsesKit(RecordingBackend())
    stored = await kit.create({"input": "one"}, owner="ann")
    async with connected(kit) as peer:
        first = await peer.turn("one")
        other = await peer.turn("two")
        answer = await peer.turn(**failing, previous_response_id=first["id"])
        assert answer.get("type") == "error" or answer["status"] == "failed"
        peer.ask("Hi", previous_response_id=first["id"])
        await peer.refused(400, "previous_response_not_found", "previous_response_id")
        assert text_of(await peer.turn("Hi", previous_response_id=other["id"])) == "You sent Hi"
        # Stored responses are not evicted.
        await peer.turn(**failing, previous_response_id=stored["id"])
        assert text_of(await peer.turn("Hi", previous_response_id=stored["id"])) == "You sent Hi"


async def test_websocket_memory_is_bounded() -> None:
    async with connected(ResponsesKit(RecordingBackend())) as peer:
        first = await peer.turn("x" * 1_000_000)
        for _ in range(16):
            await peer.turn("x" * 1_000_000)
        peer.ask("Hi", previous_response_id=first["id"])
        await peer.refused(400, "previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize(("input_kilobytes", "output_kilobytes"), [(200, 1), (1, 200)])
async def test_response_too_large_for_memory_is_answered(
    monkeypatch: pytest.MonkeyPatch, input_kilobytes: int, output_kilobytes: int
) -> None:
    monkeypatch.setattr(websocket, "_MAX_LOCAL_BYTES", 100_000)
    async with connected(ResponsesKit(ScriptedBackend(["y" * 1_000] * output_kilobytes, ["Hi."]))) as peer:
        first = await peer.turn("x" * 1_000 * input_kilobytes)
        assert first["status"] == "completed"
        peer.ask("Hi", previous_response_id=first["id"])
        await peer.refused(400, "previous_response_not_found", "previous_response_id")
        second = await peer.turn("Hi")
        assert (await peer.turn("Hi", previous_response_id=second["id"]))["status"] == "completed"


async def test_warm_up_generates_nothing_and_can_be_continued() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend)) as peer:
        warm_up = await peer.turn("one", generate=False)
        assert (warm_up["status"], warm_up["output"]) == ("completed", [])
        assert not backend.turns
        assert text_of(await peer.turn("two", previous_response_id=warm_up["id"], generate=True)) == "You sent two"
        assert [message["content"] for message in backend.turns[-1].messages()] == ["one", "two"]


# Disconnects and closing.


@pytest.mark.parametrize("text", ["wait", "talk"])
async def test_disconnect_ends_response(text: str) -> None:
    backend, store = RecordingBackend(), MemoryStore()
    async with connected(ResponsesKit(backend, store=store)) as peer:
        peer.ask(text, store=True)
        peer.ask("never")
        created = await peer.until("response.created")
        await peer.until("response.output_text.delta")
        peer.leave()
        assert await peer.closed() is None
    assert (backend.running, backend.ended) == (0, 1)
    record = await store.get("ann", created["response"]["id"])
    assert record is not None
    assert record.final
    assert json.loads(record.response)["status"] == "cancelled"


async def test_disconnect_before_response_ends_wait() -> None:
    class Full(ScriptedBackend):
        def __init__(self) -> None:
            super().__init__(["Hi."])
            self.waiting = anyio.Event()

        async def admit(self, turn: Turn) -> None:
            self.waiting.set()
            await anyio.sleep_forever()

    backend = Full()
    async with connected(ResponsesKit(backend)) as peer:
        peer.ask()
        with anyio.fail_after(BOUND):
            await backend.waiting.wait()
        peer.leave()
        assert await peer.closed() is None


async def test_broken_websocket_is_disconnect() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend)) as peer:
        peer.ask("talk")
        await peer.until("response.output_text.delta")
        peer._from_server.close()
        assert await peer.closed() is None
    assert backend.running == 0


async def test_unread_websocket_is_disconnect() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend, timeouts=Timeouts(send=0.1)), slow=True) as peer:
        peer.ask("talk")
        await peer.until("response.created")
        assert await peer.closed() is None
    assert backend.running == 0


async def test_slow_client_receives_everything() -> None:
    async with connected(new_kit(*(f"{number} " for number in range(50))), slow=True) as peer:
        response = await peer.turn()
        assert text_of(response) == "".join(f"{number} " for number in range(50))


async def test_unreadable_websocket_ends_session(caplog: pytest.LogCaptureFixture) -> None:
    async def receive() -> str:
        raise RuntimeError("no such socket")

    async def send(text: str) -> None:
        raise AssertionError

    with anyio.fail_after(BOUND):
        assert await websocket.serve_session(new_kit(), "", receive=receive, send=send) is None
    assert "receiving from a WebSocket failed" in caplog.text


@pytest.mark.parametrize("frame", ['{"type": "response.create", "input": "Hi"}', "{"])
async def test_unwritable_websocket_ends_session(caplog: pytest.LogCaptureFixture, frame: str) -> None:
    peer = Peer()
    peer.send(frame)

    async def send(text: str) -> None:
        raise RuntimeError("no such socket")

    with anyio.fail_after(BOUND):
        assert await websocket.serve_session(new_kit(), "", receive=peer.receive, send=send) is None
    assert "sending to a WebSocket failed" in caplog.text
    peer.destroy()


async def test_nothing_is_sent_after_disconnect() -> None:
    frames = [json.dumps({"type": "response.create", "input": "talk"})]
    sent_enough, has_left, sent = anyio.Event(), False, 0

    async def receive() -> str:
        nonlocal has_left
        if frames:
            return frames.pop()
        await sent_enough.wait()
        has_left = True
        raise ClientDisconnected

    async def send(text: str) -> None:  # without waiting, as servers send while their buffers have room
        nonlocal sent
        assert not has_left
        sent += 1
        if sent == 100:
            sent_enough.set()

    backend = RecordingBackend()
    with anyio.fail_after(BOUND):
        assert await websocket.serve_session(ResponsesKit(backend), "", receive=receive, send=send) is None
    assert sent >= 100
    assert backend.running == 0


async def test_disconnect_stops_thread_during_send() -> None:
    class InThread(Backend):
        models = ("in-thread",)

        def __init__(self) -> None:
            self.ahead, self.ended = threading.Event(), threading.Event()

        def generate(self, turn: Turn) -> Iterator[str]:
            try:
                while not turn.cancelled:
                    yield from ["more"] * 10
                    self.ahead.set()
            finally:
                self.ended.set()

    backend, peer, sending, ready = InThread(), Peer(), anyio.Event(), anyio.Event()
    deltas = 0

    async def send(text: str) -> None:
        nonlocal deltas
        if "response.output_text.delta" in text:
            deltas += 1
            with anyio.move_on_after(2 * BOUND, shield=True):  # some servers shield sending, so that frames stay whole
                if deltas == 1:  # so that the next deltas are sent together
                    await anyio.to_thread.run_sync(backend.ahead.wait, BOUND)
                if deltas == 2:
                    sending.set()
                    await ready.wait()

    async def session() -> None:
        assert await websocket.serve_session(ResponsesKit(backend), "", receive=peer.receive, send=send) is None

    peer.ask()
    with anyio.fail_after(2 * BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(session)
            await sending.wait()
            peer.leave()
            stopped = await anyio.to_thread.run_sync(backend.ended.wait, BOUND)
            ready.set()
    peer.destroy()
    assert stopped
    assert deltas == 2


async def test_cancelled_host_ends_response() -> None:
    backend, store = RecordingBackend(), MemoryStore()
    peer = Peer()
    peer.ask("wait", store=True)
    async with anyio.create_task_group() as group:

        async def session() -> None:
            await websocket.serve_session(ResponsesKit(backend, store=store), "", receive=peer.receive, send=peer.write)

        group.start_soon(session)
        created = await peer.until("response.created")
        await peer.until("response.output_text.delta")
        group.cancel_scope.cancel()
    record = await store.get("", created["response"]["id"])
    assert record is not None
    assert record.final
    peer.destroy()


async def test_websocket_is_closed_at_timeout() -> None:
    async with connected(new_kit(timeouts=Timeouts(websocket=0.2))) as peer:
        assert text_of(await peer.turn()) == "Hi."
        await peer.refused(400, "websocket_connection_limit_reached")
        assert await peer.closed() == 1000
        assert peer.silent()


async def test_running_response_finishes_after_websocket_timeout() -> None:
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend, timeouts=Timeouts(websocket=0.1))) as peer:
        peer.ask("wait")
        peer.ask("too late")
        await peer.until("response.output_text.delta")
        await anyio.sleep(0.2)  # longer than the session's time limit
        assert not peer.ended.is_set()
        backend.gate.set()
        await peer.until("response.completed")
        await peer.refused(400, "websocket_connection_limit_reached")
        assert await peer.closed() == 1000
    assert len(backend.turns) == 1


async def test_running_response_is_stopped_after_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_GRACE_TIMEOUT", 0.1)
    backend = RecordingBackend()
    async with connected(ResponsesKit(backend, timeouts=Timeouts(websocket=0.1))) as peer:
        peer.ask("wait")
        assert (await peer.until("error"))["error"]["code"] == "websocket_connection_limit_reached"
        assert await peer.closed() == 1000
    assert backend.running == 0


async def test_idle_websockets_are_closed_at_shutdown() -> None:
    kit = new_kit()
    async with connected(kit) as peer, connected(kit) as other:
        await peer.turn()
        await anyio.wait_all_tasks_blocked()
        await kit.aclose()
        assert await peer.closed() == 1001
        assert await other.closed() == 1001
        assert peer.silent()


async def test_running_responses_fail_at_shutdown() -> None:
    backend = RecordingBackend()
    kit = ResponsesKit(backend)
    async with connected(kit) as peer:
        peer.ask("wait")
        peer.ask("too late")
        await peer.until("response.output_text.delta")
        await kit.aclose()
        failed = await peer.until("response.failed")
        assert failed["response"]["error"]["code"] == "server_error"
        assert await peer.closed() == 1001
        assert peer.silent()
    assert len(backend.turns) == 1
    with pytest.raises(errors.WebSocketsUnavailable) as refused:
        await websocket.authorize(kit, None, {})
    assert refused.value.status == 503


async def test_number_of_websockets_is_limited() -> None:
    kit = new_kit(limits=Limits(max_websockets=2))
    async with connected(kit) as one:
        async with connected(kit) as two:
            await one.turn()
            await two.turn()
            with pytest.raises(errors.WebSocketsUnavailable) as refused:
                await websocket.authorize(kit, None, {})
            assert refused.value.status == 503
            async with connected(kit) as three:
                assert await three.closed() == 1013
            assert await websocket.authorize(new_kit(), None, {}) == ""
        assert await websocket.authorize(kit, None, {}) == ""
        async with connected(kit) as three:
            assert text_of(await three.turn()) == "Hi."


# Authorization.


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "is_allowed"),
    [
        (None, "api.example", (), True),
        ("http://api.example", "api.example", (), True),
        ("https://api.example", "api.example", (), True),
        ("https://API.example", "api.Example", (), True),
        ("https://api.example", "api.example:443", (), True),
        ("http://localhost:8000", "localhost:8000", (), True),
        ("http://[::1]:8000", "[::1]:8000", (), True),
        ("http://api.example:80", "api.example", (), True),
        ("http://evil.example", "api.example", (), False),
        ("http://api.example.evil.example", "api.example", (), False),
        ("http://localhost:3000", "localhost:8000", (), False),
        ("http://api.example", "api.example:8000", (), False),
        ("null", "api.example", (), False),
        ("", "api.example", (), False),
        ("", "", (), False),
        ("http://", "", (), False),
        ("file://", "", (), False),
        ("http://localhost:3000", "localhost:8000", ("http://localhost:3000",), True),
        ("http://localhost:3000", "localhost:8000", ("http://LOCALHOST:3000/",), True),
        ("https://localhost:3000", "localhost:8000", ("http://localhost:3000",), False),
        ("tauri://localhost", "localhost:8000", ("tauri://localhost",), True),
        ("null", "api.example", ("null",), True),
        ("http://evil.example", "api.example", ("*",), True),
    ],
)
async def test_foreign_origin_is_refused(
    origin: str | None, host: str, allowed: tuple[str, ...], is_allowed: bool
) -> None:
    kit = new_kit(allowed_origins=allowed)
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    if is_allowed:
        assert await websocket.authorize(kit, None, headers) == ""
    else:
        with pytest.raises(errors.Forbidden) as refused:
            await websocket.authorize(kit, None, headers)
        assert refused.value.code == "origin_not_allowed"


async def test_owner_hook_names_owner_of_websocket() -> None:
    def owner(host: str) -> str | None:
        if host == "anonymous":
            return None
        if host == "banned":
            raise errors.Forbidden("This user is blocked.")
        if host == "teapot":
            raise ValueError(host)
        if host == "broken":
            raise LookupError(host)
        return host

    def translate(error: Exception) -> errors.APIError | None:
        return errors.NotFound("No.") if isinstance(error, ValueError) else None

    kit = new_kit(owner=owner)
    assert await websocket.authorize(kit, "ann", {}, translate_error=translate) == "ann"
    for host, kind in {
        "anonymous": errors.Unauthorized,
        "banned": errors.Forbidden,
        "teapot": errors.NotFound,
        "broken": errors.ServerError,
    }.items():
        with pytest.raises(kind) as refused:
            await websocket.authorize(kit, host, {}, translate_error=translate)
        assert "broken" not in str(refused.value)


async def test_http_origin_is_foreign_over_tls() -> None:
    """A page without TLS can be forged on the network, and would act with the user's cookies."""
    kit = new_kit()
    for origin, is_allowed in (("https://a.example", True), ("http://a.example", False)):
        with nullcontext() if is_allowed else pytest.raises(errors.Forbidden):
            await websocket.authorize(kit, None, {"host": "a.example", "origin": origin}, is_secure=True)
