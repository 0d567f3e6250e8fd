"""
Every metric that queries may use, with its labels: ours, vLLM's, and those of Prometheus.
"""

import re
from functools import cache

import promql_parser as promql
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from appliance.infra.metrics import Metrics
from tests.deploy.monitoring_files import ROOT, rules
from tests.deploy.promql import TARGET, Labels, labels_of

WORKER_PAGE = ROOT / "tests" / "data" / "vllm-0.32.0-metrics.txt"
"""The page of a worker with a draft, as vLLM 0.32.0 wrote it."""
GPUS = frozenset({"gpu", "UUID", "device", "modelName", "Hostname"})
"""Labels of NVIDIA's DCGM exporter: https://docs.nvidia.com/datacenter/dcgm/latest/reference/dcgm-exporter-metrics.html"""
GPU_METRICS = ("GPU_UTIL", "FB_USED", "POWER_USAGE", "GPU_TEMP", "XID_ERRORS")
"""Some that it exports by default (same page), without `DCGM_FI_DEV_`."""


@cache
def known_metrics() -> dict[str, Labels]:
    """The labels of each metric, those of recording rules last."""
    known = {**_ours(), **_of_worker(), "up": TARGET}
    known |= {f"DCGM_FI_DEV_{name}": TARGET | GPUS for name in GPU_METRICS}
    known["ALERTS"] = TARGET | {"alertname", "alertstate", "severity", "worker"}
    for rule in rules():
        if "record" in rule:
            known[rule["record"]] = labels_of(promql.parse(rule["expr"]), known) | {"cluster"}
    return known


def _ours() -> dict[str, Labels]:
    registry = CollectorRegistry()
    families = vars(Metrics(registry)).values()
    known: dict[str, Labels] = {}
    for family in families:
        if isinstance(family, MetricWrapperBase):
            described = family.describe()[0]
            labels = TARGET | frozenset(family._labelnames)
            known |= _series(described.name, described.type, labels)
    of_process = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=of_process)
    for family in of_process.collect():
        known |= {sample.name: TARGET | frozenset(sample.labels) for sample in family.samples}
    return known


def _series(name: str, kind: str, labels: Labels) -> dict[str, Labels]:
    if kind == "histogram":
        return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
    return {f"{name}_total" if kind == "counter" else name: labels}


def _of_worker() -> dict[str, Labels]:
    page = WORKER_PAGE.read_text(encoding="utf-8")
    return {
        sample.name: TARGET | frozenset(sample.labels)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def placeholders(text: str) -> set[str]:
    """The labels that a legend or a template fills in."""
    return set(re.findall(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}", text)) - {"else", "end"}
