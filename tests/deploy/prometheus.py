"""
A real Prometheus on loopback that scrapes once a second, and a client for it.
"""

import json
import math
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from appliance.serving.supervise import free_port
from tests.deploy.monitoring_files import RULES, tool

START_SECONDS, STOP_SECONDS = 120.0, 60.0


class Prometheus:
    """Client of its HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def now(self, expr: str) -> list[float]:
        """The current values of an expression, without those that are not numbers."""
        found = self.ask("query", query=expr)["result"]
        return _numbers(sample["value"][1] for sample in found)

    def since(self, expr: str, start: float) -> list[float]:
        """Its values at every second since then."""
        end = str(time.time())  # noqa: TID251 - Prometheus goes by the wall clock
        found = self.ask("query_range", query=expr, start=str(start), end=end, step="1")["result"]
        return _numbers(value for series in found for _, value in series["values"])

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def _numbers(values: Iterator[str]) -> list[float]:
    return [number for number in map(float, values) if math.isfinite(number)]


def hurried_rules(directory: Path) -> Path:
    """
    Copies of the rules for a test that lasts minutes: durations over a second are dropped.

    Expressions are as they are shipped; `test_monitoring_alerts` judges the times.
    """
    directory.mkdir()
    for file in RULES:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for group in content["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = "1s"
        (directory / file.name).write_text(yaml.safe_dump(content), encoding="utf-8")
    return directory


@contextmanager
def prometheus(
    directory: Path, targets: Mapping[str, str], *, tokens: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[Prometheus]:
    """
    Run one.

    Args:
        directory: an empty one, for its files.
        targets: host and port to read from, by job.
        tokens: files with the token of a job that needs one.
    """
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(hurried_rules(directory / "rules") / "*.yaml")],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [target]}],
                **({"authorization": {"credentials_file": str(tokens[job])}} if job in tokens else {}),
            }
            for job, target in targets.items()
        ],
    }
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    port = free_port("127.0.0.1")
    command = [tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (directory / "prometheus.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_ready(f"http://127.0.0.1:{port}", process, directory / "prometheus.log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url + "/-/ready", timeout=2):
                return
        except OSError:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.2)
