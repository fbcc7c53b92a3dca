"""Tests of the bridge between a synchronous host's thread and the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from responses_kit import Backend, Limits, ResponsesKit, Timeouts, Turn, errors
from responses_kit._concurrency import loop_thread
from responses_kit.adapters import wsgi_bridge
from responses_kit.adapters.wsgi_bridge import WSGIBridge
from responses_kit.http.messages import Reply, Request, Send
from responses_kit.http.open_responses import OpenResponses
from responses_kit.protocol.sse import KEEP_ALIVE, decode_events
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_stream

pytestmark = pytest.mark.timeout(60)

BOUND = 10.0

LOOP = "responses-kit"
"""The name of the loop's thread."""

variable: contextvars.ContextVar[str] = contextvars.ContextVar("mood", default="none")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until, "the condition does not hold"
        time.sleep(0.002)


def reply_with(body: bytes = b"") -> Reply:
    return Reply(200, {}, body)


def reply_with_stream(stream: Callable[[Send], Awaitable[None]]) -> Callable[[], Any]:
    """Return a coroutine function that replies with a stream."""

    async def respond() -> Reply:
        return Reply(200, {}, stream=stream)

    return respond


class Probe:
    """A coroutine that waits, and records its start and its cleanup after a cancellation."""

    def __init__(self) -> None:
        self.started, self.done = threading.Event(), threading.Event()

    async def wait(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            self.done.set()


# The reply.


def test_reply_is_made_on_loop_and_returned_to_host_thread() -> None:
    async def respond() -> Reply:
        return reply_with(threading.current_thread().name.encode())

    reply = WSGIBridge().start(respond)
    assert reply is not None
    assert reply.body.decode() == LOOP


def test_host_functions_run_in_host_thread_in_order() -> None:
    calls: list[tuple[int, Any]] = []
    bridge = WSGIBridge()

    def hook(request: Any) -> str:
        calls.append((threading.get_ident(), request))
        return f"owner of {request}"

    async def respond() -> Reply:
        first = await bridge.call(hook, 1)
        both = await asyncio.gather(bridge.call(hook, 2), bridge.call(hook, 3))
        return reply_with(" ".join([first, *both]).encode())

    reply = bridge.start(respond)
    assert reply is not None
    assert reply.body == b"owner of 1 owner of 2 owner of 3"
    assert calls == [(threading.get_ident(), number) for number in (1, 2, 3)]


def test_exception_of_host_function_is_raised_on_loop() -> None:
    bridge = WSGIBridge()

    def hook(request: Any) -> None:
        raise LookupError("no such user")

    async def respond() -> Reply:
        with pytest.raises(LookupError, match="no such user"):
            await bridge.call(hook, None)
        return reply_with(b"caught")

    reply = bridge.start(respond)
    assert reply is not None
    assert reply.body == b"caught"


def test_host_context_is_visible_to_host_functions_only() -> None:
    token = variable.set("the host's")
    bridge = WSGIBridge()

    async def respond() -> Reply:
        here = variable.get()
        there = await bridge.call(lambda request: variable.get(), None)
        return reply_with(f"{here}, {there}".encode())

    try:
        reply = bridge.start(respond)
    finally:
        variable.reset(token)
    assert reply is not None
    assert reply.body == b"none, the host's"


class WorkerTimeout(BaseException):
    """The exception that a server raises in a thread after its timeout."""


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), WorkerTimeout()])
def test_exception_in_host_thread_aborts_request(error: BaseException) -> None:
    bridge, probe = WSGIBridge(), Probe()

    def hook(request: Any) -> None:
        raise error

    async def respond() -> Reply:
        hook_call = asyncio.create_task(bridge.call(hook, None))
        try:
            await probe.wait()
        finally:
            hook_call.cancel()
        return reply_with()

    with pytest.raises(type(error)):
        bridge.start(respond)
    assert probe.done.wait(BOUND)


def test_disconnect_before_reply_aborts_request() -> None:
    probe = Probe()

    async def respond() -> Reply:
        await probe.wait()
        return reply_with()

    assert WSGIBridge(probe.started.is_set).start(respond) is None
    assert probe.done.is_set()  # `start` waited for it


def test_disconnect_is_polled_in_host_thread() -> None:
    checks: list[int] = []

    def has_left() -> bool:
        checks.append(threading.get_ident())
        return len(checks) == 2

    async def respond() -> Reply:
        await asyncio.sleep(3600)
        return reply_with()

    started = time.monotonic()
    assert WSGIBridge(has_left).start(respond) is None
    assert checks == [threading.get_ident()] * 2
    assert time.monotonic() - started > wsgi_bridge._DISCONNECT_POLL_INTERVAL


