"""
Run `appliance` as a child process, from its ready line to its exit: for the tour, tests, benchmarks.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from appliance.infra.files import write_private
from appliance.tenancy import KEY_BYTES, Tenant, encode_tenants, make_key

START_SECONDS = 600.0
STOP_SECONDS = 120.0
DEMO_KEY, TENANTS = "demo.key", "tenants.yaml"


class StartError(Exception):
    """The child ended or timed out before it was ready; carries its output."""


class ApplianceProcess:
    """One running `appliance up` or `appliance gateway`; use it as a context manager."""

    def __init__(
        self,
        role: str,
        *arguments: str,
        data: Path,
        key: str = "",
        environment: Mapping[str, str] | None = None,
        show: Callable[[str], None] = lambda _line: None,
        module: str = "appliance",
        has_admin_listener: bool = True,
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        self.data = data
        self.key = key
        """A tenant key: the given one, or that of the tenant `demo` once it is ready."""
        self.url = ""
        self.admin_url = ""
        """Base URL of the admin listener: metrics, admin API, console."""
        self.output: list[str] = []
        self._show = show
        self._ready = threading.Event()
        if role == "gateway" and not key:
            make_demo_tenant(data)
        self.process = subprocess.Popen(
            [
                *(*python, "-m", module, role, "--data", str(data)),
                *("--port", "0", *(("--admin-port", "0") if has_admin_listener else ()), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until requests can be sent."""
        if not self._ready.wait(START_SECONDS) or not self.url:
            raise StartError("".join(self.output[-20:]))
        if not self.key and (self.data / DEMO_KEY).exists():
            self.key = (self.data / DEMO_KEY).read_text(encoding="utf-8").strip()

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal, wait for the end, return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        return status

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.stop(signal.SIGTERM)
            raise
        return self

    def __exit__(self, *_reason: object) -> None:
        self.stop()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.output.append(line)
            self._show(line)
            if found := re.match(r"ready\s+(https?://\S+)/v1", line):
                self.url = found[1]
            elif found := re.match(r"admin API\s+(https?://\S+)/admin/v1", line):
                self.admin_url = found[1]
            elif line.startswith("Ctrl-C"):
                self._ready.set()
        self._ready.set()


def make_demo_tenant(data: Path) -> None:
    """Give a gateway the tenant that the first start of `appliance up` makes."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (data / TENANTS).exists() or (data / DEMO_KEY).exists():
        return
    text, key = make_key(secrets.token_bytes(KEY_BYTES))
    write_private(data / DEMO_KEY, text + "\n")
    (data / TENANTS).write_text(encode_tenants([Tenant(name="demo", keys=(key,))]), encoding="utf-8")
