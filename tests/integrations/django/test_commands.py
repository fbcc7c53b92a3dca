"""Tests of the management commands: pruning the store, and checking a running server."""

from __future__ import annotations

import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any, ClassVar

import pytest

from responses_kit import Backend
from responses_kit._concurrency import loop_thread
from responses_kit.stores.memory import MemoryStore
from responses_kit.stores.protocol import Record
from responses_kit.testing import ScriptedBackend

from .databases import configure

configure()

from django.core.handlers.wsgi import WSGIHandler  # noqa: E402  # Django's settings come first
from django.core.management import CommandError, call_command  # noqa: E402
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler  # noqa: E402
from django.db import connection  # noqa: E402
from django.http import HttpRequest  # noqa: E402
from django.test import override_settings  # noqa: E402
from django.urls import include, path  # noqa: E402

from responses_kit_django.auth import bearer_token  # noqa: E402
from responses_kit_django.conf import Conf, get_kit  # noqa: E402
from responses_kit_django.models import Conversation, Response  # noqa: E402
from responses_kit_django.signals import response_failed  # noqa: E402

HERE = __name__

KEY = "sk-wonderland-42"

urlpatterns = [path("v1/", include("responses_kit_django.urls"))]


class Heavy(Backend):
    """A backend that pruning must not create."""

    models = ("heavy",)

    def __init__(self) -> None:
        raise AssertionError("the command made the backend")

    async def generate(self, turn: Any) -> Any:
        yield "Uff."


@contextmanager
def project(**said: Any) -> Iterator[None]:
    with override_settings(
        ROOT_URLCONF=HERE,
        ALLOWED_HOSTS=["127.0.0.1"],
        RESPONSES_KIT={"BACKEND": f"{HERE}.Heavy", **said},
    ):
        yield


# responses_kit_prune


@pytest.fixture
def _empty_tables() -> Iterator[None]:
    Conversation.objects.all().delete()
    yield
    Conversation.objects.all().delete()


def create_responses(count: int, **options: Any) -> list[str]:
    """Create responses in the project's database, and return their ids, oldest first."""
    with project(BACKEND=lambda: ScriptedBackend(["Hi."]), STORE_OPTIONS=options):
        return [loop_thread.call(lambda: get_kit().create({"input": "Hi"}, owner="ann"))["id"] for _ in range(count)]


