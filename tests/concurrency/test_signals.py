"""The signals that end a process, heard beside whoever handles them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from responses_kit import ResponsesKit, errors, outputs
from responses_kit._concurrency.signals import on_termination
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend

from ..support.conformance import check_stream
from ..support.memory import kept

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def handled(handler: Any) -> Iterator[None]:
    """Within the block, both signals have this handler."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Server:
    """Handles signals as a server does that was there before."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_is_heard_on_the_loop_each_time_and_by_whoever_was_there_before(number: int) -> None:
    server, came = Server(), [anyio.Event(), anyio.Event()]
    waiting = list(came)
    with handled(server.handle):
        with on_termination(lambda: waiting.pop(0).set()):
            for count, event in enumerate(came, 1):
                send(number)
                with anyio.fail_after(BOUND):
                    await event.wait()
                assert server.heard == [number] * count
        assert signal.getsignal(number) == server.handle


async def test_a_signal_wakes_a_loop_in_which_nothing_else_happens() -> None:
    came = anyio.Event()
    sender = threading.Timer(0.05, send, [signal.SIGTERM])
    with handled(signal.SIG_IGN), on_termination(came.set):
        sender.start()
        with anyio.fail_after(BOUND):
            await came.wait()
    await anyio.to_thread.run_sync(sender.join, BOUND)


async def test_what_was_ignored_stays_ignored_and_is_heard_all_the_same() -> None:
    came = anyio.Event()
    with handled(signal.SIG_IGN):
        with on_termination(came.set):
            send(signal.SIGTERM)
            with anyio.fail_after(BOUND):
                await came.wait()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


async def test_the_handlers_that_were_there_are_back_after_a_failure_too() -> None:
    server = Server()
    with handled(server.handle):
        with pytest.raises(LookupError), on_termination(lambda: None):
            raise LookupError
        assert [signal.getsignal(number) for number in SIGNALS] == [server.handle] * 2


async def test_a_handler_that_came_later_is_left_alone() -> None:
    server = Server()
    with handled(signal.SIG_IGN):
        with on_termination(lambda: None):
            signal.signal(signal.SIGTERM, server.handle)
        assert signal.getsignal(signal.SIGTERM) == server.handle


async def test_several_may_listen_at_once() -> None:
    server, came = Server(), [anyio.Event(), anyio.Event()]
    with handled(server.handle):
        with ExitStack() as stack:
            for event in came:
                stack.enter_context(on_termination(event.set))
            send(signal.SIGTERM)
            with anyio.fail_after(BOUND):
                for event in came:
                    await event.wait()
            assert server.heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == server.handle


def test_nothing_happens_in_a_thread_that_cannot_handle_signals(anyio_backend_name: str) -> None:
    server, failures = Server(), []

    async def main() -> None:
        with on_termination(lambda: failures.append("heard")):
            await anyio.lowlevel.checkpoint()

    def work() -> None:
        try:
            anyio.run(main, backend=anyio_backend_name)
        except BaseException as error:
            failures.append(repr(error))

    with handled(server.handle):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(BOUND)
        assert [signal.getsignal(number) for number in SIGNALS] == [server.handle] * 2
    assert failures == []


_ALONE = """
import sys, anyio, os, signal
from responses_kit._concurrency.signals import on_termination

async def main():
    with on_termination(lambda: print("heard", flush=True)):
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
        await anyio.sleep(20)

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_nobody_handled_ends_the_process_as_before(
    number: signal.Signals, anyio_backend_name: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, anyio_backend_name, number.name], capture_output=True, timeout=15, check=False
    )
    if number == signal.SIGINT:  # Python's own handler raises KeyboardInterrupt
        assert done.returncode in (-signal.SIGINT, 1, 130), done
        assert b"KeyboardInterrupt" in done.stderr
    else:
        assert done.returncode == -number, done


# The kit's lifespan.


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_drains_what_is_in_progress_may_end_and_new_requests_are_refused(number: int) -> None:
    server, store, go_on = Server(), MemoryStore(), anyio.Event()

    class Patient(ScriptedBackend):
        async def generate(self, turn: Any) -> Any:
            yield "half "
            await go_on.wait()
            yield "whole"

    kit = ResponsesKit(Patient(), store=store)
    with handled(server.handle), anyio.fail_after(BOUND):
        async with kit.lifespan(grace=60.0):
            started = await kit.service.submit({"input": "Hi", "background": True})
            told: list[dict[str, Any]] = []
            async with kit.stream({"input": "Hi"}) as events:
                async for event in events:
                    told.append(event)
                    if "delta" in event and not kit.lifecycle.is_closing:
                        send(number)
                        await kit.lifecycle.wait_closing()
                        assert server.heard == [number]
                        with pytest.raises(errors.ServerError, match="shutting down"):
                            await kit.create({"input": "Hi"})
                        with pytest.raises(errors.ServerError, match="shutting down"):
                            await kit.service.submit({"input": "Hi", "background": True})
                        go_on.set()
            assert check_stream(told)["status"] == "completed"
            assert (await kit.wait(started["id"]))["status"] == "completed"
        assert [signal.getsignal(one) for one in SIGNALS] == [server.handle] * 2
    assert all(record.final for record in kept(store))


async def test_what_has_not_ended_after_the_grace_time_is_failed_by_the_signal_alone() -> None:
    server, store = Server(), MemoryStore()
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("half"), Pause(60)]), store=store)
    with handled(server.handle), anyio.fail_after(BOUND):
        async with kit.lifespan(grace=0.05):
            started = await kit.service.submit({"input": "Hi", "background": True})
            async with kit.stream({"input": "Hi"}) as events:
                told = [await anext(events)]
                send(signal.SIGTERM)
                send(signal.SIGTERM)
                told += [event async for event in events]
            assert check_stream(told)["error"]["message"] == "The server is shutting down. Try again."
            with pytest.raises(errors.ServerError, match="shutting down"):
                await kit.wait(started["id"])


async def test_leaving_the_lifespan_ends_what_is_in_progress_without_any_signal() -> None:
    server, store = Server(), MemoryStore()
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("half"), Pause(60)]), store=store)
    with handled(server.handle), anyio.fail_after(BOUND):
        async with kit.lifespan(grace=0.05):
            started = await kit.service.submit({"input": "Hi", "background": True})
            await anyio.wait_all_tasks_blocked()
        assert (await kit.retrieve(started["id"]))["status"] == "failed"
        assert kit.lifecycle.is_closing
        assert [signal.getsignal(one) for one in SIGNALS] == [server.handle] * 2


async def test_a_lifespan_that_is_cancelled_ends_what_is_in_progress_too() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("half"), Pause(60)]), store=store)
    with handled(signal.SIG_IGN), anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            async with kit.lifespan(grace=0.0):
                await kit.service.submit({"input": "Hi", "background": True})
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                await anyio.sleep_forever()
    assert all(record.final for record in kept(store))
    assert len(store) == 1
