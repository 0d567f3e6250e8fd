"""
`appliance draft train` on the demo pair: training, registration, records, and serving by vLLM.

The data set has the interface of `open_dataset` and holds held-out code; the training process is real.
"""

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from appliance.audit.entry import decode
from appliance.audit.store import SqlAuditStore
from appliance.cli.draft import train as command
from appliance.drafts.harvest.sample import TrainingSample
from appliance.drafts.lint.lint import lint_pair
from appliance.drafts.registry.site_registry import open_registry
from appliance.drafts.training.progress import Point, read_points
from appliance.drafts.training.speculators.commands import Setup, server_command
from appliance.drafts.training.trainer_process import train
from appliance.drafts.training.training_job import sample_lines
from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.errors import DraftRefusedError
from appliance.infra.data_directory import locate
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, load_settings, process_environment
from appliance.serving.weights import digest_weights, inspect_weights
from appliance.sovereignty.environment import offline_environment
from demo.training.corpus import held_out_prompts, load_corpus
from tests.integration.worker_process import ONE_ENGINE_PROCESS, stock_worker
from tests.unit.drafts.training import tiny

pytestmark = pytest.mark.worker
"""One training serves all tests here, and one of them serves its draft."""
DATASET = f"sha256:{'d' * 64}"
STEPS = 60
SIZES = ("--batch", "4", "--window", "96")
ONE_THREAD = ("OMP_NUM_THREADS", "1")
"""Threads contend in small operations: with another busy process a training would take minutes."""
PROMPT = 40
"""Prompt tokens of a sample; the rest is the answer."""


def samples(count: int = 48) -> list[TrainingSample]:
    """Code that neither model was trained on, in the form of harvested samples."""
    tokenizer = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    made = []
    for place, text in enumerate(held_out_prompts(load_corpus(), count=count, characters=500)):
        ids = tuple(tokenizer.encode(text).ids)
        made.append(
            TrainingSample(
                request_id=f"01HARVEST{place:04}",
                tenant="acme",
                template="raw-plain",
                context="0-1k",
                token_ids=ids,
                loss_mask=tuple(number >= PROMPT for number in range(len(ids))),
                salt=f"{place:032x}",
            )
        )
    return made


class SmallDataset:
    """The interface of `open_dataset`'s data set, without a database."""

    def __init__(self, taken: list[TrainingSample]) -> None:
        self._samples = taken
        self.missing = self.withheld = 0
        self.erased: set[str] = set()
        self.manifest = SimpleNamespace(
            digest=DATASET,
            target=digest_weights(DEMO_TARGET),
            samples=[SimpleNamespace(request_id=each.request_id, digest=each.digest) for each in taken],
        )

    def read(self, held_out: bool) -> Iterator[TrainingSample]:
        for place, sample in enumerate(self._samples):
            if (place % 8 == 0) is held_out and sample.request_id not in self.erased:
                yield sample


@pytest.fixture(scope="module")
def dataset() -> SmallDataset:
    return SmallDataset(samples())


@pytest.fixture(scope="module")
def worn(tmp_path_factory) -> Path:
    """The committed draft with noise in its weights, as if its target had changed."""
    directory = tmp_path_factory.mktemp("worn") / "draft"
    shutil.copytree(DEMO_DRAFT, directory)
    tensors = load_file(directory / "model.safetensors")
    torch.manual_seed(7)
    for name in ("fc.weight", "midlayer.mlp.down_proj.weight"):
        found = tensors[name].float()
        tensors[name] = (found + torch.randn_like(found) * found.std() * 1.5).bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Site:
    """A data directory, and the command on it."""

    def __init__(self, data: Path) -> None:
        self.settings = load_settings(overrides={"data": {"directory": str(data)}})
        self._data = data
        self._app = typer.Typer()
        self._app.command()(command.train_draft)

    def run(self, *arguments: str) -> Result:
        given = [
            "--dataset",
            DATASET,
            "--target",
            str(DEMO_TARGET),
            "--device",
            "cpu",
            "--data",
            str(self._data),
        ]
        return CliRunner().invoke(self._app, [*given, *arguments])

    def entries(self) -> list[tuple[str, dict]]:
        with closing(SqlAuditStore(locate(self.settings).database_url)) as store:
            leaves = store.leaves(0, 1000)
        return [(leaf.type, dict(decode(leaf.leaf).fields)) for leaf in leaves]


