"""
Speculation control on a real vLLM worker: collapse, fallback, recovery, overrides of an operator.
"""

import subprocess
import sys
import time
from typing import Any

import pytest

from demo.process import ApplianceProcess
from tests.integration.caller import audit_entries
from tests.integration.speculation_admin import Admin, metric, plugin_reading, wait_for
from tests.integration.speculation_traffic import Traffic, code, noise

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("controlled")]

STOPPED = {("target_only", "collapsed"), ("target_only", "below_break_even")}


@pytest.fixture(scope="module")
def appliance(controlled: ApplianceProcess) -> ApplianceProcess:
    return controlled


def reading(appliance: ApplianceProcess) -> dict[str, Any]:
    """What its worker's plugin says."""
    url = Admin(appliance).ask("status")["workers"][0]["url"]
    return plugin_reading(url, appliance.data / "control.token")


def warm(traffic: Traffic, admin: Admin) -> None:
    """Send code until speculation is healthy."""
    traffic.turn_to(code())
    wait_for(
        lambda: admin.worker()["reason"] == "healthy" and admin.worker()["window_drafts"] >= 300, seconds=90
    )


@pytest.mark.alone
def test_collapse_stops_drafting_and_code_resumes_it(appliance):
    """No request fails and no stream stalls while speculation stops, and resumes."""
    admin = Admin(appliance)
    with Traffic(appliance, clients=2, prompt=code()).running() as traffic:
        warm(traffic, admin)
        before = admin.changes()[-1]["sequence"] if admin.changes() else 0
        drafted = metric(appliance, "appliance_drafts_total", model="demo-coder")
        traffic.turn_to(noise())
        began = time.monotonic()
        stop = wait_for(
            lambda: [c for c in admin.changes(before) if (c["mode"], c["reason"]) in STOPPED], seconds=60
        )[0]
        took = time.monotonic() - began
        drafts = metric(appliance, "appliance_drafts_total", model="demo-coder") - drafted
        assert took <= 5 or drafts <= 64, (
            f"{took:.1f} s and {drafts:.0f} drafts until it stopped: {admin.worker()}"
        )
        assert stop["mode"] == "target_only"
        # A larger batch was never measured, and follows a guess of what drafting costs there.
        wait_for(
            lambda: not any(k for first, _last, k in reading(appliance)["table"] if first <= 2), seconds=30
        )
        stopped = reading(appliance)
        explored = metric(appliance, "appliance_speculation_probed_steps", worker="worker-1")
        wait_for(
            lambda: metric(appliance, "appliance_speculation_probed_steps", worker="worker-1") > explored,
            seconds=60,
        )
        later = reading(appliance)
        explored = metric(appliance, "appliance_speculation_probed_steps", worker="worker-1") - explored
        assert later["step_count"] > stopped["step_count"] + explored
        drafts = later["drafting"]["drafts"] - stopped["drafting"]["drafts"]
        assert drafts <= 2 * explored, "while it is stopped, it drafts for the two clients to explore alone"
        assert admin.worker()["mode"] == "target_only"
        traffic.turn_to(code())
        began = time.monotonic()
        wait_for(lambda: admin.worker()["mode"] == "speculative", seconds=60)
        took = time.monotonic() - began
        assert took <= 30, f"{took:.1f} s until speculation was back"
        answers = traffic.answers
        wait_for(lambda: traffic.answers > answers + 4, seconds=60)
    assert not traffic.failures
    assert traffic.longest_gap < 5, f"a stream stood still for {traffic.longest_gap:.1f} s"
    shown = [(c["worker"], c["mode"], c["reason"]) for c in admin.changes(before)]
    recorded = [
        (e["worker"], e["mode"], e["reason"]) for e in audit_entries(appliance.data, "speculation.changed")
    ]
    assert recorded[-len(shown) :] == shown


def test_the_drill_passes(appliance):
    """The drill finds every stage on the running appliance, and each in the audit log."""
    command = [sys.executable, "-m", "appliance", "speculation", "drill", "--key", appliance.key, "--json"]
    command += ["--data", str(appliance.data), "--url", appliance.admin_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=330, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_operator_overrides_for_a_limited_time(appliance):
    """It applies within seconds, is in the audit log with its author, and ends on request."""
    admin = Admin(appliance)
    before = len(audit_entries(appliance.data, "speculation.overridden"))
    with Traffic(appliance, clients=1, prompt=code()).running() as traffic:
        order = {"worker": "*", "mode": "target_only", "seconds": 60, "note": "a test"}
        admin.ask("speculation/override", "PUT", order)
        wait_for(lambda: admin.worker()["mode"] == "target_only", seconds=20)
        assert admin.worker()["reason"] == "operator_override"
        order = {"worker": "worker-1", "mode": "speculative", "draft_tokens": 1, "seconds": 60}
        admin.ask("speculation/override", "PUT", order)
        wait_for(lambda: admin.worker()["table"] == [[1, 64, 1]], seconds=20)
        for worker in ("worker-1", "*"):
            admin.ask("speculation/override", "PUT", {"worker": worker, "mode": "auto"})
        wait_for(lambda: admin.worker()["override"] is None, seconds=20)
        wait_for(lambda: admin.worker()["reason"] != "operator_override", seconds=20)
    assert not traffic.failures
    overrides = audit_entries(appliance.data, "speculation.overridden")[before:]
    assert [e["mode"] for e in overrides] == ["target_only", "speculative", "auto", "auto"]
    assert all(e["actor"] for e in overrides)


def test_the_hooks_cost_less_than_one_percent_of_the_steps(appliance):
    """What the plugin adds to the decoding loop is within its budget, by its own count."""
    with Traffic(appliance, clients=2, prompt=code()).running():
        wait_for(lambda: reading(appliance)["step_count"] > 1000, seconds=300)
    read = reading(appliance)
    assert read["controllable"] is True
    assert read["hook_seconds"] < 0.01 * read["busy_seconds"]
