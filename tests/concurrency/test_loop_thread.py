"""The event loop of synchronous hosts: one a process, on which kits live until the process ends."""

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

mood: contextvars.ContextVar[str] = contextvars.ContextVar("mood", default="none")

ROOT = Path(__file__).resolve().parents[2]


class Life:
    """Stands for a kit: counts how often it was entered and left, and does meanwhile what the test says."""

    def __init__(self) -> None:
        self.entered = self.left = 0
        self.graces: list[float] = []
        self.threads: set[str] = set()
        self.moods: list[str] = []
        self.refuses: Exception | None = None
        self.fails: Exception | None = None
        self.hangs = False
        self.entering, self.cancelled = threading.Event(), threading.Event()

    @asynccontextmanager
    async def lifespan(self, *, grace: float) -> AsyncIterator[None]:
        self.entered += 1
        self.graces.append(grace)
        self.threads.add(threading.current_thread().name)
        self.moods.append(mood.get())
        self.entering.set()
        try:
            await asyncio.sleep(3600 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.refuses is not None:
            raise self.refuses
        yield
        await asyncio.sleep(0)
        self.left += 1
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def life() -> Iterator[Life]:
    life = Life()
    yield life
    life.fails = None
    loop_thread.stop_kit(life)


def in_threads(count: int, work: Callable[[], Any]) -> list[Any]:
    """What the work comes to in so many threads at once; exceptions too."""
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


def test_all_threads_find_the_same_loop_which_runs_in_a_thread_of_its_own() -> None:
    loops = in_threads(16, loop_thread.event_loop)
    assert set(loops) == {loop_thread.event_loop()}
    assert loops[0].is_running()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "responses-kit")
    assert thread.daemon  # it is ended in order, and never waited for


def test_a_call_gives_what_the_function_returns_and_raises_what_it_raises() -> None:
    async def divided(number: int, by: int) -> float:
        await asyncio.sleep(0)
        return number / by

    assert loop_thread.call(divided, 6, 4) == 1.5
    with pytest.raises(ZeroDivisionError):
        loop_thread.call(divided, 6, 0)
    assert in_threads(16, lambda: loop_thread.call(divided, 6, 3)) == [2.0] * 16


def test_whoever_is_on_the_loop_already_is_told_so_and_does_not_wait_for_ever(life: Life) -> None:
    async def again(work: Callable[[], Any]) -> None:
        work()

    loop_thread.start_kit(life)
    for work in (
        lambda: loop_thread.call(asyncio.sleep, 0),
        lambda: loop_thread.start_kit(life),
        lambda: loop_thread.stop_kit(life),
    ):
        with pytest.raises(RuntimeError, match="wait for itself"):
            loop_thread.call(again, work)
    assert loop_thread.call(asyncio.sleep, 0, "still here") == "still here"


