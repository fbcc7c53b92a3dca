"""Tests of background responses on workers of Django's tasks framework and of Celery."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import django
import httpx
import pytest
from asgiref.local import Local

from responses_kit import Turn
from responses_kit._concurrency import loop_thread
from responses_kit.engine.run import Run
from responses_kit.errors import NotFound, ServerError, StoreError
from responses_kit.runners import base as kit_runners
from responses_kit.stores.memory import MemoryStore
from responses_kit.testing import Pause, ScriptedBackend

from ...support.conformance import check_stream
from .databases import POSTGRES, configure
from .projects import Project

configure()

from django.core.exceptions import ImproperlyConfigured  # noqa: E402  # Django's settings come first
from django.test import override_settings  # noqa: E402
from django.utils.module_loading import import_string  # noqa: E402

import responses_kit_django  # noqa: E402
from responses_kit_django import conf, runners, tasks  # noqa: E402
from responses_kit_django.conf import Conf, get_kit  # noqa: E402
from responses_kit_django.models import Conversation  # noqa: E402
from responses_kit_django.runners import TaskRunner, task_backends  # noqa: E402

BOUND = 40.0

LEASE = 2.0
"""Seconds; short to keep the tests fast."""

BROKER = os.environ.get("RESPONSES_KIT_TEST_RABBITMQ")

TASKS = "django.tasks" if django.VERSION >= (6,) else "django_tasks"


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)  # other processes can only be polled


# A project with workers in other processes.

FILES = {
    "manage.py": """
        import os
        import sys

        from django.core.management import execute_from_command_line

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
        execute_from_command_line(sys.argv)
    """,
    "mysite/__init__.py": "",
    "mysite/settings.py": """
        import json
        import os

        SECRET_KEY = "a secret that is for tests alone, and long enough to be one"
        ALLOWED_HOSTS = ["127.0.0.1"]
        USE_TZ = True
        INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "responses_kit_django", "mysite"]
        DATABASES = {"default": json.loads(os.environ["PROJECT_DATABASE"])}
        ROOT_URLCONF = "mysite.urls"
        RESPONSES_KIT = {
            "BACKEND": "mysite.assistant.Ticker",
            "AUTH": [],
            "OWNER": "mysite.assistant.owner",
            "RUNNER": os.environ["PROJECT_RUNNER"],
            "TIMEOUTS": {"lease": float(os.environ["PROJECT_LEASE"])},
        }
        if "PROJECT_BROKER" not in os.environ:
            INSTALLED_APPS += ["django_tasks_db"]
            TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["responses"]}}
    """,
    "mysite/urls.py": """
        from django.urls import include, path

        urlpatterns = [path("v1/", include("responses_kit_django.urls"))]
    """,
    "mysite/asgi.py": """
        import os

        from django.core.asgi import get_asgi_application

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
        application = get_asgi_application()

        from responses_kit_django.asgi import ResponsesASGI

        application = ResponsesASGI(application)
    """,
    "mysite/wsgi.py": """
        import os

        from django.core.wsgi import get_wsgi_application

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
        application = get_wsgi_application()
    """,
    "mysite/assistant.py": """
        import asyncio
        import json
        import os

        from django.contrib.auth.models import User
        from django.dispatch import receiver

        from responses_kit import Backend
        from responses_kit_django.signals import response_completed

        made_in = None


        class Ticker(Backend):
            models = ["ticker"]

            def __init__(self):
                global made_in
                assert made_in != os.getpid(), "a second kit in one process"
                made_in = os.getpid()

            async def generate(self, turn):
                assert made_in == os.getpid(), "the kit of another process"
                asked = json.loads(turn.text)
                assert await User.objects.acount() == 0
                for number in range(asked["words"]):
                    await asyncio.sleep(asked["pause"])
                    yield f"{number} "


        @receiver(response_completed)
        def report(response, **_):
            assert User.objects.count() == 0
            print(f"TOLD {response['id']} {os.getpid()}", flush=True)


        def owner(request):
            return request.headers.get("X-Owner", "ann")


        def task_runner():
            from responses_kit_django.runners import TaskRunner

            return TaskRunner(queue_name="responses", priority=5)
    """,
    "mysite/celery.py": """
        import os

        from celery import Celery

        from responses_kit.runners.celery import CeleryRunner

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
        app = Celery("mysite", broker=os.environ["PROJECT_BROKER"])
        app.conf.task_default_queue = os.environ["PROJECT_QUEUE"]
        app.conf.broker_connection_retry_on_startup = True
        app.autodiscover_tasks()


        def runner():
            return CeleryRunner(app, queue_timeout=30.0)
    """,
}

WORKERS = {
    "tasks": ("manage.py", "db_worker", "--queue-name=*", "--interval=0.1", "--no-startup-delay"),
    "celery": ("-m", "celery", "-A", "mysite", "worker", "-c2", "-lINFO", "--without-gossip", "--without-mingle"),
}
READY = {"tasks": "Starting worker", "celery": " ready."}
RUNNERS = {"tasks": "mysite.assistant.task_runner", "celery": "mysite.celery.runner"}


class Fleet(Project):
    """A project with background responses on workers."""

    queue: str = ""

    @contextmanager
    def worker(self, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker until the block ends, and yield it when it is ready."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *WORKERS[self.queue]],
                cwd=self.folder,
                env={**os.environ, **self.environment, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            until = time.monotonic() + BOUND
            while READY[self.queue] not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(BOUND)


class Web:
    """A client of a web process."""

    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=f"{address}/v1", timeout=BOUND)

    def ask(self, words: int, pause: float = 0.0, **more: Any) -> dict[str, Any]:
        text = json.dumps({"words": words, "pause": pause})
        return self._done(self._client.post("/responses", json={"input": text, "background": True, **more}))

    def get(self, response_id: str) -> dict[str, Any]:
        return self._done(self._client.get(f"/responses/{response_id}"))

    def cancel(self, response_id: str) -> dict[str, Any]:
        return self._done(self._client.post(f"/responses/{response_id}/cancel"))

    def follow(self, response_id: str) -> list[dict[str, Any]]:
        answer = self._client.get(f"/responses/{response_id}?stream=true")
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    def ended(self, response_id: str) -> dict[str, Any]:
        wait_until(lambda: self.get(response_id)["status"] not in ("queued", "in_progress"))
        return self.get(response_id)

    def close(self) -> None:
        self._client.close()

    @staticmethod
    def _done(answer: httpx.Response) -> dict[str, Any]:
        assert answer.status_code == 200, answer.text
        done: dict[str, Any] = answer.json()
        return done


def database(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "sqlite":
        options = {"init_command": "PRAGMA journal_mode = WAL", "transaction_mode": "IMMEDIATE", "timeout": 20}
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "db.sqlite3"), "OPTIONS": options}
    parts = urlsplit(POSTGRES or "")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.removeprefix("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": {"options": f"-c search_path=kit_{uuid.uuid4().hex[:12]}"},
    }


@contextmanager
def schema(said: dict[str, Any]) -> Iterator[None]:
    """Create a PostgreSQL schema for a project, and drop it at the end of the block."""
    if said["ENGINE"].endswith("sqlite3"):
        yield
        return
    import psycopg

    name = said["OPTIONS"]["options"].partition("=")[2]
    with psycopg.connect(POSTGRES or "", autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        try:
            yield
        finally:
            connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    queue, _, kind = request.param.partition("-")
    if kind == "postgresql" and POSTGRES is None:
        pytest.skip("RESPONSES_KIT_TEST_POSTGRES is not set")
    if queue == "celery" and BROKER is None:
        pytest.skip("RESPONSES_KIT_TEST_RABBITMQ is not set")
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text).lstrip())
    if queue == "celery":
        (folder / "mysite" / "__init__.py").write_text("from .celery import app as celery_app\n")
    said = database(kind, tmp_path)
    environment = {
        "DJANGO_SETTINGS_MODULE": "mysite.settings",
        "PROJECT_DATABASE": json.dumps(said),
        "PROJECT_RUNNER": RUNNERS[queue],
        "PROJECT_LEASE": str(LEASE),
    }
    if queue == "celery":
        environment |= {"PROJECT_BROKER": BROKER or "", "PROJECT_QUEUE": f"kit_{uuid.uuid4().hex[:12]}"}
    fleet = Fleet(folder=folder, name="mysite", environment=environment)
    fleet.queue = queue
    with schema(said):
        fleet.manage("migrate", "-v0")
        yield fleet


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fleet", "server"),
    [("tasks-sqlite", "uvicorn"), ("tasks-postgresql", "gunicorn"), ("celery-postgresql", "uvicorn")],
    indirect=["fleet"],
)
def test_workers_run_responses_of_web_processes(fleet: Fleet, tmp_path: Path, server: str) -> None:
    fleet.manage("check", "--fail-level=WARNING")
    log = tmp_path / "worker.log"
    with fleet.served(server, tmp_path) as address:
        web = Web(address)
        waiting, unwanted = web.ask(3), web.ask(3)
        assert [web.get(one["id"])["status"] for one in (waiting, unwanted)] == ["queued"] * 2
        assert web.cancel(unwanted["id"])["status"] == "cancelled"
        with fleet.worker(log) as process:
            whole = web.follow(waiting["id"])
            assert check_stream(whole) == web.get(waiting["id"])
            assert web.get(waiting["id"])["status"] == "completed"
            wait_until(
                lambda: f"TOLD {waiting['id']}" in log.read_text()
            )  # sent by the worker, and not by the web process

            more = web.ask(2, previous_response_id=waiting["id"])
            assert web.ended(more["id"])["status"] == "completed"

            endless = web.ask(10_000, 0.02)
            wait_until(lambda: web.get(endless["id"])["status"] == "in_progress")
            cancelled = web.cancel(endless["id"])
            assert cancelled["status"] == "cancelled"
            assert check_stream(web.follow(endless["id"])) == cancelled
            assert web.get(unwanted["id"])["status"] == "cancelled"

            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND) == 0
        web.close()
    output = log.read_text()
    assert "Traceback" not in output, output
    assert "DuplicateTaskName" not in output, output
    assert output.count(f"TOLD {waiting['id']} ") == 1
    assert f"TOLD {unwanted['id']}" not in output


@pytest.mark.timeout(240)
@pytest.mark.parametrize("fleet", ["tasks-sqlite", "celery-postgresql"], indirect=True)
def test_killed_worker_fails_running_and_hands_on_queued_responses(fleet: Fleet, tmp_path: Path) -> None:
    with fleet.served("uvicorn", tmp_path) as address:
        web = Web(address)
        with fleet.worker(tmp_path / "first.log") as process:
            # The number of concurrent responses; Celery's worker has two processes.
            running = [web.ask(10_000, 0.05)["id"] for _ in range(2 if fleet.queue == "celery" else 1)]
            for one in running:
                wait_until(lambda at=one: web.get(at)["status"] == "in_progress")  # type: ignore[misc]
            waiting = web.ask(2)["id"]
            os.killpg(process.pid, signal.SIGKILL)
        for one in running:
            assert web.ended(one)["error"]["code"] == "worker_lost"
        assert web.get(waiting)["status"] == "queued"
        with fleet.worker(tmp_path / "second.log"):
            assert web.ended(waiting)["status"] == "completed"
            assert [web.get(one)["status"] for one in running] == ["failed"] * len(running)
        web.close()


FORKS = """
    import os
    import signal
    import traceback
    import warnings

    import django

    django.setup()

    from mysite import assistant
    from responses_kit._concurrency import loop_thread
    from responses_kit_django.conf import get_kit


    def answer():
        loop_thread.start_kit(get_kit())
        asked = {"input": '{"words": 2, "pause": 0}'}
        made = loop_thread.call(lambda: get_kit().create(asked, owner="ann"))
        assert loop_thread.call(lambda: get_kit().retrieve(made["id"], owner="ann")) == made


    def in_a_child():
        child = os.fork()
        if child:
            return child
        signal.alarm(20)
        assistant.made_in = os.getpid()
        try:
            answer()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


    answer()
    warnings.simplefilter("ignore")  # of forks where there are threads, which is what this is about
    children = [in_a_child() for _ in range(2)]
    answer()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    answer()
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fleet", ["tasks-sqlite", "tasks-postgresql"], indirect=True)
def test_used_kit_works_in_forked_processes(fleet: Fleet) -> None:
    fleet.run("-c", dedent(FORKS))
    output = fleet.manage("responses_kit_prune", "--max-records", "1")
    assert output == "Deleted 4 responses, ended 0 orphaned responses.\n"


