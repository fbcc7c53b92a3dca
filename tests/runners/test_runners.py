"""Runners: limits on running and queued background responses, and custom runners."""

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

from ..engine.test_run import BOUND, Call, Clock, InterceptedStore, check_records
from ..support.memory import stored_records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BACKGROUND = {"input": "Hi", "background": True}


class GatedTurns(Backend):
    """A backend in which each turn waits for an event named after its input."""

    models = ("doors",)

    def __init__(self) -> None:
        self.gates: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
        self.running: list[str] = []
        self.max_running = 0
        self.started: list[str] = []

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.started.append(turn.text)
        self.running.append(turn.text)
        self.max_running = max(self.max_running, len(self.running))
        try:
            yield "half "
            await self.gates[turn.text].wait()
            yield turn.text
        finally:
            self.running.remove(turn.text)


async def start(kit: ResponsesKit, text: str) -> str:
    started = await kit.service.submit({"input": text, "background": True})
    await anyio.wait_all_tasks_blocked()  # trio starts the tasks of one tick in random order
    return str(started["id"])


def statuses(store: MemoryStore) -> list[str]:
    return sorted(json.loads(record.response)["status"] for record in stored_records(store))


async def test_local_runner_runs_up_to_max_concurrent_in_order() -> None:
    backend, store = GatedTurns(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=LocalRunner(max_concurrent=2, max_queued=10))
    ids = {name: await start(kit, name) for name in "abcdef"}
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()
        assert sorted(backend.running) == ["a", "b"]
        assert statuses(store) == ["in_progress"] * 2 + ["queued"] * 4
        for name in "abcdef":
            backend.gates[name].set()
            assert (await kit.wait(ids[name]))["output"][0]["content"][0]["text"] == f"half {name}"
            await anyio.wait_all_tasks_blocked()
    assert backend.started == list("abcdef")
    assert backend.max_running == 2


async def test_local_runner_refuses_beyond_max_queued_and_stores_nothing() -> None:
    backend, store = GatedTurns(), MemoryStore()
    kit = ResponsesKit(backend, store=store, runner=LocalRunner(max_concurrent=1, max_queued=2))
    ids = [await start(kit, name) for name in "abc"]
    for key in (None, "key"):
        with pytest.raises(errors.TooManyRequests) as caught:
            await kit.service.submit({"input": "d", "background": True}, key=key)
        assert caught.value.status == 429
        assert int(caught.value.headers["Retry-After"]) > 0
        assert {record.id for record in stored_records(store)} == set(ids)
    with anyio.fail_after(BOUND):
        backend.gates["a"].set()
        await kit.wait(ids[0])
        await anyio.wait_all_tasks_blocked()
        d = await kit.service.submit({"input": "d", "background": True}, key="key")
        for name in "bcd":
            backend.gates[name].set()
        assert (await kit.wait(d["id"]))["status"] == "completed"
    assert statuses(store) == ["completed"] * 4


async def test_local_runner_without_queue_refuses_immediately() -> None:
    backend = GatedTurns()
    kit = ResponsesKit(backend, runner=LocalRunner(max_concurrent=1, max_queued=0))
    await start(kit, "a")
    with pytest.raises(errors.TooManyRequests):
        await start(kit, "b")


@pytest.mark.parametrize("end", ["cancel", "delete", "fail", "aclose"])
async def test_local_runner_frees_place_however_response_ends(end: str) -> None:
    class FailingTurns(GatedTurns):
        async def generate(self, turn: Turn) -> AsyncIterator[str]:
            async for output in super().generate(turn):
                yield output
            if turn.text == "a" and end == "fail":
                raise LookupError("gone")

    backend = FailingTurns()
    kit = ResponsesKit(backend, runner=LocalRunner(max_concurrent=1, max_queued=1))
    a, b = await start(kit, "a"), await start(kit, "b")
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()
        assert backend.running == ["a"]
        if end == "fail":
            backend.gates["a"].set()
            with pytest.raises(errors.ModelError):
                await kit.wait(a)
        elif end == "aclose":
            await kit.aclose()
            assert backend.running == []
            assert {(await kit.retrieve(response_id))["status"] for response_id in (a, b)} == {"failed"}
            return
        else:
            await getattr(kit, end)(a)
        await anyio.wait_all_tasks_blocked()
        assert backend.running == ["b"]
        backend.gates["b"].set()
        assert (await kit.wait(b))["status"] == "completed"


