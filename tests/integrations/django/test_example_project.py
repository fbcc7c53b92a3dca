"""Tests of the example project: its checks, its API on each kind of server, and its page in a browser."""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI

from ...support.browser import chrome
from ...support.conformance import check_response
from ...support.servers import ROOT
from .databases import POSTGRES
from .projects import Project

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait
except ModuleNotFoundError:
    webdriver = None

FOLDER = ROOT / "examples" / "django_project"
BOUND = 20.0


class Shop(Project):
    """The example project with its own seeded database."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__(folder=FOLDER, name="shop", environment=environment)
        self.manage("migrate", "-v0")
        output = self.manage("seed")
        self.passwords = dict(re.findall(r"^(\w+): password (\S+),", output, re.MULTILINE))
        self.keys = dict(re.findall(r"^(\w+): .* API key (\S+)", output, re.MULTILINE))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop({"SQLITE_FILE": str(tmp_path_factory.mktemp("shop") / "db.sqlite3")})


def one(shop: Shop, query: str) -> tuple[object, ...]:
    """Return the only row of a query on the SQLite database."""
    with closing(sqlite3.connect(shop.environment["SQLITE_FILE"])) as connection:
        (row,) = connection.execute(query).fetchall()
        return tuple(row)


def test_project_passes_deploy_checks(shop: Shop) -> None:
    shop.manage("makemigrations", "--check")
    shop.manage("check", "--fail-level=DEBUG")
    deployed = {
        "DJANGO_DEBUG": "0",
        "DJANGO_SECRET_KEY": secrets.token_urlsafe(60),
        "DJANGO_ALLOWED_HOSTS": "shop.example",
        "DJANGO_HSTS_SECONDS": "3600",
    }
    shop.manage("check", "--deploy", "--fail-level=DEBUG", environment=deployed)


def ask(client: OpenAI, question: str, previous: str | None = None) -> tuple[str, str, int]:
    """Return the answer to a question, the response's id, and the number of deltas."""
    pieces = []
    stream = client.responses.create(
        model="shop-assistant", input=question, previous_response_id=previous, stream=True, timeout=BOUND
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
    assert event.type == "response.completed"
    return "".join(pieces), event.response.id, len(pieces)


def serves(shop: Shop, server: str, tmp_path: Path) -> None:
    """Check that each of two users gets answers about their own orders only."""
    with shop.served(server, tmp_path) as address:
        ann, bob = (OpenAI(base_url=f"{address}/v1", api_key=shop.keys[name]) for name in ("ann", "bob"))
        with ann, bob:
            answer, first, pieces = ask(ann, "Where is my order 17?")
            assert re.fullmatch(r"Order 17 \(a blue teapot\) is on its way and should be with you on \w+, .+\.", answer)
            assert pieces > 10
            assert ask(ann, "And when will it be here?", first)[0] == answer
            assert ask(ann, "List my orders, please.")[0].count("\n- Order ") == 4
            assert ask(bob, "Where is my order 17?")[0] == "You have no order 17."
            assert ask(bob, "Hello!")[0].startswith("I know where orders are.")
            assert ann.responses.retrieve(first).output_text == answer
            with pytest.raises(NotFoundError):
                bob.responses.retrieve(first)
        refused = httpx.post(f"{address}/v1/responses", json={"input": "Hi"}, headers={"Authorization": "Bearer shop_"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("server", ["runserver", "uvicorn", "gunicorn"])
def test_api_key_requests_are_counted(shop: Shop, server: str, tmp_path: Path) -> None:
    counted = "SELECT coalesce(sum(responses), 0), coalesce(sum(input_tokens), 0) FROM orders_usage"
    responses, tokens = one(shop, counted)
    serves(shop, server, tmp_path)
    assert one(shop, counted) == (responses + 5, tokens + 5 + 6 + 4 + 5 + 1)


@pytest.mark.skipif(POSTGRES is None, reason="needs RESPONSES_KIT_TEST_POSTGRES")
def test_postgresql_is_configured_by_variables(tmp_path: Path) -> None:
    psycopg = pytest.importorskip("psycopg")
    schema = f"kit_{secrets.token_hex(6)}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        info = connection.info
        connection.execute(f"CREATE SCHEMA {schema}")
        try:
            environment = {
                "PGHOST": info.host,
                "PGPORT": str(info.port),
                "PGUSER": info.user,
                "PGPASSWORD": info.password,
                "PGDATABASE": info.dbname,
                "PGOPTIONS": f"-c search_path={schema}",
            }
            shop = Shop(environment)
            serves(shop, "uvicorn", tmp_path)
            (kept,) = connection.execute(f"SELECT count(*) FROM {schema}.responses_kit_django_response").fetchone()
            assert kept == 5
        finally:
            connection.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.local
@pytest.mark.timeout(120)  # the model is slow if other tests use the processor
def test_model_is_configured_by_variable(shop: Shop, tmp_path: Path) -> None:
    environment = {**shop.environment, "SHOP_BACKEND": "orders.with_model.ModelAssistant"}
    with Project(folder=FOLDER, name="shop", environment=environment).served("uvicorn", tmp_path) as address:
        question = {"input": "Where is my order 17?", "max_output_tokens": 16}
        headers = {"Authorization": f"Bearer {shop.keys['ann']}"}
        answer = httpx.post(f"{address}/v1/responses", json=question, headers=headers, timeout=50).json()
        check_response(answer)
        assert answer["output"][0]["content"][0]["text"]
        assert answer["usage"]["input_tokens"] > 60  # the instructions contain the orders


def csrf(page: httpx.Response) -> str:
    found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)
    assert found is not None, page.text
    return found[1]


def test_admin_shows_new_key_once_and_stores_digest(shop: Shop, tmp_path: Path) -> None:
    shop.manage(
        "createsuperuser", "--noinput", "--username=root", "--email=", environment={"DJANGO_SUPERUSER_PASSWORD": "root"}
    )
    with shop.served("gunicorn", tmp_path) as address, httpx.Client(base_url=address, timeout=BOUND) as client:
        token = csrf(client.get("/admin/login/"))
        client.post("/admin/login/", data={"username": "root", "password": "root", "csrfmiddlewaretoken": token})
        token = csrf(client.get("/admin/orders/apikey/add/"))
        (user,) = one(shop, "SELECT id FROM auth_user WHERE username = 'bob'")
        form = {"user": str(user), "name": "printer", "csrfmiddlewaretoken": token}
        page = client.post("/admin/orders/apikey/add/", data=form, follow_redirects=True)
        keys = re.findall(r"shop_[\w-]{43}", page.text)
        assert len(keys) == 1
        assert keys[0] not in client.get("/admin/orders/apikey/").text
        assert keys[0].encode() not in Path(shop.environment["SQLITE_FILE"]).read_bytes()
        with OpenAI(base_url=f"{address}/v1", api_key=keys[0]) as bob:
            assert "two soup bowls" in ask(bob, "Where is order 16?")[0]
        assert "resp_" in client.get("/admin/responses_kit_django/response/").text


# The page.


@pytest.fixture
def browser() -> Iterator[webdriver.Chrome]:
    with chrome("1000,800", bound=BOUND) as driver:
        yield driver


class Chat:
    """The page with a logged-in user."""

    def __init__(self, browser: webdriver.Chrome, address: str, user: str, password: str) -> None:
        self.browser = browser
        browser.get(address)
        browser.find_element(By.NAME, "username").send_keys(user)
        browser.find_element(By.NAME, "password").send_keys(password, Keys.ENTER)
        self.ready()

    def wait(self, condition: Callable[[], object]) -> None:
        WebDriverWait(self.browser, BOUND, poll_frequency=0.02).until(lambda _: condition())

    def ready(self) -> None:
        """Wait until a question can be sent."""
        self.wait(lambda: self.browser.find_elements(By.CSS_SELECTOR, "#send:enabled"))

    def answering(self) -> bool:
        return self.browser.find_element(By.ID, "stop").is_displayed()

    def said(self, kind: str) -> list[str]:
        script = "return [...document.querySelectorAll('#log > p.' + arguments[0])].map(one => one.textContent)"
        found: list[str] = self.browser.execute_script(script, kind)
        return found

    def ask(self, question: str) -> None:
        """Send a question, and wait for the beginning of the answer."""
        before = len(self.said("assistant"))
        self.browser.find_element(By.ID, "question").send_keys(question, Keys.ENTER)
        self.wait(lambda: any(self.said("assistant")[before:]))

    def complain(self, question: str, message: str) -> None:
        """Send a question, and wait for an error message."""
        self.browser.find_element(By.ID, "question").send_keys(question, Keys.ENTER)
        self.wait(lambda: self.said("note") and message in self.said("note")[-1] and not self.answering())


@pytest.mark.parametrize("server", ["uvicorn", "gunicorn"])
def test_page_streams_stops_and_continues_conversation(
    shop: Shop, server: str, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    with shop.served(server, tmp_path) as address:
        chat = Chat(browser, address, "ann", shop.passwords["ann"])
        chat.ask("List my orders, please.")
        assert chat.answering()  # the response has not ended
        beginning = chat.said("assistant")[0]
        assert 0 < len(beginning) < 100
        chat.wait(lambda: not chat.answering())
        whole = chat.said("assistant")[0]
        assert whole.startswith(beginning)
        assert whole.count("\n- Order ") == 4

        cancelled = "SELECT count(*) FROM responses_kit_django_response WHERE status = 'cancelled'"
        before = one(shop, cancelled)  # the servers share a database
        chat.ask("And again: my orders?")
        browser.find_element(By.ID, "stop").click()
        chat.wait(lambda: chat.said("note") == ["Stopped."])
        stopped = chat.said("assistant")[1]
        assert 0 < len(stopped) < len(whole)
        chat.wait(lambda: one(shop, cancelled) > before)  # a response in progress cannot be continued

        chat.ask("Where is 17?")
        chat.wait(lambda: not chat.answering())
        browser.refresh()
        chat.ready()
        assert chat.said("user") == ["List my orders, please.", "And again: my orders?", "Where is 17?"]
        assert [len(text) > 0 for text in chat.said("assistant")] == [True, True, True]
        assert chat.said("assistant")[0] == whole
        chat.ask("When will it be here?")  # continues the conversation
        chat.wait(lambda: not chat.answering())
        assert chat.said("assistant")[-1].startswith("Order 17 ")
        browser.find_element(By.ID, "new").click()
        chat.wait(lambda: browser.find_element(By.ID, "welcome").is_displayed())
        assert browser.get_log("browser") == []  # violations of the content security policy are errors, too


def test_page_explains_errors(shop: Shop, browser: webdriver.Chrome, tmp_path: Path) -> None:
    with shop.served("uvicorn", tmp_path) as address:
        chat = Chat(browser, address, "bob", shop.passwords["bob"])
        place = "last-response-of-" + str(browser.execute_script("return form.dataset.user"))
        browser.execute_script("localStorage.setItem(arguments[0], 'resp_of_somebody_else')", place)
        chat.complain("Where is it?", "has expired")
        chat.ask("Where is 16?")
        chat.wait(lambda: not chat.answering())
        browser.execute_script("form.elements.csrfmiddlewaretoken.value = 'x'")
        chat.complain("Where is 16?", "Reload it")
        browser.delete_all_cookies()
        chat.complain("Where is 16?", "You are not logged in any more. Log in")
    chat.complain("Where is 16?", "The shop cannot be reached")


def test_page_fits_phone_width(shop: Shop, browser: webdriver.Chrome, tmp_path: Path) -> None:
    narrow = {"width": 320, "height": 640, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    with shop.served("gunicorn", tmp_path) as address:
        chat = Chat(browser, address, "bob", shop.passwords["bob"])
        chat.ask(f"Where is {'x' * 200}?")
        chat.wait(lambda: not chat.answering())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 320
        for name in ("question", "send", "new"):
            assert browser.find_element(By.ID, name).rect["width"] > 40