# The runner in this process.


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    Conversation.objects.all().delete()


class Queue(importlib.import_module(f"{TASKS}.backends.base").BaseTaskBackend):  # type: ignore[misc,name-defined]
    """A tasks backend that records tasks, and calls a function with each."""

    supports_priority = True
    given: ClassVar[list[tuple[Any, list[Any], bool]]] = []
    trouble: ClassVar[Callable[[], object]] = bool

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            in_thread = True
        else:
            in_thread = False
        self.given.append((task, [*args], in_thread))
        type(self).trouble()


@contextmanager
def said(queues: dict[str, Any] | None = None, **more: Any) -> Iterator[None]:
    """Override the settings `TASKS` and `RESPONSES_KIT`."""

    def renew() -> None:  # Django 6 does so by itself
        task_backends.__dict__.pop("settings", None)
        task_backends._settings = None
        task_backends._connections = Local()
        conf._build_runner.cache_clear()  # a new process has no kit
        importlib.reload(tasks)

    ours = {"BACKEND": lambda: ScriptedBackend(["Hi."]), **more}
    Queue.given.clear()
    Queue.trouble = bool
    with override_settings(TASKS=queues or QUEUES, RESPONSES_KIT=ours):
        renew()
        try:
            yield
        finally:
            loop_thread.stop_kit(get_kit())
    renew()


