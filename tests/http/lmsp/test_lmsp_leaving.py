"""Tests of a server that shuts down while it streams a task of another server."""

from __future__ import annotations

import anyio
import pytest

from responses_kit import Backend, ResponsesKit, Turn
from responses_kit.http.lmsp import LMSP
from responses_kit.http.messages import Request
from responses_kit.stores.memory import MemoryStore

from .conformance import check_stream, decode_events

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]


class GatedBackend(Backend):
    """A backend that waits for a gate between its outputs."""

    models = ("gated",)

    def __init__(self) -> None:
        self.gate = anyio.Event()

    async def generate(self, turn: Turn):
        yield "half "
        await self.gate.wait()
        yield "whole"


async def read_events(kit: ResponsesKit, task_id: str, after: int, started: anyio.Event) -> str:
    """Return a server's stream of a task."""
    received = bytearray()

    async def send(data: bytes) -> None:
        received.extend(data)
        if b"half" in received:
            started.set()

    reply = await LMSP(kit).handle(Request("GET", f"/tasks/{task_id}/events", query=f"after={after}"))
    assert reply.stream is not None
    await reply.stream(send)
    return received.decode()


async def test_client_resumes_on_other_server_after_shutdown_without_gap() -> None:
    backend, store = GatedBackend(), MemoryStore()
    one, other = ResponsesKit(backend, store=store), ResponsesKit(backend, store=store)
    created = await one.create({"input": "go", "background": True})
    task_id, started, received = created["id"].replace("resp", "task"), anyio.Event(), []

    async def follow() -> None:
        received.append(await read_events(other, task_id, 0, started))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await started.wait()
            await other.lifecycle.drain(0)
        *before, error = decode_events(received[0])
        assert (error.name, error.id) == ("error", 0)
        assert error.data["error"]["status"] == 500
        backend.gate.set()
        after = decode_events(await read_events(one, task_id, before[-1].id, anyio.Event()))
        (message,) = check_stream([*before, *after])
    assert message["content"][0]["text"] == "half whole"
    await one.aclose()