def test_a_call_finds_nothing_of_its_callers_context_and_leaves_none_behind(life: Life) -> None:
    """A framework's may lead back into a thread that waits, and holds its request as long as it is there."""

    async def seen() -> str:
        return mood.get()

    mood.set("the caller's")
    assert loop_thread.call(seen) == "none"
    loop_thread.start_kit(life)
    assert life.moods == ["none"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_nothing_that_runs_on_the_loop_can_end_it(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """In a thread of its own it could not either."""

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


def test_whoever_is_torn_away_from_a_call_cancels_it() -> None:
    """As task queues do whose workers have taken too long."""

    class TooLong(BaseException):
        pass

    cancelled = threading.Event()

    async def wait() -> None:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def torn_away(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGUSR1, torn_away)
    try:
        with pytest.raises(TooLong):
            loop_thread.call(wait)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cancelled.wait(BOUND)


# Lives.


def test_a_kit_is_entered_once_on_the_loop_however_many_come_at_once(life: Life) -> None:
    assert in_threads(32, lambda: loop_thread.start_kit(life, grace=3.0)) == [None] * 32
    loop_thread.start_kit(life, grace=4.0)
    assert (life.entered, life.graces, life.threads) == (1, [3.0], {"responses-kit"})


def test_a_kit_is_left_when_its_life_is_over_and_may_be_entered_again(life: Life) -> None:
    loop_thread.stop_kit(life)  # which has not begun
    for times in (1, 2):
        loop_thread.start_kit(life)
        loop_thread.stop_kit(life)
        loop_thread.stop_kit(life)
        assert (life.entered, life.left) == (times, times)


def test_what_fails_while_it_is_left_is_raised_and_over_all_the_same(life: Life) -> None:
    life.fails = LookupError("the model cannot be unloaded")
    loop_thread.start_kit(life)
    with pytest.raises(LookupError):
        loop_thread.stop_kit(life)
    loop_thread.stop_kit(life)
    loop_thread.start_kit(life)
    assert life.entered == 2


def test_a_kit_that_cannot_begin_raises_for_each_who_comes_until_it_can(life: Life) -> None:
    life.refuses = LookupError("not set up")
    for _ in range(2):
        with pytest.raises(LookupError, match="not set up"):
            loop_thread.start_kit(life)
    found = in_threads(8, lambda: loop_thread.start_kit(life))
    assert {type(error) for error in found} == {LookupError}
    life.refuses = None
    loop_thread.start_kit(life)
    entered = life.entered
    loop_thread.start_kit(life)
    assert life.entered == entered


def test_a_store_that_was_not_set_up_is_told_each_time_and_works_once_it_is(tmp_path: Path) -> None:
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


def test_a_kit_whose_beginning_hangs_holds_up_no_other_and_can_be_left(life: Life) -> None:
    hanging = Life()
    hanging.hangs = True
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(loop_thread.start_kit, hanging) for _ in range(2)]
        assert hanging.entering.wait(BOUND)
        loop_thread.start_kit(life)
        loop_thread.stop_kit(life)
        loop_thread.stop_kit(hanging)
        assert hanging.cancelled.wait(BOUND)
        for one in waiting:
            with pytest.raises(CancelledError):
                one.result(BOUND)
    assert hanging.entered == 1


def test_whoever_is_torn_away_from_a_beginning_leaves_one_life_behind_and_no_two() -> None:
    class TooLong(BaseException):
        pass

    def torn_away(number: int, frame: FrameType | None) -> None:
        raise TooLong

    hanging = Life()
    hanging.hangs = True
    before = signal.signal(signal.SIGUSR1, torn_away)
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        with pytest.raises(TooLong):
            loop_thread.start_kit(hanging)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(loop_thread.start_kit, hanging)
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            loop_thread.stop_kit(hanging)
            assert isinstance(waiting.exception(BOUND), CancelledError)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert hanging.entered == 1


def test_the_kits_life_begins_and_ends_on_the_loop_of_the_calls(caplog: pytest.LogCaptureFixture) -> None:
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

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def ask(kit, **body):
    data = json.dumps({"input": "Hi", **body}).encode()
    environ = {"REQUEST_METHOD": "POST", "CONTENT_LENGTH": str(len(data)), "wsgi.input": io.BytesIO(data)}
    return handle_request(OpenResponses(kit), environ, path="/responses", host=None)

class Talking(Backend):
    models = ["talking"]
    begun = threading.Event()

    async def generate(self, turn):
        while True:
            yield "on and on "
            self.begun.set()
            await asyncio.sleep(0.01)

class Plain(Talking):
    def generate(self, turn):
        while True:
            yield "on and on "
            self.begun.set()
            time.sleep(0.01)

def ended(owner, response):
    say("ended", response["status"], (response["error"] or {}).get("message"))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that does this; what it says is complete, and its end does not take for ever."""
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", PRELUDE + code, *arguments],
        capture_output=True,
        text=True,
        timeout=40,
        cwd=ROOT,
        check=False,
    )


STREAM = """
class Connecting(MemoryStore):
    # At the end a connection may have to be made anew, and that takes an executor.
    async def create(self, owner, record):
        await asyncio.get_running_loop().run_in_executor(None, int)
        return await super().create(owner, record)

    async def update(self, owner, record, log=None):
        await asyncio.get_running_loop().run_in_executor(None, int)
        done = await super().update(owner, record, log)
        say("kept", done, record.final)
        return done

where, plain = sys.argv[1:]
backend = Plain() if plain == "plain" else Talking()
kit = ResponsesKit(backend, store=Connecting(), on_response_end=ended)
loop_thread.start_kit(kit, grace=0.2)

def stream():
    answer = ask(kit, stream=True)
    told = b"".join(answer.pieces)
    answer.pieces.close()
    say("told", told.count(b"event: response.failed"), told.endswith(b"data: [DONE]\\n\\n"))

if where == "executor":
    pool = ThreadPoolExecutor(1)
    pool.submit(stream)
elif where == "background":
    ask(kit, background=True)
else:
    threading.Thread(target=stream, daemon=where == "daemon").start()
assert backend.begun.wait(10)
"""


@pytest.mark.parametrize("plain", ["async", "plain"])
@pytest.mark.parametrize("where", ["thread", "daemon", "executor", "background"])
def test_a_process_that_ends_in_the_middle_of_a_stream_ends_that_in_order(where: str, plain: str) -> None:
    done = run(STREAM, where, plain)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert "kept True True" in said
    assert said.count("ended failed The server is shutting down. Try again.") == 1
    if where in ("thread", "executor"):  # nobody waits for daemons
        assert "told 1 True" in said


@pytest.mark.parametrize("closed", ["by nobody", "by its server"])
def test_a_main_thread_that_is_told_to_end_in_the_middle_of_a_stream_gives_it_up_and_ends(closed: str) -> None:
    """As gunicorn's sync workers are, which raise in a signal's handler."""
    done = run(
        """
class Silent(Talking):
    async def generate(self, turn):
        yield "Hi"
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
        await asyncio.sleep(3600)

kit = ResponsesKit(Silent(), on_response_end=ended)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pieces = ask(kit, stream=True).pieces
try:
    for piece in pieces:
        pass
finally:
    if sys.argv[1] == "by its server":
        pieces.close()
        say("closed")
""",
        closed,
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "ended cancelled None\n" + "closed\n" * (closed == "by its server")


def test_what_is_told_last_is_read_however_late_the_hosts_thread_comes_to_it() -> None:
    done = run(
        """
kit = ResponsesKit(Talking())
loop_thread.start_kit(kit, grace=0.05)

def stream():
    pieces = ask(kit, stream=True).pieces
    told = next(pieces)
    reading.set()
    while not loop_thread.event_loop().is_closed():
        time.sleep(0.01)
    told += b"".join(pieces)
    pieces.close()
    say("told", b"shutting down" in told, told.endswith(b"data: [DONE]\\n\\n"))

reading = threading.Event()
threading.Thread(target=stream).start()
assert reading.wait(10)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("told")


TERMINATED = """
def handle(number, frame):
    say("the server heard")

signal.signal(signal.SIGTERM, {"a handler": handle, "none": signal.SIG_DFL, "ignored": signal.SIG_IGN}[sys.argv[1]])
kit = ResponsesKit(Talking(), on_response_end=ended)
loop_thread.start_kit(kit, grace=0.05)
loop_thread.handle_sigterm()
handler = signal.getsignal(signal.SIGTERM)
threading.Thread(target=loop_thread.handle_sigterm).start()
answer = ask(kit, stream=True)
os.kill(os.getpid(), signal.SIGTERM)
told = b"".join(answer.pieces)
answer.pieces.close()
say("told", told.count(b"shutting down") > 0, told.endswith(b"data: [DONE]\\n\\n"))
os.kill(os.getpid(), signal.SIGTERM)
say("once more", signal.getsignal(signal.SIGTERM) is handler, ask(kit).status)
"""


@pytest.mark.parametrize("before", ["a handler", "ignored"])
def test_a_sigterm_begins_to_end_the_kits_beside_what_the_server_does(before: str) -> None:
    done = run(TERMINATED, before)
    heard = ["the server heard"] if before == "a handler" else []
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        *heard,
        "ended failed The server is shutting down. Try again.",
        "told True True",
        *heard,
        "once more True 500",
    ]


