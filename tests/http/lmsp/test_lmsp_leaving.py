"""A server that goes down while a task of another is followed: the stream ends, the task does not; nothing is lost."""

from __future__ import annotations

import anyio
import pytest

from responses_kit import Backend, ResponsesKit, Turn
from responses_kit.http.lmsp import LMSP
from responses_kit.http.messages import Request
from responses_kit.stores.memory import MemoryStore

from .conformance import check_stream, decode_events

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class Gated(Backend):
    """Goes on when the test says so."""

    models = ("gated",)

    def __init__(self) -> None:
        self.gate = anyio.Event()

    async def generate(self, turn: Turn):
        yield "half "
        await self.gate.wait()
        yield "whole"


async def followed(kit: ResponsesKit, task_id: str, after: int, begun: anyio.Event) -> str:
    """All that one server tells of a task."""
    told = bytearray()

    async def send(data: bytes) -> None:
        told.extend(data)
        if b"half" in told:
            begun.set()

    reply = await LMSP(kit).handle(Request("GET", f"/tasks/{task_id}/events", query=f"after={after}"))
    assert reply.stream is not None
    await reply.stream(send)
    return told.decode()


async def test_who_is_cut_off_by_a_server_that_goes_down_resumes_at_another_without_gap() -> None:
    backend, store = Gated(), MemoryStore()
    one, other = ResponsesKit(backend, store=store), ResponsesKit(backend, store=store)
    made = await one.create({"input": "go", "background": True})
    task_id, begun, told = made["id"].replace("resp", "task"), anyio.Event(), []

    async def follow() -> None:
        told.append(await followed(other, task_id, 0, begun))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await begun.wait()
            await other.lifecycle.drain(0)
        *before, error = decode_events(told[0])
        assert (error.name, error.id) == ("error", 0)
        assert error.data["error"]["status"] == 500
        backend.gate.set()
        after = decode_events(await followed(one, task_id, before[-1].id, anyio.Event()))
        (message,) = check_stream([*before, *after])
    assert message["content"][0]["text"] == "half whole"
    await one.aclose()
