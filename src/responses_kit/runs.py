"""The life of one response: the backend's outputs through the machine, kept, then told."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
import weakref
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel

from .backend import Backend
from .companion import is_cancelled, unwrapped_group
from .context import Context
from .control import Control
from .encoding import encode
from .errors import APIError, ClientGone, IllegalOutput, ModelError, ServerError, StoreError
from .machine import Event, Machine
from .outputs import Finish, Output, Outputs
from .schema.items import ITEMS, Item
from .schema.tools import AllowedTools
from .stores import Record, ResponseStore, stored
from .tools import answer
from .truncation import fit
from .turn import Turn
from .worker import Worker

__all__ = ["OpenRuns", "Run", "Tell"]

logger = logging.getLogger("responses_kit")

Tell = Callable[[list[Event]], Awaitable[None]]
"""Takes events as they happen; returns once they are on their way."""

Feed = Callable[[Output], list[Event]]
"""Takes an output; returns the events that it makes."""

_CLEANUP_SECONDS = 5.0
"""What a cancelled run may still spend on closing its backend and its record."""

_SHUTTING_DOWN = "The server is shutting down. Try again."

_MOST_REPEATS = 2
"""How often a model may make the very same calls again, round after round."""

_BREATH = 64
"""Outputs after which a run lets others have the event loop, even if its backend never waits."""


class OpenRuns:
    """The runs that are not over, to be stopped together. Once stopped, it takes no more."""

    def __init__(self) -> None:
        # Weak, for a run that its host drops before it is executed never says that it is over.
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._empty: anyio.Event | None = None

    def add(self, run: Run) -> None:
        """A run begins.

        Raises:
            ServerError: All runs were stopped.
        """
        self.check()
        self._runs.add(run)

    def check(self) -> None:
        """Whether there may be more.

        Raises:
            ServerError: All runs were stopped.
        """
        if self._empty is not None:
            raise ServerError(_SHUTTING_DOWN)

    def discard(self, run: Run) -> None:
        """A run is over, and its record is final."""
        self._runs.discard(run)
        if self._empty is not None and not self._runs:
            self._empty.set()

    async def stop(self) -> None:
        """Stops all runs and waits for their end, but not for ever."""
        if self._empty is None:
            self._empty = anyio.Event()
        for run in list(self._runs):
            run.stop()
        with anyio.move_on_after(2 * _CLEANUP_SECONDS):
            if self._runs:
                await self._empty.wait()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """One response in the making.

    Attributes:
        machine: Holds the response object.
        turn: What the backend is given, or was given last.
        error: Why the response failed, once it has.
        open: The runs that are not over; this one is among them from `create` on.
    """

    backend: Backend
    context: Context
    machine: Machine
    store: ResponseStore | None
    threads: Callable[[], anyio.CapacityLimiter]
    tool_threads: Callable[[], anyio.CapacityLimiter]
    open: OpenRuns
    clock: Callable[[], float] = time.time
    turn: Turn = field(init=False)
    error: APIError | None = None
    _input: bytes = field(default=b"")
    _encoded: bytes = field(default=b"")
    _kept: bool = field(default=False)
    _stopping: bool = field(default=False)
    _worker: Worker[Output] | None = field(default=None)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __post_init__(self) -> None:
        self.turn = self.context.turn

    @property
    def response(self) -> dict[str, Any]:
        """The response object as far as it has come."""
        return self.machine.response

    def encoded(self) -> bytes:
        """The final response object as JSON, encoded once for the store and the client."""
        return self._encoded

    async def create(self) -> None:
        """Has the turn admitted, and writes the record: the response exists before anybody hears of it.

        Raises:
            APIError: The backend refused the turn, or the server is shutting down.
            StoreError: The store could not take it.
        """
        self.open.add(self)
        try:
            await self._admit()
            if self.store is not None:
                self._input = ITEMS.dump_json(self.context.input)
                record = self._record(encode(self.response), final=False)
                await stored(self.store.create(self.turn.owner, record))
        except BaseException:
            if is_cancelled():
                await self._cancel()
            self.open.discard(self)
            raise

    async def _admit(self) -> None:
        try:
            self.turn = await self._fit(self.turn)
            await self.backend.admit(self.turn)
        except APIError:
            raise
        except Exception as error:
            raise self._public(error) from error

    async def _fit(self, turn: Turn) -> Turn:
        return await fit(turn, self.context.model.context_window, self.backend.count_tokens)

    async def execute(self, tell: Tell) -> None:
        """Generates to the end. Failures end up in the events and in `error`, never as exceptions.

        If the surrounding scope is cancelled, or `tell` raises anything, the backend is closed, the record
        says cancelled, and nothing more is told.
        """
        try:
            with self._scope:
                await self._execute(tell)
        finally:
            self.open.discard(self)

    def cancel(self) -> None:
        """Ends the response as cancelled, as soon as its backend waits for something or yields."""
        self.turn.cancelled = True
        if self._worker is not None:
            self._worker.stop()  # at once, for whoever is told may be in a wait that nothing can cancel
        self._scope.cancel()

    def stop(self) -> None:
        """Ends the response as failed, since the server is going down; its client is told."""
        self._stopping = True
        self.cancel()

    async def _execute(self, tell: Tell) -> None:
        try:
            try:
                await _tell(tell, self.machine.start())
                await self._generate(tell)
                await _tell(tell, self.machine.close(self.clock()))
                await self._save()
            except ClientGone:
                raise
            except BaseException as error:
                # Of whatever kind: only what really comes from outside may leave here, or a backend could end its host.
                if isinstance(error, KeyboardInterrupt) or is_cancelled(error):
                    raise
                await self._fail(error, tell)
            else:
                await _tell(tell, self.machine.end())
        except ClientGone:
            await self._cancel()
        except BaseException as error:
            if self._stopping and self.machine.state != "ended":
                with anyio.move_on_after(_CLEANUP_SECONDS, shield=True), contextlib.suppress(ClientGone):
                    await self._fail(ServerError(_SHUTTING_DOWN), tell)
            else:
                await self._cancel()
            if not isinstance(error, Exception):
                raise
            # A backend that failed on its way out; the cancellation itself comes up at the next wait.
            logger.warning("response %s: the backend failed while it was closed", self.response["id"], exc_info=error)

    async def collect(self) -> None:
        """Generates to the end and tells nobody.

        Raises:
            APIError: The response failed.
        """
        await self.execute(_nobody)
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: a cycle that would keep the whole input alive

    # The backend.

    async def _generate(self, tell: Tell) -> None:
        """Asks the model, answers its calls of hosted tools, and asks again, until the rest is for the client."""
        usage = None
        asked: set[tuple[str, str]] = set()
        repeated = 0
        while True:
            control = Control(self.turn, self.context.demands, self.machine.feed, usage)
            known = len(self.response["output"])
            await self._sample(control.feed, tell)
            control.end()
            if not control.hosted:
                return
            await answer(
                control.hosted, self.turn, self.tool_threads(), lambda item: _tell(tell, self.machine.feed(item))
            )
            if control.handed_over:
                return
            used = 0 if control.usage is None else control.usage.output_tokens - (usage.output_tokens if usage else 0)
            if self.turn.max_output_tokens is not None and used >= self.turn.max_output_tokens:
                await _tell(tell, self.machine.feed(Finish("max_output_tokens")))
                return
            usage = control.usage
            before, asked = asked, {(call.tool.name, "".join(call.pieces)) for call in control.hosted}
            repeated = repeated + 1 if asked <= before else 0
            items = ITEMS.validate_python(self.response["output"][known:])
            # Small models run in circles. One that gets the same answer again and again has to speak at last.
            made = control.made if repeated < _MOST_REPEATS else self.turn.max_tool_calls
            self.turn = await self._fit(_next_round(self.turn, items, made or 0, used))

    async def _sample(self, feed: Feed, tell: Tell) -> None:
        generate, turn = self.backend.generate, self.turn
        if _is_async(getattr(generate, "__func__", generate)):
            await self._drain(generate(turn), feed, tell)
            return
        worker: Worker[Output] = Worker(lambda: generate(turn))
        await self._drain_worker(worker, feed, tell)
        if worker.handed_back is not None:
            await self._drain(worker.handed_back, feed, tell)

    async def _drain(self, outputs: Outputs, feed: Feed, tell: Tell) -> None:
        if isinstance(outputs, Awaitable):
            outputs = await outputs
        if not isinstance(outputs, AsyncIterable):
            found = outputs
            await self._drain_worker(Worker(lambda: found), feed, tell)
            return
        count = 0
        try:
            async for output in outputs:
                await _tell(tell, feed(output))
                count += 1
                if count % _BREATH == 0:
                    await anyio.lowlevel.checkpoint()
        except BaseException:
            await self._close(outputs)
            raise

    async def _close(self, outputs: AsyncIterable[Output]) -> None:
        close = getattr(outputs, "aclose", None)
        if close is None:
            return
        with anyio.move_on_after(_CLEANUP_SECONDS, shield=True):
            try:
                await close()
            except Exception as error:
                logger.warning(
                    "response %s: the backend failed while it was closed", self.response["id"], exc_info=error
                )

    async def _drain_worker(self, worker: Worker[Output], feed: Feed, tell: Tell) -> None:
        self._worker = worker
        await worker.seat(self.threads())
        async with unwrapped_group() as group:
            group.start_soon(worker.run)
            try:
                while batch := await worker.take():
                    await _take(batch, feed, tell)
            except BaseException:
                self.turn.cancelled = True
                raise
            finally:
                self._worker = None
                worker.stop()
                if not worker.done:  # a thread that is done need not be abandoned
                    group.cancel_scope.cancel()
        # A worker that was stopped comes to an end like any other; it must not pass for one.
        await anyio.lowlevel.checkpoint_if_cancelled()

    # Endings.

    async def _fail(self, error: BaseException, tell: Tell) -> None:
        self.error = self._public(error).with_traceback(None)
        events = self.machine.fail(self.error)
        await self._keep(shield=False)
        await _tell(tell, events)

    async def _cancel(self) -> None:
        self.turn.cancelled = True
        if self.machine.state != "ended":
            self.machine.cancel()
        await self._keep(shield=True)

    async def _keep(self, *, shield: bool) -> None:
        """Saves an unhappy ending as well as it can; a record that can't be made final goes altogether."""
        if self._kept or self.store is None:
            return
        with anyio.move_on_after(_CLEANUP_SECONDS, shield=shield) as saving:
            try:
                await self._save()
            except StoreError:
                try:
                    await self.store.delete(self.turn.owner, self.response["id"])
                except Exception as error:
                    logger.error("response %s could not be kept", self.response["id"], exc_info=error)
        if saving.cancelled_caught:
            logger.error("response %s could not be kept: the store does not answer", self.response["id"])

    def _public(self, error: BaseException) -> APIError:
        """What the client may know of an error; the rest goes to the log."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, IllegalOutput):
            logger.error("response %s: the backend's output is illegal: %s", self.response["id"], error)
        else:
            logger.error("response %s: the backend failed", self.response["id"], exc_info=error)
        return ModelError("The model failed to answer. The server's log has the reason.")

    async def _save(self) -> None:
        self._encoded = encode(self.response)
        if self.store is not None:
            await stored(self.store.update(self.turn.owner, self._record(self._encoded, final=True)))
        self._kept = True

    def _record(self, response: bytes, *, final: bool) -> Record:
        return Record(
            id=self.response["id"],
            previous_id=self.response["previous_response_id"],
            input=self._input,
            response=response,
            item_ids=tuple(_ids(self.context.input, self.response["output"])),
            final=final,
        )


def _ids(given: Iterable[Any], output: Iterable[dict[str, Any]]) -> Iterable[str]:
    yield from (item.id for item in given)
    yield from (item["id"] for item in output)


@functools.lru_cache(maxsize=64)
def _is_async(generate: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(generate) or inspect.iscoroutinefunction(generate)


def _next_round(turn: Turn, items: Sequence[Item], calls: int, used: int) -> Turn:
    """The turn after hosted tools were called: what was demanded first is done, and what was spent is spent."""
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
        max_output_tokens=None if turn.max_output_tokens is None else turn.max_output_tokens - used,
        round=turn.round + 1,
    )


async def _take(batch: list[Output], feed: Feed, tell: Tell) -> None:
    events: list[Event] = []
    try:
        for output in batch:
            events += feed(output)
    finally:
        # Also what was made before an illegal output has to be told: the machine has counted it.
        await _tell(tell, events)


async def _tell(tell: Tell, events: list[Event]) -> None:
    """Tells; whatever goes wrong there is the reader's trouble and not the backend's."""
    if not events:
        return
    try:
        await tell(events)
    except ClientGone:
        raise
    except Exception as error:
        logger.warning("a client could not be told", exc_info=error)
        raise ClientGone from error


async def _nobody(events: list[Event]) -> None:
    pass
