"""The default store: the memory of this process, bounded by count, bytes and time."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ..errors import StoreError
from .protocol import Log, Record

__all__ = ["MemoryStore"]

_RECORD_OVERHEAD_BYTES, _ITEM_OVERHEAD_BYTES, _PIECE_OVERHEAD_BYTES = 1024, 300, 160
"""Approximate bytes of bookkeeping per record, per indexed item and per piece of a log."""

_Key = tuple[str, str]
"""Owner and response id, item id or idempotency key."""


@dataclass(slots=True)
class _Entry:
    record: Record
    size: int
    expires: float
    log: list[Log] | None = field(default_factory=list)
    log_size: int = 0

    @property
    def log_end(self) -> int:
        return self.log[-1].end if self.log else 0


class MemoryStore:
    """A store in this process's memory; responses are lost with the process and invisible to other processes.

    At a limit, the logs of final records are evicted first, in the order in which the responses ended; then the least
    recently used final records. Using a response uses its whole chain, so an active conversation stays whole. Records
    in progress are never evicted: if they take all the room, writes are refused.

    Args:
        max_records: Number of records.
        max_bytes: Bytes of all records and logs together.
        ttl: Seconds from the last use of a record until it expires.
        log_ttl: Seconds from the end of a response until its log expires.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        max_records: int = 10_000,
        max_bytes: int = 256 * 1024 * 1024,
        ttl: float = 24 * 60 * 60,
        log_ttl: float = 60 * 60,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._ttl, self._log_ttl, self._clock = ttl, log_ttl, clock
        # In order of last use, which equals the order of expiry because all records have the same ttl.
        self._in_progress: OrderedDict[_Key, _Entry] = OrderedDict()
        self._final: OrderedDict[_Key, _Entry] = OrderedDict()
        self._logs: OrderedDict[_Key, float] = OrderedDict()  # expiry of the logs of final records, in order
        self._items: dict[_Key, dict[str, None]] = {}
        self._keys: dict[_Key, str] = {}
        self._bytes = self._in_progress_bytes = 0
        self._lock = threading.Lock()  # several event loops may share a kit; nothing waits while it is held

    def __len__(self) -> int:
        return len(self._in_progress) + len(self._final)

    async def setup(self) -> None:
        """Do nothing; exists so that the store can be exchanged for a database."""

    async def aclose(self) -> None:
        """Do nothing; see `setup`."""

    @property
    def size(self) -> int:
        """Approximate bytes of all records and logs."""
        return self._bytes

    async def create(self, owner: str, record: Record) -> Record | None:
        with self._lock:
            now = self._expire()
            if record.key is not None and (known := self._keys.get((owner, record.key))) is not None:
                holder = self._use((owner, known))
                assert holder is not None, "a key goes with its record"
                return holder.record
            key, size = (owner, record.id), _size(record)
            self._check_room(size, self._in_progress_bytes, 1)
            entry = _Entry(record, size, now + self._ttl)
            self._bytes += size
            if record.final:
                self._finish(key, entry)
            else:
                self._in_progress[key] = entry
                self._in_progress_bytes += size
            if record.key is not None:
                self._keys[owner, record.key] = record.id
            self._index(owner, record.id, record.item_ids)
            self._evict()
            return None

    async def update(self, owner: str, record: Record, log: Log | None = None) -> bool:
        with self._lock:
            key = (owner, record.id)
            entry = self._use(key)
            if entry is None or entry.record.final or (log is not None and log.start != entry.log_end):
                return False
            old, taken = entry.record, entry.size + entry.log_size
            size, log_size = _size(record), entry.log_size + (0 if log is None else _piece_size(log))
            # A final record may evict its own log.
            self._check_room(size if record.final else size + log_size, self._in_progress_bytes - taken)
            cancelled = old.cancelled or record.cancelled
            entry.record = replace(record, cancelled=cancelled, key=old.key, fingerprint=old.fingerprint)
            entry.size, entry.log_size = size, log_size
            if log is not None and entry.log is not None:
                entry.log.append(log)
            grown = size + log_size - taken
            self._bytes += grown
            self._in_progress_bytes += grown
            if record.final:
                del self._in_progress[key]
                self._in_progress_bytes -= size + log_size
                self._finish(key, entry)
            if record.item_ids != old.item_ids:
                before, after = set(old.item_ids), set(record.item_ids)
                self._unindex(owner, record.id, before - after)
                self._index(owner, record.id, after - before)
            self._evict()
            return True

    async def append(self, owner: str, response_id: str, log: Log) -> bool:
        with self._lock:
            entry = self._use((owner, response_id))
            if entry is None or entry.log is None or entry.record.final or log.start != entry.log_end:
                return False
            size, taken = _piece_size(log), entry.size + entry.log_size
            self._check_room(taken + size, self._in_progress_bytes - taken)
            entry.log.append(log)
            entry.log_size += size
            self._bytes += size
            self._in_progress_bytes += size
            self._evict()
            return True

    async def get(self, owner: str, response_id: str) -> Record | None:
        with self._lock:
            entry = self._use((owner, response_id))
            return None if entry is None else entry.record

    async def find(self, owner: str, key: str) -> Record | None:
        with self._lock:
            known = self._keys.get((owner, key))
            entry = None if known is None else self._use((owner, known))
            return None if entry is None else entry.record

    async def events(self, owner: str, response_id: str, after: int) -> Sequence[Log] | None:
        with self._lock:
            entry = self._use((owner, response_id))
            if entry is None or entry.log is None:
                return None
            return entry.log[bisect_right(entry.log, after + 1, key=lambda piece: piece.end) :]

    async def chain(self, owner: str, response_id: str) -> list[Record]:
        with self._lock:
            records: list[Record] = []
            following: str | None = response_id
            while following is not None and (entry := self._use((owner, following))) is not None:
                records.append(entry.record)
                following = entry.record.previous_id
            records.reverse()
            return records

    async def items(self, owner: str, item_ids: Collection[str]) -> Mapping[str, Record]:
        with self._lock:
            self._expire()
            found = {}
            for item_id in item_ids:
                for response_id in self._items.get((owner, item_id), ()):
                    if (entry := self._use((owner, response_id))) is not None:
                        found[item_id] = entry.record
                    break
            return found

    async def delete(self, owner: str, response_id: str) -> bool:
        with self._lock:
            if self._use((owner, response_id)) is None:
                return False
            self._remove((owner, response_id))
            return True

    async def cancel(self, owner: str, response_id: str, until: float) -> bool:
        with self._lock:
            entry = self._use((owner, response_id))
            if entry is None or entry.record.final:
                return False
            entry.record = replace(entry.record, cancelled=True, lease=min(entry.record.lease, until))
            return True

    async def renew(self, runs: Collection[tuple[str, str]], until: float | None = None) -> set[tuple[str, str]]:
        with self._lock:
            alive = set()
            for run in runs:
                entry = self._use(run)
                if entry is None or entry.record.final or entry.record.cancelled:
                    continue
                alive.add(run)
                if until is not None:
                    entry.record = replace(entry.record, lease=until)
            return alive

    async def expired(self, now: float, limit: int = 100) -> list[tuple[str, Record]]:
        with self._lock:
            self._expire()
            over = (
                (owner, entry.record) for (owner, _), entry in self._in_progress.items() if entry.record.lease < now
            )
            return list(islice(over, limit))

    async def prune(self) -> int:
        with self._lock:
            before = len(self)
            self._expire()
            return before - len(self)

    def _expire(self) -> float:
        """Remove expired records and logs; return the current time."""
        now = self._clock()
        while self._logs and next(iter(self._logs.values())) <= now:
            self._drop_log()
        for entries in (self._in_progress, self._final):
            while entries:
                key, entry = next(iter(entries.items()))
                if entry.expires > now:
                    break
                self._remove(key)
        return now

    def _use(self, key: _Key) -> _Entry | None:
        now = self._expire()
        for entries in (self._in_progress, self._final):
            if (entry := entries.get(key)) is not None:
                entry.expires = now + self._ttl
                entries.move_to_end(key)
                return entry
        return None

    def _check_room(self, size: int, in_use: int, new: int = 0) -> None:
        """Refuse a write that does not fit beside the records in progress, before anything changes.

        Args:
            size: Bytes of the record and its log after the write.
            in_use: Bytes of the other records in progress.
            new: Number of new records.

        Raises:
            StoreError: There is no room.
        """
        if size > self._max_bytes:
            raise StoreError("The response is larger than the server's store. Set 'store' to false.")
        if size + in_use > self._max_bytes or len(self._in_progress) + new > self._max_records:
            raise StoreError(
                "The server's store is full of responses in progress. Try again later, or set 'store' to false."
            )

    def _evict(self) -> None:
        while self._bytes > self._max_bytes and self._logs:
            self._drop_log()
        while self._bytes > self._max_bytes or len(self) > self._max_records:
            self._remove(next(iter(self._final)))

    def _finish(self, key: _Key, entry: _Entry) -> None:
        self._final[key] = entry
        self._logs[key] = self._clock() + self._log_ttl

    def _drop_log(self) -> None:
        key, _ = self._logs.popitem(last=False)
        entry = self._final[key]
        self._bytes -= entry.log_size
        entry.log, entry.log_size = None, 0

    def _remove(self, key: _Key) -> None:
        entry = self._in_progress.pop(key, None)
        if entry is None:
            entry = self._final.pop(key)
            self._logs.pop(key, None)
        else:
            self._in_progress_bytes -= entry.size + entry.log_size
        self._bytes -= entry.size + entry.log_size
        if entry.record.key is not None:
            del self._keys[key[0], entry.record.key]
        self._unindex(*key, entry.record.item_ids)

    def _index(self, owner: str, response_id: str, item_ids: Collection[str]) -> None:
        for item_id in item_ids:
            self._items.setdefault((owner, item_id), {})[response_id] = None

    def _unindex(self, owner: str, response_id: str, item_ids: Collection[str]) -> None:
        for item_id in set(item_ids):
            holders = self._items[owner, item_id]
            del holders[response_id]
            if not holders:
                del self._items[owner, item_id]


def _size(record: Record) -> int:
    return record.size + _RECORD_OVERHEAD_BYTES + _ITEM_OVERHEAD_BYTES * len(record.item_ids)


def _piece_size(log: Log) -> int:
    return len(log.data) + _PIECE_OVERHEAD_BYTES
