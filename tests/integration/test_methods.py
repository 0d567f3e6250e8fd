"""
Every drafting method that the settings offer, on a real worker on the CPU under our control.

For each: the plugin changes the draft-token table, the engine follows it at 0 and at every other number,
in one request too, and its counters are read.  The text never depends on the table.
"""

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import aiohttp
import pytest
import pytest_asyncio

from appliance.app.worker_process import PLUGIN
from appliance.drafts.lint.loading import load_pair
from appliance.infra.settings import DEMO_TARGET, PoolSettings, WorkerSettings
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.launch import plan_launch
from appliance.serving.plugin_client import SpeculationClient, SpeculationCommand
from appliance.serving.supervise import free_port
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls
from appliance.sovereignty.environment import offline_environment
from appliance.speculation.values import Reason, SpeculationMode
from tests.integration.method_models import make_eagle3, make_mtp_target
from tests.integration.worker_process import RunningWorker

pytestmark = [pytest.mark.worker, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOKEN = "the-token-of-its-gateway"
LARGEST, BATCHES, TOKENS = 3, 8, 96
PROMPT = "import os\nimport sys\n\ndef add(a, b):\n    return a + b\n\ndef add(a, b):\n"
STAND_IN = Path(__file__).parents[1] / "suffix_cache"

METHODS = {
    "eagle3": lambda at: (DEMO_TARGET, make_eagle3(at)),
    "draft_model": lambda _: (DEMO_TARGET, DEMO_TARGET),
    "mtp": lambda at: (make_mtp_target(at), None),
    "ngram": lambda _: (DEMO_TARGET, None),
    "suffix": lambda _: (DEMO_TARGET, None),
}
"""Target and draft by method; EAGLE 3.1 has the same name as EAGLE 3, and most other tests serve it."""


async def test_every_method_of_the_settings_is_served_here():
    offered = get_args(WorkerSettings.model_fields["method"].annotation)
    assert set(METHODS) == set(offered) - {"none"}


class Silent:
    def say(self, text: str) -> None:
        """Warnings of lint are tested elsewhere."""


class Served:
    """A worker of one method, and a client with its control token."""

    def __init__(self, name: str, worker: RunningWorker, client: SpeculationClient) -> None:
        self.name = name
        self._worker = Worker(worker_id=WorkerId("w1"), url=worker.url)
        self._client = client

    async def read(self):
        return await self._client.read(self._worker, 30.0)

    async def set_table(self, draft_tokens: int) -> None:
        command = SpeculationCommand(
            table=((1, BATCHES, draft_tokens),), mode=SpeculationMode.SPECULATIVE, reason=Reason.HEALTHY
        )
        await self._client.apply(self._worker, command, 30.0)

    async def complete(self) -> str:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
            http.post(self._worker.url + "/v1/completions", json=body) as response,
        ):
            content = await response.json()
            assert response.status == 200, content
            return content["choices"][0]["text"]

    async def measure(self, draft_tokens: int) -> tuple[str, int, list[int], int]:
        """Text at one number of draft tokens; drafts, draft tokens by position, accepted tokens."""
        await self.set_table(draft_tokens)
        before = (await self.read()).drafting
        text = await self.complete()
        after = (await self.read()).drafting
        places = zip(before.drafted_per_position, after.drafted_per_position, strict=True)
        drafted = [new - old for old, new in places]
        return (
            text,
            after.drafts - before.drafts,
            drafted,
            after.accepted_tokens - before.accepted_tokens,
        )


@contextmanager
def started(name: str, directory: Path):
    target, draft = METHODS[name](directory / "model")
    settings = WorkerSettings(
        model=target,
        draft=draft,
        method=name,
        draft_tokens=LARGEST,
        served_name="m",
        device="cpu",
        dtype="float32",
        max_num_seqs=BATCHES,
        max_model_len=1024,
    )
    token = directory / "control-token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    pair = load_pair(settings, Silent())
    plan = plan_launch(
        settings,
        python=sys.executable,
        port=free_port("127.0.0.1"),
        device=choose_device("cpu", detect_hardware()),
        target=pair.target,
        draft=pair.draft,
        environment=offline_environment(
            {variable: os.environ[variable] for variable in ("PATH", "HOME")}, plugins=[PLUGIN]
        ),
        control_token_file=token,
        can_import=lambda _: True,
    )
    log = directory / "worker.log"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            plan.argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**plan.environment, "PYTHONPATH": str(STAND_IN)},
            start_new_session=True,
        )
    worker = RunningWorker(process, plan.url, log)
    try:
        worker.wait_healthy()
        yield worker
    finally:
        worker.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=sorted(METHODS))
async def served(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with started(request.param, directory) as worker:
        async with SpeculationClient.open(token=TOKEN, tls=WorkerTls(PoolSettings())) as client:
            yield Served(request.param, worker, client)


async def test_the_engine_follows_the_table_at_every_number(served):
    """No number changes the text, which also shows that the first step after K=0 verifies no stale draft."""
    reading = await served.read()
    assert reading.controllable, reading.problems
    assert set(reading.choices) == {0, 1, 2, LARGEST}
    texts = {}
    for draft_tokens in (LARGEST, 0, 1, 2, 0, LARGEST):
        text, drafts, drafted, accepted = await served.measure(draft_tokens)
        texts.setdefault(text, []).append(draft_tokens)
        assert sum(drafted[draft_tokens:]) == 0, (draft_tokens, drafted)
        assert (drafts > 0) == (draft_tokens > 0), (draft_tokens, drafts)
        assert drafted[:1] == [drafts]
        assert accepted <= sum(drafted)
        if served.name == "draft_model":
            # It is its target: what it drafts is what the target would have said.
            assert accepted >= 0.95 * sum(drafted), (draft_tokens, accepted, drafted)
    assert len(texts) == 1, texts


async def test_the_table_changes_while_a_request_runs(served):
    await served.set_table(0)
    expected = await served.complete()
    running = asyncio.create_task(served.complete())
    numbers = []
    while not running.done():
        numbers.append((LARGEST, 0, 1, 0, 2)[len(numbers) % 5])
        await served.set_table(numbers[-1])
        await asyncio.sleep(0.02)
    assert await running == expected
    assert len(set(numbers)) > 1, "the request was too short for this test"


async def test_steps_are_measured_at_each_number(served):
    """Costs by number of draft tokens are what the monitor decides by."""
    for draft_tokens in (0, LARGEST):
        await served.measure(draft_tokens)
    steps = (await served.read()).steps
    measured = {k for (batch, k), cell in steps.items() if batch == 1 and cell.steps > 0}
    # Only full drafts are measured, and those of a suffix are as long as it has a continuation.
    assert measured > {0} if served.name == "suffix" else measured >= {0, LARGEST}
