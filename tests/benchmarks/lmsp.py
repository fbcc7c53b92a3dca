"""Compare LMSP to Open Responses: a delta, a whole answer, and a long task that is resumed."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

import anyio

from responses_kit import ResponsesKit
from responses_kit.http.lmsp import LMSP
from responses_kit.http.lmsp.rendering import EventRenderer
from responses_kit.http.messages import Request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.http.router import WireProtocol
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import encode_json, encode_sse
from responses_kit.protocol.state_machine import Event, StateMachine
from responses_kit.testing import ScriptedBackend

EVENTS = 100_000
ANSWERS = 2_000


def delta_microseconds(encode: Callable[[list[Event]], Any]) -> float:
    """Return the time of state machine and encoding for one text delta, in microseconds."""
    response = {"id": new_id("resp"), "output": []}
    machine = StateMachine(response, new_id=new_id)
    encode(machine.start())
    encode(machine.feed("Once"))
    return min(timeit.repeat(lambda: encode(machine.feed(" upon")), number=20_000, repeat=10)) / 20_000 * 1e6


async def answer_microseconds(dialect: WireProtocol) -> float:
    """Return the time of a complete answer without store or server, in microseconds."""
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    body = encode_json({"model": "scripted", "store": False, "input": [message]})

    async def read() -> bytes:
        return body

    started = time.perf_counter()
    for _ in range(ANSWERS):
        assert (await dialect.handle(Request("POST", "/responses", read=read))).status == 200
    return (time.perf_counter() - started) / ANSWERS * 1e6


async def resume_milliseconds() -> float:
    """Return the time to resume a long task at its last event, in milliseconds."""
    kit = ResponsesKit(ScriptedBackend(["on "] * EVENTS))
    made = await kit.create({"input": "hi", "background": True})
    await kit.wait(made["id"])
    task = made["id"].replace("resp", "task")

    async def send(data: bytes) -> None:
        pass

    started = time.perf_counter()
    reply = await LMSP(kit).handle(Request("GET", f"/tasks/{task}/events", query=f"after={EVENTS + 1}"))
    assert reply.stream is not None
    await reply.stream(send)
    return (time.perf_counter() - started) * 1e3


def _encode_events(events: list[Event]) -> bytes:
    return b"".join(map(encode_sse, events))


async def main() -> None:
    """Print all figures."""
    rendering = EventRenderer()
    for name, encode in (("Open Responses", _encode_events), ("LMSP", rendering.render)):
        print(f"machine and encoding, {name}: {delta_microseconds(encode):.2f} µs a text delta")
    kit = ResponsesKit(ScriptedBackend(lambda turn: ["Hello"], models=["scripted"]))
    for _ in range(3):
        for dialect in (OpenResponses(kit), LMSP(kit)):
            print(f"a whole answer, {dialect.name}: {await answer_microseconds(dialect):.0f} µs")
    print(f"a task of {EVENTS:,} events, resumed at its end: {await resume_milliseconds():.0f} ms")


if __name__ == "__main__":
    anyio.run(main)
