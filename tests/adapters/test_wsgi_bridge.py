"""One request of a synchronous host: its coroutine on the event loop, and the host's thread that serves it."""

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

mood: contextvars.ContextVar[str] = contextvars.ContextVar("mood", default="none")


def happens(condition: Callable[[], bool]) -> None:
    """Returns once it is so; fails when that takes too long."""
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.002)


def plain(body: bytes = b"") -> Reply:
    return Reply(200, {}, body)


def streaming(stream: Callable[[Send], Awaitable[None]]) -> Callable[[], Any]:
    """What makes a reply that streams."""

    async def work() -> Reply:
        return Reply(200, {}, stream=stream)

    return work


class Cleaned:
    """A coroutine's way to tell that it was cancelled, and has cleaned up."""

    def __init__(self) -> None:
        self.begun, self.done = threading.Event(), threading.Event()

    async def wait(self) -> None:
        self.begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            self.done.set()


# The reply.


def test_a_reply_is_made_on_the_loop_and_given_to_the_thread_that_asks() -> None:
    async def work() -> Reply:
        return plain(threading.current_thread().name.encode())

    reply = WSGIBridge().start(work)
    assert reply is not None
    assert reply.body.decode() == LOOP


def test_the_hosts_functions_are_called_in_the_hosts_thread_one_after_the_other() -> None:
    calls: list[tuple[int, Any]] = []
    one = WSGIBridge()

    def hook(request: Any) -> str:
        calls.append((threading.get_ident(), request))
        return f"owner of {request}"

    async def work() -> Reply:
        first = await one.call(hook, 1)
        both = await asyncio.gather(one.call(hook, 2), one.call(hook, 3))
        return plain(" ".join([first, *both]).encode())

    reply = one.start(work)
    assert reply is not None
    assert reply.body == b"owner of 1 owner of 2 owner of 3"
    assert calls == [(threading.get_ident(), number) for number in (1, 2, 3)]


def test_what_a_hosts_function_raises_is_raised_where_it_was_asked_for() -> None:
    one = WSGIBridge()

    def hook(request: Any) -> None:
        raise LookupError("no such user")

    async def work() -> Reply:
        with pytest.raises(LookupError, match="no such user"):
            await one.call(hook, None)
        return plain(b"caught")

    reply = one.start(work)
    assert reply is not None
    assert reply.body == b"caught"


def test_a_hosts_function_finds_the_hosts_context_and_the_loop_finds_none_of_it() -> None:
    token = mood.set("the host's")
    one = WSGIBridge()

    async def work() -> Reply:
        here = mood.get()
        there = await one.call(lambda request: mood.get(), None)
        return plain(f"{here}, {there}".encode())

    try:
        reply = one.start(work)
    finally:
        mood.reset(token)
    assert reply is not None
    assert reply.body == b"none, the host's"


class TooLong(BaseException):
    """What a server raises in a thread that has taken too long."""


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), TooLong()])
def test_what_is_to_end_the_hosts_thread_ends_it_and_the_request_is_given_up(error: BaseException) -> None:
    one, cleaned = WSGIBridge(), Cleaned()

    def hook(request: Any) -> None:
        raise error

    async def work() -> Reply:
        beside = asyncio.create_task(one.call(hook, None))
        try:
            await cleaned.wait()
        finally:
            beside.cancel()
        return plain()

    with pytest.raises(type(error)):
        one.start(work)
    assert cleaned.done.wait(BOUND)


def test_whoever_leaves_before_the_reply_gives_the_request_up() -> None:
    cleaned = Cleaned()

    async def work() -> Reply:
        await cleaned.wait()
        return plain()

    assert WSGIBridge(cleaned.begun.is_set).start(work) is None
    assert cleaned.done.is_set()  # it is waited for


def test_whoever_leaves_is_looked_for_in_the_hosts_thread_and_not_all_the_time() -> None:
    looks: list[int] = []

    def left() -> bool:
        looks.append(threading.get_ident())
        return len(looks) == 2

    async def work() -> Reply:
        await asyncio.sleep(3600)
        return plain()

    begun = time.monotonic()
    assert WSGIBridge(left).start(work) is None
    assert looks == [threading.get_ident()] * 2
    assert time.monotonic() - begun > wsgi_bridge._LOOK_SECONDS


