"""
Suspect answers of real workers: of a prompt that makes the model repeat itself, and of damaged weights.

Two workers serve one model in turn; the one whose turn it is not is stopped as a process.
"""

import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from demo.process import ApplianceProcess
from demo.training.corpus import held_out_prompts, load_corpus
from tests.integration.caller import outcomes
from tests.integration.speculation_admin import QUIET, Admin, metric, wait_for
from tests.integration.worker_process import RunningWorker, WorkerProcess, descendants

pytestmark = [pytest.mark.worker, pytest.mark.slow]

ORDINARY, FAULTY, CLIENTS, TOKENS = 320, 20, 8, 64
LOOP = "import os\n" * 40
"""The model continues it for ever."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningWorker]]:
    """A worker, and another one with one damaged weight tensor of its target."""
    directory = tmp_path_factory.mktemp("suspect")
    (directory / "token").write_text("a shared secret\n", encoding="utf-8")
    (directory / "token").chmod(0o600)
    environment = {
        **QUIET,
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(directory / "token"),
        "APPLIANCE_WORKER__SERVED_NAME": "demo-coder",
    }

    def worker(name: str, target: Path) -> WorkerProcess:
        arguments = ("--model", str(target), "--draft", str(DEMO_DRAFT))
        return WorkerProcess(directory / name, *arguments, environment=environment)

    damaged = shutil.copytree(DEMO_TARGET, directory / "damaged-target")
    file = next(damaged.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("mlp.down_proj.weight"))
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with worker("sound", DEMO_TARGET) as sound, worker("damaged", damaged) as other:
        yield {"sound": sound, "damaged": other}


@pytest.fixture(scope="module")
def gateway(workers: dict[str, RunningWorker], tmp_path_factory: pytest.TempPathFactory):
    data = tmp_path_factory.mktemp("gateway") / "data"
    token = Path(workers["sound"]._log).parent / "token"
    environment = {
        **QUIET,
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(token),
        "APPLIANCE_POOL__URLS": json.dumps([worker.url for worker in workers.values()]),
    }
    with ApplianceProcess("gateway", data=data, environment=environment) as process:
        yield process


@contextmanager
def only(process: ApplianceProcess, serving: RunningWorker, stopped: RunningWorker) -> Iterator[None]:
    """Requests reach one worker; the other one is stopped as a process."""
    pids = [stopped.process.pid, *descendants(stopped.process.pid)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        healths = {serving: True, stopped: False}
        wait_for(
            lambda: all(is_healthy(process, each) is health for each, health in healths.items()), seconds=90
        )
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def is_healthy(process: ApplianceProcess, worker: RunningWorker) -> bool:
    return bool(Admin(process).worker(worker.url.removeprefix("http://"))["healthy"])


def code() -> Callable[[], str]:
    prompts = cycle(held_out_prompts(load_corpus(), count=64))
    return lambda: next(prompts)


def ask(process: ApplianceProcess, prompts: Callable[[], str], number: int) -> list[str | None]:
    """What the log says of each of so many answers."""
    before = len(outcomes(process.data))

    def send(prompt: str) -> None:
        body = {"model": "demo-coder", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
        request = urllib.request.Request(
            process.url + "/v1/completions",
            # At a higher temperature the demo draft does not pay, so that there would be none.
            data=json.dumps({**body, "temperature": 0}).encode(),
            headers={"Authorization": f"Bearer {process.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            json.load(response)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(send, (prompts() for _ in range(number))))
    return [entry.get("answer_suspect") for entry in outcomes(process.data)[before:]]


def test_loops_and_damaged_weights_are_found_within_twenty_answers(gateway, workers):
    sound, damaged = workers["sound"], workers["damaged"]

    def counted(suspicion: str, worker: RunningWorker) -> float:
        labels = {"model": "demo-coder", "worker": worker.url.removeprefix("http://"), "suspicion": suspicion}
        return metric(gateway, "appliance_suspect_answers_total", **labels)

    with only(gateway, sound, damaged):
        ordinary = ask(gateway, code(), ORDINARY)
        assert set(ordinary) == {None}, ordinary
        loops = ask(gateway, lambda: LOOP, FAULTY)
        assert set(loops) == {None, "high"}, loops
        assert counted("high", sound) == loops.count("high")
        assert set(ask(gateway, code(), CLIENTS)) == {None}
    with only(gateway, damaged, sound):
        garbled = ask(gateway, code(), FAULTY)
        assert set(garbled) == {None, "low"}, garbled
        assert (counted("low", damaged), counted("low", sound)) == (garbled.count("low"), 0)
