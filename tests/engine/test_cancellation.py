"""Runs that end early: listeners that leave, scopes that are cancelled, backends that won't let go."""

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
from ..support.memory import soon_given_up
from .test_run import BOUND, Audience, Calls, _async_generator, begin, happened, record_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

# Listeners that leave.


def _slow_closing(log: list[str]) -> Callable[..., Any]:
    async def generate(turn: Turn) -> AsyncIterator[Any]:
        try:
            for word in ("one ", "two ", outputs.Reasoning("Hm."), outputs.ToolCall("f"), "three"):
                yield word
        finally:
            await anyio.lowlevel.checkpoint()
            log.append("closed")

    return generate


def _plain_closing(log: list[str]) -> Callable[..., Any]:
    def generate(turn: Turn) -> Iterator[Any]:
        try:
            yield from ("one ", "two ", outputs.Reasoning("Hm."), outputs.ToolCall("f"), "three")
        finally:
            log.append("closed")

    return generate


@pytest.mark.parametrize("leaves_at", range(9))
async def test_a_listener_may_leave_at_any_event(leaves_at: int) -> None:
    store, log = MemoryStore(), list[str]()
    run = await begin(Calls(_slow_closing(log)), store, tools=[{"type": "function", "name": "f"}])
    audience = Audience(leaves_at=leaves_at)
    with anyio.fail_after(BOUND):
        await run.execute(audience.tell)
    assert audience.calls <= leaves_at + 1, "something was told after the listener had left"
    stored = await record_of(run, store)
    assert stored is not None
    assert stored == run.response
    if audience.calls <= leaves_at:
        assert stored["status"] == "completed"
    elif stored["status"] == "cancelled":
        assert run.context.turn.cancelled
    else:
        assert stored["status"] == "completed", "only a response that was through can have missed its listener"
    assert log == ([] if leaves_at == 0 else ["closed"])


async def test_a_listener_that_leaves_closes_a_plain_generator() -> None:
    store, closed = MemoryStore(), threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        try:
            while not turn.cancelled:
                yield "more "
        finally:
            closed.set()

    run = await begin(Calls(generate), store)
    with anyio.fail_after(BOUND):
        await run.execute(Audience(leaves_at=3).tell)
    await happened(closed)
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


@pytest.mark.parametrize("leaves_at", range(5))
async def test_a_listener_that_breaks_leaves_no_record_in_progress(leaves_at: int) -> None:
    store = MemoryStore()
    run = await begin(Calls(_async_generator), store)
    audience = Audience(leaves_at=leaves_at)
    audience.error = RuntimeError("the server has its own way to say that the client left")
    with anyio.fail_after(BOUND), suppress(RuntimeError):
        await run.execute(audience.tell)
    assert await record_of(run, store) == run.response


async def test_a_listener_that_leaves_while_a_failure_is_told_finds_it_on_record() -> None:
    store = MemoryStore()
    run = await begin(ScriptedBackend([LookupError("gone")]), store)
    await run.execute(Audience(leaves_at=1).tell)
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "failed"


# Cancellation.


async def cancel_once_blocked(run: Run, audience: Audience) -> None:
    """Cancels around a run as soon as nothing moves any more, and sees that it ends by that."""
    outcome: list[str] = []

    async def execute() -> None:
        try:
            await run.execute(audience.tell)
            outcome.append("returned")
        except anyio.get_cancelled_exc_class():
            outcome.append("cancelled")
            raise

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(execute)
            await anyio.wait_all_tasks_blocked()
            told = len(audience.events)
            group.cancel_scope.cancel()
    assert outcome == ["cancelled"]
    assert len(audience.events) == told, "something was told after the cancellation"


async def test_a_cancelled_run_closes_an_async_backend_and_is_on_record() -> None:
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

    run = await begin(Calls(generate), store)
    await cancel_once_blocked(run, Audience())
    assert log == ["closing", "closed"]
    stored = await record_of(run, store)
    assert stored is not None
    assert (stored["status"], run.context.turn.cancelled) == ("cancelled", True)
    assert stored["output"][0]["content"][0]["text"] == "half "


