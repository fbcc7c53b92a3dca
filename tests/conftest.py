"""What all tests share: how hard hypothesis tries, and what is logged."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from responses_kit import stores

settings.register_profile("quick", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def _complaints_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds the whole reason of a store's failure in the log, whatever failed before."""
    monkeypatch.setattr(stores, "_MINUTE", 0.0)
