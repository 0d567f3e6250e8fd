"""
Promises of rules and dashboards on a running appliance, read by a real Prometheus.
"""

import json
from collections.abc import Iterator

import pytest

from demo.process import ApplianceProcess
from tests.deploy.monitoring_files import DASHBOARDS
from tests.deploy.promql import filled_in
from tests.integration.monitoring_story import COLLAPSED, Story, monitored

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("controlled")]

PAGES = [json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS]
NOT_IN_THE_DEMO = {
    *("Firing alerts", "Errors sent to clients", "Requests not completed", "Refused callers", "Batch lines"),
    *("Limits in use", "Refusals by limit"),
    *("GPU utilisation", "GPU memory used", "GPU power", "GPU temperature", "Last XID error"),
}
"""Panels of what does not happen there, or is not there; each says so instead of `No data`."""
PANELS = [
    pytest.param(panel, id=f"{page['uid']}: {panel['title']}")
    for page in PAGES
    for panel in page["panels"]
    if panel["type"] not in {"row", "text"} and panel["title"] not in NOT_IN_THE_DEMO
]
EVENTS = {event["name"]: event for page in PAGES for event in page["annotations"]["list"]}


@pytest.fixture(scope="module")
def story(controlled: ApplianceProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The draft of the running appliance has collapsed and recovered."""
    with monitored(controlled, tmp_path_factory.mktemp("prometheus")) as story:
        yield story


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


def test_a_panel_that_may_be_empty_says_what_is_missing():
    """So that nobody looks for a fault of the dashboard."""
    saying = {
        panel["title"]
        for page in PAGES
        for panel in page["panels"]
        if "noValue" in panel.get("fieldConfig", {}).get("defaults", {})
    }
    assert saying > NOT_IN_THE_DEMO


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
