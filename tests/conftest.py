"""What all tests share: how hard hypothesis tries, and what is logged."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from responses_kit.stores import protocol

settings.register_profile("quick", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores, for many tests wait: for servers, for browsers, and the like."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def _complaints_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds the whole reason of a store's failure in the log, whatever failed before."""
    monkeypatch.setattr(protocol, "_TRACEBACK_INTERVAL", 0.0)
