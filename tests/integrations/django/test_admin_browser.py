"""Tests of the admin in a browser: search, transcripts, hostile content, dark mode and small screens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from responses_kit.outputs import Finish, Reasoning, Refusal, ToolCall, Usage

from ...support.browser import chrome
from .databases import configure

pytest.importorskip("selenium")
configure()

from django.contrib.auth.models import User  # noqa: E402  # Django's models come after its settings
from django.contrib.staticfiles.testing import StaticLiveServerTestCase  # noqa: E402
from django.db import connections  # noqa: E402
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

from responses_kit_django.models import Conversation, Response  # noqa: E402

from .rows import create_conversation, create_row  # noqa: E402

BOUND = 10.0
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "</pre></div><iframe src='https://example.org'></iframe><svg onload='window.hacked = 3'>"
)


class Site(StaticLiveServerTestCase):
    """The URL of a project that is served with its static files."""


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Response]]:
    """A conversation with every kind of item, which ends with a failed turn, and further conversations."""
    User.objects.create_superuser("admin", password="a password")
    kept = create_conversation(
        {
            "input": "What time is it in Kyōto?",
            "tools": [{"type": "function", "name": "get_time", "parameters": {}}],
            "instructions": "Answer shortly.",
            "metadata": {"a_rather_long_name_of_a_ticket": "x" * 300},
        },
        {"input": [{"type": "function_call_output", "call_id": "call_1", "output": "18:04"}]},
        {"input": HOSTILE, "instructions": HOSTILE, "metadata": {"hostile": HOSTILE}},
        {"input": "Something bad"},
        {"input": "Fail"},
        script=[
            [Reasoning("The clock knows."), ToolCall("get_time", '{"zone":"Asia/Tokyo"}', "call_1"), Usage(12, 3)],
            ["It is 18:04.", Finish("max_output_tokens")],
            [HOSTILE, "w" * 500],
            [Refusal("I would rather not.")],
            [RuntimeError("boom")],
        ],
    )
    for number in range(60):
        create_row(None, f"resp_{number:032x}", owner="carol", model="parrot")
    create_row(None, "resp_broken", owner=HOSTILE, input="[" * 1_000, response="{", model=HOSTILE)
    yield kept
    Conversation.objects.all().delete()
    User.objects.all().delete()
    connections.close_all()


@pytest.fixture(scope="module")
def site(rows: list[Response]) -> Iterator[str]:
    Site.setUpClass()
    yield Site.live_server_url
    Site.doClassCleanups()


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    with chrome("1400,1000", bound=BOUND) as driver:
        yield driver


@pytest.fixture
def browser(chromium: webdriver.Chrome, site: str) -> webdriver.Chrome:
    """The list in a browser with a logged-in user."""
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get(f"{site}/admin/responses_kit_django/response/")
    if chromium.find_elements(By.NAME, "username"):
        chromium.find_element(By.NAME, "username").send_keys("admin")
        chromium.find_element(By.NAME, "password").send_keys("a password", Keys.ENTER)
        arrives(chromium, "Select response to view")
    return chromium


def arrives(browser: webdriver.Chrome, expected_text: str) -> None:
    """Wait for a page that contains a text."""
    WebDriverWait(browser, BOUND).until(lambda driver: expected_text in text(driver))


def text(browser: webdriver.Chrome) -> str:
    return str(browser.execute_script("return document.body.innerText"))


def follow(browser: webdriver.Chrome, link: str, expected_text: str) -> None:
    browser.find_element(By.LINK_TEXT, link).click()
    arrives(browser, expected_text)


def opened(browser: webdriver.Chrome, site: str, row: Response) -> webdriver.Chrome:
    browser.get(f"{site}/admin/responses_kit_django/response/{row.pk}/change/")
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    return browser


def test_conversation_is_found_and_read(browser: webdriver.Chrome, rows: list[Response]) -> None:
    follow(browser, "failed", "1 result")
    assert rows[-1].response_id in text(browser)
    assert "parrot" not in browser.find_element(By.ID, "result_list").text
    follow(browser, "All", "66 results")
    browser.find_element(By.NAME, "q").send_keys("KYŌTO", Keys.ENTER)
    arrives(browser, "1 result")
    follow(browser, rows[0].response_id, "About this response")
    shown = text(browser)
    for expected_text in ("What time is it in Kyōto?", "Call of get_time", "12 input tokens, 3 output tokens"):
        assert expected_text in shown
    follow(browser, rows[1].response_id, "Output of get_time")
    assert "Incomplete: max_output_tokens" in text(browser)
    follow(browser, rows[0].response_id, "Turn 1")
    assert "Turn 2" not in text(browser)


def test_pagination_works(browser: webdriver.Chrome) -> None:
    assert len(browser.find_elements(By.CSS_SELECTOR, "#result_list tbody tr")) == 50
    follow(browser, "2", "0 of 16 selected")


def test_page_has_no_inputs(browser: webdriver.Chrome, site: str, rows: list[Response]) -> None:
    opened(browser, site, rows[-1])
    fields = "main :is(input, textarea, select, button, form, [contenteditable])"
    assert browser.find_elements(By.CSS_SELECTOR, fields) == []
    assert [link.text for link in browser.find_elements(By.CSS_SELECTOR, ".submit-row a")] == ["Close", "Delete"]


def test_reasoning_expands_by_keyboard(browser: webdriver.Chrome, site: str, rows: list[Response]) -> None:
    browser.get(f"{site}/admin/responses_kit_django/response/{rows[0].pk}/change/")
    assert "The clock knows." not in text(browser)
    browser.find_element(By.CSS_SELECTOR, ".rk-reasoning summary").send_keys(Keys.ENTER)
    arrives(browser, "The clock knows.")


def test_hostile_text_does_not_run(browser: webdriver.Chrome, site: str, rows: list[Response]) -> None:
    browser.get_log("browser")
    broken = Response.objects.get(response_id="resp_broken")
    for row in (rows[-1], broken, None):
        if row is None:
            browser.get(f"{site}/admin/responses_kit_django/response/?q={broken.response_id}")
        else:
            opened(browser, site, row)
        assert "<script>window.hacked" in text(browser)
        assert browser.execute_script("return window.hacked") is None
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
        assert [url for url in loaded if not url.startswith(site)] == []
        assert [entry for entry in browser.get_log("browser") if "favicon" not in entry["message"]] == []
        assert browser.find_elements(By.TAG_NAME, "iframe") == []


CONTRASTS = """
const luminance = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(part => {
        const value = part / 255;
        return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = node => {
    const colour = getComputedStyle(node).backgroundColor;
    return /, 0\\)$/.test(colour) ? (node.parentElement ? behind(node.parentElement) : "rgb(255, 255, 255)") : colour;
};
return [...document.querySelectorAll(".rk *, #result_list *")].flatMap(node => {
    const said = [...node.childNodes].filter(one => one.nodeType === 3 && one.data.trim());
    if (!said.length || !node.getClientRects().length) return [];
    const [one, other] = [luminance(getComputedStyle(node).color), luminance(behind(node))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    return [[said[0].data.trim().slice(0, 40), contrast]];
});
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_contrast_is_sufficient_in_light_and_dark_mode(
    browser: webdriver.Chrome, site: str, rows: list[Response], theme: str
) -> None:
    browser.execute_script("localStorage.setItem('theme', arguments[0])", theme)
    broken = Response.objects.get(response_id="resp_broken")
    for row in (rows[-1], broken):
        opened(browser, site, row)
        assert browser.execute_script("return document.documentElement.dataset.theme") == theme
        contrasts: list[list[Any]] = browser.execute_script(CONTRASTS)
        assert len(contrasts) > 10
        assert [found for found in contrasts if found[1] < 4.5] == []


def test_page_fits_phone_width(browser: webdriver.Chrome, site: str, rows: list[Response]) -> None:
    narrow = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    for row in (rows[-1], Response.objects.get(response_id="resp_broken"), None):
        if row is None:
            browser.get(f"{site}/admin/responses_kit_django/response/")
        else:
            opened(browser, site, row)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
