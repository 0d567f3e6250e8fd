"""
The GPU benchmark's steps on the CPU, with small sizes: real workers, a trained pair, one report.

The drill and the paired benchmark have tests of their own; here an earlier call has left their results.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.steps import State

pytestmark = [pytest.mark.worker, pytest.mark.slow]

MACHINE = {"hardware": "a machine", "commit": "abc1234", "has_changes": False, "date": "2026-11-25"}
DRILL = {"verdict": "passed", "problems": [], "seconds_to_fallback": 3.0, "seconds_to_recovery": 4.0}
PAIRED = {"report": "# Pairs", "speeds": [{"concurrency": 1, "mode": "K=0", "speed": 10.0}]}


def test_all_steps_run_on_a_cpu_and_the_report_has_them(tmp_path):
    state, out = State(tmp_path / "state"), tmp_path / "out"
    for step, found in (("drill", DRILL), ("paired", PAIRED)):
        state.finish(step, {"seconds": 1.0, "machine": {**MACHINE, "command": "earlier"}, "found": found})
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--state", str(state.directory)]
    done = subprocess.run(
        [*command, "--out", str(out)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    report = (out / "report.md").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + report
    assert "V1 model runner: the plugin controls the worker." in report
    assert [f"| K={k} | yes |" in report for k in range(4)] == [True] * 4
    assert "| `plugin-v2` | not run: the V2 model runner needs Triton" in report
    assert "earlier" in report
    assert (out / "step-costs.svg").exists()
    costs = json.loads((state.directory / "costs-tiny-6.json").read_text())["found"]["costs"]
    assert {(row["concurrency"], row["draft_tokens"]) for row in costs} == {
        (c, k) for c in (1, 4) for k in range(4)
    }
    assert all(row["steps"] and row["seconds"] > 0 for row in costs)
