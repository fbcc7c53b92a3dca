"""The example app, started as its README says: the page's view, the API, and the page in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI

from ...support.browser import chrome
from ...support.conformance import check_error, check_response, check_stream
from ...support.servers import ROOT, free_port, running

pytest.importorskip("flask_login")

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait
except ModuleNotFoundError:
    webdriver = None

TIMEOUT = 15.0

SERVERS = {
    "flask": "-m flask --app notes run --port {port}",
    "gunicorn": "-m gunicorn notes:create_app() --worker-class gthread --threads 32 --bind 127.0.0.1:{port}",
}
"""The commands of the README."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FLASK_")}


@dataclass
class Site:
    """A copy of the example after `seed`."""

    folder: Path
    passwords: dict[str, str]
    keys: dict[str, str]

    def query(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "instance" / "notes.sqlite3")) as db:
            return db.execute(query).fetchall()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("example") / "flask_app"
    shutil.copytree(ROOT / "examples" / "flask_app", folder, ignore=shutil.ignore_patterns("instance", "__pycache__"))
    command = [sys.executable, "-W", "error", "-m", "flask", "--app", "notes", "seed"]
    result = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    accounts = re.findall(r"^(\w+): password (\S+), API key (\S+)$", result.stdout, re.MULTILINE)
    return Site(folder, {name: password for name, password, _ in accounts}, {name: key for name, _, key in accounts})


@contextmanager
def run_server(site: Site, server: str, log: Path) -> Iterator[str]:
    """Run a server, yield its address, and stop it with SIGTERM."""
    port = free_port()
    command = [sys.executable, *SERVERS[server].format(port=port).split()]
    with running(command, port, log, bound=TIMEOUT, path="/login", cwd=site.folder, env=ENVIRONMENT) as address:
        yield address


