"""
The admin API, the metrics and the worker's plugin, as tests of speculation ask them.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_protocol import SPECULATION_PATH
from demo.process import ApplianceProcess

QUIET = {"APPLIANCE_LOG__LEVEL": "warning"}
PRICES = {
    "APPLIANCE_COST__FLUSH_SECONDS": "1",
    "APPLIANCE_COST__CURRENCY": "KES",
    "APPLIANCE_COST__WORKER_PRICE_PER_HOUR": "360",
    "APPLIANCE_COST__PEOPLE_PER_MONTH": "262980",
    "APPLIANCE_COST__POWER_PRICE_PER_KWH": "36",
    "APPLIANCE_COST__WATTS_IDLE": "100",
    "APPLIANCE_COST__WATTS_BUSY": "300",
}
"""What a worker costs: a tenth of a currency unit a second, its people as much, and its energy."""


class Admin:
    """The admin API of a running appliance."""

    def __init__(self, appliance: ApplianceProcess) -> None:
        self._base = appliance.admin_url + "/admin/v1/"
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


def metric(appliance: ApplianceProcess, name: str, **labels: str) -> float:
    """The sum of the series with these labels; there is at least one after the first count."""
    with urllib.request.urlopen(appliance.admin_url + "/metrics", timeout=30) as response:
        page = response.read().decode()
    return sum(
        float(found[2])
        for found in re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
        if all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items())
    )


def verify_log(data: Path) -> int:
    command = [sys.executable, "-m", "appliance", "audit", "verify", "--data", str(data)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode


def cost_report(data: Path, *arguments: str) -> str:
    """What `appliance cost report` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "appliance", "cost", "report", *arguments, "--data", str(data)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **QUIET, **PRICES, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def control_url(worker: str) -> str:
    """Where the worker at a base URL is controlled, as the gateway finds it."""
    return Worker(worker_id=WorkerId("w"), url=worker).control_url


def plugin_reading(worker: str, token: Path) -> dict[str, Any]:
    """The plugin's status, requested with the control token of a file."""
    headers = {"Authorization": f"Bearer {token.read_text(encoding='utf-8').strip()}"}
    with urllib.request.urlopen(
        urllib.request.Request(control_url(worker) + SPECULATION_PATH, headers=headers), timeout=30
    ) as response:
        return json.load(response)
