"""Group commit: concurrent writes share a flush, and a cancelled write does not affect the rest."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import anyio
import pytest

from responses_kit.stores.group_commit import GroupCommit

pytestmark = [pytest.mark.timeout(20)]


class Flushes:
    """A flush that waits for its release and doubles its values."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.started = asyncio.Semaphore(0)
        self.released = asyncio.Semaphore(0)
        self.failure: Exception | None = None

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.seen.append(list(items))
        self.started.release()
        await self.released.acquire()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return [item * 2 for item in items]


def run(test: Callable[[Flushes], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(10):
            await test(Flushes())

    asyncio.run(main())


async def run_ready_tasks() -> None:
    """Run the event loop until no task is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_single_item_is_flushed_immediately() -> None:
    async def test(flushes: Flushes) -> None:
        flushes.released.release()
        assert await GroupCommit(flushes).submit(21) == 42
        assert flushes.seen == [[21]]

    run(test)


def test_items_during_flush_join_next_flush_in_order() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes)
        first = asyncio.create_task(batch.submit(0))
        await flushes.started.acquire()
        later = [asyncio.create_task(batch.submit(number)) for number in range(1, 6)]
        await run_ready_tasks()
        assert flushes.seen == [[0]], "one flush at a time"
        flushes.released.release()
        assert await first == 0
        flushes.released.release()
        assert await asyncio.gather(*later) == [2, 4, 6, 8, 10]
        assert flushes.seen == [[0], [1, 2, 3, 4, 5]]

    run(test)


def test_flush_size_is_limited() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes, max_items=3)
        for _ in range(3):
            flushes.released.release()
        assert await asyncio.gather(*(batch.submit(number) for number in range(7))) == [0, 2, 4, 6, 8, 10, 12]
        assert flushes.seen == [[0, 1, 2], [3, 4, 5], [6]]

    run(test)


def test_flush_bytes_are_limited_and_oversize_item_is_flushed_alone() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes, size=lambda item: item, max_bytes=10)
        for _ in range(4):
            flushes.released.release()
        await asyncio.gather(*(batch.submit(size) for size in (4, 6, 50, 9, 1, 1)))
        assert flushes.seen == [[4, 6], [50], [9, 1], [1]]

    run(test)


def test_caller_cancelled_during_flush_does_not_affect_others() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes)
        callers = [asyncio.create_task(batch.submit(number)) for number in range(3)]
        await flushes.started.acquire()
        callers[0].cancel()  # the first write, which started the flush
        await asyncio.wait([callers[0]])
        assert callers[0].cancelled()
        flushes.released.release()
        assert await asyncio.gather(*callers[1:]) == [2, 4]
        assert flushes.seen == [[0, 1, 2]]

    run(test)


def test_caller_cancelled_before_flush_is_left_out() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes)
        first = asyncio.create_task(batch.submit(0))
        await flushes.started.acquire()
        callers = [asyncio.create_task(batch.submit(number)) for number in (1, 2)]
        await run_ready_tasks()
        callers[0].cancel()
        flushes.released.release()
        flushes.released.release()
        assert [await first, await callers[1]] == [0, 4]
        assert flushes.seen == [[0], [2]]

        alone = asyncio.create_task(batch.submit(3))
        await asyncio.sleep(0)
        alone.cancel()
        await run_ready_tasks()
        assert flushes.seen == [[0], [2]], "no flush if all writes were cancelled"

    run(test)


def test_failing_flush_fails_only_its_callers() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes, max_items=2)
        flushes.failure = OSError("the disk is full")
        callers = [asyncio.create_task(batch.submit(number)) for number in range(4)]
        flushes.released.release()
        flushes.released.release()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert [type(result) for result in results[:2]] == [OSError, OSError]
        assert results[2:] == [4, 6]
        flushes.released.release()
        assert await batch.submit(5) == 10, "the next write is flushed"

    run(test)


def test_flush_with_wrong_result_count_is_error() -> None:
    async def main() -> None:
        async def lossy(items: Sequence[int]) -> list[int]:
            return []

        with anyio.fail_after(10), pytest.raises(RuntimeError, match="1 items returned 0 results"):
            await GroupCommit(lossy).submit(1)

    asyncio.run(main())


def test_drain_waits_for_flush_of_cancelled_callers() -> None:
    async def test(flushes: Flushes) -> None:
        batch = GroupCommit(flushes)
        await batch.drain()  # the queue is empty
        caller = asyncio.create_task(batch.submit(1))
        await flushes.started.acquire()
        caller.cancel()
        drained = asyncio.create_task(batch.drain())
        await run_ready_tasks()
        assert not drained.done()
        flushes.released.release()
        await drained

    run(test)


def test_each_event_loop_has_its_own_flushes() -> None:
    seen: list[asyncio.AbstractEventLoop] = []

    async def flush(items: Sequence[int]) -> Sequence[int]:
        seen.append(asyncio.get_running_loop())
        return items

    batch = GroupCommit(flush)

    async def main() -> None:
        with anyio.fail_after(10):
            assert await asyncio.gather(*(batch.submit(number) for number in range(3))) == [0, 1, 2]
            await batch.drain()

    asyncio.run(main())
    asyncio.run(main())
    assert len(set(seen)) == 2
    assert not batch._pending


def test_ending_event_loop_fails_waiting_callers() -> None:
    async def never(items: Sequence[int]) -> Sequence[int]:
        await anyio.sleep_forever()
        return items

    batch = GroupCommit(never)

    async def main() -> str:
        caller = asyncio.create_task(batch.submit(1))
        await run_ready_tasks()
        batch._pending[asyncio.get_running_loop()].task.cancel()
        with anyio.fail_after(10), pytest.raises(RuntimeError, match="event loop is closing"):
            await caller
        asyncio.create_task(batch.submit(2))  # noqa: RUF006  # cancelled when the loop closes
        await run_ready_tasks()
        return "over"

    assert asyncio.run(main()) == "over"
    assert not batch._pending


def test_flush_runs_in_empty_context() -> None:
    user = contextvars.ContextVar("user", default="anonymous")

    async def flush(items: Sequence[int]) -> list[str]:
        return [user.get()] * len(items)

    async def main() -> None:
        user.set("ann")
        with anyio.fail_after(10):
            assert await GroupCommit(flush).submit(1) == "anonymous"

    asyncio.run(main())


def test_trio_is_refused() -> None:
    trio = pytest.importorskip("trio")

    async def flush(items: Sequence[int]) -> Sequence[int]:
        return items

    with pytest.raises(RuntimeError, match="event loop"):
        trio.run(GroupCommit(flush).submit, 1)
