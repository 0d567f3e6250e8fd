"""
Queries parse, and name only existing metrics and their labels.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from appliance.errors import ERROR_TABLE, UNEXPECTED
from deploy.monitoring.source.__main__ import ALL, rendered
from tests.deploy.monitored_metrics import known_metrics, placeholders
from tests.deploy.monitoring_files import DASHBOARDS, MONITORING, ROOT, alerts, rules, tool
from tests.deploy.prometheus import START_SECONDS, Prometheus, prometheus
from tests.deploy.promql import QueryError, filled_in, labels_of

PAGES = [json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS]
PANELS = [
    pytest.param(panel, id=f"{page['uid']}: {panel['title']}")
    for page in PAGES
    for panel in page["panels"]
    if panel["type"] not in {"row", "text"}
]
README = ROOT / "docs" / "runbooks" / "alerts" / "README.md"
EVENTS = [
    pytest.param(event, id=f"{page['uid']}: {event['name']}")
    for page in PAGES
    for event in page["annotations"]["list"]
]
OURS_TO_ANSWER_FOR = 500
OF_THE_DATA_SOURCE = {"step", "titleFormat", "textFormat"}
"""Fields of events that belong to Grafana's data source for Prometheus, and not to dashboards."""


def result(expr: str) -> frozenset[str]:
    """The labels of what a query of a dashboard finds."""
    return labels_of(promql.parse(filled_in(expr)), known_metrics())


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, id=rule.get("alert") or rule["record"]) for rule in rules()]
)
def test_rule_expressions_name_existing_metrics_and_labels(rule: dict[str, Any]):
    """And its texts fill in only labels that its series have."""
    has = labels_of(promql.parse(rule["expr"]), known_metrics())
    for text in rule.get("annotations", {}).values():
        assert placeholders(text) <= has, text


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, id=rule.get("alert") or rule["record"]) for rule in rules()]
)
def test_installations_that_one_prometheus_reads_are_judged_apart(rule: dict[str, Any]):
    """The remaining labels name the installation, so that no sum hides one; alerts are routed by them."""
    assert labels_of(promql.parse(rule["expr"]), known_metrics()) >= {"namespace", "job"}


@pytest.mark.parametrize("panel", PANELS)
def test_panel_queries_name_existing_metrics_and_labels(panel: dict[str, Any]):
    """And names its series by labels they have."""
    assert panel["targets"]
    for target in panel["targets"]:
        has = result(target["expr"])
        assert placeholders(target["legendFormat"]) <= has, target


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Iterator[Prometheus]:
    """A Prometheus that has evaluated the rules, and scrapes nothing."""
    with prometheus(tmp_path_factory.mktemp("empty"), {}) as server:
        until = time.monotonic() + START_SECONDS
        while not all(group["evaluationTime"] for group in server.ask("rules")["groups"]):
            assert time.monotonic() < until
            time.sleep(0.2)
        yield server


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_shows_no_value_when_its_series_are_absent(panel: dict[str, Any], empty: Prometheus):
    """Neither a good value nor a bad one: who reads it must see that nothing is known."""
    for target in panel["targets"]:
        assert empty.now(filled_in(target["expr"])) == [], target["expr"]


