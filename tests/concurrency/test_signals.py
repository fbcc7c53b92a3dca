"""Tests of `on_termination`, and of kits that drain at a signal."""

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
from ..support.memory import stored_records

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

BOUND = 5.0

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@contextmanager
def installed_handler(handler: Any) -> Iterator[None]:
    """Install a handler for both signals within the block."""
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class Server:
    """A server's signal handler that was installed before."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
async def test_each_signal_calls_the_callback_and_the_previous_handler(number: int) -> None:
    server, events = Server(), [anyio.Event(), anyio.Event()]
    waiting = list(events)
    with installed_handler(server.handle):
        with on_termination(lambda: waiting.pop(0).set()):
            for count, event in enumerate(events, 1):
                send(number)
                with anyio.fail_after(BOUND):
                    await event.wait()
                assert server.received == [number] * count
        assert signal.getsignal(number) == server.handle


async def test_signal_wakes_idle_loop() -> None:
    events = anyio.Event()
    sender = threading.Timer(0.05, send, [signal.SIGTERM])
    with installed_handler(signal.SIG_IGN), on_termination(events.set):
        sender.start()
        with anyio.fail_after(BOUND):
            await events.wait()
    await anyio.to_thread.run_sync(sender.join, BOUND)


async def test_ignored_signal_calls_the_callback_and_stays_ignored() -> None:
    events = anyio.Event()
    with installed_handler(signal.SIG_IGN):
        with on_termination(events.set):
            send(signal.SIGTERM)
            with anyio.fail_after(BOUND):
                await events.wait()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


async def test_previous_handlers_are_restored_after_an_exception() -> None:
    server = Server()
    with installed_handler(server.handle):
        with pytest.raises(LookupError), on_termination(lambda: None):
            raise LookupError
        assert [signal.getsignal(number) for number in SIGNALS] == [server.handle] * 2


async def test_handler_installed_later_is_not_replaced() -> None:
    server = Server()
    with installed_handler(signal.SIG_IGN):
        with on_termination(lambda: None):
            signal.signal(signal.SIGTERM, server.handle)
        assert signal.getsignal(signal.SIGTERM) == server.handle


async def test_several_callbacks_are_called() -> None:
    server, events = Server(), [anyio.Event(), anyio.Event()]
    with installed_handler(server.handle):
        with ExitStack() as stack:
            for event in events:
                stack.enter_context(on_termination(event.set))
            send(signal.SIGTERM)
            with anyio.fail_after(BOUND):
                for event in events:
                    await event.wait()
            assert server.received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) == server.handle


def test_no_handler_is_installed_outside_the_main_thread(anyio_backend_name: str) -> None:
    server, failures = Server(), []

    async def main() -> None:
        with on_termination(lambda: failures.append("received")):
            await anyio.lowlevel.checkpoint()

    def work() -> None:
        try:
            anyio.run(main, backend=anyio_backend_name)
        except BaseException as error:
            failures.append(repr(error))

    with installed_handler(server.handle):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(BOUND)
        assert [signal.getsignal(number) for number in SIGNALS] == [server.handle] * 2
    assert failures == []


_PROGRAM = """
import sys, anyio, os, signal
from responses_kit._concurrency.signals import on_termination

async def main():
    with on_termination(lambda: print("received", flush=True)):
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
        await anyio.sleep(20)

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_without_previous_handler_terminates_the_process(
    number: signal.Signals, anyio_backend_name: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, anyio_backend_name, number.name], capture_output=True, timeout=15, check=False
    )
    if number == signal.SIGINT:  # Python's own handler raises KeyboardInterrupt
        assert done.returncode in (-signal.SIGINT, 1, 130), done
        assert b"KeyboardInterrupt" in done.stderr
    else:
        assert done.returncode == -number, done


# The kit's lifespan.


@pytest.mark.parametrize("number", SIGNALS)
async def test_signal_lets_running_responses_finish_and_refuses_new_ones(number: int) -> None:
    server, store, proceed = Server(), MemoryStore(), anyio.Event()

    class Patient(ScriptedBackend):
        async def generate(self, turn: Any) -> Any:
            yield "half "
            await proceed.wait()
            yield "whole"

    kit = ResponsesKit(Patient(), store=store)
    with installed_handler(server.handle), anyio.fail_after(BOUND):
        async with kit.lifespan(grace=60.0):
            started = await kit.service.submit({"input": "Hi", "background": True})
            streamed: list[dict[str, Any]] = []
            async with kit.stream({"input": "Hi"}) as events:
                async for event in events:
                    streamed.append(event)
                    if "delta" in event and not kit.lifecycle.is_closing:
                        send(number)
                        await kit.lifecycle.wait_closing()
                        assert server.received == [number]
                        with pytest.raises(errors.ServerError, match="shutting down"):
                            await kit.create({"input": "Hi"})
                        with pytest.raises(errors.ServerError, match="shutting down"):
                            await kit.service.submit({"input": "Hi", "background": True})
                        proceed.set()
            assert check_stream(streamed)["status"] == "completed"
            assert (await kit.wait(started["id"]))["status"] == "completed"
        assert [signal.getsignal(one) for one in SIGNALS] == [server.handle] * 2
    assert all(record.final for record in stored_records(store))


async def test_running_responses_fail_after_the_grace_time() -> None:
    server, store = Server(), MemoryStore()
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("half"), Pause(60)]), store=store)
    with installed_handler(server.handle), anyio.fail_after(BOUND):
        async with kit.lifespan(grace=0.05):
            started = await kit.service.submit({"input": "Hi", "background": True})
            async with kit.stream({"input": "Hi"}) as events:
                streamed = [await anext(events)]
                send(signal.SIGTERM)
                send(signal.SIGTERM)
                streamed += [event async for event in events]
            assert check_stream(streamed)["error"]["message"] == "The server is shutting down. Try again."
            with pytest.raises(errors.ServerError, match="shutting down"):
                await kit.wait(started["id"])


async def test_end_of_lifespan_fails_running_responses() -> None:
    server, store = Server(), MemoryStore()
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("half"), Pause(60)]), store=store)
    with installed_handler(server.handle), anyio.fail_after(BOUND):
        async with kit.lifespan(grace=0.05):
            started = await kit.service.submit({"input": "Hi", "background": True})
            await anyio.wait_all_tasks_blocked()
        assert (await kit.retrieve(started["id"]))["status"] == "failed"
        assert kit.lifecycle.is_closing
        assert [signal.getsignal(one) for one in SIGNALS] == [server.handle] * 2


async def test_cancelled_lifespan_finishes_running_responses() -> None:
    store = MemoryStore()
    kit = ResponsesKit(ScriptedBackend([outputs.Reasoning("half"), Pause(60)]), store=store)
    with installed_handler(signal.SIG_IGN), anyio.fail_after(BOUND):
        with anyio.CancelScope() as scope:
            async with kit.lifespan(grace=0.0):
                await kit.service.submit({"input": "Hi", "background": True})
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                await anyio.sleep_forever()
    assert all(record.final for record in stored_records(store))
    assert len(store) == 1
