"""The servers under load: the kit over a backend that executes steps, and a bare ASGI app with prepared bytes.

    uvicorn tests.benchmarks.apps:kit --loop uvloop --http httptools --no-access-log
    uvicorn tests.benchmarks.apps:bare --loop uvloop --http httptools --no-access-log

The steps are a JSON list in the last user text: `["text", s]`, `["texts", s, n]`, `["sleep", seconds]`, `["tick", n,
period]`, which is n deltas on an absolute clock, each with the time it was sent. Plain text is echoed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.applications import Starlette

from responses_kit import Backend, ResponsesKit, Turn
from responses_kit.protocol.ids import new_id
from responses_kit.protocol.sse import encode_json, encode_sse
from responses_kit.protocol.state_machine import StateMachine
from responses_kit.schema.response import Response
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.opening import open_store
from responses_kit.testing import ScriptedBackend
from responses_kit_starlette import ResponsesApp

MODEL = "puppet"


def moves_of(text: str) -> list[list[Any]]:
    return json.loads(text) if text.startswith("[") else [["text", text]]


class Puppet(Backend):
    models = (MODEL,)

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        for move, *arguments in moves_of(turn.text):
            if move == "text":
                yield arguments[0]
            elif move == "texts":
                text, count = arguments
                for _ in range(count):
                    yield text
            elif move == "sleep":
                await anyio.sleep(arguments[0])
            elif move == "tick":
                count, period = arguments
                start = anyio.current_time()
                for number in range(count):
                    await anyio.sleep(max(0.0, start + number * period - anyio.current_time()))
                    yield f"{time.monotonic():.6f} "


class SyncPuppet(Backend):
    models = (MODEL,)

    def generate(self, turn: Turn) -> Iterator[str]:
        for move, *arguments in moves_of(turn.text):
            if move == "texts":
                text, count = arguments
                for _ in range(count):
                    yield text
            else:
                yield arguments[0]


def app_of(backend: Backend) -> Starlette:
    app = Starlette()
    app.mount("/v1", ResponsesApp(ResponsesKit(backend)))
    return app


kit = app_of(Puppet())
kit_sync = app_of(SyncPuppet())


def stored() -> Starlette:
    """Return the kit with store address and `resumable` from the environment; the default is memory."""
    address = os.environ.get("BENCHMARK_STORE", "")
    store: Any = open_store(address) if address else MemoryStore(max_bytes=2**31)
    kit = ResponsesKit(Puppet(), store=store, resumable=os.environ.get("BENCHMARK_RESUMABLE") == "yes")

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if address:
            await store.setup()
        async with kit.lifespan():
            yield

    app = Starlette(lifespan=lifespan)
    app.mount("/v1", ResponsesApp(kit))
    return app


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Answer like the kit with bytes prepared before the first request, as a minimal server."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    request = json.loads(body)
    if not request.get("stream"):
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(WHOLE))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": WHOLE})
        return
    user_input = request["input"]
    text = user_input if isinstance(user_input, str) else user_input[-1]["content"][0]["text"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for data in FIRST:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    for move, *arguments in moves_of(text):
        if move == "tick":
            count, period = arguments
            start = time.monotonic()
            for number in range(count):
                await anyio.sleep(max(0.0, start + number * period - time.monotonic()))
                data = DELTA.replace(b'"delta":"hi"', b'"delta":"%.6f "' % time.monotonic())
                await send({"type": "http.response.body", "body": data, "more_body": True})
        else:
            for _ in range(arguments[1] if move == "texts" else 1):
                await send({"type": "http.response.body", "body": DELTA, "more_body": True})
    for data in LAST:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _ready_made() -> tuple[bytes, list[bytes], bytes, list[bytes]]:
    """Return the kit's bytes for the answer "hi": JSON and events, for both dialects."""

    async def run() -> dict[str, Any]:
        return await ResponsesKit(ScriptedBackend(["hi"], models=[MODEL])).create({"input": "hi"})

    whole = anyio.run(run)
    Response.model_validate(whole)
    machine = StateMachine({**whole, "output": []}, new_id=new_id)
    started = [*machine.start(), *machine.feed("")]
    delta = machine.feed("hi")[0]
    ended = [*machine.close(0), *machine.end()]
    return (
        encode_json(whole),
        [encode_sse(e) for e in started],
        encode_sse(delta),
        [*map(encode_sse, ended), b"data: [DONE]\n\n"],
    )


WHOLE, FIRST, DELTA, LAST = _ready_made()


def local() -> Starlette:
    """Return the kit over the default model without end tokens, so that all sides generate equally many."""
    from responses_kit.backends.local import LocalBackend

    backend = LocalBackend(context_length=4096)
    backend._tokenizer.stop_ids = frozenset()
    return app_of(backend)
