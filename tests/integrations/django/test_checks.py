"""Tests of the system checks: errors and warnings about settings, and no messages for correct projects."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from responses_kit import Backend, ResponsesKit
from responses_kit.runners.base import LocalRunner
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import ScriptedBackend
from responses_kit.tools import HostedTool

from .databases import configure

configure()

from django.apps import apps  # noqa: E402  # Django's settings come first
from django.contrib.sessions.middleware import SessionMiddleware  # noqa: E402
from django.core.checks import run_checks  # noqa: E402
from django.db import connections  # noqa: E402
from django.http import HttpRequest  # noqa: E402
from django.middleware.gzip import GZipMiddleware  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import include, path  # noqa: E402
from django.utils.decorators import sync_and_async_middleware  # noqa: E402

from responses_kit_django.runners import TaskRunner  # noqa: E402
from responses_kit_django.views import ResponsesView  # noqa: E402

HERE = __name__

urlpatterns = [path("any/where/", include([path("v1/", include("responses_kit_django.urls"))]))]

MIDDLEWARE = [
    "django.middleware.gzip.GZipMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]


class UncreatableBackend(Backend):
    """A backend that checks must not create."""

    models = ("heavy",)

    def __init__(self) -> None:
        raise AssertionError("a check made the backend")

    async def generate(self, turn: Any) -> Any:
        yield "Uff."


class UncreatableStore(MemoryStore):
    def __init__(self) -> None:
        raise AssertionError("a check made the store")


class OutOfProcessRunner(LocalRunner):
    """A runner with workers in other processes."""

    is_out_of_process = True


def create_nothing() -> Any:
    raise AssertionError("a check made something")


def hook(request: HttpRequest) -> None:
    pass


@contextmanager
def override_project(*, urls: str = HERE, more: dict[str, Any] | None = None, **changes: Any) -> Iterator[None]:
    """Override the settings of a correct project with the given ones."""
    settings = {"MIDDLEWARE": MIDDLEWARE, **(more or {})}
    with override_settings(
        ROOT_URLCONF=urls, RESPONSES_KIT={"BACKEND": f"{HERE}.UncreatableBackend", **changes}, **settings
    ):
        yield


def run_app_checks(*, deploy: bool = False) -> dict[str, str]:
    """Run the app's checks, and return the messages by id."""
    messages = run_checks(tags=["responses_kit"], include_deployment_checks=deploy)
    ids = [message.id.removeprefix("responses_kit.") for message in messages]
    assert len({*ids}) == len(ids), messages
    for message in messages:
        assert message.hint or message.id.startswith("responses_kit.E"), message
        assert message.is_serious() == message.id.startswith("responses_kit.E")
    return {number: message.msg for number, message in zip(ids, messages, strict=True)}


# Correct projects.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"BACKEND": UncreatableBackend},
        {"BACKEND": ScriptedBackend()},
        {"BACKEND": f"{HERE}.create_nothing"},
        {"STORE": "orm:other", "STORE_OPTIONS": {"ttl": 60}},
        {"STORE": f"{HERE}.UncreatableStore"},
        {"STORE": create_nothing},
        {"AUTH": [f"{HERE}.hook"], "OWNER": f"{HERE}.hook", "PERMISSION": hook},
        {"AUTH": ["rest_framework.authentication.TokenAuthentication"]},
        {"AUTH": [], "OWNER": hook},
        {"TOOLS": [HostedTool("acme:clock"), HostedTool, create_nothing]},
        {"RUNNER": LocalRunner},
        {"RUNNER": f"{HERE}.OutOfProcessRunner"},
    ],
)
def test_sensible_project_has_no_messages(changes: dict[str, Any]) -> None:
    with override_project(**changes):
        assert run_app_checks(deploy=True) == {}


def test_project_with_its_own_kit_needs_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("responses_kit_own_urls")
    view = ResponsesView.as_view(kit=ResponsesKit(ScriptedBackend()))
    module.urlpatterns = [path("v1/<path:path>", view)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "responses_kit.backends.local", None)
    with override_settings(ROOT_URLCONF=module.__name__, MIDDLEWARE=MIDDLEWARE):
        assert run_app_checks(deploy=True) == {}


