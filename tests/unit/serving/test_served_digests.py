"""Only digests that the supervisor computed are reported."""

import json

import pytest

from appliance.serving.plugin_client import parse_reading
from appliance.serving.vllm.listener import ControlledEngine, ControlListener
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_protocol import DRAFT_DIGEST, SPECULATION_PATH, TARGET_DIGEST, TOKEN_FILE
from appliance.speculation.values import EngineReading

TARGET, DRAFT = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
ANSWER = {"controllable": False, "problems": ["started without a draft"], "engine": "vllm", "epoch": ""}


def said(tmp_path, **environment: str) -> EngineReading:
    """What the gateway reads from a worker that was started in this environment."""
    (tmp_path / "token").write_text("secret\n")
    engine = ControlledEngine(command=lambda _text: json.dumps(ANSWER), gpus=None, server=None)
    listener = ControlListener(engine, {TOKEN_FILE: str(tmp_path / "token"), **environment})
    status, content = listener.answer("GET", SPECULATION_PATH, "")
    return parse_reading(status, json.dumps(content))


@pytest.mark.parametrize("draft", [DRAFT, ""])
def test_worker_reports_its_weights(tmp_path, draft):
    """Also one without a draft, whose engine reports nothing."""
    reading = said(tmp_path, **{TARGET_DIGEST: TARGET, DRAFT_DIGEST: draft})
    assert (reading.target, reading.draft) == (TARGET, draft)


def test_worker_without_a_supervisor_reports_no_digests(tmp_path):
    """Its weights were never digested."""
    reading = said(tmp_path)
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
