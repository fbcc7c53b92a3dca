"""The backend loop and the hosted-tool loop of one response."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel

from .._concurrency.tasks import open_task_group
from .._concurrency.threads import IteratorThread, ThreadLimiter
from ..backend import Backend
from ..context.builder import Context
from ..context.truncation import fit_to_window
from ..outputs import Finish, Output, Outputs
from ..protocol.state_machine import Event, StateMachine
from ..schema.items import ITEMS, Item
from ..schema.tools import AllowedTools
from ..tools import run_hosted_calls
from ..turn import Turn
from .enforcement import Enforcer
from .hooks import Scope

__all__ = ["Generation"]

logger = logging.getLogger("responses_kit")

Feed = Callable[[Output], list[Event]]
"""Feeds an output to the state machine; returns its events."""

Emit = Callable[[list[Event]], Awaitable[None]]
"""Logs and sends events."""

_CLOSE_TIMEOUT = 5.0
"""Seconds that an interrupted backend has to close."""

_MAX_REPEATED_ROUNDS = 2
"""Consecutive rounds that may repeat the same hosted calls; then the model gets no further calls."""

_YIELD_INTERVAL = 64
"""Outputs after which other tasks run, even if the backend never waits."""


@dataclass(slots=True, eq=False)
class Generation:
    """The generation of one response, in one or more rounds of the backend and hosted tools.

    Args:
        backend: Generates the outputs.
        context: The resolved request.
        state_machine: Turns outputs into events.
        threads: Threads for synchronous backends.
        tool_threads: Threads for synchronous tools.
        scope: Entered around calls of the backend and of tools.

    Attributes:
        turn: The turn of the current round.
    """

    backend: Backend
    context: Context
    state_machine: StateMachine
    threads: ThreadLimiter
    tool_threads: ThreadLimiter
    scope: Scope
    turn: Turn = field(init=False)
    _emit: Emit = field(init=False)
    _thread: IteratorThread[Output] | None = field(default=None)

    def __post_init__(self) -> None:
        self.turn = self.context.turn

    async def admit(self) -> None:
        """Fit the turn to the model's window and let the backend admit it.

        Raises:
            ContextLengthExceeded: The turn does not fit.
            Exception: The backend refused the turn.
        """
        async with self.scope.async_scope():
            self.turn = await self._fit(self.turn)
            await self.backend.admit(self.turn)

    async def _fit(self, turn: Turn) -> Turn:
        return await fit_to_window(turn, self.context.model.context_window, self.backend.count_tokens)

    def stop(self) -> None:
        """Stop the backend's thread, if any, and mark the turn as cancelled; the caller cancels the task."""
        self.turn.cancelled = True
        if self._thread is not None:
            self._thread.stop()  # a shielded send can delay the task's cancellation

    async def run(self, emit: Emit) -> None:
        """Run rounds until the model answers or calls functions of the client.

        Args:
            emit: Logs and sends events; its exceptions end the generation.

        Raises:
            Exception: The backend or `emit` raised it.
        """
        self._emit = emit
        try:
            async with self.scope.async_scope():
                await self._run_rounds()
        finally:
            del self._emit  # a bound method of the run: this cycle would hold the input in memory

    async def _run_rounds(self) -> None:
        usage = None
        calls: set[tuple[str, str]] = set()
        repeated_rounds = 0
        while True:
            enforcer = Enforcer(self.turn, self.context.constraints, self.state_machine.feed, usage)
            item_count = len(self.state_machine.response["output"])
            await self._generate(enforcer.feed)
            enforcer.end()
            if not enforcer.hosted_calls:
                return
            await run_hosted_calls(
                enforcer.hosted_calls,
                self.turn,
                self.tool_threads,
                lambda item: self._emit(self.state_machine.feed(item)),
            )
            if enforcer.has_client_calls:
                return
            used_tokens = 0
            if enforcer.usage is not None:
                used_tokens = enforcer.usage.output_tokens - (usage.output_tokens if usage else 0)
            if self.turn.max_output_tokens is not None and used_tokens >= self.turn.max_output_tokens:
                await self._emit(self.state_machine.feed(Finish("max_output_tokens")))
                return
            usage = enforcer.usage
            previous, calls = calls, {(call.tool.name, "".join(call.pieces)) for call in enforcer.hosted_calls}
            repeated_rounds = repeated_rounds + 1 if calls <= previous else 0
            items = ITEMS.validate_python(self.state_machine.response["output"][item_count:])
            # Small models repeat the same call without end; without remaining calls they have to answer.
            spent_calls = enforcer.call_count if repeated_rounds < _MAX_REPEATED_ROUNDS else self.turn.max_tool_calls
            self.turn = await self._fit(_next_turn(self.turn, items, spent_calls or 0, used_tokens))

    async def _generate(self, feed: Feed) -> None:
        generate, turn = self.backend.generate, self.turn
        if _is_async(getattr(generate, "__func__", generate)):
            await self._consume(generate(turn), feed)
            return
        worker: IteratorThread[Output] = IteratorThread(lambda: generate(turn))
        await self._consume_thread(worker, feed)
        if worker.async_result is not None:
            await self._consume(worker.async_result, feed)

    async def _consume(self, outputs: Outputs, feed: Feed) -> None:
        if isinstance(outputs, Awaitable):
            outputs = await outputs
        if not isinstance(outputs, AsyncIterable):
            iterable = outputs
            await self._consume_thread(IteratorThread(lambda: iterable), feed)
            return
        count = 0
        try:
            async for output in outputs:
                await self._emit(feed(output))
                count += 1
                if count % _YIELD_INTERVAL == 0:
                    await anyio.lowlevel.checkpoint()
        except BaseException:
            await self._close(outputs)
            raise

    async def _close(self, outputs: AsyncIterable[Output]) -> None:
        close = getattr(outputs, "aclose", None)
        if close is None:
            return
        with anyio.move_on_after(_CLOSE_TIMEOUT, shield=True):
            try:
                await close()
            except Exception as error:
                logger.warning(
                    "response %s: the backend failed while it was closed", self.turn.response_id, exc_info=error
                )

    async def _consume_thread(self, worker: IteratorThread[Output], feed: Feed) -> None:
        self._thread = worker
        await worker.reserve(self.threads)
        async with open_task_group() as group:
            group.start_soon(worker.run)
            try:
                while batch := await worker.take():
                    await self._feed_batch(batch, feed)
            except BaseException:
                self.turn.cancelled = True
                raise
            finally:
                self._thread = None
                worker.stop()
                if not worker.is_done:
                    group.cancel_scope.cancel()
        # A stopped thread returns like a finished one: raise the cancellation here, if that is the reason.
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _feed_batch(self, batch: list[Output], feed: Feed) -> None:
        events: list[Event] = []
        try:
            for output in batch:
                events += feed(output)
        finally:
            # Also if an output is illegal: the state machine has numbered the events of the outputs before it.
            await self._emit(events)


@functools.lru_cache(maxsize=64)
def _is_async(generate: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(generate) or inspect.iscoroutinefunction(generate)


def _next_turn(turn: Turn, items: Sequence[Item], calls: int, used_tokens: int) -> Turn:
    """Return the turn after hosted calls: `tool_choice` is fulfilled, and limits are reduced by the amounts used."""
    choice = turn.tool_choice
    if isinstance(choice, AllowedTools):
        choice = choice.model_copy(update={"mode": "auto"})
    elif choice != "none":
        choice = "auto"
    return replace(
        turn,
        items=[*turn.items, *items],
        tool_choice=choice,
        max_tool_calls=None if turn.max_tool_calls is None else turn.max_tool_calls - calls,
        max_output_tokens=None if turn.max_output_tokens is None else turn.max_output_tokens - used_tokens,
        round=turn.round + 1,
    )
