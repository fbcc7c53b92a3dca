"""The life of one response: the backend's outputs through the machine, kept, then told."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import anyio
import anyio.lowlevel
from pydantic_core import from_json

from .._concurrency.tasks import is_cancellation
from .._concurrency.threads import ThreadLimiter
from ..backend import Backend
from ..context.builder import Context
from ..errors import APIError, ClientDisconnected, IllegalOutput, ModelError, ServerError, StoreError, error_from_code
from ..protocol.state_machine import TERMINAL, Event, StateMachine
from ..stores.protocol import Record
from .generation import Generation
from .hooks import CompletionHook, Scope
from .recorder import Recorder, RunSuperseded
from .registry import CLEANUP_TIMEOUT, SHUTTING_DOWN, RunRegistry

__all__ = ["Emit", "Run", "discard_events"]

logger = logging.getLogger("responses_kit")

Emit = Callable[[list[Event]], Awaitable[None]]
"""Takes events as they happen; returns once they are on their way."""

_UNDISTURBED_SECONDS: Final = 0.5
"""What is left, once a response is to end, for what must not be cut off in the middle: a tell, or the final save."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """One response in the making.

    Attributes:
        state_machine: Holds the response object.
        recorder: Keeps its record.
        scope: Entered around what the backend is asked.
        completion_hook: Hears of the response's end.
        registry: The runs that are not over; this one is among them from `create`, or `hold`, on.
        generate: False if the backend is not to be asked at all.
        error: Why the response failed, once it has.
    """

    backend: Backend
    context: Context
    state_machine: StateMachine
    recorder: Recorder
    threads: ThreadLimiter
    tool_threads: ThreadLimiter
    registry: RunRegistry
    scope: Scope = field(default_factory=Scope)
    completion_hook: CompletionHook = field(default_factory=CompletionHook)
    clock: Callable[[], float] = time.time
    generate: bool = True
    error: APIError | None = None
    _generation: Generation = field(init=False)
    _sink: Emit = field(init=False)
    _unsent: list[Event] = field(default_factory=list)
    _next: int = field(default=0)
    _finished: bool = field(default=False)
    _ending: Literal["", "stop", "cancel", "abandon"] = field(default="")
    _busy: bool = field(default=False)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __post_init__(self) -> None:
        self._sink = discard_events
        self._generation = Generation(
            self.backend, self.context, self.state_machine, self.threads, self.tool_threads, self.scope
        )

    @property
    def response(self) -> dict[str, Any]:
        """The response object as far as it has come."""
        return self.state_machine.response

    @property
    def owner(self) -> str:
        """Whose response it is."""
        return self.context.turn.owner

    @property
    def id(self) -> str:
        """The response's id."""
        return self.context.turn.response_id

    @property
    def key(self) -> tuple[str, str]:
        """Whose record it makes, and its id."""
        return self.owner, self.id

    @property
    def is_queued(self) -> bool:
        """Whether it waits for a worker."""
        return self.state_machine.state == "queued"

    @property
    def is_finished(self) -> bool:
        """Whether the response has ended."""
        return self.state_machine.state == "ended"

    def encoded(self) -> bytes:
        """The final response object as JSON, encoded once for the store and the client."""
        return self.recorder.encoded

    # The beginning.

    async def create(self) -> Record | None:
        """Has the turn admitted, and writes the record: the response exists before anybody hears of it.

        Returns:
            None; or the record of an earlier request with the same idempotency key, and this run is none.

        Raises:
            APIError: The backend refused the turn, or the server is shutting down.
            StoreError: The store could not take it.
        """
        self.registry.add(self)
        try:
            await self._admit()
            earlier = await self.recorder.create()
        except BaseException:
            if is_cancellation():
                await self._abort()
                with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True):
                    if await self.recorder.was_saved():  # the record had come to be, and others may have seen it
                        await self.completion_hook.notify(self.owner, self.response)
            self._leave()
            raise
        if earlier is None:
            self._take_lease()
        else:
            self._leave()
        return earlier

    async def enqueue(self, lease: float) -> Record:
        """Writes the record of a response that waits for a worker, which may be this run or another process's.

        Args:
            lease: Seconds since the epoch until which a worker has to begin.

        Returns:
            The record; or that of an earlier request with the same idempotency key, and this run is none.

        Raises:
            ServerError: The server is shutting down.
            StoreError: The store could not take it.
        """
        self.registry.check_open()
        queued = self.state_machine.queue()
        self._next = len(queued)
        return await self.recorder.queue(queued, lease)

    def requeue(self, record: Record) -> None:
        """Goes on from a record that `queue` has written, in whatever process it did."""
        self.recorder.requeue(record)
        self._next = len(self.state_machine.queue())

    def claim(self) -> None:
        """This process works on the response, or will.

        Raises:
            ServerError: The server is shutting down.
        """
        self.registry.add(self)
        self._take_lease()

    def _take_lease(self) -> None:
        if self.recorder.leases is not None:
            self.recorder.leases.add(self)

    def _leave(self) -> None:
        self.registry.discard(self)
        if self.recorder.leases is not None:
            self.recorder.leases.discard(self)

    async def _admit(self) -> None:
        if not self.generate:
            return
        try:
            await self._generation.admit()
        except APIError:
            raise
        except Exception as error:
            raise self._public(error) from error

    # The way.

    async def execute(self, tell: Emit, *, place: AbstractAsyncContextManager[Any] | None = None) -> None:
        """Generates to the end. Failures end up in the events and in `error`, never as exceptions.

        If the surrounding scope is cancelled, or `tell` raises anything, the backend is closed, the record
        says cancelled, and nothing more is told.

        Args:
            tell: Takes the events.
            place: Entered first, for as long as it takes, and left at the end; whoever waits there can be cancelled.
        """
        self._sink = tell
        try:
            with self._scope:
                if place is None:
                    await self._execute()
                else:
                    async with contextlib.AsyncExitStack() as stack:
                        await self._execute(functools.partial(stack.enter_async_context, place))
        finally:
            self._sink = discard_events  # what it tells may hold us
            try:
                if self.recorder.is_final_writer:
                    await self.completion_hook.notify(self.owner, self.response)
            finally:
                self._leave()

    async def complete(self) -> None:
        """Generates to the end and tells nobody.

        Raises:
            APIError: The response failed.
        """
        await self.execute(discard_events)
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: a cycle that would keep the whole input alive

    async def _execute(self, enter: Callable[[], Awaitable[Any]] | None = None) -> None:
        try:
            try:
                if enter is not None:
                    await enter()
                await self._begin()
                if self.generate:
                    await self._generation.run(self._emit)
                await self._emit(self.state_machine.close(self.clock()))
                await self._save(self.state_machine.ending())
            except (ClientDisconnected, RunSuperseded):
                raise
            except BaseException as error:
                # Of whatever kind: only what really comes from outside may leave here, or a backend could end its host.
                if isinstance(error, KeyboardInterrupt) or is_cancellation(error):
                    raise
                await self._fail(error)
            else:
                await self._send(self.state_machine.end())
        except ClientDisconnected:
            await self._abort()
        except RunSuperseded:
            await self._give_way()
        except BaseException as error:
            with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True), contextlib.suppress(ClientDisconnected):
                await self._end_early()
            if not isinstance(error, Exception):
                raise
            # A backend that failed on its way out; the cancellation itself comes up at the next wait.
            logger.warning("response %s: the backend failed while it was closed", self.id, exc_info=error)

    async def _begin(self) -> None:
        if not self.is_queued:
            await self._emit(self.state_machine.start())
            return
        self._unsent = started = self.state_machine.start()
        await self.recorder.claim(started)
        self._unsent = []
        self._next = started[-1]["sequence_number"] + 1
        await self._send(started)
        await self._admit()

    async def _emit(self, events: list[Event]) -> None:
        """Logs, where events are kept, and then tells."""
        if not events:
            return
        if self._ending:
            self._unsent = [*self._unsent, *events]
            await anyio.lowlevel.checkpoint_if_cancelled()  # before they are half told
        if self.recorder.events == "kept":
            self._unsent = events  # until it is sure that they are kept
            await self.recorder.append(events)
            self._unsent = []
        self._next = events[-1]["sequence_number"] + 1
        await self._send(events)

    async def _send(self, events: list[Event]) -> None:
        """Tells. Whoever does not take it in time, once the response is to end, is told no more at all."""
        if not events:
            return
        self._busy = True
        try:
            await _told(self._sink, events)
        except BaseException:
            self._sink = discard_events  # there would be a gap
            raise
        finally:
            self._busy = False
        if events[-1]["type"] in TERMINAL:
            self._finished = True
        elif self._ending and not self.recorder.is_closed:
            self._scope.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()

    # Endings.

    def cancel(self) -> None:
        """Ends the response as cancelled, as soon as its backend waits for something or yields; its client is told."""
        self._end("cancel")

    def abort(self) -> None:
        """Ends the response as cancelled, and tells nobody: its client has left."""
        self._end("abandon")

    def stop(self) -> None:
        """Ends the response as failed, since the server is going down; its client is told."""
        self._end("stop")

    def _end(self, ending: Literal["stop", "cancel", "abandon"]) -> None:
        if self.recorder.is_closed:
            return  # it has ended already, and shall be told so
        self._ending = self._ending or ending
        self._generation.stop()
        if self._busy and ending != "abandon":
            # What is cut off in the middle is neither done nor undone.
            self._scope.deadline = min(self._scope.deadline, anyio.current_time() + _UNDISTURBED_SECONDS)
        else:
            self._scope.cancel()

    async def _end_early(self) -> None:
        """Ends what was cancelled: by the API, since the server goes down, or with whatever is around us."""
        if self.recorder.is_closed:
            return
        heard = self._ending in ("stop", "cancel")
        try:
            if self.state_machine.state == "closed" and await self.recorder.was_saved():
                self.recorder.is_closed = self.recorder.is_final_writer = True
                if heard:
                    await self._send(self.state_machine.end())
            elif self.is_finished:
                await self._save_if_possible(self._unsent)
                if heard and not self._finished:
                    await self._send(self._unsent)
            elif self._ending == "stop":
                await self._fail(ServerError(SHUTTING_DOWN))
            elif self._ending == "cancel":
                if await self.recorder.is_taken():  # it is not asked to end: it was ended
                    raise RunSuperseded
                self._unsent = [*self._unsent, *self.state_machine.cancel()]
                await self._save_if_possible(self._unsent)
                await self._send(self._unsent)
            else:
                await self._abort()
        except RunSuperseded:
            await self._give_way()

    async def _save(self, events: list[Event]) -> None:
        self._busy = True
        try:
            await self.recorder.save(events)
        finally:
            self._busy = False
        if self._ending:
            self._scope.deadline = math.inf  # it has ended by itself, whoever wanted to end it meanwhile

    async def _save_if_possible(self, events: list[Event]) -> None:
        self._busy = True
        try:
            await self.recorder.save_best_effort(events)
        finally:
            self._busy = False

    async def _fail(self, error: BaseException) -> None:
        self.error = self._public(error).with_traceback(None)
        self._unsent = [*self._unsent, *self.state_machine.fail(self.error)]
        await self._save_if_possible(self._unsent)
        await self._send(self._unsent)

    async def _abort(self) -> None:
        self._generation.stop()
        if not self.is_finished:
            self._unsent = [*self._unsent, *self.state_machine.cancel()]
        with anyio.CancelScope(shield=True), contextlib.suppress(RunSuperseded):
            await self._save_if_possible(self._unsent)

    async def _give_way(self) -> None:
        """Somebody else ended the response, or works on it: what is told is what the record says."""
        assert self.recorder.repository is not None
        self._generation.stop()
        with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True), contextlib.suppress(ClientDisconnected):
            try:
                record = await self.recorder.repository.get(self.owner, self.id)
                if record is not None and record.cancelled:
                    record = await self.recorder.repository.end(self.owner, record)  # whosever it is
                if record is not None and not record.final:
                    if not self.recorder.is_claimed:
                        return  # it is another worker's
                    # The store came back without what it had taken: nothing fits on any more.
                    raise StoreError("The server's store has lost a part of the response.")
                events = await self._ending_of(record)
            except StoreError as error:
                self.error = error
                events = self._own_ending()
            await self._send(events)

    async def _ending_of(self, record: Record | None) -> list[Event]:
        """The rest of the events of a response that somebody else has ended, or deleted."""
        self.recorder.is_closed = True
        self.error = None
        if record is None:
            return self._own_ending()
        ended: dict[str, Any] = from_json(record.response)
        if ended["status"] == "failed":
            self.error = error_from_code(**ended["error"])
        events = await self.recorder.read_log(self._next)
        if events is None:
            return self._own_ending()
        self.recorder.encoded, self.state_machine.response = record.response, ended
        return events

    def _own_ending(self) -> list[Event]:
        if self.is_finished:
            return self._unsent
        return [
            *self._unsent,
            *(self.state_machine.cancel() if self.error is None else self.state_machine.fail(self.error)),
        ]

    def _public(self, error: BaseException) -> APIError:
        """What the client may know of an error; the rest goes to the log."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, IllegalOutput):
            logger.error("response %s: the backend's output is illegal: %s", self.id, error)
        else:
            logger.error("response %s: the backend failed", self.id, exc_info=error)
        return ModelError("The model failed to answer. The server's log has the reason.")


async def _told(tell: Emit, events: list[Event]) -> None:
    """Tells; whatever goes wrong there is the reader's trouble and not the backend's."""
    try:
        await tell(events)
    except ClientDisconnected:
        raise
    except Exception as error:
        logger.warning("a client could not be told", exc_info=error)
        raise ClientDisconnected from error


async def discard_events(events: list[Event]) -> None:
    """A `Emit` for what nobody listens to."""
