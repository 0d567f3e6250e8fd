"""Promises of the operator console, kept in a real browser against a real gateway process."""

import re
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from tests.integration.browser import Browser
from tests.integration.console_site import PIECES, Site, Workers, gateway, is_clean, log_in


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


@pytest.fixture
def browser(window: Browser) -> Browser:
    """A window that knows nothing of earlier tests."""
    window.forget()
    window.resize(1200, 900)
    window.prefer("light")
    return window


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
    browser.keep_picture("console-overview")
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
        "window.seen.push(document.querySelector('.answer').textContent.length))"
        ".observe(document.getElementById('conversation'), {childList: true, subtree: true});"
    )
    browser.find("#chat button[type=submit]").click()
    status = browser.wait_for("Done", "#chat-status")
    assert browser.text("#conversation .answer").split() == "".join(PIECES).split()
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
    assert browser.text("#conversation .answer") == ""


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


def test_a_key_made_in_the_console_calls_the_model_until_it_is_revoked(browser, site):
    """It is shown once; its successor works beside it; revoking asks first."""
    log_in(browser, site)
    browser.open(site.page("/tenants"))
    browser.find("a[href='/console/tenants/radiology/keys']").click()
    browser.find("#models").send_keys("demo")
    browser.keep_picture("console-keys")
    first = submit_for_key(browser, "form[action$='/radiology/keys']")
    key_id = first.split("-")[1]
    assert calls(site, first) == 200
    browser.open(site.page("/tenants/radiology/keys"))
    assert first not in browser.driver.page_source
    browser.click_words("summary", f"Rotate {key_id}")
    second = submit_for_key(browser, f"form[action$='/{key_id}/rotate']")
    assert (calls(site, first), calls(site, second)) == (200, 200)
    assert not browser.find(f"form[action$='/{key_id}/revoke'] button").is_displayed()
    browser.click_words("summary", f"Revoke {key_id}")
    browser.find(f"#reason-{key_id}").send_keys("a test")
    browser.find(f"form[action$='/{key_id}/revoke'] button").click()
    browser.wait_for(f"Revoked the key {key_id}.", "[data-notice]")
    assert (calls(site, first), calls(site, second)) == (401, 200)
    is_clean(browser, site)


def test_a_worker_is_overridden_and_drained_from_its_page(browser, site, workers):
    """The engine drafts no more while the override is in force; the last worker is not drained by mistake."""
    log_in(browser, site)
    browser.find(f"a[href*='{quote(workers.urls[0].split('//')[1], safe='')}']").click()
    browser.wait_for("speculative", ".facts")
    browser.click_words("summary", "Override speculation")
    Select(browser.find("#mode")).select_by_visible_text("target-only")
    browser.find("#override-note").send_keys("a test")
    browser.find("form[action$='/override'] button[type=submit]").click()
    browser.wait_for("target-only until", "[data-notice]")
    browser.wait_for("a test", ".facts")
    browser.wait_for("An operator set an override.", ".facts")
    browser.keep_picture("console-worker")
    browser.find("form[action$='/override'] button.quiet").click()
    browser.wait_for("the monitor decides again", "[data-notice]")
    for expected in ("Drain", "Undrain"):
        if expected == "Drain":
            browser.click_words("summary", "Drain")
            browser.find("form[action$='/drain'] button").click()
            browser.wait_for("drained", ".facts")
        else:
            browser.find("form[action$='/undrain'] button").click()
            browser.wait_for("gets requests again", "[data-notice]")
    is_clean(browser, site)


def test_a_request_is_found_by_its_id_with_a_verdict(browser, site):
    """What the client holds is enough; the reading is itself an entry."""
    answer = call(site, site.key)
    log_in(browser, site)
    browser.open(site.page(f"/requests?id={answer.headers['x-request-id']}"))
    browser.wait_for("request.intent")
    browser.wait_until(lambda: look_again(browser))
    assert browser.texts("[data-verdict]") == ["valid", "valid"]
    shown = browser.text("main")
    assert "request.outcome" in shown
    assert "radiology" in shown
    browser.keep_picture("console-request")
    is_clean(browser, site)


def test_an_admin_without_the_scope_has_no_form(browser, site):
    """Nor does a form that is sent anyway do anything."""
    auditor = site.admin("POST", "tenants/operator/keys", admin=True, scopes=["read"])["key"]
    browser.open(site.page())
    browser.find("#key").send_keys(auditor, Keys.ENTER)
    browser.wait_for_path("/console")
    browser.open(site.page("/tenants/radiology/keys"))
    browser.wait_for("the scope tenants", ".hint")
    assert browser.texts("main form") == []
    send_anyway(browser, "/console/tenants/radiology/keys")
    browser.wait_for("lacks the scope `tenants`", "[role=alert]")
    browser.open(site.page("/models"))
    browser.wait_for("the scope drafts", ".hint")
    assert browser.texts("main form") == []
    send_anyway(browser, "/console/models/promote")
    browser.wait_for("lacks the scope `drafts`", "[role=alert]")


def send_anyway(browser: Browser, path: str) -> None:
    """Send a form that the page does not have, with the token of the session."""
    browser.driver.execute_script(
        "const form = document.querySelector('form.leave'); form.action = arguments[0]; form.submit()", path
    )


def submit_for_key(browser: Browser, form: str) -> str:
    """Send a form and return the API key that the next page shows."""
    browser.find(f"{form} button").click()
    browser.wait_for("cannot be shown again", "[data-notice]")
    return browser.text("[data-key]")


def call(site: Site, key: str) -> httpx.Response:
    return httpx.post(
        f"{site.url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
        timeout=60,
        trust_env=False,
    )


def calls(site: Site, key: str) -> int:
    return call(site, key).status_code


def look_again(browser: Browser) -> bool:
    """Whether a checkpoint covers every entry by now; looks the request up once more if not."""
    if "no receipt yet" not in browser.text("main"):
        return True
    browser.driver.refresh()
    return False


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


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/tenants",
        "/tenants/radiology/keys",
        "/usage",
        "/models",
        "/requests",
        "/audit",
        "/egress",
        "/chat",
        "/login",
    ],
)
def test_pages_fit_a_phone(browser, site, path):
    """At 375 pixels nothing has to be scrolled sideways; nothing failed to be read."""
    browser.resize(375, 812)
    log_in(browser, site)
    browser.open(site.page(path))
    browser.find("main h1")
    width = browser.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= 375
    assert browser.texts(".problem") == []
    if not path:
        browser.keep_picture("console-phone")
