"""`appliance draft compare` on stand-ins for workers, in a time that only they advance."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from appliance.cli.draft import compare as command
from appliance.cli.draft import evaluate
from appliance.drafts.comparison import comparing
from appliance.errors import ConfigurationError, WorkerFailedError, WorkerStartError
from appliance.infra.settings import DEMO_DRAFT
from appliance.speculation.values import EngineReading, SpecDecodeCounters

CHOICES = (0, 1, 2)
SECRET = "Frau Muster, geboren"
ACCEPTED = {"eagle3": 0.8, "ngram": 0.1}
"""Of each draft token; a step with drafts takes a tenth more for each."""


@dataclass
class Workers:
    """What ran, and the time."""

    fails: dict[str, Exception] = field(default_factory=dict)
    """By method; raised at a start, or by a request if it is a `WorkerFailedError`."""
    now: float = 0.0
    started: list[str] = field(default_factory=list)
    running: int = 0
    asked: list[tuple[str, dict]] = field(default_factory=list)

    @asynccontextmanager
    async def run(self, name, plan, *, token, max_tokens, logs, say):
        assert self.running == 0, "two workers at a time"
        if name in self.fails and not isinstance(self.fails[name], WorkerFailedError):
            raise self.fails[name]
        assert f'"method":"{name}"' in " ".join(plan.argv)
        self.started.append(name)
        self.running += 1
        try:
            yield StandIn(self, name, max_tokens)
        finally:
            self.running -= 1


class StandIn:
    """An `EvaluationWorker` that answers as fast as its drafts are good."""

    def __init__(self, workers: Workers, name: str, max_tokens: int) -> None:
        self.client = SimpleNamespace(post=self.post, model="evaluated", max_tokens=max_tokens)
        self._workers, self._name = workers, name
        self._k, self._drafts, self._accepted = 0, 0, 0

    async def set_draft_tokens(self, draft_tokens: int) -> tuple[EngineReading, str]:
        if draft_tokens not in CHOICES:
            return self._reading(), f"the worker cannot draft {draft_tokens} tokens"
        self._k = draft_tokens
        return self._reading(), ""

    async def read_since(self, _before: EngineReading) -> EngineReading:
        return self._reading()

    async def post(self, path: str, body: dict) -> str:
        workers = self._workers
        workers.asked.append((path, body))
        if self._name in workers.fails:
            raise workers.fails[self._name]
        steps = 100
        accepted = round(steps * self._k * ACCEPTED[self._name])
        workers.now += steps * (1 + 0.2 * self._k)
        self._drafts += steps if self._k else 0
        self._accepted += accepted
        return json.dumps({"usage": {"completion_tokens": steps + accepted}, "content": SECRET})

    def _reading(self) -> EngineReading:
        counters = SpecDecodeCounters(
            drafts=self._drafts, draft_tokens=0, accepted_tokens=self._accepted, accepted_per_position=()
        )
        return EngineReading(controllable=True, epoch="1", choices=CHOICES, drafting=counters)


@pytest.fixture
def workers(monkeypatch) -> Workers:
    made = Workers()
    monkeypatch.setattr(comparing, "run_worker", made.run)
    monkeypatch.setattr(evaluate, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def invoke(tmp_path, workers):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"{SECRET} {number}"}]} for number in range(8)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    config = tmp_path / "settings.yaml"
    config.write_text(json.dumps({"worker": {"device": "cpu", "draft_tokens": 2}}))

    def run(*words: str):
        app = typer.Typer()
        app.command()(command.COMMANDS["compare"])
        options = ["--config", str(config), "--data", str(tmp_path / "data"), "--rounds", "5"]
        return CliRunner().invoke(app, [str(prompts), *options, *words])

    return run


TWO = ("--method", "eagle3", "--method", "ngram")


def test_methods_are_measured_one_after_the_other_and_the_better_is_recommended(invoke, workers, tmp_path):
    result = invoke(*TWO)
    assert result.exit_code == 0, (result.output, result.exception)
    assert workers.started == ["eagle3", "ngram"]
    lines = [line.split() for line in result.stdout.splitlines()]
    # 2.6 tokens a step that takes 1.4 times as long; at one K of n-gram 1.1 tokens and 1.2 times.
    assert ["eagle3", "1", "2", "1.9", "1.857", "(1.857", "to", "1.857)", "2.60"] in lines
    assert ["ngram", "8", "1", "0.9", "0.917", "(0.917", "to", "0.917)", "1.10"] in lines
    assert result.stdout.splitlines()[-4:] == [
        "worker:", "  method: eagle3", f"  draft: {DEMO_DRAFT}", "  draft_tokens: 2",
    ]  # fmt: skip
    assert "ngram: round 5 of 5 done; about 0 s left" in result.stderr
    assert not list(tmp_path.glob("data/**/control.token"))
    assert not (tmp_path / "data" / "audit.db").exists()


def test_no_content_is_printed_or_kept(invoke, tmp_path, workers):
    workers.fails["ngram"] = WorkerFailedError("the worker answered 400")
    result = invoke(*TWO)
    assert SECRET not in result.output + result.stderr
    assert not [path for path in tmp_path.glob("data/**/*") if path.is_file() and SECRET in path.read_text()]


def test_every_cell_of_a_round_asks_the_same_prompts_under_its_own_salt(invoke, workers):
    """A prefix that one number cached would spare the next its prefill."""
    invoke("--method", "ngram", "--concurrency", "2")
    cells: dict[str, list[str]] = {}
    for path, body in workers.asked:
        assert (path, body["model"], body["max_tokens"]) == ("/v1/chat/completions", "evaluated", 128)
        cells.setdefault(body["cache_salt"], []).append(body["messages"][0]["content"])
    warm_up, *measured = cells.values()
    assert len(warm_up) == 8
    assert len(measured) == 5 * len(CHOICES)
    for number in range(5):
        turns = measured[number * len(CHOICES) : (number + 1) * len(CHOICES)]
        assert all(turn == turns[0] for turn in turns)


def test_json_has_the_figures_of_the_table(invoke, workers):
    workers.fails["ngram"] = WorkerStartError("no room")
    result = invoke(*TWO, "--json", "--concurrency", "1")
    found = json.loads(result.stdout)
    first, second = found["methods"]
    assert second == {"method": "ngram", "cells": [], "problem": "no room"}
    assert [cell["draft_tokens"] for cell in first["cells"]] == [0, 1, 2]
    assert first["cells"][2]["ratio"]["low"] == pytest.approx(2.6 / 1.4)
    assert found["recommendation"]["method"] == "eagle3"


def test_method_that_cannot_be_measured_does_not_end_the_others(invoke, workers, tmp_path):
    """A missing package, a draft that lint refuses, a start that fails, a request that is refused."""
    workers.fails["eagle3"] = WorkerFailedError("the worker answered 400")
    (tmp_path / "empty").mkdir()
    words = [word for name in ("suffix", "mtp", "eagle3", "ngram") for word in ("--method", name)]
    result = invoke(*words, "--method", f"draft_model={tmp_path / 'empty'}")
    assert result.exit_code == 0, result.exception
    problems = dict(
        line.split(": not measured: ") for line in result.stdout.splitlines() if "not measured" in line
    )
    assert sorted(problems) == ["draft_model", "eagle3", "mtp", "suffix"]
    assert "arctic-inference" in problems["suffix"]
    assert "prediction layers" in problems["mtp"]
    assert problems["eagle3"].startswith("line ")
    assert "config.json" in problems["draft_model"]
    assert workers.started == ["eagle3", "ngram"]
    assert result.stdout.endswith("worker:\n  method: none\n")


def test_without_room_no_worker_starts(invoke, workers, monkeypatch):
    monkeypatch.setattr(evaluate, "available_memory", lambda _text: 2**30)
    result = invoke(*TWO)
    assert result.exit_code == 1
    assert result.stdout.count("not enough free memory") == 2
    assert workers.started == []


def test_too_few_prompts_for_the_concurrency_are_refused_first(invoke, workers):
    result = invoke("--concurrency", "9")
    assert isinstance(result.exception, ConfigurationError)
    assert workers.started == []


def test_interruption_leaves_no_worker_and_no_token(invoke, workers, monkeypatch, tmp_path):
    """The signal's cancellation comes in the middle of a round."""
    asked = StandIn.post

    async def interrupted(self, path, body):
        if len(workers.asked) == 20:
            asyncio.current_task().get_loop().call_soon(cancel.pop())
            await asyncio.Event().wait()
        return await asked(self, path, body)

    cancel: list = []
    compare = comparing.MethodRunner.compare

    async def compare_in_task(self, candidates):
        cancel.append(asyncio.current_task().cancel)
        return await compare(self, candidates)

    monkeypatch.setattr(StandIn, "post", interrupted)
    monkeypatch.setattr(comparing.MethodRunner, "compare", compare_in_task)
    result = invoke(*TWO, "--concurrency", "1")
    assert result.exit_code == 130, (result.output, result.exception)
    assert (workers.started, workers.running) == (["eagle3"], 0)
    assert result.stderr.endswith("stopped; no worker is left\n")
    assert not list(tmp_path.glob("data/**/control.token"))
