"""Event streams of stored responses, resumable at any event."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import anyio
import anyio.lowlevel
from pydantic_core import from_json

from ..errors import APIError, EventsUnavailable, StoreError, error_from_code
from ..protocol.ids import new_id
from ..protocol.recovery import RecoveredStateMachine, recover
from ..protocol.sse import decode_events, encode_sse
from ..protocol.state_machine import TERMINAL_EVENT_TYPES, Event
from ..protocol.synthesis import synthesize_events
from ..stores.protocol import Log, Record, call_store
from .repository import Repository, ShuttingDown, encode_log, response_not_found

__all__ = ["EventFollower"]

_STORE_RETRY_DELAYS: Final = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after each consecutive store failure; one more failure ends the stream."""


class EventFollower:
    """Reads the events of one response after a given event: first the logged events, then new ones as they arrive.

    Attributes:
        is_idle: Whether no events are available yet, so that the first piece may take a while.
        error: Why the next events are not from the log: the server is shutting down, or the log, the response or the
            store is gone. They only end the stream; the response may still be generated. None before that.
        is_complete: Whether the events that follow `error` are a stream that builds the final response by itself.
    """

    def __init__(self, repository: Repository, owner: str, record: Record, after: int, *, is_idle: bool) -> None:
        self._repository, self._owner, self._record, self._after = repository, owner, record, after
        self.is_idle = is_idle
        self.error: APIError | None = None
        self.is_complete = False

    @classmethod
    async def open(
        cls, repository: Repository, owner: str, response_id: str, after: int | None = None, *, synthesize: bool = False
    ) -> EventFollower:
        """Return a follower of a response's events.

        Args:
            repository: Holds the response.
            owner: The owner of the response.
            response_id: The response.
            after: `sequence_number` of the last event that the client has; None to start at the first.
            synthesize: Whether a final response with an expired log gets events that build the same response.

        Raises:
            NotFound: This owner has no such response.
            EventsUnavailable: The events are not logged, or the log has expired.
            StoreError: The store failed.
        """
        record = await repository.get(owner, response_id)
        if record is None:
            raise response_not_found()
        is_idle = False
        if record.events == "logged":
            pieces = await call_store(repository.store.events(owner, response_id, -1 if after is None else after))
            is_idle = after is not None and pieces is not None and not pieces and not record.final
            if pieces is None:
                if not synthesize or not record.final:
                    raise EventsUnavailable("The event log of this response has expired. GET it without 'stream'.")
                record = replace(record, events="none")
        elif not record.final:
            raise EventsUnavailable("The events of this response are not logged. GET it without 'stream'.")
        elif record.events == "streamed" and after is not None:
            raise EventsUnavailable(
                "The events of this response were not logged. GET it without 'stream'.", param="starting_after"
            )
        return cls(repository, owner, record, -1 if after is None else after, is_idle=is_idle)

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the events as bytes, in pieces of whole server-sent events, until the response has ended.

        API and store errors are not raised: they become the last events of the stream; see `error`.
        """
        if self._record.events != "logged":
            # Clients have no other events of such a response, so positions refer to the synthesized ones.
            events = synthesize_events(from_json(self._record.response))
            yield b"".join(encode_sse(event) for event in events if event["sequence_number"] > self._after)
            return
        # Replays the log, so that the stream can get a legal ending if the log becomes unavailable.
        state_machine = None if self._record.final else recover(from_json(self._record.response), [], new_id=new_id)
        last_read = self._after if state_machine is None else -1
        failures = 0
        while True:
            try:
                async with aclosing(self._repository.watch(self._owner, self._record.id)) as snapshots:
                    async for record, reset_interval in snapshots:
                        self._record = record
                        pieces = await call_store(self._repository.store.events(self._owner, record.id, last_read))
                        if pieces is None:
                            raise EventsUnavailable("The event log of this response has expired.")
                        failures = 0
                        for piece in pieces:
                            reset_interval()
                            is_last = _has_terminal_event(piece)
                            if state_machine is not None and not is_last:
                                state_machine.replay(decode_events(_slice_log(piece, last_read).data))
                                await anyio.lowlevel.checkpoint()  # a long log must not block the event loop
                            if piece.end - 1 > self._after:
                                yield _slice_log(piece, max(last_read, self._after)).data
                                self._after = piece.end - 1
                            last_read = piece.end - 1
                            if is_last:
                                return
                        if record.final and state_machine is None and not pieces:
                            return
                        if record.final:  # saved without the last events; see `Repository.end`
                            ended = from_json(record.response)["error"]
                            raise (
                                error_from_code(**ended)
                                if ended
                                else EventsUnavailable("The last events were not logged.")
                            )
                raise response_not_found()
            except StoreError as error:
                if failures == len(_STORE_RETRY_DELAYS):
                    yield encode_log(self._synthesize_ending(state_machine, error)).data
                    return
                await anyio.sleep(_STORE_RETRY_DELAYS[failures])
                failures += 1
            except APIError as error:
                if isinstance(error, ShuttingDown):
                    # Another process may still generate the response: end the stream without a terminal event.
                    self.error = error
                    yield encode_sse({"type": "error", "sequence_number": self._after + 1, "error": error.payload()})
                else:
                    yield encode_log(self._synthesize_ending(state_machine, error)).data
                return

    def _synthesize_ending(self, state_machine: RecoveredStateMachine | None, error: APIError) -> list[Event]:
        """Return events that end the stream when the logged ones are unavailable."""
        self.error = error
        response = from_json(self._record.response)
        if self._after < 0 and self._record.final:
            self.is_complete = True
            return synthesize_events(response)
        if state_machine is not None and state_machine.next_sequence_number > self._after:
            return state_machine.fail(error)
        # The open items and parts are unknown, because the log was not read up to the client's last event.
        failed = response | {"status": "failed", "error": {"code": error.code, "message": error.message}}
        return [
            {"type": "error", "sequence_number": self._after + 1, "error": error.payload()},
            {"type": "response.failed", "sequence_number": self._after + 2, "response": failed},
        ]


def _has_terminal_event(piece: Log) -> bool:
    # JSON escapes line ends, so the text after the last blank line is the last event, and its first line names it.
    head = piece.data[:-2].rpartition(b"\n\n")[2].partition(b"\n")[0]
    return head.removeprefix(b"event: ").decode() in TERMINAL_EVENT_TYPES


def _slice_log(piece: Log, after: int) -> Log:
    """Return the events of a piece that follow the one with this `sequence_number`."""
    skipped = after + 1 - piece.start
    if skipped <= 0:
        return piece
    data = b"".join(event + b"\n\n" for event in piece.data.split(b"\n\n")[skipped:-1])
    return Log(after + 1, piece.count - skipped, data)