QUEUES = {
    "default": {"BACKEND": f"{__name__}.Queue"},
    "slow": {"BACKEND": f"{__name__}.Queue", "QUEUES": ["responses"]},
    "now": {"BACKEND": f"{TASKS}.backends.immediate.ImmediateBackend"},
}


def ask(**more: Any) -> dict[str, Any]:
    found = get_kit()
    return loop_thread.call(lambda: found.create({"input": "Hi", "background": True, **more}, owner="ann"))


def retrieve(response_id: str) -> dict[str, Any]:
    return loop_thread.call(lambda: get_kit().retrieve(response_id, owner="ann"))


def test_task_holds_owner_and_id_and_is_enqueued_in_thread() -> None:
    with said(RUNNER=TaskRunner):
        response = ask()
        assert response["status"] == "queued"
        ((task, arguments, in_thread),) = Queue.given
        assert arguments == ["ann", response["id"]]
        assert in_thread
        assert (task.backend, task.queue_name, task.priority) == ("default", "default", 0)


def test_task_options_come_from_runner() -> None:
    with said(RUNNER=TaskRunner(backend="slow", queue_name="responses", priority=7)):
        ask()
        ((task, _, _),) = Queue.given
        assert (task.backend, task.queue_name, task.priority) == ("slow", "responses", 7)


