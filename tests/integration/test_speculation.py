"""
Speculation control on real vLLM workers: collapse, fallback, recovery, damaged drafts, recycling.
"""

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from appliance.settings import DEMO_DRAFT, DEMO_TARGET
from demo.process import ApplianceProcess
from tests.integration.speculation_traffic import Traffic, code, noise
from tests.integration.worker_process import WorkerProcess, stock_worker

pytestmark = pytest.mark.worker

QUIET = {"APPLIANCE_LOG__LEVEL": "warning"}
STOPPED = {("target_only", "collapsed"), ("target_only", "below_break_even")}


class Admin:
    """The admin API of a running appliance."""

    def __init__(self, appliance: ApplianceProcess) -> None:
        self._base = appliance.url + "/admin/v1/"
        self._key = (appliance.data / "admin.key").read_text(encoding="utf-8").strip()

    def ask(self, path: str, method: str = "GET", body: dict | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self._base + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def worker(self, name: str = "worker-1") -> dict[str, Any]:
        return next(w for w in self.ask("speculation")["workers"] if w["worker"] == name)

    def changes(self, after: int = 0) -> list[dict[str, Any]]:
        return self.ask(f"speculation/events?after={after}")["events"]


def wait_for(found: Callable[[], Any], *, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        if result := found():
            return result
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.1)


def complete(appliance: ApplianceProcess, headers: dict | None = None, **fields: Any) -> tuple[int, dict]:
    body = {"model": "demo-coder", "prompt": "def f(", "max_tokens": 8, "temperature": 0, **fields}
    request = urllib.request.Request(
        appliance.url + "/v1/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {appliance.key}",
            "Content-Type": "application/json",
            **(headers or {}),
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def entries(data: Path) -> list[dict[str, Any]]:
    text = subprocess.run(
        [sys.executable, "-m", "appliance", "audit", "tail", "--json", "--count", "100000", "--data", data],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    return [json.loads(line) for line in text.splitlines()]


def metric(appliance: ApplianceProcess, name: str, **labels: str) -> float:
    with urllib.request.urlopen(appliance.url + "/metrics", timeout=30) as response:
        page = response.read().decode()
    for line in page.splitlines():
        found = re.match(rf"{name}(?:\{{(.*)\}})? (\S+)$", line)
        if found and all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
            return float(found[2])
    message = f"no metric {name} {labels}"
    raise AssertionError(message)


def verify_log(data: Path) -> int:
    command = [sys.executable, "-m", "appliance", "audit", "verify", "--data", str(data)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


@pytest.fixture(scope="module")
def appliance(tmp_path_factory) -> Iterator[ApplianceProcess]:
    data = tmp_path_factory.mktemp("speculation") / "data"
    with ApplianceProcess("up", data=data, environment=QUIET) as process:
        yield process
    assert process.process.returncode == 0, "".join(process.output)
    assert verify_log(data) == 0


def warm(traffic: Traffic, admin: Admin) -> None:
    """Send code until speculation is healthy and has been seen to."""
    traffic.turn_to(code())
    wait_for(
        lambda: admin.worker()["reason"] == "healthy" and admin.worker()["window_drafts"] >= 300, seconds=90
    )


@pytest.mark.alone
def test_a_collapse_stops_drafting_and_code_brings_it_back(appliance):
    """No request fails and no stream stalls while speculation stops, is probed, and resumes."""
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
        assert stop["table"] == ["1-64: 0"]
        wait_for(lambda: any(c["reason"] == "probe_failed" for c in admin.changes(before)), seconds=60)
        stopped_at = admin.worker()["window_drafts"]
        assert admin.worker()["mode"] in {"target_only", "probing"}
        traffic.turn_to(code())
        began = time.monotonic()
        wait_for(lambda: admin.worker()["mode"] == "speculative", seconds=60)
        took = time.monotonic() - began
        assert took <= 30, f"{took:.1f} s until speculation was back"
        assert stopped_at >= 0
        answers = traffic.answers
        wait_for(lambda: traffic.answers > answers + 4, seconds=60)
    assert not traffic.failures
    assert traffic.longest_gap < 5, f"a stream stood still for {traffic.longest_gap:.1f} s"
    shown = [(c["worker"], c["mode"], c["reason"]) for c in admin.changes(before)]
    recorded = [
        (e["worker"], e["mode"], e["reason"])
        for e in entries(appliance.data)
        if e["type"] == "speculation.changed"
    ]
    assert recorded[-len(shown) :] == shown


def test_the_drill_passes(appliance):
    """The drill finds every stage on the running appliance, and each in the audit log."""
    command = [sys.executable, "-m", "appliance", "speculation", "drill", "--key", appliance.key, "--json"]
    command += ["--data", str(appliance.data), "--url", appliance.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=330, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_operator_decides_for_a_while(appliance):
    """An override is obeyed within seconds, is in the audit log with its author, and ends when told."""
    admin = Admin(appliance)
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
    orders = [e for e in entries(appliance.data) if e["type"] == "speculation.overridden"]
    assert [e["mode"] for e in orders] == ["target_only", "speculative", "auto", "auto"]
    assert all(e["actor"] for e in orders)


def test_whose_drafts_fail_is_told_by_tenant_template_and_context(appliance):
    """After noise, the attribution names its tenant and its template, and no prompt."""
    attribution = Admin(appliance).ask("speculation")["attribution"]
    worst = attribution["offenders"][0]
    assert worst["tenant"] == "demo"
    assert worst["template"] == "raw-plain"
    assert worst["wasted_draft_tokens"] > 0
    outcome = next(e for e in reversed(entries(appliance.data)) if e["type"] == "request.outcome")
    assert outcome["template"] == "raw-plain"
    assert outcome["context_bucket"] == "0-1k"


def test_the_hooks_cost_less_than_one_percent_of_the_steps(appliance):
    """What the plugin adds to the decoding loop is within its budget, by its own count."""
    reading = plugin_reading(appliance)
    assert reading["controllable"] is True
    assert reading["step_count"] > 1000
    assert reading["hook_seconds"] < 0.01 * reading["busy_seconds"]


def plugin_reading(appliance: ApplianceProcess) -> dict[str, Any]:
    url = Admin(appliance).ask("status")["workers"][0]["url"]
    token = (appliance.data / "control.token").read_text(encoding="utf-8").strip()
    request = urllib.request.Request(
        url + "/appliance/speculation", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def damaged_draft(directory: Path) -> Path:
    """Copy the demo draft, with the rows of its weights in another order: it loads, and means nothing."""
    shutil.copytree(DEMO_DRAFT, directory)
    file = next(directory.glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, file)
    return directory


def test_a_damaged_draft_is_called_collapsed_and_probed_ever_less(tmp_path):
    """It raises the alarm, the worker serves the target alone, and the time between probes grows."""
    draft = damaged_draft(tmp_path / "damaged")
    arguments = ("--model", str(DEMO_TARGET), "--draft", str(draft))
    with ApplianceProcess("up", *arguments, data=tmp_path / "data", environment=QUIET) as process:
        admin = Admin(process)
        with Traffic(process, clients=2, prompt=code()).running() as traffic:
            wait_for(lambda: any(c["reason"] == "collapsed" for c in admin.changes()), seconds=60)
            assert metric(process, "appliance_speculation_collapsed", worker="worker-1") == 1
            waits: dict[int, float] = {}

            def backed_off() -> bool:
                probes = admin.worker()["probes"]
                if admin.worker()["mode"] == "target_only" and probes["next_in_seconds"] is not None:
                    failed = probes["failed"]
                    waits[failed] = max(waits.get(failed, 0.0), probes["next_in_seconds"])
                return len(waits) >= 4

            wait_for(backed_off, seconds=180)
            grown = [waits[failed] for failed in sorted(waits)]
            assert grown == sorted(grown)
            assert grown[-1] > 20, f"a hopeless draft is probed every {grown[-1]:.0f} s"
            assert metric(process, "appliance_speculation_collapsed", worker="worker-1") == 1
            reading = plugin_reading(process)
            probed = metric(process, "appliance_speculation_probed_steps", worker="worker-1")
            assert probed < 0.05 * reading["step_count"] + 100
        assert not traffic.failures
    assert verify_log(tmp_path / "data") == 0


def test_without_the_plugin_requests_go_to_a_target_only_worker(tmp_path):
    """A collapsed worker that cannot be told to stop is avoided; what it refuses goes round it as well."""
    with ExitStack() as stack:
        drafting = stack.enter_context(stock_worker(tmp_path / "drafting.log", draft=DEMO_DRAFT))
        plain = stack.enter_context(stock_worker(tmp_path / "plain.log", draft=None))
        urls = json.dumps([drafting.url, plain.url])
        gateway = stack.enter_context(
            ApplianceProcess(
                "gateway", data=tmp_path / "data", environment={**QUIET, "APPLIANCE_POOL__URLS": urls}
            )
        )
        admin = Admin(gateway)
        drafts, target = (worker.url.removeprefix("http://") for worker in (drafting, plain))
        wait_for(lambda: admin.worker(drafts)["healthy"] and admin.worker(target)["healthy"], seconds=60)
        assert admin.worker(drafts)["reason"] == "not_controllable"
        assert admin.worker(drafts)["problems"]
        for fields, headers in (
            ({"min_p": 0.1, "temperature": 1}, {}),
            ({}, {"X-Appliance-Speculation": "off"}),
        ):
            status, _ = complete(gateway, headers, **fields)
            assert status == 200
            assert last_outcome(tmp_path)["worker"] == target
        with Traffic(gateway, clients=2, prompt=noise()).running() as traffic:
            wait_for(lambda: admin.worker(drafts)["avoided"], seconds=120)
        assert not traffic.failures
        change = next(c for c in admin.changes() if c["avoided"])
        assert (change["worker"], change["reason"]) == (drafts, "not_controllable")
        if admin.worker(drafts)["avoided"]:
            complete(gateway)
            assert last_outcome(tmp_path)["worker"] == target
        plain.stop()
        wait_for(lambda: not admin.worker(target)["healthy"], seconds=60)
        status, _ = complete(gateway)
        assert status == 200, "an avoided worker is better than none"
    assert verify_log(tmp_path / "data") == 0


def last_outcome(directory: Path) -> dict[str, Any]:
    return next(e for e in reversed(entries(directory / "data")) if e["type"] == "request.outcome")


def test_a_worker_is_recycled_without_its_draft_while_another_serves(tmp_path):
    """Hard-off: drained, restarted without the draft, tried out, admitted; no request fails meanwhile."""
    shared = tmp_path / "token"
    shared.write_text("a shared secret\n", encoding="utf-8")
    token = {"APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(shared)}
    with ExitStack() as stack:
        first = stack.enter_context(WorkerProcess(tmp_path / "first", environment={**QUIET, **token}))
        second = stack.enter_context(
            WorkerProcess(tmp_path / "second", "--no-draft", environment={**QUIET, **token})
        )
        urls = json.dumps([first.url, second.url])
        gateway = stack.enter_context(
            ApplianceProcess(
                "gateway",
                data=tmp_path / "data",
                environment={**QUIET, **token, "APPLIANCE_POOL__URLS": urls},
            )
        )
        admin = Admin(gateway)
        drafts, target = (worker.url.removeprefix("http://") for worker in (first, second))
        wait_for(lambda: admin.worker(drafts)["healthy"] and admin.worker(target)["healthy"], seconds=60)
        assert admin.worker(drafts)["speculates"]
        assert not admin.worker(target)["speculates"]
        # Two workers share the cores of a small machine: one that is busy keeps the other from starting.
        with Traffic(gateway, clients=1, prompt=code(), pause_seconds=2).running() as traffic:
            command = ["speculation", "recycle", drafts, "--without-draft", "--note", "a test"]
            command += ["--url", gateway.url, "--data", str(gateway.data)]
            done = subprocess.run(
                [sys.executable, "-m", "appliance", *command],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            with pytest.raises(urllib.error.HTTPError) as refused:
                admin.ask(f"workers/{target}/recycle", "POST", {"with_draft": False})
            with refused.value as answer:
                assert answer.code == 409
            wait_for(
                lambda: (
                    admin.worker(drafts)["admission"] == "admitted" and not admin.worker(drafts)["speculates"]
                ),
                seconds=240,
            )
        assert not traffic.failures
    recycled = [e for e in entries(tmp_path / "data") if e["type"] == "worker.recycled"]
    assert [(e["worker"], e["with_draft"], e.get("canary")) for e in recycled] == [
        (drafts, False, None),
        (drafts, False, "passed"),
    ]
    assert verify_log(tmp_path / "data") == 0
