"""docs/django.md, followed to the letter: its blocks make a project, which is served, asked and tested as it says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from ..serving import ROOT
from .databases import configure
from .projects import Project, ended
from .test_example_project import browser, csrf  # noqa: F401  # a fixture

pytestmark = pytest.mark.timeout(240)  # a project is not made in a moment

DOCUMENT = ROOT / "docs" / "django.md"
ADDRESS = "http://127.0.0.1:8000"
RABBITMQ = os.environ.get("RESPONSES_KIT_TEST_RABBITMQ")
BOUND = 30.0


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, and the headings above it."""

    section: str
    language: str
    code: str

    @property
    def file(self) -> str | None:
        """The file that it belongs into."""
        named = re.match(r"# (\S+\.py)\n", self.code)
        return named[1] if named else None


def _read(text: str) -> Iterator[Block]:
    section = ""
    for heading, language, code in re.findall(r"^##+ ([^\n]*)$|^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        section = heading or section
        if language:
            yield Block(section, language, code)


BLOCKS = list(_read(DOCUMENT.read_text()))
FIRST = ("Four lines", "The first request")


def only(language: str, section: str, containing: str = "") -> Block:
    (block,) = (one for one in BLOCKS if (one.language, one.section) == (language, section) and containing in one.code)
    return block


def follow(project: Project, blocks: list[Block]) -> None:
    """Does what the blocks say, one after the other."""
    for block in blocks:
        if block.file is not None:
            file = project.folder / block.file
            file.parent.mkdir(exist_ok=True)
            with file.open("a") as opened:
                opened.write(f"\n\n{block.code}")
        elif block.language == "sh":
            for command in re.findall(r"^python (manage.py .*)$", block.code, re.MULTILINE):
                if "responses_kit_check" not in command:  # which needs a server
                    project.run(*command.split())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """What somebody in a hurry has."""
    project = Project(folder=tmp_path_factory.mktemp("begun"), name="mysite")
    project.run("-m", "django", "startproject", "mysite", ".")
    follow(project, [block for block in BLOCKS if block.section in FIRST])
    return project


@pytest.fixture(scope="module")
def whole(begun: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """What somebody has who has read on, and uses Django's tasks."""
    project = Project(folder=tmp_path_factory.mktemp("whole"), name="mysite")
    shutil.copytree(begun.folder, project.folder, dirs_exist_ok=True)
    follow(project, [block for block in BLOCKS if block.section not in FIRST])
    return project


def changed(project: Project, tmp_path: Path, settings: str) -> Project:
    """A copy with more settings."""
    shutil.copytree(project.folder, tmp_path / "changed")
    with (tmp_path / "changed" / "mysite" / "settings.py").open("a") as opened:
        opened.write(settings)
    return Project(folder=tmp_path / "changed", name="mysite")


def test_each_python_block_says_which_file_it_belongs_into() -> None:
    assert [block.code for block in BLOCKS if block.language == "python" and block.file is None] == []
    assert {block.language for block in BLOCKS} == {"python", "sh", "js", "nginx"}


def test_the_readme_says_the_same_in_short() -> None:
    said = [block.code for block in _read((ROOT / "README.md").read_text()) if block.file is not None]
    assert len(said) >= 3
    assert set(said) <= {block.code for block in BLOCKS}


def test_the_table_of_settings_has_each_of_them() -> None:
    configure()
    from responses_kit_django import conf

    table = DOCUMENT.read_text().partition("## Settings")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z_]{4,})`", table)) - {
        "DATA_UPLOAD_MAX_MEMORY_SIZE",
        "RESPONSES_KIT",
        "SECRET_KEY",
        "SECRET_KEY_FALLBACKS",
    } == {*conf.DEFAULTS, *conf._PASSED_ON}


# The first section.


@pytest.mark.parametrize("server", ["runserver", "uvicorn", "gunicorn"])
def test_the_first_request_is_answered(begun: Project, server: str, tmp_path: Path) -> None:
    command = next((block.code for block in BLOCKS if block.code.startswith(f"{server} ")), "")
    options = shlex.split(command.replace("--workers 4", "--workers 2"))[2:]  # what stands behind the app
    with begun.served(server, tmp_path, *options) as address:
        curl = only("sh", "The first request").code.replace(ADDRESS, address)
        told = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=BOUND, check=True).stdout
        assert re.findall(r'"delta":"(\w+) "', told) == ["Hello", "from", "Django"]
        assert told.endswith("data: [DONE]\n\n")
        client = tmp_path / "client.py"
        client.write_text(only("python", "The first request", "OpenAI(").code.replace(ADDRESS, address))
        assert begun.run(str(client)) == "Hello from Django \nAnd again \n"


# The whole project.


def test_the_project_is_in_order(whole: Project) -> None:
    whole.manage("check", "--fail-level=WARNING")
    whole.manage("makemigrations", "--check")
    assert "0 responses removed" in whole.manage("responses_kit_prune")


def test_the_projects_own_tests_pass(whole: Project) -> None:
    said = whole.manage("test")
    assert re.search(r"Ran 4 tests in .*\n\nOK", said), said


def in_shell(project: Project, code: str) -> str:
    """What code in the project's shell says last."""
    return project.manage("shell", "--verbosity=0", "--command", code).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def people(whole: Project) -> dict[str, str]:
    """Keys by their users' names: one who may ask and has an order, and one who may not."""
    code = """
import hashlib
from django.contrib.auth.models import User
from orders.models import ApiKey, Order
for name in ("ann", "bob"):
    user = User.objects.create_user(name, password=name, is_staff=name == "ann")
    ApiKey.objects.create(user=user, digest=hashlib.sha256(f"key-{name}".encode()).hexdigest())
    Order.objects.create(customer=user, article=f"{name}'s teapot")
"""
    whole.manage("shell", "--command", code)
    return {name: f"key-{name}" for name in ("ann", "bob")}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def under_asgi(whole: Project, people: dict[str, str], logs: Path) -> Iterator[str]:
    with whole.served("uvicorn", logs) as address:
        yield address


@pytest.fixture(scope="module")
def under_wsgi(whole: Project, people: dict[str, str], logs: Path) -> Iterator[str]:
    with whole.served("gunicorn", logs) as address:
        yield address


@contextmanager
def logged_in(address: str, name: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=BOUND, headers={"Referer": address}) as client:
        token = csrf(client.get("/admin/login/"))
        client.post("/admin/login/", data={"username": name, "password": name, "csrfmiddlewaretoken": token})
        yield client


@pytest.mark.parametrize("server", ["under_asgi", "under_wsgi"])
def test_people_and_programs_are_told_apart(
    server: str, request: pytest.FixtureRequest, people: dict[str, str], logs: Path
) -> None:
    address: str = request.getfixturevalue(server)
    with OpenAI(base_url=f"{address}/v1", api_key=people["ann"]) as ann:
        answer = ann.responses.create(input="My orders?")
        assert answer.output_text == "ann's teapot\n"
    nobody = httpx.post(f"{address}/v1/responses", json={"input": "Hi"})
    assert nobody.status_code == 401
    bearer = {"Authorization": f"Bearer {people['bob']}"}
    refused = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}, headers=bearer)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    with logged_in(address, "ann") as page:
        assert page.get(f"/v1/responses/{answer.id}").json()["id"] == answer.id
        assert page.delete(f"/v1/responses/{answer.id}").json()["error"]["code"] == "csrf_failed"
        token = {"X-CSRFToken": csrf(page.get("/admin/password_change/"))}
        assert page.delete(f"/v1/responses/{answer.id}", headers=token).status_code == 200
    log = logs / {"under_asgi": "uvicorn.log", "under_wsgi": "gunicorn.log"}[server]
    assert re.search(r"user \d+: 3 tokens", log.read_text())  # the receiver has heard of it


def test_a_page_reads_the_stream(under_asgi: str, browser: Any) -> None:  # noqa: F811
    with logged_in(under_asgi, "ann") as page:
        browser.get(f"{under_asgi}/admin/login/")
        for name, value in page.cookies.items():
            browser.add_cookie({"name": name, "value": value})
        browser.get(f"{under_asgi}/admin/password_change/")
        code = only("js", "People, by their session").code
        script = (
            f"const told = arguments[0]; (async () => {{ {code} told(null) }})().catch(error => told(String(error)))"
        )
        browser.set_script_timeout(BOUND)
        assert browser.execute_async_script(script) is None
        assert browser.execute_script("return document.body.innerText").endswith("ann's teapot")


def test_the_server_is_checked_from_outside(whole: Project, under_asgi: str, people: dict[str, str]) -> None:
    command = only("sh", "Serving", "responses_kit_check").code
    command = command.replace("https://example.com", under_asgi).replace("KEY", people["ann"])
    said = whole.run(*shlex.split(command)[1:])
    assert "failed" not in said
    assert said.count("ok ") > 5


@contextmanager
def beside(project: Project, command: list[str], log: Path) -> Iterator[None]:
    """A worker that runs until the block ends."""
    with log.open("w") as output:
        worker = subprocess.Popen([sys.executable, *command], cwd=project.folder, stdout=output, stderr=output)
    with ended(worker):
        yield


def is_worked_on(address: str, key: str, project: Project, command: list[str], log: Path) -> None:
    """A background response waits for the worker, which is no server's process."""
    with OpenAI(base_url=f"{address}/v1", api_key=key) as client:
        queued = client.responses.create(input="My orders?", background=True)
        assert client.responses.retrieve(queued.id).status == "queued"
        with beside(project, command, log):
            events = list(client.responses.retrieve(queued.id, stream=True, timeout=BOUND))
        assert events[-1].type == "response.completed", log.read_text()
        assert events[-1].response.output_text == "ann's teapot\n"


def test_workers_of_djangos_tasks_work(whole: Project, under_wsgi: str, people: dict[str, str], tmp_path: Path) -> None:
    is_worked_on(under_wsgi, people["ann"], whole, ["manage.py", "db_worker"], tmp_path / "worker.log")


@pytest.mark.skipif(RABBITMQ is None, reason="needs RESPONSES_KIT_TEST_RABBITMQ")
def test_workers_of_celery_work(whole: Project, people: dict[str, str], tmp_path: Path) -> None:
    project = changed(whole, tmp_path, '\nRESPONSES_KIT["RUNNER"] = "mysite.celery.runner"\n')
    celery = project.folder / "mysite" / "celery.py"
    address, queue = 'broker="amqp://guest:guest@localhost//"', f"kit-{os.urandom(6).hex()}"
    assert address in celery.read_text()
    celery.write_text(celery.read_text().replace(address, f'broker="{RABBITMQ}", task_default_queue="{queue}"'))
    project.manage("check", "--fail-level=WARNING")
    worker = ["-m", "celery", "-A", "mysite", "worker", "--pool=threads", "--concurrency=2"]
    with project.served("gunicorn", tmp_path) as address:
        is_worked_on(address, people["ann"], project, worker, tmp_path / "worker.log")


def test_tokens_of_django_rest_framework_will_do_and_companies_may_share(
    whole: Project, people: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("rest_framework")
    settings = '\nINSTALLED_APPS += ["rest_framework", "rest_framework.authtoken"]\nRESPONSES_KIT |= {%s}\n'
    said = re.search(r'and `("AUTH": \["orders.tokens.BearerToken"\])`', DOCUMENT.read_text())
    assert said is not None
    project = changed(
        whole,
        tmp_path,
        settings % f'{said[1]}, "OWNER": "orders.auth.company", "BACKEND": "mysite.assistant.Assistant"',
    )
    project.manage("migrate")
    code = "from django.contrib.auth.models import User; from rest_framework.authtoken.models import Token"
    key = in_shell(project, f"{code}; print(Token.objects.create(user=User.objects.get(username='ann')).key)")
    with project.served("gunicorn", tmp_path) as address:
        with OpenAI(base_url=f"{address}/v1", api_key=key) as ann:
            assert ann.responses.create(input="It is shared").output_text == "It is shared "
        refused = httpx.post(f"{address}/v1/responses", json={}, headers={"Authorization": "Bearer unknown"})
        assert refused.status_code == 401
    code = "from responses_kit_django.models import Response; print(Response.objects.latest('created').owner)"
    assert re.fullmatch(r"company-\d+", in_shell(project, code))


def test_users_responses_go_with_them(whole: Project, under_wsgi: str, people: dict[str, str]) -> None:
    said = re.search(r"`(Conversation\.objects\.filter\(.*?\)\.delete\(\))`", DOCUMENT.read_text())
    assert said is not None
    with OpenAI(base_url=f"{under_wsgi}/v1", api_key=people["ann"]) as client:
        kept = client.responses.create(input="My orders?")
        code = "from django.contrib.auth.models import User; from responses_kit_django.models import Conversation"
        in_shell(whole, f"{code}; user = User.objects.get(username='ann'); print({said[1]})")
        with pytest.raises(NotFoundError):
            client.responses.retrieve(kept.id)
