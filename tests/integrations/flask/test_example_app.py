"""The example app, run as its reader would: its API for the page and for programs, and its page in a browser."""

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

BOUND = 15.0

SERVERS = {
    "flask": "-m flask --app notes run --port {port}",
    "gunicorn": "-m gunicorn notes:create_app() --worker-class gthread --threads 32 --bind 127.0.0.1:{port}",
}
"""What the README starts it with."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FLASK_")}


@dataclass
class Site:
    """A copy of the example, in which `seed` has been."""

    folder: Path
    passwords: dict[str, str]
    keys: dict[str, str]

    def kept(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "instance" / "notes.sqlite3")) as db:
            return db.execute(query).fetchall()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("example") / "flask_app"
    shutil.copytree(ROOT / "examples" / "flask_app", folder, ignore=shutil.ignore_patterns("instance", "__pycache__"))
    command = [sys.executable, "-W", "error", "-m", "flask", "--app", "notes", "seed"]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^(\w+): password (\S+), API key (\S+)$", done.stdout, re.MULTILINE)
    return Site(folder, {name: password for name, password, _ in told}, {name: key for name, _, key in told})


@contextmanager
def served(site: Site, server: str, log: Path) -> Iterator[str]:
    """Runs a server until the block ends, as SIGTERM ends it; gives its address."""
    port = free_port()
    command = [sys.executable, *SERVERS[server].format(port=port).split()]
    with running(command, port, log, bound=BOUND, path="/login", cwd=site.folder, env=ENVIRONMENT) as address:
        yield address


@pytest.fixture(scope="module")
def address(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(site, "gunicorn", tmp_path_factory.mktemp("log") / "gunicorn.log") as found:
        yield found


def csrf_token(page: httpx.Response) -> str:
    found = re.search(r'name="csrf_token" value="([\w-]+)"', page.text)
    assert found is not None, page.text
    return found[1]


def log_in(client: httpx.Client, site: Site, name: str, following: str = "") -> httpx.Response:
    token = csrf_token(client.get("/login"))
    form = {"name": name, "password": site.passwords[name], "csrf_token": token}
    return client.post("/login", params={"next": following} if following else None, data=form)


@contextmanager
def somebody(site: Site, address: str, name: str) -> Iterator[httpx.Client]:
    """A client with a user's session."""
    with httpx.Client(base_url=address, timeout=BOUND) as client:
        assert log_in(client, site, name).headers["location"] == "/"
        yield client


def asked(client: httpx.Client, question: str, previous: str | None = None) -> dict[str, Any]:
    """The whole response to a question."""
    reply = client.post("/ask", json={"input": question, "previous_response_id": previous})
    assert reply.status_code == 200, reply.text
    check_response(reply.json())
    return reply.json()


