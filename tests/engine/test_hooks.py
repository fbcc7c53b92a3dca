"""Scopes around backends and tools: entered for each call, and left however it ends."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from responses_kit import Backend, HostedTool, Limits, Model, ResponsesKit, Turn, errors, outputs
from responses_kit.engine.hooks import Scope, call_on_event_loop
from responses_kit.http.messages import Request
from responses_kit.http.open_responses import OpenResponses
from responses_kit.testing import ScriptedBackend

from .test_run import BOUND, EventClient, wait_for_event

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

pushed: ContextVar[str] = ContextVar("pushed", default="")
"""Stands in for the context of a framework."""


class RecordingScope(Scope):
    """A scope that records when, where and by which exception it is entered and left."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.threads: set[int] = set()
        self.in_threads = self.on_loops = 0
        self._lock = threading.Lock()

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()  # an asynchronous setup, such as a connection
        self.on_loops += 1
        self.entries.append("on loop")
        before = pushed.set("loop")
        try:
            yield
        except BaseException as error:
            self.entries.append(type(error).__name__)
            raise
        finally:
            pushed.reset(before)
            self.on_loops -= 1
            self.entries.append("off loop")

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        before = pushed.set("thread")
        with self._lock:
            self.in_threads += 1
            self.threads.add(threading.get_ident())
            self.entries.append("in thread")
        try:
            yield
        finally:
            pushed.reset(before)
            with self._lock:
                self.in_threads -= 1
                self.entries.append("out of thread")

    @property
    def is_left(self) -> bool:
        """Whether all contexts have been left."""
        return not (self.in_threads or self.on_loops)

    async def wait_left(self) -> None:
        with anyio.fail_after(BOUND):
            while not self.is_left:  # noqa: ASYNC110  # in other threads
                await anyio.sleep(0.001)


class RecordingBackend(Backend):
    """A backend that records the context of each call."""

    models = (Model("looking", context_window=1000, tools=True),)

    def __init__(self, scope: RecordingScope) -> None:
        self.scope = scope
        self.contexts: dict[str, str] = {}

    def record(self, at: str) -> None:
        self.contexts[at] = pushed.get()
        assert self.scope.on_loops, f"{at} is called outside the scope"

    async def admit(self, turn: Turn) -> None:
        self.record("admit")

    async def count_tokens(self, turn: Turn) -> int:
        self.record("count_tokens")
        return 10

    async def compact(self, turn: Turn) -> str:
        self.record("compact")
        return "in short"


class AsyncBackend(RecordingBackend):
    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.record("generate")
        await anyio.lowlevel.checkpoint()
        yield "Hi"
        self.record("end of generate")


class SyncBackend(RecordingBackend):
    def generate(self, turn: Turn) -> Iterator[str]:
        self.record("generate")
        yield "Hi"
        assert threading.get_ident() in self.scope.threads
        self.record("end of generate")


class SyncToAsyncBackend(RecordingBackend):
    def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.record("generate")
        return self.later()

    async def later(self) -> AsyncIterator[str]:
        yield "Hi"
        self.record("end of generate")


@pytest.mark.parametrize(
    ("backend", "step"),
    [
        (AsyncBackend, ("loop", "loop")),
        (SyncBackend, ("thread", "thread")),
        (SyncToAsyncBackend, ("thread", "loop")),
    ],
)
async def test_backend_is_called_within_scopes(backend: type[RecordingBackend], step: tuple[str, str]) -> None:
    scope = RecordingScope()
    recorder = backend(scope)
    kit = ResponsesKit(recorder, scope=scope)
    await kit.create({"input": "Hi", "truncation": "auto"})
    start_context, end = step
    assert recorder.contexts == {
        "admit": "loop", "count_tokens": "loop", "generate": start_context, "end of generate": end
    }  # fmt: skip
    await scope.wait_left()
    recorder.contexts.clear()
    await kit.compact({"model": "looking", "input": [{"role": "user", "content": "Tea. " * 100}]})
    assert recorder.contexts["compact"] == "loop"
    assert scope.is_left


async def test_compaction_by_model_runs_within_scopes() -> None:
    class HiBackend(SyncBackend):
        async def compact(self, turn: Turn) -> None:  # type: ignore[override]  # no compaction of its own
            return None

    scope = RecordingScope()
    recorder = HiBackend(scope)
    kit = ResponsesKit(recorder, scope=scope)
    await kit.compact({"model": "looking", "input": [{"role": "user", "content": "Tea. " * 100}]})
    assert recorder.contexts["generate"] == "thread"
    await scope.wait_left()


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_tools_are_called_within_scopes(is_sync: bool) -> None:
    scope = RecordingScope()
    contexts: list[str] = []

    def record(word: str) -> str:
        contexts.append(pushed.get())
        assert (scope.in_threads if is_sync else scope.on_loops) > 0
        return word

    async def record_async(word: str) -> str:
        await anyio.lowlevel.checkpoint()
        return record(word)

    class CallingBackend(Backend):
        models = (Model("curious", tools=True),)

        async def generate(self, turn: Turn) -> AsyncIterator[Any]:
            if turn.round == 0:
                yield outputs.ToolCall("look", '{"word": "a"}')
                yield outputs.ToolCall("look", '{"word": "b"}')
            else:
                assert pushed.get() == "loop"
                yield "Found."

    tool = HostedTool.from_function("test:look", record if is_sync else record_async, name="look")
    kit = ResponsesKit(CallingBackend(), tools=[tool], scope=scope)
    response = await kit.create({"input": "Hi", "tools": [{"type": "test:look"}]})
    assert response["status"] == "completed"
    assert [item.get("output") for item in response["output"][:2]] == ["a", "b"]
    assert contexts == ["thread" if is_sync else "loop"] * 2
    assert scope.entries.count("in thread") == (2 if is_sync else 0)
    await scope.wait_left()


