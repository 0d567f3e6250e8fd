"""
Every dashboard as Grafana's own panel components draw it in a browser, with the data of a real Prometheus.

`make dashboards` installs the components and runs this; with DASHBOARD_PICTURES it keeps one picture of each.
"""

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from demo.process import ApplianceProcess
from tests.deploy.monitoring_files import DASHBOARDS, ROOT
from tests.deploy.promql import filled_in
from tests.integration.browser import Browser, browsing
from tests.integration.monitoring_story import Story, monitored

pytestmark = [pytest.mark.worker, pytest.mark.slow, pytest.mark.xdist_group("controlled")]

GRAFANA = ROOT / "tests" / "grafana"
PICTURES = "DASHBOARD_PICTURES"
"""Environment variable: directory that the pictures are written to."""
WIDTH, COLORS, PICTURE_BYTES = 1400, 256, 200_000
STEP_SECONDS = 2
FONTS = {
    "Inter-Regular.woff2": "inter-latin-400-normal.woff2",
    "Inter-Medium.woff2": "inter-latin-500-normal.woff2",
    "Inter-Italic.woff2": "inter-latin-400-italic.woff2",
}
PAGES = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS}
PANELS = [
    pytest.param(uid, panel, id=f"{uid}: {panel['title']}")
    for uid, page in PAGES.items()
    for panel in page["panels"]
]
DRAWN = """
const colored = (canvas) => {
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4) {
    const [r, g, b, alpha] = data.subarray(i, i + 4);
    if (alpha > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60) return true;
  }
  return false;
};
return [...document.querySelectorAll('[data-panel]')].map((panel) => ({
  id: Number(panel.dataset.panel),
  title: panel.dataset.title,
  text: panel.innerText,
  empty: panel.querySelector('[data-empty]') !== null,
  marked: [...panel.querySelectorAll('canvas')].some(colored) || panel.querySelector('[data-bar]') !== null,
}));
"""
"""What stands on the page, panel by panel: `marked` if a canvas has a coloured line or a timeline a bar."""


@dataclass(frozen=True)
class Drawing:
    """One dashboard in the browser, and the answers that it was drawn from."""

    panels: dict[int, dict[str, Any]]
    answers: dict[int, dict[str, list[dict[str, Any]]]]
    """Prometheus's results by panel id and refId."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that draws; skips where its packages are not installed."""
    program = GRAFANA / "node_modules" / ".bin" / "esbuild"
    node = shutil.which("node", path=f"{ROOT / '.deploy' / 'helm' / 'bin'}:{os.environ['PATH']}")
    if not program.exists() or node is None:
        pytest.skip("GRAFANA'S PANELS ARE NOT INSTALLED: make dashboards")
    built = tmp_path_factory.mktemp("page")
    command = [
        *(node, program, "page.jsx", "--bundle", "--minify", "--jsx=automatic", "--loader:.ttf=empty"),
        *("--define:global=globalThis", '--define:process.env.NODE_ENV="production"', "--log-level=error"),
        f"--outfile={built / 'page.js'}",
    ]
    subprocess.run(command, cwd=GRAFANA, check=True, timeout=300)
    place(built)
    return built / "page.html"


def place(built: Path) -> None:
    """Put what the program loads next to it: the page, and Grafana's font where its styles look for it."""
    shutil.copy(GRAFANA / "page.html", built)
    fonts = built / "public" / "fonts" / "inter"
    fonts.mkdir(parents=True, exist_ok=True)
    for name, file in FONTS.items():
        shutil.copy(GRAFANA / "node_modules" / "@fontsource" / "inter" / "files" / file, fonts / name)


@pytest.fixture(scope="module")
def drawings(
    page: Path, controlled: ApplianceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Drawing]]:
    """Every dashboard after a collapse and a recovery of the draft."""
    with (
        monitored(controlled, tmp_path_factory.mktemp("prometheus")) as story,
        browsing(tmp_path_factory.mktemp("profile")) as browser,
    ):
        yield {uid: drawn(uid, story, browser, page) for uid in PAGES}


