"""What a memory store holds, for tests that have to see all of it."""

from __future__ import annotations

import pytest

from responses_kit.engine import generation, recorder, registry, run
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Record


def kept(store: MemoryStore) -> list[Record]:
    """All records, those in progress first."""
    return [entry.record for entry in (*store._live.values(), *store._final.values())]


def soon_given_up(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Gives what was cancelled no more than this to come to its end."""
    for module in (run, recorder, registry):
        monkeypatch.setattr(module, "CLEANUP_TIMEOUT", seconds)
    monkeypatch.setattr(generation, "_CLOSING_SECONDS", seconds)
