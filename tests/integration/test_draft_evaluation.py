"""
Drafts evaluated on real vLLM workers: a better one passes, others are refused with their reason.

Four workers in all, since each takes half a minute to start: tests that need the same target and draft share
a worker.  The code under test starts and ends them.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore
from appliance.cli.draft import evaluate as command
from appliance.drafts.evaluation import runner, store
from appliance.drafts.evaluation.arms import Arm, Served, choose_prompts
from appliance.drafts.evaluation.evaluating import (
    Comparison,
    EvaluationSite,
    HeldOutData,
    evaluate,
    open_comparison,
)
from appliance.drafts.evaluation.evaluation_page import render_page
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.evaluation.evaluation_worker import EvaluationWorker, WorkerTemplate, run_worker
from appliance.drafts.evaluation.runner import EvaluationOptions
from appliance.drafts.evaluation.store import load_evaluation, save_evaluation
from appliance.drafts.harvest.sample import TrainingSample
from appliance.drafts.harvest.tokenizer import digest_tokenizer
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.errors import DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, Settings, load_settings
from appliance.serving.devices import choose_device, detect_hardware
from appliance.serving.launch import LaunchPlan
from appliance.serving.weights import load_weights
from demo.training.corpus import held_out_prompts, load_corpus

pytestmark = pytest.mark.worker
IN_MODULE = pytest.mark.asyncio(loop_scope="module")

PROMPTS = 16
"""Two in each of eight rounds: many short rounds bound a speed better than few long ones."""
OPTIONS = EvaluationOptions(max_tokens=16, draft_tokens=3)
AT_MOST = 3
"""Workers that are kept at a time."""
DATASET = f"sha256:{'d' * 64}"
START_SECONDS = 600.0


def samples() -> Iterator[TrainingSample]:
    """Held-out code that the demo pair was not trained on, in the form of a harvest."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    for place, text in enumerate(held_out_prompts(load_corpus(), count=PROMPTS)):
        asked, answer = tokenizer.encode(text).ids, tokenizer.encode("    return None\n").ids
        yield TrainingSample(
            request_id=f"01HARVEST{place:04}",
            tenant="acme",
            template="raw-plain" if place % 2 else "chat-0123abcd",
            context="0-1k",
            token_ids=(*asked, *answer),
            loss_mask=(False,) * len(asked) + (True,) * len(answer),
            salt=f"{place:032x}",
        )


class SmallDataset:
    """A data set in the form of `open_dataset`, without a database."""

    missing = withheld = 0
    manifest = SimpleNamespace(digest=DATASET, tokenizer=digest_tokenizer(DEMO_TARGET))

    def read(self, held_out: bool) -> Iterator[TrainingSample]:
        assert held_out
        yield from samples()


def copied(source: Path, directory: Path) -> Path:
    shutil.copytree(source, directory)
    return directory


