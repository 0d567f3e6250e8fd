"""
Runs a training with speculators: its three processes, and their result.

Samples and process output are in clear in a private directory during the training (`scratch.py`).  After a
stop or a crash the same command resumes from the library's last checkpoint.
"""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance.drafts.lint.shape import default_aux_layers, read_shape
from appliance.drafts.training.head_shape import head_layers, text_config
from appliance.drafts.training.outcome import TrainingOutcome, write_outcome
from appliance.drafts.training.run_directory import RunDirectory
from appliance.drafts.training.speculators.commands import (
    HOST,
    VERSION,
    Setup,
    prepare_command,
    private_places,
    server_command,
    train_command,
)
from appliance.drafts.training.speculators.convert import convert_draft, speculators_config
from appliance.drafts.training.speculators.processes import POLL_SECONDS, Processes, processes_of
from appliance.drafts.training.speculators.scratch import scratch_directory, write_samples
from appliance.drafts.training.training_job import Job, TrainingSet, read_samples
from appliance.drafts.training.windows import Text, TextWindow, plan_epoch
from appliance.errors import ConfigurationError, DraftRefusedError
from appliance.serving.devices import detect_hardware
from appliance.serving.weights import Weights, inspect_weights
from appliance.sovereignty.environment import offline_environment

START_SECONDS = 1800.0
INSTALL = "appliance/drafts/training/speculators/requirements.txt"


def train_with_speculators(
    job: Job,
    run: RunDirectory,
    lines: Iterable[str],
    *,
    python: Path,
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:
    """False if it was stopped; `run` is locked, `lines` are as for the built-in backend."""
    if job.recipe.steps is None:
        raise ConfigurationError("the backend speculators needs --steps, not --minutes")
    python, offline = python.absolute(), offline_environment(environment)
    _check_version(python, offline)
    given = read_samples(lines)
    run.claim(job, given)
    target = inspect_weights(Path(job.target))
    with (
        scratch_directory(run) as scratch,
        (scratch / "log.txt").open("x", encoding="utf-8") as log,
        processes_of(log, {**offline, **private_places(scratch)}) as processes,
    ):
        setup = _set_up(job, run, given, target, scratch, python)
        say(f"{setup.tokens} tokens, hidden states from a server on port {setup.port}, log in {log.name}")
        if not _run_processes(setup, processes, say):
            return False
    take_over(job, run, given, target)
    return True


def _run_processes(setup: Setup, processes: Processes, say: Callable[[str], None]) -> bool:
    say("packing the samples")
    if not processes.finish(processes.start(prepare_command(setup), ()), "packing the samples"):
        return False
    say("starting the server for hidden states")
    server = processes.start(server_command(setup), setup.serving_gpus)
    if not _wait_for(server, setup.port, processes):
        return False
    say("training")
    trainer = processes.start(train_command(setup), setup.training_gpus)
    return processes.finish(trainer, "speculators")


def _set_up(
    job: Job, run: RunDirectory, given: TrainingSet, target: Weights, scratch: Path, python: Path
) -> Setup:
    recipe = job.recipe
    depth = int(text_config(target.config)["num_hidden_layers"])
    parent, layers = None, default_aux_layers(depth)
    if job.parent is not None:
        parent = run.path / "parent"
        shutil.rmtree(parent, ignore_errors=True)
        convert_draft(Path(job.parent), target, parent)
        layers = head_layers(inspect_weights(Path(job.parent)).config, target.config)
    texts = given.training
    steps = plan_epoch(texts, batch=recipe.batch, window=recipe.window, seed=recipe.seed, epoch=0)
    rows = [
        {
            "input_ids": list(texts[window.text].token_ids[window.start : window.stop]),
            "loss_mask": row_mask(texts[window.text], window),
        }
        for step in steps
        for window in step
    ]
    if not rows:
        raise DraftRefusedError("no sample has an answer to learn from: harvest more")
    setup = Setup(
        python=python,
        target=target.path,
        parent=parent,
        layers=layers,
        depth=depth,
        recipe=recipe,
        tokens=sum(len(row["input_ids"]) for row in rows),
        scratch=scratch,
        checkpoints=run.path / "checkpoints",
        port=_free_port(),
        gpus=detect_hardware().gpus,
    )
    write_samples(setup.samples, (json.dumps(row) + "\n" for row in rows))
    for path in (setup.hidden_states, *map(Path, private_places(scratch).values())):
        path.mkdir(mode=0o700, exist_ok=True)
    return setup


def row_mask(text: Text, window: TextWindow) -> list[int]:
    """
    A window's mask in the library's convention: for each token, whether the next one is predicted.

    Its `shift_batch` pairs a token's mask with the prediction made from that token; an unshifted mask would
    train on the token after each answer.
    """
    counted = [
        int(text.loss_mask[place] and place >= window.first) for place in range(window.start, window.stop)
    ]
    return [*counted[1:], 0]


def _check_version(python: Path, environment: Mapping[str, str]) -> None:
    code = "import importlib.metadata as m; print(m.version('speculators')); m.version('vllm')"
    try:
        versions = subprocess.run(  # noqa: S603 - an interpreter the operator named
            [str(python), "-c", code], env=dict(environment), capture_output=True, text=True, check=False
        ).stdout.split()
    except OSError as error:
        raise ConfigurationError(f"cannot run {python}: {error.strerror}") from error
    if versions != [VERSION]:
        found = f"speculators {versions[0]}" if versions else "no speculators, or no vLLM"
        raise ConfigurationError(
            f"{python} has {found}, and needs {VERSION}: "
            f"install {INSTALL} in an environment and give its interpreter with --python"
        )


def _wait_for(server: subprocess.Popen[bytes], port: int, processes: Processes) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while not processes.stopped:
        with (
            suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5),
        ):
            return True
        if server.poll() is not None or time.monotonic() > deadline:
            raise DraftRefusedError(f"the server for hidden states did not start{processes.cause()}")
        time.sleep(POLL_SECONDS)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: Any = probe.getsockname()[1]
    return int(port)


def take_over(job: Job, run: RunDirectory, given: TrainingSet, target: Weights) -> None:
    last = last_checkpoint(run.path / "checkpoints")
    config = speculators_config(inspect_weights(last).config, target)
    shape = read_shape(config)
    outcome = TrainingOutcome(
        fc_norm=shape.flag("fc_norm"),
        norm_output=shape.flag("norm_output"),
        norm_before_fc=shape.norm_before_fc,
        aux_layers=head_layers(config, target.config),
        tool=f"speculators {VERSION}",
        longest=min(job.recipe.window, max(len(sample.token_ids) for sample in given.training)),
        steps=job.recipe.steps or 0,
        used=given.training,
        details={"optimizer": "AdamW", "checkpoint": last.name},
    )
    with run.assembled() as directory:
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(last / "model.safetensors", directory / "model.safetensors")
        write_outcome(directory, job, given, outcome, ())


def last_checkpoint(directory: Path) -> Path:
    found = [path for path in directory.glob("*") if path.name.isdecimal() and not path.is_symlink()]
    whole = [path for path in found if (path / "model.safetensors").exists()]
    if not whole:
        raise DraftRefusedError(f"speculators left no checkpoint in {directory}: train longer")
    return max(whole, key=lambda path: int(path.name))
