"""
Run `appliance` as a child process, from its ready line to its exit: for the tour, tests, benchmarks.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

START_SECONDS = 600.0
STOP_SECONDS = 120.0


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
    ) -> None:
        self.data = data
        self.key = key
        """A tenant key: the given one, or the demo key that the first start prints."""
        self.url = ""
        self.output: list[str] = []
        self._show = show
        self._ready = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, role, "--data", str(data), "--port", "0", *arguments],
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
            if found := re.search(r"demo tenant key\s+(sk-\S+)", line):
                self.key = found[1]
            elif found := re.match(r"ready\s+(https?://\S+)/v1", line):
                self.url = found[1]
            elif line.startswith("Ctrl-C"):
                self._ready.set()
        self._ready.set()
