"""Hypothesis profiles, markers and logging shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from responses_kit.stores import protocol

settings.register_profile("quick", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

TESTS = Path(__file__).parent

SLOW = (
    "adapters/test_wsgi.py",
    "concurrency/test_loop_thread.py",
    "concurrency/test_signals.py",
    "contract",
    "diagnostics",
    "e2e",
    "integrations/django/test_admin_browser.py",
    "integrations/django/test_docs_django.py",
    "integrations/django/test_example_project.py",
    "integrations/django/test_orm_store.py",
    "integrations/django/test_runner.py",
    "integrations/flask/test_asgi_adapters.py",
    "integrations/flask/test_disconnects_flask.py",
    "integrations/flask/test_docs_flask.py",
    "integrations/flask/test_example_app.py",
    "local/test_model_fetch.py",
    "stores/test_redis.py",
    "stores/test_sql.py",
    "tools/test_mcp.py",
)
"""Folders and modules whose tests start servers, browsers or other processes."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than there are cores, because many tests wait for servers and browsers."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SLOW`, and those that need the local model, as slow."""
    slow = [TESTS / name for name in SLOW]
    assert all(path.exists() for path in slow), "SLOW names folders and modules that exist"
    for item in items:
        if item.get_closest_marker("local") or any(item.path.is_relative_to(path) for path in slow):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _log_every_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log the traceback of every store failure, whatever failed before."""
    monkeypatch.setattr(protocol, "_TRACEBACK_INTERVAL", 0.0)
