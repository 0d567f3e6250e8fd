"""
A client that reads the answers of a whole appliance as they are, and what was recorded of them.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

from demo.process import ApplianceProcess

MODEL = "demo-coder"
PROMPT = "import os\n\ndef read_lines(path):\n    "
TURN = {"role": "user", "content": PROMPT}


def appliance(directory: Path, **environment: str) -> ApplianceProcess:
    """Start one with a worker of its own."""
    return ApplianceProcess("up", data=directory / "data", environment=environment)


class Caller:
    """A client of one appliance."""

    def __init__(self, process: ApplianceProcess) -> None:
        self.process = process
        self._http = httpx.Client(base_url=process.url, timeout=120, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_reason: object) -> None:
        self._http.close()

    def post(self, path: str, *, status: int = 200, **body: Any) -> dict[str, Any]:
        """Ask for an answer in one piece."""
        answer = self._http.post(path, json={"model": MODEL, **body}, headers=self._headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[tuple[str, dict[str, Any]]]:
        """Ask for a stream; its events with their names."""
        answer = self._http.post(path, json={"model": MODEL, "stream": True, **body}, headers=self._headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = [frame.partition("\ndata: ") for frame in answer.text.split("\n\n") if frame[:1] != ":"]
        return [(event.removeprefix("event: "), json.loads(data)) for event, found, data in frames if found]

    def outcome(self, path: str) -> dict[str, Any]:
        """The record of the last request for a path."""
        command = [sys.executable, "-m", "appliance", "audit", "tail", "--json", "--count", "100000"]
        text = subprocess.run(
            [*command, "--data", str(self.process.data)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        entries = map(json.loads, text.splitlines())
        fields = [entry.get("fields", entry) for entry in entries if entry["type"] == "request.outcome"]
        return [each for each in fields if each["route"] == path][-1]

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-api-key": self.process.key}
