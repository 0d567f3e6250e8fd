"""
A real headless browser, and its record of requests, console messages, pictures.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

SECONDS = 60
"""A busy machine is slow, not wrong."""
PICTURES = "CONSOLE_SCREENSHOTS"
"""Environment variable: directory that screenshots are written to."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def forget(self) -> None:
        """Leave the page; forget cookies, requests and console messages."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.requests()
        self.complaints()

    def find(self, css: str) -> WebElement:
        """Wait for an element."""
        return WebDriverWait(self.driver, SECONDS).until(
            lambda driver: driver.find_element(By.CSS_SELECTOR, css), f"{css} did not come"
        )

    def click_words(self, css: str, words: str) -> None:
        """Click the element that has exactly this text."""
        WebDriverWait(self.driver, SECONDS).until(
            lambda driver: next(
                (found for found in driver.find_elements(By.CSS_SELECTOR, css) if found.text == words), None
            ),
            f"{words!r} did not come",
        ).click()

    def text(self, css: str = "body") -> str:
        """The text of an element, read in one step: the page may be replacing it."""
        found = self.driver.execute_script("return document.querySelector(arguments[0])?.innerText", css)
        return found or ""

    def wait_for(self, words: str, css: str = "body") -> str:
        """Wait until an element has the text, and return its whole text."""
        WebDriverWait(self.driver, SECONDS).until(
            lambda _driver: words in self.text(css), f"{words!r} did not come"
        )
        return self.text(css)

    def texts(self, css: str) -> list[str]:
        """The text of each such element, read in one step."""
        script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText)"
        found: list[str] = self.driver.execute_script(script, css)
        return found

    def drawing(self, css: str) -> str | None:
        """The points of a path of a drawing, read in one step."""
        script = "return document.querySelector(arguments[0])?.getAttribute('d')"
        found: str | None = self.driver.execute_script(script, css)
        return found

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait for something that will be true soon."""
        WebDriverWait(self.driver, SECONDS).until(lambda _driver: true())

    def wait_for_path(self, path: str) -> None:
        WebDriverWait(self.driver, SECONDS).until(
            lambda driver: urlsplit(driver.current_url).path == path, f"{path} did not come"
        )

    def resize(self, width: int, height: int) -> None:
        """Make the viewport, not the window, of this size in CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme, light or dark."""
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )

    def keep_picture(self, name: str) -> None:
        """Write a screenshot, where the environment asks for them."""
        if directory := os.environ.get(PICTURES):
            path = Path(directory) / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            assert self.driver.save_screenshot(str(path))

    def requests(self) -> list[str]:
        """Addresses requested since the last call, without the browser's own pages."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        asked = (
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        )
        return [url for url in asked if urlsplit(url).scheme not in {"chrome", "chrome-untrusted", "data"}]

    def complaints(self) -> list[str]:
        """Messages of the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile; skips where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(
            "NO BROWSER: install the Debian packages chromium and chromium-driver to test the console"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        started.set_page_load_timeout(SECONDS)
        yield Browser(started)
    finally:
        started.quit()
