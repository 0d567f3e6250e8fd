"""
Take the pictures of the console from a real appliance under load: `python -m docs.pictures`.

The demo models complete code, then hex digits, which no draft can predict, then code again, so that the
overview shows a fallback and the way back.  Takes six minutes, and needs Chromium.
"""

import tempfile
import time
from pathlib import Path

from selenium.webdriver.common.keys import Keys

from demo.process import ApplianceProcess
from tests.integration.browser import Browser, browsing
from tests.integration.speculation_traffic import Traffic, code, noise

IMAGES = Path(__file__).parent / "images"
CLIENTS = 4
STORY = ((code, 200), (noise, 60), (code, 60))
"""What clients send, and for how many seconds."""
WIDTH, HEIGHT = 1200, 900


def main() -> None:
    """Serve, load, look."""
    with (
        tempfile.TemporaryDirectory() as name,
        ApplianceProcess("up", data=Path(name) / "data") as appliance,
        browsing(Path(name) / "profile") as browser,
    ):
        browser.resize(WIDTH, HEIGHT)
        browser.open(f"{appliance.admin_url}/console")
        key = (appliance.data / "admin.key").read_text(encoding="utf-8").strip()
        browser.find("#key").send_keys(key, Keys.ENTER)
        browser.wait_for_path("/console")
        with Traffic(appliance, clients=CLIENTS, prompt=STORY[0][0]()).running() as traffic:
            for prompt, seconds in STORY:
                traffic.turn_to(prompt())
                time.sleep(seconds)
            browser.open(f"{appliance.admin_url}/console")
            _keep(browser, "console-overview")
            browser.find("tbody th a").click()
            browser.find("#sizes")
            _keep(browser, "console-worker")
            browser.open(f"{appliance.admin_url}/console/audit")
            browser.find("form.action button").click()
            browser.wait_for("Verified", "[data-status]")
            _keep(browser, "console-audit")
        browser.open(f"{appliance.admin_url}/console/chat")
        browser.find("#tenant-key").send_keys(appliance.key)
        browser.find("#prompt").send_keys("Write a Python function `get_name`.")
        browser.find("#chat button[type=submit]").click()
        request = browser.wait_for("Done", "#chat-status").partition("Request ")[2].partition(" ")[0]
        _keep(browser, "console-chat")
        browser.open(f"{appliance.admin_url}/console/tenants/demo/keys")
        _keep(browser, "console-keys")
        browser.open(f"{appliance.admin_url}/console/requests?id={request}")
        _keep(browser, "console-request")
        if traffic.failures:
            raise SystemExit(f"requests failed: {traffic.failures[:3]}")


def _keep(browser: Browser, name: str) -> None:
    browser.driver.save_screenshot(str(IMAGES / f"{name}.png"))
    print(f"wrote docs/images/{name}.png")


if __name__ == "__main__":
    main()
