"""
`appliance picker` in a process of its own.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from appliance.serving.supervise import free_port
from tests.fakes import CONTROL_TOKEN

START_SECONDS = 60.0


class PickerProcess:
    """`appliance picker` in a process of its own."""

    def __init__(
        self, directory: Path, urls: list[str], *, port: int = 0, token: str = CONTROL_TOKEN, **settings: Any
    ) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "control.token").write_text(token)
        self.health_port, self.metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        file = directory / "picker.yaml"
        own = {"health_port": self.health_port, "metrics_port": self.metrics_port}
        content = {
            "pool": {"urls": urls},
            "monitor": {"interval_seconds": 0.1},
            **settings,
            "picker": {**own, **settings.get("picker", {})},
        }
        file.write_text(json.dumps(content), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "appliance",
            "picker",
            "--config",
            str(file),
            "--data",
            str(directory),
        ]
        self.log = directory / "picker.log"
        with self.log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.address = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if found := re.match(r"ready\s+(\S+)", line):
                self.address = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> "PickerProcess":
        self._ready.wait(START_SECONDS)
        assert self.address, self.log.read_text(encoding="utf-8")
        return self

    async def metric(self, name: str, worker: str) -> float:
        """The value of a metric for a worker; -1 before it has one."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as page:
            text = await page.text()
        found = re.search(rf'^{name}{{worker="{re.escape(worker)}"}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else -1.0

    async def wait_for(self, name: str, worker: str, value: float) -> None:
        while await self.metric(name, worker) != value:  # noqa: ASYNC110 - it is in another process
            await asyncio.sleep(0.02)

    async def is_serving(self, service: str) -> bool:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=10
                )
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(START_SECONDS)
        self._reader.join(START_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status
