"""The completion hook: called once per response, when its record is final, however it ended."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from responses_kit import Backend, ResponsesKit, Timeouts, Turn, errors, outputs
from responses_kit.engine import hooks
from responses_kit.http.messages import Request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.runners.base import LocalRunner
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend

from ..http.test_websocket import connected
from ..support.memory import shorten_cleanup, stored_records
from .test_leases import LEASE, StoreCallCounter, fast_checks
from .test_repository import GatedBackend
from .test_run import (
    BOUND,
    Call,
    Clock,
    EventClient,
    InterceptedStore,
    StoreFailure,
    UpdateHookStore,
    fail,
    pass_with_checkpoints,
)

__all__ = ["fast_checks"]  # a fixture

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

ASK = {"input": "Hi", "model": "scripted"}


class HookRecorder:
    """A completion hook that records its calls, and checks that each record is final."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store
        self.responses: list[dict[str, Any]] = []
        self.owners: list[str] = []
        self.not_final: list[str] = []
        self._called = anyio.Event()

    async def __call__(self, owner: str, response: dict[str, Any]) -> None:
        self.owners.append(owner)
        self.responses.append(response)
        if self.store is not None:
            record = await self.store.get(owner, response["id"])
            if record is not None and (not record.final or json.loads(record.response) != response):
                self.not_final.append(response["id"])
        self._called.set()

    async def next(self) -> None:
        """Wait for the next call."""
        with anyio.fail_after(BOUND):
            await self._called.wait()
        self._called = anyio.Event()

    @property
    def statuses(self) -> list[str]:
        assert not self.not_final, "the hook was called before the record was final"
        return [response["status"] for response in self.responses]


def recorded_kit(
    backend: Backend, hook: HookRecorder | None = None, **settings: Any
) -> tuple[ResponsesKit, HookRecorder, MemoryStore]:
    store = settings.pop("store", None)
    store = MemoryStore() if store is None else store
    hook = hook or HookRecorder(store)
    return ResponsesKit(backend, store=store, on_response_end=hook, **settings), hook, store


async def wait_until_idle() -> None:
    """Wait until all tasks are blocked."""
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()


# Ways to end.


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
@pytest.mark.parametrize(
    ("script", "status"),
    [
        (["Hi"], "completed"),
        (["Hi", outputs.Finish("max_output_tokens")], "incomplete"),
        (["Hi", LookupError("no")], "failed"),
    ],
)
async def test_hook_is_called_once_when_response_finishes(
    script: list[Any], status: str, stored: bool, streamed: bool
) -> None:
    kit, hook, _ = recorded_kit(ScriptedBackend(script))
    run = await kit.service.create_run({**ASK, "store": stored}, owner="ann", streamed=streamed)
    await run.execute(EventClient().emit)
    assert hook.statuses == [status]
    assert hook.owners == ["ann"]
    assert hook.responses == [run.response]


async def test_hook_is_not_called_for_refused_request() -> None:
    class Full(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            raise errors.TooManyRequests("Later.")

    kit, hook, _ = recorded_kit(Full(["Hi"]))
    for body in ({**ASK, "temperature": "hot"}, ASK):
        with pytest.raises(errors.APIError):
            await kit.create(body)
    assert hook.statuses == []


async def test_hook_is_called_after_final_record_and_before_reply() -> None:
    kit, hook, _ = recorded_kit(ScriptedBackend(["Hi"]))
    response = await kit.create(ASK)
    assert hook.responses == [response]
    async with kit.stream(ASK) as events:
        assert [event async for event in events][-1]["response"] == hook.responses[1]


async def test_hook_gets_failure_when_final_save_fails() -> None:
    store = UpdateHookStore(*[fail] * 9)
    kit, hook, _ = recorded_kit(ScriptedBackend(["Hi"]), HookRecorder(), store=store)
    with pytest.raises(errors.StoreError):
        await kit.create(ASK)
    assert hook.statuses == ["failed"]
    assert stored_records(store) == []


@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
async def test_hook_is_called_when_client_disconnects(stored: bool) -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend)
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi", "store": stored}) as events:
            async for event in events:
                if "delta" in event:
                    break
    assert hook.statuses == ["cancelled"]


async def test_hook_is_called_when_caller_is_cancelled() -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, {"input": "Hi"})
            await backend.half_sent.wait()
            group.cancel_scope.cancel()
    assert hook.statuses == ["cancelled"]


