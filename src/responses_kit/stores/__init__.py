"""Where responses are kept, behind one small, owner-scoped protocol."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import StoreError

__all__ = ["Record", "ResponseStore", "stored"]

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
        final: Whether the response has ended.
    """

    id: str
    previous_id: str | None
    input: bytes
    response: bytes
    item_ids: tuple[str, ...] = ()
    final: bool = False

    @property
    def size(self) -> int:
        """Bytes that the record's content takes."""
        return len(self.input) + len(self.response) + sum(map(len, self.item_ids))


class ResponseStore(Protocol):
    """What the kit asks of a store. Every method is scoped to an owner: a foreign id is an unknown id.

    A method may raise any exception where the store cannot be reached or is full; the kit logs it and tells
    the client of a `store_error`. It must not wait for ever: a client waits with it. One kit may be used from
    several event loops, and so may its store.
    """

    async def create(self, owner: str, record: Record) -> None:
        """Keeps a new record. Its id is not in use."""

    async def update(self, owner: str, record: Record) -> bool:
        """Replaces the record of the same id.

        Returns:
            False, and nothing is kept, where it has meanwhile been deleted.
        """

    async def get(self, owner: str, response_id: str) -> Record | None:
        """The record, or None."""

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        """The record and all those before it, oldest first, in a bounded number of round trips.

        Returns:
            An empty list where the record itself is unknown. Where an earlier one is, the list begins after
            it: its first record then has a `previous_id`.
        """

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        """For each item id that is known, a record whose input or output holds it."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forgets the record; whether there was one."""


async def stored(answer: Awaitable[T]) -> T:
    """What a store answers.

    Raises:
        StoreError: The store failed; the client may know no more than that, the rest goes to the log.
    """
    try:
        return await answer
    except StoreError:
        raise
    except Exception as error:
        logger.error("the store failed", exc_info=error)
        raise StoreError("The server's store failed. Try again, or send store: false.") from error
