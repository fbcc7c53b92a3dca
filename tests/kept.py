"""What a memory store holds, for tests that have to see all of it."""

from __future__ import annotations

import pytest

from responses_kit import generation, keeping, open_runs, runs
from responses_kit.stores import Record
from responses_kit.stores.memory import MemoryStore


def kept(store: MemoryStore) -> list[Record]:
    """All records, those in progress first."""
    return [entry.record for entry in (*store._live.values(), *store._final.values())]


def soon_given_up(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Gives what was cancelled no more than this to come to its end."""
    for module in (runs, keeping, open_runs):
        monkeypatch.setattr(module, "CLEANUP_SECONDS", seconds)
    monkeypatch.setattr(generation, "_CLOSING_SECONDS", seconds)
