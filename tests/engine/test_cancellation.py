"""Runs that end early: disconnected clients, cancelled scopes, and backends that do not close."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from responses_kit import HostedTool, Limits, ResponsesKit, Turn, outputs
from responses_kit.engine.run import Run
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from ..support.conformance import check_stream
from ..support.memory import shorten_cleanup
from .test_run import BOUND, CallableBackend, EventClient, _async_generator, create_run, stored_response, wait_for_event

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

# Disconnected clients.


def _async_generator_with_cleanup(log: list[str]) -> Callable[..., Any]:
    async def generate(turn: Turn) -> AsyncIterator[Any]:
        try:
            for word in ("one ", "two ", outputs.Reasoning("Hm."), outputs.ToolCall("f"), "three"):
                yield word
        finally:
            await anyio.lowlevel.checkpoint()
            log.append("closed")

    return generate


def _sync_generator_with_cleanup(log: list[str]) -> Callable[..., Any]:
    def generate(turn: Turn) -> Iterator[Any]:
        try:
            yield from ("one ", "two ", outputs.Reasoning("Hm."), outputs.ToolCall("f"), "three")
        finally:
            log.append("closed")

    return generate


@pytest.mark.parametrize("disconnects_at", range(9))
async def test_run_is_cancelled_when_client_disconnects_at_any_event(disconnects_at: int) -> None:
    store, log = MemoryStore(), list[str]()
    run = await create_run(
        CallableBackend(_async_generator_with_cleanup(log)), store, tools=[{"type": "function", "name": "f"}]
    )
    client = EventClient(disconnects_at=disconnects_at)
    with anyio.fail_after(BOUND):
        await run.execute(client.emit)
    assert client.calls <= disconnects_at + 1, "an event was sent after the client had disconnected"
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored == run.response
    if client.calls <= disconnects_at:
        assert stored["status"] == "completed"
    elif stored["status"] == "cancelled":
        assert run.context.turn.cancelled
    else:
        assert stored["status"] == "completed", "only a completed response can have missed the disconnection"
    assert log == ([] if disconnects_at == 0 else ["closed"])


async def test_sync_generator_is_closed_when_client_disconnects() -> None:
    store, closed = MemoryStore(), threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        try:
            while not turn.cancelled:
                yield "more "
        finally:
            closed.set()

    run = await create_run(CallableBackend(generate), store)
    with anyio.fail_after(BOUND):
        await run.execute(EventClient(disconnects_at=3).emit)
    await wait_for_event(closed)
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


@pytest.mark.parametrize("disconnects_at", range(5))
async def test_record_is_final_when_emit_raises(disconnects_at: int) -> None:
    store = MemoryStore()
    run = await create_run(CallableBackend(_async_generator), store)
    client = EventClient(disconnects_at=disconnects_at)
    client.error = RuntimeError("the server reports the disconnection by its own error")
    with anyio.fail_after(BOUND), suppress(RuntimeError):
        await run.execute(client.emit)
    assert await stored_response(run, store) == run.response


async def test_failure_is_saved_when_client_disconnects_during_it() -> None:
    store = MemoryStore()
    run = await create_run(ScriptedBackend([LookupError("gone")]), store)
    await run.execute(EventClient(disconnects_at=1).emit)
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "failed"


# Cancellation.


async def cancel_once_blocked(run: Run, client: EventClient) -> None:
    """Cancel the scope around a run once all tasks are blocked, and check that the cancellation ends it."""
    outcome: list[str] = []

    async def execute() -> None:
        try:
            await run.execute(client.emit)
            outcome.append("returned")
        except anyio.get_cancelled_exc_class():
            outcome.append("cancelled")
            raise

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(execute)
            await anyio.wait_all_tasks_blocked()
            count = len(client.events)
            group.cancel_scope.cancel()
    assert outcome == ["cancelled"]
    assert len(client.events) == count, "an event was sent after the cancellation"


async def test_cancelled_run_closes_async_backend_and_is_saved() -> None:
    store, log = MemoryStore(), list[str]()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            await anyio.sleep_forever()
        finally:
            log.append("closing")
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            log.append("closed")

    run = await create_run(CallableBackend(generate), store)
    await cancel_once_blocked(run, EventClient())
    assert log == ["closing", "closed"]
    stored = await stored_response(run, store)
    assert stored is not None
    assert (stored["status"], run.context.turn.cancelled) == ("cancelled", True)
    assert stored["output"][0]["content"][0]["text"] == "half "


async def test_cancelled_run_stops_blocked_thread_without_waiting() -> None:
    store = MemoryStore()
    resume, closed = threading.Event(), threading.Event()
    cancelled_flags: list[bool] = []

    def generate(turn: Turn) -> Iterator[str]:
        try:
            yield "half "
            resume.wait(BOUND)
            cancelled_flags.append(turn.cancelled)
            yield "late"
            cancelled_flags.append(False)
        finally:
            closed.set()

    run = await create_run(CallableBackend(generate), store)
    client = EventClient()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, client.emit)
            while not any("delta" in event for event in client.events):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"
    resume.set()
    await wait_for_event(closed)
    assert cancelled_flags == [True]


@pytest.mark.parametrize("cause", ["cancelled", "disconnected"])
async def test_backend_that_yields_while_closing_is_cut_off(cause: str) -> None:
    store = MemoryStore()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            await anyio.sleep_forever()
        finally:
            for _ in range(5):
                yield "still here "

    run = await create_run(CallableBackend(generate), store)
    if cause == "cancelled":
        await cancel_once_blocked(run, EventClient())
    else:
        with anyio.fail_after(BOUND):
            await run.execute(EventClient(disconnects_at=1).emit)
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


@pytest.mark.parametrize("cause", ["cancelled", "disconnected"])
async def test_run_is_cancelled_when_backend_fails_while_closing(cause: str) -> None:
    store = MemoryStore()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            await anyio.sleep_forever()
        finally:
            raise LookupError("nothing to close")

    run = await create_run(CallableBackend(generate), store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, EventClient(disconnects_at=None if cause == "cancelled" else 1).emit)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] in ("cancelled", "failed")


async def test_backend_that_never_closes_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_cleanup(monkeypatch, 0.05)
    store = MemoryStore()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            yield "more "
        finally:
            await anyio.sleep_forever()

    run = await create_run(CallableBackend(generate), store)
    with anyio.fail_after(BOUND):
        await run.execute(EventClient(disconnects_at=1).emit)
    stored = await stored_response(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


async def test_run_waiting_for_thread_can_be_cancelled() -> None:
    resume, started = threading.Event(), threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        started.set()
        resume.wait(BOUND)
        yield "done"

    kit = ResponsesKit(CallableBackend(generate), limits=Limits(max_threads=1))
    first, second, third = [await kit.service.create_run({"input": "Hi"}) for _ in range(3)]
    clients = [EventClient() for _ in range(3)]
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(first.execute, clients[0].emit)
            await wait_for_event(started)
            started.clear()
            with anyio.move_on_after(0.02) as waiting:
                await second.execute(clients[1].emit)
            assert waiting.cancelled_caught
            assert not started.is_set(), "a second thread was started"
            resume.set()
            group.start_soon(third.execute, clients[2].emit)
    assert [len(check_stream(client.events)["output"]) for client in (clients[0], clients[2])] == [1, 1]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_native_asyncio_cancellation_reaches_running_tool(in_thread: bool, how: str) -> None:
    """Hosts without anyio cancel tasks like this when a client disconnects."""
    release = threading.Event()

    def hold() -> str:
        release.wait(5)
        return "done"

    async def hold_async() -> str:
        await asyncio.sleep(5)
        return "done"

    tool = HostedTool.from_function("t:hold", hold if in_thread else hold_async, name="hold")
    kit = ResponsesKit(ScriptedBackend([outputs.ToolCall("hold")], ["Done."]), tools=[tool])

    async def main() -> str:
        run = await kit.service.create_run({"input": "x", "tools": [{"type": "t:hold"}]})
        started = asyncio.Event()

        async def emit(events: list[Any]) -> None:
            if any(event["type"] == "response.output_item.added" for event in events):
                started.set()

        async def execute() -> None:
            async with asyncio.timeout(0.1 if how == "timeout" else None):
                await run.execute(emit)

        task = asyncio.create_task(execute())
        await asyncio.wait_for(started.wait(), 5)
        if how == "cancel":
            task.cancel()
        with pytest.raises(TimeoutError if how == "timeout" else asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        return str(run.response["status"])

    try:
        assert asyncio.run(main()) == "cancelled"
    finally:
        release.set()
