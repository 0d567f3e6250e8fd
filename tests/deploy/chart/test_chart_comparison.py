"""
The comparison page has the values that this chart renders now.
"""

import json

import pytest
import yaml

from tests.deploy.chart.helm import LATER_HELM
from tests.deploy.chart.site import site

comparison = pytest.importorskip(
    "tests.deploy.chart.comparison", reason="regopy is not installed: nothing is compared"
)
pytestmark = pytest.mark.skipif(
    not LATER_HELM.exists(), reason="NO HELM: run `make deploy`; the charts are not compared"
)


def test_the_page_says_what_the_chart_renders():
    """Run `python -m tests.deploy.chart.comparison` when this fails."""
    other = json.loads(comparison.THEIRS_AT.read_text(encoding="utf-8"))
    assert comparison.PAGE_AT.read_text(encoding="utf-8") == comparison.page(comparison.ours(), other)


def test_comparison_can_find_a_violation(tmp_path):
    """A chart with nothing in its favour, so that a good figure is not the only one there is."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text(
        yaml.safe_dump({"apiVersion": "v2", "name": "bad", "version": "1.0.0"})
    )
    (tmp_path / "values.schema.json").write_text(json.dumps({"properties": {"a": {}}}))
    container = {"name": "c", "image": "worker:latest", "imagePullPolicy": "Always"}
    probe = {"httpGet": {"path": "/", "port": 1}, "periodSeconds": 1, "failureThreshold": 30}
    container |= {"startupProbe": probe, "livenessProbe": probe, "readinessProbe": probe}
    spec = {"containers": [container]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "worker"},
        "spec": {"selector": {"matchLabels": {}}, "template": {"metadata": {"labels": {}}, "spec": spec}},
    }
    (tmp_path / "templates" / "all.yaml").write_text(yaml.safe_dump(deployment))
    bad = comparison.Chart(tmp_path, site(), misspelt=[{"x": 1}], worker="worker")
    rows = [str(count(bad)) for count in comparison.ROWS.values()]
    assert rows == [
        "0 of 1 pods",
        "0 of 1 pods",
        "0 of 1 containers",
        "0 of 1 pods",
        "0",
        "0 of 1 containers",
        "1 of 1 containers",
        "1 of 1 containers",
        "on, as vLLM has it",
        rows[9],
        "0 of 1 containers",
        "0.5 minutes",
        "asks what readiness asks",
        "told at once, killed after 30 s",
        "0",
        "0 of 1",
        "0 of 1",
        "0",
    ]
    assert rows[9].startswith("0 of ")
