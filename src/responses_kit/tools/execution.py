"""Runs the hosted tools that the model called, and shows each call as an item: begun, then ended."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import anyio
from pydantic_core import PydanticSerializationError, to_json

from .._concurrency.tasks import is_cancellation, open_task_group
from .._concurrency.threads import IteratorThread, ThreadLimiter
from ..errors import ToolError
from ..outputs import Item
from ..schema.base import replace_surrogates
from ..turn import Turn
from .hosted import HostedTool

__all__ = ["HostedCall", "run_hosted_calls"]

logger = logging.getLogger("responses_kit")

_LONGEST: Final = 262_144
"""Characters of a result that are kept. No model's window has room for more, and each is sent and stored again."""


@dataclass(slots=True, eq=False)
class HostedCall:
    """A call of a hosted tool, as the model wrote it.

    Attributes:
        tool: What was called.
        call_id: Pairs the call with its output.
        pieces: The arguments as JSON text, in pieces.
    """

    tool: HostedTool
    call_id: str
    pieces: list[str] = field(default_factory=list)

    def receipt(self, status: str, output: str | None = None) -> Item:
        """The item that shows the call (specification, "Hosted tools must have corresponding item types")."""
        fields = {
            "call_id": self.call_id,
            "name": self.tool.name,
            "arguments": replace_surrogates("".join(self.pieces)).strip() or "{}",
            "output": None if output is None else replace_surrogates(output),
        }
        return Item(self.tool.type, fields, status, key=self.call_id)


async def run_hosted_calls(
    calls: Sequence[HostedCall],
    turn: Turn,
    threads: ThreadLimiter,
    tell: Callable[[Item], Awaitable[None]],
) -> None:
    """Runs calls side by side; tells of each that it begins and, in order, how it ended.

    Whatever a tool does wrong ends up in its receipt, for the model to see.

    Args:
        calls: What the model called.
        turn: The turn in which it did.
        threads: Gives tools that are plain functions their threads.
        tell: Takes the items.
    """
    results = [_FAILED] * len(calls)
    ended = [anyio.Event() for _ in calls]

    async def run(index: int) -> None:
        try:
            results[index] = await _outcome(calls[index], turn, threads)
        finally:
            ended[index].set()

    for call in calls:
        await tell(call.receipt("in_progress"))
    async with open_task_group() as group:
        for index in range(len(calls)):
            group.start_soon(run, index)
        try:
            for index, call in enumerate(calls):
                await ended[index].wait()
                await tell(call.receipt(*results[index]))
        except Exception:
            group.cancel_scope.cancel()
            raise


async def _outcome(call: HostedCall, turn: Turn, threads: ThreadLimiter) -> tuple[str, str]:
    """A call's final status and what the model is told of it."""
    tool = call.tool
    turn = replace(turn)  # of its own, so that a call which is given up can be told by `cancelled`
    try:
        arguments = tool.read("".join(call.pieces))
        if not tool.waits:
            result = await _in_thread(tool, arguments, turn, threads)
        with anyio.fail_after(tool.timeout):
            if tool.waits:
                result = tool.call(arguments, turn)
            if isinstance(result, Awaitable):
                result = await result
        text = _text(result)
        left = len(text) - _LONGEST
        return "completed", text if left <= 0 else f"{text[:_LONGEST]}\n[{left} more characters were cut]"
    except ToolError as error:
        return "failed", _said(error)
    except BaseException as error:
        turn.cancelled = True
        # Of whatever kind: only what really comes from outside may leave here, or the others would wait for ever.
        if isinstance(error, KeyboardInterrupt) or is_cancellation(error):
            raise
        logger.error("response %s: the tool %s failed", turn.response_id, tool.name, exc_info=error)
        return ("failed", "The tool took too long.") if isinstance(error, TimeoutError) else _FAILED


_FAILED: Final = ("failed", "The tool failed.")


async def _in_thread(tool: HostedTool, arguments: dict[str, Any], turn: Turn, threads: ThreadLimiter) -> Any:
    def called() -> list[Any]:
        result = tool.call(arguments, turn)
        return [result if isinstance(result, Awaitable) else _text(result)]

    worker: IteratorThread[Any] = IteratorThread(called)
    with anyio.fail_after(tool.timeout):
        await worker.reserve(threads)  # the time that this takes is not the tool's
    try:
        with anyio.fail_after(tool.timeout):
            async with open_task_group() as group:
                group.start_soon(worker.run)
                (result,) = await worker.take()
    finally:
        worker.stop()
    return result


def _text(result: Any) -> str:
    if isinstance(result, Iterator):
        raise TypeError("a tool returns a value, and yields none")
    try:
        return result if isinstance(result, str) else to_json(result).decode()
    except (PydanticSerializationError, ValueError) as error:
        raise TypeError("a tool returns text or JSON values") from error


def _said(error: ToolError) -> str:
    try:
        return str(error)[:_LONGEST]
    except Exception:
        return _FAILED[1]