def test_a_sigterm_that_nobody_handled_ends_the_process_as_before() -> None:
    done = run(TERMINATED, "none")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "", "")


def test_what_waits_in_a_call_when_the_process_ends_is_cancelled() -> None:
    done = run(
        """
async def wait():
    say("begun")
    begun.set()
    try:
        await asyncio.sleep(3600)
    finally:
        say("cancelled")

begun = threading.Event()
threading.Thread(target=loop_thread.call, args=[wait], daemon=True).start()
assert begun.wait(10)
"""
    )
    assert (done.returncode, done.stdout) == (0, "begun\ncancelled\n")


def test_all_kits_end_with_the_process_side_by_side_whatever_one_of_them_does() -> None:
    done = run(
        """
class Broken(ScriptedBackend):
    def close(self):
        say("broken closed")
        raise LookupError("cannot be unloaded")

class Closing(ScriptedBackend):
    def close(self):
        say("closed")

import logging
logging.basicConfig(format="%(message)s", stream=sys.stdout)
kits = [ResponsesKit(Broken(["Hi"])), ResponsesKit(Closing(["Hi"])), ResponsesKit(Talking(), on_response_end=ended)]
for kit in kits:
    loop_thread.start_kit(kit, grace=0.1)
for kit in kits[:2]:
    assert ask(kit).status == 200
assert ask(kits[2], background=True).status == 200
assert Talking.begun.wait(10)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"closed", "broken closed", "a kit could not be closed"} <= set(done.stdout.splitlines())
    assert "ended failed" in done.stdout


def test_a_kit_whose_beginning_hangs_does_not_keep_its_process_from_ending() -> None:
    done = run(
        """
class Hanging(MemoryStore):
    async def get(self, owner, response_id):
        begun.set()
        await asyncio.sleep(3600)

begun = threading.Event()
kit = ResponsesKit(ScriptedBackend(["Hi"]), store=Hanging())
for _ in range(2):
    threading.Thread(target=loop_thread.start_kit, args=[kit], daemon=True).start()
assert begun.wait(10)
"""
    )
    assert done.returncode == 0


def test_a_process_that_never_used_the_loop_has_none() -> None:
    done = run("import responses_kit.runners.celery\nassert threading.active_count() == 1\nsay('done')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_once_the_process_has_ended_whoever_still_asks_is_told_so() -> None:
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
        say("refused", error)

kit = ResponsesKit(ScriptedBackend(["Hi"]))
loop_thread.event_loop()
threading.Thread(target=late).start()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("refused")


FORKED = """
import gc, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads

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

def answered(kit, name):
    answer = ask(kit)
    say(name, answer.status, json.loads(answer.body)["status"])
"""


def test_a_forked_process_has_a_loop_of_its_own_and_its_parents_goes_on() -> None:
    done = run(
        FORKED
        + """
kit = ResponsesKit(ScriptedBackend(["Hi"]), on_response_end=lambda owner, response: None)
loop = loop_thread.event_loop()
answered(kit, "parent")

def work():
    assert loop_thread.event_loop() is not loop
    answered(kit, "child")
    answered(ResponsesKit(ScriptedBackend(["Hi"])), "child")
    wait(child(lambda: answered(kit, "grandchild")))

wait(child(work), child(work), child(lambda: None))
assert loop_thread.event_loop() is loop
answered(kit, "parent")
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = sorted(done.stdout.splitlines())
    assert said == sorted(["parent 200 completed"] * 2 + ["child 200 completed"] * 4 + ["grandchild 200 completed"] * 2)


def test_a_kit_that_was_made_before_the_fork_lives_in_each_process_for_itself() -> None:
    done = run(
        FORKED
        + """
kit = ResponsesKit(Talking(), on_response_end=ended)

def work():
    loop_thread.start_kit(kit, grace=0.1)
    assert ask(kit, background=True).status == 200
    assert Talking.begun.wait(10)

wait(*[child(work) for _ in range(3)])
assert threading.active_count() == 1
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ended failed The server is shutting down. Try again.\n" * 3


def test_a_fork_in_the_moment_in_which_the_loop_is_made_does_no_harm() -> None:
    done = run(
        FORKED
        + """
kit = ResponsesKit(ScriptedBackend(["Hi"]))
with loop_thread._lock:  # as another thread would
    pid = child(lambda: answered(kit, "child"))
wait(pid)
answered(kit, "parent")
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["child 200 completed", "parent 200 completed"]


def test_a_process_of_multiprocessing_ends_its_kit_too() -> None:
    done = run(
        """
import multiprocessing

def work():
    kit = ResponsesKit(Talking(), on_response_end=ended)
    loop_thread.start_kit(kit, grace=0.1)
    assert ask(kit, background=True).status == 200
    assert Talking.begun.wait(10)

process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(20)
assert process.exitcode == 0
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ended failed The server is shutting down. Try again.\n"
