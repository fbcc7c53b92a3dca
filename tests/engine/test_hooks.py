"""What an app needs around its own code: entered around backends and tools, and left however they end."""

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

from .test_run import BOUND, Audience, happened

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

pushed: ContextVar[str] = ContextVar("pushed", default="")
"""What a framework would keep in its context."""


class Noted(Scope):
    """Takes down when it is entered and left, where, and with what."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.threads: set[int] = set()
        self.in_threads = self.on_loops = 0
        self._lock = threading.Lock()

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()  # connecting takes a while
        self.on_loops += 1
        self.notes.append("on loop")
        before = pushed.set("loop")
        try:
            yield
        except BaseException as error:
            self.notes.append(type(error).__name__)
            raise
        finally:
            pushed.reset(before)
            self.on_loops -= 1
            self.notes.append("off loop")

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        before = pushed.set("thread")
        with self._lock:
            self.in_threads += 1
            self.threads.add(threading.get_ident())
            self.notes.append("in thread")
        try:
            yield
        finally:
            pushed.reset(before)
            with self._lock:
                self.in_threads -= 1
                self.notes.append("out of thread")

    @property
    def left(self) -> bool:
        """Whether nobody is within any more."""
        return not (self.in_threads or self.on_loops)

    async def all_left(self) -> None:
        with anyio.fail_after(BOUND):
            while not self.left:  # noqa: ASYNC110  # in other threads
                await anyio.sleep(0.001)


class Looking(Backend):
    """A backend that looks at where it is, each time that it is asked for something."""

    models = (Model("looking", context_window=1000, tools=True),)

    def __init__(self, surroundings: Noted) -> None:
        self.surroundings = surroundings
        self.seen: dict[str, str] = {}

    def look(self, at: str) -> None:
        self.seen[at] = pushed.get()
        assert self.surroundings.on_loops, f"{at} is outside"

    async def admit(self, turn: Turn) -> None:
        self.look("admit")

    async def count_tokens(self, turn: Turn) -> int:
        self.look("count_tokens")
        return 10

    async def compact(self, turn: Turn) -> str:
        self.look("compact")
        return "in short"


class LookingOnLoop(Looking):
    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.look("generate")
        await anyio.lowlevel.checkpoint()
        yield "Hi"
        self.look("the end of generate")


class LookingInThread(Looking):
    def generate(self, turn: Turn) -> Iterator[str]:
        self.look("generate")
        yield "Hi"
        assert threading.get_ident() in self.surroundings.threads
        self.look("the end of generate")


class LookingFromThreadToLoop(Looking):
    def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.look("generate")
        return self.later()

    async def later(self) -> AsyncIterator[str]:
        yield "Hi"
        self.look("the end of generate")


@pytest.mark.parametrize(
    ("backend", "where"),
    [
        (LookingOnLoop, ("loop", "loop")),
        (LookingInThread, ("thread", "thread")),
        (LookingFromThreadToLoop, ("thread", "loop")),
    ],
)
async def test_all_that_a_backend_is_asked_is_within(backend: type[Looking], where: tuple[str, str]) -> None:
    surroundings = Noted()
    asked = backend(surroundings)
    kit = ResponsesKit(asked, scope=surroundings)
    await kit.create({"input": "Hi", "truncation": "auto"})
    begin, end = where
    assert asked.seen == {
        "admit": "loop", "count_tokens": "loop", "generate": begin, "the end of generate": end
    }  # fmt: skip
    await surroundings.all_left()
    asked.seen.clear()
    await kit.compact({"model": "looking", "input": [{"role": "user", "content": "Tea. " * 100}]})
    assert asked.seen["compact"] == "loop"
    assert surroundings.left


async def test_a_model_that_sums_up_by_itself_is_asked_within_too() -> None:
    class Plain(LookingInThread):
        async def compact(self, turn: Turn) -> None:  # type: ignore[override]  # it has no way of its own
            return None

    surroundings = Noted()
    asked = Plain(surroundings)
    kit = ResponsesKit(asked, scope=surroundings)
    await kit.compact({"model": "looking", "input": [{"role": "user", "content": "Tea. " * 100}]})
    assert asked.seen["generate"] == "thread"
    await surroundings.all_left()


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_tools_are_called_within_and_those_in_threads_each_in_its_own(plain: bool) -> None:
    surroundings = Noted()
    seen: list[str] = []

    def look(word: str) -> str:
        seen.append(pushed.get())
        assert (surroundings.in_threads if plain else surroundings.on_loops) > 0
        return word

    async def look_later(word: str) -> str:
        await anyio.lowlevel.checkpoint()
        return look(word)

    class Curious(Backend):
        models = (Model("curious", tools=True),)

        async def generate(self, turn: Turn) -> AsyncIterator[Any]:
            if turn.round == 0:
                yield outputs.ToolCall("look", '{"word": "a"}')
                yield outputs.ToolCall("look", '{"word": "b"}')
            else:
                assert pushed.get() == "loop"
                yield "Found."

    tool = HostedTool.from_function("test:look", look if plain else look_later, name="look")
    kit = ResponsesKit(Curious(), tools=[tool], scope=surroundings)
    response = await kit.create({"input": "Hi", "tools": [{"type": "test:look"}]})
    assert response["status"] == "completed"
    assert [item.get("output") for item in response["output"][:2]] == ["a", "b"]
    assert seen == ["thread" if plain else "loop"] * 2
    assert surroundings.notes.count("in thread") == (2 if plain else 0)
    await surroundings.all_left()


async def test_two_turns_at_once_do_not_get_in_each_others_surroundings() -> None:
    surroundings, inside = Noted(), threading.Barrier(2)

    def generate(turn: Turn) -> Iterator[str]:
        inside.wait(BOUND)  # both are there
        yield pushed.get()

    class Both(Backend):
        models = ("both",)

        def generate(self, turn: Turn) -> Iterator[str]:
            return generate(turn)

    kit = ResponsesKit(Both(), scope=surroundings)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(kit.create, {"input": "Hi"})
    assert len(surroundings.threads) == 2
    await surroundings.all_left()


# Ways out.


class Stubborn(Backend):
    """Goes on until it is closed, on the loop or in a thread."""

    models = ("stubborn",)

    def __init__(self, *, plain: bool) -> None:
        self.begun = threading.Event()
        self.turns: list[Turn] = []
        if plain:
            self.generate = self._in_thread  # type: ignore[method-assign]

    def _in_thread(self, turn: Turn) -> Iterator[str]:
        self.turns.append(turn)
        while True:
            yield "on and on "
            self.begun.set()
            threading.Event().wait(0.001)

    async def generate(self, turn: Turn) -> AsyncIterator[str]:
        self.turns.append(turn)
        while True:
            yield "on and on "
            self.begun.set()
            await anyio.sleep(0.001)


async def _leave(kit: ResponsesKit, backend: Stubborn) -> None:
    async with kit.stream({"input": "Hi"}) as events:
        async for event in events:
            if "delta" in event:
                break


async def _task_ends(kit: ResponsesKit, backend: Stubborn) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(kit.create, {"input": "Hi"})
        await happened(backend.begun)
        group.cancel_scope.cancel()


async def _cancelled(kit: ResponsesKit, backend: Stubborn) -> None:
    await kit.service.submit({"input": "Hi", "background": True})
    await happened(backend.begun)
    await kit.cancel(backend.turns[0].response_id)


async def _shut_down(kit: ResponsesKit, backend: Stubborn) -> None:
    await kit.service.submit({"input": "Hi", "background": True})
    await happened(backend.begun)
    await kit.aclose()


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
@pytest.mark.parametrize("way", [_leave, _task_ends, _cancelled, _shut_down])
async def test_they_are_left_on_every_way_out(
    way: Callable[[ResponsesKit, Stubborn], Awaitable[None]], plain: bool
) -> None:
    surroundings, backend = Noted(), Stubborn(plain=plain)
    kit = ResponsesKit(backend, scope=surroundings)
    with anyio.fail_after(BOUND):
        await way(kit, backend)
    await surroundings.all_left()
    entered = [note for note in surroundings.notes if note.startswith(("on", "in"))]
    assert entered == ["on loop", "on loop", *(["in thread"] if plain else [])]  # once to admit, once to generate


async def test_a_backend_that_fails_tells_the_surroundings_why() -> None:
    surroundings = Noted()
    kit = ResponsesKit(ScriptedBackend(["Hi", LookupError("no")]), scope=surroundings)
    with pytest.raises(errors.ModelError):
        await kit.create({"input": "Hi"})
    assert surroundings.notes[-2:] == ["LookupError", "off loop"]


async def test_a_backend_that_waits_for_its_thread_is_outside_of_it_and_can_leave() -> None:
    """There is one place for a thread, and somebody has it."""
    surroundings, backend = Noted(), Stubborn(plain=True)
    kit = ResponsesKit(backend, scope=surroundings, limits=Limits(max_threads=1))
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as group:
            group.start_soon(kit.create, {"input": "Hi"})
            await happened(backend.begun)
            with anyio.move_on_after(0.02):
                await kit.create({"input": "Hi"})
            assert surroundings.in_threads == surroundings.on_loops == 1
            group.cancel_scope.cancel()
    await surroundings.all_left()


# Surroundings that fail.


class Failing(Scope):
    """Raises where the test says so."""

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def _fail(self, where: str) -> None:
        if where == self.where:
            raise self.error

    @asynccontextmanager
    async def async_scope(self) -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()
        self._fail("entering the loop's")
        try:
            yield
        finally:
            self._fail("leaving the loop's")

    @contextmanager
    def thread_scope(self) -> Iterator[None]:
        self._fail("entering the thread's")
        try:
            yield
        finally:
            self._fail("leaving the thread's")


WHERE = ["entering the loop's", "leaving the loop's", "entering the thread's", "leaving the thread's"]


class Plain(Backend):
    """Answers from a thread, and admits everybody without being asked."""

    models = (Model("plain", tools=True),)

    def generate(self, turn: Turn) -> Iterator[str]:
        yield "Hi"


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, LookupError("the password is hunter2")) for where in WHERE),
        *((where, SystemExit(3)) for where in WHERE[2:]),
    ],
)
async def test_surroundings_that_fail_fail_the_response_and_nothing_hangs(
    where: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    kit = ResponsesKit(Plain(), scope=Failing(where, error), limits=Limits(max_threads=1))
    with anyio.fail_after(BOUND):
        for _ in range(3):  # the thread's place is free again each time
            with pytest.raises(errors.ModelError) as caught:
                await kit.create({"input": "Hi"})
            assert "hunter2" not in str(caught.value)
        assert type(error).__name__ in caplog.text
        await kit.aclose()


async def test_surroundings_that_fail_later_than_the_beginning_are_told_by_events() -> None:
    surroundings = Failing("", LookupError())
    kit = ResponsesKit(Plain(), scope=surroundings)
    audience = Audience()
    run = await kit.service.create_run({"input": "Hi"}, streamed=True)
    surroundings.where = "entering the loop's"
    with anyio.fail_after(BOUND):
        await run.execute(audience.tell)
    assert audience.events[-1]["type"] == "response.failed"
    assert run.error is not None
    assert run.error.type == "model_error"


@pytest.mark.parametrize(
    ("where", "status"),
    [("entering the thread's", "failed"), ("leaving the thread's", "completed")],  # by then the tool has answered
)
async def test_surroundings_that_fail_around_a_tool_fail_its_call_at_most(where: str, status: str) -> None:
    class Curious(Backend):
        models = (Model("curious", tools=True),)

        async def generate(self, turn: Turn) -> AsyncIterator[Any]:
            yield outputs.ToolCall("look", "{}") if turn.round == 0 else "So be it."

    tool = HostedTool.from_function("test:look", lambda: "seen", name="look")
    kit = ResponsesKit(Curious(), tools=[tool], scope=Failing(where, LookupError("hunter2")))
    with anyio.fail_after(BOUND):
        response = await kit.create({"input": "Hi", "tools": [{"type": "test:look"}]})
    assert [item["status"] for item in response["output"]] == [status, "completed"]
    assert "hunter2" not in str(response)


async def test_surroundings_that_fail_when_they_are_left_by_a_client_end_the_response_and_tell_nobody() -> None:
    kit = ResponsesKit(Stubborn(plain=False), scope=Failing("leaving the loop's", LookupError("no")))
    with anyio.fail_after(BOUND):
        surroundings = kit.settings.scope
        assert isinstance(surroundings, Failing)
        where, surroundings.where = surroundings.where, ""
        run = await kit.service.create_run({"input": "Hi"}, streamed=True)
        surroundings.where = where
        audience = Audience(leaves_at=4)
        await run.execute(audience.tell)
        response = await kit.retrieve(run.id)
    assert response["status"] in ("cancelled", "failed")
    assert audience.calls == 5
    assert "delta" in audience.events[-1]


async def test_surroundings_that_never_let_anybody_in_hold_up_their_own_response_alone() -> None:
    class Closed(Scope):
        @asynccontextmanager
        async def async_scope(self) -> AsyncIterator[None]:
            await anyio.sleep_forever()
            yield

    kit = ResponsesKit(ScriptedBackend(["Hi"]), scope=Closed())
    with anyio.fail_after(BOUND):
        with anyio.move_on_after(0.02) as waiting:
            await kit.create({"input": "Hi"})
        assert waiting.cancelled_caught
        await kit.aclose()


async def test_a_compaction_whose_surroundings_fail_is_answered_with_an_error_of_the_api() -> None:
    kit = ResponsesKit(Plain(), scope=Failing("entering the loop's", LookupError("hunter2")))

    async def read() -> bytes:
        return b'{"model": "plain", "input": [{"role": "user", "content": "Tea."}]}'

    with anyio.fail_after(BOUND):
        reply = await OpenResponses(kit).handle(Request("POST", "/responses/compact", read=read))
    assert reply.status == 500
    assert b"hunter2" not in reply.body


# Where a host's own function is called.


async def test_by_default_there_is_nothing_around_and_a_hook_is_called_on_the_loop() -> None:
    surroundings = Scope()
    async with surroundings.async_scope():
        with surroundings.thread_scope():
            pass
    assert await call_on_event_loop(lambda request: (request, threading.get_ident()), 7) == (7, threading.get_ident())


async def test_a_hook_is_called_by_what_the_host_gives_for_it() -> None:
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