BARE = """
    from django.conf import settings
    from django.urls import include, path

    settings.configure(
        SECRET_KEY="a secret that is for tests alone, and long enough to be one",
        ALLOWED_HOSTS=["testserver"],
        INSTALLED_APPS=["responses_kit_django"],
        MIDDLEWARE=["django.middleware.common.CommonMiddleware"],
        ROOT_URLCONF="__main__",
        RESPONSES_KIT={"BACKEND": "responses_kit.testing.ScriptedBackend", "STORE": "memory:"},
    )

    import django

    django.setup()

    from django.core.checks import run_checks
    from django.test import Client, override_settings

    urlpatterns = [path("v1/", include("responses_kit_django.urls"))]
    (warning,) = run_checks(tags=["responses_kit"])
    assert warning.id == "responses_kit.W002", warning
    assert "which needs 'django.contrib.auth' in INSTALLED_APPS and 'django.contrib.sessions'" in warning.msg, warning
    with override_settings(RESPONSES_KIT={**settings.RESPONSES_KIT, "AUTH": [], "OWNER": None}):
        assert run_checks(tags=["responses_kit"]) == []
        answer = Client().post("/v1/responses", {"input": "Hi"}, content_type="application/json")
        assert answer.status_code == 200, answer.content
"""


def test_project_without_users_and_database_is_clean() -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(BARE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Errors.


@pytest.mark.parametrize(
    ("changes", "number", "message"),
    [
        ({"BACKENDS": 1}, "E001", "RESPONSES_KIT has no setting 'BACKENDS': did you mean 'BACKEND'?"),
        ({"AUTH": "a.b"}, "E001", "RESPONSES_KIT['AUTH'] must be a list"),
        ({"BACKEND": "no.where"}, "E002", "RESPONSES_KIT['BACKEND']: No module named 'no'"),
        ({"BACKEND": f"{HERE}.HERE"}, "E002", "RESPONSES_KIT['BACKEND'] must be a subclass of responses_kit.Backend"),
        ({"BACKEND": MemoryStore}, "E002", "RESPONSES_KIT['BACKEND'] must be a subclass of responses_kit.Backend"),
        ({"AUTH": ["no.where"]}, "E003", "RESPONSES_KIT['AUTH']: No module named 'no'"),
        ({"AUTH": [MemoryStore]}, "E003", "RESPONSES_KIT['AUTH'] must be a function of the request, not MemoryStore"),
        ({"OWNER": "no.where"}, "E003", "RESPONSES_KIT['OWNER']: No module named 'no'"),
        ({"OWNER": f"{HERE}.HERE"}, "E003", "RESPONSES_KIT['OWNER'] must be a function of the request, not str"),
        (
            {"PERMISSION": MemoryStore},
            "E003",
            "RESPONSES_KIT['PERMISSION'] must be a function of the request, not MemoryStore",
        ),
        ({"STORE": "orm:nowhere"}, "E004", "RESPONSES_KIT['STORE']: the database 'nowhere' cannot be used"),
        ({"STORE": "ftp://x"}, "E004", "RESPONSES_KIT['STORE']: a store URL must start with"),
        ({"STORE": None}, "E004", "RESPONSES_KIT['STORE']: a store URL must start with"),
        ({"STORE": ScriptedBackend()}, "E004", "'store' must have the methods of ResponseStore"),
        ({"STORE": "no.where"}, "E004", "RESPONSES_KIT['STORE']: No module named 'no'"),
        ({"STORE_OPTIONS": {"tll": 1}}, "E004", "RESPONSES_KIT['STORE']: OrmStore.__init__() got an unexpected"),
        ({"RUNNER": "no.where"}, "E005", "RESPONSES_KIT['RUNNER']: No module named 'no'"),
        ({"RUNNER": MemoryStore}, "E005", "'runner' must have the methods of Runner, unlike MemoryStore"),
        (
            {"RUNNER": OutOfProcessRunner, "STORE": "memory:"},
            "E005",
            "workers in other processes cannot read this process's memory",
        ),
        ({"TOOLS": ["no.where"]}, "E006", "RESPONSES_KIT['TOOLS']: No module named 'no'"),
        (
            {"TOOLS": [MemoryStore]},
            "E006",
            "RESPONSES_KIT['TOOLS'] must contain HostedTool instances, toolsets, or functions",
        ),
    ],
)
def test_invalid_setting_is_error(changes: dict[str, Any], number: str, message: str) -> None:
    with override_project(**changes):
        errors = run_app_checks()
    assert errors.keys() == {number}
    assert message in errors[number]


def test_all_errors_are_reported_together() -> None:
    with override_project(BACKEND=5, OWNER=5, STORE="no:", RUNNER=5, TOOLS=[5]):
        assert sorted(run_app_checks()) == ["E002", "E003", "E004", "E005", "E006"]


def test_setting_other_than_dict_is_error() -> None:
    with override_settings(ROOT_URLCONF=HERE, RESPONSES_KIT=["BACKEND"]):
        assert run_app_checks(deploy=True) == {
            "E001": "RESPONSES_KIT must be a dict, such as {'BACKEND': 'path.to.Backend'}"
        }


def test_missing_local_extra_is_error_with_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("responses_kit.backends.local")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ctransformers", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with override_settings(ROOT_URLCONF=HERE, MIDDLEWARE=MIDDLEWARE):
        (message,) = run_checks(tags=["responses_kit"])
    assert message.id == "responses_kit.E002"
    assert 'pip install "responses-kit[local]"' in message.msg
    assert message.hint == "Or use your own backend: RESPONSES_KIT = {'BACKEND': 'path.to.Backend'}."


def test_unsupported_database_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(connections["default"]), "vendor", "oracle")
    with override_project():
        errors = run_app_checks()
    assert errors.keys() == {"E004"}
    assert "an OrmStore needs PostgreSQL or SQLite" in errors["E004"]


