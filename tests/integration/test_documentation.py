"""The documentation's site: whole, readable without a network, and served by a gateway under its policy."""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import uvicorn
from starlette.applications import Starlette

from appliance.api.documentation import POLICY_FILE, documentation_routes
from tests.integration.browser import Browser, browsing

ROOT = Path(__file__).parents[2]
MKDOCS = Path(sys.executable).with_name("mkdocs")
OFFLINE = ("unshare", "--user", "--map-root-user", "--net")
SEARCHED, FOUND = "ApplianceAuditFailing", "/runbooks/alerts/ApplianceAuditFailing.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built in an empty network namespace; a link to nowhere fails the build."""
    directory = tmp_path_factory.mktemp("documentation") / "site"
    build = (str(MKDOCS), "build", "--quiet", "--strict", "--site-dir", str(directory))
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*OFFLINE, *build], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def url(site) -> Iterator[str]:
    """Address at which the gateway's routes serve the site."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Starlette(routes=documentation_routes(site)), lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/docs"
    server.should_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("profile")) as started:
        yield started


def links(page: Path) -> set[Path]:
    """Files that a page links to or shows."""
    targets = re.findall(r'\s(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8"))
    paths = [unquote(urlsplit(target).path) for target in targets if not urlsplit(target).scheme]
    return {(page.parent / path).resolve() for path in paths if path}


def test_every_page_is_reachable_and_no_link_leads_nowhere(site):
    reached: set[Path] = set()
    unread = {site / "index.html"}
    while unread:
        page = unread.pop()
        reached.add(page)
        if page.suffix == ".html":
            unread |= links(page) - reached
    assert not [path for path in reached if not path.exists()]
    # Nobody links to the page of what is not found, or to a part of Swagger UI that is not used.
    unused = {site / "404.html", site / "assets" / "swagger-ui" / "oauth2-redirect.html"}
    assert set(site.rglob("*.html")) - reached == unused
    sources = {path for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"}
    pages = {site / path.relative_to(ROOT / "docs").with_suffix(".html") for path in sources}
    assert pages <= reached


def test_no_page_asks_for_anything_of_the_internet(site):
    asked = re.compile(r'<(?:script|link|img|iframe)[^>]*\s(?:src|href)="(https?:)?//[^"]*"')
    assert not [page for page in site.rglob("*.html") if asked.search(page.read_text(encoding="utf-8"))]


def test_the_licences_of_what_it_contains_come_along(site):
    text = (site / "licenses.txt").read_text(encoding="utf-8")
    assert "Martin Donath" in text
    assert "Apache License" in text
    assert "SmartBear" in text


def test_steps_with_blocks_of_code_are_one_list(site):
    """CommonMark indents them less than Python-Markdown, which would number every step 1."""
    page = (site / "tutorial" / "verify-a-sample-log.html").read_text(encoding="utf-8")
    (steps,) = re.findall(r"<ol>(.*?)</ol>", page, re.DOTALL)
    assert steps.count("<li>") == 5
    # As many as the page shows, each in its step.
    assert steps.count("<pre>") == 10


def test_a_link_to_nowhere_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n", encoding="utf-8")
    for name in ("mkdocs.yml", "docs/site.py", "docs/scripts"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        [MKDOCS, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


@pytest.mark.parametrize("place", ["file", "gateway"])
def test_search_finds_a_runbook(place, site, url, browser):
    at = url if place == "gateway" else site.as_uri()
    browser.forget()
    browser.open(f"{at}/index.html")
    browser.find("input.md-search__input").send_keys(SEARCHED)
    found = browser.find(".md-search-result__item a").get_attribute("href")
    assert urlsplit(found).path.endswith(FOUND)
    assert {urlsplit(asked).netloc for asked in browser.requests()} <= {urlsplit(at).netloc}
    assert browser.complaints() == []


@pytest.mark.parametrize("page", ["reference/openapi.html", "explanation/speculation-and-fallback.html"])
def test_the_policy_lets_pages_work_and_nothing_else(page, url, browser):
    browser.forget()
    browser.open(f"{url}/{page}")
    if page == "reference/openapi.html":
        frame = browser.find("iframe.swagger-ui-iframe")
        browser.driver.switch_to.frame(frame)
        browser.wait_for("/v1/chat/completions")
        browser.driver.switch_to.default_content()
    assert browser.complaints() == []
    browser.driver.execute_script("document.body.setAttribute('onclick', 'document.title = `run`')")
    browser.find("body").click()
    assert browser.driver.title != "run"
    assert any("Content Security Policy" in words for words in browser.complaints())


def test_a_wheel_of_a_checkout_with_the_site_has_it(site, tmp_path):
    """As `deploy/images/wheels.sh` builds it for the images."""
    unpacked = shutil.ignore_patterns("__pycache__", "site")
    shutil.copytree(ROOT / "appliance", tmp_path / "appliance", ignore=unpacked)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(site, tmp_path / "appliance" / "api" / "site")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "--wheel-dir", tmp_path, tmp_path], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert {"appliance/api/site/index.html", f"appliance/api/site/{POLICY_FILE}"} <= set(names)