@pytest.fixture(scope="module")
def site(tmp_path_factory, dataset) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*ONE_THREAD)
        patch.setattr(command, "open_dataset", lambda _settings, _name: dataset)
        yield Site(tmp_path_factory.mktemp("site") / "data")


@pytest.fixture(scope="module")
def trained(site, worn) -> Result:
    return site.run("--from", str(worn), "--steps", str(STEPS), *SIZES, "--run", "refresh")


def test_refresh_trains_and_registers_a_draft(site, trained, worn, dataset):
    """From a noisy draft to a better one, with a training record in its directory and in the log."""
    assert trained.exit_code == 0, (trained.output, trained.exception)
    (revision,) = open_registry(site.settings, lambda: 0.0).revisions()
    assert (revision.source, revision.parent, revision.dataset) == ("trained", digest_weights(worn), DATASET)
    path = open_registry(site.settings, lambda: 0.0).weights(revision)
    draft = inspect_weights(path)
    assert lint_pair(inspect_weights(DEMO_TARGET), draft) == ()
    run = locate(site.settings).drafts / "runs" / "refresh"
    points = read_points(run / "progress.jsonl")
    assert points[-1].step == STEPS
    assert points[-1].loss < points[0].loss
    held_out = [point.held_out for point in points if point.held_out]
    assert held_out[-1][0] > held_out[0][0]
    assert revision.record.expected["all"].acceptance_length > 1.3
    assert (run / "draft" / "report.html").read_text().count("<svg") == 3
    kinds = [(kind, entry) for kind, entry in site.entries() if kind.startswith("draft.")]
    assert [kind for kind, _ in kinds] == ["draft.trained", "draft.imported"]
    assert kinds[0][1]["samples"] == draft.training["samples"] == 42
    assert {entry["draft"] for _, entry in kinds} == {revision.digest}


def test_finished_run_changes_nothing(site, trained, worn):
    """The same request reports that it is finished; a different one under its name is refused."""
    before = site.entries()
    again = site.run("--from", str(worn), "--steps", str(STEPS), *SIZES, "--run", "refresh")
    assert again.exit_code == 0
    assert "nothing changed" in again.output
    other = site.run("--from", str(worn), "--steps", "61", *SIZES, "--run", "refresh")
    assert isinstance(other.exception, DraftRefusedError)
    assert "recipe" in str(other.exception)
    parent = site.run("--from", str(DEMO_DRAFT), "--steps", str(STEPS), *SIZES, "--run", "refresh")
    assert isinstance(parent.exception, DraftRefusedError)
    assert site.entries() == before


def test_nothing_of_the_samples_is_in_the_run(site, trained, dataset):
    """Not in the checkpoint, the log, the report or the record; these only name them."""
    run = locate(site.settings).drafts / "runs"
    tokens = dataset._samples[1].token_ids[PROMPT : PROMPT + 6]
    text = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).decode(list(tokens))
    needles = [
        text.encode(),
        ", ".join(map(str, tokens)).encode(),
        ",".join(map(str, tokens)).encode(),
        torch.tensor(tokens).numpy().tobytes(),
    ]
    for file in run.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not any(needle in content for needle in needles), file


def test_content_erased_during_training_is_in_no_new_draft(site, worn, dataset):
    """The draft is complete but not registered."""
    before = site.entries()
    dataset.erased = set()
    arguments = ("--from", str(worn), "--steps", "2", "--window", "64", "--run", "late")
    original = command.refuse_erased

    def erase_first(draft: Path, data: SmallDataset) -> None:
        used = (draft / "used.txt").read_text().split()[0]
        data.erased = {used}
        original(draft, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "refuse_erased", erase_first)
        result = site.run(*arguments)
    dataset.erased = set()
    assert isinstance(result.exception, DraftRefusedError)
    assert "erased during the training" in str(result.exception)
    assert site.entries() == before


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return tiny.write_target(tmp_path_factory.mktemp("tiny") / "target")


