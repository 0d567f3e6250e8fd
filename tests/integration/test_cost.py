"""
The cost of two tenants on a real worker: one sends code, the other text that a draft cannot predict.

Engine time by tenant adds up to what the engine measured itself.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.process import ApplianceProcess
from tests.integration.caller import outcomes
from tests.integration.speculation_admin import Admin, cost_report, metric, plugin_reading, wait_for
from tests.integration.speculation_traffic import Traffic, code, noise

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("controlled")]

ENOUGH = 2.0
"""Engine seconds of a tenant."""


@dataclass
class Caller:
    """Who sends, as `Traffic` wants it."""

    url: str
    key: str


def run(data: Path, *command: str) -> str:
    arguments = [sys.executable, "-m", "appliance", *command, "--data", str(data)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120).stdout


def engine_seconds(appliance: ApplianceProcess) -> float:
    """The engine's own counter since its start, read past the gateway."""
    worker = Admin(appliance).ask("status")["workers"][0]["url"]
    return plugin_reading(worker, appliance.data / "control.token")["busy_seconds"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """State after a mixed run of both tenants."""

    data: Path
    report: dict[str, Any]
    busy: float
    """The engine's own count."""
    offenders: list[dict[str, Any]]


@pytest.fixture(scope="module")
def site(controlled) -> Site:
    appliance, data = controlled, controlled.data
    run(data, "tenant", "create", "radiology")
    other = Caller(appliance.url, run(data, "key", "create", "radiology").split()[0])
    first = Caller(appliance.url, appliance.key)
    given = partial(metric, appliance, "appliance_engine_seconds_total")

    def offenders() -> list[dict[str, Any]]:
        return Admin(appliance).ask("speculation")["attribution"]["offenders"]

    with ExitStack() as stack:
        coding = stack.enter_context(Traffic(first, clients=2, prompt=code()).running())
        stack.enter_context(Traffic(other, clients=1, prompt=noise(), pause_seconds=0.3).running())
        wait_for(lambda: {"demo", "radiology"} <= {found["tenant"] for found in offenders()}, seconds=300)
        # On any machine: enough of each, so that a fiftieth of it is more than two polls.
        wait_for(
            lambda: coding.answers >= 8 and min(given(tenant="radiology"), given(tenant="demo")) > ENOUGH,
            seconds=300,
        )
    with Traffic(first, clients=1, prompt=code()).running():
        wait_for(lambda: metric(appliance, "appliance_speculation_saved_engine_seconds") > 0.5, seconds=300)
    busy = engine_seconds(appliance)

    def written() -> dict[str, Any] | None:
        report = json.loads(cost_report(data, "--json"))
        return report if report["busy_seconds"] > 0.98 * busy else None

    report = wait_for(written, seconds=60)
    return Site(data=data, report=report, busy=busy, offenders=offenders())


def test_tenants_have_what_the_engine_was_busy_with(site):
    """Both are in the report, and the unattributed time is less than a fiftieth of the measured."""
    report, busy = site.report, site.busy
    engine = {line["tenant"]: line["engine_seconds"] for line in report["lines"]}
    assert set(engine) == {"demo", "radiology"}
    assert min(engine.values()) > ENOUGH
    measured = report["busy_seconds"]
    assert measured == pytest.approx(busy, rel=0.02)
    assert sum(engine.values()) == pytest.approx(measured, rel=0.02)
    assert sum(engine.values()) + report["unattributed"]["seconds"] == pytest.approx(measured, abs=1e-6)
    assert report["workers"][0]["estimated_seconds"] == 0


def test_every_second_is_attributed_idle_or_unattributed(site):
    """Tenants, idle and unattributed time make the whole cost: a tenth a second, people, and energy."""
    report = site.report
    lines = sum(line["cost"]["total"] for line in report["lines"])
    whole = lines + report["idle"]["cost"]["total"] + report["unattributed"]["cost"]["total"]
    assert whole == pytest.approx(report["total"]["cost"]["total"])
    seconds = report["busy_seconds"] + report["idle"]["seconds"]
    assert report["total"]["cost"]["capital"] == pytest.approx(0.1 * seconds)
    assert report["total"]["cost"]["people"] == pytest.approx(0.1 * seconds)
    joules = 300 * report["busy_seconds"] + 100 * report["idle"]["seconds"]
    assert report["total"]["cost"]["energy"] == pytest.approx(joules * 36 / 3.6e6, rel=0.02)
    assert report["total"]["delivered_tokens"] >= 8 * 96
    assert report["total"]["cost_per_million"] > 0


def test_drafting_code_has_saved_time_within_bounds(site):
    """The draft is good at code; what it saved is an estimate, and says how good a one."""
    saving = site.report["saving"]
    assert saving["compared_tokens"] > 500
    assert saving["seconds_low"] < saving["seconds"] < saving["seconds_high"]
    assert saving["seconds"] > 0
    assert saving["money"] > 0
    coding = next(line for line in site.report["lines"] if line["tenant"] == "demo")
    assert 0 < coding["wasted_tokens"] == coding["draft_tokens"] - coding["accepted_tokens"]


def test_nothing_is_missing_since_it_began(site):
    """The time before the start is the only gap; `controlled` polls again when it stops."""
    assert {gap["kind"] for gap in site.report["missing"]} == {"nobody_there"}


def test_the_report_is_a_page_a_sheet_and_a_table(site):
    """Each names both tenants."""
    data = site.data
    html = data / "cost.html"
    assert cost_report(data, "--html", str(html)) == f"wrote {html}\n"
    for text in (html.read_text(), cost_report(data, "--csv"), cost_report(data)):
        assert "radiology" in text
        assert "demo" in text


def test_attribution_names_tenant_template_and_context(site):
    """The attribution names who sends noise, ahead of who sends code, and no prompt."""
    tenants = [found["tenant"] for found in site.offenders]
    worst = site.offenders[tenants.index("radiology")]
    coding = site.offenders[tenants.index("demo")]
    assert (worst["template"], worst["context"]) == ("raw-plain", "0-1k")
    assert worst["wasted_draft_tokens"] > 0
    assert worst["acceptance_length"] < coding["acceptance_length"]
    for outcome in outcomes(site.data):
        if outcome["tenant"] == "radiology":
            assert (outcome["template"], outcome["context_bucket"]) == ("raw-plain", "0-1k")
