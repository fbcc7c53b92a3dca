"""The run of one response: generate outputs, turn them into events, log them and send them."""

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
from ..protocol.state_machine import TERMINAL_EVENT_TYPES, Event, StateMachine
from ..stores.protocol import Record
from .generation import Generation
from .hooks import CompletionHook, Scope
from .recorder import Recorder, RunSuperseded
from .registry import CLEANUP_TIMEOUT, SHUTTING_DOWN, RunRegistry

__all__ = ["Emit", "Run", "discard_events"]

logger = logging.getLogger("responses_kit")

Emit = Callable[[list[Event]], Awaitable[None]]
"""Sends events to a client; returns once they are sent or buffered by the transport."""

_IN_FLIGHT_TIMEOUT: Final = 0.5
"""Seconds for a send or the final save in progress to complete once a cancel or stop was requested.

An interrupted send leaves a partial event on the connection. An interrupted save leaves the record's state unknown.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Run:
    """The run of one response, from its creation to its final record.

    Attributes:
        backend: Generates the outputs.
        context: The resolved request.
        state_machine: Holds the response object and creates the events.
        recorder: Writes the record and the event log.
        threads: Threads for synchronous backends.
        tool_threads: Threads for synchronous tools.
        registry: The unfinished runs of this server; `create` and `register` add this one.
        scope: Entered around calls of the backend and of tools.
        completion_hook: Notified when this run ends the response, even if no record is stored.
        clock: Seconds since the epoch.
        generate: Whether the backend is asked; False completes the response without it.
        error: The error of a failed response.
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
    _emit_to_client: Emit = field(init=False)
    _unsent: list[Event] = field(default_factory=list)
    _next_sequence_number: int = field(default=0)
    _is_terminal_event_sent: bool = field(default=False)
    _end_reason: Literal["", "stop", "cancel", "abort"] = field(default="")
    _is_in_flight: bool = field(default=False)
    _cancel_scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __post_init__(self) -> None:
        self._emit_to_client = discard_events
        self._generation = Generation(
            self.backend, self.context, self.state_machine, self.threads, self.tool_threads, self.scope
        )

    @property
    def response(self) -> dict[str, Any]:
        """The current response object."""
        return self.state_machine.response

    @property
    def owner(self) -> str:
        """The owner of the response."""
        return self.context.turn.owner

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.context.turn.response_id

    @property
    def key(self) -> tuple[str, str]:
        """The owner and the id of the response."""
        return self.owner, self.id

    @property
    def is_queued(self) -> bool:
        """Whether the response waits for a worker."""
        return self.state_machine.state == "queued"

    @property
    def is_finished(self) -> bool:
        """Whether the response has ended."""
        return self.state_machine.state == "ended"

    def encoded(self) -> bytes:
        """Return the final response object as JSON, encoded once for the store and the client."""
        return self.recorder.encoded

    # Creation.

    async def create(self) -> Record | None:
        """Admit the turn and create the record, before the client learns the response's id.

        Returns:
            None, or the record of an earlier request with the same idempotency key. This run is unusable then.

        Raises:
            APIError: The backend refused the turn, or the server is shutting down.
            StoreError: The record could not be created.
        """
        self.registry.add(self)
        try:
            await self._admit()
            earlier = await self.recorder.create()
        except BaseException:
            if is_cancellation():
                await self._abort()
                with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True):
                    if await self.recorder.was_saved():  # the record was created and may have been read
                        await self.completion_hook.notify(self.owner, self.response)
            self._release()
            raise
        if earlier is None:
            self._hold_lease()
        else:
            self._release()
        return earlier

    async def enqueue(self, lease: float) -> Record:
        """Create the record of a response that waits for a worker, in this process or another one.

        Args:
            lease: Seconds since the epoch until which a worker must claim the response.

        Returns:
            The record, or that of an earlier request with the same idempotency key. This run is unusable then.

        Raises:
            ServerError: The server is shutting down.
            StoreError: The record could not be created.
        """
        self.registry.check_open()
        queued = self.state_machine.queue()
        self._next_sequence_number = len(queued)
        return await self.recorder.queue(queued, lease)

    def restore_queued(self, record: Record) -> None:
        """Restore the state that `enqueue` left, from a record that any process may have created."""
        self.recorder.restore_queued(record)
        self._next_sequence_number = len(self.state_machine.queue())

    def register(self) -> None:
        """Register the run and its lease in this process.

        Raises:
            ServerError: The server is shutting down.
        """
        self.registry.add(self)
        self._hold_lease()

    def _hold_lease(self) -> None:
        if self.recorder.leases is not None:
            self.recorder.leases.add(self)

    def _release(self) -> None:
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
            raise self._to_api_error(error) from error

    # Execution.

    async def execute(self, emit: Emit, *, slot: AbstractAsyncContextManager[Any] | None = None) -> None:
        """Generate the response and emit its events.

        Failures become events and `error`; they are not raised. If the surrounding scope is cancelled or `emit` raises,
        the backend is closed, the response is saved as cancelled, and no further events are emitted.

        Args:
            emit: Sends the events.
            slot: Entered before the response starts and left after it has ended. The run can be cancelled while it
                waits for the slot.
        """
        self._emit_to_client = emit
        try:
            with self._cancel_scope:
                if slot is None:
                    await self._execute()
                else:
                    async with contextlib.AsyncExitStack() as stack:
                        await self._execute(functools.partial(stack.enter_async_context, slot))
        finally:
            self._emit_to_client = discard_events  # breaks a reference cycle if `emit` refers to this run
            try:
                if self.recorder.is_final_writer:
                    await self.completion_hook.notify(self.owner, self.response)
            finally:
                self._release()

    async def complete(self) -> None:
        """Generate the response without emitting events.

        Raises:
            APIError: The response failed.
        """
        await self.execute(discard_events)
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame, and this cycle would hold the input in memory

    async def _execute(self, enter: Callable[[], Awaitable[Any]] | None = None) -> None:
        try:
            try:
                if enter is not None:
                    await enter()
                await self._start()
                if self.generate:
                    await self._generation.run(self._emit)
                await self._emit(self.state_machine.close(self.clock()))
                await self._save(self.state_machine.preview_end())
            except (ClientDisconnected, RunSuperseded):
                raise
            except BaseException as error:
                # Only KeyboardInterrupt and real cancellations propagate; a backend's SystemExit must not.
                if isinstance(error, KeyboardInterrupt) or is_cancellation(error):
                    raise
                await self._fail(error)
            else:
                await self._send(self.state_machine.end())
        except ClientDisconnected:
            await self._abort()
        except RunSuperseded:
            await self._end_superseded()
        except BaseException as error:
            with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True), contextlib.suppress(ClientDisconnected):
                await self._end_interrupted()
            if not isinstance(error, Exception):
                raise
            # The backend replaced the cancellation by its own error; the next checkpoint raises the cancellation again.
            logger.warning("response %s: the backend failed while it was closed", self.id, exc_info=error)

    async def _start(self) -> None:
        if not self.is_queued:
            await self._emit(self.state_machine.start())
            return
        self._unsent = started = self.state_machine.start()
        await self.recorder.claim(started)
        self._unsent = []
        self._next_sequence_number = started[-1]["sequence_number"] + 1
        await self._send(started)
        await self._admit()

    async def _emit(self, events: list[Event]) -> None:
        """Append events to the log, if the response has one, and then send them."""
        if not events:
            return
        if self._end_reason:
            self._unsent = [*self._unsent, *events]
            await anyio.lowlevel.checkpoint_if_cancelled()  # otherwise the send could be interrupted halfway
        if self.recorder.events == "logged":
            self._unsent = events  # until the append is confirmed
            await self.recorder.append(events)
            self._unsent = []
        self._next_sequence_number = events[-1]["sequence_number"] + 1
        await self._send(events)

    async def _send(self, events: list[Event]) -> None:
        """Send events to the client; after a failed or interrupted send, send nothing more."""
        if not events:
            return
        self._is_in_flight = True
        try:
            await _send_to_client(self._emit_to_client, events)
        except BaseException:
            self._emit_to_client = discard_events  # later events would leave a gap in the stream
            raise
        finally:
            self._is_in_flight = False
        if events[-1]["type"] in TERMINAL_EVENT_TYPES:
            self._is_terminal_event_sent = True
        elif self._end_reason and not self.recorder.is_closed:
            self._cancel_scope.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()

    # Endings.

    def cancel(self) -> None:
        """End the response as cancelled at the backend's next wait or output, and send the terminal event."""
        self._request_end("cancel")

    def abort(self) -> None:
        """End the response as cancelled without sending the terminal event, because the client has left."""
        self._request_end("abort")

    def stop(self) -> None:
        """End the response as failed because the server is shutting down, and send the terminal event to the client."""
        self._request_end("stop")

    def _request_end(self, reason: Literal["stop", "cancel", "abort"]) -> None:
        if self.recorder.is_closed:
            return  # it has ended on its own, and the client still gets its terminal event
        self._end_reason = self._end_reason or reason
        self._generation.stop()
        if self._is_in_flight and reason != "abort":
            # An interrupted send or save is neither done nor undone; see _IN_FLIGHT_TIMEOUT.
            self._cancel_scope.deadline = min(self._cancel_scope.deadline, anyio.current_time() + _IN_FLIGHT_TIMEOUT)
        else:
            self._cancel_scope.cancel()

    async def _end_interrupted(self) -> None:
        """End a run that was interrupted by a cancel request, by the shutdown, or by the surrounding scope."""
        if self.recorder.is_closed:
            return
        is_client_waiting = self._end_reason in ("stop", "cancel")
        try:
            if self.state_machine.state == "closed" and await self.recorder.was_saved():
                self.recorder.is_closed = self.recorder.is_final_writer = True
                if is_client_waiting:
                    await self._send(self.state_machine.end())
            elif self.is_finished:
                await self._save_if_possible(self._unsent)
                if is_client_waiting and not self._is_terminal_event_sent:
                    await self._send(self._unsent)
            elif self._end_reason == "stop":
                await self._fail(ServerError(SHUTTING_DOWN))
            elif self._end_reason == "cancel":
                if (
                    await self.recorder.is_ended_elsewhere()
                ):  # LeaseRenewer also calls `cancel` when another process has ended it
                    raise RunSuperseded
                self._unsent = [*self._unsent, *self.state_machine.cancel()]
                await self._save_if_possible(self._unsent)
                await self._send(self._unsent)
            else:
                await self._abort()
        except RunSuperseded:
            await self._end_superseded()

    async def _save(self, events: list[Event]) -> None:
        self._is_in_flight = True
        try:
            await self.recorder.save(events)
        finally:
            self._is_in_flight = False
        if self._end_reason:
            self._cancel_scope.deadline = math.inf  # it has finished on its own: send the terminal event in full

    async def _save_if_possible(self, events: list[Event]) -> None:
        self._is_in_flight = True
        try:
            await self.recorder.save_best_effort(events)
        finally:
            self._is_in_flight = False

    async def _fail(self, error: BaseException) -> None:
        self.error = self._to_api_error(error).with_traceback(None)
        self._unsent = [*self._unsent, *self.state_machine.fail(self.error)]
        await self._save_if_possible(self._unsent)
        await self._send(self._unsent)

    async def _abort(self) -> None:
        self._generation.stop()
        if not self.is_finished:
            self._unsent = [*self._unsent, *self.state_machine.cancel()]
        with anyio.CancelScope(shield=True), contextlib.suppress(RunSuperseded):
            await self._save_if_possible(self._unsent)

    async def _end_superseded(self) -> None:
        """Send the remaining events of a response that another process has ended or deleted.

        Nothing is sent if another worker has claimed the response.
        """
        assert self.recorder.repository is not None
        self._generation.stop()
        with anyio.move_on_after(CLEANUP_TIMEOUT, shield=True), contextlib.suppress(ClientDisconnected):
            try:
                record = await self.recorder.repository.get(self.owner, self.id)
                if record is not None and record.cancelled:
                    record = await self.recorder.repository.end(self.owner, record)
                if record is not None and not record.final:
                    if not self.recorder.is_claimed:
                        return  # another worker generates it
                    # The store lost acknowledged writes, so further appends do not continue its log.
                    raise StoreError("The server's store has lost part of the response.")
                events = await self._remaining_events(record)
            except StoreError as error:
                self.error = error
                events = self._closing_events()
            await self._send(events)

    async def _remaining_events(self, record: Record | None) -> list[Event]:
        """Return the unsent events of a response that another process has ended or deleted (record is None)."""
        self.recorder.is_closed = True
        self.error = None
        if record is None:
            return self._closing_events()
        ended: dict[str, Any] = from_json(record.response)
        if ended["status"] == "failed":
            self.error = error_from_code(**ended["error"])
        events = await self.recorder.read_log(self._next_sequence_number)
        if events is None:
            return self._closing_events()
        self.recorder.encoded, self.state_machine.response = record.response, ended
        return events

    def _closing_events(self) -> list[Event]:
        if self.is_finished:
            return self._unsent
        return [
            *self._unsent,
            *(self.state_machine.cancel() if self.error is None else self.state_machine.fail(self.error)),
        ]

    def _to_api_error(self, error: BaseException) -> APIError:
        """Return the error for the client, and log details that the client must not see."""
        if isinstance(error, APIError):
            return error
        if isinstance(error, IllegalOutput):
            logger.error("response %s: the backend's output is illegal: %s", self.id, error)
        else:
            logger.error("response %s: the backend failed", self.id, exc_info=error)
        return ModelError("The model failed to answer. The server's log has the reason.")


async def _send_to_client(emit: Emit, events: list[Event]) -> None:
    """Send events; raise any failure as `ClientDisconnected`, so that it is not taken for the backend's."""
    try:
        await emit(events)
    except ClientDisconnected:
        raise
    except Exception as error:
        logger.warning("sending events to a client failed", exc_info=error)
        raise ClientDisconnected from error


async def discard_events(events: list[Event]) -> None:
    """Discard events; an `Emit` for runs without a client."""