def test_worker_imports_task_and_runs_response_once() -> None:
    with said(RUNNER=TaskRunner):
        response = ask()
        ((task, arguments, _),) = Queue.given
        found = import_string(task.module_path)
        assert type(found) is type(task)
        found.call(*arguments)
        done = retrieve(response["id"])
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hi.")
        found.call(*arguments)
        found.call("bob", response["id"])
        assert len(get_kit().backend.turns) == 1  # type: ignore[attr-defined]  # a scripted one has them


def test_response_cancelled_in_queue_is_not_run() -> None:
    with said(RUNNER=TaskRunner):
        response = ask()
        assert loop_thread.call(lambda: get_kit().cancel(response["id"], owner="ann"))["status"] == "cancelled"
        tasks.work.call("ann", response["id"])
        assert retrieve(response["id"])["status"] == "cancelled"


def fails() -> None:
    raise OSError("connection refused")


def test_failing_queue_is_reported_and_nothing_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    with said(RUNNER=TaskRunner):
        Queue.trouble = fails
        with pytest.raises(ServerError, match="The server's task queue is out of reach"):
            ask()
        ((_, (_, response_id), _),) = Queue.given
        with pytest.raises(NotFound):
            retrieve(response_id)
    assert [record.getMessage() for record in caplog.records] == [
        f"response {response_id} could not be sent to a worker: connection refused"
    ]