def test_checks_do_not_connect_to_database(monkeypatch: pytest.MonkeyPatch) -> None:
    connections.close_all()
    monkeypatch.setattr(type(connections["default"]), "connect", create_nothing)
    with override_project():
        assert run_app_checks(deploy=True) == {}


# Warnings.


def test_missing_urls_are_reported() -> None:
    with override_project(urls="tests.integrations.django.urls"):
        warnings = run_app_checks()
    assert warnings == {"W001": "The app responses_kit_django is installed, but the URLconf does not include its API."}


def without(word: str) -> list[str]:
    return [one for one in MIDDLEWARE if word not in one]


@pytest.mark.parametrize(
    ("middleware", "missing"),
    [
        (without("SessionMiddleware"), "SessionMiddleware in MIDDLEWARE."),
        (without("Authentication"), "AuthenticationMiddleware in MIDDLEWARE."),
        ([], "SessionMiddleware in MIDDLEWARE and AuthenticationMiddleware in MIDDLEWARE."),
    ],
)
def test_missing_session_middleware_is_reported(middleware: list[str], missing: str) -> None:
    with override_project(more={"MIDDLEWARE": middleware}):
        warnings = run_app_checks()
    assert warnings == {
        "W002": f"RESPONSES_KIT['AUTH'] contains responses_kit_django.auth.session, which needs {missing}"
    }
    with override_project(AUTH=[hook], more={"MIDDLEWARE": middleware}):
        assert run_app_checks() == {}


@pytest.mark.parametrize(("engine", "needed"), [("db", True), ("cached_db", True), ("signed_cookies", False)])
def test_missing_session_app_is_reported(monkeypatch: pytest.MonkeyPatch, engine: str, needed: bool) -> None:
    is_installed = apps.is_installed
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "django.contrib.sessions" and is_installed(name))
    with override_project(more={"SESSION_ENGINE": f"django.contrib.sessions.backends.{engine}"}):
        warnings = run_app_checks()
    assert ("'django.contrib.sessions' in INSTALLED_APPS" in warnings.get("W002", "")) == needed