def text_of(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


def refused(reply: httpx.Response) -> tuple[int, str]:
    check_error(reply.json())
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize("server", SERVERS)
def test_a_question_is_answered_word_by_word_from_ones_own_notes(site: Site, server: str, tmp_path: Path) -> None:
    with served(site, server, tmp_path / "log") as address, somebody(site, address, "ann") as ann:
        events = []
        at = []
        with ann.stream("POST", "/ask", json={"input": "Where is the spare key?", "stream": True}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                    at.append(time.monotonic())
        whole = text_of(check_stream(events))
        assert re.fullmatch(r"On \d{4}-\d\d-\d\d you wrote: “The spare key is with Mrs\. Weber .+”", whole)
        assert len([event for event in events if event["type"] == "response.output_text.delta"]) == len(whole.split())
        assert at[-1] - at[0] > 0.2  # nothing has held it back


def test_a_follow_up_goes_on_where_the_answer_before_has_ended(site: Site, address: str) -> None:
    with somebody(site, address, "ann") as ann:
        first = asked(ann, "What did I write about tea?")
        assert text_of(first).count("you wrote") == 3
        second = asked(ann, "What else?", first["id"])
        assert text_of(second).count("you wrote") == 1
        assert text_of(second) not in text_of(first)
        third = asked(ann, "And else?", second["id"])
        assert text_of(third) == "Your notes say no more about that."
        assert text_of(asked(ann, "What else?")).startswith("Ask about something")


def test_an_answer_ends_with_who_has_asked_for_it(site: Site, address: str) -> None:
    with somebody(site, address, "ann") as ann:
        with ann.stream("POST", "/ask", json={"input": "What did I write about tea?", "stream": True}) as reply:
            lines = reply.iter_lines()
            created = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
            next(line for line in lines if "output_text.delta" in line)
        found = {"status": "in_progress"}
        until = time.monotonic() + BOUND
        while found["status"] == "in_progress" and time.monotonic() < until:
            key = {"Authorization": f"Bearer {site.keys['ann']}"}
            found = ann.get(f"/v1/responses/{created['response']['id']}", headers=key).json()
        assert found["status"] == "cancelled"


def test_a_new_note_is_found_by_other_forms_of_its_words(site: Site, address: str) -> None:
    with somebody(site, address, "bob") as bob:
        assert text_of(asked(bob, "Hedgehogs?")) == "Your notes say nothing about that."
        form = {"text": "<b>Saw</b> a hedgehog!", "csrf_token": csrf_token(bob.get("/"))}
        assert bob.post("/", data=form).status_code == 302
        assert "&lt;b&gt;Saw&lt;/b&gt; a hedgehog!" in bob.get("/").text
        assert "“<b>Saw</b> a hedgehog!”" in text_of(asked(bob, "Hedgehogs?"))
        for odd in ('x" OR text: NOT (', "_ __", "x" * 5000, " ".join(map(str, range(1000, 4000)))):
            assert text_of(asked(bob, odd)) == "Your notes say nothing about that."


def test_nobody_sees_or_continues_what_is_another_users(site: Site, address: str) -> None:
    with somebody(site, address, "ann") as ann, somebody(site, address, "bob") as bob:
        hers = asked(ann, "Where is the spare key?")
        his = asked(bob, "Where is the spare key?")
        assert "flower pot" in text_of(his)
        assert "flower pot" not in text_of(hers)
        for previous in (hers["id"], "resp_of_nobody"):
            reply = bob.post("/ask", json={"input": "What else?", "previous_response_id": previous})
            assert refused(reply) == (400, "previous_response_not_found")


def test_a_stranger_is_led_to_the_login_by_pages_and_told_by_the_api(site: Site, address: str) -> None:
    with httpx.Client(base_url=address, timeout=BOUND) as stranger:
        assert stranger.get("/ask").headers["location"] == "/login?next=%2Fask"
        assert refused(stranger.post("/ask", json={"input": "key"})) == (401, "invalid_api_key")
        assert refused(stranger.post("/ask", json={"input": "key", "stream": True})) == (401, "invalid_api_key")
        assert stranger.post("/", data={"text": "x"}).status_code == 400
        wrong = {"name": "ann", "password": "x", "csrf_token": csrf_token(stranger.get("/login"))}
        assert "do not fit together" in stranger.post("/login", data=wrong).text
        assert "do not fit together" in stranger.post("/login", data={**wrong, "name": "nobody"}).text
        assert log_in(stranger, site, "ann", following="/ask").headers["location"] == "/ask"
        stranger.post("/logout", data={"csrf_token": csrf_token(stranger.get("/ask"))})
        assert refused(stranger.post("/ask", json={"input": "key"})) == (401, "invalid_api_key")


@pytest.mark.parametrize("target", ["https://evil.example/", "//evil.example", "/\\evil.example", "/\t/evil.example"])
def test_the_login_leads_to_no_other_site(site: Site, address: str, target: str) -> None:
    with httpx.Client(base_url=address, timeout=BOUND) as client:
        assert log_in(client, site, "ann", following=target).headers["location"] == "/"


def test_other_sites_can_send_nothing_in_a_users_name(site: Site, address: str) -> None:
    with somebody(site, address, "ann") as ann:
        count = site.kept("SELECT count(*) FROM note")
        assert ann.post("/", data={"text": "forged"}).status_code == 400
        assert ann.post("/", data={"text": "forged", "csrf_token": "x"}).status_code == 400
        assert site.kept("SELECT count(*) FROM note") == count
        assert ann.post("/logout").status_code == 400
        question = b'{"input": "key"}'
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            assert refused(ann.post("/ask", content=question, headers={"Content-Type": kind}))[0] == 400
        assert refused(ann.post("/ask", content=question, headers={"Origin": "https://evil.example"}))[0] == 400
        cookie = log_in(ann, site, "ann").headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie


def test_programs_ask_with_a_key_and_see_what_their_user_has_asked(site: Site, address: str) -> None:
    with OpenAI(base_url=f"{address}/v1", api_key=site.keys["ann"], timeout=BOUND) as program:
        assert [model.id for model in program.models.list()] == ["notes"]
        first = program.responses.create(model="notes", input="What did I write about tea?")
        assert first.output_text.count("you wrote") == 3
        with program.responses.stream(model="notes", input="What else?", previous_response_id=first.id) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert len(pieces) > 10
        assert "market" in "".join(pieces)
        with somebody(site, address, "ann") as ann:
            in_page = asked(ann, "Where is the spare key?")
            assert program.responses.retrieve(in_page["id"]).output_text == text_of(in_page)
            assert text_of(asked(ann, "What else?", first.id)) == "".join(pieces)
        other = program.with_options(api_key=site.keys["bob"])
        with pytest.raises(NotFoundError):
            other.responses.retrieve(first.id)
        with pytest.raises(BadRequestError):
            other.responses.create(model="notes", input="What else?", previous_response_id=first.id)
    for key in ("x", site.passwords["ann"]):
        stranger = OpenAI(base_url=f"{address}/v1", api_key=key, timeout=BOUND)
        with stranger, pytest.raises(AuthenticationError):
            stranger.responses.create(model="notes", input="Hello")
    with somebody(site, address, "ann") as ann:  # whose cookie is worth nothing there
        assert refused(ann.post("/v1/responses", json={"input": "key"})) == (401, "invalid_api_key")


def test_what_is_kept_of_secrets_is_of_no_use_to_its_thief(site: Site) -> None:
    kept = (site.folder / "instance" / "notes.sqlite3").read_bytes()
    for secret in (*site.keys.values(), *site.passwords.values()):
        assert secret.encode() not in kept
    assert (site.folder / "instance" / "secret_key").stat().st_mode & 0o77 == 0


# The page.


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    with chrome("900,800", bound=BOUND) as driver:
        yield driver


def test_the_page_shows_answers_as_they_grow_stops_them_and_says_what_is_wrong(
    site: Site, address: str, browser: webdriver.Chrome
) -> None:
    def wait(condition: Callable[[], object]) -> None:
        WebDriverWait(browser, BOUND, poll_frequency=0.02).until(lambda _: condition())

    def said(kind: str) -> list[str]:
        script = "return [...document.querySelectorAll('#talk > ' + arguments[0])].map(one => one.textContent)"
        return browser.execute_script(script, kind)

    def answering() -> bool:
        return browser.find_element(By.ID, "stop").is_displayed()

    def ask(question: str) -> None:
        """Asks, and waits for the beginning of an answer."""
        before = len(said(".answered"))
        browser.find_element(By.ID, "question").send_keys(question, Keys.ENTER)
        wait(lambda: any(said(".answered")[before:]))

    browser.get(f"{address}/ask")
    browser.find_element(By.NAME, "name").send_keys("ann")
    browser.find_element(By.NAME, "password").send_keys(site.passwords["ann"], Keys.ENTER)
    wait(lambda: browser.find_elements(By.ID, "question"))

    ask("What about <b>tea</b>?")
    assert answering()
    beginning = said(".answered")[0]
    wait(lambda: not answering())
    whole = said(".answered")[0]
    assert whole.startswith(beginning)
    assert 0 < len(beginning) < len(whole)
    assert said(".asked") == ["What about <b>tea</b>?"]

    ask("What else?")
    wait(lambda: not answering())
    assert "market" in said(".answered")[1]
    assert "market" not in whole

    ask("And once more: tea?")
    browser.find_element(By.ID, "stop").click()
    wait(lambda: said(".faint") == ["Stopped."])
    assert 0 < len(said(".answered")[2]) < len(whole)
    assert not answering()

    assert browser.get_log("browser") == []  # nor has the content security policy forbidden anything
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
    wait(lambda: said(".trouble") == ["You are not logged in any more. Log in"])
    browser.find_element(By.LINK_TEXT, "Log in").click()
    wait(lambda: browser.find_elements(By.NAME, "password"))
