"""The default store: this process's memory, bounded by count, bytes and time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..errors import StoreError
from . import Record

__all__ = ["MemoryStore"]

_OVERHEAD, _OVERHEAD_PER_ITEM = 1024, 300
"""Bytes that a record, and each item in the index, take beside their content, roughly."""


@dataclass(slots=True)
class _Entry:
    record: Record
    size: int
    expires: float


class MemoryStore:
    """Keeps responses in memory; they are gone with the process and unknown to other processes.

    The least recently used records go first when a bound is reached. Using a response uses the whole chain
    that it continues, so a living conversation stays whole.

    Args:
        max_records: Most records kept.
        max_bytes: Most bytes kept, all records together.
        ttl: Seconds after its last use at which a record is gone.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        max_records: int = 10_000,
        max_bytes: int = 256 * 1024 * 1024,
        ttl: float = 24 * 60 * 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_records, self._max_bytes, self._ttl, self._clock = max_records, max_bytes, ttl, clock
        # In order of last use, which with one ttl for all is the order of expiry as well.
        self._records: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._items: dict[tuple[str, str], list[str]] = {}
        self._bytes = 0
        self._lock = threading.Lock()  # several event loops may share a kit; nothing in here waits

    def __len__(self) -> int:
        return len(self._records)

    async def create(self, owner: str, record: Record) -> None:
        with self._lock:
            entry = self._entry(record)
            self._records[owner, record.id] = entry
            self._bytes += entry.size
            for item_id in record.item_ids:
                self._items.setdefault((owner, item_id), []).append(record.id)
            self._evict()

    async def update(self, owner: str, record: Record) -> bool:
        with self._lock:
            old = self._touch(owner, record.id)
            if old is None:
                return False
            entry = self._entry(record)
            self._bytes += entry.size - self._records[owner, record.id].size
            self._records[owner, record.id] = entry
            if record.item_ids != old.item_ids:
                kept = set(old.item_ids)
                for item_id in kept.difference(record.item_ids):
                    self._forget(owner, item_id, record.id)
                for item_id in record.item_ids:
                    if item_id not in kept:
                        self._items.setdefault((owner, item_id), []).append(record.id)
            self._evict()
            return True

    async def get(self, owner: str, response_id: str) -> Record | None:
        with self._lock:
            return self._touch(owner, response_id)

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        with self._lock:
            records: list[Record] = []
            following: str | None = response_id
            while following is not None and (record := self._touch(owner, following)) is not None:
                records.append(record)
                following = record.previous_id
            records.reverse()
            return records

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        with self._lock:
            found = {}
            for item_id in item_ids:
                for response_id in list(self._items.get((owner, item_id), ())):
                    if (record := self._touch(owner, response_id)) is not None:
                        found[item_id] = record
                        break
            return found

    async def delete(self, owner: str, response_id: str) -> bool:
        with self._lock:
            if self._touch(owner, response_id) is None:
                return False
            self._remove((owner, response_id))
            return True

    def _entry(self, record: Record) -> _Entry:
        size = record.size + _OVERHEAD + _OVERHEAD_PER_ITEM * len(record.item_ids)
        entry = _Entry(record, size, self._clock() + self._ttl)
        if entry.size > self._max_bytes:
            raise StoreError("The response is larger than the server's whole store. Send store: false.")
        return entry

    def _touch(self, owner: str, response_id: str) -> Record | None:
        key = (owner, response_id)
        entry = self._records.get(key)
        if entry is None:
            return None
        now = self._clock()
        if entry.expires <= now:
            self._remove(key)
            return None
        entry.expires = now + self._ttl
        self._records.move_to_end(key)
        return entry.record

    def _remove(self, key: tuple[str, str]) -> None:
        entry = self._records.pop(key)
        self._bytes -= entry.size
        for item_id in entry.record.item_ids:
            self._forget(key[0], item_id, key[1])

    def _forget(self, owner: str, item_id: str, response_id: str) -> None:
        holders = self._items[owner, item_id]
        holders.remove(response_id)
        if not holders:
            del self._items[owner, item_id]

    def _evict(self) -> None:
        now = self._clock()
        while self._records:
            key, entry = next(iter(self._records.items()))
            if len(self._records) <= self._max_records and self._bytes <= self._max_bytes and entry.expires > now:
                return
            self._remove(key)
