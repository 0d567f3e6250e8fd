"""
Speculation control of real vLLM workers that the gateway did not start, one or two in its pool.

Starts of workers are slow, so three scenarios share two of them: one with a damaged draft collapses,
is recycled without its draft, and then is the target-only worker next to one without the plugin.
"""

import json
import shutil
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from demo.process import ApplianceProcess
from tests.integration.caller import audit_entries, outcomes
from tests.integration.speculation_admin import (
    QUIET,
    Admin,
    complete,
    metric,
    plugin_reading,
    verify_log,
    wait_for,
)
from tests.integration.speculation_traffic import Traffic, code, noise
from tests.integration.worker_process import ONE_ENGINE_PROCESS, RunningWorker, WorkerProcess, stock_worker

pytestmark = pytest.mark.worker

EXPLORED_STEPS = 3000
"""Steps with a draft that never pays, in which the price of exploration is observed."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of both workers and their gateways, with the shared control token."""
    directory = tmp_path_factory.mktemp("pool")
    (directory / "token").write_text("a shared secret\n", encoding="utf-8")
    return directory


def settings(directory: Path) -> dict[str, str]:
    """Of a gateway and of the worker that it controls."""
    return {**QUIET, "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(directory / "token")}


@contextmanager
def gateway(data: Path, *workers: RunningWorker, **more: str) -> Iterator[ApplianceProcess]:
    """A gateway with these workers, all of them healthy; its log verifies in the end."""
    environment = {**settings(data.parent), **more}
    environment["APPLIANCE_POOL__URLS"] = json.dumps([worker.url for worker in workers])
    with ApplianceProcess("gateway", data=data, environment=environment) as process:
        admin = Admin(process)
        names = [name_of(worker) for worker in workers]
        wait_for(lambda: all(admin.worker(name)["healthy"] for name in names), seconds=60)
        yield process
    assert verify_log(data) == 0


def name_of(worker: RunningWorker) -> str:
    return worker.url.removeprefix("http://")


def damaged_draft(directory: Path) -> Path:
    """Copy the demo draft, with the rows of its weights in another order: its tokens are useless."""
    shutil.copytree(DEMO_DRAFT, directory)
    file = next(directory.glob("*.safetensors"))
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            tensors[name] = tensor.flip(0).contiguous()
    save_file(tensors, file)
    return directory


@pytest.fixture(scope="module")
def controlled(directory: Path) -> Iterator[RunningWorker]:
    """A controlled worker with a damaged draft."""
    draft = damaged_draft(directory / "damaged")
    arguments = ("--model", str(DEMO_TARGET), "--draft", str(draft))
    with WorkerProcess(directory / "controlled", *arguments, environment=settings(directory)) as worker:
        yield worker


@pytest.fixture(scope="module")
def stock(directory: Path) -> Iterator[RunningWorker]:
    """A worker with the demo draft and no plugin, like one started by hand."""
    with stock_worker(directory / "stock.log", draft=DEMO_DRAFT, environment=ONE_ENGINE_PROCESS) as worker:
        yield worker


@dataclass(frozen=True, kw_only=True)
class Exploration:
    """Observations of a draft that never pays."""

    alarm: list[float]
    """The metric of a collapse, when it was first seen and in the end."""
    probed: float
    share: float
    """Of engine time, lost to exploration."""
    failures: list[str]


@pytest.fixture(scope="module")
def exploration(directory: Path, controlled: RunningWorker) -> Exploration:
    """Serve code for some time after the draft was found to be useless."""
    with gateway(directory / "exploring", controlled) as process:
        admin, name = Admin(process), name_of(controlled)

        def measured(what: str) -> float:
            return metric(process, f"appliance_speculation_{what}", worker=name)

        def steps() -> int:
            return int(plugin_reading(controlled.url, directory / "token")["step_count"])

        with Traffic(process, clients=2, prompt=code()).running() as traffic:
            wait_for(lambda: any(c["reason"] == "collapsed" for c in admin.changes()), seconds=120)
            first, probed, began = measured("collapsed"), measured("probed_steps"), steps()
            wait_for(lambda: steps() >= began + EXPLORED_STEPS, seconds=300)
            return Exploration(
                alarm=[first, measured("collapsed")],
                probed=measured("probed_steps") - probed,
                share=measured("exploration_share"),
                failures=traffic.failures,
            )


def test_a_damaged_draft_is_called_collapsed_and_explored_for_little(exploration):
    """The alert fires, the worker serves the target alone, and exploration goes on within its price."""
    assert exploration.alarm == [1, 1]
    assert 0 < exploration.probed < 0.1 * EXPLORED_STEPS
    # The first minute may borrow as much again.
    assert 0 < exploration.share < 0.04
    assert not exploration.failures


@dataclass(frozen=True, kw_only=True)
class Recycling:
    """Observations of a restart without the draft."""

    refused: str
    """Why the other worker was not restarted meanwhile."""
    entries: list[dict[str, Any]]
    failures: list[str]


@pytest.fixture(scope="module")
def recycling(
    directory: Path, exploration: Exploration, controlled: RunningWorker, stock: RunningWorker
) -> Recycling:
    """Restart one worker without its draft while the other one serves."""
    del exploration  # needs the draft
    with gateway(directory / "recycling", controlled, stock) as process:
        admin, name = Admin(process), name_of(controlled)
        assert admin.worker(name)["speculates"]
        # Two workers share the cores of a small machine: one that is busy keeps the other from starting.
        with Traffic(process, clients=1, prompt=code(), pause_seconds=2).running() as traffic:
            command = ["speculation", "recycle", name, "--without-draft", "--note", "a test"]
            command += ["--url", process.admin_url, "--data", str(process.data)]
            done = subprocess.run(
                [sys.executable, "-m", "appliance", *command],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            with pytest.raises(urllib.error.HTTPError) as refused:
                admin.ask(f"workers/{name_of(stock)}/recycle", "POST", {"with_draft": False})
            with refused.value as answer:
                assert answer.code == 409
                reason = answer.read().decode()
            wait_for(
                lambda: (
                    admin.worker(name)["admission"] == "admitted" and not admin.worker(name)["speculates"]
                ),
                seconds=600,
            )
        entries = audit_entries(process.data, "worker.recycled")
        return Recycling(refused=reason, entries=entries, failures=traffic.failures)


def test_a_worker_is_recycled_without_its_draft_while_another_serves(recycling, controlled):
    """Hard-off: drained, restarted without the draft, tried out, admitted; no request fails meanwhile."""
    name = name_of(controlled)
    assert f"worker {name} is being recycled" in recycling.refused
    assert [(e["worker"], e["with_draft"], e.get("canary")) for e in recycling.entries] == [
        (name, False, None),
        (name, False, "passed"),
    ]
    assert not recycling.failures


def test_without_the_plugin_requests_go_to_a_target_only_worker(directory, recycling, controlled, stock):
    """A collapsed worker that cannot be controlled is avoided, also for requests it refuses."""
    del recycling  # left the other worker with its target alone
    drafts, target = name_of(stock), name_of(controlled)
    with gateway(directory / "avoiding", stock, controlled) as process:
        admin, data = Admin(process), process.data
        assert not admin.worker(target)["speculates"]
        assert admin.worker(drafts)["reason"] == "not_controllable"
        assert admin.worker(drafts)["problems"]
        for fields, headers in (
            ({"min_p": 0.1, "temperature": 1}, {}),
            ({}, {"X-Appliance-Speculation": "off"}),
        ):
            status, _ = complete(process, headers, **fields)
            assert status == 200
            assert outcomes(data)[-1]["worker"] == target
        with Traffic(process, clients=2, prompt=noise()).running() as traffic:
            wait_for(lambda: admin.worker(drafts)["avoided"], seconds=300)
        assert not traffic.failures
        change = next(c for c in admin.changes() if c["avoided"])
        assert (change["worker"], change["reason"]) == (drafts, "not_controllable")
        if admin.worker(drafts)["avoided"]:
            complete(process)
            assert outcomes(data)[-1]["worker"] == target
        admin.ask(f"workers/{target}/drain", "POST", {"force": True})
        status, _ = complete(process)
        assert status == 200, "an avoided worker is better than none"
        assert outcomes(data)[-1]["worker"] == drafts