def test_disconnect_before_loop_starts_is_not_awaited() -> None:
    """A backend may block the loop."""
    busy = threading.Event()

    async def keep_busy() -> None:
        busy.set()
        time.sleep(3 * wsgi_bridge._DISCONNECT_POLL_INTERVAL)  # noqa: ASYNC251  # to block the loop

    async def respond() -> Reply:
        await asyncio.sleep(3600)
        return reply_with()

    keeping = loop_thread.submit(keep_busy())
    assert busy.wait(BOUND)
    started = time.monotonic()
    assert WSGIBridge(lambda: True).start(respond) is None
    assert time.monotonic() - started < wsgi_bridge._CLOSE_TIMEOUT
    keeping.result(BOUND)


def test_failing_disconnect_check_aborts_request() -> None:
    probe = Probe()

    def has_left() -> bool:
        raise OSError("no such socket")

    async def respond() -> Reply:
        await probe.wait()
        return reply_with()

    with pytest.raises(OSError, match="no such socket"):
        WSGIBridge(has_left).start(respond)
    assert probe.done.wait(BOUND)


def test_host_thread_is_released_from_hanging_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_CLOSE_TIMEOUT", 0.05)
    proceed = threading.Event()

    async def respond() -> Reply:
        while not proceed.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return reply_with()

    try:
        assert WSGIBridge(lambda: True).start(respond) is None
    finally:
        proceed.set()


def test_failing_request_is_not_disconnect() -> None:
    async def respond() -> Reply:
        raise LookupError("unexpected")

    with pytest.raises(LookupError):
        WSGIBridge().start(respond)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_system_exit_on_loop_ends_its_request_only(error: BaseException) -> None:
    """As by an async hook that calls `sys.exit`."""

    async def respond() -> Reply:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        WSGIBridge().start(respond)
    loop = loop_thread.event_loop()
    assert loop_thread.call(asyncio.sleep, 0, "still here") == "still here"
    assert loop_thread.event_loop() is loop


# The stream.


def test_each_piece_is_delivered_at_once() -> None:
    proceed = threading.Semaphore(0)

    async def stream(send: Send) -> None:
        for number in range(3):
            await send(b"piece %d\n\n" % number)
            await asyncio.to_thread(proceed.acquire)

    bridge = WSGIBridge()
    assert bridge.start(reply_with_stream(stream)) is not None
    for number in range(3):
        assert next(bridge) == b"piece %d\n\n" % number
        proceed.release()
    assert list(bridge) == []
    assert list(bridge) == []
    bridge.close()


def test_pending_pieces_are_joined_and_bounded() -> None:
    sent: list[int] = []

    async def stream(send: Send) -> None:
        for number in range(100):
            await send(b"%02d\n\n" % number)
            sent.append(number)

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    wait_until(lambda: len(sent) >= wsgi_bridge._MAX_PENDING_PIECES)
    loop_thread.call(asyncio.sleep, 0.01)
    assert len(sent) == wsgi_bridge._MAX_PENDING_PIECES
    pieces = list(bridge)
    assert b"".join(pieces) == b"".join(b"%02d\n\n" % number for number in range(100))
    assert all(piece.endswith(b"\n\n") for piece in pieces)
    bridge.close()


def test_concurrent_writers_lose_no_pieces() -> None:
    async def stream(send: Send) -> None:
        async def write(name: bytes) -> None:
            for _ in range(200):
                await send(name)

        await asyncio.gather(write(b"a"), write(b"b"), write(b"c"))

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    content = b"".join(bridge)
    assert sorted(content) == sorted(b"abc" * 200)


def test_last_piece_is_delivered_to_late_reader() -> None:
    ended = threading.Event()

    async def stream(send: Send) -> None:
        await send(b"one ")
        await send(b"two")
        ended.set()

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    assert ended.wait(BOUND)
    assert b"".join(bridge) == b"one two"


def test_failing_stream_ends_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def stream(send: Send) -> None:
        await send(b"one")
        raise LookupError("interrupted")

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    assert list(bridge) == [b"one"]
    bridge.close()
    wait_until(lambda: "interrupted" in caplog.text)
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("times", [0, 1])
def test_early_close_ends_stream_and_waits(times: int) -> None:
    probe = Probe()

    async def stream(send: Send) -> None:
        await send(b"one")
        await probe.wait()

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    for _ in range(times):
        assert next(bridge) == b"one"
    bridge.close()
    assert probe.done.is_set() or not probe.started.is_set()
    assert list(bridge) == []
    bridge.close()


