"""The Django pages of the documentation: their blocks form a project that is served, called and tested."""

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

pytestmark = pytest.mark.timeout(240)  # creating a project takes a while

START, GUIDE = (ROOT / "docs" / folder / "django.md" for folder in ("get-started", "guides"))
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
ADDRESS = "http://127.0.0.1:8000"
RABBITMQ = os.environ.get("RESPONSES_KIT_TEST_RABBITMQ")
BOUND = 30.0
TEXT = "return document.body.innerText"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code and the heading above it."""

    section: str
    language: str
    code: str

    @property
    def file(self) -> str | None:
        """The file to which the block belongs, if it names one."""
        named = re.match(r"(?:# |{# )(\S+\.(?:py|html))(?: #})?\n", self.code)
        return named[1] if named else None


def read_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page."""
    section = ""
    for heading, language, code in re.findall(r"^##+ ([^\n]*)$|^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        section = heading or section
        if language:
            yield Block(section, language, code)


FIRST_BLOCKS = list(read_blocks(START.read_text()))
BLOCKS = [*FIRST_BLOCKS, *read_blocks(GUIDE.read_text())]


def only(language: str, section: str, containing: str = "") -> Block:
    """Return the one block of a section that matches."""
    (block,) = (
        block for block in BLOCKS if (block.language, block.section) == (language, section) and containing in block.code
    )
    return block


def follow(project: Project, blocks: list[Block]) -> None:
    """Append the blocks to their files, and run their `manage.py` commands, in order."""
    for block in blocks:
        if block.file is not None:
            file = project.folder / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as opened:
                opened.write(f"\n\n{block.code}")
        elif block.language == "sh":
            # Other commands are interactive, or need a server or a user.
            commands = r"^python (manage.py (?:startapp|makemigrations|migrate)\b.*)$"
            for command in re.findall(commands, block.code, re.MULTILINE):
                project.run(*command.split())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return the project of the first page."""
    project = Project(folder=tmp_path_factory.mktemp("begun"), name="mysite")
    project.run("-m", "django", "startproject", "mysite", ".")
    follow(project, FIRST_BLOCKS)
    return project


@pytest.fixture(scope="module")
def whole(begun: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return the project of both pages, which uses Django's tasks."""
    project = Project(folder=tmp_path_factory.mktemp("whole"), name="mysite")
    shutil.copytree(begun.folder, project.folder, dirs_exist_ok=True)
    follow(project, BLOCKS[len(FIRST_BLOCKS) :])
    return project


def changed(project: Project, tmp_path: Path, settings: str) -> Project:
    """Return a copy of the project with more settings."""
    shutil.copytree(project.folder, tmp_path / "changed")
    with (tmp_path / "changed" / "mysite" / "settings.py").open("a") as opened:
        opened.write(settings)
    return Project(folder=tmp_path / "changed", name="mysite")


def test_each_python_block_names_its_file() -> None:
    assert [block.code for block in BLOCKS if block.language == "python" and block.file is None] == []
    assert {block.language for block in BLOCKS} == {"python", "pycon", "sh", "html", "nginx"}


def test_readme_matches_guide() -> None:
    blocks = [block.code for block in read_blocks((ROOT / "README.md").read_text()) if block.file is not None]
    assert len(blocks) == 2
    assert set(blocks) <= {block.code for block in BLOCKS}


def test_settings_table_is_complete() -> None:
    configure()
    from responses_kit_django import conf

    table = SETTINGS.read_text().partition("\n## Django\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`([A-Z_]{4,})`", table)) - {
        "DATA_UPLOAD_MAX_MEMORY_SIZE",
        "RESPONSES_KIT",
        "SECRET_KEY",
        "SECRET_KEY_FALLBACKS",
    } == {*conf.DEFAULTS, *conf._KIT_SETTINGS}


@pytest.mark.parametrize("server", ["runserver", "uvicorn", "gunicorn"])
def test_first_request_is_answered(begun: Project, server: str, tmp_path: Path) -> None:
    command = next((block.code for block in BLOCKS if block.code.startswith(f"{server} ")), "")
    options = shlex.split(command.replace("--workers 4", "--workers 2"))[2:]  # the options after the app
    with begun.served(server, tmp_path, *options) as address:
        curl = only("sh", "First request").code.replace(ADDRESS, address)
        stream = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=BOUND, check=True).stdout
        assert re.findall(r'"delta":"(\w+) "', stream) == ["Hello", "from", "Django"]
        assert stream.endswith("data: [DONE]\n\n")
        client = tmp_path / "client.py"
        client.write_text(only("python", "First request", "OpenAI(").code.replace(ADDRESS, address))
        assert begun.run(str(client)) == "Hello from Django \nAnd again \n"


