"""The life of one response: whatever the backend, the store and the listener do, it ends well and is on record."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from responses_kit import Backend, Model, ResponsesKit, Turn, errors, outputs
from responses_kit.engine import run as runs_module
from responses_kit.engine.repository import Repository
from responses_kit.engine.run import Run
from responses_kit.errors import ClientDisconnected
from responses_kit.protocol.sse import decode_events
from responses_kit.protocol.state_machine import Event
from responses_kit.stores import protocol as stores_module
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record, ResponseStore
from responses_kit.testing import Pause, ScriptedBackend

from ..support.conformance import check_response, check_stream, replay
from ..support.memory import kept, soon_given_up

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class Calls(Backend):
    """A backend whose generate is whatever the test says."""

    models = (Model("scripted", tools=True),)

    def __init__(self, generate: Callable[..., Any]) -> None:
        self.generate = generate


class Audience:
    """Hears events; looks at the store whenever it does; leaves when it has heard enough."""

    def __init__(self, store: MemoryStore | None = None, *, leaves_at: int | None = None) -> None:
        self.events: list[Event] = []
        self.records: list[Record | None] = []
        self.store = store
        self.leaves_at = leaves_at
        self.calls = 0
        self.error: Exception = ClientDisconnected()

    async def tell(self, events: list[Event]) -> None:
        await anyio.lowlevel.checkpoint()
        self.calls += 1
        assert events, "telling nothing"
        if self.leaves_at is not None and self.calls > self.leaves_at:
            raise self.error
        if self.store is not None and "response" in events[0]:
            self.records.append(await self.store.get("", events[0]["response"]["id"]))
        self.events += copy.deepcopy(events)


class TrickyStore(MemoryStore):
    """A memory store in which the test's own function stands before every update."""

    def __init__(self, *before: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.before = list(before)

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        if self.before:
            await self.before.pop(0)()
        return await super().update(owner, record, log)


Call = Callable[[], Awaitable[Any]]


class Watched(MemoryStore):
    """A memory store in which the test's own function stands around every call, whose name it is told."""

    def __init__(self, around: Callable[[str, Call], Awaitable[Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self.around = around


def _watched(name: str) -> Callable[..., Awaitable[Any]]:
    real = getattr(MemoryStore, name)

    async def method(self: Watched, *args: Any) -> Any:
        return await self.around(name, functools.partial(real, self, *args))

    return method


CALLS = [name for name, method in vars(ResponseStore).items() if inspect.iscoroutinefunction(method)]
for _name in CALLS:
    setattr(Watched, _name, _watched(_name))


async def slow(name: str, call: Call) -> Any:
    """A store across a network: others get their turn before the work is done, and again before its answer is there."""
    await anyio.lowlevel.checkpoint()
    answer = await call()
    await anyio.lowlevel.checkpoint()
    return answer


class Failing:
    """A store's calls, of which the nth fails, and perhaps some after it.

    Args:
        nth: Counted from 0.
        done: Whether it has done its work before it fails.
        times: How many fail in a row.
    """

    def __init__(self, nth: int, *, done: bool, times: int = 1) -> None:
        self.failing, self.done = range(nth, nth + times), done
        self.count = 0

    async def __call__(self, name: str, call: Call) -> Any:
        number, self.count = self.count, self.count + 1
        await anyio.lowlevel.checkpoint()
        answer = await call() if self.done or number not in self.failing else None
        if number in self.failing:
            raise OSError("the disk of secret-host is full")
        return answer

    def heal(self) -> bool:
        """From now on none fails. Whether any has."""
        met, self.failing = self.count > self.failing[0], range(0)
        return met


class Clock:
    """Seconds since the epoch, as the test has them."""

    def __init__(self) -> None:
        self.now = 1_750_000_000.0

    def __call__(self) -> float:
        return self.now


def check_order(events: list[Event]) -> dict[str, Any]:
    """As `check_stream`, without a look at the form of each event: for many streams of the same making."""
    final: dict[str, Any] = events[-1].get("response", {}) if events else {}
    assert replay(events) == final
    return final


async def check_kept(store: MemoryStore, clock: Clock) -> list[dict[str, Any]]:
    """Once all leases have ended every record is final, and every log a stream that ends with what is on record."""
    clock.now += 1_000_000
    await Repository(store, clock=clock).sweep()
    responses = []
    for record in kept(store):
        response = json.loads(record.response)
        assert record.final, f"the record of a {response['status']} response is not final"
        assert response["status"] in ("completed", "incomplete", "failed", "cancelled"), response["status"]
        if record.events == "kept":
            pieces = await store.events("", record.id, -1)
            assert pieces is not None
            assert check_order(decode_events(b"".join(piece.data for piece in pieces))) == response
        responses.append(response)
    return responses


@pytest.fixture
def no_complaint_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next failure of a store is the first one for a long time, and logged in full."""
    monkeypatch.setattr(stores_module, "_complained", -1e9)


async def fails() -> None:
    raise OSError("the disk of secret-host is full")


async def hangs() -> None:
    await anyio.sleep_forever()


async def begin(backend: Backend, kept_in: Any = None, **body: Any) -> Run:
    return await ResponsesKit(backend, store=kept_in).service.create_run({"input": "Hi", **body})


async def record_of(run: Run, store: MemoryStore) -> dict[str, Any] | None:
    """The stored response, which is final and of a final status."""
    record = await store.get("", run.response["id"])
    if record is None:
        return None
    response: dict[str, Any] = json.loads(record.response)
    assert record.final, f"the record of a {response['status']} response is not final"
    assert response["status"] in ("completed", "incomplete", "failed", "cancelled"), response["status"]
    check_response(response)
    return response


async def heard(generate: Callable[..., Any]) -> list[Event]:
    """All events of a run that goes well, in sense and in form."""
    run = await begin(Calls(generate))
    audience = Audience()
    with anyio.fail_after(BOUND):
        await run.execute(audience.tell)
    check_stream(audience.events)
    return audience.events


async def happened(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, BOUND), "it never happened"


# Every way to write a backend.


async def _async_generator(turn: Turn) -> AsyncIterator[str]:
    yield "Hello, "
    await anyio.lowlevel.checkpoint()
    yield "world."


async def _async_list(turn: Turn) -> list[str]:
    return ["Hello, ", "world."]


async def _async_text(turn: Turn) -> str:
    return "Hello, world."


async def _async_of_generator(turn: Turn) -> AsyncIterator[str]:
    return _async_generator(turn)


async def _async_of_plain_generator(turn: Turn) -> Iterator[str]:
    return _generator(turn)


def _generator(turn: Turn) -> Iterator[str]:
    yield "Hello, "
    yield "world."


def _list(turn: Turn) -> list[outputs.Output]:
    return [outputs.Text("Hello, "), "world."]


def _text(turn: Turn) -> str:
    return "Hello, world."


def _plain_of_async_generator(turn: Turn) -> AsyncIterator[str]:
    return _async_generator(turn)


def _plain_of_coroutine(turn: Turn) -> Awaitable[str]:
    return _async_text(turn)


class _Iterable:
    def __aiter__(self) -> AsyncIterator[str]:
        self.left = ["world.", "Hello, "]
        return self

    async def __anext__(self) -> str:
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop()


def _own_async_iterable(turn: Turn) -> Any:
    return _Iterable()


@pytest.mark.parametrize(
    "generate",
    [
        _async_generator,
        _async_list,
        _async_text,
        _async_of_generator,
        _async_of_plain_generator,
        _generator,
        _list,
        _text,
        _plain_of_async_generator,
        _plain_of_coroutine,
        _own_async_iterable,
    ],
)
async def test_a_backend_may_be_written_in_every_way(generate: Callable[..., Any]) -> None:
    events = await heard(generate)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world."


async def test_a_backend_class_may_define_generate_in_either_colour() -> None:
    class Plain(Backend):
        models = ("plain",)

        def generate(self, turn: Turn) -> Iterator[str]:
            yield turn.text

    class Async(Backend):
        models = ("async",)

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            yield turn.text

    for backend in (Plain(), Async()):
        response = await ResponsesKit(backend).create({"input": "Hi"})
        assert response["output"][0]["content"][0]["text"] == "Hi"


# The record.


@pytest.mark.parametrize("generate", [_async_generator, _generator])
async def test_the_record_is_there_before_the_first_event_and_final_before_the_last(
    generate: Callable[..., Any],
) -> None:
    store = MemoryStore()
    run = await begin(Calls(generate), store)
    audience = Audience(store)
    await run.execute(audience.tell)
    first, last = audience.records[0], audience.records[-1]
    assert first is not None
    assert last is not None
    assert (first.final, last.final) == (False, True)
    assert json.loads(first.response) == audience.events[0]["response"]
    assert json.loads(last.response) == audience.events[-1]["response"]
    assert set(last.item_ids) >= {item["id"] for item in run.response["output"]}


async def test_what_is_not_to_be_stored_never_reaches_the_store() -> None:
    store = TrickyStore(fails)
    run = await begin(Calls(_async_generator), store, store=False)
    audience = Audience()
    await run.execute(audience.tell)
    assert len(store) == 0
    assert check_stream(audience.events)["status"] == "completed"


@pytest.mark.usefixtures("no_complaint_yet")
async def test_a_store_that_fails_at_creation_fails_the_request_before_the_backend_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(MemoryStore):
        async def create(self, owner: str, record: Record) -> None:
            await fails()

    backend = ScriptedBackend(["Yes."])
    with pytest.raises(errors.StoreError) as caught:
        await begin(backend, Full())
    assert "secret" not in caught.value.message
    assert "secret-host" in caplog.text
    assert backend.turns == []


@pytest.mark.usefixtures("no_complaint_yet")
@pytest.mark.parametrize("generate", [_async_generator, _generator])
async def test_a_final_write_that_fails_fails_the_response_and_is_told(
    generate: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = TrickyStore(fails)
    run = await begin(Calls(generate), store)
    audience = Audience()
    await run.execute(audience.tell)
    response = check_stream(audience.events)
    assert (response["status"], response["error"]["code"]) == ("failed", "store_error")
    assert isinstance(run.error, errors.StoreError)
    assert "secret" not in json.dumps(audience.events)
    assert "secret-host" in caplog.text


async def test_a_store_that_fails_once_is_told_the_failure_when_it_works_again() -> None:
    store = TrickyStore(fails)
    run = await begin(Calls(_async_generator), store)
    await run.execute(Audience().tell)
    stored = await record_of(run, store)
    assert stored is None or stored["status"] == "failed"


async def test_a_store_that_never_works_again_is_not_tried_for_ever() -> None:
    store = TrickyStore(*[fails] * 50)
    run = await begin(Calls(_async_generator), store)
    with anyio.fail_after(BOUND):
        await run.execute(Audience().tell)
    assert len(store.before) > 45


async def test_a_store_error_of_the_backends_own_is_no_excuse_for_not_keeping_the_failure() -> None:
    store = MemoryStore()
    run = await begin(ScriptedBackend(["a", errors.StoreError("My vectors are gone.")]), store)
    await run.execute(Audience().tell)
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "failed"


async def test_a_store_that_hangs_at_the_final_write_hangs_its_own_response_and_no_longer_than_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soon_given_up(monkeypatch, 0.05)
    store = TrickyStore(hangs, hangs, hangs)
    run, other = await begin(Calls(_async_generator), store), await begin(Calls(_async_generator))
    audience, other_audience = Audience(), Audience()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await anyio.wait_all_tasks_blocked()
            await other.execute(other_audience.tell)
            assert other_audience.events[-1]["type"] == "response.completed"
            group.cancel_scope.cancel()
    assert not any(event["type"] == "response.completed" for event in audience.events)


async def test_a_response_that_is_cancelled_while_it_is_written_is_on_record_as_it_ended() -> None:
    store = TrickyStore(hangs)
    run = await begin(Calls(_async_generator), store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, Audience().tell)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert await record_of(run, store) == run.response


async def test_a_failed_response_that_is_cancelled_while_it_is_written_is_on_record_all_the_same() -> None:
    store = TrickyStore(hangs)
    run = await begin(ScriptedBackend(["a", LookupError("gone")]), store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, Audience().tell)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert await record_of(run, store) == run.response


async def test_a_response_that_was_deleted_while_it_was_made_stays_deleted() -> None:
    store = MemoryStore()
    run = await begin(Calls(_async_generator), store)
    await store.delete("", run.response["id"])
    audience = Audience()
    await run.execute(audience.tell)
    check_stream(audience.events)
    assert await store.get("", run.response["id"]) is None


# Failures.


def _broken_plain(turn: Turn) -> Iterator[str]:
    yield "half "
    raise LookupError("secret-host is gone")


async def _broken_async(turn: Turn) -> AsyncIterator[str]:
    yield "half "
    raise LookupError("secret-host is gone")


def _broken_at_once(turn: Turn) -> Any:
    raise LookupError("secret-host is gone")


async def _broken_coroutine(turn: Turn) -> Any:
    raise LookupError("secret-host is gone")


def _broken_list(turn: Turn) -> Any:
    return [object()]


def _nothing(turn: Turn) -> Any:
    return None


async def _nothing_async(turn: Turn) -> Any:
    return None


def _stop_iteration(turn: Turn) -> Any:
    return next(iter(()))


async def _group(turn: Turn) -> AsyncIterator[str]:
    async with anyio.create_task_group():
        raise LookupError("secret-host is gone")
    yield ""


@pytest.mark.parametrize(
    "generate",
    [
        _broken_plain,
        _broken_async,
        _broken_at_once,
        _broken_coroutine,
        _broken_list,
        _nothing,
        _nothing_async,
        _stop_iteration,
        _group,
    ],
)
async def test_a_backend_that_fails_is_told_as_a_model_error_and_explained_to_the_log_alone(
    generate: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    run = await begin(Calls(generate), store)
    audience = Audience()
    with anyio.fail_after(BOUND):
        await run.execute(audience.tell)
    response = check_stream(audience.events)
    assert (response["status"], response["error"]["code"]) == ("failed", "model_error")
    assert isinstance(run.error, errors.ModelError)
    assert "secret" not in json.dumps(audience.events)
    assert await record_of(run, store) == response
    assert [entry.levelno for entry in caplog.records if entry.name == "responses_kit"] == [logging.ERROR]


async def test_an_error_meant_for_the_client_is_told_as_it_is() -> None:
    error = errors.TooManyRequests("All slots are taken.", retry_after=3)
    run = await begin(ScriptedBackend(["half ", error]))
    audience = Audience()
    await run.execute(audience.tell)
    assert run.error is error
    assert check_stream(audience.events)["error"] == {"code": "too_many_requests", "message": "All slots are taken."}


@pytest.mark.parametrize(
    "generate",
    [
        lambda turn: ["a", 7],
        lambda turn: ["a", *("b" for _ in range(100)), outputs.Usage(-1, 0), "c"],
        lambda turn: ScriptedBackend(["a", 7]).generate(turn),
    ],
)
async def test_an_illegal_output_fails_its_response_and_names_the_reason_in_the_log(
    generate: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = await begin(Calls(generate))
    audience = Audience()
    await run.execute(audience.tell)
    assert check_stream(audience.events)["error"]["code"] == "model_error"
    assert "illegal" in caplog.text


async def test_what_came_before_an_illegal_output_is_told_however_the_thread_was_ahead() -> None:
    told_first, ahead = threading.Event(), threading.Event()

    def generate(turn: Turn) -> Iterator[Any]:
        yield "first "
        told_first.wait(BOUND)
        yield from ("second ", "third")
        ahead.set()
        yield object()

    class Slow(Audience):
        async def tell(self, events: list[Event]) -> None:
            if any(event.get("delta") == "first " for event in events):
                told_first.set()
                await happened(ahead)
            await super().tell(events)

    run, audience = await begin(Calls(generate)), Slow()
    with anyio.fail_after(BOUND):
        await run.execute(audience.tell)
    response = check_stream(audience.events)
    assert response["status"] == "failed"
    assert response["output"][0]["content"][0]["text"] == "first second third"


def _exits(turn: Turn) -> Iterator[str]:
    yield "half "
    raise SystemExit(3)


async def _exits_async(turn: Turn) -> AsyncIterator[str]:
    yield "half "
    raise SystemExit(3)


async def _exits_before_anything(turn: Turn) -> Any:
    raise SystemExit(3)


def _exits_at_once(turn: Turn) -> Any:
    raise SystemExit(3)


def _cancelled_inside(turn: Turn) -> Iterator[str]:
    yield "half "
    raise asyncio.CancelledError


@pytest.mark.parametrize("generate", [_exits, _exits_async, _exits_before_anything, _exits_at_once, _cancelled_inside])
def test_a_backend_that_wants_to_end_the_whole_process_ends_its_own_response(
    generate: Callable[..., Any], anyio_backend_name: str
) -> None:
    store, audience = MemoryStore(), Audience()

    async def main() -> None:
        run = await begin(Calls(generate), store)
        with anyio.fail_after(BOUND):
            await run.execute(audience.tell)
        assert await record_of(run, store) == run.response

    try:
        anyio.run(main, backend=anyio_backend_name)
    except (SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
        pytest.fail(f"{type(error).__name__} went through to the host")
    assert check_stream(audience.events)["status"] == "failed"


# Others live too.


async def _flood(turn: Turn) -> AsyncIterator[str]:
    for _ in range(20_000):
        yield "x"


def _plain_flood(turn: Turn) -> Iterator[str]:
    for _ in range(200_000):
        yield "x"


@pytest.mark.parametrize("generate", [_flood, _plain_flood])
async def test_a_backend_that_never_waits_does_not_starve_others(generate: Callable[..., Any]) -> None:
    run = await begin(Calls(generate), store=False)
    ticks = 0

    async def tell(events: list[Event]) -> None:
        """Takes no time at all."""

    async with anyio.create_task_group() as group:

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await anyio.lowlevel.checkpoint()

        group.start_soon(tick)
        with anyio.fail_after(15):
            await run.execute(tell)
        group.cancel_scope.cancel()
    assert ticks > 100


@pytest.mark.parametrize("plain", [True, False])
async def test_a_backend_that_never_waits_and_never_ends_can_be_cancelled(plain: bool) -> None:
    stop = threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        while not stop.is_set():
            yield ""

    async def generate_async(turn: Turn) -> AsyncIterator[str]:
        for output in generate(turn):
            yield output

    rescue = threading.Timer(10, stop.set)
    rescue.start()
    store = MemoryStore()
    run = await begin(Calls(generate if plain else generate_async), store)
    with anyio.move_on_after(0.1) as scope:
        await run.execute(Audience().tell)
    rescued = stop.is_set()
    stop.set()
    rescue.cancel()
    rescue.join()
    assert not rescued, "it was not cancelled; it had to be stopped"
    assert scope.cancelled_caught
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


async def test_many_runs_at_once_do_not_mix() -> None:
    store = MemoryStore()
    kits = [ResponsesKit(Calls(generate), store=store) for generate in (_echo, _plain_echo)]
    answers: dict[str, Any] = {}

    async def ask(kit: ResponsesKit, name: str) -> None:
        answers[name] = await kit.create({"input": name})

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(ask, kits[number % 2], f"question {number}")
    for name, response in answers.items():
        check_response(response)
        assert response["output"][0]["content"][0]["text"] == name
    ids = [item["id"] for response in answers.values() for item in response["output"]]
    assert len(set(ids)) == 40


async def _echo(turn: Turn) -> AsyncIterator[str]:
    for letter in turn.text:
        await anyio.lowlevel.checkpoint()
        yield letter


def _plain_echo(turn: Turn) -> Iterator[str]:
    yield from turn.text


# Cancelled, or stopped, from beside: whoever listens is told.


class Hesitant(Audience):
    """Takes its time once it has heard so many events: what it is told then is not in before it goes on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.waits, self.goes_on = anyio.Event(), anyio.Event()

    async def tell(self, events: list[Event]) -> None:
        if len(self.events) >= self.at:
            self.waits.set()
            await self.goes_on.wait()
        await super().tell(events)


ENDINGS = {"cancel": "cancelled", "stop": "failed"}


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("at", [0, 2, 4, 5])
async def test_whoever_is_being_told_when_a_response_is_ended_misses_nothing(
    ending: str, at: int, resumable: bool
) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["one ", "two ", Pause(60)]), store=store, resumable=resumable)
    run, audience = await kit.service.create_run({"input": "Hi"}, streamed=True), Hesitant(at)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await audience.waits.wait()
            getattr(run, ending)()
            audience.goes_on.set()
    response = check_stream(audience.events)
    assert response["status"] == ENDINGS[ending]
    assert await record_of(run, store) == response


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_reader_that_takes_one_event_after_the_other_hears_each_once_when_its_response_is_ended(
    ending: str,
) -> None:
    store = MemoryStore()
    script = ["one ", outputs.Reasoning("two"), outputs.ToolCall("f"), "three", Pause(60)]
    for taken in range(14):
        kit = ResponsesKit(ScriptedBackend(script), store=store, stream_reasoning=True)
        told: list[Event] = []
        with anyio.fail_after(BOUND):
            async with kit.stream({"input": "Hi", "tools": [{"type": "function", "name": "f"}]}) as events:
                async for event in events:
                    told.append(event)
                    if len(told) == taken + 1:
                        await anyio.wait_all_tasks_blocked()
                        for run in list(kit.service.registry._runs):
                            getattr(run, ending)()
                        await anyio.wait_all_tasks_blocked()
        assert check_stream(told) == await kit.retrieve(told[0]["response"]["id"])
        assert told[-1]["response"]["status"] == ENDINGS[ending]


async def test_whoever_never_listens_again_holds_no_response_that_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    soon_given_up(monkeypatch, 0.05)
    monkeypatch.setattr(runs_module, "_UNDISTURBED_SECONDS", 0.02)
    store = MemoryStore()
    for ending, status in ENDINGS.items():
        run, audience = await begin(ScriptedBackend(["one "]), store), Hesitant(3)
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(run.execute, audience.tell)
                await audience.waits.wait()
                getattr(run, ending)()
        stored = await record_of(run, store)
        assert stored is not None
        assert stored["status"] == status


@pytest.mark.parametrize("ending", ENDINGS)
async def test_whoever_hears_of_a_response_that_had_ended_already_has_all_the_time_it_needs(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_UNDISTURBED_SECONDS", 0.02)

    async def around(name: str, call: Call) -> Any:
        answer = await call()
        if name == "update":
            getattr(run, ending)()
            await anyio.lowlevel.checkpoint()
        return answer

    store = Watched(around)
    run, audience = await begin(ScriptedBackend(["one "]), store), Hesitant(8)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await audience.waits.wait()
            await anyio.sleep(0.05)
            audience.goes_on.set()
    assert check_stream(audience.events)["status"] == "completed"
    assert await record_of(run, store) == audience.events[-1]["response"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_failure_that_is_written_while_the_response_is_ended_is_told(
    ending: str, resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_UNDISTURBED_SECONDS", 0.02)
    reached, first = anyio.Event(), [True]

    async def around(name: str, call: Call) -> Any:
        if name == "update" and first:
            first.clear()
            reached.set()
            await anyio.sleep_forever()
        return await call()

    store = Watched(around)
    kit = ResponsesKit(ScriptedBackend(["a", LookupError("gone")]), store=store, resumable=resumable)
    run, audience = await kit.service.create_run({"input": "Hi"}, streamed=True), Audience()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await reached.wait()
            getattr(run, ending)()
    response = check_stream(audience.events)
    assert response["error"]["code"] == "model_error"
    assert await record_of(run, store) == response


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("script", [["one", outputs.Reasoning("two")], ["one", LookupError("gone")]])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_however_an_ending_meets_the_responses_own_what_is_told_is_on_record(
    ending: str, script: list[Any], resumable: bool
) -> None:
    seen = set()
    for steps in range(100):
        store, clock = Watched(slow), Clock()
        kit = ResponsesKit(ScriptedBackend(script), store=store, resumable=resumable, clock=clock)
        run, audience = await kit.service.create_run({"input": "Hi"}, streamed=True), Audience()
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(run.execute, audience.tell)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                late = run.is_finished
                getattr(run, ending)()
        told = check_order(audience.events)
        seen.add((told["status"], (told["error"] or {}).get("code")))
        (stored,) = await check_kept(store, clock)
        assert stored == told, f"ended after {steps} steps"
        if late:
            break
    else:
        pytest.fail("it never ended by itself")
    assert len(seen) == 2


# Stores that fail.


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("done", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize("events", ["none", "told", "kept"])
async def test_a_store_that_fails_at_any_call_leaves_a_legal_stream_and_nothing_in_progress(
    events: str, done: bool, times: int
) -> None:
    for nth in range(100):
        failing, clock = Failing(nth, done=done, times=times), Clock()
        store = Watched(failing)
        script = [outputs.Reasoning("Hm."), "Hi"]
        kit = ResponsesKit(ScriptedBackend(script), store=store, resumable=events == "kept", clock=clock)
        audience, run = Audience(), None
        with anyio.fail_after(BOUND):
            try:
                run = await kit.service.create_run({"input": "Hi"}, streamed=events != "none")
                await run.execute(audience.tell)
            except errors.StoreError:
                assert run is None, "a failure came out of a response that was to be told of it"
        met = failing.heal()
        if run is not None:
            told = check_order(audience.events)
            assert (run.error is None) == (told["status"] == "completed")
            record = await store.get("", run.id)
            if times == 1 and record is not None and record.final:
                assert json.loads(record.response) == told, f"call {nth}"
        await check_kept(store, clock)
        if not met:
            break
    else:
        pytest.fail("the store was called for ever")
    assert nth >= 2, "creating and ending alone are two calls"


# Ended by somebody else, or deleted, while it is made: it gives way.


async def _ended_beside(run: Run, store: MemoryStore, *, cancelled: bool) -> None:
    """As whoever finds the lease to have run out ends it."""
    record = await store.get("", run.id)
    assert record is not None
    if cancelled:
        await store.cancel("", run.id, 0.0)
        record = await store.get("", run.id)
        assert record is not None
    assert await Repository(store).end("", record) is not None


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("at", range(6))
async def test_a_response_that_was_ended_in_its_workers_stead_stays_as_it_is_and_its_client_is_told(
    at: int, resumable: bool, cancelled: bool
) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["one ", "two ", outputs.Reasoning("three")]), store=store, resumable=resumable)
    run, audience = await kit.service.create_run({"input": "Hi"}, streamed=True), Hesitant(at)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await audience.waits.wait()
            await _ended_beside(run, store, cancelled=cancelled)
            ended, log = await store.get("", run.id), await store.events("", run.id, -1)
            audience.goes_on.set()
    told = check_stream(audience.events)
    assert ended is not None
    assert (await store.get("", run.id), await store.events("", run.id, -1)) == (ended, log)
    assert told["status"] == ("cancelled" if cancelled else "failed")
    assert (run.error is None) == cancelled
    if resumable:
        assert told == json.loads(ended.response)
        assert json.loads(run.encoded()) == told
    elif not cancelled:
        assert told["error"]["code"] == "worker_lost"


@pytest.mark.parametrize("gone", ["its log", "the record", "the store", "the store at the second look"])
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_response_that_gives_way_tells_an_ending_whatever_it_finds(gone: str, resumable: bool) -> None:
    failing = False
    looks = 0

    async def around(name: str, call: Call) -> Any:
        nonlocal looks
        if failing and name in ("get", "events"):
            looks += 1
            if gone == "the store" or looks == 2:
                raise OSError("the disk of secret-host is full")
        return await call()

    store = Watched(around, log_ttl=0.0 if gone == "its log" else 60.0)
    kit = ResponsesKit(ScriptedBackend(["one ", "two "]), store=store, resumable=resumable)
    run, audience = await kit.service.create_run({"input": "Hi"}, streamed=True), Hesitant(4)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            await audience.waits.wait()
            if gone == "the record":
                await store.delete("", run.id)
            else:
                await _ended_beside(run, store, cancelled=True)
            failing = gone.startswith("the store")
            audience.goes_on.set()
    told = check_stream(audience.events)
    if gone != "the record" or resumable:  # what is deleted need not end for it
        assert told["status"] in ("cancelled", "failed")
