"""Execution of hosted tool calls, with an item per call."""

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

_MAX_RESULT_LENGTH: Final = 262_144
"""Maximum length of a tool's result in characters. The rest is cut, since results are sent to the model and stored."""


@dataclass(slots=True, eq=False)
class HostedCall:
    """A model's call of a hosted tool.

    Attributes:
        tool: The tool.
        call_id: Pairs the call with its output.
        pieces: The arguments as JSON text, in pieces.
    """

    tool: HostedTool
    call_id: str
    pieces: list[str] = field(default_factory=list)

    def receipt(self, status: str, output: str | None = None) -> Item:
        """Return the item that represents the call.

        See the specification, "Hosted tools must have corresponding item types".
        """
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
    emit: Callable[[Item], Awaitable[None]],
) -> None:
    """Run calls concurrently and emit their receipts: all when they start, then each result in order.

    A failure of a tool becomes the output in its receipt, for the model.

    Args:
        calls: The model's calls.
        turn: The turn of the calls.
        threads: Limits the threads of tools that are plain functions.
        emit: Called with each item.
    """
    results = [_FAILED] * len(calls)
    finished = [anyio.Event() for _ in calls]

    async def run(index: int) -> None:
        try:
            results[index] = await _run_call(calls[index], turn, threads)
        finally:
            finished[index].set()

    for call in calls:
        await emit(call.receipt("in_progress"))
    async with open_task_group() as group:
        for index in range(len(calls)):
            group.start_soon(run, index)
        try:
            for index, call in enumerate(calls):
                await finished[index].wait()
                await emit(call.receipt(*results[index]))
        except Exception:
            group.cancel_scope.cancel()
            raise


async def _run_call(call: HostedCall, turn: Turn, threads: ThreadLimiter) -> tuple[str, str]:
    """Return a call's final status and its output for the model."""
    tool = call.tool
    turn = replace(turn)  # a copy, so that `cancelled` can be set for this call only
    try:
        arguments = tool.parse_arguments("".join(call.pieces))
        if not tool.is_async:
            result = await _call_in_thread(tool, arguments, turn, threads)
        with anyio.fail_after(tool.timeout):
            if tool.is_async:
                result = tool.call(arguments, turn)
            if isinstance(result, Awaitable):
                result = await result
        text = _encode_result(result)
        excess = len(text) - _MAX_RESULT_LENGTH
        return "completed", text if excess <= 0 else f"{text[:_MAX_RESULT_LENGTH]}\n[{excess} more characters were cut]"
    except ToolError as error:
        return "failed", _error_message(error)
    except BaseException as error:
        turn.cancelled = True
        # A tool may raise any BaseException; only an interrupt or a real cancellation may end the sibling calls.
        if isinstance(error, KeyboardInterrupt) or is_cancellation(error):
            raise
        logger.error("response %s: the tool %s failed", turn.response_id, tool.name, exc_info=error)
        return ("failed", "The tool took too long.") if isinstance(error, TimeoutError) else _FAILED


_FAILED: Final = ("failed", "The tool failed.")


async def _call_in_thread(tool: HostedTool, arguments: dict[str, Any], turn: Turn, threads: ThreadLimiter) -> Any:
    def call() -> list[Any]:
        result = tool.call(arguments, turn)
        return [result if isinstance(result, Awaitable) else _encode_result(result)]

    worker: IteratorThread[Any] = IteratorThread(call)
    with anyio.fail_after(tool.timeout):
        await worker.reserve(threads)  # waiting for a thread does not count as the tool's time
    try:
        with anyio.fail_after(tool.timeout):
            async with open_task_group() as group:
                group.start_soon(worker.run)
                (result,) = await worker.take()
    finally:
        worker.stop()
    return result


def _encode_result(result: Any) -> str:
    if isinstance(result, Iterator):
        raise TypeError("a tool must return a value, not yield")
    try:
        return result if isinstance(result, str) else to_json(result).decode()
    except (PydanticSerializationError, ValueError) as error:
        raise TypeError("a tool must return a str or JSON values") from error


def _error_message(error: ToolError) -> str:
    try:
        return str(error)[:_MAX_RESULT_LENGTH]
    except Exception:
        return _FAILED[1]