async def test_concurrent_sync_turns_have_separate_scopes() -> None:
    scope, inside = RecordingScope(), threading.Barrier(2)

    def generate(turn: Turn) -> Iterator[str]:
        inside.wait(BOUND)  # both turns run at the same time
        yield pushed.get()

    class BarrierBackend(Backend):
        models = ("both",)

        def generate(self, turn: Turn) -> Iterator[str]:
            return generate(turn)

    kit = ResponsesKit(BarrierBackend(), scope=scope)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(kit.create, {"input": "Hi"})
    assert len(scope.threads) == 2
    await scope.wait_left()


# Exits.


class EndlessBackend(Backend):
    """Generates without end, on the event loop or in a thread."""

    models = ("stubborn",)

    def __init__(self, *, is_sync: bool) -> None:
        self.started = threading.Event()
        self.turns: list[Turn] = []
        if is_sync:
            self.generate = self._in_thread  # type: ignore[method-assign]

    def _in_thread(self, turn: Turn) -> Iterator[str]:
        self.turns.append(turn)
        while True:
            yield "on and on "
            self.started.set()
            threading.Event().wait(0.001)

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.turns.append(turn)
        while True:
            yield "on and on "
            self.started.set()
            await anyio.sleep(0.001)


async def _disconnect(kit: ResponsesKit, backend: EndlessBackend) -> None:
    async with kit.stream({"input": "Hi"}) as events:
        async for event in events:
            if "delta" in event:
                break


async def _cancel_task(kit: ResponsesKit, backend: EndlessBackend) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(kit.create, {"input": "Hi"})
        await wait_for_event(backend.started)
        group.cancel_scope.cancel()


async def _cancel_response(kit: ResponsesKit, backend: EndlessBackend) -> None:
    await kit.service.submit({"input": "Hi", "background": True})
    await wait_for_event(backend.started)
    await kit.cancel(backend.turns[0].response_id)


async def _close_kit(kit: ResponsesKit, backend: EndlessBackend) -> None:
    await kit.service.submit({"input": "Hi", "background": True})
    await wait_for_event(backend.started)
    await kit.aclose()


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("end", [_disconnect, _cancel_task, _cancel_response, _close_kit])
async def test_scopes_are_left_on_every_exit(
    end: Callable[[ResponsesKit, EndlessBackend], Awaitable[None]], is_sync: bool
) -> None:
    scope, backend = RecordingScope(), EndlessBackend(is_sync=is_sync)
    kit = ResponsesKit(backend, scope=scope)
    with anyio.fail_after(BOUND):
        await end(kit, backend)
    await scope.wait_left()
    entered = [note for note in scope.entries if note.startswith(("on", "in"))]
    assert entered == ["on loop", "on loop", *(["in thread"] if is_sync else [])]  # for admit and for generate


async def test_scope_gets_exception_of_backend() -> None:
    scope = RecordingScope()
    kit = ResponsesKit(ScriptedBackend(["Hi", LookupError("no")]), scope=scope)
    with pytest.raises(errors.ModelError):
        await kit.create({"input": "Hi"})
    assert scope.entries[-2:] == ["LookupError", "off loop"]


async def test_waiting_for_thread_does_not_enter_thread_scope() -> None:
    """The only thread is in use."""
    scope, backend = RecordingScope(), EndlessBackend(is_sync=True)
    kit = ResponsesKit(backend, scope=scope, limits=Limits(max_threads=1))
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, {"input": "Hi"})
            await wait_for_event(backend.started)
            with anyio.move_on_after(0.02):
                await kit.create({"input": "Hi"})
            assert scope.in_threads == scope.on_loops == 1
            group.cancel_scope.cancel()
    await scope.wait_left()


# Failing scopes.


class FailingScope(Scope):
    """Raises an error at the named step."""

    def __init__(self, step: str, error: BaseException) -> None:
        self.step, self.error = step, error

    def _fail(self, step: str) -> None:
        if step == self.step:
            raise self.error

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()
        self._fail("async enter")
        try:
            yield
        finally:
            self._fail("async exit")

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        self._fail("thread enter")
        try:
            yield
        finally:
            self._fail("thread exit")