@pytest.mark.parametrize(
    ("prices", "cost"),
    [
        ({}, None),
        ({"site_hour": 7.2}, 7.2),
        ({"worker_hour": 3.6}, 3.6),
        ({"worker_hour": 3.6, "kwh": 0.5, "site_hour": 7.2}, 3.6 + 0.5 + 7.2),
    ],
    ids=lambda value: ",".join(value) or "none" if isinstance(value, dict) else "",
)
def test_cost_per_million_adds_the_prices_that_are_set(
    prices: dict[str, float], cost: float | None, tmp_path: Path
):
    """One worker of 1 kW and a million tokens an hour; without any price the panel has no series."""
    (panel,) = (each.values[0] for each in PANELS if each.values[0]["title"].startswith("Cost per million"))
    told = '{job="gateway",instance="g1"'
    series = {
        f"appliance_build_info{told}}}": "1x90",
        f'appliance_worker_observed_seconds_total{told},worker="w1"}}': "0+60x90",
        f'appliance_worker_energy_joules_total{told},worker="w1"}}': "0+60000x90",
        f'appliance_tokens_total{told},kind="completion"}}': f"0+{1e6 / 60}x90",
        **{f'appliance_cost_price{told},of="{of}"}}': f"{price}x90" for of, price in prices.items()},
    }
    (query,) = (filled_in(target["expr"]) for target in panel["targets"])
    sample = [] if cost is None else [{"labels": "{}", "value": cost}]
    file = tmp_path / "cost.yaml"
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": f"round({query}, 0.001)", "eval_time": "80m", "exp_samples": sample}],
    }
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}), encoding="utf-8")
    command = [tool("promtool"), "test", "rules", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_click_on_a_series_opens_a_dashboard_that_has_its_variable():
    """From every panel that names workers or tenants."""
    variables = {page["uid"]: {each["name"] for each in page["templating"]["list"]} for page in PAGES}
    followed = set()
    for page in PAGES:
        for panel in page["panels"]:
            links = panel.get("fieldConfig", {}).get("defaults", {}).get("links", [])
            legends = " ".join(target["legendFormat"] for target in panel.get("targets", []))
            named = {label for label in ("worker", "tenant") if f"{{{{{label}}}}}" in legends}
            found = {re.match(r"/d/([a-z-]+)\?var-([a-z]+)=", link["url"]).groups() for link in links}
            assert {variable for _, variable in found} == named, panel["title"]
            assert all(variable in variables[uid] for uid, variable in found)
            followed |= found
    assert followed == {("appliance-worker", "worker"), ("appliance-tenants", "tenant")}


@pytest.mark.parametrize("event", EVENTS)
def test_annotation_queries_name_existing_metrics_and_labels(event: dict[str, Any]):
    """And says what happened to whom."""
    has = result(event["expr"])
    assert placeholders(event["titleFormat"] + event["textFormat"]) <= has


@pytest.mark.parametrize("page", PAGES, ids=[page["uid"] for page in PAGES])
def test_variables_are_filled_from_labels_that_exist(page: dict[str, Any]):
    """Each query of a variable; and every panel's data come from the chosen data source."""
    asked = [each for each in page["templating"]["list"] if each["type"] == "query"]
    assert {"datasource", "job"} <= {each["name"] for each in page["templating"]["list"]}
    for variable in asked:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
        assert label == variable["name"]
        assert label in result(selector)
    sources = [panel["datasource"]["uid"] for panel in page["panels"] if "datasource" in panel]
    assert set(sources) == {"${datasource}"}


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("appliance_worker_upp", "there is no metric"),
        ('appliance_worker_up{tenant="acme"}', "no label tenant"),
        ("sum by (model) (appliance_worker_up)", "no label model"),
        ("sum by (worker) (sum(appliance_worker_up))", "no label worker"),
        ("appliance_worker_up and on (tenant) appliance_build_info", "no label tenant"),
        ("appliance_worker_up / appliance_queue_requests", "never match"),
        ("histogram_quantile(0.9, sum(rate(appliance_request_seconds_bucket[5m])))", "no label le"),
        ("rate(vllm:num_drafts_total[5m])", "there is no metric"),
        ('appliance_worker_up{worker=~"$pod"}', "an unknown variable"),
    ],
)
def test_query_for_an_unknown_metric_is_refused(query: str, reason: str):
    """The checker finds what Prometheus accepts silently."""
    with pytest.raises(QueryError, match=reason):
        result(query)


def test_dashboard_files_match_their_source():
    """After a change: `python -m deploy.monitoring.source`."""
    made = {f"{dashboard.uid}.json": rendered(dashboard) for dashboard in ALL}
    assert {file.name: file.read_text(encoding="utf-8") for file in DASHBOARDS} == made


