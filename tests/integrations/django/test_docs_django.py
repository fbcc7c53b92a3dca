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

from ...support.servers import ROOT, ended
from .databases import configure
from .projects import BOUND as PROJECT_BOUND
from .projects import Project
from .test_example_project import browser, csrf  # noqa: F401  # a fixture

pytestmark = pytest.mark.timeout(240)  # a project is not made in a moment

DOCUMENT = ROOT / "docs" / "django.md"
ADDRESS = "http://127.0.0.1:8000"
RABBITMQ = os.environ.get("RESPONSES_KIT_TEST_RABBITMQ")
BOUND = 30.0
TEXT = "return document.body.innerText"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, and the headings above it."""

    section: str
    language: str
    code: str

    @property
    def file(self) -> str | None:
        """The file that it belongs into."""
        named = re.match(r"(?:# |{# )(\S+\.(?:py|html))(?: #})?\n", self.code)
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
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.write(f"\n\n{block.code}")
        elif block.language == "sh":
            # All others want to be typed at, or need a server or somebody who is known.
            commands = r"^python (manage.py (?:startapp|makemigrations|migrate)\b.*)$"
            for command in re.findall(commands, block.code, re.MULTILINE):
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
    assert {block.language for block in BLOCKS} == {"python", "pycon", "sh", "html", "nginx"}


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
from django.contrib.auth.models import Group, User
company = Group.objects.create(name="company")
for name in ("ann", "bob"):
    user = User.objects.create_user(name, password=name, is_staff=name == "ann")
    user.groups.add(company)
"""
    whole.manage("shell", "--command", code)
    order, key = (
        re.sub("^>>> ", "", only("pycon", section).code, flags=re.MULTILINE)
        for section in ("A backend that uses the ORM", "Programs, by a key")
    )
    return {name: in_shell(whole, (order + key).replace("ann", name)) for name in ("ann", "bob")}


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
    asked = only("sh", "Programs, by a key", "curl").code.replace(ADDRESS, address)
    environment = {**os.environ, "KEY": people["ann"]}
    command = ["bash", "-c", asked]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND, check=True).stdout
    assert "ann's teapot" in told
    for api in ("v1", "second"):
        assert httpx.post(f"{address}/{api}/responses", json={"input": "Hi"}).status_code == 401
    with OpenAI(base_url=f"{address}/second", api_key=people["ann"]) as ann:
        assert ann.responses.create(input="Hello, second").output_text == "Hello, second "
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
    from selenium.webdriver.support.wait import WebDriverWait  # without it there is no browser

    with logged_in(under_asgi, "ann") as page:
        browser.get(f"{under_asgi}/admin/login/")
        for name, value in page.cookies.items():
            browser.add_cookie({"name": name, "value": value})
        browser.get(f"{under_asgi}/ask/")
        WebDriverWait(browser, BOUND).until(lambda _: "ann's teapot" in browser.execute_script(TEXT))


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
    with ended(worker, PROJECT_BOUND):
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
    said = DOCUMENT.read_text()
    auth, owner = (re.search(rf'`(RESPONSES_KIT\["{name}"\] = .*?)`(?=[. ])', said) for name in ("AUTH", "OWNER"))
    shared = re.search(r"`(Order\.objects\.filter\(.*?\)\))`", said)
    assert auth is not None
    assert owner is not None
    assert shared is not None
    project = changed(whole, tmp_path, f"\n{auth[1]}\n{owner[1]}\n")
    backend = project.folder / "orders" / "assistant.py"
    before = "Order.objects.filter(customer=turn.owner)"
    assert before in backend.read_text()
    backend.write_text(backend.read_text().replace(before, shared[1]))
    (create,) = re.findall(r"^python manage.py (drf_create_token ann)$", said, re.MULTILINE)
    key = re.findall(r"token (\w+) for user ann", project.manage(*create.split()))[0]
    with project.served("gunicorn", tmp_path) as address:
        with OpenAI(base_url=f"{address}/v1", api_key=key) as ann:
            shared_orders = ann.responses.create(input="Our orders?").output_text
            assert sorted(shared_orders.splitlines()) == ["ann's teapot", "bob's teapot"]
        refused = httpx.post(f"{address}/v1/responses", json={}, headers={"Authorization": "Bearer unknown"})
        assert refused.status_code == 401
    code = "from responses_kit_django.models import Response; print(Response.objects.latest('created').owner)"
    assert re.fullmatch(r"company-\d+", in_shell(project, code))


def test_users_responses_go_with_them(whole: Project, under_wsgi: str, people: dict[str, str]) -> None:
    said = re.search(r"`(Conversation\.objects\.filter\(.*?\)\.delete\(\))`", DOCUMENT.read_text())
    assert said is not None
    with OpenAI(base_url=f"{under_wsgi}/v1", api_key=people["ann"]) as client:
        kept = client.responses.create(input="My orders?")
        code = (
            "from django.contrib.auth.models import User; from responses_kit_django.models import Conversation; "
            "from responses_kit.stores.key_encoding import encode_key"
        )
        in_shell(whole, f"{code}; user = User.objects.get(username='ann'); print({said[1]})")
        with pytest.raises(NotFoundError):
            client.responses.retrieve(kept.id)
