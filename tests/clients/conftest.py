"""
One appliance for all clients: a gateway with workers of the demo pair that chat, embed and score.
"""

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.process import ApplianceProcess
from tests.integration.worker_process import WorkerProcess

collect_ignore = ["python"]

CHAT_MODEL = "demo-coder"
EMBEDDING_MODEL = "demo-embedder"
RERANKING_MODEL = "demo-reranker"
START_SECONDS = 600
COMPACT = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
"""Where a space would be as right as what comes next, a very small model writes spaces for good."""
RERANKER = {
    "architectures": ["LlamaForSequenceClassification"],
    "classifier_from_token": ["self", "def"],
    "method": "from_2_way_softmax",
}
"""Makes a reranker of any model: the chance of one token against another."""
LIMITED = {"name": "limited", "limits": {"requests_per_minute": 3}}
"""A tenant whose fourth request within a minute is refused."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """An appliance that answers, and the keys to it."""

    url: str
    admin_url: str
    """Base URL of the admin listener, which answers every route."""
    data: Path
    key: str
    admin_key: str
    limited_key: str
    """Of the tenant `LIMITED`."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The three workers start side by side."""
    directory = tmp_path_factory.mktemp("clients")
    token = directory / "control.token"
    token.write_text("a shared secret\n", encoding="utf-8")
    shared = {"APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(token)}
    with ExitStack() as stack:

        def start(task: str, name: str, *arguments: str) -> WorkerProcess:
            worker = WorkerProcess(
                directory / task,
                "--no-draft",
                environment={
                    **shared,
                    "APPLIANCE_WORKER__TASK": task,
                    "APPLIANCE_WORKER__SERVED_NAME": name,
                    "APPLIANCE_WORKER__EXTRA_ARGUMENTS": json.dumps(arguments),
                },
            )
            stack.callback(worker.stop)
            return worker

        others = [
            start("embed", EMBEDDING_MODEL),
            start("score", RERANKING_MODEL, "--hf-overrides", json.dumps(RERANKER)),
        ]
        settings = {
            **shared,
            "APPLIANCE_POOL__URLS": json.dumps([worker.url for worker in others]),
            "APPLIANCE_WORKER__TOOL_CALL_PARSER": "hermes",
            "APPLIANCE_WORKER__EXTRA_ARGUMENTS": json.dumps(["--structured-outputs-config", COMPACT]),
            # Its other way of holding a model to a tool's schema knows nothing of `COMPACT`.
            "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
            # Under control a worker may draft another number of tokens for each request, which changes
            # the shape of its steps and so the rounding.
            "APPLIANCE_MONITOR__CONTROL": "observe",
        }
        process = stack.enter_context(ApplianceProcess("up", data=directory / "up", environment=settings))
        for worker in others:
            worker.wait_healthy()
        admin_key = (process.data / "admin.key").read_text(encoding="utf-8").strip()
        _wait_for_models(process.url, process.key)
        _post(process.admin_url, admin_key, "/admin/v1/tenants", LIMITED)
        limited_key = _post(process.admin_url, admin_key, "/admin/v1/tenants/limited/keys", {})["key"]
        yield Served(
            url=process.url,
            admin_url=process.admin_url,
            data=process.data,
            key=process.key,
            admin_key=admin_key,
            limited_key=limited_key,
        )
        listed = _get(process.admin_url, admin_key, "/admin/v1/workers")["workers"]
        said = "\n\n".join(worker.tail() for worker in others)
        assert all(worker["takes_requests"] for worker in listed), f"{listed}\n\n{said}"
    assert process.process.returncode == 0, "".join(process.output)


def _wait_for_models(url: str, key: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    expected = {CHAT_MODEL, EMBEDDING_MODEL, RERANKING_MODEL}
    while expected - {entry["id"] for entry in _get(url, key, "/v1/models")["data"]}:
        assert time.monotonic() < deadline, "the workers did not all appear among the models"
        time.sleep(0.5)


def _get(url: str, key: str, path: str) -> Any:
    return _send(urllib.request.Request(url + path), key)


def _post(url: str, key: str, path: str, body: dict[str, Any]) -> Any:
    return _send(urllib.request.Request(url + path, data=json.dumps(body).encode()), key)


def _send(request: urllib.request.Request, key: str) -> Any:
    request.add_header("Authorization", f"Bearer {key}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)
