"""Only digests that the supervisor computed are reported."""

import json
from types import SimpleNamespace

import pytest

from appliance.serving.plugin_client import parse_reading
from appliance.serving.vllm.middleware import GatewayMiddleware
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_protocol import DRAFT_DIGEST, SPECULATION_PATH, TARGET_DIGEST, TOKEN_FILE
from appliance.speculation.values import EngineReading

TARGET, DRAFT = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
ANSWER = {"controllable": False, "problems": ["started without a draft"], "engine": "vllm", "epoch": ""}


async def said(monkeypatch, tmp_path, **environment: str) -> EngineReading:
    """What the gateway reads from a worker that was started in this environment."""
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    for name in (TARGET_DIGEST, DRAFT_DIGEST):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    async def command(_name: str, _text: str) -> str:
        return json.dumps(ANSWER)

    core = SimpleNamespace(call_utility_async=command)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": SPECULATION_PATH,
        "headers": [(b"authorization", b"Bearer secret")],
        "app": app,
    }
    await GatewayMiddleware(None)(scope, None, send)
    return parse_reading(sent[0]["status"], sent[1]["body"].decode())


@pytest.mark.parametrize("draft", [DRAFT, ""])
async def test_worker_reports_its_weights(monkeypatch, tmp_path, draft):
    """Also one without a draft, whose engine reports nothing."""
    reading = await said(monkeypatch, tmp_path, **{TARGET_DIGEST: TARGET, DRAFT_DIGEST: draft})
    assert (reading.target, reading.draft) == (TARGET, draft)


async def test_worker_without_a_supervisor_reports_no_digests(monkeypatch, tmp_path):
    """Its weights were never digested."""
    reading = await said(monkeypatch, tmp_path)
    assert (reading.target, reading.draft) == ("", "")


@pytest.mark.parametrize("digest", ["sha256:1", TARGET.upper(), f"{TARGET}\n", 7, None, ["x"]])
def test_malformed_digest_is_ignored(digest):
    """It would end up in the audit log."""
    reading = parse_reading(200, json.dumps({**ANSWER, "target": digest, "draft": digest}))
    assert (reading.target, reading.draft) == ("", "")


def test_supervisors_digest_overrides_the_workers():
    """Where this process started the worker it has read the files itself."""
    reading = EngineReading(controllable=True, epoch="1", target=TARGET, draft=DRAFT)
    elsewhere = Worker(worker_id=WorkerId("w"), url="http://w")
    ours = Worker(worker_id=WorkerId("w"), url="http://w", weights=DRAFT, draft="")
    seen = WorkerSnapshot(worker=elsewhere, reading=reading)
    assert (seen.weights, seen.draft) == (TARGET, DRAFT)
    seen = WorkerSnapshot(worker=ours, reading=reading)
    assert (seen.weights, seen.draft) == (DRAFT, "")
    assert (WorkerSnapshot(worker=elsewhere).weights, WorkerSnapshot(worker=elsewhere).draft) == ("", "")