def test_unstarted_stream_can_be_closed() -> None:
    WSGIBridge().close()


def test_close_ends_stream_waiting_for_reader() -> None:
    probe = Probe()

    async def stream(send: Send) -> None:
        try:
            while True:
                await send(b"x")
        finally:
            probe.done.set()

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    wait_until(lambda: len(bridge._pieces) == wsgi_bridge._MAX_PENDING_PIECES)
    bridge.close()
    assert probe.done.is_set()


def test_close_from_other_thread_ends_reader() -> None:
    probe = Probe()

    async def stream(send: Send) -> None:
        await send(b"one")
        await probe.wait()

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, bridge)
        assert probe.started.wait(BOUND)
        bridge.close()
        assert reading.result(BOUND) == [b"one"]
    assert probe.done.is_set()


def test_stream_can_be_closed_twice_concurrently() -> None:
    probe = Probe()

    async def stream(send: Send) -> None:
        await send(b"one")
        await probe.wait()

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    assert next(bridge) == b"one"
    with ThreadPoolExecutor(2) as pool:
        for closing in [pool.submit(bridge.close) for _ in range(2)]:
            closing.result(wsgi_bridge._CLOSE_TIMEOUT / 2)
    assert probe.done.is_set()


def test_slow_close_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_CLOSE_TIMEOUT", 0.05)
    proceed = threading.Event()

    async def stream(send: Send) -> None:
        await send(b"one")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.to_thread(proceed.wait, BOUND)

    bridge = WSGIBridge()
    bridge.start(reply_with_stream(stream))
    assert next(bridge) == b"one"
    started = time.monotonic()
    bridge.close()
    assert time.monotonic() - started < BOUND
    proceed.set()
    assert list(bridge) == []


def test_disconnect_from_idle_stream_ends_it() -> None:
    probe = Probe()

    async def stream(send: Send) -> None:
        await send(b"one")
        await probe.wait()

    bridge = WSGIBridge(probe.started.is_set)
    bridge.start(reply_with_stream(stream))
    assert list(bridge) == [b"one"]
    assert probe.done.is_set()


# Kits.


class EndlessBackend(Backend):
    """A backend that yields outputs until it is closed; the model "silent" yields one, and then waits."""

    models = ("talking", "silent", "brief")

    def __init__(self) -> None:
        self.running = 0
        self.turns: list[Turn] = []

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.running += 1
        self.turns.append(turn)
        try:
            yield "on "
            while turn.model != "brief":
                await asyncio.sleep(0.001 if turn.model == "talking" else 3600)
                yield "and on "
        finally:
            self.running -= 1


class ThreadedEndlessBackend(EndlessBackend):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def generate(self, turn: Turn) -> Iterator[str]:  # type: ignore[override]  # allowed for backends
        with self._lock:
            self.running += 1
            self.turns.append(turn)
        try:
            yield "on "
            while turn.model != "brief" and not turn.cancelled:
                time.sleep(0.001)
                if turn.model == "talking":
                    yield "and on "
        finally:
            with self._lock:
                self.running -= 1


@pytest.fixture
def kits() -> Iterator[Callable[..., ResponsesKit]]:
    """Return a function that creates and starts kits; they are stopped after the test."""
    created: list[ResponsesKit] = []

    def make(backend: Backend, *, grace: float = 0.0, **settings: Any) -> ResponsesKit:
        kit = ResponsesKit(backend, **settings)
        created.append(kit)
        loop_thread.start_kit(kit, grace=grace)
        return kit

    yield make
    for kit in created:
        loop_thread.stop_kit(kit)


def ask(kit: ResponsesKit, bridge: WSGIBridge, body: str, *, host: Any = None, method: str = "POST") -> Reply | None:
    """Handle a request as a host does that has already read the body."""

    async def read() -> bytes:
        return body.encode()

    request = Request(method, "/responses", read=read, host_request=host, call_hook=bridge.call)
    return bridge.start(lambda: OpenResponses(kit).handle(request))


def status(kit: ResponsesKit, turn: Turn) -> str:
    response: dict[str, Any] = loop_thread.call(lambda: kit.retrieve(turn.response_id))
    return str(response["status"])


def test_whole_stream_is_valid(kits: Callable[..., ResponsesKit]) -> None:
    bridge = WSGIBridge()
    reply = ask(kits(ScriptedBackend(["Hello, ", "world."])), bridge, '{"input": "Hi", "stream": true}')
    assert reply is not None
    assert reply.status == 200
    content = b"".join(bridge)
    assert content.endswith(b"data: [DONE]\n\n")
    assert check_stream(decode_events(content.removesuffix(b"data: [DONE]\n\n")))["status"] == "completed"


