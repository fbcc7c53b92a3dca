"""A task that runs beside a block and is gone when the block is."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from responses_kit._concurrency.tasks import ScopedTask

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class Beside:
    """A companion's work that tells how far it has come."""

    def __init__(self) -> None:
        self.began = anyio.Event()
        self.ended = anyio.Event()

    async def work(self) -> None:
        self.began.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.ended.set()


async def test_it_runs_beside_the_block_and_is_gone_soon_after_it() -> None:
    beside = Beside()
    with anyio.fail_after(BOUND):
        async with ScopedTask(beside.work) as companion:
            companion.start()
            await beside.began.wait()
            assert not beside.ended.is_set()
        await beside.ended.wait()


async def test_a_block_that_never_waits_is_not_kept_by_it() -> None:
    beside = Beside()
    with anyio.fail_after(BOUND):
        async with ScopedTask(beside.work) as companion:
            companion.start()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
    assert beside.ended.is_set() or not beside.began.is_set()


async def test_it_may_end_before_the_block() -> None:
    done = anyio.Event()

    async def work() -> None:
        done.set()

    with anyio.fail_after(BOUND):
        async with ScopedTask(work) as companion:
            companion.start()
            await done.wait()
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("waits", [True, False])
async def test_an_exception_of_the_block_comes_out_as_it_is(waits: bool) -> None:
    beside, error = Beside(), ConnectionResetError("mine")

    async def block() -> None:
        async with ScopedTask(beside.work) as companion:
            companion.start()
            if waits:
                await beside.began.wait()
            raise error

    with anyio.fail_after(BOUND), pytest.raises(ConnectionResetError) as caught:
        await block()
    assert caught.value is error


async def test_a_failure_of_its_own_goes_to_the_log_and_not_to_the_block(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise LookupError("not the block's business")

    with anyio.fail_after(BOUND):
        async with ScopedTask(work) as companion:
            companion.start()
            while "business" not in caplog.text:
                await anyio.lowlevel.checkpoint()


async def test_it_can_end_the_block_by_the_scope_around_both() -> None:
    async def work(scope: anyio.CancelScope) -> None:
        scope.cancel()

    went_on = False
    with anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            async with ScopedTask(work, scope) as companion:
                companion.start()
                await anyio.sleep_forever()
            went_on = True
    assert scope.cancelled_caught
    assert not went_on


async def test_it_is_gone_when_the_block_is_cancelled_from_outside() -> None:
    beside = Beside()

    async def block() -> None:
        async with ScopedTask(beside.work) as companion:
            companion.start()
            await anyio.sleep_forever()

    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(block)
            await beside.began.wait()
            group.cancel_scope.cancel()
        await beside.ended.wait()
