"""Who works on background responses: so many at once, so many that wait, and no more."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from responses_kit import Backend, ResponsesKit, Timeouts, Turn, errors
from responses_kit.engine.run import Run
from responses_kit.runners.base import LocalRunner, Work
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend

from ..engine.test_run import BOUND, Call, Clock, Watched, check_kept
from ..support.memory import kept

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BACKGROUND = {"input": "Hi", "background": True}


class Doors(Backend):
    """Each turn waits at a door of its own, which has the name of its input."""

    models = ("doors",)

    def __init__(self) -> None:
        self.doors: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
        self.inside: list[str] = []
        self.most = 0
        self.came: list[str] = []

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.came.append(turn.text)
        self.inside.append(turn.text)
        self.most = max(self.most, len(self.inside))
        try:
            yield "half "
            await self.doors[turn.text].wait()
            yield turn.text
        finally:
            self.inside.remove(turn.text)


async def start(kit: ResponsesKit, text: str) -> str:
    started = await kit.service.submit({"input": text, "background": True})
    await anyio.wait_all_tasks_blocked()  # trio draws lots between those who begin in the same tick
    return str(started["id"])


def statuses(store: MemoryStore) -> list[str]:
    return sorted(json.loads(record.response)["status"] for record in kept(store))


async def test_so_many_are_worked_on_at_once_and_the_others_wait_their_turn_in_order() -> None:
    backend, store = Doors(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=LocalRunner(max_concurrent=2, max_queued=10))
    ids = {name: await start(kit, name) for name in "abcdef"}
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()
        assert sorted(backend.inside) == ["a", "b"]
        assert statuses(store) == ["in_progress"] * 2 + ["queued"] * 4
        for name in "abcdef":
            backend.doors[name].set()
            assert (await kit.wait(ids[name]))["output"][0]["content"][0]["text"] == f"half {name}"
            await anyio.wait_all_tasks_blocked()
    assert backend.came == list("abcdef")
    assert backend.most == 2


async def test_one_too_many_is_refused_and_leaves_nothing_in_the_store() -> None:
    backend, store = Doors(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=LocalRunner(max_concurrent=1, max_queued=2))
    ids = [await start(kit, name) for name in "abc"]
    for key in (None, "key"):
        with pytest.raises(errors.TooManyRequests) as caught:
            await kit.service.submit({"input": "d", "background": True}, key=key)
        assert caught.value.status == 429
        assert int(caught.value.headers["Retry-After"]) > 0
        assert {record.id for record in kept(store)} == set(ids)
    with anyio.fail_after(BOUND):
        backend.doors["a"].set()
        await kit.wait(ids[0])
        await anyio.wait_all_tasks_blocked()
        d = await kit.service.submit({"input": "d", "background": True}, key="key")
        for name in "bcd":
            backend.doors[name].set()
        assert (await kit.wait(d["id"]))["status"] == "completed"
    assert statuses(store) == ["completed"] * 4


async def test_none_may_wait_where_no_place_is_for_waiting() -> None:
    backend = Doors()
    kit = ResponsesKit(backend, runner=LocalRunner(max_concurrent=1, max_queued=0))
    await start(kit, "a")
    with pytest.raises(errors.TooManyRequests):
        await start(kit, "b")


@pytest.mark.parametrize("ending", ["cancel", "delete", "fail", "aclose"])
async def test_every_way_to_end_frees_the_place(ending: str) -> None:
    class Failing(Doors):
        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            async for output in super().generate(turn):
                yield output
            if turn.text == "a" and ending == "fail":
                raise LookupError("gone")

    backend = Failing()
    kit = ResponsesKit(backend, runner=LocalRunner(max_concurrent=1, max_queued=1))
    a, b = await start(kit, "a"), await start(kit, "b")
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()
        assert backend.inside == ["a"]
        if ending == "fail":
            backend.doors["a"].set()
            with pytest.raises(errors.ModelError):
                await kit.wait(a)
        elif ending == "aclose":
            await kit.aclose()
            assert backend.inside == []
            assert {(await kit.retrieve(response_id))["status"] for response_id in (a, b)} == {"failed"}
            return
        else:
            await getattr(kit, ending)(a)
        await anyio.wait_all_tasks_blocked()
        assert backend.inside == ["b"]
        backend.doors["b"].set()
        assert (await kit.wait(b))["status"] == "completed"


async def test_what_was_cancelled_while_it_waited_is_never_begun_and_its_place_is_free() -> None:
    backend = Doors()
    kit = ResponsesKit(backend, runner=LocalRunner(max_concurrent=1, max_queued=1))
    a, b = await start(kit, "a"), await start(kit, "b")
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()
        assert (await kit.cancel(b))["status"] == "cancelled"
        backend.doors["a"].set()
        await kit.wait(a)
        await anyio.wait_all_tasks_blocked()
        c, d = await start(kit, "c"), await start(kit, "d")
        for name in "cd":
            backend.doors[name].set()
        for response_id in (c, d):
            assert (await kit.wait(response_id))["status"] == "completed"
    assert backend.came == ["a", "c", "d"]


def test_each_event_loop_has_places_of_its_own(anyio_backend_name: str) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), runner=LocalRunner(max_concurrent=1, max_queued=0))

    async def main() -> str:
        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            return str((await kit.wait(started["id"]))["status"])

    assert [anyio.run(main, backend=anyio_backend_name) for _ in range(3)] == ["completed"] * 3


# Runners of one's own.


class Elsewhere:
    """A runner whose workers are other kits on the same store: the test says when they work."""

    queue_timeout = 100.0

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.jobs: list[tuple[str, str]] = []

    def bind(self, work: Work) -> None:
        self.work = work

    async def submit(self, run: Run) -> None:
        await anyio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        self.jobs.append(run.key)


async def test_a_runner_is_given_the_kits_own_work() -> None:
    runner = Elsewhere()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), runner=runner)
    started = await kit.service.submit(BACKGROUND, owner="ann")
    assert (started["status"], runner.jobs) == ("queued", [("ann", started["id"])])
    assert (await kit.retrieve(started["id"], owner="ann"))["status"] == "queued"
    with anyio.fail_after(BOUND):
        await runner.work(*runner.jobs[0])
    assert (await kit.retrieve(started["id"], owner="ann"))["status"] == "completed"


@pytest.mark.parametrize("error", [errors.ServerError("The broker is out of reach."), RuntimeError("a fault")])
async def test_a_runner_that_cannot_take_a_response_leaves_nothing_in_the_store(error: Exception) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=Elsewhere(error))
    for key in (None, "key"):
        with pytest.raises(type(error)) as caught:
            await kit.service.submit(BACKGROUND, key=key)
        assert caught.value is error
    assert len(store) == 0


async def test_a_client_that_leaves_while_the_runner_is_asked_leaves_a_response_that_goes_on() -> None:
    class Slow(Elsewhere):
        async def submit(self, run: Run) -> None:
            reached.set()
            await goes_on.wait()
            taken.set()

    store, reached, goes_on, taken = MemoryStore(), anyio.Event(), anyio.Event(), anyio.Event()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=Slow())
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.service.submit, BACKGROUND)
            await reached.wait()
            group.cancel_scope.cancel()
        goes_on.set()
        await taken.wait()
        (record,) = kept(store)
        await kit.service.run_queued("", record.id)
    assert (await kit.retrieve(record.id))["status"] == "completed"


async def test_a_response_that_no_worker_takes_waits_as_long_as_the_runner_says() -> None:
    clock, store = Clock(), MemoryStore()
    kit = ResponsesKit(
        ScriptedBackend(["Hi"]), store=store, runner=Elsewhere(), clock=clock, timeouts=Timeouts(lease=30.0)
    )
    started = await kit.service.submit(BACKGROUND)
    clock.now += 100
    assert (await kit.retrieve(started["id"]))["status"] == "queued"
    clock.now += 1
    assert (await kit.retrieve(started["id"]))["error"]["code"] == "worker_lost"
    await check_kept(store, clock)


async def test_a_response_that_cannot_be_taken_is_gone_though_the_store_fails_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def around(name: str, call: Call) -> Any:
        if name == "delete":
            raise OSError("the disk of secret-host is full")
        return await call()

    store, clock = Watched(around), Clock()
    refusal = errors.TooManyRequests("Too many background responses are waiting.")
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=Elsewhere(refusal), clock=clock)
    with pytest.raises(errors.APIError):
        await kit.service.submit(BACKGROUND)
    assert [response["status"] for response in await check_kept(store, clock)] in ([], ["failed"])
