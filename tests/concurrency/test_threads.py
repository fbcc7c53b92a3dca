"""Tests of `IteratorThread`, which iterates plain generators in threads."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

from responses_kit._concurrency import threads as threads_module
from responses_kit._concurrency.threads import IteratorThread, ThreadLimiter
from responses_kit.errors import IllegalOutput

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


@asynccontextmanager
async def running_thread(produce: Callable[[], Any]) -> AsyncIterator[IteratorThread]:
    """Yield a running `IteratorThread`, and stop it at the end."""
    worker = IteratorThread(produce)
    with anyio.fail_after(BOUND):
        await worker.reserve(ThreadLimiter(1))
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            try:
                yield worker
            finally:
                worker.stop()
                group.cancel_scope.cancel()


async def take_all(worker: IteratorThread) -> list[Any]:
    taken: list[Any] = []
    while batch := await worker.take():
        taken += batch
    return taken


async def wait_for(event: threading.Event) -> None:
    """Wait for an event that a thread sets."""
    assert await anyio.to_thread.run_sync(event.wait, BOUND), "it never wait_for"


async def test_outputs_are_taken_in_order() -> None:
    async with running_thread(lambda: (str(number) for number in range(5000))) as worker:
        assert await take_all(worker) == [str(number) for number in range(5000)]
        assert await worker.take() == [], "the end is final"


@pytest.mark.parametrize("kind", [list, tuple, iter, deque, lambda letters: (letter for letter in letters)])
async def test_iterables_of_any_type_are_iterated(kind: Callable[[list[str]], Any]) -> None:
    async with running_thread(lambda: kind(["a", "b"])) as worker:
        assert await take_all(worker) == ["a", "b"]


async def test_string_is_one_output() -> None:
    async with running_thread(lambda: "hello") as worker:
        assert await take_all(worker) == ["hello"]


async def test_empty_iterable_ends_at_once() -> None:
    async with running_thread(list) as worker:
        assert await worker.take() == []


async def test_ready_outputs_are_taken_in_one_batch() -> None:
    ready, proceed = threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        yield from map(str, range(100))
        ready.set()
        proceed.wait(BOUND)
        yield "last"

    async with running_thread(produce) as worker:
        await wait_for(ready)
        assert await worker.take() == [str(number) for number in range(100)]
        proceed.set()
        assert await take_all(worker) == ["last"]


async def test_slow_generator_delivers_each_output_at_once() -> None:
    turns = threading.Semaphore(0)

    def produce() -> Iterator[str]:
        for number in range(5):
            assert turns.acquire(timeout=BOUND)
            yield str(number)

    async with running_thread(produce) as worker:
        for number in range(5):
            turns.release()
            assert await worker.take() == [str(number)]
        assert await worker.take() == []


async def test_fast_generator_is_blocked_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "_MAX_AHEAD", 8)
    full, too_far = threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        for number in range(1, 1000):
            if number == 8:
                full.set()
            if number > 9:
                too_far.set()
            yield str(number)

    async with running_thread(produce) as worker:
        await wait_for(full)
        assert not await anyio.to_thread.run_sync(too_far.wait, 0.1), "the generator was not blocked"
        assert await take_all(worker) == [str(number) for number in range(1, 1000)]


async def test_error_is_raised_after_earlier_outputs() -> None:
    raised = threading.Event()

    def produce() -> Iterator[str]:
        yield "a"
        yield "b"
        raised.set()
        raise LookupError("gone")

    async with running_thread(produce) as worker:
        await wait_for(raised)
        assert await worker.take() == ["a", "b"]
        with pytest.raises(LookupError, match="gone"):
            await worker.take()


async def test_error_before_first_output_is_raised_at_once() -> None:
    def produce() -> Any:
        raise LookupError("gone")

    async with running_thread(produce) as worker:
        with pytest.raises(LookupError):
            await worker.take()


@pytest.mark.parametrize("found", [None, 7, object(), {"text": "hello"}])
async def test_result_that_is_not_iterable_is_an_error(found: Any) -> None:
    async with running_thread(lambda: found) as worker:
        with pytest.raises(IllegalOutput, match=type(found).__name__):
            await worker.take()


async def test_stop_closes_generator_at_its_next_output() -> None:
    proceed, closed = threading.Event(), threading.Event()
    seen: list[Any] = []

    def produce() -> Iterator[str]:
        try:
            yield "a"
            proceed.wait(BOUND)
            yield "b"
            seen.append("went on")
        except BaseException as error:
            seen.append(type(error))
            raise
        finally:
            closed.set()

    async with running_thread(produce) as worker:
        assert await worker.take() == ["a"]
        worker.stop()
        proceed.set()
        await wait_for(closed)
    assert seen == [GeneratorExit]


async def test_stop_closes_blocked_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "_MAX_AHEAD", 2)
    full, closed = threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        try:
            yield "a"
            full.set()
            while True:
                yield "b"
        finally:
            closed.set()

    async with running_thread(produce) as worker:
        await wait_for(full)
        worker.stop()
        await wait_for(closed)


async def test_generator_that_yields_while_closed_is_abandoned() -> None:
    closing = threading.Event()

    def produce() -> Iterator[str]:
        try:
            while True:
                yield "a"
        finally:
            closing.set()
            yield "still here"

    async with running_thread(produce) as worker:
        assert await worker.take()
        worker.stop()
        await wait_for(closing)


async def test_cancellation_does_not_wait_for_blocked_thread() -> None:
    blocked, proceed, closed = threading.Event(), threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        try:
            blocked.set()
            proceed.wait(BOUND)
            yield "late"
        finally:
            closed.set()

    async with running_thread(produce) as worker:
        await wait_for(blocked)
        with anyio.move_on_after(0) as scope:
            await worker.take()
        assert scope.cancelled_caught
    assert not closed.is_set(), "the thread is still blocked"
    proceed.set()
    await wait_for(closed)


async def test_thread_has_context_variables_of_the_task() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set by the host")
    async with running_thread(lambda: (variable.get() for _ in range(2))) as worker:
        assert await take_all(worker) == ["set by the host"] * 2


async def test_async_result_is_returned_unchanged() -> None:
    async def generator() -> AsyncIterator[str]:
        yield "a"

    async def coroutine() -> str:
        return "b"

    async_generator = generator()
    async with running_thread(lambda: async_generator) as worker:
        assert await worker.take() == []
        assert worker.async_result is async_generator
    assert [output async for output in async_generator] == ["a"]

    async with running_thread(coroutine) as worker:
        assert await worker.take() == []
        assert isinstance(worker.async_result, Awaitable)
        assert await worker.async_result == "b"


async def test_all_outputs_are_produced_in_one_other_thread() -> None:
    async with running_thread(lambda: (threading.current_thread() for _ in range(3))) as worker:
        threads = await take_all(worker)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_generator_is_closed_after_its_loop(anyio_backend_name: str) -> None:
    waiting, proceed, closed = threading.Event(), threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        try:
            waiting.set()
            proceed.wait(BOUND)
            while True:
                yield "unread"
        finally:
            closed.set()

    async def main() -> None:
        worker = IteratorThread(produce)
        await worker.reserve(ThreadLimiter(1))
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            await wait_for(waiting)
            group.start_soon(worker.take)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()  # without `stop`

    anyio.run(main, backend=anyio_backend_name)
    proceed.set()
    assert closed.wait(BOUND), "the generator is still running"


def test_iterator_threads_work_on_consecutive_loops(anyio_backend_name: str) -> None:
    async def main() -> list[Any]:
        async with running_thread(lambda: ["a", "b"]) as worker:
            return await take_all(worker)

    assert [anyio.run(main, backend=anyio_backend_name) for _ in range(2)] == [["a", "b"]] * 2
