"""Hosted tools that tests can block, trace and make fail; see `scripted` for gates and runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from responses_kit import HostedTool, Turn, errors

from .scripted import MAX_WAIT, Control

SECRET = "the password of the weather station is hunter2"
SLOW_TOOL_TIMEOUT = 0.1
"""Timeout of the tools of `test:slow` in seconds."""

CRASHES = {
    "RuntimeError": RuntimeError,
    "KeyError": KeyError,
    "BaseException": BaseException,
    "SystemExit": SystemExit,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "CancelledError": asyncio.CancelledError,
    "ExceptionGroup": lambda text: ExceptionGroup(text, [ValueError(text)]),
    "ClientDisconnected": errors.ClientDisconnected,
    "ModelError": errors.ModelError,
    "IllegalOutput": errors.IllegalOutput,
}


def hosted_tools(control: Control) -> list[Any]:
    """Return the tools of the kit under test.

    * `test:add` adds two numbers and rejects sums above 100.
    * `test:wait` and `test:thread` wait for a gate, on the event loop and in a thread, and trace "tool started" and
      "tool ended".
    * `test:say` returns its argument, `test:recite` a number of words.
    * `test:fail` raises ToolError; `test:crash` and `test:crash_in_thread` raise an exception from `CRASHES`.
    * `test:slow` has two tools that exceed their timeout: `nap` on the event loop and `doze` in a thread.
    """

    @contextmanager
    def traced(run: str) -> Iterator[None]:
        control.add_to_trace(run, "tool started")
        how = "returned"
        try:
            yield
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            control.add_to_trace(run, "tool ended", how=how)

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        if a + b > 100:
            raise errors.ToolError("These are too large.")
        return a + b

    async def wait(run: str, gate: str = "never") -> str:
        """Wait on the event loop."""
        with traced(run), anyio.fail_after(MAX_WAIT):
            while not control.is_open(gate):  # noqa: ASYNC110  # the gate is opened in another thread
                await anyio.sleep(0.005)
        return f"waited for {gate}"

    def thread(run: str, turn: Turn, gate: str = "never") -> str:
        """Wait in a thread."""
        with traced(run):
            until = time.monotonic() + MAX_WAIT
            while not control.is_open(gate) and time.monotonic() < until:
                if turn.cancelled:
                    raise InterruptedError
                time.sleep(0.005)
        return f"waited for {gate}"

    def say(value: Any) -> Any:
        """Return the value."""
        return value

    def recite(words: int) -> str:
        """Return a number of words."""
        return " ".join(["verse"] * words)

    def fail(reason: str = "There is no such city.") -> None:
        """Fail."""
        raise errors.ToolError(reason)

    async def crash(kind: str = "RuntimeError") -> None:
        """Raise an exception."""
        raise CRASHES[kind](SECRET)

    def crash_in_thread(kind: str = "RuntimeError") -> None:
        """Raise an exception."""
        raise CRASHES[kind](SECRET)

    functions: list[Any] = [add, wait, thread, say, recite, fail, crash, crash_in_thread]
    tools: list[Any] = [HostedTool.from_function(f"test:{one.__name__}", one) for one in functions]
    return [*tools, _Slow(wait, thread)]


class _Slow:
    """A toolset with two tools."""

    type = "test:slow"

    def __init__(self, wait: Any, thread: Any) -> None:
        self._tools = [
            HostedTool.from_function(self.type, wait, name="nap", timeout=SLOW_TOOL_TIMEOUT),
            HostedTool.from_function(self.type, thread, name="doze", timeout=SLOW_TOOL_TIMEOUT),
        ]

    async def tools(self) -> Sequence[HostedTool]:
        return self._tools

    async def aclose(self) -> None:
        pass
