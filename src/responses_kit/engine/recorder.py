"""The record and the event log of one response."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from secrets import randbelow
from typing import Any, Final, Literal

import anyio

from ..context.builder import Context
from ..errors import StoreError
from ..protocol.sse import decode_events, encode_json
from ..protocol.state_machine import Event, StateMachine
from ..schema.items import ITEMS
from ..stores.protocol import Log, Record, call_store
from .leases import LeaseRenewer
from .registry import CLEANUP_TIMEOUT
from .repository import Repository, encode_log

__all__ = ["Recorder", "RunSuperseded"]

logger = logging.getLogger("responses_kit")

_CLAIM_RETRY_DELAYS: Final = (0.1, 0.5, 1.0)
"""Seconds after each failed attempt to claim a queued response; then the claim fails."""

_MAX_LOG_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one response's log; longer responses fail."""


class RunSuperseded(Exception):
    """The run can no longer write the record.

    The record was deleted, another process has ended or claimed it, its log refused an append, or claiming it failed
    repeatedly.
    """


@dataclass(slots=True, eq=False)
class Recorder:
    """Writes the record and the event log of one response.

    Attributes:
        context: The resolved request.
        state_machine: Holds the response object.
        repository: Holds the record; None if the response is not stored.
        leases: Renews the record's lease; None if no other process can see the record.
        events: How events are handled; see `Record.events`.
        request: The encoded request for another worker; see `Record.request`.
        key: The idempotency key, if any.
        fingerprint: Fingerprint of the request, compared when the key is used again.
        encoded: The final response object as JSON.
        is_closed: Whether the response has ended and nothing more is written.
        is_final_writer: Whether this run has ended the response, with or without a record, and notifies the hook.
        is_claimed: Whether this run generates the response.
    """

    context: Context
    state_machine: StateMachine
    repository: Repository | None
    leases: LeaseRenewer | None
    events: Literal["logged", "streamed", "none"] = "none"
    request: bytes = b""
    key: str | None = None
    fingerprint: str = ""
    encoded: bytes = b""
    is_closed: bool = False
    is_final_writer: bool = False
    is_claimed: bool = False
    _input: bytes = field(default=b"")
    _log_bytes: int = field(default=0)
    _claim_lease: float | None = field(default=None)

    @property
    def owner(self) -> str:
        """The owner of the response."""
        return self.context.turn.owner

    @property
    def id(self) -> str:
        """The response's id."""
        return self.context.turn.response_id

    # Creation.

    async def create(self) -> Record | None:
        """Create the record of a response that starts immediately.

        Returns:
            None, or the record of an earlier request with the same idempotency key.

        Raises:
            StoreError: The record could not be created.
        """
        self.is_claimed = True
        if self.repository is None:
            return None
        self._input = ITEMS.dump_json(self.context.input)
        return await self.repository.create(
            self.owner, self._build_record(encode_json(self.state_machine.response), final=False)
        )

    async def queue(self, queued: list[Event], lease: float) -> Record:
        """Create the record of a response that waits for a worker.

        Args:
            queued: The events of the queued response.
            lease: Seconds since the epoch until which a worker must claim the response.

        Returns:
            The record, or that of an earlier request with the same idempotency key.

        Raises:
            StoreError: The record could not be created.
        """
        assert self.repository is not None
        self._input = ITEMS.dump_json(self.context.input)
        record = replace(self._build_record(encode_json(self.state_machine.response), final=False), lease=lease)
        earlier = await self.repository.create(self.owner, record)
        if earlier is None:
            await self.append(queued)
        return earlier or record

    def restore_queued(self, record: Record) -> None:
        """Restore the state that `queue` left, from a record that any process may have created."""
        self._input = record.input

    async def claim(self, started: list[Event]) -> None:
        """Claim a queued response for this run.

        Args:
            started: The events of the response's start. Appending them to the log is the claim: the store accepts them
                from one worker only.

        Raises:
            RunSuperseded: Another worker has claimed the response, or the store failed repeatedly; a response that is
                still queued then is deleted.
        """
        self.request = b""
        if not await self._try_claim(started):
            raise RunSuperseded
        self.is_claimed = True

    async def _try_claim(self, started: list[Event]) -> bool:
        assert self.repository is not None
        record = self._build_record(encode_json(self.state_machine.response), final=False)
        # The random fraction identifies this claim if an update reached the store but its confirmation was lost.
        self._claim_lease = record.lease + randbelow(2**20) / 2**20
        record = replace(record, lease=self._claim_lease)
        for pause in _CLAIM_RETRY_DELAYS:
            try:
                return await self.repository.update(self.owner, record, encode_log(started))
            except StoreError:
                found = await self.find_record()
                if found is not None and not found.request:  # a claim was saved: compare its lease with this one's
                    return not found.final and found.lease == self._claim_lease
            await anyio.sleep(pause)
        found = await self.find_record()
        if found is not None and found.request:  # still queued, but it can neither start nor be saved as failed
            with contextlib.suppress(StoreError):
                await self.repository.delete(self.owner, self.id)
        return False

    # The log.

    async def append(self, events: list[Event]) -> None:
        """Append events to the log, if the response has one.

        Raises:
            StoreError: The store failed, or the log is too long.
            RunSuperseded: The store refused the events, because they do not continue the log.
        """
        if self.events != "logged" or self.repository is None:
            return
        log = encode_log(events)
        self._log_bytes += len(log.data)
        if self._log_bytes > _MAX_LOG_BYTES:
            raise StoreError("The response has more events than this server can log.")
        if not await self.repository.append(self.owner, self.id, log):
            raise RunSuperseded

    async def read_log(self, start: int) -> list[Event] | None:
        """Return the logged events from a `sequence_number` on, or None if there is no log.

        Raises:
            StoreError: The store failed.
        """
        if self.events != "logged" or self.repository is None:
            return None
        pieces = await call_store(self.repository.store.events(self.owner, self.id, start - 1))
        if pieces is None:
            return None
        events = (event for piece in pieces for event in decode_events(piece.data))
        return [event for event in events if event["sequence_number"] >= start]

    # The final record.

    async def save(self, events: list[Event]) -> None:
        """Save the final record and append the last events to the log.

        Raises:
            StoreError: The record could not be saved.
            RunSuperseded: Another process has ended or claimed the response.
        """
        self.encoded = encode_json(self.state_machine.response)
        if self.repository is not None:
            record = self._build_record(self.encoded, final=True)
            if not await self._try_save(record, events):
                await self._resolve_save_conflict(record, events)
        self.is_closed = self.is_final_writer = True

    async def save_best_effort(self, events: list[Event]) -> None:
        """Save the final record of a response that failed or was cancelled, within `CLEANUP_TIMEOUT`.

        If the store fails, a record without a log is deleted. A record with a log may have followers, and a store that
        does not answer cannot delete: these records are ended when their lease expires.

        Raises:
            RunSuperseded: Another process has ended or claimed the response, and its log has the remaining events.
        """
        if self.is_closed:
            return
        if self.repository is None:
            self.is_closed = self.is_final_writer = True
            return
        with anyio.move_on_after(CLEANUP_TIMEOUT) as saving:
            try:
                await self.save(events)
            except StoreError:
                if self.events != "logged":
                    self.is_final_writer = True
                    with contextlib.suppress(StoreError):
                        await self.repository.delete(self.owner, self.id)
            except RunSuperseded:
                if self.events == "logged":
                    raise
        if saving.cancelled_caught:
            logger.error("response %s could not be saved: the store does not answer", self.id)

    async def _try_save(self, record: Record, events: list[Event]) -> bool:
        assert self.repository is not None
        try:
            return await self.repository.update(self.owner, record, self._encode_if_logged(events))
        except StoreError:
            if not await self.was_saved():
                raise
            return True

    async def _resolve_save_conflict(self, record: Record, events: list[Event]) -> None:
        assert self.repository is not None
        found = await self.repository.get(self.owner, self.id)
        if found is None:
            return  # deleted meanwhile: nothing to save, and the client still gets its response
        if found.final or not (self.is_claimed or found.lease == self._claim_lease):
            raise RunSuperseded
        # The log may already hold events of an append that was not confirmed.
        start = events[0]["sequence_number"] if events else 0
        pieces = await call_store(self.repository.store.events(self.owner, self.id, start - 1))
        end = pieces[-1].end if pieces else start
        events = [event for event in events if event["sequence_number"] >= end]
        if not await self.repository.update(self.owner, record, self._encode_if_logged(events)):
            raise RunSuperseded

    def _encode_if_logged(self, events: list[Event]) -> Log | None:
        return encode_log(events) if self.events == "logged" and events else None

    async def was_saved(self) -> bool:
        """Return whether the final record is in the store, although its save failed or was interrupted."""
        found = await self.find_record() if self.encoded else None
        return found is not None and found.final and found.response == self.encoded

    async def is_ended_elsewhere(self) -> bool:
        """Return whether the stored record is final although this run has not ended."""
        found = await self.find_record()
        return found is not None and found.final

    async def find_record(self) -> Record | None:
        """Return the record, or None if it does not exist or the store fails."""
        with contextlib.suppress(StoreError):
            return None if self.repository is None else await self.repository.get(self.owner, self.id)
        return None

    def _build_record(self, response: bytes, *, final: bool) -> Record:
        return Record(
            id=self.id,
            previous_id=self.state_machine.response["previous_response_id"],
            input=self._input,
            response=response,
            item_ids=tuple(_item_ids(self.context.input, self.state_machine.response["output"])),
            final=final,
            events=self.events,
            lease=math.inf if self.leases is None else self.leases.next_expiry(),
            request=self.request,
            key=self.key,
            fingerprint=self.fingerprint,
        )


def _item_ids(input_items: Iterable[Any], output: Iterable[dict[str, Any]]) -> Iterable[str]:
    yield from (item.id for item in input_items)
    yield from (item["id"] for item in output)