async def test_a_cancelled_run_does_not_wait_for_a_blocked_thread_but_tells_it() -> None:
    store = MemoryStore()
    go_on, closed = threading.Event(), threading.Event()
    saw: list[bool] = []

    def generate(turn: Turn) -> Iterator[str]:
        try:
            yield "half "
            go_on.wait(BOUND)
            saw.append(turn.cancelled)
            yield "late"
            saw.append(False)
        finally:
            closed.set()

    run = await begin(Calls(generate), store)
    audience = Audience()
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, audience.tell)
            while not any("delta" in event for event in audience.events):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"
    go_on.set()
    await happened(closed)
    assert saw == [True]


@pytest.mark.parametrize("leaving", ["cancelled", "gone"])
async def test_a_backend_that_goes_on_while_it_is_closed_is_cut_off(leaving: str) -> None:
    store = MemoryStore()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            await anyio.sleep_forever()
        finally:
            for _ in range(5):
                yield "still here "

    run = await begin(Calls(generate), store)
    if leaving == "cancelled":
        await cancel_once_blocked(run, Audience())
    else:
        with anyio.fail_after(BOUND):
            await run.execute(Audience(leaves_at=1).tell)
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


@pytest.mark.parametrize("leaving", ["cancelled", "gone"])
async def test_a_backend_that_fails_while_it_is_closed_is_cancelled_all_the_same(leaving: str) -> None:
    store = MemoryStore()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            await anyio.sleep_forever()
        finally:
            raise LookupError("nothing to close")

    run = await begin(Calls(generate), store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(run.execute, Audience(leaves_at=None if leaving == "cancelled" else 1).tell)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] in ("cancelled", "failed")


async def test_a_backend_that_never_finishes_closing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    soon_given_up(monkeypatch, 0.05)
    store = MemoryStore()

    async def generate(turn: Turn) -> AsyncIterator[str]:
        try:
            yield "half "
            yield "more "
        finally:
            await anyio.sleep_forever()

    run = await begin(Calls(generate), store)
    with anyio.fail_after(BOUND):
        await run.execute(Audience(leaves_at=1).tell)
    stored = await record_of(run, store)
    assert stored is not None
    assert stored["status"] == "cancelled"


async def test_a_run_that_waits_for_its_thread_can_be_cancelled_and_frees_its_place() -> None:
    go_on, started = threading.Event(), threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        started.set()
        go_on.wait(BOUND)
        yield "done"

    kit = ResponsesKit(Calls(generate), limits=Limits(max_threads=1))
    first, second, third = [await kit.service.create_run({"input": "Hi"}) for _ in range(3)]
    audiences = [Audience() for _ in range(3)]
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(first.execute, audiences[0].tell)
            await happened(started)
            started.clear()
            with anyio.move_on_after(0.02) as waiting:
                await second.execute(audiences[1].tell)
            assert waiting.cancelled_caught
            assert not started.is_set(), "a second thread was started"
            go_on.set()
            group.start_soon(third.execute, audiences[2].tell)
    assert [len(check_stream(audience.events)["output"]) for audience in (audiences[0], audiences[2])] == [1, 1]


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_cancellation_of_asyncios_own_reaches_a_running_tool_and_is_not_lost(in_thread: bool, how: str) -> None:
    """Hosts that know nothing of anyio cancel so when a client leaves."""
    let_go = threading.Event()

    def hold() -> str:
        let_go.wait(5)
        return "done"

    async def hold_too() -> str:
        await asyncio.sleep(5)
        return "done"

    tool = HostedTool.from_function("t:hold", hold if in_thread else hold_too, name="hold")
    kit = ResponsesKit(ScriptedBackend([outputs.ToolCall("hold")], ["Done."]), tools=[tool])

    async def main() -> str:
        run = await kit.service.create_run({"input": "x", "tools": [{"type": "t:hold"}]})
        begun = asyncio.Event()

        async def tell(events: list[Any]) -> None:
            if any(event["type"] == "response.output_item.added" for event in events):
                begun.set()

        async def execute() -> None:
            async with asyncio.timeout(0.1 if how == "timeout" else None):
                await run.execute(tell)

        task = asyncio.create_task(execute())
        await asyncio.wait_for(begun.wait(), 5)
        if how == "cancel":
            task.cancel()
        with pytest.raises(TimeoutError if how == "timeout" else asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        return str(run.response["status"])

    try:
        assert asyncio.run(main()) == "cancelled"
    finally:
        let_go.set()