async def test_response_cancelled_in_queue_is_never_started() -> None:
    backend = GatedTurns()
    kit = ResponsesKit(backend, runner=LocalRunner(max_concurrent=1, max_queued=1))
    a, b = await start(kit, "a"), await start(kit, "b")
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()
        assert (await kit.cancel(b))["status"] == "cancelled"
        backend.gates["a"].set()
        await kit.wait(a)
        await anyio.wait_all_tasks_blocked()
        c, d = await start(kit, "c"), await start(kit, "d")
        for name in "cd":
            backend.gates[name].set()
        for response_id in (c, d):
            assert (await kit.wait(response_id))["status"] == "completed"
    assert backend.started == ["a", "c", "d"]


def test_local_runner_has_places_per_event_loop(anyio_backend_name: str) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]), runner=LocalRunner(max_concurrent=1, max_queued=0))

    async def main() -> str:
        with anyio.fail_after(BOUND):
            started = await kit.service.submit(BACKGROUND)
            return str((await kit.wait(started["id"]))["status"])

    assert [anyio.run(main, backend=anyio_backend_name) for _ in range(3)] == ["completed"] * 3


# Custom runners.


class QueueRunner:
    """A runner that collects its jobs; tests run them, for example with other kits on the same store."""

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


async def test_runner_is_bound_to_kit() -> None:
    runner = QueueRunner()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), runner=runner)
    started = await kit.service.submit(BACKGROUND, owner="ann")
    assert (started["status"], runner.jobs) == ("queued", [("ann", started["id"])])
    assert (await kit.retrieve(started["id"], owner="ann"))["status"] == "queued"
    with anyio.fail_after(BOUND):
        await runner.work(*runner.jobs[0])
    assert (await kit.retrieve(started["id"], owner="ann"))["status"] == "completed"


@pytest.mark.parametrize("error", [errors.ServerError("The broker cannot be reached."), RuntimeError("a fault")])
async def test_failing_runner_leaves_nothing_in_store(error: Exception) -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=QueueRunner(error))
    for key in (None, "key"):
        with pytest.raises(type(error)) as caught:
            await kit.service.submit(BACKGROUND, key=key)
        assert caught.value is error
    assert len(store) == 0


async def test_response_is_submitted_despite_disconnect() -> None:
    class SlowRunner(QueueRunner):
        async def submit(self, run: Run) -> None:
            submitted.set()
            await resume.wait()
            finished.set()

    store, submitted, resume, finished = MemoryStore(), anyio.Event(), anyio.Event(), anyio.Event()
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=SlowRunner())
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.service.submit, BACKGROUND)
            await submitted.wait()
            group.cancel_scope.cancel()
        resume.set()
        await finished.wait()
        (record,) = stored_records(store)
        await kit.service.run_queued("", record.id)
    assert (await kit.retrieve(record.id))["status"] == "completed"


async def test_queued_response_expires_after_queue_timeout() -> None:
    clock, store = Clock(), MemoryStore()
    kit = ResponsesKit(
        ScriptedBackend(["Hi"]), store=store, runner=QueueRunner(), clock=clock, timeouts=Timeouts(lease=30.0)
    )
    started = await kit.service.submit(BACKGROUND)
    clock.now += 100
    assert (await kit.retrieve(started["id"]))["status"] == "queued"
    clock.now += 1
    assert (await kit.retrieve(started["id"]))["error"]["code"] == "worker_lost"
    await check_records(store, clock)


async def test_failing_runner_and_store_leave_no_response(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def intercept(name: str, call: Call) -> Any:
        if name == "delete":
            raise OSError("the disk of secret-host is full")
        return await call()

    store, clock = InterceptedStore(intercept), Clock()
    refusal = errors.TooManyRequests("Too many background responses are waiting.")
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, runner=QueueRunner(refusal), clock=clock)
    with pytest.raises(errors.APIError):
        await kit.service.submit(BACKGROUND)
    assert [response["status"] for response in await check_records(store, clock)] in ([], ["failed"])