STEPS = ["async enter", "async exit", "thread enter", "thread exit"]


class HiBackend(Backend):
    """Answers in a thread; its `admit` is the default."""

    models = (Model("plain", tools=True),)

    def generate(self, turn: Turn) -> Iterator[str]:
        yield "Hi"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        *((step, LookupError("the password is hunter2")) for step in STEPS),
        *((step, SystemExit(3)) for step in STEPS[2:]),
    ],
)
async def test_failing_scope_fails_response_without_hanging(
    step: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    kit = ResponsesKit(HiBackend(), scope=FailingScope(step, error), limits=Limits(max_threads=1))
    with anyio.fail_after(BOUND):
        for _ in range(3):  # the thread must be free again each time
            with pytest.raises(errors.ModelError) as caught:
                await kit.create({"input": "Hi"})
            assert "hunter2" not in str(caught.value)
        assert type(error).__name__ in caplog.text
        await kit.aclose()


async def test_scope_failing_after_creation_fails_stream() -> None:
    scope = FailingScope("", LookupError())
    kit = ResponsesKit(HiBackend(), scope=scope)
    client = EventClient()
    run = await kit.service.create_run({"input": "Hi"}, streamed=True)
    scope.step = "async enter"
    with anyio.fail_after(BOUND):
        await run.execute(client.emit)
    assert client.events[-1]["type"] == "response.failed"
    assert run.error is not None
    assert run.error.type == "model_error"


@pytest.mark.parametrize(
    ("step", "status"),
    [("thread enter", "failed"), ("thread exit", "completed")],  # the tool has already answered
)
async def test_scope_failing_around_tool_fails_only_its_call(step: str, status: str) -> None:
    class CallingBackend(Backend):
        models = (Model("curious", tools=True),)

        async def generate(self, turn: Turn) -> AsyncIterator[Any]:
            yield outputs.ToolCall("look", "{}") if turn.round == 0 else "So be it."

    tool = HostedTool.from_function("test:look", lambda: "seen", name="look")
    kit = ResponsesKit(CallingBackend(), tools=[tool], scope=FailingScope(step, LookupError("hunter2")))
    with anyio.fail_after(BOUND):
        response = await kit.create({"input": "Hi", "tools": [{"type": "test:look"}]})
    assert [item["status"] for item in response["output"]] == [status, "completed"]
    assert "hunter2" not in str(response)


async def test_scope_failing_after_disconnection_ends_response_without_events() -> None:
    kit = ResponsesKit(EndlessBackend(is_sync=False), scope=FailingScope("async exit", LookupError("no")))
    with anyio.fail_after(BOUND):
        scope = kit.settings.scope
        assert isinstance(scope, FailingScope)
        step, scope.step = scope.step, ""
        run = await kit.service.create_run({"input": "Hi"}, streamed=True)
        scope.step = step
        client = EventClient(disconnects_at=4)
        await run.execute(client.emit)
        response = await kit.retrieve(run.id)
    assert response["status"] in ("cancelled", "failed")
    assert client.calls == 5
    assert "delta" in client.events[-1]


async def test_blocking_scope_blocks_only_its_own_response() -> None:
    class BlockingScope(Scope):
        @asynccontextmanager
        async def async_scope(self) -> AsyncIterator[None]:
            await anyio.sleep_forever()
            yield

    kit = ResponsesKit(ScriptedBackend(["Hi"]), scope=BlockingScope())
    with anyio.fail_after(BOUND):
        with anyio.move_on_after(0.02) as waiting:
            await kit.create({"input": "Hi"})
        assert waiting.cancelled_caught
        await kit.aclose()


async def test_scope_failing_around_compaction_is_server_error() -> None:
    kit = ResponsesKit(HiBackend(), scope=FailingScope("async enter", LookupError("hunter2")))

    async def read() -> bytes:
        return b'{"model": "plain", "input": [{"role": "user", "content": "Tea."}]}'

    with anyio.fail_after(BOUND):
        reply = await OpenResponses(kit).handle(Request("POST", "/responses/compact", read=read))
    assert reply.status == 500
    assert b"hunter2" not in reply.body


# Hooks and defaults.


async def test_default_scopes_are_empty_and_hook_runs_on_event_loop() -> None:
    scope = Scope()
    async with scope.async_scope():
        with scope.thread_scope():
            pass
    assert await call_on_event_loop(lambda request: (request, threading.get_ident()), 7) == (7, threading.get_ident())


async def test_owner_hook_is_called_through_host_caller() -> None:
    calls: list[Any] = []

    async def call(function: Callable[[Any], Any], request: Any) -> Any:
        calls.append(request)
        await anyio.lowlevel.checkpoint()
        return function(request)

    async def later(request: str) -> str:
        return request.title()

    for owner in (str.title, later):
        kit = ResponsesKit(ScriptedBackend(["Hi"]), owner=owner)
        assert await kit.service.resolve_owner("ann", call) == "Ann"
    assert calls == ["ann"] * 2
