"""Tests of `spawn` and `Notifier`."""

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


class Probe:
    """A coroutine function that records its progress."""

    def __init__(self) -> None:
        self.started, self.finished = anyio.Event(), anyio.Event()
        self.arguments: tuple[Any, ...] = ()

    async def __call__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.finished.set()


async def test_spawned_task_is_started_with_its_arguments() -> None:
    work = Probe()
    stop = spawn(work, 1, "two")
    with anyio.fail_after(BOUND):
        await work.started.wait()
        assert work.arguments == (1, "two")
        stop()
        await work.finished.wait()


async def test_spawned_task_outlives_its_callers_task_and_scope() -> None:
    work, proceed, done = Probe(), anyio.Event(), anyio.Event()

    async def wait() -> None:
        await proceed.wait()
        done.set()

    with anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def begin() -> None:
                    spawn(wait)
                    cancels.append(spawn(work))

                cancels: list[Callable[[], Any]] = []
                group.start_soon(begin)
            await work.started.wait()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        gc.collect()
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        assert not work.finished.is_set()
        proceed.set()
        await done.wait()
        cancels[0]()
        await work.finished.wait()


async def test_cancelling_before_start_and_after_end_is_harmless() -> None:
    work, short = Probe(), anyio.Event()

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
    assert work.finished.is_set() == work.started.is_set()


@pytest.mark.parametrize("error", [LookupError("unexpected"), ExceptionGroup("unexpected", [OSError()])])
async def test_exception_of_spawned_task_is_logged_only(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise error

    spawn(fail)
    with anyio.fail_after(BOUND):
        while not caplog.records:
            await anyio.lowlevel.checkpoint()
    (entry,) = caplog.records
    assert (entry.levelno, entry.name) == (logging.ERROR, "responses_kit")
    assert "unexpected" in caplog.text


def test_spawned_task_is_cancelled_with_its_loop(anyio_backend_name: str) -> None:
    works: list[Probe] = []

    async def main() -> None:
        works.append(Probe())
        spawn(works[0])
        with anyio.fail_after(BOUND):
            await works[0].started.wait()

    anyio.run(main, backend=anyio_backend_name)
    assert works[0].finished.is_set()


# Notifiers.


async def wait_for_notification(notifier: Notifier, woken: list[str], name: str, ready: anyio.Event) -> None:
    with notifier.subscribe() as event:
        ready.set()
        await event.wait()
        woken.append(name)


async def test_notification_wakes_earlier_subscribers_only() -> None:
    notifier, woken = Notifier(), list[str]()
    assert not notifier.has_subscribers
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for name in "abc":
                ready = anyio.Event()
                group.start_soon(wait_for_notification, notifier, woken, name, ready)
                await ready.wait()
            assert notifier.has_subscribers
            notifier.notify_all()
            with notifier.subscribe() as late:
                await anyio.wait_all_tasks_blocked()
                assert not late.is_set()
                assert notifier.has_subscribers
    assert sorted(woken) == ["a", "b", "c"]
    assert not notifier.has_subscribers


async def test_notification_between_subscribing_and_waiting_is_not_missed() -> None:
    notifier = Notifier()
    with notifier.subscribe() as event:
        notifier.notify_all()
        with anyio.fail_after(BOUND):
            await event.wait()


async def test_notifications_without_subscribers_are_harmless() -> None:
    notifier = Notifier()
    notifier.notify_all()
    with notifier.subscribe() as event:
        pass
    notifier.notify_all()
    await anyio.wait_all_tasks_blocked()
    assert not event.is_set()


async def test_cancelled_subscriber_is_removed() -> None:
    notifier = Notifier()
    with anyio.CancelScope() as scope, notifier.subscribe() as event:
        scope.cancel()
        await event.wait()
    assert scope.cancelled_caught
    assert not notifier.has_subscribers


@pytest.mark.parametrize("other", ["asyncio", "trio"])
def test_notification_wakes_subscribers_on_other_loops(other: str, anyio_backend_name: str) -> None:
    notifier, woken = Notifier(), list[str]()
    waiting = threading.Barrier(3)

    async def wait(name: str) -> None:
        with notifier.subscribe() as event, anyio.fail_after(BOUND):
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
    notifier.notify_all()
    for thread in threads:
        thread.join(BOUND)
    assert sorted(woken) == sorted([other, anyio_backend_name])


def test_subscriber_on_closed_loop_is_skipped(anyio_backend_name: str) -> None:
    notifier, stuck = Notifier(), []

    async def leave() -> None:
        listening = notifier.subscribe()
        listening.__enter__()
        stuck.append(listening)  # as a task that was destroyed with its loop

    async def wait() -> None:
        with notifier.subscribe() as event, anyio.fail_after(BOUND):
            notifier.notify_all()
            await event.wait()

    anyio.run(leave, backend=anyio_backend_name)
    anyio.run(wait, backend=anyio_backend_name)
    assert notifier.has_subscribers
    stuck[0].__exit__(None, None, None)
    assert not notifier.has_subscribers


def test_spawned_task_is_not_garbage_collected() -> None:
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
        assert waiting is not None, "the task was garbage collected"
        waiting.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert done
