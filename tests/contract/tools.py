"""Hosted tools that tests can hold up, watch and see fail; see `puppet` for gates and runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from responses_kit import HostedTool, Turn, errors

from .puppet import LONGEST_WAIT, Strings

SECRET = "the password of the weather station is hunter2"
NAP = 0.1
"""Seconds that the tools of `test:slow` may take."""

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


def hosted_tools(strings: Strings) -> list[Any]:
    """The tools of the kit under test.

    * `test:add` adds, and takes no more than 100,
    * `test:wait` and `test:thread` wait for a gate, on the loop and in a thread, and note `begun` and `over`,
    * `test:say` returns what it is told to, `test:recite` so many words,
    * `test:fail` raises ToolError, `test:crash` and `test:crash_in_thread` whatever `CRASHES` has,
    * `test:slow` is two tools, `nap` on the loop and `doze` in a thread, that wait for ever and have no time.
    """

    @contextmanager
    def watched(run: str) -> Iterator[None]:
        strings.note(run, "begun")
        how = "returned"
        try:
            yield
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            strings.note(run, "over", how=how)

    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        if a + b > 100:
            raise errors.ToolError("These are too large.")
        return a + b

    async def wait(run: str, gate: str = "never") -> str:
        """Waits."""
        with watched(run), anyio.fail_after(LONGEST_WAIT):
            while not strings.is_open(gate):  # noqa: ASYNC110  # the gate is opened in another thread
                await anyio.sleep(0.005)
        return f"waited for {gate}"

    def thread(run: str, turn: Turn, gate: str = "never") -> str:
        """Waits in a thread."""
        with watched(run):
            until = time.monotonic() + LONGEST_WAIT
            while not strings.is_open(gate) and time.monotonic() < until:
                if turn.cancelled:
                    raise InterruptedError
                time.sleep(0.005)
        return f"waited for {gate}"

    def say(value: Any) -> Any:
        """Says it."""
        return value

    def recite(words: int) -> str:
        """Recites."""
        return " ".join(["verse"] * words)

    def fail(reason: str = "There is no such city.") -> None:
        """Fails."""
        raise errors.ToolError(reason)

    async def crash(kind: str = "RuntimeError") -> None:
        """Crashes."""
        raise CRASHES[kind](SECRET)

    def crash_in_thread(kind: str = "RuntimeError") -> None:
        """Crashes."""
        raise CRASHES[kind](SECRET)

    functions: list[Any] = [add, wait, thread, say, recite, fail, crash, crash_in_thread]
    tools: list[Any] = [HostedTool.from_function(f"test:{one.__name__}", one) for one in functions]
    return [*tools, _Slow(wait, thread)]


class _Slow:
    """Two tools of one type."""

    type = "test:slow"

    def __init__(self, wait: Any, thread: Any) -> None:
        self._tools = [
            HostedTool.from_function(self.type, wait, name="nap", timeout=NAP),
            HostedTool.from_function(self.type, thread, name="doze", timeout=NAP),
        ]

    async def tools(self) -> Sequence[HostedTool]:
        return self._tools

    async def aclose(self) -> None:
        pass