@pytest.mark.parametrize("backend", [EndlessBackend, ThreadedEndlessBackend])
def test_close_closes_backend(backend: type[EndlessBackend], kits: Callable[..., ResponsesKit]) -> None:
    backend_instance, bridge = backend(), WSGIBridge()
    kit = kits(backend_instance)
    ask(kit, bridge, '{"input": "Hi", "stream": true}')
    next(piece for piece in bridge if b"delta" in piece)
    bridge.close()
    assert status(kit, backend_instance.turns[0]) == "cancelled"
    wait_until(lambda: backend_instance.running == 0)


@pytest.mark.parametrize("backend", [EndlessBackend, ThreadedEndlessBackend])
def test_disconnect_before_answer_closes_backend(
    backend: type[EndlessBackend], kits: Callable[..., ResponsesKit]
) -> None:
    backend_instance = backend()
    kit = kits(backend_instance)
    bridge = WSGIBridge(lambda: bool(backend_instance.turns))
    assert ask(kit, bridge, '{"input": "Hi", "model": "silent"}') is None
    assert status(kit, backend_instance.turns[0]) == "cancelled"
    wait_until(lambda: backend_instance.running == 0)


@pytest.mark.parametrize("started", [False, True], ids=["never iterated", "left unread"])
def test_unread_unclosed_stream_is_aborted(started: bool, kits: Callable[..., ResponsesKit]) -> None:
    backend_instance, bridge = EndlessBackend(), WSGIBridge()
    kit = kits(backend_instance, timeouts=Timeouts(send=0.1))
    ask(kit, bridge, '{"input": "Hi", "stream": true, "model": "talking"}')
    if started:
        next(bridge)
    wait_until(lambda: bool(backend_instance.turns) and status(kit, backend_instance.turns[0]) == "cancelled")
    assert backend_instance.running == 0
    list(bridge)  # ends


def test_idle_stream_gets_comments(kits: Callable[..., ResponsesKit]) -> None:
    bridge = WSGIBridge()
    ask(
        kits(EndlessBackend(), timeouts=Timeouts(keep_alive=0.02)),
        bridge,
        '{"input": "Hi", "stream": true, "model": "silent"}',
    )
    comments = 0
    for piece in bridge:
        comments += piece.count(b":\n\n") + piece.count(b": ")
        if comments > 3:
            break
    bridge.close()


def test_stopping_kit_ends_running_stream_with_event(kits: Callable[..., ResponsesKit]) -> None:
    backend_instance = EndlessBackend()
    kit = kits(backend_instance, grace=0.1)
    bridge, other_bridge = WSGIBridge(), WSGIBridge()
    ask(kit, bridge, '{"input": "Hi", "stream": true, "model": "silent"}')
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(lambda: b"".join(bridge))
        content = pool.submit(ask, kit, other_bridge, '{"input": "Hi", "model": "silent"}')
        wait_until(lambda: backend_instance.running == 2)
        loop_thread.stop_kit(kit)
        final = check_stream(decode_events(streamed.result(BOUND).removesuffix(b"data: [DONE]\n\n")))
        assert "shutting down" in final["error"]["message"]
        reply = content.result(BOUND)
    assert reply is not None
    assert b"shutting down" in reply.body
    assert backend_instance.running == 0


def test_concurrent_requests_do_not_mix(kits: Callable[..., ResponsesKit]) -> None:
    idents: dict[str, int] = {}

    def owner(request: str) -> str:
        idents[request] = threading.get_ident()
        return request

    kit = kits(ScriptedBackend(lambda turn: [f"{turn.owner} said ", turn.text]), owner=owner)

    def request(number: int) -> tuple[str, int, bytes]:
        bridge, name = WSGIBridge(), f"user {number}"
        ask(kit, bridge, f'{{"input": "word {number}", "stream": true}}', host=name)
        return name, threading.get_ident(), b"".join(bridge)

    with ThreadPoolExecutor(64) as pool:
        for number, (name, ident, streamed) in enumerate(pool.map(request, range(100))):
            assert idents[name] == ident
            final = check_stream(decode_events(streamed.removesuffix(b"data: [DONE]\n\n")))
            assert final["output"][0]["content"][0]["text"] == f"user {number} said word {number}"