def test_whoever_leaves_before_the_loop_has_come_to_the_request_is_not_waited_for() -> None:
    """Some backend keeps the loop busy."""
    busy = threading.Event()

    async def keep_busy() -> None:
        busy.set()
        time.sleep(3 * wsgi_bridge._LOOK_SECONDS)  # noqa: ASYNC251  # which is the point

    async def work() -> Reply:
        await asyncio.sleep(3600)
        return plain()

    keeping = loop_thread.submit(keep_busy())
    assert busy.wait(BOUND)
    begun = time.monotonic()
    assert WSGIBridge(lambda: True).start(work) is None
    assert time.monotonic() - begun < wsgi_bridge._CLOSING_SECONDS
    keeping.result(BOUND)


def test_a_look_that_fails_gives_the_request_up() -> None:
    cleaned = Cleaned()

    def left() -> bool:
        raise OSError("no such socket")

    async def work() -> Reply:
        await cleaned.wait()
        return plain()

    with pytest.raises(OSError, match="no such socket"):
        WSGIBridge(left).start(work)
    assert cleaned.done.wait(BOUND)


def test_a_host_that_waits_for_what_never_ends_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_CLOSING_SECONDS", 0.05)
    go_on = threading.Event()

    async def work() -> Reply:
        while not go_on.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return plain()

    try:
        assert WSGIBridge(lambda: True).start(work) is None
    finally:
        go_on.set()


def test_a_request_that_fails_within_is_no_client_that_has_left() -> None:
    async def work() -> Reply:
        raise LookupError("nobody's business")

    with pytest.raises(LookupError):
        WSGIBridge().start(work)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_would_end_the_loop_ends_its_own_request_alone(error: BaseException) -> None:
    """Such as an async hook that calls sys.exit."""

    async def work() -> Reply:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        WSGIBridge().start(work)
    loop = loop_thread.event_loop()
    assert loop_thread.call(asyncio.sleep, 0, "still here") == "still here"
    assert loop_thread.event_loop() is loop


# The stream.


def test_each_piece_is_given_as_soon_as_it_is_there() -> None:
    go_on = threading.Semaphore(0)

    async def stream(send: Send) -> None:
        for number in range(3):
            await send(b"piece %d\n\n" % number)
            await asyncio.to_thread(go_on.acquire)

    one = WSGIBridge()
    assert one.start(streaming(stream)) is not None
    for number in range(3):
        assert next(one) == b"piece %d\n\n" % number
        go_on.release()
    assert list(one) == []
    assert list(one) == []
    one.close()


def test_pieces_that_nobody_has_taken_yet_are_given_together_and_are_not_many() -> None:
    sent: list[int] = []

    async def stream(send: Send) -> None:
        for number in range(100):
            await send(b"%02d\n\n" % number)
            sent.append(number)

    one = WSGIBridge()
    one.start(streaming(stream))
    happens(lambda: len(sent) >= wsgi_bridge._AHEAD)
    loop_thread.call(asyncio.sleep, 0.01)
    assert len(sent) == wsgi_bridge._AHEAD
    pieces = list(one)
    assert b"".join(pieces) == b"".join(b"%02d\n\n" % number for number in range(100))
    assert all(piece.endswith(b"\n\n") for piece in pieces)
    one.close()


def test_two_may_write_at_once_and_nothing_is_lost() -> None:
    async def stream(send: Send) -> None:
        async def write(name: bytes) -> None:
            for _ in range(200):
                await send(name)

        await asyncio.gather(write(b"a"), write(b"b"), write(b"c"))

    one = WSGIBridge()
    one.start(streaming(stream))
    whole = b"".join(one)
    assert sorted(whole) == sorted(b"abc" * 200)


def test_a_stream_ends_with_what_was_sent_last_however_late_it_is_taken() -> None:
    ended = threading.Event()

    async def stream(send: Send) -> None:
        await send(b"one ")
        await send(b"two")
        ended.set()

    one = WSGIBridge()
    one.start(streaming(stream))
    assert ended.wait(BOUND)
    assert b"".join(one) == b"one two"


def test_a_stream_that_fails_ends_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def stream(send: Send) -> None:
        await send(b"one")
        raise LookupError("broken off")

    one = WSGIBridge()
    one.start(streaming(stream))
    assert list(one) == [b"one"]
    one.close()
    happens(lambda: "broken off" in caplog.text)
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("times", [0, 1])
def test_whoever_closes_early_has_the_stream_ended_and_waits_for_that(times: int) -> None:
    cleaned = Cleaned()

    async def stream(send: Send) -> None:
        await send(b"one")
        await cleaned.wait()

    one = WSGIBridge()
    one.start(streaming(stream))
    for _ in range(times):
        assert next(one) == b"one"
    one.close()
    assert cleaned.done.is_set() or not cleaned.begun.is_set()
    assert list(one) == []
    one.close()


