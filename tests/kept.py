"""What a memory store holds, for tests that have to see all of it."""

from __future__ import annotations

from responses_kit.stores import Record
from responses_kit.stores.memory import MemoryStore


def kept(store: MemoryStore) -> list[Record]:
    """All records, those in progress first."""
    return [entry.record for entry in (*store._live.values(), *store._final.values())]
