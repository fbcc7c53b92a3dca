"""What anyio leaves open: tasks that whoever began them need not outlive, and a bell that wakes waiters on any loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from responses_kit._concurrency.tasks import Notifier, spawn

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


# Detached tasks.


class Work:
    """A coroutine function that tells how far it has come."""

    def __init__(self) -> None:
        self.began, self.ended = anyio.Event(), anyio.Event()
        self.given: tuple[Any, ...] = ()

    async def __call__(self, *given: Any) -> None:
        self.given = given
        self.began.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.ended.set()


async def test_it_begins_by_itself_and_is_given_its_arguments() -> None:
    work = Work()
    stop = spawn(work, 1, "two")
    with anyio.fail_after(BOUND):
        await work.began.wait()
        assert work.given == (1, "two")
        stop()
        await work.ended.wait()


async def test_it_outlives_the_task_and_the_scope_that_began_it() -> None:
    work, go_on, done = Work(), anyio.Event(), anyio.Event()

    async def wait() -> None:
        await go_on.wait()
        done.set()

    with anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def begin() -> None:
                    spawn(wait)
                    stops.append(spawn(work))

                stops: list[Callable[[], Any]] = []
                group.start_soon(begin)
            await work.began.wait()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        gc.collect()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert not work.ended.is_set()
        go_on.set()
        await done.wait()
        stops[0]()
        await work.ended.wait()


async def test_stopping_it_before_it_has_begun_and_after_its_end_does_no_harm() -> None:
    work, short = Work(), anyio.Event()

    async def end() -> None:
        short.set()

    with anyio.fail_after(BOUND):
        spawn(work)()
        stop = spawn(end)
        await short.wait()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        stop()
        stop()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
    assert work.ended.is_set() == work.began.is_set()


@pytest.mark.parametrize("error", [LookupError("nobody's business"), ExceptionGroup("nobody's business", [OSError()])])
async def test_its_failure_goes_to_the_log_and_nowhere_else(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise error

    spawn(fail)
    with anyio.fail_after(BOUND):
        while not caplog.records:
            await anyio.lowlevel.checkpoint()
    (entry,) = caplog.records
    assert (entry.levelno, entry.name) == (logging.ERROR, "responses_kit")
    assert "nobody's business" in caplog.text


def test_it_ends_with_its_loop(anyio_backend_name: str) -> None:
    works: list[Work] = []

    async def main() -> None:
        works.append(Work())
        spawn(works[0])
        with anyio.fail_after(BOUND):
            await works[0].began.wait()

    anyio.run(main, backend=anyio_backend_name)
    assert works[0].ended.is_set()


# The bell.


async def rung(bell: Notifier, heard: list[str], name: str, ready: anyio.Event) -> None:
    with bell.subscribe() as event:
        ready.set()
        await event.wait()
        heard.append(name)


async def test_a_ring_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    bell, heard = Notifier(), list[str]()
    assert not bell.has_subscribers
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for name in "abc":
                ready = anyio.Event()
                group.start_soon(rung, bell, heard, name, ready)
                await ready.wait()
            assert bell.has_subscribers
            bell.notify_all()
            with bell.subscribe() as late:
                await anyio.wait_all_tasks_blocked()
                assert not late.is_set()
                assert bell.has_subscribers
    assert sorted(heard) == ["a", "b", "c"]
    assert not bell.has_subscribers


async def test_a_ring_between_listening_and_waiting_is_not_missed() -> None:
    bell = Notifier()
    with bell.subscribe() as event:
        bell.notify_all()
        with anyio.fail_after(BOUND):
            await event.wait()


async def test_rings_that_nobody_hears_do_no_harm() -> None:
    bell = Notifier()
    bell.notify_all()
    with bell.subscribe() as event:
        pass
    bell.notify_all()
    await anyio.wait_all_tasks_blocked()
    assert not event.is_set()


async def test_whoever_is_cancelled_listens_no_more() -> None:
    bell = Notifier()
    with anyio.CancelScope() as scope, bell.subscribe() as event:
        scope.cancel()
        await event.wait()
    assert scope.cancelled_caught
    assert not bell.has_subscribers


@pytest.mark.parametrize("other", ["asyncio", "trio"])
def test_a_ring_wakes_waiters_on_other_loops_and_is_heard_from_plain_threads(
    other: str, anyio_backend_name: str
) -> None:
    bell, woken = Notifier(), list[str]()
    waiting = threading.Barrier(3)

    async def wait(name: str) -> None:
        with bell.subscribe() as event, anyio.fail_after(BOUND):
            await anyio.to_thread.run_sync(waiting.wait, BOUND)
            await event.wait()
            woken.append(name)

    threads = [
        threading.Thread(target=lambda name=name: anyio.run(wait, name, backend=name))  # type: ignore[misc]
        for name in (other, anyio_backend_name)
    ]
    for thread in threads:
        thread.start()
    waiting.wait(BOUND)
    bell.notify_all()
    for thread in threads:
        thread.join(BOUND)
    assert sorted(woken) == sorted([other, anyio_backend_name])


def test_a_loop_that_has_gone_is_passed_over(anyio_backend_name: str) -> None:
    bell, stuck = Notifier(), []

    async def leave() -> None:
        listening = bell.subscribe()
        listening.__enter__()
        stuck.append(listening)  # as a task that its loop dropped without ever ending it

    async def wait() -> None:
        with bell.subscribe() as event, anyio.fail_after(BOUND):
            bell.notify_all()
            await event.wait()

    anyio.run(leave, backend=anyio_backend_name)
    anyio.run(wait, backend=anyio_backend_name)
    assert bell.has_subscribers
    stuck[0].__exit__(None, None, None)
    assert not bell.has_subscribers


def test_what_only_asyncio_would_hold_and_only_weakly_is_not_collected_as_garbage() -> None:
    waits: list[weakref.ref[asyncio.Future[None]]] = []
    done = []

    async def work() -> None:
        waiting = asyncio.get_running_loop().create_future()
        waits.append(weakref.ref(waiting))
        await waiting
        done.append(True)

    async def main() -> None:
        spawn(work)
        await asyncio.sleep(0)
        gc.collect()
        waiting = waits[0]()
        assert waiting is not None, "the task is gone, and with it what it waits for"
        waiting.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert done