def test_project_passes_system_checks(whole: Project) -> None:
    whole.manage("check", "--fail-level=WARNING")
    whole.manage("makemigrations", "--check")
    assert "Deleted 0 responses" in whole.manage("responses_kit_prune")


def test_project_tests_pass(whole: Project) -> None:
    output = whole.manage("test")
    assert re.search(r"Ran 4 tests in .*\n\nOK", output), output


def in_shell(project: Project, code: str) -> str:
    """Run code in the project's shell and return the last line of its output."""
    return project.manage("shell", "--verbosity=0", "--command", code).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def people(whole: Project) -> dict[str, str]:
    """Create users; return their API keys by name. Ann has the permission that the API requires, Bob does not."""
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
        for section in ("Use the ORM in a backend", "API keys")
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
    """Yield a client that is logged in as a user."""
    with httpx.Client(base_url=address, timeout=BOUND, headers={"Referer": address}) as client:
        token = csrf(client.get("/admin/login/"))
        client.post("/admin/login/", data={"username": name, "password": name, "csrfmiddlewaretoken": token})
        yield client


@pytest.mark.parametrize("server", ["under_asgi", "under_wsgi"])
def test_sessions_and_keys_are_distinguished(
    server: str, request: pytest.FixtureRequest, people: dict[str, str], logs: Path
) -> None:
    address: str = request.getfixturevalue(server)
    with OpenAI(base_url=f"{address}/v1", api_key=people["ann"]) as ann:
        response = ann.responses.create(input="My orders?")
        assert response.output_text == "ann's teapot\n"
    curl = only("sh", "API keys", "curl").code.replace(ADDRESS, address)
    environment = {**os.environ, "KEY": people["ann"]}
    command = ["bash", "-c", curl]
    stream = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=BOUND, check=True).stdout
    assert "ann's teapot" in stream
    for api in ("v1", "second"):
        assert httpx.post(f"{address}/{api}/responses", json={"input": "Hi"}).status_code == 401
    with OpenAI(base_url=f"{address}/second", api_key=people["ann"]) as ann:
        assert ann.responses.create(input="Hello, second").output_text == "Hello, second "
    bearer = {"Authorization": f"Bearer {people['bob']}"}
    refused = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}, headers=bearer)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    with logged_in(address, "ann") as page:
        assert page.get(f"/v1/responses/{response.id}").json()["id"] == response.id
        assert page.delete(f"/v1/responses/{response.id}").json()["error"]["code"] == "csrf_failed"
        token = {"X-CSRFToken": csrf(page.get("/admin/password_change/"))}
        assert page.delete(f"/v1/responses/{response.id}", headers=token).status_code == 200
    log = logs / {"under_asgi": "uvicorn.log", "under_wsgi": "gunicorn.log"}[server]
    assert re.search(r"user \d+: 3 tokens", log.read_text())  # logged by the receiver


def test_page_reads_stream(under_asgi: str, browser: Any) -> None:  # noqa: F811
    from selenium.webdriver.support.wait import WebDriverWait  # without it there is no browser

    with logged_in(under_asgi, "ann") as page:
        browser.get(f"{under_asgi}/admin/login/")
        for name, value in page.cookies.items():
            browser.add_cookie({"name": name, "value": value})
        browser.get(f"{under_asgi}/ask/")
        WebDriverWait(browser, BOUND).until(lambda _: "ann's teapot" in browser.execute_script(TEXT))


def test_server_check_passes(whole: Project, under_asgi: str, people: dict[str, str]) -> None:
    command = only("sh", "Deployment", "responses_kit_check").code
    command = command.replace("https://example.com", under_asgi).replace("KEY", people["ann"])
    output = whole.run(*shlex.split(command)[1:])
    assert "failed" not in output
    assert output.count("ok ") > 5


@contextmanager
def worker_running(project: Project, command: list[str], log: Path) -> Iterator[None]:
    """Run a worker until the block ends."""
    with log.open("w") as output:
        worker = subprocess.Popen([sys.executable, *command], cwd=project.folder, stdout=output, stderr=output)
    with ended(worker, PROJECT_BOUND):
        yield


