"""The GPU benchmark without a GPU: which step comes next, what workers are asked, what the report says."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from appliance.serving.launch import LaunchPlan
from appliance.serving.plugin_client import parse_reading
from appliance.serving.vllm.scheduler_control import SchedulerControl
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import appliances, workers
from benchmarks.gpu.appliances import paired_options, speeds_of
from benchmarks.gpu.report import costs_of, plots, report
from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.gpu.steps import State, Step, next_step
from benchmarks.speculation.__main__ import parse
from tests.fake_engine import FakeClock, FakeScheduler

STEPS = tuple(
    Step(name=name, run=lambda _part: None, needs=needs)
    for name, needs in {"check": (), "target": ("check",), "draft": ("target",), "costs": ("check",)}.items()
)


@pytest.mark.parametrize(
    ("done", "failed", "following"),
    [
        ((), (), "check"),
        (("check",), (), "target"),
        (("check", "target"), (), "draft"),
        (("check",), ("target",), "costs"),
        (("check", "target", "draft", "costs"), (), None),
        ((), ("check",), None),
    ],
)
def test_next_step_waits_for_those_it_needs(done, failed, following):
    step = next_step(STEPS, done, failed)
    assert (step and step.name) == following


def test_state_resumes_where_an_earlier_call_ended(tmp_path):
    State(tmp_path / "s").fail("target", "no memory")
    State(tmp_path / "s").finish("check", {"seconds": 1.0})
    state = State(tmp_path / "s")
    assert state.results(STEPS) == {"check": {"seconds": 1.0}}
    assert state.failures(STEPS) == {"target": "no memory"}
    state.finish("target", {"seconds": 2.0})
    assert list(state.results(STEPS)) == ["check", "target"]
    assert not state.failures(STEPS)


class Slices:
    """Stands for processes of steps: each needs some slices, or fails."""

    def __init__(self, monkeypatch, **needed: int) -> None:
        self.needed, self.ran = needed, []
        monkeypatch.setattr(gpu, "failure_of", self.run)

    def run(self, step: Step, state: State) -> str:
        self.ran.append(step.name)
        if self.needed[step.name] < 0:
            return "it failed"
        if self.ran.count(step.name) == self.needed[step.name]:
            state.finish(step.name, {})
        return ""


def test_steps_run_in_slices_and_a_failed_one_stops_only_those_that_need_it(tmp_path, monkeypatch):
    slices = Slices(monkeypatch, check=1, target=-1, draft=1, costs=3)
    gpu.run_all(STEPS, State(tmp_path), None)
    assert slices.ran == ["check", "target", "costs", "costs", "costs"]
    slices = Slices(monkeypatch, check=1, target=2, draft=1, costs=1)
    gpu.run_all(STEPS, State(tmp_path), None)
    assert slices.ran == ["target", "target", "draft"]


def test_no_step_starts_that_might_not_end_in_time(tmp_path, monkeypatch):
    slices = Slices(monkeypatch, check=1)
    gpu.run_all(STEPS, State(tmp_path), gpu.time.monotonic() + gpu.LIMIT_SECONDS - 1)
    assert not slices.ran


def test_a_step_over_its_limit_is_ended_and_its_output_is_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny"])
    monkeypatch.setattr(gpu.sys, "executable", "/bin/sh")
    script = 'echo "$@"; exec sleep 600'
    popen = gpu.subprocess.Popen
    monkeypatch.setattr(
        gpu.subprocess, "Popen", lambda command, **more: popen([command[0], "-c", script, *command], **more)
    )
    reason = gpu.failure_of(STEPS[0], State(tmp_path))
    assert reason.splitlines() == ["-m benchmarks.gpu --tiny --step check", "it took more than 0 seconds"]


class Engine:
    """A worker whose scheduler obeys its table; a step takes 10 ms and as much for each draft token."""

    def __init__(self) -> None:
        self.worker = None
        self.speculation = self.client = self
        self.scheduler, self.clock, self.names, self.steps = FakeScheduler(), FakeClock(), count(), 0
        self.control = SchedulerControl(self.scheduler, self.clock, {})

    async def read(self, _worker, _seconds):
        return parse_reading(200, self.control.command("{}", "fake"))

    async def apply(self, _worker, command, _seconds):
        return parse_reading(200, self.control.command(json.dumps(command.body()), "fake"))

    async def ask(self, _prompt, _mode):
        name, until = next(self.names), self.steps + 20
        self.scheduler.add(name)
        try:
            while self.steps < until:  # noqa: ASYNC110 - the engine's steps are its clock
                await asyncio.sleep(0)
        finally:
            self.scheduler.finish(name)

    async def decode(self):
        while True:
            if self.scheduler.prompts:
                step = self.scheduler.schedule()
                self.clock.advance(0.01 * (1 + step.num_spec_tokens_to_schedule))
                self.scheduler.update_from_output(step, 1)
                self.steps += 1
            await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self):
        task = asyncio.create_task(self.decode())
        yield self
        task.cancel()


PROMPTS = workers.prompts_of(iter([(1, 2, 3)]))


@pytest.mark.parametrize("k", [0, 1, 3])
async def test_a_worker_that_follows_its_table_is_told_from_one_that_does_not(k):
    async with Engine().running() as engine:
        check = await workers.check_table(engine, k, PROMPTS)
    assert workers.follows(check)
    assert check["acceptance_length"] == (2.0 if k else 1.0)
    assert not workers.follows({**check, "steps": {**check["steps"], "2": 1}})
    assert not workers.follows({**check, "drafts": 0 if k else 5})
    assert not workers.follows({**check, "steps": {}})


async def test_costs_are_those_of_steps_with_all_requests_and_the_tables_k(monkeypatch):
    monkeypatch.setattr(workers, "SETTLE_SECONDS", 0.0)
    sizes = replace(TINY, measured_seconds=0.02)
    async with Engine().running() as engine:
        rows = [await workers.cost(engine, PROMPTS, sizes, concurrency, 3) for concurrency in (1, 4)]
    for row, concurrency in zip(rows, (1, 4), strict=True):
        assert row["steps"] >= workers.ENOUGH_STEPS
        assert row["seconds"] == pytest.approx(0.04)
        assert row["batch"] == pytest.approx(concurrency, rel=0.3)
        assert row["tokens"] == pytest.approx(2 * row["batch"])


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Steps that start a worker get this one; their slice, and the command lines of the workers."""
    plans = []

    def serving(plan, _token, logs, _tokens):
        plans.append(plan)
        logs.mkdir(parents=True)
        (logs / "worker.log").write_text(
            workers.V2_SAYS if plan.environment.get(workers.RUNNER) == "1" else ""
        )
        return Engine().running()

    monkeypatch.setattr(workers, "serving", serving)
    monkeypatch.setattr(workers, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(workers, "load_corpus", lambda: None)
    monkeypatch.setattr(workers, "held_out_prompts", lambda _corpus, count: ["def f():"] * count)
    return SimpleNamespace(state=tmp_path), plans


def test_plugin_step_tries_every_table_and_names_the_runner(served):
    part, plans = served
    found = workers.plugin(TINY, part, runner=1)
    assert [check["draft_tokens"] for check in found["tables"]] == [0, 1, 3]
    assert all(map(workers.follows, found["tables"]))
    assert (found["controllable"], found["runner"]) == (True, 1)
    assert plans[0].environment[workers.RUNNER] == "0"
    assert "skipped" in workers.plugin(TINY, part, runner=2)
    json.dumps(found)


def test_costs_step_measures_every_k_at_every_concurrency_without_weights(served):
    part, plans = served
    sizes = replace(TINY, measured_seconds=0.01)
    found = workers.costs(sizes, part, shape=sizes.shapes[0], depth=4)
    assert [(row["concurrency"], row["draft_tokens"]) for row in found["costs"]] == [
        (c, k) for c in (1, 4) for k in (0, 1, 3)
    ]
    assert plans[0].argv[-2:] == ("--load-format", "dummy")
    assert found["synthetic"] is None, "the CPU build ends at the first step with synthetic acceptance"
    assert "synthetic" not in " ".join(plans[0].argv)
    json.dumps(found)


def test_synthetic_acceptance_changes_nothing_else_of_the_plan():
    speculation = {"method": "eagle3", "num_speculative_tokens": 3}
    argv = ("python", "--speculative-config", json.dumps(speculation), "--port", "1")
    plan = LaunchPlan(
        argv=argv,
        environment={},
        url="",
        host="",
        port=1,
        control_port=2,
        model="m",
        drain_seconds=1,
        max_startup_seconds=1,
    )
    changed = workers.with_synthetic_acceptance(plan, 2.5).argv
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    assert json.loads(changed[2]) == {**speculation, **synthetic}
    assert (*changed[:2], *changed[3:]) == (*argv[:2], *argv[3:])


def test_paired_benchmark_takes_its_options(tmp_path):
    options = parse(list(paired_options(FULL, tmp_path, tmp_path / "paired.jsonl")))
    assert options.concurrency == [1, 4, 16, 64, 256]
    assert [options.pairs, options.state] == [FULL.pairs, tmp_path / "paired.jsonl"]


def test_paired_step_needs_further_sittings_until_all_pairs_are_there(tmp_path, monkeypatch):
    sizes = replace(TINY, concurrency=(1, 4), pairs=2)
    segment = {"mode": "K=0", "tokens": 6, "seconds": 2.0}

    def sit(command, *, check, env):
        """Three of four pairs in the first sitting; a line of the file is its head."""
        rows = parse(list(command[3:])).state
        lines = rows.read_text().splitlines() if rows.exists() else ["{}"]
        pairs = [{"cell": {"concurrency": c}, "segments": [segment]} for c in (1, 1, 4, 4)]
        left = pairs[len(lines) - 1 :][:3]
        rows.write_text("".join(line + "\n" for line in [*lines, *map(json.dumps, left)]))
        rows.with_suffix(".md").write_text("# Pairs")
        assert check
        assert env["APPLIANCE_WORKER__MAX_NUM_SEQS"] == "6"

    monkeypatch.setattr(appliances.subprocess, "run", sit)
    part = SimpleNamespace(state=tmp_path)
    assert appliances.paired(sizes, part) is None
    found = appliances.paired(sizes, part)
    assert found["report"] == "# Pairs"
    assert [row["speed"] for row in found["speeds"]] == [3.0, 3.0]


def cost_run(shape: str, layers: int, depth: int, *seconds: float) -> dict:
    rows = [
        {"concurrency": 4, "draft_tokens": k, "steps": 9, "seconds": taken} for k, taken in enumerate(seconds)
    ]
    found = {"shape": shape, "layers": layers, "depth": depth, "synthetic": 2.5, "costs": rows}
    return {"seconds": 60.0, "machine": MACHINE, "found": found}


MACHINE = {
    "hardware": "1 x H",
    "commit": "abc",
    "has_changes": False,
    "date": "2026-11-25",
    "command": "python -m benchmarks.gpu",
}


def test_costs_of_a_deeper_model_are_linear_in_two_depths():
    """Each layer takes 1 ms at K=0 and 2 ms at K=1, all else 5 ms."""
    runs = {
        f"costs-70b-{depth}": cost_run("70b", 80, depth, 0.005 + 0.001 * depth, 0.005 + 0.002 * depth)
        for depth in (20, 10)
    }
    _run, seconds = costs_of(runs)["70b"]
    assert seconds == pytest.approx({(4, 0): 0.085, (4, 1): 0.165})
    assert not costs_of({"costs-70b-10": runs["costs-70b-10"]})
    _run, seconds = costs_of({"costs-8b-32": cost_run("8b", 32, 32, 0.01)})["8b"]
    assert seconds == {(4, 0): 0.01}


def test_speeds_are_medians_by_concurrency_and_mode():
    def row(*tokens: int) -> dict:
        segments = [{"mode": f"K={k}", "tokens": many, "seconds": 2.0} for k, many in enumerate(tokens)]
        return {"cell": {"concurrency": 4}, "segments": segments}

    speeds = speeds_of([row(10, 40), row(20, 60), row(90, 50)])
    assert [(each["mode"], each["speed"]) for each in speeds] == [("K=0", 10.0), ("K=1", 25.0)]


def test_report_shows_what_was_found_and_what_was_not():
    steps = gpu.steps_of(FULL)
    results = {
        "check": {"found": {"vllm": "0.32.0", "torch": "2.13.0"}},
        "plugin-v1": {
            "found": {
                "controllable": True,
                "problems": [],
                "runner": 2,
                "tables": [
                    {"draft_tokens": 0, "steps": {"0": 50}, "drafts": 0, "acceptance_length": 1.0},
                    {"draft_tokens": 3, "steps": {"3": 40, "0": 2}, "drafts": 40, "acceptance_length": 2.7},
                ],
            }
        },
        "plugin-v2": {"found": {"skipped": "no GPU"}},
        "drill": {
            "found": {
                "verdict": "failed",
                "problems": ["the stage recovered was not reached"],
                "seconds_to_fallback": 3.25,
                "seconds_to_recovery": None,
            }
        },
        "paired": {
            "found": {
                "report": "# Pairs\n\nshown",
                "speeds": [
                    {"concurrency": c, "mode": mode, "speed": speed}
                    for c in (1, 4)
                    for mode, speed in (("K=0", 10.0), ("adaptive", 15.0))
                ],
            }
        },
        "costs-8b-32": cost_run("8b", 32, 32, 0.010, 0.012),
    }
    results = {name: {"seconds": 60.0, "machine": MACHINE, **result} for name, result in results.items()}
    text = report(steps, results, {"target": "out of memory"})
    for line in (
        "| `plugin-v2` | not run: no GPU | 60 |",
        "| `target` | failed |  |",
        "| `draft` | not run |  |",
        "V1 model runner: the plugin controls the worker, but the worker ran on V2.",
        "| K=0 | yes | K=0: 50 |  |",
        "| K=3 | **no** | K=3: 40, K=0: 2 | 2.70 |",
        "- the stage recovered was not reached",
        "Fallback after 3.2 s.",
        "## Pairs",
        "| 4 | 10.00 | 12.00 | 1.20 |",
        "out of memory",
    ):
        assert line in text.splitlines(), f"{line} is not in:\n{text}"
    drawn = plots(results)
    assert set(drawn) == {"paired.svg", "step-costs.svg"}
    lines = ET.fromstring(drawn["paired.svg"]).iter("{http://www.w3.org/2000/svg}polyline")
    assert [line.get("points") for line in lines], drawn["paired.svg"]


def test_report_without_results_says_so():
    text = report(gpu.steps_of(TINY), {}, {})
    assert text.count("| not run |") == len(gpu.steps_of(TINY))
    assert plots({}) == {}


def test_random_weights_need_no_file(tmp_path):
    """Every id of the vocabulary has a text, and the draft fits its target."""
    shape = TINY.shapes[0]
    target, draft = workers.write_random(shape, 6, tmp_path)
    assert target.config["num_hidden_layers"] == 6
    assert draft.config["hidden_size"] == shape.size.width
    vocabulary = json.loads((target.path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(shape.size.vocabulary))


def test_the_worker_of_a_step_runs_on_the_wanted_model_runner(tmp_path):
    shape, part = TINY.shapes[0], SimpleNamespace(state=tmp_path)
    pair = workers.write_random(shape, 6, tmp_path)
    plan, token = workers.planned(TINY, part, *pair, environment={workers.RUNNER: "1"}, extra=("--seed", "3"))
    assert plan.environment[workers.RUNNER] == "1"
    assert (tmp_path / "control.token").read_text() == token
    assert plan.argv[-2:] == ("--seed", "3")
