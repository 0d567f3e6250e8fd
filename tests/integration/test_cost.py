"""
What two tenants cost on a real worker: engine time by tenant adds up to what the engine measured itself.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.serving.worker_protocol import SPECULATION_PATH
from demo.process import ApplianceProcess
from tests.integration.speculation_traffic import Traffic, code, noise

pytestmark = pytest.mark.worker

SETTINGS = {
    "APPLIANCE_LOG__LEVEL": "warning",
    "APPLIANCE_COST__FLUSH_SECONDS": "1",
    "APPLIANCE_COST__CURRENCY": "KES",
    "APPLIANCE_COST__WORKER_PRICE_PER_HOUR": "360",
    "APPLIANCE_COST__POWER_PRICE_PER_KWH": "36",
    "APPLIANCE_COST__WATTS_IDLE": "100",
    "APPLIANCE_COST__WATTS_BUSY": "300",
}
ENOUGH = 2.0
"""Engine seconds of a tenant."""


@dataclass
class Caller:
    """Who sends, as `Traffic` wants it."""

    url: str
    key: str


def run(data: Path, *command: str) -> str:
    arguments = [sys.executable, "-m", "appliance", *command, "--data", str(data)]
    environment = {**os.environ, **SETTINGS, "COLUMNS": "160"}
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def page(appliance: ApplianceProcess) -> str:
    with urllib.request.urlopen(appliance.url + "/metrics", timeout=30) as response:
        return response.read().decode()


def metric(appliance: ApplianceProcess, name: str, **labels: str) -> float:
    """The sum of the series with these labels."""
    found = [
        float(match[2])
        for match in re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page(appliance), re.MULTILINE)
        if all(f'{label}="{value}"' in (match[1] or "") for label, value in labels.items())
    ]
    return sum(found)


def ask(url: str, secret: Path) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {secret.read_text(encoding='utf-8').strip()}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as response:
        return json.load(response)


def engine_seconds(appliance: ApplianceProcess) -> float:
    """What the engine itself has counted since its start, asked past the gateway."""
    status = ask(appliance.url + "/admin/v1/status", appliance.data / "admin.key")
    worker = status["workers"][0]["url"] + SPECULATION_PATH
    return ask(worker, appliance.data / "control.token")["busy_seconds"]


def wait_for(found: Callable[[], Any], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[dict[str, Any], Path, float]:
    """The report after a mixed run of two tenants, made with the gateway stopped; the engine's own count."""
    data = tmp_path_factory.mktemp("cost") / "data"
    with ApplianceProcess("up", data=data, environment=SETTINGS) as appliance:
        run(data, "tenant", "create", "radiology")
        other = Caller(appliance.url, run(data, "key", "create", "radiology").split()[0])
        first = Caller(appliance.url, appliance.key)
        with ExitStack() as stack:
            coding = stack.enter_context(Traffic(first, clients=2, prompt=code()).running())
            stack.enter_context(Traffic(other, clients=1, prompt=noise(), pause_seconds=0.3).running())
            # However fast the machine: enough of each for a fiftieth of it to be more than a look or two.
            given = partial(metric, appliance, "appliance_engine_seconds_total")
            wait_for(
                lambda: coding.answers >= 8 and min(given(tenant="radiology"), given(tenant="demo")) > ENOUGH,
                seconds=120,
            )
        with Traffic(first, clients=1, prompt=code()).running():
            wait_for(
                lambda: metric(appliance, "appliance_speculation_saved_engine_seconds") > 0.5, seconds=120
            )
        running = json.loads(run(data, "cost", "report", "--json"))
        assert running["lines"], "a report can be made while the gateway runs"
        busy = engine_seconds(appliance)
    assert appliance.process.returncode == 0, "".join(appliance.output)
    return json.loads(run(data, "cost", "report", "--json")), data, busy


def test_tenants_have_what_the_engine_was_busy_with(site):
    """Both are there, and what is nobody's is less than a fiftieth of what the engine measured."""
    report, _data, busy = site
    engine = {line["tenant"]: line["engine_seconds"] for line in report["lines"]}
    assert set(engine) == {"demo", "radiology"}
    assert min(engine.values()) > ENOUGH
    measured = report["busy_seconds"]
    assert measured == pytest.approx(busy, rel=0.02)
    assert sum(engine.values()) == pytest.approx(measured, rel=0.02)
    assert sum(engine.values()) + report["unattributed"]["seconds"] == pytest.approx(measured, abs=1e-6)
    assert report["workers"][0]["estimated_seconds"] == 0


def test_every_second_is_paid_by_somebody_or_nobody(site):
    """Tenants, idle and unattributed time make what the worker cost: a tenth a second, and its energy."""
    report, _data, _busy = site
    lines = sum(line["cost"]["total"] for line in report["lines"])
    whole = lines + report["idle"]["cost"]["total"] + report["unattributed"]["cost"]["total"]
    assert whole == pytest.approx(report["total"]["cost"]["total"])
    seconds = report["busy_seconds"] + report["idle"]["seconds"]
    assert report["total"]["cost"]["capital"] == pytest.approx(0.1 * seconds)
    joules = 300 * report["busy_seconds"] + 100 * report["idle"]["seconds"]
    assert report["total"]["cost"]["energy"] == pytest.approx(joules * 36 / 3.6e6, rel=0.02)
    assert report["total"]["delivered_tokens"] >= 8 * 96
    assert report["total"]["cost_per_million"] > 0


def test_drafting_code_has_saved_time_within_bounds(site):
    """The draft is good at code; what it saved is an estimate, and says how good a one."""
    saving = site[0]["saving"]
    assert saving["compared_tokens"] > 500
    assert saving["seconds_low"] < saving["seconds"] < saving["seconds_high"]
    assert saving["seconds"] > 0
    assert saving["money"] > 0
    coding = next(line for line in site[0]["lines"] if line["tenant"] == "demo")
    assert 0 < coding["wasted_tokens"] == coding["draft_tokens"] - coding["accepted_tokens"]


def test_nothing_is_missing_since_it_began(site):
    """It was stopped in order: the times without it are its only gaps."""
    assert {gap["kind"] for gap in site[0]["missing"]} == {"nobody_there"}


def test_the_report_is_a_page_a_sheet_and_a_table(site):
    """With the gateway stopped; each names both tenants."""
    _report, data, _busy = site
    html = data / "cost.html"
    assert run(data, "cost", "report", "--html", str(html)) == f"wrote {html}\n"
    for text in (html.read_text(), run(data, "cost", "report", "--csv"), run(data, "cost", "report")):
        assert "radiology" in text
        assert "demo" in text
