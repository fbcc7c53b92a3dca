"""Regression tests of faults that hostile clients, backends and stores could cause."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from starlette.exceptions import HTTPException

from responses_kit import Backend, Limits, ResponsesKit, Turn, errors, outputs
from responses_kit._concurrency.threads import IteratorThread, ThreadLimiter
from responses_kit.context import history as context_module
from responses_kit.engine import run as runs_module
from responses_kit.protocol.validation import parse_json, parse_request
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Log, Record
from responses_kit.testing import ScriptedBackend
from responses_kit_starlette import ResponsesApp
from tests.support.memory import shorten_cleanup, stored_records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0


class FunctionBackend(Backend):
    """A backend with a given `generate` function."""

    models = ("model",)

    def __init__(self, generate: Callable[[Turn], Any]) -> None:
        self.generate = generate  # type: ignore[method-assign]  # a minimal backend


async def ask(app: Any, body: bytes, *, path: str = "/responses", method: str = "POST") -> tuple[int, bytes]:
    """Return the status and the body of a reply over ASGI."""
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        sent.append(message)

    with anyio.fail_after(BOUND):
        await app(scope_of(path, method), receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def scope_of(path: str = "/responses", method: str = "POST") -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


def statuses(store: MemoryStore) -> list[str]:
    return [json.loads(record.response)["status"] for record in stored_records(store)]


# Clients.


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":[' + b"0," * 200_000 + b"0]}",
        b'{"input":[' + b"{}," * 200_000 + b"{}]}",
        b'{"input":"x","include":[' + b"0," * 200_000 + b"0]}",
        b'{"input":"x","tools":[' + b"0," * 200_000 + b"0]}",
        b'{"input":[{"role":"user","content":[' + b"0," * 200_000 + b"0]}]}",
        b'{"input":"x","metadata":{' + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}}",
    ],
    ids=["numbers", "objects", "include", "tools", "parts", "metadata"],
)
def test_invalid_list_fails_at_first_element(body: bytes) -> None:
    value = parse_json(body)
    tracemalloc.start()
    try:
        with pytest.raises(errors.InvalidRequest):
            parse_request(value)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000, "errors are collected for every element"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "user", "content": ""}] * 100_001},
        {"input": "x", "tools": [{"type": "function", "name": f"f{number}"} for number in range(20_000)]},
    ],
    ids=["items", "tools"],
)
def test_oversize_request_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest):
        parse_request(body)


async def test_references_to_one_record_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = ResponsesKit(ScriptedBackend(["x"]))
    first = await kit.create({"input": [{"role": "user", "content": str(number)} for number in range(50)]})
    page = await kit.input_items(first["id"], limit=100)
    read: list[str] = []
    original = context_module._decode_items

    def count_calls(record: Record) -> Any:
        read.append(record.id)
        return original(record)

    monkeypatch.setattr(context_module, "_decode_items", count_calls)
    await kit.create({"input": [{"type": "item_reference", "id": item["id"]} for item in page["data"]]})
    assert read == [first["id"]]


async def test_body_of_unauthenticated_request_is_not_read() -> None:
    app = ResponsesApp(ResponsesKit(ScriptedBackend(["x"]), owner=lambda request: None))
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await anyio.sleep_forever()  # the body never ends
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    with anyio.fail_after(BOUND):
        await app(scope_of(), receive, send)
    assert sent[0]["status"] == 401


async def test_owner_hook_may_raise_framework_exception() -> None:
    def hook(request: Any) -> str:
        raise HTTPException(401, "no")

    status, body = await ask(ResponsesApp(ResponsesKit(ScriptedBackend(["x"]), owner=hook)), b'{"input":"x"}')
    assert status == 401
    assert json.loads(body)["error"]["type"] == "invalid_request"


async def test_owner_hook_cannot_read_body() -> None:
    async def hook(request: Any) -> str:
        return str(len(await request.body()))

    status, _ = await ask(ResponsesApp(ResponsesKit(ScriptedBackend(["x"]), owner=hook)), b'{"input":"x"}')
    assert status in (200, 500)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_during_last_send_finishes_it(stream: bool) -> None:
    # A server that signals the disconnect within `send` must be able to finish that call.
    app = ResponsesApp(ResponsesKit(ScriptedBackend(["x"])))
    body = [{"type": "http.request", "body": json.dumps({"input": "x", "stream": stream}).encode()}]
    disconnected, closed = anyio.Event(), anyio.Event()

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await anyio.lowlevel.checkpoint()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            disconnected.set()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            closed.set()

    with anyio.fail_after(BOUND):
        await app(scope_of(), receive, send)
    assert closed.is_set()


# Backends.


async def test_abandoned_threads_count_against_limit() -> None:
    release = threading.Event()
    running: list[str] = []

    def generate(turn: Turn) -> Iterator[str]:
        running.append(turn.response_id)
        yield "x"
        release.wait(BOUND)

    kit = ResponsesKit(FunctionBackend(generate), limits=Limits(max_threads=2))
    try:
        for _ in range(5):
            async with kit.stream({"input": "x"}) as events:
                with anyio.move_on_after(0.3):  # responses without a thread yield nothing
                    async for event in events:
                        if event["type"] == "response.output_text.delta":
                            break
        assert len(running) == 2
    finally:
        release.set()
    with anyio.fail_after(BOUND):
        assert (await kit.create({"input": "x"}))["status"] == "completed"


async def test_thread_stopped_before_start_is_released() -> None:
    threads = ThreadLimiter(1)
    for runs in (False, True):
        worker = IteratorThread(lambda: ["x"])
        with anyio.fail_after(1.0):
            await worker.reserve(threads)
            worker.stop()
            if runs:
                await worker.run()
            async with threads.current():  # waits until the thread has finished
                pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("two", [SystemExit(1)]), SystemExit(1)],
    ids=lambda error: type(error).__name__,
)
async def test_any_backend_exception_fails_only_its_response(error: BaseException, stream: bool) -> None:
    async def generate(turn: Turn) -> AsyncIterator[str]:
        yield "x"
        raise error

    store = MemoryStore()
    app = ResponsesApp(ResponsesKit(FunctionBackend(generate), store=store))
    status, body = await ask(app, json.dumps({"input": "x", "stream": stream}).encode())
    assert status == (200 if stream else 500)
    assert b"model_error" in body
    assert body.endswith(b"data: [DONE]\n\n") is stream
    assert statuses(store) == ["failed"]


@pytest.mark.parametrize("sync", [False, True])
async def test_failed_turn_is_freed_without_garbage_collection(sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module.logger, "disabled", True)  # pytest holds logged tracebacks
    freed = threading.Event()
    turns: list[weakref.ref[Turn]] = []

    def fail(turn: Turn) -> Iterator[str]:
        turns.append(weakref.ref(turn, lambda _: freed.set()))
        yield "x"
        raise ValueError

    async def fail_async(turn: Turn) -> AsyncIterator[str]:
        for output in fail(turn):
            yield output

    kit = ResponsesKit(FunctionBackend(fail if sync else fail_async))
    gc.disable()
    try:
        with pytest.raises(errors.ModelError):
            await kit.create({"input": "x", "store": False})
        # A plain generator's thread releases the turn asynchronously.
        assert await anyio.to_thread.run_sync(freed.wait, 1.0), "the turn is not freed by reference counting"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "output", ["a" * 10_485_761, outputs.Item("a:b", fields={"v": json.loads("[" * 199 + "]" * 199)})]
)
async def test_completed_response_can_be_read_and_continued(output: outputs.Output, caplog: Any) -> None:
    app = ResponsesApp(ResponsesKit(ScriptedBackend([output], ["x"])))
    status, body = await ask(app, b'{"input":"x"}')
    if status == 200:
        name = json.loads(body)["id"]
        assert (await ask(app, b"", path=f"/responses/{name}", method="GET"))[0] == 200
        status, _ = await ask(app, json.dumps({"input": "x", "previous_response_id": name}).encode())
        assert status == 200
    assert "aaaa" not in caplog.text, "the log contains model output"


# Stores.


async def test_memory_store_counts_bytes() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend(["x"]), store=store)
    body = {"input": [{"role": "user", "content": ""}] * 2000}
    await kit.create(body)
    gc.collect()
    tracemalloc.start()
    try:
        before = store._bytes
        for _ in range(5):
            await kit.create(body)
        kit.backend.turns.clear()  # type: ignore[attr-defined]  # a scripted backend records its turns
        gc.collect()
        allocated, count_calls = tracemalloc.get_traced_memory()[0], store._bytes - before
    finally:
        tracemalloc.stop()
    assert count_calls > 0.6 * allocated, f"{allocated} bytes are taken, {count_calls} counted"


async def test_record_left_open_by_hanging_store_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shorten_cleanup(monkeypatch, 0.1)

    class HangingStore(MemoryStore):
        async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
            await anyio.sleep_forever()
            raise AssertionError

    kit = ResponsesKit(ScriptedBackend(["x"]), store=HangingStore())
    with caplog.at_level(logging.WARNING, logger="responses_kit"), anyio.move_on_after(0.1):
        await kit.create({"input": "x"})
    assert "could not be saved" in caplog.text


async def test_closed_kit_finishes_all_records() -> None:
    store, started = MemoryStore(), threading.Event()

    def generate(turn: Turn) -> Iterator[str]:
        yield "x"
        started.set()
        while not turn.cancelled:
            yield ""

    kit = ResponsesKit(FunctionBackend(generate), store=store)
    app = ResponsesApp(kit)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for stream in (False, True):
                group.start_soon(ask, app, json.dumps({"input": "x", "stream": stream}).encode())
            await anyio.to_thread.run_sync(started.wait, BOUND)
            await kit.aclose()
            assert "in_progress" not in statuses(store)
