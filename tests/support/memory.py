"""The records of a memory store, and shorter timeouts."""

from __future__ import annotations

import pytest

from responses_kit.engine import generation, recorder, registry, run
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Record


def stored_records(store: MemoryStore) -> list[Record]:
    """Return all records, those in progress first."""
    return [entry.record for entry in (*store._in_progress.values(), *store._final.values())]


def shorten_cleanup(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Shorten the time that interrupted runs have to close and save."""
    for module in (run, recorder, registry):
        monkeypatch.setattr(module, "CLEANUP_TIMEOUT", seconds)
    monkeypatch.setattr(generation, "_CLOSE_TIMEOUT", seconds)