class OurSessions(SessionMiddleware):
    """A subclass of Django's session middleware."""


@sync_and_async_middleware
def decompressing(get_response: Any) -> Any:
    return get_response


class OurGZip(GZipMiddleware):
    """A subclass of Django's compression middleware."""


@sync_and_async_middleware
def brotli_middleware(get_response: Any) -> Any:
    return get_response


@sync_and_async_middleware
def zstd_for_all(get_response: Any) -> Any:
    return get_response


def test_custom_session_middleware_is_accepted() -> None:
    with override_project(more={"MIDDLEWARE": [f"{HERE}.OurSessions", *without("SessionMiddleware")]}):
        assert run_app_checks() == {}


@pytest.mark.parametrize("changes", [{"AUTH": []}, {"AUTH": [], "OWNER": "responses_kit_django.auth.user"}])
def test_session_without_csrf_check_is_reported(changes: dict[str, Any]) -> None:
    with override_project(**changes):
        warnings = run_app_checks()
    assert warnings.keys() == {"W003"}
    assert "there is no CSRF check" in warnings["W003"]


@pytest.mark.parametrize("name", ["brotli_middleware", "zstd_for_all"])
def test_foreign_compression_middleware_is_reported(name: str) -> None:
    with override_project(more={"MIDDLEWARE": [f"{HERE}.{name}", *MIDDLEWARE]}):
        warnings = run_app_checks()
    assert warnings.keys() == {"W004"}
    assert f"{HERE}.{name} may compress streams" in warnings["W004"]


def test_django_gzip_middleware_is_accepted() -> None:
    with override_project(more={"MIDDLEWARE": [f"{HERE}.OurGZip", f"{HERE}.decompressing", *MIDDLEWARE]}):
        assert run_app_checks() == {}


def test_django_own_findings_are_not_repeated() -> None:
    with override_project(more={"MIDDLEWARE": ["no.where.Middleware", *MIDDLEWARE]}):
        assert run_app_checks(deploy=True) == {}


@pytest.mark.parametrize("store", ["memory:", MemoryStore()])
@pytest.mark.parametrize(
    ("debug", "processes", "warned"), [(False, None, True), (True, None, False), (True, "1", False), (True, "4", True)]
)
def test_memory_store_is_deploy_warning(
    monkeypatch: pytest.MonkeyPatch, store: Any, debug: bool, processes: str | None, warned: bool
) -> None:
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    if processes is not None:
        monkeypatch.setenv("WEB_CONCURRENCY", processes)
    with override_project(STORE=store, more={"DEBUG": debug}):
        assert run_app_checks() == {}
        assert list(run_app_checks(deploy=True)) == ["W005"] * warned


def test_missing_owner_hook_is_deploy_warning() -> None:
    with override_project(OWNER=None):
        assert run_app_checks() == {}
        warnings = run_app_checks(deploy=True)
    assert warnings.keys() == {"W006"}
    assert "each can read and delete any response" in warnings["W006"]


def test_runner_without_workers_is_reported() -> None:
    with override_project(RUNNER="responses_kit_django.runners.TaskRunner"):
        assert run_app_checks() == {}
        warnings = run_app_checks(deploy=True)
    assert warnings.keys() == {"W007"}
    assert "the ImmediateBackend, which has no workers" in warnings["W007"]


def test_runner_with_unknown_queue_is_error() -> None:
    for options, expected in (({"queue_name": "slow"}, "Queue 'slow' is not valid"), ({"backend": "other"}, "'other'")):
        with override_project(RUNNER=TaskRunner(**options)):  # type: ignore[arg-type]
            errors = run_app_checks()
        assert errors.keys() == {"E005"}
        assert "the options of TaskRunner do not match the setting TASKS" in errors["E005"]
        assert expected in errors["E005"]