def drawn(uid: str, story: Story, browser: Browser, page: Path) -> Drawing:
    """Ask its queries, draw it, and keep a picture where the environment asks for it."""
    start, end = round(story.began), int(time.time())  # noqa: TID251 - Prometheus goes by the wall clock
    answers = {
        panel["id"]: {
            target["refId"]: answer(story, target, start, end) for target in panel.get("targets", ())
        }
        for panel in PAGES[uid]["panels"]
    }
    height = 38 * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PAGES[uid]["panels"]) + 16
    browser.forget()
    browser.resize(WIDTH, height)
    browser.open(page.as_uri())
    browser.driver.execute_script(
        "draw(...arguments)", PAGES[uid], answers, {"from": start, "to": end, "step": STEP_SECONDS}
    )
    browser.wait_until(lambda: len(browser.driver.execute_script(DRAWN)) == len(PAGES[uid]["panels"]))
    browser.wait_until(lambda: settled(browser))
    assert [url for url in browser.requests() if not url.startswith("file:")] == []
    assert [each for each in browser.complaints() if "Uncaught" in each] == []
    if directory := os.environ.get(PICTURES):
        keep(browser, Path(directory) / f"{uid.removeprefix('appliance-')}.png")
    return Drawing({panel["id"]: panel for panel in browser.driver.execute_script(DRAWN)}, answers)


def answer(story: Story, target: dict[str, Any], start: int, end: int) -> list[dict[str, Any]]:
    """The series of a query, without those that have no number: Grafana draws nothing of them either."""
    expr = filled_in(target["expr"], interval="15s")
    if target["instant"]:
        found = story.prometheus.ask("query", query=expr, time=str(end))["result"]
        return [each for each in found if math.isfinite(float(each["value"][1]))]
    times = {"start": str(start), "end": str(end), "step": str(STEP_SECONDS)}
    found = story.prometheus.ask("query_range", query=expr, **times)["result"]
    return [each for each in found if any(math.isfinite(float(value)) for _, value in each["values"])]


def settled(browser: Browser) -> bool:
    """Whether two looks at the page are the same: components draw when their size is known."""
    before = browser.driver.execute_script(DRAWN)
    time.sleep(0.5)
    after: bool = browser.driver.execute_script(DRAWN) == before
    return after


def keep(browser: Browser, path: Path) -> None:
    """Write the picture with few colours, which is all that a dashboard has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    assert browser.driver.save_screenshot(str(path))
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(COLORS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


@pytest.mark.parametrize(("uid", "panel"), PANELS)
def test_each_panel_is_drawn_with_its_series(drawings: dict[str, Drawing], uid: str, panel: dict[str, Any]):
    """Empty only without series, and each series of a graph is named as its legend says."""
    found = drawings[uid].panels[panel["id"]]
    assert found["title"] == panel["title"]
    assert panel["title"] in found["text"]
    if panel["type"] in {"row", "text"}:
        return
    answers = drawings[uid].answers[panel["id"]]
    has_series = any(answers.values())
    assert found["empty"] != has_series
    if not has_series:
        assert panel["fieldConfig"]["defaults"].get("noValue", "No data") in found["text"]
    elif panel["type"] in {"timeseries", "state-timeline"}:
        assert found["marked"]
        assert legends(panel, answers) - set(found["text"].split("\n")) == set()
    else:
        assert found["text"].replace(panel["title"], "").strip()


def legends(panel: dict[str, Any], answers: dict[str, list[dict[str, Any]]]) -> set[str]:
    """The names of the series of a panel, as its queries' legends say."""
    names = set()
    for target in panel["targets"]:
        for series in answers[target["refId"]]:
            name = target["legendFormat"]
            for label, value in series["metric"].items():
                name = name.replace(f"{{{{{label}}}}}", value)
            names.add(name)
    return names - {"__auto"}


@pytest.mark.parametrize("uid", sorted(PAGES))
def test_a_dashboard_has_no_other_panels(drawings: dict[str, Drawing], uid: str):
    """The page has the panels of the file, each once."""
    assert sorted(drawings[uid].panels) == sorted(panel["id"] for panel in PAGES[uid]["panels"])


@pytest.mark.skipif(PICTURES not in os.environ, reason=f"no {PICTURES}: no picture is wanted")
@pytest.mark.parametrize("uid", sorted(PAGES))
def test_a_picture_is_small(drawings: dict[str, Drawing], uid: str):
    """Pictures are kept in the repository and are part of each image's documentation."""
    path = Path(os.environ[PICTURES]) / f"{uid.removeprefix('appliance-')}.png"
    assert 10_000 < path.stat().st_size < PICTURE_BYTES