def check_worker(address: str, key: str, project: Project, command: list[str], log: Path) -> None:
    """Check that a background response stays queued until the worker runs, and then completes."""
    with OpenAI(base_url=f"{address}/v1", api_key=key) as client:
        queued = client.responses.create(input="My orders?", background=True)
        assert client.responses.retrieve(queued.id).status == "queued"
        with worker_running(project, command, log):
            events = list(client.responses.retrieve(queued.id, stream=True, timeout=BOUND))
        assert events[-1].type == "response.completed", log.read_text()
        assert events[-1].response.output_text == "ann's teapot\n"


def test_django_tasks_workers_run_responses(
    whole: Project, under_wsgi: str, people: dict[str, str], tmp_path: Path
) -> None:
    check_worker(under_wsgi, people["ann"], whole, ["manage.py", "db_worker"], tmp_path / "worker.log")


@pytest.mark.skipif(RABBITMQ is None, reason="needs RESPONSES_KIT_TEST_RABBITMQ")
def test_celery_workers_run_responses(whole: Project, people: dict[str, str], tmp_path: Path) -> None:
    project = changed(whole, tmp_path, '\nRESPONSES_KIT["RUNNER"] = "mysite.celery.runner"\n')
    celery = project.folder / "mysite" / "celery.py"
    address, queue = 'broker="amqp://guest:guest@localhost//"', f"kit-{os.urandom(6).hex()}"
    assert address in celery.read_text()
    celery.write_text(celery.read_text().replace(address, f'broker="{RABBITMQ}", task_default_queue="{queue}"'))
    project.manage("check", "--fail-level=WARNING")
    worker = ["-m", "celery", "-A", "mysite", "worker", "--pool=threads", "--concurrency=2"]
    with project.served("gunicorn", tmp_path) as address:
        check_worker(address, people["ann"], project, worker, tmp_path / "worker.log")


def test_drf_tokens_and_shared_owners_work(whole: Project, people: dict[str, str], tmp_path: Path) -> None:
    page = GUIDE.read_text()
    auth, owner = (re.search(rf'`(RESPONSES_KIT\["{name}"\] = .*?)`(?=[. ])', page) for name in ("AUTH", "OWNER"))
    shared = re.search(r"`(Order\.objects\.filter\(.*?\)\))`", page)
    assert auth is not None
    assert owner is not None
    assert shared is not None
    project = changed(whole, tmp_path, f"\n{auth[1]}\n{owner[1]}\n")
    backend = project.folder / "orders" / "assistant.py"
    before = "Order.objects.filter(customer=turn.owner)"
    assert before in backend.read_text()
    backend.write_text(backend.read_text().replace(before, shared[1]))
    (create,) = re.findall(r"^python manage.py (drf_create_token ann)$", page, re.MULTILINE)
    key = re.findall(r"token (\w+) for user ann", project.manage(*create.split()))[0]
    with project.served("gunicorn", tmp_path) as address:
        with OpenAI(base_url=f"{address}/v1", api_key=key) as ann:
            shared_orders = ann.responses.create(input="Our orders?").output_text
            assert sorted(shared_orders.splitlines()) == ["ann's teapot", "bob's teapot"]
        refused = httpx.post(f"{address}/v1/responses", json={}, headers={"Authorization": "Bearer unknown"})
        assert refused.status_code == 401
    code = "from responses_kit_django.models import Response; print(Response.objects.latest('created').owner)"
    assert re.fullmatch(r"company-\d+", in_shell(project, code))


def test_deleting_user_deletes_responses(whole: Project, under_wsgi: str, people: dict[str, str]) -> None:
    statement = re.search(r"`(Conversation\.objects\.filter\(.*?\)\.delete\(\))`", GUIDE.read_text())
    assert statement is not None
    with OpenAI(base_url=f"{under_wsgi}/v1", api_key=people["ann"]) as client:
        response = client.responses.create(input="My orders?")
        code = (
            "from django.contrib.auth.models import User; from responses_kit_django.models import Conversation; "
            "from responses_kit.stores.key_encoding import encode_key"
        )
        in_shell(whole, f"{code}; user = User.objects.get(username='ann'); print({statement[1]})")
        with pytest.raises(NotFoundError):
            client.responses.retrieve(response.id)