def with_noise(directory: Path, tensor: str, share: float) -> Path:
    """Add noise to a tensor of a copy: this share of its own standard deviation."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(11)
    found = tensors[tensor]
    noise = torch.randn(found.shape) * found.float().std() * share
    tensors[tensor] = (found.float() + noise).to(found.dtype)
    save_file(tensors, file)
    return directory


@dataclass
class RegisteredDrafts:
    """A site with drafts in its registry."""

    settings: Settings
    registry: DraftRegistry
    target: str
    committed: str
    noisy: str
    flipped: str
    """The committed draft, with a flag turned against its training record."""
    other_target: Path
    """The demo target with other weights."""
    directory: Path = field(init=False)

    def __post_init__(self) -> None:
        self.directory = locate(self.settings).drafts

    def comparison(self, candidate: str, incumbent: str | None) -> Comparison:
        return open_comparison(
            self.registry, self.directory, self.settings.worker, candidate=candidate, incumbent=incumbent
        )

    def site(self, margin: float) -> EvaluationSite:
        return EvaluationSite(
            directory=self.directory,
            template=WorkerTemplate(
                settings=self.settings.worker,
                device=choose_device("cpu", detect_hardware()),
                python=sys.executable,
                environment={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]},
            ),
            engine="vllm of the test",
            available_bytes=2**50,
            margin=margin,
            say=lambda _line: None,
            clock=time.monotonic,
            wall_clock=lambda: 1_800_000_000.0,
        )

    async def evaluate(
        self,
        candidate: str,
        incumbent: str | None,
        *,
        arms: dict[Arm, Served] | None = None,
        margin: float = 0.02,
    ) -> Evaluation:
        data = HeldOutData(
            digest=DATASET, chosen=choose_prompts(samples(), count=PROMPTS, room=1900), missing=0
        )
        return await evaluate(
            self.comparison(candidate, incumbent), data, OPTIONS, self.site(margin), arms=arms
        )


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> RegisteredDrafts:
    home = tmp_path_factory.mktemp("evaluation")
    settings = load_settings(
        environment={},
        overrides={
            "data": {"directory": str(home / "data")},
            "worker": {"device": "cpu", "dtype": "float32"},
        },
    )
    registry = open_registry(settings, lambda: 1_800_000_000.0)
    signer, target = site_signer(settings), load_weights(DEMO_TARGET).digest
    noisy = with_noise(copied(DEMO_DRAFT, home / "noisy"), "fc.weight", 50.0)
    flipped = copied(DEMO_DRAFT, home / "flipped")
    config = json.loads((flipped / "config.json").read_text())
    (flipped / "config.json").write_text(json.dumps({**config, "norm_output": False}))
    digests = [
        registry.register(read_source(path), target=target, how="imported", signer=signer).digest
        for path in (DEMO_DRAFT, noisy, flipped)
    ]
    other = with_noise(copied(DEMO_TARGET, home / "other-target"), "lm_head.weight", 0.5)
    return RegisteredDrafts(settings, registry, target, *digests, other)


class SharedWorkers:
    """Workers that start once and are lent to each test that needs the same weights."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, ...], tuple[AsyncExitStack, EvaluationWorker]] = OrderedDict()
        self._lent: set[tuple[str, ...]] = set()

    @asynccontextmanager
    async def lend(self, name: str, plan: LaunchPlan, **more: Any) -> AsyncIterator[EvaluationWorker]:
        serves = tuple(plan.argv[plan.argv.index(name) + 1] for name in ("--model",))
        serves += tuple(word for word in plan.argv if word.startswith('{"method"'))
        if serves not in self._kept:
            await self._make_room()
            stack = AsyncExitStack()
            self._kept[serves] = stack, await stack.enter_async_context(run_worker(name, plan, **more))
        self._kept.move_to_end(serves)
        self._lent.add(serves)
        try:
            yield self._kept[serves][1]
        finally:
            self._lent.discard(serves)

    async def _make_room(self) -> None:
        while len(self._kept) >= AT_MOST:
            oldest = next(each for each in self._kept if each not in self._lent)
            await self._kept.pop(oldest)[0].aclose()

    async def close(self) -> None:
        await asyncio.gather(*(stack.aclose() for stack, _running in self._kept.values()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared():
    shared, before = SharedWorkers(), psutil.Process().children(recursive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_worker", shared.lend)
        # The token that the kept workers were started with.
        patch.setattr(store, "secrets", SimpleNamespace(token_hex=lambda _count: "0" * 64))
        yield shared
    await shared.close()
    left = [each for each in psutil.Process().children(recursive=True) if each not in before]
    assert not [each for each in left if "vllm" in " ".join(_line(each))]


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@IN_MODULE
async def test_committed_draft_passes_against_a_damaged_one(drafts, shared):
    """The target's answers stay its own."""
    # The margin is for speed: measured in a few seconds on a machine that tests share with others.
    found = await drafts.evaluate(drafts.committed, drafts.noisy, margin=0.5)
    assert (found.verdict, found.reasons) == (EvaluationVerdict.PASSED, ())
    assert (found.compared, found.complete, found.together) == (PROMPTS, True, True)
    assert found.acceptance_length(Arm.CANDIDATE).low > found.acceptance_length(Arm.INCUMBENT).high
    assert found.acceptance_ratio.low > 1.1
    assert found.speed_ratio.value > 1.0
    assert {each.arm: each.compared for each in found.equalities} == {
        Arm.INCUMBENT: PROMPTS,
        Arm.CANDIDATE: PROMPTS,
    }
    assert found.mismatches == 0
    assert {(line.aspect, line.value) for line in found.lines} == {
        ("all", "all"), ("mode", "greedy"), ("mode", "sampled"), ("context", "0-1k"),
        ("template", "raw-plain"), ("template", "chat-0123abcd"),
    }  # fmt: skip
    for speed in found.speeds:
        cells = {(pace.batch, pace.draft_tokens) for pace in speed.paces}
        assert {(1, 0), (1, 3)} <= cells
        assert all(pace.seconds > 0 for pace in speed.paces)
    first, second, third = next(
        line for line in found.lines if (line.aspect, line.arm) == ("all", Arm.CANDIDATE)
    ).per_position
    assert 1 > first > second > third > 0
    save_evaluation(drafts.directory, found, render_page(found))
    assert load_evaluation(drafts.directory, drafts.committed) == found


@IN_MODULE
async def test_draft_with_noisy_weights_is_refused_for_its_acceptance(drafts, shared):
    """Noise on the weights that fuse the target's layers shows in nothing else."""
    found = await drafts.evaluate(drafts.noisy, drafts.committed)
    assert found.verdict is EvaluationVerdict.REFUSED
    ratio = found.acceptance_ratio
    assert ratio.high < 0.8
    assert found.reasons[0].startswith(f"its acceptance length is {ratio.value:.3f} times the incumbent's (")
    assert found.reasons[0].endswith("less than 0.980")
    assert found.mismatches == 0


@pytest.mark.slow
@IN_MODULE
async def test_answers_of_another_target_are_refused(drafts, shared):
    """The candidate is served with a target of other weights."""
    other = load_weights(drafts.other_target)
    arms = drafts.comparison(drafts.committed, "none").arms
    arms[Arm.CANDIDATE] = replace(arms[Arm.CANDIDATE], target=other)
    found = await drafts.evaluate(drafts.committed, "none", arms=arms)
    assert found.verdict is EvaluationVerdict.REFUSED
    assert found.mismatches > 0
    assert found.reasons[0].startswith(f"{found.mismatches} of {PROMPTS} of its greedy answers differ")
    assert found.differences[0].request_id.startswith("01HARVEST")


def invoke(drafts: RegisteredDrafts, *words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    app = typer.Typer()
    app.command()(command.COMMANDS["evaluate"])
    monkeypatch.setattr(command, "open_dataset", lambda _settings, _name: SmallDataset())
    data = str(drafts.settings.data.directory)
    return CliRunner().invoke(app, [*words, "--dataset", "dddd", "--data", data])


def entries(drafts: RegisteredDrafts) -> list[dict[str, Any]]:
    store = SqlAuditStore(locate(drafts.settings).database_url)
    try:
        leaves = [leaf for leaf in store.leaves(0, 10_000) if leaf.type == "draft.evaluated"]
        return [dict(decode(leaf.leaf).fields) for leaf in leaves]
    finally:
        store.close()


def test_flag_against_the_training_record_is_refused_without_a_worker(drafts, monkeypatch):
    """With a report, an audit entry and exit code 1."""
    result = invoke(drafts, drafts.flipped, "--incumbent", drafts.committed, monkeypatch=monkeypatch)
    assert result.exit_code == 1, result.output
    assert "reason     training-norm-output: " in result.stdout
    assert "verdict    refused" in result.stdout
    found = load_evaluation(drafts.directory, drafts.flipped)
    assert found.verdict is EvaluationVerdict.REFUSED
    assert [reason.partition(":")[0] for reason in found.reasons] == ["training-norm-output"]
    assert (found.lines, found.compared) == ((), 0)
    entry = entries(drafts)[-1]
    assert entry["evaluation"] == found.digest.removeprefix("sha256:")
    assert (entry["draft"], entry["verdict"]) == (drafts.flipped, "refused")
    assert entry["previous_draft"] == drafts.committed
    assert entry["reason"].startswith("training-norm-output")


def test_the_draft_in_service_is_not_evaluated_against_itself(drafts, monkeypatch):
    """By default the settings' draft is active, which is the committed one."""
    result = invoke(drafts, drafts.committed, monkeypatch=monkeypatch)
    assert isinstance(result.exception, DraftRefusedError)
    assert "there is nothing to evaluate" in str(result.exception)


def test_sigterm_ends_the_command_and_its_worker(drafts, tmp_path):
    """While vLLM starts: exit code 130 and no process left."""
    program = (
        "import typer\n"
        "from appliance.cli.draft import evaluate as command\n"
        "from tests.integration.test_draft_evaluation import SmallDataset\n"
        "command.open_dataset = lambda _settings, _name: SmallDataset()\n"
        "typer.run(command.COMMANDS['evaluate'])\n"
    )
    words = [drafts.committed, "--incumbent", "none", "--dataset", "d"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, "--data", str(drafts.settings.data.directory)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        parent = psutil.Process(process.pid)
        while not (
            found := [each for each in parent.children(recursive=True) if "vllm" in " ".join(_line(each))]
        ):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no worker was started"
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=START_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "no worker is left" in output
    assert psutil.wait_procs(found, timeout=60)[1] == []
