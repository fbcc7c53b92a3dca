"""Runs: whatever the backend, the store and the client do, the stream is legal and the record is final."""

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
from responses_kit.engine import run as run_module
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
from ..support.memory import shorten_cleanup, stored_records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class CallableBackend(Backend):
    """A backend that generates with a function."""

    models = (Model("scripted", tools=True),)

    def __init__(self, generate: Callable[..., Any]) -> None:
        self.generate = generate


class EventClient:
    """Receives events, reads the record of the response meanwhile, and disconnects after a number of calls."""

    def __init__(self, store: MemoryStore | None = None, *, disconnects_at: int | None = None) -> None:
        self.events: list[Event] = []
        self.records: list[Record | None] = []
        self.store = store
        self.disconnects_at = disconnects_at
        self.calls = 0
        self.error: Exception = ClientDisconnected()

    async def emit(self, events: list[Event]) -> None:
        await anyio.lowlevel.checkpoint()
        self.calls += 1
        assert events, "emit was called without events"
        if self.disconnects_at is not None and self.calls > self.disconnects_at:
            raise self.error
        if self.store is not None and "response" in events[0]:
            self.records.append(await self.store.get("", events[0]["response"]["id"]))
        self.events += copy.deepcopy(events)


class UpdateHookStore(MemoryStore):
    """A memory store that calls a function of the test before each update, as long as there are any."""

    def __init__(self, *before: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.before = list(before)

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        if self.before:
            await self.before.pop(0)()
        return await super().update(owner, record, log)


Call = Callable[[], Awaitable[Any]]


class InterceptedStore(MemoryStore):
    """A memory store that passes each call and its method's name to a function of the test."""

    def __init__(self, intercept: Callable[[str, Call], Awaitable[Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self.intercept = intercept


def _intercepted(name: str) -> Callable[..., Awaitable[Any]]:
    real = getattr(MemoryStore, name)

    async def method(self: InterceptedStore, *args: Any) -> Any:
        return await self.intercept(name, functools.partial(real, self, *args))

    return method


CALLS = [name for name, method in vars(ResponseStore).items() if inspect.iscoroutinefunction(method)]
for _method_name in CALLS:
    setattr(InterceptedStore, _method_name, _intercepted(_method_name))


async def pass_with_checkpoints(name: str, call: Call) -> Any:
    """Run other tasks before and after a call, as a store across a network does."""
    await anyio.lowlevel.checkpoint()
    answer = await call()
    await anyio.lowlevel.checkpoint()
    return answer


class StoreFailure:
    """Fails the nth call of a store, and optionally some calls after it.

    Args:
        nth: Index of the first call that fails.
        fails_after_work: Whether a failing call does its work first.
        times: Number of consecutive calls that fail.
    """

    def __init__(self, nth: int, *, fails_after_work: bool, times: int = 1) -> None:
        self.failing_calls, self.fails_after_work = range(nth, nth + times), fails_after_work
        self.count = 0

    async def __call__(self, name: str, call: Call) -> Any:
        number, self.count = self.count, self.count + 1
        await anyio.lowlevel.checkpoint()
        answer = await call() if self.fails_after_work or number not in self.failing_calls else None
        if number in self.failing_calls:
            raise OSError("the disk of secret-host is full")
        return answer

    def stop_failing(self) -> bool:
        """Let all further calls succeed, and return whether one has failed."""
        has_failed, self.failing_calls = self.count > self.failing_calls[0], range(0)
        return has_failed


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_750_000_000.0

    def __call__(self) -> float:
        return self.now


def check_replay(events: list[Event]) -> dict[str, Any]:
    """Check the order of a stream but not the form of its events, which is faster than `check_stream`."""
    final: dict[str, Any] = events[-1].get("response", {}) if events else {}
    assert replay(events) == final
    return final


async def check_records(store: MemoryStore, clock: Clock) -> list[dict[str, Any]]:
    """Expire all leases, sweep, check that each record is final and matches its log, and return the responses."""
    clock.now += 1_000_000
    await Repository(store, clock=clock).sweep()
    responses = []
    for record in stored_records(store):
        response = json.loads(record.response)
        assert record.final, f"the record of a {response['status']} response is not final"
        assert response["status"] in ("completed", "incomplete", "failed", "cancelled"), response["status"]
        if record.events == "logged":
            pieces = await store.events("", record.id, -1)
            assert pieces is not None
            assert check_replay(decode_events(b"".join(piece.data for piece in pieces))) == response
        responses.append(response)
    return responses


@pytest.fixture
def reset_failure_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the throttling of store failures in the log, so that the next one is logged in full."""
    monkeypatch.setattr(stores_module, "_last_traceback", -1e9)


async def fail() -> None:
    raise OSError("the disk of secret-host is full")


async def hang() -> None:
    await anyio.sleep_forever()


async def create_run(backend: Backend, response_store: Any = None, **body: Any) -> Run:
    return await ResponsesKit(backend, store=response_store).service.create_run({"input": "Hi", **body})


async def stored_response(run: Run, store: MemoryStore) -> dict[str, Any] | None:
    """Return the stored response, or None; check that it is final."""
    record = await store.get("", run.response["id"])
    if record is None:
        return None
    response: dict[str, Any] = json.loads(record.response)
    assert record.final, f"the record of a {response['status']} response is not final"
    assert response["status"] in ("completed", "incomplete", "failed", "cancelled"), response["status"]
    check_response(response)
    return response


async def collect_events(generate: Callable[..., Any]) -> list[Event]:
    """Return the events of a run after checking them."""
    run = await create_run(CallableBackend(generate))
    client = EventClient()
    with anyio.fail_after(BOUND):
        await run.execute(client.emit)
    check_stream(client.events)
    return client.events


async def wait_for_event(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, BOUND), "the event was not set"


# Every way to write a backend.


async def _async_generator(turn: Turn) -> AsyncIterator[str]:
    yield "Hello, "
    await anyio.lowlevel.checkpoint()
    yield "world."


async def _async_list(turn: Turn) -> list[str]:
    return ["Hello, ", "world."]


async def _async_text(turn: Turn) -> str:
    return "Hello, world."


async def _async_returning_async_generator(turn: Turn) -> AsyncIterator[str]:
    return _async_generator(turn)


async def _async_returning_generator(turn: Turn) -> Iterator[str]:
    return _generator(turn)


def _generator(turn: Turn) -> Iterator[str]:
    yield "Hello, "
    yield "world."


def _list(turn: Turn) -> list[outputs.Output]:
    return [outputs.Text("Hello, "), "world."]


def _text(turn: Turn) -> str:
    return "Hello, world."


def _sync_returning_async_generator(turn: Turn) -> AsyncIterator[str]:
    return _async_generator(turn)


def _sync_returning_coroutine(turn: Turn) -> Awaitable[str]:
    return _async_text(turn)


class _Iterable:
    def __aiter__(self) -> AsyncIterator[str]:
        self.left = ["world.", "Hello, "]
        return self

    async def __anext__(self) -> str:
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop()


def _custom_async_iterable(turn: Turn) -> Any:
    return _Iterable()


@pytest.mark.parametrize(
    "generate",
    [
        _async_generator,
        _async_list,
        _async_text,
        _async_returning_async_generator,
        _async_returning_generator,
        _generator,
        _list,
        _text,
        _sync_returning_async_generator,
        _sync_returning_coroutine,
        _custom_async_iterable,
    ],
)
async def test_backend_may_return_any_kind_of_outputs(generate: Callable[..., Any]) -> None:
    events = await collect_events(generate)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, world."


async def test_generate_may_be_sync_or_async_method() -> None:
    class SyncBackend(Backend):
        models = ("is_sync",)

        def generate(self, turn: Turn) -> Iterator[str]:
            yield turn.text

    class AsyncBackend(Backend):
        models = ("async",)

        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            yield turn.text

    for backend in (SyncBackend(), AsyncBackend()):
        response = await ResponsesKit(backend).create({"input": "Hi"})
        assert response["output"][0]["content"][0]["text"] == "Hi"


# The record.


@pytest.mark.parametrize("generate", [_async_generator, _generator])
async def test_record_exists_before_first_event_and_is_final_before_last(
    generate: Callable[..., Any],
) -> None:
    store = MemoryStore()
    run = await create_run(CallableBackend(generate), store)
    client = EventClient(store)
    await run.execute(client.emit)
    first, last = client.records[0], client.records[-1]
    assert first is not None
    assert last is not None
    assert (first.final, last.final) == (False, True)
    assert json.loads(first.response) == client.events[0]["response"]
    assert json.loads(last.response) == client.events[-1]["response"]
    assert set(last.item_ids) >= {item["id"] for item in run.response["output"]}


async def test_unstored_response_never_reaches_store() -> None:
    store = UpdateHookStore(fail)
    run = await create_run(CallableBackend(_async_generator), store, store=False)
    client = EventClient()
    await run.execute(client.emit)
    assert len(store) == 0
    assert check_stream(client.events)["status"] == "completed"


@pytest.mark.usefixtures("reset_failure_log")
async def test_store_failing_at_creation_fails_request_before_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingStore(MemoryStore):
        async def create(self, owner: str, record: Record) -> None:
            await fail()

    backend = ScriptedBackend(["Yes."])
    with pytest.raises(errors.StoreError) as caught:
        await create_run(backend, FailingStore())
    assert "secret" not in caught.value.message
    assert "secret-host" in caplog.text
    assert backend.turns == []


@pytest.mark.usefixtures("reset_failure_log")
@pytest.mark.parametrize("generate", [_async_generator, _generator])
async def test_failing_final_save_fails_response(
    generate: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = UpdateHookStore(fail)
    run = await create_run(CallableBackend(generate), store)
    client = EventClient()
    await run.execute(client.emit)
    response = check_stream(client.events)
    assert (response["status"], response["error"]["code"]) == ("failed", "store_error")
    assert isinstance(run.error, errors.StoreError)
    assert "secret" not in json.dumps(client.events)
    assert "secret-host" in caplog.text


async def test_failure_is_saved_once_store_recovers() -> None:
    store = UpdateHookStore(fail)
    run = await create_run(CallableBackend(_async_generator), store)
    await run.execute(EventClient().emit)
    stored = await stored_response(run, store)
    assert stored is None or stored["status"] == "failed"


async def test_broken_store_is_not_retried_endlessly() -> None:
    store = UpdateHookStore(*[fail] * 50)
    run = await create_run(CallableBackend(_async_generator), store)
    with anyio.fail_after(BOUND):
        await run.execute(EventClient().emit)
    assert len(store.before) > 45


async def test_store_error_raised_by_backend_is_saved_as_failure() -> None:
    store = MemoryStore()
    run = await create_run(ScriptedBackend(["a", errors.StoreError("My vectors are gone.")]), store)
    await run.execute(EventClient().emit)
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "failed"


async def test_hanging_final_save_blocks_only_its_own_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorten_cleanup(monkeypatch, 0.05)
    store = UpdateHookStore(hang, hang, hang)
    run, other = (
        await create_run(CallableBackend(_async_generator), store),
        await create_run(CallableBackend(_async_generator)),
    )
    client, other_client = EventClient(), EventClient()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await anyio.wait_all_tasks_blocked()
            await other.execute(other_client.emit)
            assert other_client.events[-1]["type"] == "response.completed"
            group.cancel_scope.cancel()
    assert not any(event["type"] == "response.completed" for event in client.events)


async def test_response_cancelled_during_final_save_is_saved() -> None:
    store = UpdateHookStore(hang)
    run = await create_run(CallableBackend(_async_generator), store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, EventClient().emit)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert await stored_response(run, store) == run.response


async def test_failed_response_cancelled_during_final_save_is_saved() -> None:
    store = UpdateHookStore(hang)
    run = await create_run(ScriptedBackend(["a", LookupError("gone")]), store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, EventClient().emit)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert await stored_response(run, store) == run.response


async def test_response_deleted_while_generated_stays_deleted() -> None:
    store = MemoryStore()
    run = await create_run(CallableBackend(_async_generator), store)
    await store.delete("", run.response["id"])
    client = EventClient()
    await run.execute(client.emit)
    check_stream(client.events)
    assert await store.get("", run.response["id"]) is None


# Failing backends.


def _fail_in_generator(turn: Turn) -> Iterator[str]:
    yield "half "
    raise LookupError("secret-host is gone")


async def _fail_in_async_generator(turn: Turn) -> AsyncIterator[str]:
    yield "half "
    raise LookupError("secret-host is gone")


def _fail_in_function(turn: Turn) -> Any:
    raise LookupError("secret-host is gone")


async def _fail_in_coroutine(turn: Turn) -> Any:
    raise LookupError("secret-host is gone")


def _return_illegal_list(turn: Turn) -> Any:
    return [object()]


def _return_none(turn: Turn) -> Any:
    return None


async def _return_none_async(turn: Turn) -> Any:
    return None


def _raise_stop_iteration(turn: Turn) -> Any:
    return next(iter(()))


async def _raise_exception_group(turn: Turn) -> AsyncIterator[str]:
    async with anyio.create_task_group():
        raise LookupError("secret-host is gone")
    yield ""


@pytest.mark.parametrize(
    "generate",
    [
        _fail_in_generator,
        _fail_in_async_generator,
        _fail_in_function,
        _fail_in_coroutine,
        _return_illegal_list,
        _return_none,
        _return_none_async,
        _raise_stop_iteration,
        _raise_exception_group,
    ],
)
async def test_failing_backend_is_model_error_with_details_in_log_only(
    generate: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    run = await create_run(CallableBackend(generate), store)
    client = EventClient()
    with anyio.fail_after(BOUND):
        await run.execute(client.emit)
    response = check_stream(client.events)
    assert (response["status"], response["error"]["code"]) == ("failed", "model_error")
    assert isinstance(run.error, errors.ModelError)
    assert "secret" not in json.dumps(client.events)
    assert await stored_response(run, store) == response
    assert [entry.levelno for entry in caplog.records if entry.name == "responses_kit"] == [logging.ERROR]


async def test_api_error_of_backend_reaches_client() -> None:
    error = errors.TooManyRequests("All slots are taken.", retry_after=3)
    run = await create_run(ScriptedBackend(["half ", error]))
    client = EventClient()
    await run.execute(client.emit)
    assert run.error is error
    assert check_stream(client.events)["error"] == {"code": "too_many_requests", "message": "All slots are taken."}


@pytest.mark.parametrize(
    "generate",
    [
        lambda turn: ["a", 7],
        lambda turn: ["a", *("b" for _ in range(100)), outputs.Usage(-1, 0), "c"],
        lambda turn: ScriptedBackend(["a", 7]).generate(turn),
    ],
)
async def test_illegal_output_fails_response_and_is_logged(
    generate: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    run = await create_run(CallableBackend(generate))
    client = EventClient()
    await run.execute(client.emit)
    assert check_stream(client.events)["error"]["code"] == "model_error"
    assert "illegal" in caplog.text


async def test_outputs_before_illegal_output_are_sent() -> None:
    first_sent, ahead = threading.Event(), threading.Event()

    def generate(turn: Turn) -> Iterator[Any]:
        yield "first "
        first_sent.wait(BOUND)
        yield from ("second ", "third")
        ahead.set()
        yield object()

    class SlowClient(EventClient):
        async def emit(self, events: list[Event]) -> None:
            if any(event.get("delta") == "first " for event in events):
                first_sent.set()
                await wait_for_event(ahead)
            await super().emit(events)

    run, client = await create_run(CallableBackend(generate)), SlowClient()
    with anyio.fail_after(BOUND):
        await run.execute(client.emit)
    response = check_stream(client.events)
    assert response["status"] == "failed"
    assert response["output"][0]["content"][0]["text"] == "first second third"


def _exit_in_generator(turn: Turn) -> Iterator[str]:
    yield "half "
    raise SystemExit(3)


async def _exit_in_async_generator(turn: Turn) -> AsyncIterator[str]:
    yield "half "
    raise SystemExit(3)


async def _exit_in_coroutine(turn: Turn) -> Any:
    raise SystemExit(3)


def _exit_in_function(turn: Turn) -> Any:
    raise SystemExit(3)


def _raise_cancelled_error(turn: Turn) -> Iterator[str]:
    yield "half "
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "generate",
    [_exit_in_generator, _exit_in_async_generator, _exit_in_coroutine, _exit_in_function, _raise_cancelled_error],
)
def test_backend_raising_system_exit_fails_only_its_response(
    generate: Callable[..., Any], anyio_backend_name: str
) -> None:
    store, client = MemoryStore(), EventClient()

    async def main() -> None:
        run = await create_run(CallableBackend(generate), store)
        with anyio.fail_after(BOUND):
            await run.execute(client.emit)
        assert await stored_response(run, store) == run.response

    try:
        anyio.run(main, backend=anyio_backend_name)
    except (SystemExit, asyncio.CancelledError, BaseExceptionGroup) as error:
        pytest.fail(f"{type(error).__name__} propagated to the host")
    assert check_stream(client.events)["status"] == "failed"


# Fairness.


async def _flood(turn: Turn) -> AsyncIterator[str]:
    for _ in range(20_000):
        yield "x"


def _sync_flood(turn: Turn) -> Iterator[str]:
    for _ in range(200_000):
        yield "x"


@pytest.mark.parametrize("generate", [_flood, _sync_flood])
async def test_backend_that_never_waits_does_not_starve_other_tasks(generate: Callable[..., Any]) -> None:
    run = await create_run(CallableBackend(generate), store=False)
    ticks = 0

    async def emit(events: list[Event]) -> None:
        """Discard the events without waiting."""

    async with anyio.create_task_group() as group:

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await anyio.lowlevel.checkpoint()

        group.start_soon(tick)
        with anyio.fail_after(15):
            await run.execute(emit)
        group.cancel_scope.cancel()
    assert ticks > 100


@pytest.mark.parametrize("is_sync", [True, False])
async def test_endless_backend_that_never_waits_can_be_cancelled(is_sync: bool) -> None:
    stop = threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        while not stop.is_set():
            yield ""

    async def generate_async(turn: Turn) -> AsyncIterator[str]:
        for output in generate(turn):
            yield output

    rescue_timer = threading.Timer(10, stop.set)
    rescue_timer.start()
    store = MemoryStore()
    run = await create_run(CallableBackend(generate if is_sync else generate_async), store)
    with anyio.move_on_after(0.1) as scope:
        await run.execute(EventClient().emit)
    was_rescued = stop.is_set()
    stop.set()
    rescue_timer.cancel()
    rescue_timer.join()
    assert not was_rescued, "the run was not cancelled"
    assert scope.cancelled_caught
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


async def test_concurrent_runs_do_not_mix() -> None:
    store = MemoryStore()
    kits = [ResponsesKit(CallableBackend(generate), store=store) for generate in (_echo, _sync_echo)]
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


def _sync_echo(turn: Turn) -> Iterator[str]:
    yield from turn.text


# Cancellation and shutdown while events are sent.


class PausingClient(EventClient):
    """A client that pauses after a number of events until the test sets `resume`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.pause_at = at
        self.paused, self.resume = anyio.Event(), anyio.Event()

    async def emit(self, events: list[Event]) -> None:
        if len(self.events) >= self.pause_at:
            self.paused.set()
            await self.resume.wait()
        await super().emit(events)


ENDINGS = {"cancel": "cancelled", "stop": "failed"}


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("at", [0, 2, 4, 5])
async def test_client_receives_all_events_when_run_is_ended_during_send(ending: str, at: int, resumable: bool) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["one ", "two ", Pause(60)]), store=store, resumable=resumable)
    run, client = await kit.service.create_run({"input": "Hi"}, streamed=True), PausingClient(at)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await client.paused.wait()
            getattr(run, ending)()
            client.resume.set()
    response = check_stream(client.events)
    assert response["status"] == ENDINGS[ending]
    assert await stored_response(run, store) == response


@pytest.mark.parametrize("ending", ENDINGS)
async def test_stream_reader_receives_each_event_once_when_run_is_ended(
    ending: str,
) -> None:
    store = MemoryStore()
    script = ["one ", outputs.Reasoning("two"), outputs.ToolCall("f"), "three", Pause(60)]
    for paused_at in range(14):
        kit = ResponsesKit(ScriptedBackend(script), store=store, stream_reasoning=True)
        sent: list[Event] = []
        with anyio.fail_after(BOUND):
            async with kit.stream({"input": "Hi", "tools": [{"type": "function", "name": "f"}]}) as events:
                async for event in events:
                    sent.append(event)
                    if len(sent) == paused_at + 1:
                        await anyio.wait_all_tasks_blocked()
                        for run in list(kit.service.registry._runs):
                            getattr(run, ending)()
                        await anyio.wait_all_tasks_blocked()
        assert check_stream(sent) == await kit.retrieve(sent[0]["response"]["id"])
        assert sent[-1]["response"]["status"] == ENDINGS[ending]


async def test_stalled_client_does_not_block_ended_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_cleanup(monkeypatch, 0.05)
    monkeypatch.setattr(run_module, "_IN_FLIGHT_TIMEOUT", 0.02)
    store = MemoryStore()
    for ending, status in ENDINGS.items():
        run, client = await create_run(ScriptedBackend(["one "]), store), PausingClient(3)
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(run.execute, client.emit)
                await client.paused.wait()
                getattr(run, ending)()
        stored = await stored_response(run, store)
        assert stored is not None
        assert stored["status"] == status


@pytest.mark.parametrize("ending", ENDINGS)
async def test_terminal_event_is_not_interrupted_after_natural_end(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_IN_FLIGHT_TIMEOUT", 0.02)

    async def intercept(name: str, call: Call) -> Any:
        answer = await call()
        if name == "update":
            getattr(run, ending)()
            await anyio.lowlevel.checkpoint()
        return answer

    store = InterceptedStore(intercept)
    run, client = await create_run(ScriptedBackend(["one "]), store), PausingClient(8)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await client.paused.wait()
            await anyio.sleep(0.05)
            client.resume.set()
    assert check_stream(client.events)["status"] == "completed"
    assert await stored_response(run, store) == client.events[-1]["response"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("resumable", [False, True])
async def test_failure_being_saved_when_run_is_ended_is_sent(
    ending: str, resumable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_IN_FLIGHT_TIMEOUT", 0.02)
    reached, first = anyio.Event(), [True]

    async def intercept(name: str, call: Call) -> Any:
        if name == "update" and first:
            first.clear()
            reached.set()
            await anyio.sleep_forever()
        return await call()

    store = InterceptedStore(intercept)
    kit = ResponsesKit(ScriptedBackend(["a", LookupError("gone")]), store=store, resumable=resumable)
    run, client = await kit.service.create_run({"input": "Hi"}, streamed=True), EventClient()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await reached.wait()
            getattr(run, ending)()
    response = check_stream(client.events)
    assert response["error"]["code"] == "model_error"
    assert await stored_response(run, store) == response


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("script", [["one", outputs.Reasoning("two")], ["one", LookupError("gone")]])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_sent_response_matches_record_whenever_run_is_ended(
    ending: str, script: list[Any], resumable: bool
) -> None:
    outcomes = set()
    for steps in range(100):
        store, clock = InterceptedStore(pass_with_checkpoints), Clock()
        kit = ResponsesKit(ScriptedBackend(script), store=store, resumable=resumable, clock=clock)
        run, client = await kit.service.create_run({"input": "Hi"}, streamed=True), EventClient()
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                group.start_soon(run.execute, client.emit)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                has_finished = run.is_finished
                getattr(run, ending)()
        sent = check_replay(client.events)
        outcomes.add((sent["status"], (sent["error"] or {}).get("code")))
        (stored,) = await check_records(store, clock)
        assert stored == sent, f"ended after {steps} steps"
        if has_finished:
            break
    else:
        pytest.fail("the run never finished on its own")
    assert len(outcomes) == 2


# Failing stores.


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("fails_after_work", [False, True], ids=["before work", "after work"])
@pytest.mark.parametrize("events", ["none", "streamed", "logged"])
async def test_stream_is_legal_and_record_final_when_store_fails_at_any_call(
    events: str, fails_after_work: bool, times: int
) -> None:
    for nth in range(100):
        failing, clock = StoreFailure(nth, fails_after_work=fails_after_work, times=times), Clock()
        store = InterceptedStore(failing)
        script = [outputs.Reasoning("Hm."), "Hi"]
        kit = ResponsesKit(ScriptedBackend(script), store=store, resumable=events == "logged", clock=clock)
        client, run = EventClient(), None
        with anyio.fail_after(BOUND):
            try:
                run = await kit.service.create_run({"input": "Hi"}, streamed=events != "none")
                await run.execute(client.emit)
            except errors.StoreError:
                assert run is None, "a created response raised its failure instead of emitting it"
        has_failed = failing.stop_failing()
        if run is not None:
            sent = check_replay(client.events)
            assert (run.error is None) == (sent["status"] == "completed")
            record = await store.get("", run.id)
            if times == 1 and record is not None and record.final:
                assert json.loads(record.response) == sent, f"call {nth}"
        await check_records(store, clock)
        if not has_failed:
            break
    else:
        pytest.fail("the store was called without end")
    assert nth >= 2, "creation and end need at least two calls"


# Superseded runs.


async def _end_elsewhere(run: Run, store: MemoryStore, *, cancelled: bool) -> None:
    """End a response as another process does when its lease has expired."""
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
async def test_superseded_run_sends_stored_ending(at: int, resumable: bool, cancelled: bool) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["one ", "two ", outputs.Reasoning("three")]), store=store, resumable=resumable)
    run, client = await kit.service.create_run({"input": "Hi"}, streamed=True), PausingClient(at)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await client.paused.wait()
            await _end_elsewhere(run, store, cancelled=cancelled)
            ended, log = await store.get("", run.id), await store.events("", run.id, -1)
            client.resume.set()
    sent = check_stream(client.events)
    assert ended is not None
    assert (await store.get("", run.id), await store.events("", run.id, -1)) == (ended, log)
    assert sent["status"] == ("cancelled" if cancelled else "failed")
    assert (run.error is None) == cancelled
    if resumable:
        assert sent == json.loads(ended.response)
        assert json.loads(run.encoded()) == sent
    elif not cancelled:
        assert sent["error"]["code"] == "worker_lost"


@pytest.mark.parametrize("gone", ["log", "record", "store", "store on second read"])
@pytest.mark.parametrize("resumable", [False, True])
async def test_superseded_run_sends_ending_whatever_store_returns(gone: str, resumable: bool) -> None:
    failing = False
    reads = 0

    async def intercept(name: str, call: Call) -> Any:
        nonlocal reads
        if failing and name in ("get", "events"):
            reads += 1
            if gone == "store" or reads == 2:
                raise OSError("the disk of secret-host is full")
        return await call()

    store = InterceptedStore(intercept, log_ttl=0.0 if gone == "log" else 60.0)
    kit = ResponsesKit(ScriptedBackend(["one ", "two "]), store=store, resumable=resumable)
    run, client = await kit.service.create_run({"input": "Hi"}, streamed=True), PausingClient(4)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            await client.paused.wait()
            if gone == "record":
                await store.delete("", run.id)
            else:
                await _end_elsewhere(run, store, cancelled=True)
            failing = gone.startswith("store")
            client.resume.set()
    sent = check_stream(client.events)
    if gone != "record" or resumable:  # the run of a deleted response may also complete
        assert sent["status"] in ("cancelled", "failed")
