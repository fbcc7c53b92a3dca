"""The record of one response in the making: created, logged to and made final, whatever breaks off in between."""

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

_PAUSES: Final = (0.1, 0.5, 1.0)
"""Seconds between the tries to begin what waits in a store that fails."""

_LARGEST_LOG: Final = 64 * 1024 * 1024
"""Bytes of events that are kept of one response."""


class RunSuperseded(Exception):
    """The record is not this run's any more: it was ended by somebody else, is worked on by another, or was deleted."""


@dataclass(slots=True, eq=False)
class Recorder:
    """What is kept of one response, and how.

    Attributes:
        context: What the response was asked for with.
        machine: Holds the response object.
        records: Where the record is; None if nothing is kept.
        leases: Keeps the record's lease; None where nobody else could see the record anyway.
        events: What becomes of its events; see `Record.events`.
        request: What another worker needs to make the response; see `Record.request`.
        key: The idempotency key that it was asked for with, if any.
        fingerprint: What the request was, for comparison.
        encoded: The final response object as JSON.
        done: Whether nothing more is to be kept.
        ours: Whether it was this run that ended the response.
        begun: Whether this run is the one that makes the response.
    """

    context: Context
    state_machine: StateMachine
    repository: Repository | None
    leases: LeaseRenewer | None
    events: Literal["kept", "told", "none"] = "none"
    request: bytes = b""
    key: str | None = None
    fingerprint: str = ""
    encoded: bytes = b""
    is_closed: bool = False
    is_final_writer: bool = False
    is_claimed: bool = False
    _input: bytes = field(default=b"")
    _logged: int = field(default=0)
    _mark: float | None = field(default=None)

    @property
    def owner(self) -> str:
        """Whose response it is."""
        return self.context.turn.owner

    @property
    def id(self) -> str:
        """The response's id."""
        return self.context.turn.response_id

    # The beginning.

    async def create(self) -> Record | None:
        """Writes the record of a response that is begun at once.

        Returns:
            None; or the record of an earlier request with the same idempotency key.

        Raises:
            StoreError: The store could not take it.
        """
        self.is_claimed = True
        if self.repository is None:
            return None
        self._input = ITEMS.dump_json(self.context.input)
        return await self.repository.create(
            self.owner, self._record(encode_json(self.state_machine.response), final=False)
        )

    async def queue(self, queued: list[Event], lease: float) -> Record:
        """Writes the record of a response that waits for a worker.

        Args:
            queued: The events of its creation.
            lease: Seconds since the epoch until which a worker has to begin.

        Returns:
            The record; or that of an earlier request with the same idempotency key.

        Raises:
            StoreError: The store could not take it.
        """
        assert self.repository is not None
        self._input = ITEMS.dump_json(self.context.input)
        record = replace(self._record(encode_json(self.state_machine.response), final=False), lease=lease)
        earlier = await self.repository.create(self.owner, record)
        if earlier is None:
            await self.append(queued)
        return earlier or record

    def requeue(self, record: Record) -> None:
        """Goes on from a record that `queue` has written, in whatever process it did."""
        self._input = record.input

    async def claim(self, started: list[Event]) -> None:
        """Takes a response that waits in the store, unless somebody else has.

        Args:
            started: The events of its beginning. Whoever gets them into the log is the one who works on it.

        Raises:
            Taken: Somebody else has, or nobody can tell.
        """
        self.request = b""
        if not await self._is_mine(started):
            raise RunSuperseded
        self.is_claimed = True

    async def _is_mine(self, started: list[Event]) -> bool:
        assert self.repository is not None
        record = self._record(encode_json(self.state_machine.response), final=False)
        # By which ours is told from another's.
        self._mark = record.lease + randbelow(2**20) / 2**20
        record = replace(record, lease=self._mark)
        for pause in _PAUSES:
            try:
                return await self.repository.update(self.owner, record, encode_log(started))
            except StoreError:
                found = await self.find_record()
                if found is not None and not found.request:  # that came through: was it ours?
                    return not found.final and found.lease == self._mark
            await anyio.sleep(pause)
        found = await self.find_record()
        if found is not None and found.request:  # a record that can't be made final goes altogether
            with contextlib.suppress(StoreError):
                await self.repository.delete(self.owner, self.id)
        return False

    # The log.

    async def append(self, events: list[Event]) -> None:
        """Logs events, where they are kept.

        Raises:
            StoreError: The store could not take them, or they are too many.
            Taken: The response is not this run's any more.
        """
        if self.events != "kept" or self.repository is None:
            return
        log = encode_log(events)
        self._logged += len(log.data)
        if self._logged > _LARGEST_LOG:
            raise StoreError("The response has more events than this server keeps.")
        if not await self.repository.append(self.owner, self.id, log):
            raise RunSuperseded

    async def read_log(self, number: int) -> list[Event] | None:
        """What the log has from this `sequence_number` on; None if there is none.

        Raises:
            StoreError: The store is out of reach.
        """
        if self.events != "kept" or self.repository is None:
            return None
        pieces = await call_store(self.repository.store.events(self.owner, self.id, number - 1))
        if pieces is None:
            return None
        told = (event for piece in pieces for event in decode_events(piece.data))
        return [event for event in told if event["sequence_number"] >= number]

    # The end.

    async def save(self, events: list[Event]) -> None:
        """Makes the record final, with the last events in its log.

        Raises:
            StoreError: The store could not take it.
            Taken: Somebody else has ended the response.
        """
        self.encoded = encode_json(self.state_machine.response)
        if self.repository is not None:
            record = self._record(self.encoded, final=True)
            if not await self._is_saved(record, events):
                await self._save_again(record, events)
        self.is_closed = self.is_final_writer = True

    async def save_best_effort(self, events: list[Event]) -> None:
        """Saves an unhappy ending as well as it can.

        A record that can't be made final goes altogether; but one that others may be waiting for is left to its lease.

        Raises:
            Taken: Somebody else has ended the response, and its log says how.
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
                if self.events != "kept":
                    self.is_final_writer = True
                    with contextlib.suppress(StoreError):
                        await self.repository.delete(self.owner, self.id)
            except RunSuperseded:
                if self.events == "kept":
                    raise
        if saving.cancelled_caught:
            logger.error("response %s could not be kept: the store does not answer", self.id)

    async def _is_saved(self, record: Record, events: list[Event]) -> bool:
        assert self.repository is not None
        try:
            return await self.repository.update(self.owner, record, self._last(events))
        except StoreError:
            if not await self.was_saved():
                raise
            return True

    async def _save_again(self, record: Record, events: list[Event]) -> None:
        assert self.repository is not None
        found = await self.repository.get(self.owner, self.id)
        if found is None:
            return  # it was deleted meanwhile: nothing is kept, and its client has its answer
        if found.final or not (self.is_claimed or found.lease == self._mark):
            raise RunSuperseded
        # An append that broke off had come through after all.
        start = events[0]["sequence_number"] if events else 0
        pieces = await call_store(self.repository.store.events(self.owner, self.id, start - 1))
        end = pieces[-1].end if pieces else start
        events = [event for event in events if event["sequence_number"] >= end]
        if not await self.repository.update(self.owner, record, self._last(events)):
            raise RunSuperseded

    def _last(self, events: list[Event]) -> Log | None:
        return encode_log(events) if self.events == "kept" and events else None

    async def was_saved(self) -> bool:
        """Whether a final save that broke off had come through after all."""
        found = await self.find_record() if self.encoded else None
        return found is not None and found.final and found.response == self.encoded

    async def is_taken(self) -> bool:
        """Whether somebody else has ended the response."""
        found = await self.find_record()
        return found is not None and found.final

    async def find_record(self) -> Record | None:
        """The record, where it is there and the store tells; if not, there is nothing to keep to."""
        with contextlib.suppress(StoreError):
            return None if self.repository is None else await self.repository.get(self.owner, self.id)
        return None

    def _record(self, response: bytes, *, final: bool) -> Record:
        return Record(
            id=self.id,
            previous_id=self.state_machine.response["previous_response_id"],
            input=self._input,
            response=response,
            item_ids=tuple(_ids(self.context.input, self.state_machine.response["output"])),
            final=final,
            events=self.events,
            lease=math.inf if self.leases is None else self.leases.next_expiry(),
            request=self.request,
            key=self.key,
            fingerprint=self.fingerprint,
        )


def _ids(given: Iterable[Any], output: Iterable[dict[str, Any]]) -> Iterable[str]:
    yield from (item.id for item in given)
    yield from (item["id"] for item in output)
