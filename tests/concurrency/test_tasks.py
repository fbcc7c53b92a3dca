"""Tests of `ScopedTask`."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from responses_kit._concurrency.tasks import ScopedTask

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class Probe:
    """A coroutine function that records its progress."""

    def __init__(self) -> None:
        self.started = anyio.Event()
        self.finished = anyio.Event()

    async def work(self) -> None:
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.finished.set()


async def test_scoped_task_runs_within_its_block_only() -> None:
    probe = Probe()
    with anyio.fail_after(BOUND):
        async with ScopedTask(probe.work) as task:
            task.start()
            await probe.started.wait()
            assert not probe.finished.is_set()
        await probe.finished.wait()


async def test_scoped_task_does_not_delay_block_that_never_waits() -> None:
    probe = Probe()
    with anyio.fail_after(BOUND):
        async with ScopedTask(probe.work) as task:
            task.start()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
    assert probe.finished.is_set() or not probe.started.is_set()


async def test_scoped_task_may_finish_before_its_block() -> None:
    done = anyio.Event()

    async def work() -> None:
        done.set()

    with anyio.fail_after(BOUND):
        async with ScopedTask(work) as task:
            task.start()
            await done.wait()
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("waits", [True, False])
async def test_exception_of_the_block_is_raised_unwrapped(waits: bool) -> None:
    probe, error = Probe(), ConnectionResetError("mine")

    async def block() -> None:
        async with ScopedTask(probe.work) as task:
            task.start()
            if waits:
                await probe.started.wait()
            raise error

    with anyio.fail_after(BOUND), pytest.raises(ConnectionResetError) as caught:
        await block()
    assert caught.value is error


async def test_exception_of_scoped_task_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise LookupError("not the block's business")

    with anyio.fail_after(BOUND):
        async with ScopedTask(work) as task:
            task.start()
            while "business" not in caplog.text:
                await anyio.lowlevel.checkpoint()


async def test_scoped_task_can_cancel_its_block_through_a_scope() -> None:
    async def work(scope: anyio.CancelScope) -> None:
        scope.cancel()

    has_continued = False
    with anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            async with ScopedTask(work, scope) as task:
                task.start()
                await anyio.sleep_forever()
            has_continued = True
    assert scope.cancelled_caught
    assert not has_continued


async def test_scoped_task_is_cancelled_with_its_block() -> None:
    probe = Probe()

    async def block() -> None:
        async with ScopedTask(probe.work) as task:
            task.start()
            await anyio.sleep_forever()

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(block)
            await probe.started.wait()
            group.cancel_scope.cancel()
        await probe.finished.wait()
