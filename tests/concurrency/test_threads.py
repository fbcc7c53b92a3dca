"""The bridge from plain generators to the event loop."""

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

from responses_kit._concurrency import threads as worker_module
from responses_kit._concurrency.threads import IteratorThread, ThreadLimiter
from responses_kit.errors import IllegalOutput

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


@asynccontextmanager
async def working(produce: Callable[[], Any]) -> AsyncIterator[IteratorThread]:
    """A worker at work; stopped at the end, whatever happens."""
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


async def happened(event: threading.Event) -> None:
    """Waits for what a thread does; never longer than the bound."""
    assert await anyio.to_thread.run_sync(event.wait, BOUND), "it never happened"


async def test_all_outputs_come_in_order() -> None:
    async with working(lambda: (str(number) for number in range(5000))) as worker:
        assert await take_all(worker) == [str(number) for number in range(5000)]
        assert await worker.take() == [], "the end stays the end"


@pytest.mark.parametrize("kind", [list, tuple, iter, deque, lambda letters: (letter for letter in letters)])
async def test_any_iterable_will_do(kind: Callable[[list[str]], Any]) -> None:
    async with working(lambda: kind(["a", "b"])) as worker:
        assert await take_all(worker) == ["a", "b"]


async def test_a_string_is_one_output_and_not_its_characters() -> None:
    async with working(lambda: "hello") as worker:
        assert await take_all(worker) == ["hello"]


async def test_nothing_at_all_is_the_end_at_once() -> None:
    async with working(list) as worker:
        assert await worker.take() == []


async def test_whatever_is_ready_is_taken_at_once() -> None:
    ready, go_on = threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        yield from map(str, range(100))
        ready.set()
        go_on.wait(BOUND)
        yield "last"

    async with working(produce) as worker:
        await happened(ready)
        assert await worker.take() == [str(number) for number in range(100)]
        go_on.set()
        assert await take_all(worker) == ["last"]


async def test_a_slow_generator_gets_each_output_out_alone() -> None:
    turns = threading.Semaphore(0)

    def produce() -> Iterator[str]:
        for number in range(5):
            assert turns.acquire(timeout=BOUND)
            yield str(number)

    async with working(produce) as worker:
        for number in range(5):
            turns.release()
            assert await worker.take() == [str(number)]
        assert await worker.take() == []


async def test_a_fast_generator_runs_ahead_only_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_AHEAD", 8)
    full, too_far = threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        for number in range(1, 1000):
            if number == 8:
                full.set()
            if number > 9:
                too_far.set()
            yield str(number)

    async with working(produce) as worker:
        await happened(full)
        assert not await anyio.to_thread.run_sync(too_far.wait, 0.1), "the generator was not held back"
        assert await take_all(worker) == [str(number) for number in range(1, 1000)]


async def test_an_error_comes_after_all_outputs_that_came_before_it() -> None:
    raised = threading.Event()

    def produce() -> Iterator[str]:
        yield "a"
        yield "b"
        raised.set()
        raise LookupError("gone")

    async with working(produce) as worker:
        await happened(raised)
        assert await worker.take() == ["a", "b"]
        with pytest.raises(LookupError, match="gone"):
            await worker.take()


async def test_an_error_before_the_first_output_comes_at_once() -> None:
    def produce() -> Any:
        raise LookupError("gone")

    async with working(produce) as worker:
        with pytest.raises(LookupError):
            await worker.take()


@pytest.mark.parametrize("found", [None, 7, object(), {"text": "hello"}])
async def test_what_holds_no_outputs_is_an_error_that_says_what_to_return(found: Any) -> None:
    async with working(lambda: found) as worker:
        with pytest.raises(IllegalOutput, match=type(found).__name__):
            await worker.take()


async def test_stopping_closes_the_generator_at_its_next_output() -> None:
    go_on, closed = threading.Event(), threading.Event()
    seen: list[Any] = []

    def produce() -> Iterator[str]:
        try:
            yield "a"
            go_on.wait(BOUND)
            yield "b"
            seen.append("went on")
        except BaseException as error:
            seen.append(type(error))
            raise
        finally:
            closed.set()

    async with working(produce) as worker:
        assert await worker.take() == ["a"]
        worker.stop()
        go_on.set()
        await happened(closed)
    assert seen == [GeneratorExit]


async def test_stopping_frees_a_generator_that_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_AHEAD", 2)
    full, closed = threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        try:
            yield "a"
            full.set()
            while True:
                yield "b"
        finally:
            closed.set()

    async with working(produce) as worker:
        await happened(full)
        worker.stop()
        await happened(closed)


async def test_a_generator_that_goes_on_while_it_is_closed_does_no_harm() -> None:
    closing = threading.Event()

    def produce() -> Iterator[str]:
        try:
            while True:
                yield "a"
        finally:
            closing.set()
            yield "still here"

    async with working(produce) as worker:
        assert await worker.take()
        worker.stop()
        await happened(closing)


async def test_a_cancelled_worker_does_not_wait_for_a_blocked_thread() -> None:
    blocked, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        try:
            blocked.set()
            go_on.wait(BOUND)
            yield "late"
        finally:
            closed.set()

    async with working(produce) as worker:
        await happened(blocked)
        with anyio.move_on_after(0) as scope:
            await worker.take()
        assert scope.cancelled_caught
    assert not closed.is_set(), "the thread is still blocked, and nobody waited for it"
    go_on.set()
    await happened(closed)


async def test_the_thread_sees_the_context_variables_of_the_task() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set by the host")
    async with working(lambda: (variable.get() for _ in range(2))) as worker:
        assert await take_all(worker) == ["set by the host"] * 2


async def test_what_is_asynchronous_is_handed_back_untouched() -> None:
    async def generator() -> AsyncIterator[str]:
        yield "a"

    async def coroutine() -> str:
        return "b"

    made = generator()
    async with working(lambda: made) as worker:
        assert await worker.take() == []
        assert worker.handed_back is made
    assert [output async for output in made] == ["a"]

    async with working(coroutine) as worker:
        assert await worker.take() == []
        assert isinstance(worker.handed_back, Awaitable)
        assert await worker.handed_back == "b"


async def test_the_work_is_done_in_another_thread_one_for_all_outputs() -> None:
    async with working(lambda: (threading.current_thread() for _ in range(3))) as worker:
        threads = await take_all(worker)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


def test_a_loop_that_is_gone_ends_the_generator(anyio_backend_name: str) -> None:
    waiting, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def produce() -> Iterator[str]:
        try:
            waiting.set()
            go_on.wait(BOUND)
            while True:
                yield "to nobody"
        finally:
            closed.set()

    async def main() -> None:
        worker = IteratorThread(produce)
        await worker.reserve(ThreadLimiter(1))
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            await happened(waiting)
            group.start_soon(worker.take)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()  # but nobody says stop

    anyio.run(main, backend=anyio_backend_name)
    go_on.set()
    assert closed.wait(BOUND), "the generator goes on for ever"


def test_a_worker_is_at_home_in_whatever_loop_made_it(anyio_backend_name: str) -> None:
    async def main() -> list[Any]:
        async with working(lambda: ["a", "b"]) as worker:
            return await take_all(worker)

    assert [anyio.run(main, backend=anyio_backend_name) for _ in range(2)] == [["a", "b"]] * 2
