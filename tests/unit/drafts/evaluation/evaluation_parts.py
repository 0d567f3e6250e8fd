"""Samples, weights without files, and small programs as workers, for tests of evaluations."""

import json
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation.arms import Prompt, Served, choose_prompts
from appliance.drafts.evaluation.asking import CompletionClient
from appliance.drafts.evaluation.evaluating import Comparison, EvaluationSite, HeldOutData
from appliance.drafts.evaluation.evaluation_worker import EvaluationWorker
from appliance.drafts.harvest.sample import TrainingSample
from appliance.infra.settings import PoolSettings, WorkerSettings
from appliance.serving.devices import Device, DeviceKind
from appliance.serving.launch import LaunchPlan
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.supervise import free_port
from appliance.serving.weights import Weights
from appliance.serving.worker import Worker, WorkerId
from appliance.serving.worker_tls import WorkerTls
from tests.unit.drafts.evaluation.bare_report import DATASET
from tests.unit.drafts.evaluation.evaluated_worker import make_server

STARTER = ("EVALUATION_TESTS", str(os.getpid()))
"""Variable by which the processes that these tests start are told apart from those of parallel tests."""
PROGRAM = Path(__file__).with_name("evaluated_worker.py")
CONFIG = {"max_position_embeddings": 2048, "dtype": "float32"}
CPU = Device(kind=DeviceKind.CPU, count=1, bfloat16=False)


def digest_of(letter: str) -> str:
    return f"sha256:{letter * 64}"


def weights(letter: str) -> Weights:
    return Weights(path=Path("/models") / letter, config=CONFIG, tensors={}, digest=digest_of(letter))


def prompt(place: int = 0, **more: Any) -> Prompt:
    values = {
        "request_id": f"r{place}",
        "template": "chat-1",
        "context": "0-1k",
        "token_ids": (1, 2, 3, place),
        "seed": place,
        "salt": "00",
    }
    return Prompt(**{**values, **more})


def sample(place: int, *, prompt_tokens: int = 6, answer_tokens: int = 4, **more: Any) -> TrainingSample:
    dice = random.Random(place)
    values = {
        "request_id": f"request-{place}",
        "tenant": "acme",
        "template": f"chat-{place % 2}",
        "context": "0-1k" if place % 3 else "1k-2k",
        "token_ids": tuple(dice.randrange(1000) for _ in range(prompt_tokens + answer_tokens)),
        "loss_mask": (False,) * prompt_tokens + (True,) * answer_tokens,
        "salt": f"{place:032x}",
    }
    return TrainingSample(**{**values, **more})


def data(count: int) -> HeldOutData:
    chosen = choose_prompts(map(sample, range(count)), count=count, room=1000)
    return HeldOutData(digest=DATASET, chosen=chosen, missing=0)


TARGET, OLD, NEW = weights("a"), weights("b"), weights("c")
COMPARISON = Comparison(target=TARGET, candidate=NEW, incumbent=OLD, objections=())


@dataclass
class Programs:
    """A worker template that starts a small program for each arm, and records what it started."""

    scripts: dict[str, dict[str, Any]]
    """By digest of the draft; that of the target alone by the target's."""
    has_room: bool = True
    """Whether two fit into memory."""
    started: list[str] = field(default_factory=list)

    settings = WorkerSettings(device="cpu")
    device = CPU

    def __call__(self, **_given: Any) -> "Programs":
        return self

    def plan(self, served: Served, token_file: Path) -> LaunchPlan:
        digest = served.draft.digest if served.draft else served.target.digest
        self.started.append(digest)
        port = free_port("127.0.0.1")
        script = self.scripts.get(digest, {})
        return LaunchPlan(
            argv=(sys.executable, str(PROGRAM), str(port), json.dumps(script)),
            environment=dict([("PATH", os.environ["PATH"]), STARTER]),
            url=f"http://127.0.0.1:{port}",
            host="127.0.0.1",
            port=port,
            control_port=port,
            model="evaluated",
            drain_seconds=1,
            max_startup_seconds=60,
        )

    def dtype(self, _target: Weights) -> str:
        return "float32"

    def holds(self, *_given: object) -> bool:
        return self.has_room


@asynccontextmanager
async def in_thread(
    name: str, plan: LaunchPlan, *, token: str, max_tokens: int, logs: Path, say: Callable[[str], None]
) -> AsyncIterator[EvaluationWorker]:
    """Run the program in a thread of this process: it starts at once and cannot die."""
    server = make_server(plan.port, json.loads(plan.argv[-1]))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        async with (
            CompletionClient.open(
                url=plan.url, model=plan.model, max_tokens=max_tokens, token=token
            ) as client,
            SpeculationClient.open(token=token, tls=WorkerTls(PoolSettings())) as speculation,
        ):
            worker = Worker(worker_id=WorkerId(name), url=plan.url, control_port=plan.control_port)
            yield EvaluationWorker(worker=worker, client=client, speculation=speculation)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


TEMPLATE = Programs({})
"""What `site` starts workers by; the tests that start some put their own here."""


def site(directory: Path, say: Callable[[str], None] = lambda _line: None, **more: Any) -> EvaluationSite:
    ticks = iter(range(10**9))
    values = {
        "directory": directory,
        "template": TEMPLATE,
        "engine": "vllm 0.32.0",
        "available_bytes": 2**40,
        "margin": 0.02,
        "say": say,
        "clock": lambda: float(next(ticks)),
        "wall_clock": lambda: 1_800_000_000.0,
    }
    return EvaluationSite(**{**values, **more})