async def test_hook_is_called_when_creation_is_cancelled_after_record_was_saved() -> None:
    creating = anyio.Event()

    async def intercept(name: str, call: Call) -> Any:
        answer = await call()
        if name == "create":
            creating.set()
            await anyio.sleep_forever()  # the record is saved, but the confirmation comes after the cancellation
        return answer

    store = InterceptedStore(intercept)
    kit, hook, _ = recorded_kit(ScriptedBackend(["Hi"]), store=store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, ASK)
            await creating.wait()
            group.cancel_scope.cancel()
    assert [json.loads(record.response)["status"] for record in stored_records(store)] == ["cancelled"]
    assert hook.statuses == ["cancelled"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
async def test_hook_is_called_once_when_response_is_cancelled_or_deleted(how: str, background: bool) -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if background:
                await kit.service.submit({"input": "Hi", "background": True})
            else:
                run = await kit.service.create_run({"input": "Hi"})
                group.start_soon(run.execute, EventClient().emit)
            await backend.half_sent.wait()
            await getattr(kit, how)(backend.turns[0].response_id)
            if how == "delete":
                with pytest.raises(errors.NotFound):
                    await kit.delete(backend.turns[0].response_id)
        await wait_until_idle()
    assert hook.statuses == ["cancelled"]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
async def test_hook_is_called_before_shutdown_completes(background: bool) -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if background:
                await kit.service.submit({"input": "Hi", "background": True})
            else:
                run = await kit.service.create_run({"input": "Hi"})
                group.start_soon(run.execute, EventClient().emit)
            await backend.half_sent.wait()
            await kit.aclose()
            assert hook.statuses == ["failed"]
    assert hook.statuses == ["failed"]


async def test_hook_is_called_once_for_background_and_keyed_responses() -> None:
    kit, hook, _ = recorded_kit(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        for body in ({**ASK, "background": True}, ASK):
            ids = {(await kit.service.submit(body, key=f"key {len(body)}"))["id"] for _ in range(3)}
            assert len(ids) == 1
            await kit.wait(*ids)
            await hook.next()
            await wait_until_idle()
    assert hook.statuses == ["completed"] * 2


@pytest.mark.parametrize("how", ["cancel", "delete", "shutdown"])
async def test_hook_is_called_once_for_response_that_never_started(how: str) -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend, runner=LocalRunner(max_concurrent=1, max_queued=1))
    with anyio.fail_after(BOUND):
        await kit.service.submit({"input": "a", "background": True})
        await backend.half_sent.wait()
        queued = (await kit.service.submit({"input": "b", "background": True}))["id"]
        await wait_until_idle()
        if how == "shutdown":
            await kit.aclose()
        else:
            await getattr(kit, how)(queued)
            backend.resume.set()
            await hook.next()
        await wait_until_idle()
    notified = {response["id"]: response["status"] for response in hook.responses}
    assert len(hook.statuses) == len(notified) == 2
    assert notified[queued] == ("failed" if how == "shutdown" else "cancelled")


async def test_hook_is_not_called_when_queue_is_full() -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend, runner=LocalRunner(max_concurrent=1, max_queued=0))
    with anyio.fail_after(BOUND):
        await kit.service.submit({"input": "a", "background": True})
        with pytest.raises(errors.TooManyRequests):
            await kit.service.submit({"input": "b", "background": True})
        backend.resume.set()
        await hook.next()
        await wait_until_idle()
    assert hook.statuses == ["completed"]


async def test_hook_is_called_once_for_orphaned_response() -> None:
    clock, store, hook = Clock(), InterceptedStore(pass_with_checkpoints), HookRecorder()
    kits = [
        ResponsesKit(GatedBackend(), store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=hook)
        for _ in range(4)
    ]
    started = await kits[0].service.create_run({"input": "Hi"}, owner="ann")
    response_id = started.id
    del started  # the host never executes it
    clock.now += LEASE + 1
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for kit in kits[1:]:
                group.start_soon(kit.service.repository.sweep)
                group.start_soon(lambda kit: kit.retrieve(response_id, owner="ann"), kit)
    assert hook.statuses == ["failed"]
    assert hook.owners == ["ann"]
    assert hook.responses[0]["error"]["code"] == "worker_lost"


