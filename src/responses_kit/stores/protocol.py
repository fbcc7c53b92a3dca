"""The store protocol: records, event logs and owner-scoped operations."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from ..errors import StoreError

__all__ = ["History", "Log", "Record", "ResponseStore", "call_store"]

logger = logging.getLogger("responses_kit")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stored response: immutable, with JSON as bytes, so that no copy can change.

    Attributes:
        id: The response's id.
        previous_id: The response that it continued, if any.
        input: The request's own input items as a JSON array; earlier items are in the previous records.
        response: The response object as JSON.
        item_ids: Ids of all items in `input` and in the response's output.
        final: Whether the response has ended. A final record never changes again.
        events: "logged" if the events are in the event log, "streamed" if they are only sent to a client, or "none".
        lease: Seconds since the epoch at which the worker's lease expires; meaningless once the record is final.
        cancelled: Whether cancellation was requested. Never reset.
        request: The queued request without `input`, as JSON; empty unless the response waits for a worker.
        key: The idempotency key of the request, if any; unique per owner.
        fingerprint: Digest of that request, to recognise repetitions.
    """

    id: str
    previous_id: str | None
    input: bytes
    response: bytes
    item_ids: tuple[str, ...] = ()
    final: bool = False
    events: Literal["logged", "streamed", "none"] = "none"
    lease: float = 0.0
    cancelled: bool = False
    request: bytes = b""
    key: str | None = None
    fingerprint: str = ""

    @property
    def size(self) -> int:
        """Bytes of the record's content."""
        return len(self.input) + len(self.response) + len(self.request) + sum(map(len, self.item_ids))


@dataclass(frozen=True, slots=True)
class Log:
    """Consecutive events of one response, as sent to clients.

    Attributes:
        start: `sequence_number` of the first event.
        count: Number of events, at least 1.
        data: The concatenated server-sent events.
    """

    start: int
    count: int
    data: bytes

    @property
    def end(self) -> int:
        """The `sequence_number` that follows the last event."""
        return self.start + self.count


class History(Protocol):
    """The methods that continuing a conversation needs; see `ResponseStore`."""

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """Return the record and its predecessors; see `ResponseStore.chain`."""

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """Return records that hold these items; see `ResponseStore.items`."""


class ResponseStore(Protocol):
    """The protocol of stores. Every method is scoped to an owner: a foreign id is an unknown id.

    A method may raise any exception if the store is unreachable or full; the kit logs it and returns a `store_error` to
    the client. Every method must end within a bounded time, because a client waits for it. A store may be used from
    several event loops, and its database from several processes. Each method is atomic, and its effect is visible to
    the next call in any process.
    """

    async def create(self, owner: str, record: Record) -> Record | None:
        """Save a new record with an unused id and an empty log.

        Returns:
            None; or the owner's existing record with the same `key`, and then nothing is saved.
        """

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        """Replace the record of the same id, and append to its log in the same step.

        `cancelled` stays set, and `key` and `fingerprint` stay unchanged, whatever the new record holds. The lease is
        replaced.

        Returns:
            False, without any change, if the record was deleted or is final, or if the log does not end at
            `log.start`.
        """

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        """Append to the log of a record that is not final.

        Returns:
            False, without any change, if the record is unknown or final, or if its log does not end at `log.start`.
            Exactly one of several concurrent appends at the same position returns True.
        """

    async def get(self, owner: str, response_id: str) -> Record | None:
        """Return the record, or None."""

    async def find(self, owner: str, key: str) -> Record | None:
        """Return the owner's record with this idempotency key, or None."""

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        """Return the logged events after the event with this `sequence_number`, in order.

        The first piece may start earlier. Everything that was appended before the call is included.

        Returns:
            None if the log has expired or the record is unknown; an empty sequence if there are no later events.
        """

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """Return the record and all its predecessors, oldest first, in a bounded number of round trips.

        Returns:
            An empty list if the record itself is unknown. If a predecessor is unknown, the list starts after it, and
            its first record has a `previous_id`.
        """

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """Return, for each known item id, a record whose input or output holds the item."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete the record and its log; return whether the record existed."""

    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        """Request the cancellation of a record, and shorten its lease to end at `until` at the latest.

        Returns:
            False if the record is unknown or final.
        """

    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        """Return the active runs among these, and renew their leases, in a bounded number of round trips.

        Args:
            runs: Owners and ids of the responses.
            until: New expiry of the leases, in seconds since the epoch; None to leave them unchanged.

        Returns:
            The runs whose records exist and are neither final nor cancelled. Only their leases are renewed.
        """

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        """Return owners and records, of all owners, that are not final and whose lease expired before `now`."""

    async def prune(self) -> int:
        """Delete expired records, and those beyond the store's limits; return the number of deleted records."""


async def call_store(answer: Awaitable[T]) -> T:
    """Return the result of a store call, with any exception turned into a `StoreError`.

    Raises:
        StoreError: The store failed; details go to the log only.
    """
    try:
        return await answer
    except StoreError:
        raise
    except Exception as error:
        _log_failure(error)
        raise StoreError("The server's store failed. Try again, or set 'store' to false.") from error


_TRACEBACK_INTERVAL = 60.0
"""Seconds between logged tracebacks: in an outage every call fails, and the cause may be a full disk."""

_last_traceback = -_TRACEBACK_INTERVAL


def _log_failure(error: Exception) -> None:
    """Log a failure, with its traceback at most once per interval."""
    global _last_traceback
    now = time.monotonic()
    if now - _last_traceback >= _TRACEBACK_INTERVAL:
        _last_traceback = now
        logger.error("the store failed", exc_info=error)
    else:
        logger.error("the store failed: %s", type(error).__name__)