def test_a_stream_that_was_never_begun_can_be_closed() -> None:
    WSGIBridge().close()


def test_whoever_closes_while_the_stream_waits_for_a_reader_has_it_ended() -> None:
    cleaned = Cleaned()

    async def stream(send: Send) -> None:
        try:
            while True:
                await send(b"x")
        finally:
            cleaned.done.set()

    one = WSGIBridge()
    one.start(streaming(stream))
    happens(lambda: len(one._pieces) == wsgi_bridge._AHEAD)
    one.close()
    assert cleaned.done.is_set()


def test_another_thread_may_close_it_and_whoever_reads_comes_to_the_end() -> None:
    cleaned = Cleaned()

    async def stream(send: Send) -> None:
        await send(b"one")
        await cleaned.wait()

    one = WSGIBridge()
    one.start(streaming(stream))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, one)
        assert cleaned.begun.wait(BOUND)
        one.close()
        assert reading.result(BOUND) == [b"one"]
    assert cleaned.done.is_set()


def test_two_may_close_it_at_once() -> None:
    cleaned = Cleaned()

    async def stream(send: Send) -> None:
        await send(b"one")
        await cleaned.wait()

    one = WSGIBridge()
    one.start(streaming(stream))
    assert next(one) == b"one"
    with ThreadPoolExecutor(2) as pool:
        for closing in [pool.submit(one.close) for _ in range(2)]:
            closing.result(wsgi_bridge._CLOSING_SECONDS / 2)
    assert cleaned.done.is_set()


def test_a_close_that_takes_too_long_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_CLOSING_SECONDS", 0.05)
    go_on = threading.Event()

    async def stream(send: Send) -> None:
        await send(b"one")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.to_thread(go_on.wait, BOUND)

    one = WSGIBridge()
    one.start(streaming(stream))
    assert next(one) == b"one"
    begun = time.monotonic()
    one.close()
    assert time.monotonic() - begun < BOUND
    go_on.set()
    assert list(one) == []


def test_whoever_leaves_a_silent_stream_ends_it() -> None:
    cleaned = Cleaned()

    async def stream(send: Send) -> None:
        await send(b"one")
        await cleaned.wait()

    one = WSGIBridge(cleaned.begun.is_set)
    one.start(streaming(stream))
    assert list(one) == [b"one"]
    assert cleaned.done.is_set()


# With a kit.


class Talking(Backend):
    """Talks until it is closed; silent ones say one word."""

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


class TalkingInThreads(Talking):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def generate(self, turn: Turn) -> Iterator[str]:  # type: ignore[override]  # which any backend may
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
    """Makes kits that live until the test ends."""
    made: list[ResponsesKit] = []

    def make(backend: Backend, *, grace: float = 0.0, **settings: Any) -> ResponsesKit:
        kit = ResponsesKit(backend, **settings)
        made.append(kit)
        loop_thread.start_kit(kit, grace=grace)
        return kit

    yield make
    for kit in made:
        loop_thread.stop_kit(kit)


def ask(kit: ResponsesKit, one: WSGIBridge, body: str, *, host: Any = None, method: str = "POST") -> Reply | None:
    """As a host does whose body is there already."""

    async def read() -> bytes:
        return body.encode()

    request = Request(method, "/responses", read=read, host=host, call=one.call)
    return one.start(lambda: OpenResponses(kit).handle(request))


def status(kit: ResponsesKit, turn: Turn) -> str:
    response: dict[str, Any] = loop_thread.call(lambda: kit.retrieve(turn.response_id))
    return str(response["status"])


def test_a_whole_stream_is_a_legal_one(kits: Callable[..., ResponsesKit]) -> None:
    one = WSGIBridge()
    reply = ask(kits(ScriptedBackend(["Hello, ", "world."])), one, '{"input": "Hi", "stream": true}')
    assert reply is not None
    assert reply.status == 200
    whole = b"".join(one)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert check_stream(decode_events(whole.removesuffix(b"data: [DONE]\n\n")))["status"] == "completed"