@pytest.mark.parametrize("page", PAGES, ids=[page["uid"] for page in PAGES])
def test_grafana_knows_every_field_of_a_dashboard(page: dict[str, Any]):
    """Read and written again by Grafana's own types, nothing is lost or changed."""
    register_default_plugins()
    again = json.loads(json.dumps(Dashboard.from_json(json.loads(json.dumps(page))), cls=JSONEncoder))
    unknown = {each.rpartition(".")[2] for each in differences(page, again)}
    assert unknown <= OF_THE_DATA_SOURCE


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Fields of ours that are missing in theirs; theirs may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        gone = [f"{where}.{name}" for name in ours if name not in theirs and ours[name] is not None]
        return gone + [
            each
            for name in ours
            if name in theirs
            for each in differences(ours[name], theirs[name], f"{where}.{name}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            each
            for at, pair in enumerate(zip(ours, theirs, strict=True))
            for each in differences(*pair, f"{where}[{at}]")
        ]
    return [] if ours == theirs else [f"{where}: {ours!r} became {theirs!r}"]


@pytest.mark.parametrize("page", PAGES, ids=[page["uid"] for page in PAGES])
def test_panels_do_not_overlap_and_have_a_description(page: dict[str, Any]):
    """Each is on the grid and has a unit and a tooltip; no panel loads anything external."""
    taken: set[tuple[int, int]] = set()
    for panel in page["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["title"]
        if panel["type"] not in {"row", "text"}:
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert re.search(r"[a-z]{4}", panel["description"])
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
    assert "http:" not in json.dumps(page)
    assert "https:" not in json.dumps(page)


def test_all_documented_dashboards_exist():
    """Each reachable from the others, and the one on speculation explains its main word."""
    assert {page["uid"].removeprefix("appliance-") for page in PAGES} == {
        "overview", "speculation", "tenants", "audit", "worker",
    }  # fmt: skip
    assert all(page["links"][0]["tags"] == ["appliance"] == page["tags"] for page in PAGES)
    (speculation,) = [page for page in PAGES if page["uid"] == "appliance-speculation"]
    texts = [panel["options"]["content"] for panel in speculation["panels"] if panel["type"] == "text"]
    assert any("Acceptance length" in text for text in texts)
    assert {"Speculation changes", "Worker recycles", "Draft promotions"} <= {
        each["name"] for each in speculation["annotations"]["list"]
    }


def test_equal_queries_have_equal_titles_and_descriptions():
    """One panel with one title and one text, wherever it stands."""
    said: dict[tuple[str, ...], set[tuple[str, str, str]]] = {}
    for page in PAGES:
        for panel in page["panels"]:
            if "targets" in panel:
                asked = tuple(target["expr"] for target in panel["targets"])
                said.setdefault(asked, set()).add((panel["title"], panel["description"], panel["type"]))
    assert [words for words in said.values() if len(words) > 1] == []
    assert any(len({page["uid"] for page in PAGES if asks(page, asked)}) > 1 for asked in said)


def asks(page: dict[str, Any], asked: tuple[str, ...]) -> bool:
    """Whether a panel of a dashboard has exactly this query."""
    return any(asked == tuple(each["expr"] for each in panel.get("targets", ())) for panel in page["panels"])


def test_the_error_budget_counts_exactly_the_errors_that_are_ours():
    """Codes with a status of 500 and above, and requests without a free slot."""
    expr = next(rule["expr"] for rule in rules() if rule.get("record") == "appliance:errors:rate1h")
    counted = re.compile(re.search(r'code=~"([^"]+)"', expr)[1])
    ours = {each.code for each in (*ERROR_TABLE.values(), UNEXPECTED) if each.status >= OURS_TO_ANSWER_FOR}
    every = {each.code for each in (*ERROR_TABLE.values(), UNEXPECTED)}
    assert {code for code in every if counted.fullmatch(code)} == ours | {"at_capacity"}


@pytest.mark.parametrize("name", sorted(alerts()))
def test_each_alert_has_a_runbook_with_all_sections(name: str):
    """With the four parts every page has."""
    page = README.with_name(f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {name}\n")
    for part in ("## What it means", "## What to check", "## What to do", "## When it resolves"):
        assert part in page, part


def test_alert_pages_match_the_rules():
    """One page for each alert, and the list of them."""
    pages = {file.stem for file in (ROOT / "docs" / "runbooks" / "alerts").glob("*.md")}
    assert pages == {*alerts(), "README"}
    listed = re.findall(
        r"^\| \[(\w+)\]\(\1\.md\) \| (\w+) \|", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed == [(name, rule["labels"]["severity"]) for name, rule in alerts().items()]


@pytest.mark.parametrize(
    "name", sorted({file.name for file in (ROOT / "deploy" / "compose").glob("prometheus.yaml")})
)
def test_prometheus_accepts_the_scrape_configuration(name: str, tmp_path: Path):
    """The file itself, with the rules and the token where they are here."""
    content = yaml.safe_load((ROOT / "deploy" / "compose" / name).read_text(encoding="utf-8"))
    content["rule_files"] = [str(MONITORING / "rules" / "*.yaml")]
    (tmp_path / "token").touch()
    for job in content["scrape_configs"]:
        if "authorization" in job:
            job["authorization"]["credentials_file"] = str(tmp_path / "token")
    file = tmp_path / name
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    ended = subprocess.run(
        [tool("promtool"), "check", "config", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert content["global"]["scrape_interval"] == "15s"
