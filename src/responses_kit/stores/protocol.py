"""Where responses are kept, behind one small, owner-scoped protocol."""

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
    """One response as it is kept: immutable, and JSON as bytes, so that no copy can go stale.

    Attributes:
        id: The response's id.
        previous_id: The response that it continued, if any.
        input: The request's own input items as a JSON array; what came before is in the previous record.
        response: The response object as JSON.
        item_ids: Ids of all items in `input` and in the response's output.
        final: Whether the response has ended. A final record never changes again.
        events: Whether its events are "kept" in the log, are "told" to a client without being kept, or "none" are told.
        lease: Seconds since the epoch until which somebody is at work on it; of no meaning once it is final.
        cancelled: Whether its cancellation was asked for. Once set it stays.
        request: What a worker needs to make it beside `input`, as JSON; empty unless it waits for one.
        key: The idempotency key that it was asked for with, if any; no two records of an owner have the same.
        fingerprint: What that request was, for comparison.
    """

    id: str
    previous_id: str | None
    input: bytes
    response: bytes
    item_ids: tuple[str, ...] = ()
    final: bool = False
    events: Literal["kept", "told", "none"] = "none"
    lease: float = 0.0
    cancelled: bool = False
    request: bytes = b""
    key: str | None = None
    fingerprint: str = ""

    @property
    def size(self) -> int:
        """Bytes that the record's content takes."""
        return len(self.input) + len(self.response) + len(self.request) + sum(map(len, self.item_ids))


@dataclass(frozen=True, slots=True)
class Log:
    """Some consecutive events of one response, as they go out.

    Attributes:
        start: The first one's `sequence_number`.
        count: How many they are; 1 or more.
        data: Their bytes as server-sent events, one after the other.
    """

    start: int
    count: int
    data: bytes

    @property
    def end(self) -> int:
        """The `sequence_number` that comes next."""
        return self.start + self.count


class History(Protocol):
    """What of a store is needed to continue a conversation; see `ResponseStore`."""

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """The record and all those before it."""

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """Records that hold these items."""


class ResponseStore(Protocol):
    """What the kit asks of a store. Every method is scoped to an owner: a foreign id is an unknown id.

    A method may raise any exception where the store cannot be reached or is full; the kit logs it and tells
    the client of a `store_error`. It must not wait for ever: a client waits with it. One kit may be used from
    several event loops, and so may its store; and several processes may use what is behind it at the same time.
    What a method does, it does whole or not at all, and the next call of anybody sees it.
    """

    async def create(self, owner: str, record: Record) -> Record | None:
        """Keeps a new record, whose id is not in use, with an empty log.

        Returns:
            None; or the owner's record that has the same `key` already, and nothing new is kept.
        """

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        """Replaces the record of the same id, and appends to its log in the same step.

        A stored record that is `cancelled` stays so, whatever the new one says; `key` and `fingerprint` stay, too. Its
        lease becomes the new one's.

        Returns:
            False, and nothing is kept, where the record was deleted or is final already, or where the log does not go
            on with `log.start`.
        """

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        """Appends to the log of a record that is not final.

        Returns:
            False, and nothing is kept, where there is no such record, it is final, or its log does not go on with
            `log.start`. Of several who append at the same place, one is told True.
        """

    async def get(self, owner: str, response_id: str) -> Record | None:
        """The record, or None."""

    async def find(self, owner: str, key: str) -> Record | None:
        """The owner's record that has this idempotency key, or None."""

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        """The part of the log that has what comes after the event with this `sequence_number`, in order.

        The first piece may begin earlier. All that was appended before the call is there.

        Returns:
            None where the log is not kept any more, or there is no such record. Empty where nothing comes after.
        """

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """The record and all those before it, oldest first, in a bounded number of round trips.

        Returns:
            An empty list where the record itself is unknown. Where an earlier one is, the list begins after
            it: its first record then has a `previous_id`.
        """

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """For each item id that is known, a record whose input or output holds it."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forgets the record and its log; whether there was one."""

    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        """Asks whoever is at work on a record to cancel it, and shortens its lease to end at `until` at the latest.

        Returns:
            False where there is no such record, or it is final.
        """

    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        """Looks, in a bounded number of round trips, which of these records are still to be worked on.

        Args:
            runs: Owners and ids of the responses.
            until: When their leases are to end from now on; None leaves them as they are.

        Returns:
            Those that are neither final, nor gone, nor to be cancelled. Only their leases are renewed.
        """

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        """Owners and records, of all owners, that are not final while their lease has ended before `now`."""

    async def prune(self) -> int:
        """Removes what has outlived its time or is more than the store shall hold; how many records went."""


async def call_store(answer: Awaitable[T]) -> T:
    """What a store answers.

    Raises:
        StoreError: The store failed; the client may know no more than that, the rest goes to the log.
    """
    try:
        return await answer
    except StoreError:
        raise
    except Exception as error:
        _complaint(error)
        raise StoreError("The server's store failed. Try again, or send store: false.") from error


_MINUTE = 60.0

_complained = -_MINUTE


def _complaint(error: Exception) -> None:
    """Logs a failure, and where it comes from once a minute: an outage fails every call, and may be a full disk."""
    global _complained
    now = time.monotonic()
    if now - _complained >= _MINUTE:
        _complained = now
        logger.error("the store failed", exc_info=error)
    else:
        logger.error("the store failed: %s", type(error).__name__)
