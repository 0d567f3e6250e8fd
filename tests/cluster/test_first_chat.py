"""
"From nothing to the first chat" of the page on Helm, as printed there, and the same release without policies.
"""

import json
import re
import shlex
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import WAIT_SECONDS, Namespace
from tests.cluster.release import NAME
from tests.deploy.chart.helm import CHART
from tests.deploy.container_engine import ROOT, CommandError

PAGE = (ROOT / "docs" / "how-to" / "install-with-helm.md").read_text(encoding="utf-8")
PRINTED = re.findall(r"^# From nothing to the first chat\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
LLM = "llm"
PROFILE = "--set profile=evaluation"
SHELL = "set -e; cd {root}; helm() {{ command {helm} \"$@\"; }}; trap 'kill $!' EXIT\n{printed}"
"""The page's commands use `helm` and the chart of this checkout; the forwarded port ends with them."""


@pytest.fixture(scope="module")
def llm(cluster) -> Iterator[Namespace]:
    """The namespace that the page creates."""
    if cluster.kubectl("get", "namespace", LLM, "--ignore-not-found"):
        pytest.fail(f"the namespace {LLM}, which the page creates, exists: delete it first")
    try:
        yield Namespace(cluster, LLM)
    finally:
        cluster.remove(LLM)


@pytest.fixture(scope="module")
def printed_answer(cluster, llm) -> str:
    """What the page's commands print."""
    assert PROFILE in PRINTED
    # As the page says, for images that are not on the nodes.
    registry = cluster.values.get("global", {}).get("imageRegistry")
    named = f" --set global.imageRegistry={shlex.quote(registry)}" if registry else ""
    printed = PRINTED.replace(PROFILE, PROFILE + named)
    shell = SHELL.format(root=shlex.quote(str(ROOT)), helm=cluster.helm_programs["helm3"], printed=printed)
    done = cluster.run("sh", "-c", shell, seconds=2 * WAIT_SECONDS, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}\n{llm.state()}"
    return done.stdout


def test_the_first_chat_needs_five_commands_and_six_values_at_most():
    commands = [line for line in PRINTED.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(commands) <= 5
    assert PRINTED.count("--set") <= 6
    assert "--values" not in PRINTED


def test_the_pages_commands_end_with_an_answer(printed_answer):
    answer = json.loads(printed_answer.splitlines()[-1])
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"].strip()


def test_helm_test_fails_and_names_the_cause_without_enforced_policies(llm, printed_answer):
    """A release without policies is in the same place as one whose policies the cluster does not enforce."""
    values = ("--reuse-values", "--set", "networkPolicy.enabled=false")
    llm.helm("upgrade", NAME, str(CHART), *values, "--wait", f"--timeout={WAIT_SECONDS}s")
    with pytest.raises(CommandError, match="test-egress failed"):
        llm.helm("test", NAME, "--timeout=300s")
    log = llm.kubectl("logs", f"{NAME}-test-egress")
    assert "the cluster's API server: no NetworkPolicy is enforced for this pod" in " ".join(log.split())
