"""
Promises of rules and dashboards on a running appliance, read by a real Prometheus.

The demo pair serves code, then hex digits, which its draft cannot predict, then code again.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from demo.process import ApplianceProcess
from tests.deploy.monitoring_files import DASHBOARDS
from tests.deploy.prometheus import Prometheus, prometheus
from tests.deploy.promql import filled_in
from tests.integration.speculation_admin import Admin, wait_for
from tests.integration.speculation_traffic import Traffic, code, noise

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("controlled")]

COLLAPSED = "ApplianceAcceptanceCollapsed"
HEALTHY = (
    'appliance_speculation_reason{reason="healthy"} == 1 and on (worker) appliance_acceptance_length > 2'
)
CHANGES = "sum(appliance_speculation_changes_total)"
SECONDS = 300
PAGES = [json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS]
PANELS = [
    pytest.param(panel, id=f"{page['uid']}: {panel['title']}")
    for page in PAGES
    for panel in page["panels"]
    if panel["type"] not in {"row", "text"}
]
EVENTS = {event["name"]: event for page in PAGES for event in page["annotations"]["list"]}


@dataclass(frozen=True)
class Story:
    """Observations from outside after all events; everything still runs."""

    prometheus: Prometheus
    began: float
    """Unix time."""
    changes: float
    """Changes of speculation counted from then on."""
    collapsed: set[str]
    """Alerts that fired while the draft had collapsed."""
    recovered: set[str]
    """Alerts that fired when it was over."""


@pytest.fixture(scope="module")
def story(controlled: ApplianceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Make the draft of the running appliance collapse and recover."""
    worker = Admin(controlled).ask("status")["workers"][0]["url"]
    targets = {"gateway": urlsplit(controlled.admin_url).netloc, "worker": urlsplit(worker).netloc}
    tokens = {"worker": controlled.data / "control.token"}
    with (
        prometheus(tmp_path_factory.mktemp("prometheus"), targets, tokens=tokens) as server,
        Traffic(controlled, clients=2, prompt=code()).running() as traffic,
    ):
        yield told(server, traffic)
    assert not traffic.failures


def told(server: Prometheus, traffic: Traffic) -> Story:
    began = time.time()  # noqa: TID251 - Prometheus goes by the wall clock
    wait_for(lambda: server.now(HEALTHY), seconds=SECONDS)
    before = sum(server.now(CHANGES))
    traffic.turn_to(noise())
    wait_for(lambda: COLLAPSED in server.firing(), seconds=SECONDS)
    collapsed = server.firing()
    traffic.turn_to(code())
    wait_for(lambda: COLLAPSED not in server.firing(), seconds=SECONDS)
    wait_for(lambda: server.now(HEALTHY), seconds=SECONDS)
    changes = sum(server.now(CHANGES)) - before
    return Story(server, began, changes, collapsed=collapsed, recovered=server.firing())


def test_the_alert_for_a_collapse_fires_and_ends(story: Story):
    """No critical alert fires for it, and none remains."""
    assert COLLAPSED in story.collapsed
    assert COLLAPSED not in story.recovered
    quiet = {
        "ApplianceNoWorker",
        "ApplianceGatewayDown",
        "ApplianceAuditFailing",
        "ApplianceErrorBudgetBurnsFast",
    }
    assert not quiet & (story.collapsed | story.recovered)


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_shows_something(story: Story, panel: dict):
    """Each of its queries finds numbers on the demo."""
    for target in panel["targets"]:
        expr = filled_in(target["expr"], interval="15s")
        found = story.prometheus.now(expr) if target["instant"] else story.prometheus.since(expr, story.began)
        assert found, expr


def test_changes_of_speculation_are_marked_when_they_happen(story: Story):
    """The collapse and the recovery were counted, and there are marks."""
    changes = filled_in(EVENTS["Speculation changes"]["expr"])
    assert story.prometheus.since(f"count({changes})", story.began)
    assert story.changes >= 2


def test_marks_of_restarts_and_recycles_can_be_asked_for(story: Story):
    """There were none, so there are no marks."""
    for name in ("Worker recycles", "Worker restarts", "Draft promotions"):
        assert story.prometheus.since(filled_in(EVENTS[name]["expr"]), story.began) == []


def test_every_rule_is_evaluated_without_an_error(story: Story):
    """As Prometheus reports for each of them."""
    groups = story.prometheus.ask("rules")["groups"]
    assert groups
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []


def test_a_page_of_the_demo_is_small(story: Story):
    """Far from the bound that `tests/unit/infra/test_cardinality.py` keeps."""
    assert story.prometheus.now('scrape_samples_scraped{job="gateway"}')[0] < 1000
