"""Tests of unusual backend errors, and of logs and tasks that are lost while they are streamed."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from responses_kit import ResponsesKit, errors
from responses_kit.http.lmsp import LMSP
from responses_kit.http.messages import Request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.protocol.sse import decode_events as decode_machine_events
from responses_kit.stores.memory import MemoryStore
from tests.support.conformance import check_stream as check_machine_stream

from .conformance import check_problem, check_response, check_stream, decode_events
from .test_lmsp_input import VALID, ask, call, listen, new_kit, refusal
from .test_lmsp_leaving import GatedBackend

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class Overloaded(errors.ServerError):
    """An error whose status is not registered."""

    status = 529
    default_code = "overloaded"


class Quota(errors.TooManyRequests):
    """An error with a constructor of its own."""

    default_code = "quota"

    def __init__(self, of: int) -> None:
        super().__init__(f"You have {of}.")


class InvalidError(errors.InvalidRequest):
    """An error whose members are not valid text."""

    def __init__(self) -> None:
        super().__init__(ValueError("\ud83d"), param=7, code=b"odd")  # type: ignore[arg-type]  # as a backend may


class Busy(errors.TooManyRequests):
    """An error with a code of its own."""

    default_code = "busy"


KINDS = [Overloaded("Later."), Quota(3), Busy("Later."), InvalidError()]


@pytest.mark.parametrize("error", KINDS, ids=lambda error: type(error).__name__)
async def test_custom_backend_error_is_problem_document(error: errors.APIError) -> None:
    reply = await ask(new_kit("Well, ", error), "plain", VALID)
    assert (refusal(reply)["code"], reply.status) == (error.code, error.status)
    kit = new_kit("Well, ", error)
    events = decode_events(await listen(await ask(kit, "streamed", VALID | {"store": True})))
    assert events[-1].name == "response.failed"
    received = events[-1].data["error"]
    assert (received["code"], received["status"]) == (
        error.code,
        error.status if error.code == type(error).default_code else 500,
    )
    stored = json.loads((await call(kit, "GET", f"/responses/{events[0].data['response_id']}")).body)
    check_response(stored)
    task = json.loads((await ask(kit, "task", VALID)).body)["id"]
    assert decode_events(await listen(await call(kit, "GET", f"/tasks/{task}/events")))[-1].name == "response.failed"
    check_problem(json.loads((await call(kit, "GET", f"/tasks/{task}")).body)["response"]["error"])
    await kit.aclose()


class LossyStore(MemoryStore):
    """A store that loses data after the first events were read."""

    loss = ""

    async def events(self, owner: str, response_id: str, after: int) -> Any:
        found = await super().events(owner, response_id, after)
        match self.loss if after >= 0 else "":
            case "the log":
                return None
            case "the task":
                await self.delete(owner, response_id)
                return None
            case "the store":
                raise ConnectionError("the password of the database is hunter2")
        return found


@pytest.mark.parametrize("loss", ["the log", "the task", "the store"])
async def test_interrupted_stream_ends_with_error_only(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("responses_kit.engine.follower._STORE_RETRY_DELAYS", (0.01,))
    store, backend = LossyStore(), GatedBackend()
    kit = ResponsesKit(backend, store=store)
    task = json.loads((await ask(kit, "task", VALID | {"model": "gated"})).body)["id"]
    received = bytearray()

    async def send(data: bytes) -> None:
        received.extend(data)
        if b"half" in data:
            store.loss = loss
            backend.gate.set()

    reply = await LMSP(kit).handle(Request("GET", f"/tasks/{task}/events"))
    assert reply.stream is not None
    with anyio.fail_after(10):
        await reply.stream(send)
    *before, last = decode_events(received.decode())
    assert [event.name for event in before][-1] == "response.output_text.delta"
    assert (last.name, last.id) == ("error", 0)
    assert "hunter2" not in received.decode()
    store.loss = ""
    await kit.aclose()


async def test_failed_stream_is_resumed_in_other_dialect() -> None:
    kit = new_kit("half", RuntimeError("no"), resumable=True)
    events = decode_events(await listen(await ask(kit, "streamed", VALID | {"store": True})))
    path = f"/responses/{events[0].data['response_id']}"
    reply = await OpenResponses(kit).handle(Request("GET", path, query="stream=true"))
    received = (await listen(reply)).removesuffix("data: [DONE]\n\n")
    assert check_machine_stream(decode_machine_events(received.encode()))["status"] == "failed"


class DeletingStore(MemoryStore):
    """A store that deletes each record that is read."""

    async def get(self, owner: str, response_id: str) -> Any:
        found = await super().get(owner, response_id)
        await self.delete(owner, response_id)
        return found


@pytest.mark.parametrize(("method", "step"), [("GET", "events"), ("POST", "cancel")])
async def test_deleted_task_returns_404(method: str, step: str) -> None:
    store = DeletingStore()
    kit = new_kit(store=store)
    task = json.loads((await ask(kit, "task", VALID)).body)["id"]
    problem = refusal(await call(kit, method, f"/tasks/{task}/{step}"))
    assert (problem["status"], problem["code"]) == (404, "task_not_found")
    await kit.aclose()


async def test_keyed_stream_with_expired_log_is_synthesized() -> None:
    kit = new_kit("Hi", store=MemoryStore(log_ttl=0))
    events = decode_events(await listen(await ask(kit, "streamed", VALID, {"idempotency-key": "k"})))
    (message,) = check_stream(events)
    assert message["content"][0]["text"] == "Hi"
    assert events[-1].name == "response.completed"
    await kit.aclose()


async def test_orphaned_oversize_task_is_failed() -> None:
    class SmallStore(MemoryStore):
        """A store that cannot save a final record with its log."""

        async def update(self, owner: str, record: Any, log: Any = None) -> bool:
            if record.final and log is not None:
                raise errors.StoreError("The response is larger than this store takes.")
            return await super().update(owner, record, log)

    now = [1000.0]
    store, backend = SmallStore(), GatedBackend()
    one = ResponsesKit(backend, store=store, clock=lambda: now[0])
    task = json.loads((await ask(one, "task", VALID | {"model": "gated"})).body)["id"]
    other = ResponsesKit(GatedBackend(), store=store, clock=lambda: now[0] + 3600)
    events = decode_events(await listen(await call(other, "GET", f"/tasks/{task}/events")))
    assert (events[-1].name, events[-1].data["error"]["code"]) == ("error", "worker_lost")
    stored = json.loads((await call(other, "GET", f"/tasks/{task}")).body)
    assert (stored["status"], stored["response"]["error"]["code"]) == ("failed", "worker_lost")
    reply = await OpenResponses(other).handle(
        Request("GET", f"/responses/{stored['response']['id']}", query="stream=true")
    )
    received = decode_machine_events((await listen(reply)).removesuffix("data: [DONE]\n\n").encode())
    assert [event["type"] for event in received[-2:]] == ["error", "response.failed"]
    await one.aclose()
    await other.aclose()