@pytest.mark.parametrize("backend", [Talking, TalkingInThreads])
def test_whoever_stops_reading_and_closes_closes_the_backend(
    backend: type[Talking], kits: Callable[..., ResponsesKit]
) -> None:
    talking, one = backend(), WSGIBridge()
    kit = kits(talking)
    ask(kit, one, '{"input": "Hi", "stream": true}')
    next(piece for piece in one if b"delta" in piece)
    one.close()
    assert status(kit, talking.turns[0]) == "cancelled"
    happens(lambda: talking.running == 0)


@pytest.mark.parametrize("backend", [Talking, TalkingInThreads])
def test_a_client_that_leaves_before_the_answer_closes_the_backend(
    backend: type[Talking], kits: Callable[..., ResponsesKit]
) -> None:
    talking = backend()
    kit = kits(talking)
    one = WSGIBridge(lambda: bool(talking.turns))
    assert ask(kit, one, '{"input": "Hi", "model": "silent"}') is None
    assert status(kit, talking.turns[0]) == "cancelled"
    happens(lambda: talking.running == 0)


@pytest.mark.parametrize("begun", [False, True], ids=["never iterated", "left unread"])
def test_a_stream_that_nobody_reads_nor_closes_is_given_up(begun: bool, kits: Callable[..., ResponsesKit]) -> None:
    talking, one = Talking(), WSGIBridge()
    kit = kits(talking, timeouts=Timeouts(send=0.1))
    ask(kit, one, '{"input": "Hi", "stream": true, "model": "talking"}')
    if begun:
        next(one)
    happens(lambda: bool(talking.turns) and status(kit, talking.turns[0]) == "cancelled")
    assert talking.running == 0
    list(one)  # comes to an end


def test_a_silent_stream_gets_comments(kits: Callable[..., ResponsesKit]) -> None:
    one = WSGIBridge()
    ask(kits(Talking(), timeouts=Timeouts(keep_alive=0.02)), one, '{"input": "Hi", "stream": true, "model": "silent"}')
    comments = 0
    for piece in one:
        comments += piece.count(b":\n\n") + piece.count(b": ")
        if comments > 3:
            break
    one.close()


def test_what_runs_when_its_kit_is_left_is_told_of_and_then_over(kits: Callable[..., ResponsesKit]) -> None:
    talking = Talking()
    kit = kits(talking, grace=0.1)
    one, two = WSGIBridge(), WSGIBridge()
    ask(kit, one, '{"input": "Hi", "stream": true, "model": "silent"}')
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(lambda: b"".join(one))
        whole = pool.submit(ask, kit, two, '{"input": "Hi", "model": "silent"}')
        happens(lambda: talking.running == 2)
        loop_thread.stop_kit(kit)
        final = check_stream(decode_events(streamed.result(BOUND).removesuffix(b"data: [DONE]\n\n")))
        assert "shutting down" in final["error"]["message"]
        reply = whole.result(BOUND)
    assert reply is not None
    assert b"shutting down" in reply.body
    assert talking.running == 0


def test_many_at_once_do_not_mix(kits: Callable[..., ResponsesKit]) -> None:
    idents: dict[str, int] = {}

    def owner(request: str) -> str:
        idents[request] = threading.get_ident()
        return request

    kit = kits(ScriptedBackend(lambda turn: [f"{turn.owner} said ", turn.text]), owner=owner)

    def request(number: int) -> tuple[str, int, bytes]:
        one, name = WSGIBridge(), f"user {number}"
        ask(kit, one, f'{{"input": "word {number}", "stream": true}}', host=name)
        return name, threading.get_ident(), b"".join(one)

    with ThreadPoolExecutor(64) as pool:
        for number, (name, ident, told) in enumerate(pool.map(request, range(100))):
            assert idents[name] == ident
            final = check_stream(decode_events(told.removesuffix(b"data: [DONE]\n\n")))
            assert final["output"][0]["content"][0]["text"] == f"user {number} said word {number}"


