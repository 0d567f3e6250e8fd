"""Promises of the operator console, kept in a real browser against a real gateway process."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from demo.process import ApplianceProcess
from tests.controlled import EngineWorker
from tests.fakes import CONTROL_TOKEN
from tests.integration.browser import Browser, browsing

PIECES = [f"word{number} " for number in range(30)]
TICK_SECONDS = 0.5
STEPS = 40
PICTURED_SECONDS = 80
"""So that the chart in the docs has something to show; no test waits for it."""


class Workers:
    """Two workers with the real plugin, in a thread of their own: one draft is good, one is useless."""

    def __init__(self) -> None:
        script = {"pieces": PIECES, "pause_seconds": 0.05}
        self.good, self.useless = EngineWorker(**script), EngineWorker(**script)
        self.urls: list[str] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_reason: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            for worker in (self.good, self.useless):
                await stack.enter_async_context(worker.serving())
                self.urls.append(worker.url)
            self._ready.set()
            number = 0
            while not self._ending.is_set():
                number += 1
                self.good.decode(STEPS, accepted=2 + (number // 6) % 2)
                self.useless.decode(STEPS, accepted=0)
                await asyncio.sleep(TICK_SECONDS)


class Site:
    """One gateway and its keys."""

    def __init__(self, process: ApplianceProcess) -> None:
        self.url, self.key = process.admin_url, process.key
        self.admin_key = (process.data / "admin.key").read_text().strip()
        self.process = process

    def page(self, path: str = "") -> str:
        return f"{self.url}/console{path}"

    def admin(self, method: str, path: str, **body: object) -> dict:
        answer = httpx.request(
            method,
            f"{self.url}/admin/v1/{path}",
            headers={"Authorization": f"Bearer {self.admin_key}"},
            json=body or None,
            timeout=60,
            trust_env=False,
        )
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def gateway(directory: Path, workers: Workers, **console: object) -> Iterator[Site]:
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / "control-token"
    token.write_text(CONTROL_TOKEN)
    token.chmod(0o600)
    control = urlsplit(workers.urls[0]).netloc
    environment = {
        "APPLIANCE_POOL__URLS": json.dumps(workers.urls),
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(token),
        "APPLIANCE_EGRESS__MODE": "warn",
        "APPLIANCE_EGRESS__TCP_TARGETS": '["192.0.2.1:443", "192.0.2.1:853"]',
        "APPLIANCE_EGRESS__UDP_TARGETS": "[]",
        "APPLIANCE_EGRESS__METADATA_TARGETS": "[]",
        "APPLIANCE_EGRESS__CANARY_NAME": "null",
        "APPLIANCE_EGRESS__CONTROL": control,
        "APPLIANCE_EGRESS__TIMEOUT_SECONDS": "0.5",
        **{f"APPLIANCE_CONSOLE__{name.upper()}": str(value) for name, value in console.items()},
    }
    with ApplianceProcess("gateway", data=directory / "data", environment=environment) as process:
        yield Site(process)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as made:
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, workers: Workers) -> Iterator[Site]:
    with gateway(tmp_path_factory.mktemp("console"), workers) as made:
        limits = {"requests_per_minute": 600, "tokens_per_minute": 60000, "concurrent_requests": 8}
        made.admin("POST", "tenants", name="radiology", limits=limits)
        made.key = made.admin("POST", "tenants/radiology/keys", models=["demo"])["key"]
        yield made


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as made:
        yield made


@pytest.fixture
def browser(window: Browser) -> Browser:
    """A window that knows nothing of earlier tests."""
    window.forget()
    window.resize(1200, 900)
    window.prefer("light")
    return window


def log_in(browser: Browser, site: Site) -> None:
    browser.open(site.page())
    browser.find("#key").send_keys(site.admin_key, Keys.ENTER)
    browser.wait_for_path("/console")


def is_clean(browser: Browser, site: Site) -> None:
    """No request to another host, and no browser error."""
    asked = browser.requests()
    assert asked
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(site.url).netloc}
    assert browser.complaints() == []


def test_operators_log_in_and_see_workers_live(browser, site):
    """The page is complete at once, refreshes itself, and requests nothing from other hosts."""
    browser.open(site.page())
    browser.wait_for_path("/console/login")
    browser.keep_picture("console-login")
    log_in(browser, site)
    browser.wait_for("2 workers", "[data-status]")
    browser.wait_for("speculative", "tbody")
    # The monitor detects the useless draft while the page is open; the page is not reloaded.
    browser.driver.execute_script("window.stayed = true")
    browser.find("path.length")
    drawn = browser.drawing("path.length")
    browser.wait_for("1 target-only", "[data-status]")
    browser.wait_until(lambda: browser.drawing("path.length") != drawn)
    assert browser.driver.execute_script("return window.stayed")
    browser.find("path.length[d*='L']")
    browser.find("path.breakeven[d*='L']")
    cookie = browser.driver.get_cookie("appliance_console")
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert cookie["path"] == "/console"
    assert browser.driver.execute_script("return document.cookie") == ""
    is_clean(browser, site)
    browser.keep_picture("console-overview", after=PICTURED_SECONDS)
    browser.prefer("dark")
    browser.keep_picture("console-overview-dark")


def test_a_chat_is_streamed_and_recorded_as_the_tenants(browser, site):
    """It comes piece by piece, through the public API, and its entry names the tenant."""
    log_in(browser, site)
    before = site.admin("GET", "status")["audit"]["size"]
    browser.find("nav a[href='/console/chat']").click()
    browser.find("#tenant-key").send_keys(site.key)
    browser.find("#prompt").send_keys("Say thirty words.")
    browser.driver.execute_script(
        "window.seen = []; new MutationObserver(() => "
        "window.seen.push(document.getElementById('answer').textContent.length))"
        ".observe(document.getElementById('answer'), {childList: true, characterData: true, subtree: true});"
    )
    browser.find("#chat button[type=submit]").click()
    status = browser.wait_for("Done", "#chat-status")
    assert browser.text("#answer").split() == "".join(PIECES).split()
    assert len(set(browser.driver.execute_script("return window.seen"))) > 10
    assert re.search(r"Request \S+ in the audit log", status)
    browser.keep_picture("console-chat")
    assert site.admin("GET", "status")["audit"]["size"] >= before + 2
    browser.open(site.page("/tenants"))
    browser.wait_for("radiology", "tbody")
    (row,) = (row for row in browser.texts("tbody tr") if row.startswith("radiology"))
    assert "600 requests/min" in row
    assert not row.endswith("\t0")
    is_clean(browser, site)
    browser.keep_picture("console-tenants")


def test_an_admin_key_calls_no_model_from_the_chat_either(browser, site):
    """The page has no way around what keys may do."""
    log_in(browser, site)
    browser.open(site.page("/chat"))
    browser.find("#tenant-key").send_keys(site.admin_key)
    browser.find("#prompt").send_keys("Hello")
    browser.find("#chat button[type=submit]").click()
    assert "admin key" in browser.wait_for("Failed", "#chat-status")
    assert browser.text("#answer") == ""


def test_the_log_is_verified_from_the_page(browser, site):
    """In the background; the page shows when it is done, and the verdict."""
    log_in(browser, site)
    browser.open(site.page("/audit"))
    browser.find("form.action button").click()
    browser.wait_for_path("/console/audit")
    assert "valid and complete" in browser.wait_for("Verified", "[data-status]")
    assert browser.text("[data-verdict]") == "valid"
    is_clean(browser, site)
    browser.keep_picture("console-audit")


def test_egress_is_checked_from_the_page_and_recorded(browser, site):
    """Each attempt is listed with its outcome, and the entry names the admin key."""
    log_in(browser, site)
    browser.open(site.page("/egress"))
    browser.wait_for("Last check", ".facts")
    browser.find("form.action button").click()
    shown = browser.wait_for("(request)")
    assert "192.0.2.1:443" in shown
    assert "192.0.2.1:853" in shown
    is_clean(browser, site)
    browser.keep_picture("console-egress")


def test_a_wrong_key_opens_nothing(browser, site):
    """Nor does a tenant's; the answer does not tell the one from the other."""
    told = []
    for key in ("sk-wrong", site.key):
        browser.open(site.page("/login"))
        browser.find("#key").send_keys(key, Keys.ENTER)
        told.append(browser.wait_for("no access", "[role=alert]"))
    assert told[0] == told[1]
    assert browser.driver.get_cookie("appliance_console") is None
    browser.keep_picture("console-wrong-key")
    browser.open(site.page("/audit"))
    browser.wait_for_path("/console/login")


