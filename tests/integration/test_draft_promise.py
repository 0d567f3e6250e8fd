"""What a draft's record promises, on its way through a real vLLM worker to whoever controls it."""

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from appliance.serving.speculation import parse_reading
from appliance.serving.worker_protocol import SPECULATION_PATH
from appliance.settings import DEMO_DRAFT, DEMO_TARGET
from tests.integration.worker_process import WorkerProcess

pytestmark = pytest.mark.worker

QUIET = {"APPLIANCE_LOG__LEVEL": "warning"}


def test_a_real_engine_repeats_what_the_record_of_its_draft_says(tmp_path: Path):
    """It was measured with six draft tokens, and this worker has three: half of the promise is left."""
    draft = tmp_path / "draft"
    shutil.copytree(DEMO_DRAFT, draft)
    record = json.loads((draft / "training.json").read_text(encoding="utf-8"))
    record["expected"] = {"all": {"acceptance_length": 3.0, "draft_tokens": 6}}
    (draft / "training.json").write_text(json.dumps(record), encoding="utf-8")
    arguments = ("--model", str(DEMO_TARGET), "--draft", str(draft))
    with WorkerProcess(tmp_path / "data", *arguments, environment=QUIET) as worker:
        token = (tmp_path / "data" / "control.token").read_text(encoding="utf-8").strip()
        request = urllib.request.Request(
            worker.url + SPECULATION_PATH, headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            reading = parse_reading(response.status, response.read().decode())
    assert reading.controllable, reading.problems
    assert max(reading.choices) == 3
    assert reading.expected_length == 2.0
