"""
Workers in processes of their own: `appliance worker`, and vLLM started by hand without the plugin.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Self

from appliance.infra.settings import DEMO_TARGET
from appliance.serving.supervise import free_port
from appliance.serving.worker_protocol import CONTROL_ADDRESS

START_SECONDS = 600.0
STOP_SECONDS = 90.0
GIB = 2**30
ONE_ENGINE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""What `plan_launch` sets on this CPU, for a vLLM that is started by hand."""


def descendants(pid: int) -> list[int]:
    """All descendants of a process, with any name and session."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, frontier = [], {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier}
        found += frontier
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class RunningWorker:
    """One worker, from health to its end."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log

    def wait_healthy(self) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                ended = self.process.poll() is not None
                assert not ended, self.tail()
                assert time.monotonic() < deadline, f"not healthy after {START_SECONDS:g} s\n{self.tail()}"
                time.sleep(0.5)

    def tail(self) -> str:
        """What it wrote last, but for its progress."""
        lines = self._log.read_text(encoding="utf-8").splitlines()
        return "\n".join(line for line in lines if not line.startswith("worker: "))[-3000:]

    def stop(self) -> None:
        """
        End it and everything it started, at once.

        How it ends in good order is for `test_worker` to show; that takes vLLM some seconds.
        """
        started = [self.process.pid, *descendants(self.process.pid)]
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)
        deadline = time.monotonic() + STOP_SECONDS
        while left := [pid for pid in started if is_running(pid)]:
            assert time.monotonic() < deadline, f"processes are left: {left}"
            time.sleep(0.05)


class WorkerProcess(RunningWorker):
    """`appliance worker` on the demo pair."""

    def __init__(self, data: Path, *arguments: str, environment: Mapping[str, str]) -> None:
        port = free_port("127.0.0.1")
        log = data.with_suffix(".log")
        command = [sys.executable, "-m", "appliance", "worker", "--data", str(data), "--port", str(port)]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        super().__init__(process, f"http://127.0.0.1:{port}", log)

    def __enter__(self) -> Self:
        try:
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_reason: object) -> None:
        self.stop()


@contextmanager
def stock_worker(
    log: Path,
    *,
    draft: Path | None,
    environment: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
    arguments: Sequence[str] = (),
) -> Iterator[RunningWorker]:
    """Run vLLM as started by hand, without our plugin unless `environment` and `arguments` bring it."""
    port = free_port("127.0.0.1")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_TARGET)]
    command += ["--served-model-name", "demo-coder", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(GIB), "--dtype", "float32"]
    if draft is not None:
        speculation = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
        command += ["--speculative-config", json.dumps(speculation)]
    offline = {
        "VLLM_PLUGINS": "none",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        CONTROL_ADDRESS: f"127.0.0.1:{port + 1}",
    }
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=log.parent,  # not where Python would find the appliance
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **offline, **environment},
            start_new_session=True,
        )
    worker = RunningWorker(process, f"http://127.0.0.1:{port}", log)
    try:
        worker.wait_healthy()
        yield worker
    finally:
        worker.stop()