def test_a_session_ends_by_itself(browser, workers, tmp_path):
    """An open page is left for the login, without a click."""
    with gateway(tmp_path / "short", workers, session_seconds=2) as site:
        browser.open(site.page())
        browser.find("#key").send_keys(site.admin_key, Keys.ENTER)
        browser.wait_for("Your session ended", "[role=alert]")
        browser.keep_picture("console-expired")


def test_the_keyboard_is_enough(browser, site):
    """From login to a verdict and logout with Tab and Enter only, with a visible focus."""
    browser.open(site.page())
    browser.wait_for_path("/console/login")
    press = browser.driver.switch_to
    press.active_element.send_keys(site.admin_key, Keys.ENTER)
    browser.wait_for_path("/console")
    reach(browser, "a", "Audit log").send_keys(Keys.ENTER)
    browser.wait_for_path("/console/audit")
    reach(browser, "button", "Verify the log").send_keys(Keys.ENTER)
    browser.wait_for("Verified", "[data-status]")
    reach(browser, "button", "Log out").send_keys(Keys.ENTER)
    browser.wait_for_path("/console/login")
    browser.open(site.page("/audit"))
    browser.wait_for_path("/console/login")


def reach(browser: Browser, tag: str, words: str):
    """Press Tab until such an element has the focus."""
    for _ in range(30):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        active = browser.driver.switch_to.active_element
        if active.tag_name == tag and active.text == words:
            assert active.value_of_css_property("outline-style") == "solid"
            return active
    pytest.fail(f"{words} cannot be reached with the keyboard")


@pytest.mark.parametrize("path", ["", "/tenants", "/audit", "/egress", "/chat", "/login"])
def test_pages_fit_a_phone(browser, site, path):
    """At 375 pixels nothing has to be scrolled sideways."""
    browser.resize(375, 812)
    log_in(browser, site)
    browser.open(site.page(path))
    browser.find("main h1")
    width = browser.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= 375
    if not path:
        browser.keep_picture("console-phone")
