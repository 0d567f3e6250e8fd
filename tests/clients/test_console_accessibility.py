"""The console has no serious problem of accessibility that axe-core finds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.clients.conftest import Served
from tests.clients.pins import is_installed
from tests.integration.browser import Browser, browsing

AXE = Path(__file__).parent / "node" / "node_modules" / "axe-core" / "axe.min.js"
SERIOUS = {"serious", "critical"}
PAGES = (
    "/console/login",
    "/console",
    "/console/workers/{worker}",
    "/console/tenants",
    "/console/tenants/{tenant}/keys",
    "/console/usage",
    "/console/models",
    "/console/requests?id=0",
    "/console/audit",
    "/console/egress",
    "/console/chat",
)
RUN = "const done = arguments[0]; axe.run().then((found) => done(JSON.stringify(found.violations)));"


@pytest.fixture(scope="module")
def browser(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Logged in."""
    if not is_installed("node"):
        pytest.skip("NO NODE: axe-core is installed beside the clients in Node")
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as made:
        made.open(f"{served.admin_url}/console/login")
        made.find("#key").send_keys(served.admin_key, Keys.ENTER)
        made.wait_for_path("/console")
        yield made


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (375, "dark")])
def test_no_page_of_the_console_has_a_serious_problem(served, browser, width, scheme):
    """Contrast, names, roles, order of headings, labels of fields: with every action unfolded."""
    browser.resize(width, 900)
    browser.prefer(scheme)
    found = {path: problems for path in pages(served) if (problems := problems_of(browser, served, path))}
    assert found == {}


def test_a_problem_would_be_found(served, browser):
    """A field without a label is serious."""
    browser.open(f"{served.admin_url}/console/requests")
    browser.find("main h1")
    browser.driver.execute_script("document.querySelector('label[for=id]').remove()")
    assert any(problem.startswith("label:") for problem in look(browser))


def pages(served: Served) -> Iterator[str]:
    answer = httpx.get(
        f"{served.admin_url}/admin/v1/workers",
        headers={"Authorization": f"Bearer {served.admin_key}"},
        trust_env=False,
    )
    worker = answer.json()["workers"][0]["worker"]
    return (path.format(worker=worker, tenant="operator") for path in PAGES)


def problems_of(browser: Browser, served: Served, path: str) -> list[str]:
    browser.open(f"{served.admin_url}{path}")
    browser.find("main h1")
    browser.driver.execute_script(
        "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
    )
    return look(browser)


def look(browser: Browser) -> list[str]:
    browser.driver.execute_script(AXE.read_text(encoding="utf-8"))
    violations: list[dict[str, Any]] = json.loads(browser.driver.execute_async_script(RUN))
    return [
        f"{each['id']}: {each['help']}: {node['html']}"
        for each in violations
        if each["impact"] in SERIOUS
        for node in each["nodes"]
    ]