async def test_hook_is_not_called_by_superseded_worker(fast_checks: None) -> None:
    calls, clock, backend, hook = StoreCallCounter(), Clock(), GatedBackend(), HookRecorder()
    store = MemoryStore()
    cut_off = InterceptedStore(calls)
    vars(cut_off).update({name: value for name, value in vars(store).items() if name != "intercept"})
    kit = ResponsesKit(backend, store=cut_off, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=hook)
    other = ResponsesKit(
        ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=hook
    )
    with anyio.fail_after(BOUND):
        started = await kit.service.submit({"input": "Hi", "background": True})
        await backend.half_sent.wait()
        calls.failing = {"renew"}
        await calls.next("renew")
        clock.now += LEASE + 1
        await other.retrieve(started["id"])
        backend.resume.set()
        await backend.closed.wait()
        while kit.service.leases.find(("", started["id"])) is not None:
            await anyio.lowlevel.checkpoint()
    assert hook.statuses == ["failed"]
    assert hook.responses[0]["error"]["code"] == "worker_lost"


async def test_hook_is_called_for_unstored_websocket_responses_and_warmup() -> None:
    kit, hook, store = recorded_kit(ScriptedBackend(["Hi"]))
    async with connected(kit, "ann") as peer:
        await peer.turn("Hi")
        await peer.turn("Hi", store=True)
        await peer.turn("Hi", generate=False)
    assert hook.statuses == ["completed"] * 3
    assert hook.owners == ["ann"] * 3
    assert [response["output"] == [] for response in hook.responses] == [False, False, True]
    assert len(stored_records(store)) == 1


async def test_hook_is_called_when_websocket_breaks() -> None:
    backend = GatedBackend()
    kit, hook, _ = recorded_kit(backend)
    async with connected(kit) as peer:
        peer.ask("Hi")
        with anyio.fail_after(BOUND):
            await backend.half_sent.wait()
        peer.leave()
        await peer.closed()
    assert hook.statuses == ["cancelled"]


async def test_hook_is_called_when_send_timeout_aborts_stream() -> None:
    kit, hook, _ = recorded_kit(ScriptedBackend(["Hi", Pause(60)]), timeouts=Timeouts(send=0.05, keep_alive=0.02))
    body = json.dumps({**ASK, "stream": True}).encode()

    async def read() -> bytes:
        return body

    async def send(data: bytes) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(BOUND):
        reply = await OpenResponses(kit).handle(Request("POST", "/responses", read=read))
        assert reply.stream is not None
        await reply.stream(send)
    assert hook.statuses == ["cancelled"]


async def test_hook_is_not_called_for_compaction_turns() -> None:
    kit, hook, _ = recorded_kit(ScriptedBackend(["In short: tea."]))
    await kit.compact({"model": "scripted", "input": [{"role": "user", "content": "Tea, please. " * 20}]})
    assert hook.statuses == []


# Failures of the store.

ENDINGS: dict[str, Callable[[ResponsesKit, str], Awaitable[Any]]] = {
    "finish": lambda kit, response_id: anyio.lowlevel.checkpoint(),
    "cancel": lambda kit, response_id: kit.cancel(response_id),
    "delete": lambda kit, response_id: kit.delete(response_id),
    "shutdown": lambda kit, response_id: kit.aclose(),
}