@pytest.fixture(scope="module")
def address(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_server(site, "gunicorn", tmp_path_factory.mktemp("log") / "gunicorn.log") as match:
        yield match


def csrf_token(page: httpx.Response) -> str:
    match = re.search(r'name="csrf_token" value="([\w-]+)"', page.text)
    assert match is not None, page.text
    return match[1]


def log_in(client: httpx.Client, site: Site, name: str, following: str = "") -> httpx.Response:
    token = csrf_token(client.get("/login"))
    form = {"name": name, "password": site.passwords[name], "csrf_token": token}
    return client.post("/login", params={"next": following} if following else None, data=form)


@contextmanager
def logged_in_client(site: Site, address: str, name: str) -> Iterator[httpx.Client]:
    """Yield a client that is logged in as a user."""
    with httpx.Client(base_url=address, timeout=TIMEOUT) as client:
        assert log_in(client, site, name).headers["location"] == "/"
        yield client


def ask(client: httpx.Client, question: str, previous: str | None = None) -> dict[str, Any]:
    """Ask a question, and return the response."""
    reply = client.post("/ask", json={"input": question, "previous_response_id": previous})
    assert reply.status_code == 200, reply.text
    check_response(reply.json())
    return reply.json()


def text_of(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


def error_of(reply: httpx.Response) -> tuple[int, str]:
    check_error(reply.json())
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize("server", SERVERS)
def test_question_is_streamed_from_own_notes(site: Site, server: str, tmp_path: Path) -> None:
    with run_server(site, server, tmp_path / "log") as address, logged_in_client(site, address, "ann") as ann:
        events = []
        at = []
        with ann.stream("POST", "/ask", json={"input": "Where is the spare key?", "stream": True}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    at.append(time.monotonic())
        answer = text_of(check_stream(events))
        assert re.fullmatch(r"On \d{4}-\d\d-\d\d you wrote: “The spare key is with Mrs\. Weber .+”", answer)
        assert len([event for event in events if event["type"] == "response.output_text.delta"]) == len(answer.split())
        assert at[-1] - at[0] > 0.2  # the events were not buffered


def test_follow_up_continues_conversation(site: Site, address: str) -> None:
    with logged_in_client(site, address, "ann") as ann:
        first = ask(ann, "What did I write about tea?")
        assert text_of(first).count("you wrote") == 3
        second = ask(ann, "What else?", first["id"])
        assert text_of(second).count("you wrote") == 1
        assert text_of(second) not in text_of(first)
        third = ask(ann, "And else?", second["id"])
        assert text_of(third) == "There is nothing more in your notes."
        assert text_of(ask(ann, "What else?")).startswith("Ask about something")


def test_disconnect_ends_answer(site: Site, address: str) -> None:
    with logged_in_client(site, address, "ann") as ann:
        with ann.stream("POST", "/ask", json={"input": "What did I write about tea?", "stream": True}) as reply:
            lines = reply.iter_lines()
            created = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
            next(line for line in lines if "output_text.delta" in line)
        match = {"status": "in_progress"}
        until = time.monotonic() + TIMEOUT
        while match["status"] == "in_progress" and time.monotonic() < until:
            key = {"Authorization": f"Bearer {site.keys['ann']}"}
            match = ann.get(f"/v1/responses/{created['response']['id']}", headers=key).json()
        assert match["status"] == "cancelled"


def test_new_note_is_found_by_word_forms(site: Site, address: str) -> None:
    with logged_in_client(site, address, "bob") as bob:
        assert text_of(ask(bob, "Hedgehogs?")) == "There is nothing about that in your notes."
        form = {"text": "<b>Saw</b> a hedgehog!", "csrf_token": csrf_token(bob.get("/"))}
        assert bob.post("/", data=form).status_code == 302
        assert "&lt;b&gt;Saw&lt;/b&gt; a hedgehog!" in bob.get("/").text
        assert "“<b>Saw</b> a hedgehog!”" in text_of(ask(bob, "Hedgehogs?"))
        for odd in ('x" OR text: NOT (', "_ __", "x" * 5000, " ".join(map(str, range(1000, 4000)))):
            assert text_of(ask(bob, odd)) == "There is nothing about that in your notes."


def test_conversations_are_scoped_to_user(site: Site, address: str) -> None:
    with logged_in_client(site, address, "ann") as ann, logged_in_client(site, address, "bob") as bob:
        ann_answer = ask(ann, "Where is the spare key?")
        bob_answer = ask(bob, "Where is the spare key?")
        assert "flower pot" in text_of(bob_answer)
        assert "flower pot" not in text_of(ann_answer)
        for previous in (ann_answer["id"], "resp_of_nobody"):
            reply = bob.post("/ask", json={"input": "What else?", "previous_response_id": previous})
            assert error_of(reply) == (400, "previous_response_not_found")


def test_anonymous_user_is_redirected_by_pages_and_refused_by_api(site: Site, address: str) -> None:
    with httpx.Client(base_url=address, timeout=TIMEOUT) as stranger:
        assert stranger.get("/ask").headers["location"] == "/login?next=%2Fask"
        assert error_of(stranger.post("/ask", json={"input": "key"})) == (401, "invalid_api_key")
        assert error_of(stranger.post("/ask", json={"input": "key", "stream": True})) == (401, "invalid_api_key")
        assert stranger.post("/", data={"text": "x"}).status_code == 400
        wrong = {"name": "ann", "password": "x", "csrf_token": csrf_token(stranger.get("/login"))}
        assert "Wrong name or password" in stranger.post("/login", data=wrong).text
        assert "Wrong name or password" in stranger.post("/login", data={**wrong, "name": "nobody"}).text
        assert log_in(stranger, site, "ann", following="/ask").headers["location"] == "/ask"
        stranger.post("/logout", data={"csrf_token": csrf_token(stranger.get("/ask"))})
        assert error_of(stranger.post("/ask", json={"input": "key"})) == (401, "invalid_api_key")


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example", "/\\evil.example", "/\t/evil.example"])
def test_login_does_not_redirect_to_other_sites(site: Site, address: str, target: str) -> None:
    with httpx.Client(base_url=address, timeout=TIMEOUT) as client:
        assert log_in(client, site, "ann", following=target).headers["location"] == "/"


def test_cross_site_requests_are_refused(site: Site, address: str) -> None:
    with logged_in_client(site, address, "ann") as ann:
        count = site.query("SELECT count(*) FROM note")
        assert ann.post("/", data={"text": "forged"}).status_code == 400
        assert ann.post("/", data={"text": "forged", "csrf_token": "x"}).status_code == 400
        assert site.query("SELECT count(*) FROM note") == count
        assert ann.post("/logout").status_code == 400
        question = b'{"input": "key"}'
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            assert error_of(ann.post("/ask", content=question, headers={"Content-Type": kind}))[0] == 400
        assert error_of(ann.post("/ask", content=question, headers={"Origin": "https://evil.example"}))[0] == 400
        cookie = log_in(ann, site, "ann").headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie


def test_api_key_shares_user_conversations(site: Site, address: str) -> None:
    with OpenAI(base_url=f"{address}/v1", api_key=site.keys["ann"], timeout=TIMEOUT) as program:
        assert [model.id for model in program.models.list()] == ["notes"]
        first = program.responses.create(model="notes", input="What did I write about tea?")
        assert first.output_text.count("you wrote") == 3
        with program.responses.stream(model="notes", input="What else?", previous_response_id=first.id) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert len(pieces) > 10
        assert "market" in "".join(pieces)
        with logged_in_client(site, address, "ann") as ann:
            in_page = ask(ann, "Where is the spare key?")
            assert program.responses.retrieve(in_page["id"]).output_text == text_of(in_page)
            assert text_of(ask(ann, "What else?", first.id)) == "".join(pieces)
        other = program.with_options(api_key=site.keys["bob"])
        with pytest.raises(NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(BadRequestError):
            other.responses.create(model="notes", input="What else?", previous_response_id=first.id)
    for key in ("x", site.passwords["ann"]):
        stranger = OpenAI(base_url=f"{address}/v1", api_key=key, timeout=TIMEOUT)
        with stranger, pytest.raises(AuthenticationError):
            stranger.responses.create(model="notes", input="Hello")
    with logged_in_client(site, address, "ann") as ann:  # the API ignores the session cookie
        assert error_of(ann.post("/v1/responses", json={"input": "key"})) == (401, "invalid_api_key")


def test_stored_secrets_are_hashed(site: Site) -> None:
    stored = (site.folder / "instance" / "notes.sqlite3").read_bytes()
    for secret in (*site.keys.values(), *site.passwords.values()):
        assert secret.encode() not in stored
    assert (site.folder / "instance" / "secret_key").stat().st_mode & 0o77 == 0


# The page.


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    with chrome("900,800", bound=TIMEOUT) as driver:
        yield driver


def test_page_streams_stops_and_explains_errors(site: Site, address: str, browser: webdriver.Chrome) -> None:
    def wait(condition: Callable[[], object]) -> None:
        WebDriverWait(browser, TIMEOUT, poll_frequency=0.02).until(lambda _: condition())

    def texts(kind: str) -> list[str]:
        script = "return [...document.querySelectorAll('#conversation > ' + arguments[0])].map(one => one.textContent)"
        return browser.execute_script(script, kind)

    def is_answering() -> bool:
        return browser.find_element(By.ID, "stop").is_displayed()

    def ask(question: str) -> None:
        """Ask a question, and wait for the start of the answer."""
        before = len(texts(".answer"))
        browser.find_element(By.ID, "question").send_keys(question, Keys.ENTER)
        wait(lambda: any(texts(".answer")[before:]))

    browser.get(f"{address}/ask")
    browser.find_element(By.NAME, "name").send_keys("ann")
    browser.find_element(By.NAME, "password").send_keys(site.passwords["ann"], Keys.ENTER)
    wait(lambda: browser.find_elements(By.ID, "question"))

    ask("What about <b>tea</b>?")
    assert is_answering()
    partial = texts(".answer")[0]
    wait(lambda: not is_answering())
    answer = texts(".answer")[0]
    assert answer.startswith(partial)
    assert 0 < len(partial) < len(answer)
    assert texts(".question") == ["What about <b>tea</b>?"]

    ask("What else?")
    wait(lambda: not is_answering())
    assert "market" in texts(".answer")[1]
    assert "market" not in answer

    ask("And once more: tea?")
    browser.find_element(By.ID, "stop").click()
    wait(lambda: texts(".faint") == ["Stopped."])
    assert 0 < len(texts(".answer")[2]) < len(answer)
    assert not is_answering()

    assert browser.get_log("browser") == []  # no violations of the content security policy either
    for scheme in ("light", "dark"):
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
        assert (int(ground) > 128) == (scheme == "light")
    narrow = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 320

    browser.delete_all_cookies()
    browser.find_element(By.ID, "question").send_keys("And coffee?", Keys.ENTER)
    wait(lambda: texts(".error") == ["You are not logged in any more. Log in"])
    browser.find_element(By.LINK_TEXT, "Log in").click()
    wait(lambda: browser.find_elements(By.NAME, "password"))