def test_hanging_queue_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_runners, "_SEND_TIMEOUT", 0.1)
    release = threading.Event()
    with said(RUNNER=TaskRunner):
        Queue.trouble = lambda: release.wait(BOUND)
        try:
            with pytest.raises(ServerError, match="The server's task queue is out of reach"):
                ask()
        finally:
            release.set()


def test_immediate_backend_runs_in_process_outside_request() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def script(turn: Turn) -> Iterator[Any]:
        begun.set()
        while not may_end.is_set():
            yield Pause(0.01)
        yield "Hi."

    with said(RUNNER=TaskRunner(backend="now"), BACKEND=lambda: ScriptedBackend(script)):
        response = ask()
        assert begun.wait(BOUND)
        assert retrieve(response["id"])["status"] == "in_progress"
        may_end.set()
        wait_until(lambda: retrieve(response["id"])["status"] == "completed")


@pytest.mark.parametrize("options", [{"backend": "nowhere"}, {"queue_name": "nowhere"}, {"priority": 1000}])
def test_invalid_options_are_reported_at_startup(options: dict[str, Any]) -> None:
    with said(RUNNER=None):
        made = {"BACKEND": ScriptedBackend, "RUNNER": TaskRunner(**options)}
        with pytest.raises(ImproperlyConfigured, match="the options of TaskRunner do not match the setting TASKS"):
            Conf(made).build()


def test_failing_store_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", pauses.append)
    pauses.clear()
    with said(RUNNER=TaskRunner):
        loop_thread.start_kit(get_kit())
        response = ask()
        get, failures = get_kit().store.get, [OSError("away")] * 2

        async def shaky(owner: str, response_id: str) -> Any:
            if failures:
                raise failures.pop()
            return await get(owner, response_id)

        monkeypatch.setattr(get_kit().store, "get", shaky)
        tasks.work.call("ann", response["id"])
        assert retrieve(response["id"])["status"] == "completed"
        assert pauses == [1.0, 5.0]
        failures += [OSError("away")] * 5
        with pytest.raises(StoreError):
            tasks.work.call("ann", response["id"])
        assert pauses == [1.0, 5.0, 1.0, 5.0, 15.0, 30.0]


pauses: list[float] = []


@pytest.mark.skipif(django.VERSION >= (6,), reason="Django has its tasks itself")
def test_missing_django_tasks_is_reported_with_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django_tasks", None)
    monkeypatch.delitem(sys.modules, "responses_kit_django.runners")
    with pytest.raises(ImproperlyConfigured, match=r"\['RUNNER'\]: .*pip install django-tasks"):
        Conf({"RUNNER": "responses_kit_django.runners.TaskRunner"}).get_runner()
    monkeypatch.setattr(responses_kit_django, "runners", runners)


# A queue that registers tasks by name, as Celery does.


class Named:
    """Register a task, which a queue of this kind accepts once."""

    is_out_of_process = True
    queue_timeout = 60.0

    def __init__(self) -> None:
        self.work: Any = None
        self.given: list[tuple[str, str]] = []

    def bind(self, work: Any) -> None:
        assert self.work is None, "bound twice"
        self.work = work

    async def submit(self, run: Run) -> None:
        self.given.append(run.key)


def a_named_runner() -> Named:
    return Named()


@pytest.mark.parametrize("runner", [f"{__name__}.a_named_runner", a_named_runner, Named, Named()])
def test_runner_is_bound_once_and_uses_current_kit(runner: Any) -> None:
    with said(RUNNER=runner):
        named: Any = Conf().get_runner()
        assert named.work is not None  # before there is a kit, as in a worker that forks
        response = ask()
        assert named.given == [("ann", response["id"])]
        first = get_kit()
        with override_settings(SECRET_KEY="another one, so that there is another kit"):
            assert get_kit() is not first
            loop_thread.call(named.work, "ann", response["id"])
            assert retrieve(response["id"])["status"] == "completed"
            assert len(get_kit().backend.turns) == 1  # type: ignore[attr-defined]


def test_out_of_process_runner_requires_shared_store() -> None:
    with (
        said(RUNNER=None),
        pytest.raises(ImproperlyConfigured, match="workers in other processes cannot read this process's memory"),
    ):
        Conf({"BACKEND": ScriptedBackend, "RUNNER": Named(), "STORE": MemoryStore()}).build()