@pytest.mark.parametrize("fails_after_work", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("resumable", [False, True], ids=["not logged", "logged"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_hook_gets_stored_response_once_whichever_store_call_fails(
    ending: str, resumable: bool, fails_after_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_cleanup(monkeypatch, 0.2)
    for nth in range(1, 60):
        clock, backend = Clock(), GatedBackend()
        failing = StoreFailure(nth, fails_after_work=fails_after_work)
        store = InterceptedStore(failing, clock=clock)
        hook = HookRecorder()
        kit, other = (
            ResponsesKit(
                each,
                store=store,
                clock=clock,
                timeouts=Timeouts(lease=LEASE),
                on_response_end=hook,
                resumable=resumable,
            )
            for each in (backend, GatedBackend())
        )
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                try:
                    run = await kit.service.create_run({"input": "Hi"}, streamed=True)
                except errors.StoreError:
                    continue
                group.start_soon(run.execute, EventClient().emit)
                response_id = run.id
                await wait_until_idle()  # half of it was sent, or the response has ended
                if ending == "finish":
                    backend.resume.set()
                try:
                    await ENDINGS[ending](kit, response_id)
                except errors.APIError:
                    backend.resume.set()
            has_failed = failing.stop_failing()
            clock.now += LEASE + 1
            await other.service.repository.sweep()
        records = {record.id: json.loads(record.response)["status"] for record in stored_records(store) if record.final}
        notified = Counter(response["id"] for response in hook.responses)
        if ending == "delete" and not notified:
            assert has_failed  # the final save failed and the record was deleted: no process can see an ending
            assert records == {}
            continue
        assert notified == {response_id: 1}, f"call {nth}"
        assert hook.statuses[0] == records.get(response_id, hook.statuses[0]), f"call {nth}"
        if not has_failed:
            break
    else:
        pytest.fail("the store was called without end")


async def test_hook_is_called_later_when_final_save_hangs(monkeypatch: pytest.MonkeyPatch, fast_checks: None) -> None:
    shorten_cleanup(monkeypatch, 0.05)
    hanging, clock, backend = anyio.Event(), Clock(), GatedBackend()

    async def intercept(name: str, call: Call) -> Any:
        if name == "update" and not hanging.is_set():
            await anyio.sleep_forever()
        return await call()

    store = InterceptedStore(intercept, clock=clock)
    hook = HookRecorder()
    kit = ResponsesKit(backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=hook)
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                if "delta" in event:
                    break
    assert hook.statuses == []
    hanging.set()
    clock.now += LEASE + 1
    await ResponsesKit(
        GatedBackend(), store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=hook
    ).service.repository.sweep()
    assert hook.statuses == ["failed"]


# The hook.


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_hook_can_be_sync_or_async(is_sync: bool) -> None:
    notified: list[tuple[str, str]] = []

    def hook(owner: str, response: dict[str, Any]) -> None:
        notified.append((owner, response["status"]))

    async def async_hook(owner: str, response: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        hook(owner, response)

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook if is_sync else async_hook)
    await kit.create(ASK, owner="ann")
    assert notified == [("ann", "completed")]


async def test_hook_gets_its_own_copy_of_response() -> None:
    received: list[dict[str, Any]] = []

    def hook(owner: str, response: dict[str, Any]) -> None:
        received.append(response)
        response["output"].clear()
        response["metadata"]["seen"] = "yes"

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    response = await kit.create(ASK)
    assert response["output"]
    assert response["metadata"] == {}
    assert await kit.retrieve(response["id"]) == response
    assert received[0]["output"] == []


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("error", [LookupError("no such bill"), SystemExit(3), ExceptionGroup("many", [OSError()])])
async def test_failing_hook_does_not_affect_response(
    error: BaseException, is_sync: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(owner: str, response: dict[str, Any]) -> None:
        raise error

    async def async_hook(owner: str, response: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    kit = ResponsesKit(ScriptedBackend(["the secret answer"]), on_response_end=hook if is_sync else async_hook)
    for _ in range(2):
        response = await kit.create(ASK)
        assert response["status"] == "completed"
        assert response["id"] in caplog.text
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR] * 2
    assert "secret" not in caplog.text


async def test_hook_that_raises_cancellation_does_not_affect_response(caplog: pytest.LogCaptureFixture) -> None:
    async def hook(owner: str, response: dict[str, Any]) -> None:
        raise cancelled()

    cancelled = anyio.get_cancelled_exc_class()
    if cancelled.__module__.startswith("trio"):
        pytest.skip("trio's cancellation cannot be raised by hand")
    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        response = await kit.create(ASK)
    assert response["id"] in caplog.text


async def test_slow_hook_delays_reply_until_timeout_and_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "_HOOK_TIMEOUT", 0.02)
    resume, done = anyio.Event(), anyio.Event()

    async def hook(owner: str, response: dict[str, Any]) -> None:
        await resume.wait()
        done.set()

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        await kit.create(ASK)
        assert not done.is_set()
        resume.set()
        await done.wait()


async def test_hook_is_not_cancelled_when_client_disconnects() -> None:
    started, resume, done = anyio.Event(), anyio.Event(), anyio.Event()

    async def hook(owner: str, response: dict[str, Any]) -> None:
        started.set()
        await resume.wait()
        done.set()

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, ASK)
            await started.wait()
            group.cancel_scope.cancel()
            resume.set()
        await done.wait()


async def test_hook_can_call_kit() -> None:
    """For example, to generate a title for the conversation."""
    titles: list[str] = []

    async def hook(owner: str, response: dict[str, Any]) -> None:
        if response["metadata"].get("for") != "title":
            body = {**ASK, "previous_response_id": response["id"], "metadata": {"for": "title"}}
            titles.append((await kit.create(body, owner=owner))["status"])

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        await kit.create(ASK, owner="ann")
    assert titles == ["completed"]
