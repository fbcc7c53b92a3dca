"""A headless browser for tests, if one is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from selenium import webdriver

__all__ = ["chrome"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@contextmanager
def chrome(size: str, *, bound: float) -> Iterator[webdriver.Chrome]:
    """Yield a headless Chromium that records console logs, or skip the test if there is none.

    Args:
        size: The size of the window, such as "900,800".
        bound: The timeout for loading a page, in seconds.
    """
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError:
        webdriver = None
    if webdriver is None or CHROMIUM is None or DRIVER is None:
        pytest.skip("needs selenium, chromium and chromedriver; apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={size}"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(bound)
    yield driver
    driver.quit()