def carry_out(run: Path, target: Path, hear: Callable[[Point], None] = lambda _: None) -> bool:
    run.mkdir(exist_ok=True)
    dataset = tiny.FakeDataset(tiny.samples())
    return train(
        tiny.job(run, target, steps=90),
        lambda: sample_lines(dataset),
        log=run / "log.txt",
        environment=dict([*process_environment().items(), ONE_THREAD]),
        observe=hear,
    )


def training_child() -> psutil.Process:
    """The training's process; tests before this one may have left servers running for those after it."""
    children = psutil.Process().children()
    (found,) = [child for child in children if child.cmdline()[1:3] == ["-m", "appliance.drafts.training"]]
    return found


def test_killed_or_stopped_training_gives_the_same_draft(tmp_path, small):
    """Killed before a checkpoint, stopped with one, killed after it: the same weights, bit for bit."""
    assert carry_out(tmp_path / "whole", small)
    run = tmp_path / "parts"
    steps: list[int] = []

    def end_after(count: int, how: Callable[[psutil.Process], None]) -> Callable[[Point], None]:
        steps.clear()

        def hear(point: Point) -> None:
            steps.append(point.step)
            if len(steps) == count:
                how(training_child())

        return hear

    with pytest.raises(DraftRefusedError, match="status -9"):
        carry_out(run, small, end_after(10, psutil.Process.kill))
    assert carry_out(run, small, end_after(20, psutil.Process.terminate)) is False
    assert steps[0] == 1
    stopped = steps[-1]
    with pytest.raises(DraftRefusedError, match="status -9"):
        carry_out(run, small, end_after(10, psutil.Process.kill))
    assert steps[0] == stopped + 1
    assert carry_out(run, small, end_after(-1, psutil.Process.kill))
    assert steps[0] == stopped + 1
    weights = [(tmp_path / name / "draft" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    records = [
        json.loads((tmp_path / name / "draft" / "training.json").read_text()) for name in ("whole", "parts")
    ]
    assert records[0] == records[1]


def test_trained_draft_is_served(site, trained, tmp_path):
    """vLLM loads the head and accepts about as much of it as the training measured."""
    (revision,) = open_registry(site.settings, lambda: 0.0).revisions()
    draft = open_registry(site.settings, lambda: 0.0).weights(revision)
    with stock_worker(tmp_path / "worker.log", draft=draft, environment=ONE_ENGINE_PROCESS) as worker:
        for prompt in held_out_prompts(load_corpus(), count=12):
            complete(worker.url, prompt)
        accepted, drafts = (
            counter(worker.url, f"vllm:spec_decode_num_{what}_total")
            for what in ("accepted_tokens", "drafts")
        )
    length = 1 + accepted / drafts
    points = read_points(locate(site.settings).drafts / "runs" / "refresh" / "progress.jsonl")
    first = next(point.acceptance_length for point in points if point.acceptance_length)
    assert length > first + 0.1
    assert length == pytest.approx(revision.record.expected["all"].acceptance_length, rel=0.15)


def complete(url: str, prompt: str) -> None:
    body = {"model": "demo-coder", "prompt": prompt, "max_tokens": 48, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        response.read()


def counter(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        page = response.read().decode()
    return sum(
        float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    )


@pytest.mark.slow
def test_vllm_accepts_the_server_arguments():
    """Every flag of the server for hidden states exists and accepts its value."""
    setup = Setup(
        python=Path("/train/bin/python"),
        target=DEMO_TARGET,
        parent=None,
        layers=(2, 4, 5),
        depth=8,
        recipe=TrainingRecipe(steps=5),
        tokens=1000,
        scratch=Path("/dev/shm/x"),
        checkpoints=Path("/runs/x"),
        port=8123,
        gpus=2,
    )
    code = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
        "method = parsed.speculative_config['method']\n"
        "print(json.dumps([method, parsed.enable_chunked_prefill, parsed.host, parsed.port]))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, *server_command(setup)[3:]],
        env=offline_environment(process_environment()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr[-2000:]
    assert json.loads(said.stdout.splitlines()[-1]) == ["extract_hidden_states", False, "127.0.0.1", 8123]