@pytest.mark.parametrize("backend", [EndlessBackend, ThreadedEndlessBackend])
def test_disconnect_at_any_moment_leaves_no_leaks(
    backend: type[EndlessBackend], kits: Callable[..., ResponsesKit], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_instance = backend()
    kit = kits(backend_instance, limits=Limits(max_threads=64))
    monkeypatch.setattr(wsgi_bridge, "_DISCONNECT_POLL_INTERVAL", 0.01)
    before = set(threading.enumerate())

    def request(seed: int) -> None:
        random_source = random.Random(seed)
        until = time.monotonic() + random_source.choice([0, 0.001, 0.01, 0.1])
        bridge = WSGIBridge(lambda: time.monotonic() > until)
        stream, model = random_source.choice(["true", "false"]), random_source.choice(["talking", "silent", "brief"])
        reply = ask(kit, bridge, f'{{"input": "Hi", "stream": {stream}, "model": "{model}"}}')
        if reply is not None and reply.stream is not None:
            for count, _ in enumerate(bridge):
                if count >= random_source.randrange(4):
                    break
            if random_source.random() < 0.2:
                threading.Thread(target=bridge.close).start()
            bridge.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(request, range(200)))
    wait_until(lambda: backend_instance.running == 0)
    assert all(status(kit, turn) in ("cancelled", "completed") for turn in backend_instance.turns)
    assert loop_thread.call(_requests) == 0
    has_left = [thread for thread in threading.enumerate() if thread not in before and "AnyIO" not in thread.name]
    wait_until(lambda: not any(thread.is_alive() for thread in has_left))
    workers = [thread for thread in threading.enumerate() if "AnyIO" in thread.name]
    assert len(workers) <= 64  # idle workers stay, up to the limit


async def _requests() -> int:
    return sum("WSGIBridge" in repr(task.get_coro()) for task in asyncio.all_tasks())


# Busy and abandoned host threads.


def test_stop_iteration_of_host_function_is_failure() -> None:
    bridge = WSGIBridge()

    async def respond() -> Reply:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await bridge.call(next, iter(()))
        return reply_with(b"went on")

    reply = bridge.start(respond)
    assert reply is not None
    assert reply.body == b"went on"


def test_disconnect_is_detected_while_host_thread_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_DISCONNECT_POLL_INTERVAL", 0.01)
    busy, cancelled = threading.Event(), threading.Event()
    bridge = WSGIBridge(busy.is_set)

    def hook(request: Any) -> bool:
        busy.set()
        return cancelled.wait(BOUND)

    async def respond() -> Reply:
        try:
            await bridge.call(hook, None)
        finally:
            cancelled.set()
        return reply_with()

    assert bridge.start(respond) is None
    assert cancelled.is_set()


def test_busy_host_thread_still_polls_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_DISCONNECT_POLL_INTERVAL", 0.05)
    calls: list[int] = []
    bridge = WSGIBridge(lambda: len(calls) > 3)

    async def respond() -> Reply:
        while True:
            await bridge.call(calls.append, 1)

    assert bridge.start(respond) is None


def test_call_to_gone_host_thread_is_refused() -> None:
    bridge = WSGIBridge()
    refused = threading.Event()

    def hook(request: Any) -> None:
        raise WorkerTimeout

    async def respond() -> Reply:
        cancelled = False
        while not (cancelled and refused.is_set()):
            try:
                await bridge.call(hook, None)
            except asyncio.CancelledError:
                cancelled = True
            except errors.ClientDisconnected:
                refused.set()
        return reply_with()

    with pytest.raises(WorkerTimeout):
        bridge.start(respond)
    assert refused.wait(BOUND)


def test_comment_is_skipped_while_host_thread_is_busy() -> None:
    bridge = WSGIBridge()

    async def stream(send: Send) -> None:
        await send(b"a piece")
        for _ in range(100):  # more than may be pending
            await send(KEEP_ALIVE)
        await send(b"another")

    assert bridge.start(reply_with_stream(stream)) is not None
    assert b"".join(bridge).replace(KEEP_ALIVE, b"") == b"a pieceanother"


def test_uniterated_stream_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_FIRST_READ_TIMEOUT", 0.01)
    probe = Probe()

    async def stream(send: Send) -> None:
        await probe.wait()

    bridge = WSGIBridge()
    assert bridge.start(reply_with_stream(stream)) is not None
    assert probe.done.wait(BOUND)


def test_close_after_interruption_runs_pending_calls() -> None:
    bridge, closed_in = WSGIBridge(), []

    async def stream(send: Send) -> None:
        await send(b"a piece")
        try:
            await asyncio.sleep(3600)
        finally:
            await bridge.call(lambda _: closed_in.append(threading.get_ident()), None)

    assert bridge.start(reply_with_stream(stream)) is not None
    assert next(bridge) == b"a piece"
    bridge.close()
    assert closed_in == [threading.get_ident()]
