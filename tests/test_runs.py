"""The life of one response: whatever the backend, the store and the listener do, it ends well and is on record."""

from __future__ import annotations

import asyncio
import copy
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
from responses_kit import runs as runs_module
from responses_kit.errors import ClientGone
from responses_kit.machine import Event
from responses_kit.runs import Run
from responses_kit.stores import Record
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from .conformance import check_response, check_stream

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
        self.error: Exception = ClientGone()

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

    async def update(self, owner: str, record: Record) -> bool:
        if self.before:
            await self.before.pop(0)()
        return await super().update(owner, record)


async def fails() -> None:
    raise OSError("the disk of secret-host is full")


async def hangs() -> None:
    await anyio.sleep_forever()


async def begin(backend: Backend, kept_in: Any = None, **body: Any) -> Run:
    return await ResponsesKit(backend, store=kept_in).begin({"input": "Hi", **body})


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
    monkeypatch.setattr(runs_module, "_CLEANUP_SECONDS", 0.05)
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
