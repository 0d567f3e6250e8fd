"""
A client that reads the answers of a whole appliance unchanged, and their records.
"""

import json
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, Self

import httpx

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore

MODEL = "demo-coder"
PROMPT = "import os\n\ndef read_lines(path):\n    "
TURN = {"role": "user", "content": PROMPT}
ENDING_SECONDS = 60


class Site(Protocol):
    """A running appliance."""

    url: str
    key: str
    data: Path


def audit_entries(data: Path, *types: str) -> list[dict[str, Any]]:
    """Type and fields of the entries in an audit log so far; of some types, or all."""
    with closing(SqlAuditStore(f"sqlite:///{data / 'audit.db'}")) as store:
        return [
            {"type": leaf.type, **decode(leaf.leaf).fields}
            for leaf in store.leaves(0, 10**6)
            if not types or leaf.type in types
        ]


def outcomes(data: Path) -> list[dict[str, Any]]:
    """How each request so far ended, in that order, once none is open."""
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        found = audit_entries(data, "request.intent", "request.outcome")
        ended = [entry for entry in found if entry["type"] == "request.outcome"]
        if 2 * len(ended) == len(found):
            return ended
        assert time.monotonic() < deadline, "requests stay open"
        time.sleep(0.05)


def fetch(url: str, key: str = "") -> str:
    """Get a page; with a key, as its owner."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def sample(page: str, name: str) -> float:
    """The value of a metric, whose name may be without its labels; the sum over all of them."""
    values = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)]
    assert values, f"{name} is not on the page"
    return sum(values)


class Caller:
    """A client of one appliance."""

    def __init__(self, site: Site, model: str = MODEL) -> None:
        self.site = site
        self._model = model
        self._http = httpx.Client(base_url=site.url, timeout=120, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_reason: object) -> None:
        self._http.close()

    def post(self, path: str, *, status: int = 200, **body: Any) -> dict[str, Any]:
        """Ask for an answer in one piece."""
        answer = self._http.post(path, json={"model": self._model, **body}, headers=self._headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[tuple[str, dict[str, Any]]]:
        """Ask for a stream; its events with their names."""
        answer = self._http.post(
            path, json={"model": self._model, "stream": True, **body}, headers=self._headers
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = [frame.partition("\ndata: ") for frame in answer.text.split("\n\n") if frame[:1] != ":"]
        return [(event.removeprefix("event: "), json.loads(data)) for event, found, data in frames if found]

    def outcome(self, path: str) -> dict[str, Any]:
        """The record of the last request for a path."""
        return [each for each in outcomes(self.site.data) if each["route"] == path][-1]

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-api-key": self.site.key}