@pytest.mark.parametrize("backend", [Talking, TalkingInThreads])
def test_whoever_leaves_at_whatever_moment_leaves_nothing_behind(
    backend: type[Talking], kits: Callable[..., ResponsesKit], monkeypatch: pytest.MonkeyPatch
) -> None:
    talking = backend()
    kit = kits(talking, limits=Limits(max_threads=64))
    monkeypatch.setattr(wsgi_bridge, "_LOOK_SECONDS", 0.01)
    before = set(threading.enumerate())

    def request(seed: int) -> None:
        dice = random.Random(seed)
        until = time.monotonic() + dice.choice([0, 0.001, 0.01, 0.1])
        one = WSGIBridge(lambda: time.monotonic() > until)
        stream, model = dice.choice(["true", "false"]), dice.choice(["talking", "silent", "brief"])
        reply = ask(kit, one, f'{{"input": "Hi", "stream": {stream}, "model": "{model}"}}')
        if reply is not None and reply.stream is not None:
            for count, _ in enumerate(one):
                if count >= dice.randrange(4):
                    break
            if dice.random() < 0.2:
                threading.Thread(target=one.close).start()
            one.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(request, range(200)))
    happens(lambda: talking.running == 0)
    assert all(status(kit, turn) in ("cancelled", "completed") for turn in talking.turns)
    assert loop_thread.call(_requests) == 0
    left = [thread for thread in threading.enumerate() if thread not in before and "AnyIO" not in thread.name]
    happens(lambda: not any(thread.is_alive() for thread in left))
    workers = [thread for thread in threading.enumerate() if "AnyIO" in thread.name]
    assert len(workers) <= 64  # which are kept for the next ones, and are no more than may be


async def _requests() -> int:
    return sum("WSGIBridge" in repr(task.get_coro()) for task in asyncio.all_tasks())


# The host's thread, busy or gone.


def test_a_hosts_function_that_finds_nothing_more_to_iterate_has_failed_and_hangs_nobody() -> None:
    one = WSGIBridge()

    async def work() -> Reply:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await one.call(next, iter(()))
        return plain(b"went on")

    reply = one.start(work)
    assert reply is not None
    assert reply.body == b"went on"


def test_whoever_leaves_while_the_hosts_thread_is_busy_is_noticed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_LOOK_SECONDS", 0.01)
    busy, cancelled = threading.Event(), threading.Event()
    one = WSGIBridge(busy.is_set)

    def hook(request: Any) -> bool:
        busy.set()
        return cancelled.wait(BOUND)

    async def work() -> Reply:
        try:
            await one.call(hook, None)
        finally:
            cancelled.set()
        return plain()

    assert one.start(work) is None
    assert cancelled.is_set()


def test_a_thread_that_is_kept_busy_looks_who_has_left_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_LOOK_SECONDS", 0.05)
    calls: list[int] = []
    one = WSGIBridge(lambda: len(calls) > 3)

    async def work() -> Reply:
        while True:
            await one.call(calls.append, 1)

    assert one.start(work) is None


def test_what_is_asked_of_a_thread_that_has_gone_is_refused() -> None:
    one = WSGIBridge()
    refused = threading.Event()

    def hook(request: Any) -> None:
        raise TooLong

    async def work() -> Reply:
        cancelled = False
        while not (cancelled and refused.is_set()):
            try:
                await one.call(hook, None)
            except asyncio.CancelledError:
                cancelled = True
            except errors.ClientDisconnected:
                refused.set()
        return plain()

    with pytest.raises(TooLong):
        one.start(work)
    assert refused.wait(BOUND)


def test_a_comment_does_not_wait_where_the_thread_is_busy_with_something_better() -> None:
    one = WSGIBridge()

    async def stream(send: Send) -> None:
        await send(b"a piece")
        for _ in range(100):  # of which no more than a few could wait
            await send(KEEP_ALIVE)
        await send(b"another")

    assert one.start(streaming(stream)) is not None
    assert b"".join(one).replace(KEEP_ALIVE, b"") == b"a pieceanother"


def test_a_stream_that_nobody_ever_iterates_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_bridge, "_CLAIM_SECONDS", 0.01)
    cleaned = Cleaned()

    async def stream(send: Send) -> None:
        await cleaned.wait()

    one = WSGIBridge()
    assert one.start(streaming(stream)) is not None
    assert cleaned.done.wait(BOUND)


def test_whoever_closes_after_it_was_torn_away_has_the_thread_do_what_is_left_to_do() -> None:
    one, closed_in = WSGIBridge(), []

    async def stream(send: Send) -> None:
        await send(b"a piece")
        try:
            await asyncio.sleep(3600)
        finally:
            await one.call(lambda _: closed_in.append(threading.get_ident()), None)

    assert one.start(streaming(stream)) is not None
    assert next(one) == b"a piece"
    one.close()
    assert closed_in == [threading.get_ident()]
