"""Tests of the event loop of synchronous hosts: one per process, on which kits run until the process exits."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from responses_kit import ResponsesKit, errors
from responses_kit._concurrency import loop_thread
from responses_kit.stores.sql import SqlStore
from responses_kit.testing import ScriptedBackend

pytestmark = pytest.mark.timeout(60)

BOUND = 10.0

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")

ROOT = Path(__file__).resolve().parents[2]


class FakeKit:
    """A fake kit that counts its starts and stops, and fails or hangs as the test sets it."""

    def __init__(self) -> None:
        self.starts = self.stops = 0
        self.graces: list[float] = []
        self.threads: set[str] = set()
        self.values: list[str] = []
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.is_hanging = False
        self.starting, self.cancelled = threading.Event(), threading.Event()

    @asynccontextmanager
    async def lifespan(self, *, grace: float) -> AsyncIterator[None]:
        self.starts += 1
        self.graces.append(grace)
        self.threads.add(threading.current_thread().name)
        self.values.append(variable.get())
        self.starting.set()
        try:
            await asyncio.sleep(3600 if self.is_hanging else 0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.start_error is not None:
            raise self.start_error
        yield
        await asyncio.sleep(0)
        self.stops += 1
        if self.stop_error is not None:
            raise self.stop_error


@pytest.fixture
def fake_kit() -> Iterator[FakeKit]:
    fake_kit = FakeKit()
    yield fake_kit
    fake_kit.stop_error = None
    loop_thread.stop_kit(fake_kit)


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    """Run a function in a number of threads at once; return its results or exceptions."""
    together = threading.Barrier(count)

    def run() -> Any:
        together.wait(BOUND)
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return [found.result(BOUND) for found in [pool.submit(run) for _ in range(count)]]


# The loop.


def test_all_threads_share_one_loop_in_its_own_thread() -> None:
    loops = in_threads(16, loop_thread.event_loop)
    assert set(loops) == {loop_thread.event_loop()}
    assert loops[0].is_running()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "responses-kit")
    assert thread.daemon  # the exit handler joins it


def test_call_returns_the_result_or_raises_the_exception() -> None:
    async def divide(number: int, by: int) -> float:
        await asyncio.sleep(0)
        return number / by

    assert loop_thread.call(divide, 6, 4) == 1.5
    with pytest.raises(ZeroDivisionError):
        loop_thread.call(divide, 6, 0)
    assert in_threads(16, lambda: loop_thread.call(divide, 6, 3)) == [2.0] * 16


def test_calls_from_the_loop_itself_are_refused(fake_kit: FakeKit) -> None:
    async def run_on_loop(work: Callable[[], Any]) -> None:
        work()

    loop_thread.start_kit(fake_kit)
    for work in (
        lambda: loop_thread.call(asyncio.sleep, 0),
        lambda: loop_thread.start_kit(fake_kit),
        lambda: loop_thread.stop_kit(fake_kit),
    ):
        with pytest.raises(RuntimeError, match="wait for itself"):
            loop_thread.call(run_on_loop, work)
    assert loop_thread.call(asyncio.sleep, 0, "still here") == "still here"


def test_call_runs_in_an_empty_context(fake_kit: FakeKit) -> None:
    """The caller's context may refer to its blocked thread, and keep its request alive."""

    async def read_variable() -> str:
        return variable.get()

    variable.set("the caller's")
    assert loop_thread.call(read_variable) == "none"
    loop_thread.start_kit(fake_kit)
    assert fake_kit.values == ["none"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exit_exceptions_do_not_stop_the_loop(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Only the main thread may exit the process."""

    async def leave() -> None:
        raise error

    loop = loop_thread.event_loop()
    waiting = loop_thread.submit(asyncio.sleep(3600))
    for _ in range(2):
        with pytest.raises(type(error)):
            loop_thread.call(leave)
        assert loop_thread.call(asyncio.sleep, 0, "still here") == "still here"
    assert loop_thread.event_loop() is loop
    assert not waiting.done()
    waiting.cancel()
    assert len(caplog.records) == 2


def test_exception_of_signal_handler_cancels_the_call() -> None:
    """Task queues interrupt workers that have taken too long."""

    class WorkerTimeout(BaseException):
        pass

    cancelled = threading.Event()

    async def wait() -> None:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise WorkerTimeout

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(WorkerTimeout):
            loop_thread.call(wait)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cancelled.wait(BOUND)


# Kits.


def test_kit_is_started_once_by_concurrent_callers(fake_kit: FakeKit) -> None:
    assert in_threads(32, lambda: loop_thread.start_kit(fake_kit, grace=3.0)) == [None] * 32
    loop_thread.start_kit(fake_kit, grace=4.0)
    assert (fake_kit.starts, fake_kit.graces, fake_kit.threads) == (1, [3.0], {"responses-kit"})


def test_stopped_kit_can_be_started_again(fake_kit: FakeKit) -> None:
    loop_thread.stop_kit(fake_kit)  # not started yet
    for times in (1, 2):
        loop_thread.start_kit(fake_kit)
        loop_thread.stop_kit(fake_kit)
        loop_thread.stop_kit(fake_kit)
        assert (fake_kit.starts, fake_kit.stops) == (times, times)


def test_exception_while_stopping_is_raised_once(fake_kit: FakeKit) -> None:
    fake_kit.stop_error = LookupError("the model cannot be unloaded")
    loop_thread.start_kit(fake_kit)
    with pytest.raises(LookupError):
        loop_thread.stop_kit(fake_kit)
    loop_thread.stop_kit(fake_kit)
    loop_thread.start_kit(fake_kit)
    assert fake_kit.starts == 2


def test_failed_start_is_raised_to_each_caller_until_it_succeeds(fake_kit: FakeKit) -> None:
    fake_kit.start_error = LookupError("not set up")
    for _ in range(2):
        with pytest.raises(LookupError, match="not set up"):
            loop_thread.start_kit(fake_kit)
    found = in_threads(8, lambda: loop_thread.start_kit(fake_kit))
    assert {type(error) for error in found} == {LookupError}
    fake_kit.start_error = None
    loop_thread.start_kit(fake_kit)
    starts = fake_kit.starts
    loop_thread.start_kit(fake_kit)
    assert fake_kit.starts == starts


def test_start_fails_until_the_store_is_set_up(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/responses.db")
    kit = ResponsesKit(ScriptedBackend(["Hi"]), store=store, secrets=["a secret that is long enough to be one"])
    for _ in range(3):
        with pytest.raises(errors.ConfigurationError, match="setup"):
            loop_thread.start_kit(kit)
    loop_thread.call(store.setup)
    loop_thread.start_kit(kit)
    try:
        assert loop_thread.call(kit.create, {"input": "Hi"})["status"] == "completed"
    finally:
        loop_thread.stop_kit(kit)
        loop_thread.call(store.aclose)


def test_hanging_start_blocks_no_other_kit_and_can_be_stopped(fake_kit: FakeKit) -> None:
    hanging = FakeKit()
    hanging.is_hanging = True
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(loop_thread.start_kit, hanging) for _ in range(2)]
        assert hanging.starting.wait(BOUND)
        loop_thread.start_kit(fake_kit)
        loop_thread.stop_kit(fake_kit)
        loop_thread.stop_kit(hanging)
        assert hanging.cancelled.wait(BOUND)
        for one in waiting:
            with pytest.raises(CancelledError):
                one.result(BOUND)
    assert hanging.starts == 1


def test_interrupted_start_is_not_repeated() -> None:
    class WorkerTimeout(BaseException):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise WorkerTimeout

    hanging = FakeKit()
    hanging.is_hanging = True
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(WorkerTimeout):
            loop_thread.start_kit(hanging)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(loop_thread.start_kit, hanging)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            loop_thread.stop_kit(hanging)
            assert isinstance(waiting.exception(BOUND), CancelledError)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert hanging.starts == 1


def test_kit_starts_and_stops_on_the_loop_of_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    kit = ResponsesKit(ScriptedBackend(["Hi"]))
    loop_thread.start_kit(kit, grace=0.0)
    assert loop_thread.call(kit.create, {"input": "Hi"})["status"] == "completed"
    loop_thread.stop_kit(kit)
    assert kit.lifecycle.is_closing
    with pytest.raises(errors.ServerError, match="shutting down"):
        loop_thread.call(kit.create, {"input": "Hi"})
    assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []


# Processes.

PRELUDE = """
import asyncio, io, json, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from responses_kit import Backend, ResponsesKit
from responses_kit._concurrency import loop_thread
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend
from responses_kit.http.open_responses import OpenResponses
from responses_kit.adapters.wsgi import handle_request

def report(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def ask(kit, **body):
    data = json.dumps({"input": "Hi", **body}).encode()
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(data)), "wsgi.input": io.BytesIO(data)}
    return handle_request(OpenResponses(kit), environ, path="/responses", host_request=None)

class EndlessBackend(Backend):
    models = ["talking"]
    started = threading.Event()

    async def generate(self, turn):
        while True:
            yield "on and on "
            self.started.set()
            await asyncio.sleep(0.01)

class PlainBackend(EndlessBackend):
    def generate(self, turn):
        while True:
            yield "on and on "
            self.started.set()
            time.sleep(0.01)

def report_end(owner, response):
    report("ended", response["status"], (response["error"] or {}).get("message"))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, and return its result and output."""
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", PRELUDE + code, *arguments],
        capture_output=True,
        text=True,
        timeout=40,
        cwd=ROOT,
        check=False,
    )


STREAM_PROGRAM = """
class ExecutorStore(MemoryStore):
    # A store may have to connect again at the exit, and needs an executor for it.
    async def create(self, owner, record):
        await asyncio.get_running_loop().run_in_executor(None, int)
        return await super().create(owner, record)

    async def update(self, owner, record, log=None):
        await asyncio.get_running_loop().run_in_executor(None, int)
        done = await super().update(owner, record, log)
        report("saved", done, record.final)
        return done

where, plain = sys.argv[1:]
backend = PlainBackend() if plain == "plain" else EndlessBackend()
kit = ResponsesKit(backend, store=ExecutorStore(), on_response_end=report_end)
loop_thread.start_kit(kit, grace=0.2)

def stream():
    answer = ask(kit, stream=True)
    streamed = b"".join(answer.stream)
    answer.stream.close()
    report("streamed", streamed.count(b"event: response.failed"), streamed.endswith(b"data: [DONE]\\n\\n"))

if where == "executor":
    pool = ThreadPoolExecutor(1)
    pool.submit(stream)
elif where == "background":
    ask(kit, background=True)
else:
    threading.Thread(target=stream, daemon=where == "daemon").start()
assert backend.started.wait(10)
"""


@pytest.mark.parametrize("plain", ["async", "plain"])
@pytest.mark.parametrize("where", ["thread", "daemon", "executor", "background"])
def test_exiting_process_finishes_its_streams(where: str, plain: str) -> None:
    done = run(STREAM_PROGRAM, where, plain)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert "saved True True" in printed
    assert printed.count("ended failed The server is shutting down. Try again.") == 1
    if where in ("thread", "executor"):  # daemon threads are not joined
        assert "streamed 1 True" in printed


@pytest.mark.parametrize("closed", ["not closed", "closed by the server"])
def test_main_thread_that_exits_within_a_stream_cancels_it(closed: str) -> None:
    """gunicorn's sync workers raise SystemExit in a signal handler."""
    done = run(
        """
class SilentBackend(EndlessBackend):
    async def generate(self, turn):
        yield "Hi"
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
        await asyncio.sleep(3600)

kit = ResponsesKit(SilentBackend(), on_response_end=report_end)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pieces = ask(kit, stream=True).stream
try:
    for piece in pieces:
        pass
finally:
    if sys.argv[1] == "closed by the server":
        pieces.close()
        report("closed")
""",
        closed,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "ended cancelled None\n" + "closed\n" * (closed == "closed by the server")


def test_last_events_are_read_after_the_loop_has_stopped() -> None:
    done = run(
        """
kit = ResponsesKit(EndlessBackend())
loop_thread.start_kit(kit, grace=0.05)

def stream():
    pieces = ask(kit, stream=True).stream
    streamed = next(pieces)
    reading.set()
    while not loop_thread.event_loop().is_closed():
        time.sleep(0.01)
    streamed += b"".join(pieces)
    pieces.close()
    report("streamed", b"shutting down" in streamed, streamed.endswith(b"data: [DONE]\\n\\n"))

reading = threading.Event()
threading.Thread(target=stream).start()
assert reading.wait(10)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("streamed")


SIGTERM_PROGRAM = """
def handle(number, frame):
    report("handled by the server")

signal.signal(signal.SIGTERM, {"a handler": handle, "none": signal.SIG_DFL, "ignored": signal.SIG_IGN}[sys.argv[1]])
kit = ResponsesKit(EndlessBackend(), on_response_end=report_end)
loop_thread.start_kit(kit, grace=0.05)
loop_thread.handle_sigterm()
handler = signal.getsignal(signal.SIGTERM)
threading.Thread(target=loop_thread.handle_sigterm).start()
answer = ask(kit, stream=True)
os.kill(os.getpid(), signal.SIGTERM)
streamed = b"".join(answer.stream)
answer.stream.close()
report("streamed", streamed.count(b"shutting down") > 0, streamed.endswith(b"data: [DONE]\\n\\n"))
os.kill(os.getpid(), signal.SIGTERM)
report("once more", signal.getsignal(signal.SIGTERM) is handler, ask(kit).status)
"""


@pytest.mark.parametrize("before", ["a handler", "ignored"])
def test_sigterm_stops_the_kits_and_calls_the_servers_handler(before: str) -> None:
    done = run(SIGTERM_PROGRAM, before)
    handled = ["handled by the server"] if before == "a handler" else []
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        *handled,
        "ended failed The server is shutting down. Try again.",
        "streamed True True",
        *handled,
        "once more True 500",
    ]


def test_sigterm_without_previous_handler_terminates_the_process() -> None:
    done = run(SIGTERM_PROGRAM, "none")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


def test_pending_call_is_cancelled_at_exit() -> None:
    done = run(
        """
async def wait():
    report("started")
    started.set()
    try:
        await asyncio.sleep(3600)
    finally:
        report("cancelled")

started = threading.Event()
threading.Thread(target=loop_thread.call, args=[wait], daemon=True).start()
assert started.wait(10)
"""
    )
    assert (done.returncode, done.stdout) == (0, "started\ncancelled\n")


def test_all_kits_are_stopped_at_exit_despite_failures() -> None:
    done = run(
        """
class Broken(ScriptedBackend):
    def close(self):
        report("broken closed")
        raise LookupError("cannot be unloaded")

class Closing(ScriptedBackend):
    def close(self):
        report("closed")

import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout)
kits = [ResponsesKit(Broken(["Hi"])), ResponsesKit(Closing(["Hi"]))]
kits.append(ResponsesKit(EndlessBackend(), on_response_end=report_end))
for kit in kits:
    loop_thread.start_kit(kit, grace=0.1)
for kit in kits[:2]:
    assert ask(kit).status == 200
assert ask(kits[2], background=True).status == 200
assert EndlessBackend.started.wait(10)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"closed", "broken closed", "closing a kit failed"} <= set(done.stdout.splitlines())
    assert "ended failed" in done.stdout


def test_hanging_start_does_not_delay_the_exit() -> None:
    done = run(
        """
class HangingStore(MemoryStore):
    async def get(self, owner, response_id):
        started.set()
        await asyncio.sleep(3600)

started = threading.Event()
kit = ResponsesKit(ScriptedBackend(["Hi"]), store=HangingStore())
for _ in range(2):
    threading.Thread(target=loop_thread.start_kit, args=[kit], daemon=True).start()
assert started.wait(10)
"""
    )
    assert done.returncode == 0


def test_unused_loop_is_not_created() -> None:
    done = run("import responses_kit.runners.celery\nassert threading.active_count() == 1\nreport('done')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_requests_after_the_exit_are_refused() -> None:
    done = run(
        """
def late():
    main = threading.main_thread()
    loop = loop_thread.event_loop()
    while loop.is_running():
        time.sleep(0.01)
    try:
        ask(kit)
    except RuntimeError as error:
        report("refused", error)

kit = ResponsesKit(ScriptedBackend(["Hi"]))
loop_thread.event_loop()
threading.Thread(target=late).start()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("refused")


FORK_PRELUDE = """
import gc, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # about forking a process with threads

def child(work):
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(20)
    work()
    gc.collect()
    sys.exit(5)

def wait(*pids):
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5

def report_answer(kit, name):
    answer = ask(kit)
    report(name, answer.status, json.loads(answer.body)["status"])
"""


def test_forked_process_has_its_own_loop() -> None:
    done = run(
        FORK_PRELUDE
        + """
kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=lambda owner, response: None)
loop = loop_thread.event_loop()
report_answer(kit, "parent")

def work():
    assert loop_thread.event_loop() is not loop
    report_answer(kit, "child")
    report_answer(ResponsesKit(ScriptedBackend(["Hi"])), "child")
    wait(child(lambda: report_answer(kit, "grandchild")))

wait(child(work), child(work), child(lambda: None))
assert loop_thread.event_loop() is loop
report_answer(kit, "parent")
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = sorted(done.stdout.splitlines())
    assert printed == sorted(
        ["parent 200 completed"] * 2 + ["child 200 completed"] * 4 + ["grandchild 200 completed"] * 2
    )


def test_kit_created_before_a_fork_runs_in_each_child() -> None:
    done = run(
        FORK_PRELUDE
        + """
kit = ResponsesKit(EndlessBackend(), on_response_end=report_end)

def work():
    loop_thread.start_kit(kit, grace=0.1)
    assert ask(kit, background=True).status == 200
    assert EndlessBackend.started.wait(10)

wait(*[child(work) for _ in range(3)])
assert threading.active_count() == 1
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ended failed The server is shutting down. Try again.\n" * 3


def test_fork_while_the_loop_is_being_created_is_harmless() -> None:
    done = run(
        FORK_PRELUDE
        + """
kit = ResponsesKit(ScriptedBackend(["Hi"]))
with loop_thread._lock:  # as if another thread held it
    pid = child(lambda: report_answer(kit, "child"))
wait(pid)
report_answer(kit, "parent")
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child 200 completed", "parent 200 completed"]


def test_multiprocessing_child_stops_its_kit() -> None:
    done = run(
        """
import multiprocessing

def work():
    kit = ResponsesKit(EndlessBackend(), on_response_end=report_end)
    loop_thread.start_kit(kit, grace=0.1)
    assert ask(kit, background=True).status == 200
    assert EndlessBackend.started.wait(10)

process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(20)
assert process.exitcode == 0
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ended failed The server is shutting down. Try again.\n"
