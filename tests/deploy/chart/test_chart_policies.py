"""
The policies accept good objects and deny each hostile change with a reason.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

policies = pytest.importorskip(
    "tests.deploy.chart.policies", reason="regopy is not installed: no policy is tested"
)

FIXTURES_AT = Path(__file__).parents[1] / "policy"
OFFLINE = {"VLLM_NO_USAGE_STATS": "1"}
HOSTILE = yaml.safe_load((FIXTURES_AT / "hostile.yaml").read_text(encoding="utf-8"))
CASES = [
    pytest.param(policy, case, id=f"{policy}-{number}")
    for policy in HOSTILE
    for number, case in enumerate(HOSTILE[policy])
]


def good() -> list[dict[str, Any]]:
    """The objects of `good.yaml`; no two share a part."""
    return json.loads(json.dumps(yaml.safe_load((FIXTURES_AT / "good.yaml").read_text(encoding="utf-8"))))


def put(place: Any, path: str, value: object) -> None:
    """Set the value at `path`, with numbers for list items; None removes it."""
    *steps, last = [int(step) if step.isdigit() else step.replace("~", ".") for step in path.split(".")]
    for step in steps:
        place = place[step] if isinstance(place, list) else place.setdefault(step, {})
    if value is None:
        del place[last]
    else:
        place[last] = value


def spoilt(case: dict[str, Any]) -> list[dict[str, Any]]:
    """`good()` after the change that `case` describes."""
    objects = good()
    named = {f"{o['kind']}/{o['metadata']['name']}": o for o in objects}
    for where, owner in (("pod", "Deployment/gateway"), ("worker", "StatefulSet/worker")):
        for path, value in case.get(where, {}).items():
            put(named[owner]["spec"]["template"]["spec"], path, value)
    for path, value in case.get("set", {}).items():
        put(named[case["in"]], path, value)
    named.pop(case.get("remove"), None)
    return [*named.values(), *case.get("add", [])]


def test_policies_accept_good_objects():
    """So a denial below is caused by the change alone."""
    assert policies.denied_by_any(good(), offline=OFFLINE) == {}


@pytest.mark.parametrize(("policy", "case"), CASES)
def test_policies_deny_hostile_objects(policy, case):
    """One change, and the expected reason."""
    said = policies.denied(policy, spoilt(case), offline=OFFLINE)
    assert any(case["says"] in sentence for sentence in said), said


def test_every_policy_is_shown_to_deny():
    """A policy without a hostile fixture may be one that denies nothing."""
    assert sorted(HOSTILE) == policies.NAMES


def test_host_path_is_allowed_only_where_values_name_it():
    """The exception is by path, not by kind."""
    objects = spoilt({"pod": {"volumes.0": {"name": "tmp", "hostPath": {"path": "/models"}}}})
    assert policies.denied("pod_security", objects, exceptions={"hostPath": ["/models"]}) == []
    assert policies.denied("pod_security", objects, exceptions={"hostPath": ["/other"]})


@pytest.mark.parametrize(
    "kind", ["Pod", "Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob", "LeaderWorkerSet"]
)
def test_no_kind_of_object_hides_its_pods(kind):
    """A hostile pod is found in every kind of resource that creates pods."""
    template = {"metadata": {"labels": {}}, "spec": {"containers": [], "hostNetwork": True}}
    spec = {
        "Pod": template["spec"],
        "CronJob": {"jobTemplate": {"spec": {"template": template}}},
        "LeaderWorkerSet": {"leaderWorkerTemplate": {"workerTemplate": template}},
    }.get(kind, {"template": template})
    found = policies.denied("pod_security", [{"kind": kind, "metadata": {"name": "x"}, "spec": spec}])
    assert found == [f"{kind}/x: hostNetwork"]