def prune(*arguments: str) -> str:
    out = StringIO()
    call_command("responses_kit_prune", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.usefixtures("_empty_tables")
def test_prune_deletes_expired_responses_without_backend() -> None:
    create_responses(3, ttl=0.001)
    (alive,) = create_responses(1)
    with project():
        assert prune() == "Deleted 3 responses, ended 0 orphaned responses.\n"
        assert prune() == "Deleted 0 responses, ended 0 orphaned responses.\n"
    assert [row.response_id for row in Response.objects.all()] == [alive]


@pytest.mark.usefixtures("_empty_tables")
def test_prune_keeps_at_most_max_records() -> None:
    made = create_responses(5)
    with project(STORE_OPTIONS={"max_records": 4}):
        assert prune("--max-records", "2") == "Deleted 3 responses, ended 0 orphaned responses.\n"
        assert prune().startswith("Deleted 0 responses")
        assert sorted(row.response_id for row in Response.objects.all()) == sorted(made[3:])
        assert prune("--max-records", "0").startswith("Deleted 2 responses")


@pytest.mark.usefixtures("_empty_tables")
def test_prune_ends_orphaned_responses_with_signal() -> None:
    lost = Record(id="resp_lost", previous_id=None, input=b"[]", response=RUNNING, lease=1.0)
    received: list[tuple[str, str]] = []

    def receiver(owner: str, response: Any, **_: Any) -> None:
        received.append((owner, response["status"]))

    response_failed.connect(receiver)
    try:
        with project():
            loop_thread.call(Conf().build_store().create, "ann", lost)
            assert prune() == "Deleted 0 responses, ended 1 orphaned responses.\n"
            assert prune().endswith(", ended 0 orphaned responses.\n")
    finally:
        response_failed.disconnect(receiver)
    assert received == [("ann", "failed")]
    (row,) = Response.objects.all()
    assert (row.final, row.status) == (True, "failed")
    assert '"worker_lost"' in row.response


RUNNING = (
    b'{"id": "resp_lost", "object": "response", "status": "in_progress", "output": [], "error": null, "usage": null,'
    b' "incomplete_details": null, "completed_at": null, "created_at": 1, "model": "heavy", "background": false}'
)


def test_prune_reports_missing_tables_with_remedy() -> None:
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE responses_kit_django_response RENAME TO elsewhere")
    try:
        with project(), pytest.raises(CommandError, match=r"The store failed: .*run `manage.py migrate`"):
            prune()
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE elsewhere RENAME TO responses_kit_django_response")


class Noting:
    """A custom store that records its calls."""

    done: ClassVar[list[str]] = []

    async def prune(self) -> int:
        self.done.append("prune")
        return 7

    async def expired(self, now: float, limit: int = 100) -> list[Any]:
        self.done.append("expired")
        return []


class Closing(Noting):
    async def aclose(self) -> None:
        self.done.append("aclose")


class Failing(Closing):
    async def prune(self) -> int:
        raise OSError("the disk is full")


@pytest.mark.parametrize(("store", "done"), [(Noting, ["prune", "expired"]), (Closing, ["prune", "expired", "aclose"])])
def test_prune_works_with_any_store_and_closes_it(store: Any, done: list[str]) -> None:
    Noting.done.clear()
    with project(STORE=store):
        assert prune() == "Deleted 7 responses, ended 0 orphaned responses.\n"
    assert Noting.done == done


def test_prune_reports_failing_store_and_closes_it() -> None:
    Noting.done.clear()
    with project(STORE=Failing), pytest.raises(CommandError, match="The store failed: the disk is full"):
        prune()
    assert Noting.done == ["aclose"]


@pytest.mark.parametrize(
    ("said", "arguments", "complaint"),
    [
        ({"STORE": "memory:"}, (), "A memory store needs no pruning"),
        ({}, ("--max-records", "-1"), "--max-records must not be negative."),
        ({"STORE": Noting}, ("--max-records", "5"), r"RESPONSES_KIT\['STORE'\]: .*takes no arguments"),
        ({"STORE": "orm:nowhere"}, (), r"RESPONSES_KIT\['STORE'\]: the database 'nowhere' cannot be used"),
        ({"STORES": "orm:"}, (), r"RESPONSES_KIT has no setting 'STORES'"),
    ],
)
def test_prune_reports_invalid_settings(said: dict[str, Any], arguments: tuple[str, ...], complaint: str) -> None:
    with project(**said), pytest.raises(CommandError, match=complaint):
        prune(*arguments)


# responses_kit_check


def by_key(request: HttpRequest) -> str | None:
    return "ann" if bearer_token(request) == KEY or request.headers.get("X-Key") == KEY else None


class Silent(WSGIRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """The URL of the API of a project that is served by Django's own server."""
    served = ThreadedWSGIServer(("127.0.0.1", 0), Silent)
    served.daemon_threads = False  # server_close() joins the threads
    said = {
        "BACKEND": lambda: ScriptedBackend(["Hello."]),
        "STORE": MemoryStore(),
        "AUTH": [by_key],
        "OWNER": None,
    }
    with project(**said):
        served.set_app(WSGIHandler())
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}/v1"
        finally:
            served.shutdown()
            served.server_close()
            thread.join(20)


def check(*arguments: str) -> str:
    out = StringIO()
    try:
        call_command("responses_kit_check", *arguments, stdout=out, no_color=True)
    finally:
        assert KEY not in out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize("key", [("--key", KEY), ("--header", f"X-Key: {KEY}")])
def test_check_passes_for_working_server(server: str, key: tuple[str, str]) -> None:
    lines = check(server, *key).splitlines()
    assert [line for line in lines if not re.match(r"(ok     |skipped)  \S", line)] == []
    assert [line for line in lines if line.startswith("ok       stream ")]
    assert len(lines) > 10


def test_check_reads_key_from_environment(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESPONSES_KIT_API_KEY", KEY)
    assert "failed" not in check(server)


def test_check_uses_given_model(server: str) -> None:
    with pytest.raises(CommandError, match=r"of these checks failed"):
        check(server, "--key", KEY, "--model", "nobody")
    assert "failed" not in check(server, "--key", KEY, "--model", "scripted")


def test_check_fails_for_faulty_server(server: str) -> None:
    out = StringIO()
    with pytest.raises(CommandError, match=r"1 of these checks failed\.") as error:
        call_command("responses_kit_check", server, key="wrong", stdout=out, no_color=True)
    assert error.value.returncode == 1
    assert re.fullmatch(r"failed   models .*401.*\n", out.getvalue())


def test_check_fails_for_unreachable_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(CommandError, match="of these checks failed"):
        check(f"http://127.0.0.1:{port}/v1", "--timeout", "5")


def test_check_uses_colours(server: str) -> None:
    out = StringIO()
    call_command("responses_kit_check", server, key=KEY, stdout=out, force_color=True)
    assert "\x1b[32;1mok     \x1b[0m  " in out.getvalue()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("ftp://x/v1",), "The URL must be the base URL of the API"),
        (("http://x/v1", "--header", "X-Key"), 'A header must have the form "Name: value".'),
        (("http://x/v1", "--header", "X Key: 5"), "Header names must consist of letters, digits and dashes"),
        ((), "the following arguments are required: URL"),
    ],
)
def test_check_reports_missing_address(arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(CommandError, match=re.escape(complaint)):
        check(*arguments)


def test_check_reports_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "responses_kit.diagnostics.server", None)
    monkeypatch.delitem(sys.modules, "responses_kit.diagnostics", raising=False)
    with pytest.raises(CommandError, match=re.escape('pip install "responses-kit[cli]"')):
        check("http://127.0.0.1:1/v1")
