"""
Compares what this chart and the vLLM production stack's render.

`python -m tests.deploy.chart.comparison [CHECKOUT]` writes the page; CHECKOUT is a directory with a checkout
of github.com/vllm-project/production-stack.  What its chart renders is measured and kept in
`production_stack.json`; the page in docs/explanation is written from that and from this chart as it is now,
which a test repeats.  Without CHECKOUT only our side is counted again.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from tests.deploy.chart.helm import CHART, LATER_HELM, ROOT, RefusedError, render
from tests.deploy.chart.policies import denied
from tests.deploy.chart.references import containers, pods
from tests.deploy.chart.site import site

THEIRS_AT = Path(__file__).with_name("production_stack.json")
PAGE_AT = ROOT / "docs" / "explanation" / "chart-comparison.md"
EXAMPLE = "tutorials/assets/values-01-minimal-example.yaml"
"""Their own least values: one model on one GPU."""
KUBERNETES = "1.35"
Object = dict[str, Any]


class Chart:
    """One chart, rendered with its defaults and the least that it needs to serve one model on one GPU."""

    def __init__(self, at: Path, values: Object, *, misspelt: list[Object], worker: str) -> None:
        """`misspelt` are values that no template reads; `worker` is part of the worker's name."""
        self.at = at
        self.misspelt = misspelt
        self.values = values
        self.objects = render(values, chart=at, kube_version=KUBERNETES, binary=LATER_HELM).objects
        self.pods = [pod for pod in pods(self.objects) if not pod[0].startswith("Pod/")]
        """Owner and template, without those of `helm test`."""
        self.containers = [container for _, pod in self.pods for container in containers(pod)]
        ((_, pod),) = [pod for pod in self.pods if worker in pod[0]]
        self.worker_pod = pod["spec"]
        self.worker = pod["spec"]["containers"][0]

    def clean(self, policy: str) -> str:
        """How many of the pods `policy` has nothing against."""
        said = denied(policy, self.objects)
        good = [owner for owner, _ in self.pods if not any(sentence.startswith(owner) for sentence in said)]
        return f"{len(good)} of {len(self.pods)} pods"

    def count(self, kind: str) -> int:
        """Objects of a kind."""
        return len([one for one in self.objects if one["kind"] == kind])

    def share(self, holds: Callable[[Object], object]) -> str:
        """How many containers something holds for."""
        return f"{len([c for c in self.containers if holds(c)])} of {len(self.containers)} containers"

    def refused(self) -> str:
        """How many of the misspelt values are refused."""
        caught = 0
        for change in self.misspelt:
            try:
                render(self.values | change, chart=self.at, kube_version=KUBERNETES, binary=LATER_HELM)
            except RefusedError:
                caught += 1
        return f"{caught} of {len(self.misspelt)}"


def startup_minutes(chart: Chart) -> str:
    """How long the worker may take to start."""
    probe = chart.worker["startupProbe"]
    seconds = probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe["failureThreshold"]
    return f"{seconds / 60:g} minutes"


def liveness(chart: Chart) -> str:
    """What kills a worker that is busy."""
    probe = chart.worker.get("livenessProbe")
    if probe is None:
        return "none; its supervisor restarts the engine"
    same = probe.get("httpGet") == chart.worker["readinessProbe"].get("httpGet")
    return "asks what readiness asks" if same else "a question of its own"


def leaving(chart: Chart) -> str:
    """How long a worker that is stopped may finish what it has."""
    spec = chart.worker_pod
    hook = "after a wait" if "preStop" in chart.worker.get("lifecycle", {}) else "at once"
    return f"told {hook}, killed after {spec.get('terminationGracePeriodSeconds', 30)} s"


def offline(chart: Chart) -> str:
    """How many variables of the offline environment a worker has, with their exact values."""
    lines = (ROOT / "deploy" / "offline.env").read_text(encoding="utf-8").splitlines()
    wanted = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    has = {entry["name"]: entry.get("value") for entry in chart.worker.get("env", [])}
    return _of(len([name for name, value in wanted.items() if has.get(name) == value]), len(wanted))


def telemetry(chart: Chart) -> str:
    """Whether vLLM's usage statistics are off."""
    has = {entry["name"]: entry.get("value") for entry in chart.worker.get("env", [])}
    return "off" if "1" in {has.get("VLLM_NO_USAGE_STATS"), has.get("DO_NOT_TRACK")} else "on, as vLLM has it"


def closed_objects(chart: Chart) -> str:
    """How many objects of the values' schema take no key that they do not know."""
    found: list[bool] = []

    def walk(schema: object) -> None:
        if isinstance(schema, dict):
            if "properties" in schema:
                found.append(schema.get("additionalProperties") is False)
            for value in schema.values():
                walk(value)
        elif isinstance(schema, list):
            for value in schema:
                walk(value)

    walk(json.loads((chart.at / "values.schema.json").read_text(encoding="utf-8")))
    return _of(sum(found), len(found))


def _of(some: int, every: int) -> str:
    """A share; `all` stays true when there is one more of everything."""
    return "all" if some == every else f"{some} of {every}"


def tests(chart: Chart) -> int:
    """Pods that `helm test` runs."""
    return len(
        [o for o in chart.objects if "test" in o["metadata"].get("annotations", {}).get("helm.sh/hook", "")]
    )


