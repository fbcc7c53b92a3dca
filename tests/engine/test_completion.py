"""The app hears of each response that has ended: once, when its record is final, however it ended."""

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
from ..support.memory import kept, soon_given_up
from .test_leases import LEASE, Looks, quick
from .test_repository import Gated
from .test_run import BOUND, Audience, Call, Clock, Failing, TrickyStore, Watched, fails, slow

__all__ = ["quick"]  # a fixture

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

ASK = {"input": "Hi", "model": "scripted"}


class Heard:
    """A hook that keeps what it is told, and looks at the record of each."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store
        self.responses: list[dict[str, Any]] = []
        self.owners: list[str] = []
        self.open: list[str] = []
        self._came = anyio.Event()

    async def __call__(self, owner: str, response: dict[str, Any]) -> None:
        self.owners.append(owner)
        self.responses.append(response)
        if self.store is not None:
            record = await self.store.get(owner, response["id"])
            if record is not None and (not record.final or json.loads(record.response) != response):
                self.open.append(response["id"])
        self._came.set()

    async def next(self) -> None:
        """Returns when it is told of another one."""
        with anyio.fail_after(BOUND):
            await self._came.wait()
        self._came = anyio.Event()

    @property
    def statuses(self) -> list[str]:
        assert not self.open, "told of a response whose record is not final"
        return [response["status"] for response in self.responses]


def kit_of(backend: Backend, hook: Heard | None = None, **settings: Any) -> tuple[ResponsesKit, Heard, MemoryStore]:
    store = settings.pop("store", None)
    store = MemoryStore() if store is None else store
    hook = hook or Heard(store)
    return ResponsesKit(backend, store=store, on_response_end=hook, **settings), hook, store


async def settled() -> None:
    """Everybody has come as far as they come by themselves."""
    with anyio.fail_after(BOUND):
        await anyio.wait_all_tasks_blocked()


# Every way to end.


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
async def test_a_response_that_ends_by_itself_is_told_once(
    script: list[Any], status: str, stored: bool, streamed: bool
) -> None:
    kit, heard, _ = kit_of(ScriptedBackend(script))
    run = await kit.service.create_run({**ASK, "store": stored}, owner="ann", streamed=streamed)
    await run.execute(Audience().tell)
    assert heard.statuses == [status]
    assert heard.owners == ["ann"]
    assert heard.responses == [run.response]


async def test_what_never_became_a_response_is_not_told() -> None:
    class Full(ScriptedBackend):
        async def admit(self, turn: Turn) -> None:
            raise errors.TooManyRequests("Later.")

    kit, heard, _ = kit_of(Full(["Hi"]))
    for body in ({**ASK, "temperature": "hot"}, ASK):
        with pytest.raises(errors.APIError):
            await kit.create(body)
    assert heard.statuses == []


async def test_the_hook_is_called_before_the_answer_is_out_and_after_the_record_is_final() -> None:
    kit, heard, _ = kit_of(ScriptedBackend(["Hi"]))
    response = await kit.create(ASK)
    assert heard.responses == [response]
    async with kit.stream(ASK) as events:
        assert [event async for event in events][-1]["response"] == heard.responses[1]


async def test_a_store_that_fails_at_the_final_write_is_told_as_the_failure_that_the_client_hears() -> None:
    store = TrickyStore(*[fails] * 9)
    kit, heard, _ = kit_of(ScriptedBackend(["Hi"]), Heard(), store=store)
    with pytest.raises(errors.StoreError):
        await kit.create(ASK)
    assert heard.statuses == ["failed"]
    assert kept(store) == []


@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
async def test_a_client_that_leaves_is_told_of(stored: bool) -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend)
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi", "store": stored}) as events:
            async for event in events:
                if "delta" in event:
                    break
    assert heard.statuses == ["cancelled"]


async def test_a_caller_that_is_cancelled_is_told_of() -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, {"input": "Hi"})
            await backend.half.wait()
            group.cancel_scope.cancel()
    assert heard.statuses == ["cancelled"]


async def test_a_caller_that_is_cancelled_while_its_record_is_written_is_told_of_where_there_is_one() -> None:
    creating = anyio.Event()

    async def around(name: str, call: Call) -> Any:
        answer = await call()
        if name == "create":
            creating.set()
            await anyio.sleep_forever()  # the store's word that it is done comes too late
        return answer

    store = Watched(around)
    kit, heard, _ = kit_of(ScriptedBackend(["Hi"]), store=store)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, ASK)
            await creating.wait()
            group.cancel_scope.cancel()
    assert [json.loads(record.response)["status"] for record in kept(store)] == ["cancelled"]
    assert heard.statuses == ["cancelled"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
async def test_a_response_that_is_cancelled_or_deleted_in_progress_is_told_once(how: str, background: bool) -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if background:
                await kit.service.submit({"input": "Hi", "background": True})
            else:
                run = await kit.service.create_run({"input": "Hi"})
                group.start_soon(run.execute, Audience().tell)
            await backend.half.wait()
            await getattr(kit, how)(backend.turns[0].response_id)
            if how == "delete":
                with pytest.raises(errors.NotFound):
                    await kit.delete(backend.turns[0].response_id)
        await settled()
    assert heard.statuses == ["cancelled"]


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
async def test_what_the_shutdown_ends_is_told_before_the_kit_is_closed(background: bool) -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            if background:
                await kit.service.submit({"input": "Hi", "background": True})
            else:
                run = await kit.service.create_run({"input": "Hi"})
                group.start_soon(run.execute, Audience().tell)
            await backend.half.wait()
            await kit.aclose()
            assert heard.statuses == ["failed"]
    assert heard.statuses == ["failed"]


async def test_background_and_keyed_responses_are_told_once_however_often_they_are_asked_for() -> None:
    kit, heard, _ = kit_of(ScriptedBackend(["Hi"]))
    with anyio.fail_after(BOUND):
        for body in ({**ASK, "background": True}, ASK):
            ids = {(await kit.service.submit(body, key=f"key {len(body)}"))["id"] for _ in range(3)}
            assert len(ids) == 1
            await kit.wait(*ids)
            await heard.next()
            await settled()
    assert heard.statuses == ["completed"] * 2


@pytest.mark.parametrize("how", ["cancel", "delete", "shutdown"])
async def test_a_response_that_never_came_to_its_turn_is_told_once(how: str) -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend, runner=LocalRunner(max_concurrent=1, max_queued=1))
    with anyio.fail_after(BOUND):
        await kit.service.submit({"input": "a", "background": True})
        await backend.half.wait()
        waiting = (await kit.service.submit({"input": "b", "background": True}))["id"]
        await settled()
        if how == "shutdown":
            await kit.aclose()
        else:
            await getattr(kit, how)(waiting)
            backend.goes_on.set()
            await heard.next()
        await settled()
    told = {response["id"]: response["status"] for response in heard.responses}
    assert len(heard.statuses) == len(told) == 2
    assert told[waiting] == ("failed" if how == "shutdown" else "cancelled")


async def test_one_that_found_no_room_never_was() -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend, runner=LocalRunner(max_concurrent=1, max_queued=0))
    with anyio.fail_after(BOUND):
        await kit.service.submit({"input": "a", "background": True})
        with pytest.raises(errors.TooManyRequests):
            await kit.service.submit({"input": "b", "background": True})
        backend.goes_on.set()
        await heard.next()
        await settled()
    assert heard.statuses == ["completed"]


async def test_what_a_dead_worker_left_is_told_once_by_whoever_ends_it() -> None:
    clock, store, heard = Clock(), Watched(slow), Heard()
    kits = [
        ResponsesKit(Gated(), store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=heard)
        for _ in range(4)
    ]
    started = await kits[0].service.create_run({"input": "Hi"}, owner="ann")
    response_id = started.id
    del started  # its host never executes it
    clock.now += LEASE + 1
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for kit in kits[1:]:
                group.start_soon(kit.service.repository.sweep)
                group.start_soon(lambda kit: kit.retrieve(response_id, owner="ann"), kit)
    assert heard.statuses == ["failed"]
    assert heard.owners == ["ann"]
    assert heard.responses[0]["error"]["code"] == "worker_lost"


async def test_a_worker_that_comes_too_late_tells_nothing_of_what_another_has_ended(quick: None) -> None:
    looks, clock, backend, heard = Looks(), Clock(), Gated(), Heard()
    store = MemoryStore()
    cut_off = Watched(looks)
    vars(cut_off).update({name: value for name, value in vars(store).items() if name != "around"})
    kit = ResponsesKit(backend, store=cut_off, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=heard)
    other = ResponsesKit(
        ScriptedBackend(["Hi"]), store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=heard
    )
    with anyio.fail_after(BOUND):
        started = await kit.service.submit({"input": "Hi", "background": True})
        await backend.half.wait()
        looks.failing = {"renew"}
        await looks.next("renew")
        clock.now += LEASE + 1
        await other.retrieve(started["id"])
        backend.goes_on.set()
        await backend.closed.wait()
        while kit.service.leases.find(("", started["id"])) is not None:
            await anyio.lowlevel.checkpoint()
    assert heard.statuses == ["failed"]
    assert heard.responses[0]["error"]["code"] == "worker_lost"


async def test_what_a_websocket_keeps_for_itself_is_told_too_and_so_is_its_warming_up() -> None:
    kit, heard, store = kit_of(ScriptedBackend(["Hi"]))
    async with connected(kit, "ann") as peer:
        await peer.turn("Hi")
        await peer.turn("Hi", store=True)
        await peer.turn("Hi", generate=False)
    assert heard.statuses == ["completed"] * 3
    assert heard.owners == ["ann"] * 3
    assert [response["output"] == [] for response in heard.responses] == [False, False, True]
    assert len(kept(store)) == 1


async def test_a_websocket_that_breaks_is_told_of() -> None:
    backend = Gated()
    kit, heard, _ = kit_of(backend)
    async with connected(kit) as peer:
        peer.ask("Hi")
        with anyio.fail_after(BOUND):
            await backend.half.wait()
        peer.leave()
        await peer.closed()
    assert heard.statuses == ["cancelled"]


async def test_a_stream_whose_client_reads_nothing_is_told_of_when_it_is_given_up() -> None:
    kit, heard, _ = kit_of(ScriptedBackend(["Hi", Pause(60)]), timeouts=Timeouts(send=0.05, keep_alive=0.02))
    body = json.dumps({**ASK, "stream": True}).encode()

    async def read() -> bytes:
        return body

    async def send(data: bytes) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(BOUND):
        reply = await OpenResponses(kit).handle(Request("POST", "/responses", read=read))
        assert reply.stream is not None
        await reply.stream(send)
    assert heard.statuses == ["cancelled"]


async def test_the_turns_of_a_compaction_are_no_responses() -> None:
    kit, heard, _ = kit_of(ScriptedBackend(["In short: tea."]))
    await kit.compact({"model": "scripted", "input": [{"role": "user", "content": "Tea, please. " * 20}]})
    assert heard.statuses == []


# However it goes wrong.

ENDINGS: dict[str, Callable[[ResponsesKit, str], Awaitable[Any]]] = {
    "by itself": lambda kit, response_id: anyio.lowlevel.checkpoint(),
    "cancel": lambda kit, response_id: kit.cancel(response_id),
    "delete": lambda kit, response_id: kit.delete(response_id),
    "shutdown": lambda kit, response_id: kit.aclose(),
}


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("resumable", [False, True], ids=["told", "kept"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_whichever_call_of_the_store_fails_it_is_told_once_and_as_it_is_on_record(
    ending: str, resumable: bool, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon_given_up(monkeypatch, 0.2)
    for nth in range(1, 60):
        clock, backend = Clock(), Gated()
        failing = Failing(nth, done=done)
        store = Watched(failing, clock=clock)
        heard = Heard()
        kit, other = (
            ResponsesKit(
                each,
                store=store,
                clock=clock,
                timeouts=Timeouts(lease=LEASE),
                on_response_end=heard,
                resumable=resumable,
            )
            for each in (backend, Gated())
        )
        with anyio.fail_after(BOUND):
            async with anyio.create_task_group() as group:
                try:
                    run = await kit.service.create_run({"input": "Hi"}, streamed=True)
                except errors.StoreError:
                    continue
                group.start_soon(run.execute, Audience().tell)
                response_id = run.id
                await settled()  # half of it is told, or all is over
                if ending == "by itself":
                    backend.goes_on.set()
                try:
                    await ENDINGS[ending](kit, response_id)
                except errors.APIError:
                    backend.goes_on.set()
            met = failing.heal()
            clock.now += LEASE + 1
            await other.service.repository.sweep()
        records = {record.id: json.loads(record.response)["status"] for record in kept(store) if record.final}
        told = Counter(response["id"] for response in heard.responses)
        if ending == "delete" and not told:
            assert met  # what could not be made final and is then deleted has no ending that anybody sees
            assert records == {}
            continue
        assert told == {response_id: 1}, f"call {nth}"
        assert heard.statuses[0] == records.get(response_id, heard.statuses[0]), f"call {nth}"
        if not met:
            break
    else:
        pytest.fail("there is no end to the calls")


async def test_a_store_that_hangs_at_the_end_leaves_the_news_to_whoever_ends_it(
    monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    soon_given_up(monkeypatch, 0.05)
    hanging, clock, backend = anyio.Event(), Clock(), Gated()

    async def around(name: str, call: Call) -> Any:
        if name == "update" and not hanging.is_set():
            await anyio.sleep_forever()
        return await call()

    store = Watched(around, clock=clock)
    heard = Heard()
    kit = ResponsesKit(backend, store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=heard)
    with anyio.fail_after(BOUND):
        async with kit.stream({"input": "Hi"}) as events:
            async for event in events:
                if "delta" in event:
                    break
    assert heard.statuses == []
    hanging.set()
    clock.now += LEASE + 1
    await ResponsesKit(
        Gated(), store=store, clock=clock, timeouts=Timeouts(lease=LEASE), on_response_end=heard
    ).service.repository.sweep()
    assert heard.statuses == ["failed"]


# The hook.


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_hook_may_be_of_either_colour(plain: bool) -> None:
    told: list[tuple[str, str]] = []

    def hook(owner: str, response: dict[str, Any]) -> None:
        told.append((owner, response["status"]))

    async def async_hook(owner: str, response: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        hook(owner, response)

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook if plain else async_hook)
    await kit.create(ASK, owner="ann")
    assert told == [("ann", "completed")]


async def test_the_response_is_the_hooks_own_to_keep_and_to_change() -> None:
    kept_by_hook: list[dict[str, Any]] = []

    def hook(owner: str, response: dict[str, Any]) -> None:
        kept_by_hook.append(response)
        response["output"].clear()
        response["metadata"]["seen"] = "yes"

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    response = await kit.create(ASK)
    assert response["output"]
    assert response["metadata"] == {}
    assert await kit.retrieve(response["id"]) == response
    assert kept_by_hook[0]["output"] == []


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("error", [LookupError("no such bill"), SystemExit(3), ExceptionGroup("many", [OSError()])])
async def test_a_hook_that_fails_fails_nothing_else(
    error: BaseException, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(owner: str, response: dict[str, Any]) -> None:
        raise error

    async def async_hook(owner: str, response: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    kit = ResponsesKit(ScriptedBackend(["the secret answer"]), on_response_end=hook if plain else async_hook)
    for _ in range(2):
        response = await kit.create(ASK)
        assert response["status"] == "completed"
        assert response["id"] in caplog.text
    assert [entry.levelno for entry in caplog.records] == [logging.ERROR] * 2
    assert "secret" not in caplog.text


async def test_a_hook_that_is_cancelled_within_itself_fails_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def hook(owner: str, response: dict[str, Any]) -> None:
        raise cancelled()

    cancelled = anyio.get_cancelled_exc_class()
    if cancelled.__module__.startswith("trio"):
        pytest.skip("nobody can make trio's by himself")
    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        response = await kit.create(ASK)
    assert response["id"] in caplog.text


async def test_a_hook_that_takes_long_holds_the_answer_up_for_a_while_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "_PATIENCE_SECONDS", 0.02)
    go_on, done = anyio.Event(), anyio.Event()

    async def hook(owner: str, response: dict[str, Any]) -> None:
        await go_on.wait()
        done.set()

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        await kit.create(ASK)
        assert not done.is_set()
        go_on.set()
        await done.wait()


async def test_a_client_that_leaves_meanwhile_does_not_cut_the_hook_off() -> None:
    begun, go_on, done = anyio.Event(), anyio.Event(), anyio.Event()

    async def hook(owner: str, response: dict[str, Any]) -> None:
        begun.set()
        await go_on.wait()
        done.set()

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, ASK)
            await begun.wait()
            group.cancel_scope.cancel()
            go_on.set()
        await done.wait()


async def test_a_hook_may_ask_the_kit() -> None:
    """Such as for a title of the conversation."""
    titles: list[str] = []

    async def hook(owner: str, response: dict[str, Any]) -> None:
        if response["metadata"].get("for") != "title":
            body = {**ASK, "previous_response_id": response["id"], "metadata": {"for": "title"}}
            titles.append((await kit.create(body, owner=owner))["status"])

    kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=hook)
    with anyio.fail_after(BOUND):
        await kit.create(ASK, owner="ann")
    assert titles == ["completed"]