ROWS: dict[str, Callable[[Chart], str | int]] = {
    "Pods whose NetworkPolicy restricts both directions": lambda chart: chart.clean("network"),
    "Pods that keep the Pod Security Standard *restricted*": lambda chart: chart.clean("pod_security"),
    "Containers with a read-only root file system": lambda chart: chart.share(
        lambda c: c.get("securityContext", {}).get("readOnlyRootFilesystem") is True
    ),
    "Pods without a token for, and rights at, the Kubernetes API": lambda chart: chart.clean("identity"),
    "Roles at the Kubernetes API": lambda chart: chart.count("Role") + chart.count("ClusterRole"),
    "Images named by digest": lambda chart: chart.share(lambda c: "@sha256:" in c["image"]),
    "Images `latest`": lambda chart: chart.share(lambda c: c["image"].endswith(":latest")),
    "Images asked for at every start": lambda chart: chart.share(
        lambda c: c.get("imagePullPolicy") == "Always"
    ),
    "vLLM's usage statistics": telemetry,
    "Variables of the [offline environment](no-egress.md) that the worker has": offline,
    "Containers with limits of processor and memory": lambda chart: chart.share(
        lambda c: {"cpu", "memory"} <= set(c.get("resources", {}).get("limits", {}))
    ),
    "Time a worker may take to start": startup_minutes,
    "A worker's liveness probe": liveness,
    "A worker that is stopped": leaving,
    "PodDisruptionBudgets": lambda chart: chart.count("PodDisruptionBudget"),
    "Objects in the values' schema that refuse unknown keys": closed_objects,
    "Misspelt values that are refused": lambda chart: chart.refused(),
    "Pods of `helm test`": tests,
}
"""What is compared, and how it is counted; without pods and containers of `helm test`."""


def ours() -> dict[str, str]:
    """This chart as it is."""
    model = site()["models"][0]
    misspelt = [{"replicaCuont": 2}, {"gateway": {"replica": 2}}, {"models": [model | {"replicaCuont": 2}]}]
    chart = Chart(CHART, site(), misspelt=misspelt, worker="ministry-8b")
    return {row: str(count(chart)) for row, count in ROWS.items()}


def theirs(checkout: Path) -> dict[str, Any]:
    """Their chart from a checkout, with its commit; two optional subcharts, off by default, are excluded."""
    values = yaml.safe_load((checkout / EXAMPLE).read_text(encoding="utf-8"))
    (model,) = values["servingEngineSpec"]["modelSpec"]
    spec = values["servingEngineSpec"]
    misspelt = [
        {"replicaCuont": 2},
        {"routerSpec": {"replica": 2}},
        {"servingEngineSpec": spec | {"modelSpec": [model | {"replicaCuont": 2}]}},
    ]
    with TemporaryDirectory() as directory:
        at = Path(directory) / "helm"
        shutil.copytree(checkout / "helm", at)
        about = yaml.safe_load((at / "Chart.yaml").read_text(encoding="utf-8"))
        del about["dependencies"]
        (at / "Chart.yaml").write_text(yaml.safe_dump(about), encoding="utf-8")
        (at / "Chart.lock").unlink()
        chart = Chart(at, values, misspelt=misspelt, worker="deployment-vllm")
        rows = {row: str(count(chart)) for row, count in ROWS.items()}
    shown = ["git", "-C", str(checkout), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.split()
    return {"version": about["version"], "commit": commit, "date": date, "rows": rows}


def page(mine: dict[str, str], other: dict[str, Any]) -> str:
    """The page, from both sides' rows."""
    lines = [
        "# This chart and the vLLM production stack's",
        "",
        "<!-- Written by `python -m tests.deploy.chart.comparison`; a test counts our side again. -->",
        "",
        "*For those who choose between them, or move from one to the other. Most differences below can be",
        "set in both: the table shows the defaults.*",
        "",
        "Counted in what `helm template` renders from each chart's defaults with one model on one GPU, for",
        f"Kubernetes {KUBERNETES}.",
        "Theirs is [production-stack](https://github.com/vllm-project/production-stack)",
        f"{other['version']}, commit `{other['commit'][:12]}` of {other['date']}, with its own",
        f"`{EXAMPLE}`; its two optional subcharts, off by default, are excluded.",
        "Ours is `deploy/helm` with digests, a claim with weights and the name of a Secret.",
        "",
        "| | production-stack | this chart |",
        "|---|---|---|",
        *(f"| {row} | {other['rows'][row]} | {mine[row]} |" for row in ROWS),
        "",
        "*Restricted*, the network and the API's tokens are checked with the policies in",
        "`tests/deploy/policy`, the same for both. The misspelt values are one at the top, one of the",
        "router or gateway and one of a model.",
        "",
        "To count again, with a checkout of theirs next to this repository (`make deploy` downloads Helm):",
        "",
        "```sh",
        ".venv/bin/python -m tests.deploy.chart.comparison ../production-stack",
        "```",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure theirs where a checkout is named, and ours, and write it down."""
    if len(sys.argv) > 1:
        THEIRS_AT.write_text(json.dumps(theirs(Path(sys.argv[1])), indent=2) + "\n", encoding="utf-8")
    other = json.loads(THEIRS_AT.read_text(encoding="utf-8"))
    PAGE_AT.write_text(page(ours(), other), encoding="utf-8")


if __name__ == "__main__":
    main()
