"""What it measures in which order, what it counts, and when it says that something is shown."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.evaluation.intervals import percentile
from appliance.infra.settings import MonitorSettings
from appliance.serving.worker import Worker, WorkerId
from appliance.speculation.state import MonitorState
from appliance.speculation.values import (
    Decision,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    StepCounters,
)
from benchmarks.speculation import conductor as conductor_module
from benchmarks.speculation import reaction, target_alone
from benchmarks.speculation.appliances import follows, order
from benchmarks.speculation.bench import Bench, Segment
from benchmarks.speculation.conductor import Conductor, without
from benchmarks.speculation.hindsight import lost_tokens, medians_of, reaction_seconds, right_of
from benchmarks.speculation.load import BenchmarkError, Stream, Target, completion_tokens, length_of
from benchmarks.speculation.paired import Round, markdown, parse_round, settle_cost
from benchmarks.speculation.plan import ADAPTIVE, Cell, Kind, Mode, Plan, fixed, order_of
from benchmarks.speculation.reaction import Change, courses, parse_change, remaining
from benchmarks.speculation.record import accepted_of
from benchmarks.speculation.records import Records
from benchmarks.speculation.traffic import (
    Prompt,
    Traffic,
    fitted_characters,
    long_texts,
    prompts_of,
    traffic_of,
)
from benchmarks.speculation.verdicts import Verdict, compare
from demo.training.corpus import Corpus
from tests.fakes import until

CELL = Cell(kind=Kind.CODE, concurrency=4)
K0, K1, K3 = map(fixed, (0, 1, 3))
MODES = (ADAPTIVE, K0, K1, K3)
CORPUS = Corpus(
    training=[],
    held_out=["".join(f"def f{n}():\n    return {n}\n" for n in range(at, at + 2000)) for at in (0, 5000)],
    dialogues=[],
)
OWN_KINDS = [kind for kind in Kind if kind not in (Kind.LONG, Kind.TURNS)]


# The order


@given(st.integers(0, 1000))
def test_a_round_measures_every_mode_once_in_an_order_that_can_be_repeated(number: int):
    ordered = order_of(MODES, CELL, number)
    assert sorted(mode.name for mode in ordered) == sorted(mode.name for mode in MODES)
    assert ordered == order_of(MODES, CELL, number)


def test_no_mode_always_comes_first_or_after_the_same_one():
    orders = [order_of(MODES, CELL, number) for number in range(40)]
    assert {order[0] for order in orders} == set(MODES)
    after = [before for order in orders for before, mode in pairwise(order) if mode == ADAPTIVE]
    assert set(after) == set(MODES) - {ADAPTIVE}


def test_traffic_by_turns_is_measured_through_both_of_them():
    plan = Plan(seconds=1.5, turn_seconds=4.0)
    assert [plan.window(kind) for kind in (Kind.TURNS, Kind.LONG, Kind.CODE)] == [8.0, 4.0, 1.5]
    traffic = traffic_of(Kind.TURNS, CORPUS, turn_seconds=4.0)
    code, noise = prompts_of(Kind.CODE, CORPUS), prompts_of(Kind.BASE64, CORPUS)
    assert [traffic.at(1, elapsed) for elapsed in (0.0, 3.9, 4.1, 7.9, 8.1)] == [
        *(code[1], code[1], noise[1], noise[1], code[1])
    ]


# Verdicts, where the right one is known


def rounds(adaptive: float, *, noise: float = 0.02, drift: float = 0.0, count: int = 30) -> list[dict]:
    """Adaptive's speed over that of the best, which is K=3; rounds share the drift of the machine."""
    draw = random.Random(5)
    found = []
    for _ in range(count):
        machine = draw.uniform(1 - drift, 1 + drift)
        speeds = {"adaptive": adaptive * 120, "K=0": 100.0, "K=1": 119.0, "K=3": 120.0}
        found.append({name: speed * machine * draw.gauss(1, noise) for name, speed in speeds.items()})
    return found


def test_adaptive_that_is_as_fast_as_the_best_is_shown():
    found = compare(rounds(1.0))
    assert found.verdict is Verdict.SHOWN
    assert found.low < found.ratio < found.high
    assert found.ratio == pytest.approx(1.0, abs=0.03)


def test_adaptive_that_loses_more_than_the_goal_is_shown_otherwise():
    assert compare(rounds(0.85)).verdict is Verdict.SHOWN_OTHERWISE


@pytest.mark.parametrize(("adaptive", "noise"), [(0.95, 0.02), (1.0, 0.4), (0.85, 0.4)])
def test_what_the_noise_hides_is_not_shown(adaptive: float, noise: float):
    assert compare(rounds(adaptive, noise=noise)).verdict is Verdict.NOT_SHOWN


def test_too_few_pairs_show_nothing():
    assert compare(rounds(1.0, count=19)).verdict is Verdict.NOT_SHOWN
    assert compare(rounds(0.5, count=19)).verdict is Verdict.NOT_SHOWN


def test_the_drift_of_the_machine_within_rounds_cancels():
    steady, drifting = compare(rounds(1.0, noise=0.005)), compare(rounds(1.0, noise=0.005, drift=0.3))
    assert steady.verdict is Verdict.SHOWN
    # Rounds are drawn whole; modes drawn on their own would make this one useless.
    assert drifting.high - drifting.low < 0.25
    machine = [each["K=3"] for each in rounds(1.0, drift=0.3)]
    exact = compare([{"adaptive": 0.96 * speed, "K=0": 0.5 * speed, "K=3": speed} for speed in machine])
    assert (exact.low, exact.high) == pytest.approx((0.96, 0.96))


def test_adaptive_has_to_reach_every_fixed_mode_and_not_only_the_apparent_best():
    """K=1 is slower than adaptive in 11 rounds and much faster in 10: nobody knows which it is."""
    measured = [{"adaptive": 100.0, "K=1": 90.0 if n < 11 else 115.0, "K=3": 100.0} for n in range(21)]
    found = compare(measured)
    assert (found.best, found.ratio) == ("K=3", 1.0)
    assert found.low < 0.9
    assert found.verdict is Verdict.NOT_SHOWN


def test_no_drafts_are_a_choice_like_any_other():
    measured = [{"adaptive": 90.0, "K=0": 100.0, "K=3": 80.0}] * 20
    found = compare(measured)
    assert (found.best, found.ratio, found.verdict) == ("K=0", 0.9, Verdict.SHOWN_OTHERWISE)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float):
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


# Hindsight

SPEEDS = {0: 100.0, 1: 96.0, 3: 70.0}


def test_every_choice_that_is_not_shown_to_lose_five_percent_is_right():
    rounds = {k: [speed] * 16 for k, speed in SPEEDS.items()}
    assert (right_of(rounds), medians_of(rounds)) == ((0, 1), SPEEDS)
    assert right_of({0: [100.0] * 16, 3: [150.0] * 16}) == (3,)
    varied = {0: [100.0, 80.0] * 8, 1: [91.0, 87.0] * 8, 2: [85.0, 65.0] * 8, 3: [120.0, 80.0] * 8}
    assert right_of(varied) == (0, 1, 3)


@pytest.mark.parametrize(
    ("trace", "ended", "seconds"),
    [
        ([(0.0, 3), (4.0, 0)], 30.0, 4.0),
        ([(0.0, 0)], 30.0, 0.0),
        ([(0.0, 3)], 30.0, None),
        ([(0.0, 3), (4.0, 0)], 8.9, None),  # not held to the end
        ([(0.0, 3), (4.0, 0), (7.0, 3), (9.0, 1)], 30.0, 9.0),  # it did not hold
        ([(0.0, 3), (4.0, 0), (6.0, 1)], 30.0, 4.0),  # another right one
        ([(0.0, 3), (4.0, 0), (9.0, 3)], 30.0, 4.0),  # held long enough
    ],
)
def test_a_reaction_ends_when_the_table_is_right_and_stays_so(trace, ended, seconds):
    assert reaction_seconds(trace, {0, 1}, ended) == seconds


def test_tokens_are_lost_by_the_choice_in_force_until_it_is_right():
    trace = [(0.0, 3), (4.0, 1), (6.0, 0)]
    assert lost_tokens(trace, SPEEDS, 6.0) == pytest.approx(4 * 30 + 2 * 4)
    assert lost_tokens(trace, SPEEDS, 2.0) == pytest.approx(60)
    assert lost_tokens([(0.0, 0)], SPEEDS, 60.0) == 0


# Traffic


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_a_kind_of_traffic_is_the_same_whenever_it_is_made(kind: Kind):
    prompts = prompts_of(kind, CORPUS)
    assert prompts == prompts_of(kind, CORPUS)
    assert len(set(prompts)) == len(prompts) > 16
    assert traffic_of(kind, CORPUS).prompts == prompts


def test_json_is_json():
    assert all(isinstance(json.loads(prompt.text), list) for prompt in prompts_of(Kind.JSON, CORPUS))


def test_no_request_finds_what_another_one_computed():
    bodies = [
        Prompt(text="x").body(model="m", max_tokens=8, temperature=0.0, salt=salt) for salt in ("a", "b")
    ]
    assert bodies[0]["cache_salt"] != bodies[1]["cache_salt"]
    assert all(body["ignore_eos"] and body["stream_options"]["continuous_usage_stats"] for body in bodies)


@given(st.integers(1, 300_000))
def test_long_texts_are_as_long_as_asked(characters: int):
    texts = long_texts(CORPUS, characters, count=3)
    assert [len(text) for text in texts] == [characters] * 3


def test_a_fitted_text_fills_most_of_the_limit():
    assert fitted_characters(2200, 1000, 2000) == 2200 * 2 * 0.95


# The load


def test_only_counts_of_the_worker_count():
    lines = [
        b'data: {"choices":[{"index":0,"text":"\\"completion_tokens\\":9"}]}\n',
        b": keep-alive\n",
        b"\n",
        b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n',
        b'data: {"choices":[],"usage":{"completion_tokens":7}}\n',
        b"data: [DONE]\n",
    ]
    assert [completion_tokens(line) for line in lines] == [0, 0, 0, 3, 7, 0]


def test_an_error_in_a_stream_ends_the_benchmark():
    with pytest.raises(BenchmarkError, match="worker died"):
        completion_tokens(b'data: {"error":{"message":"worker died"}}\n')


class Gateway:
    """Answers in frames of three tokens."""

    def __init__(self) -> None:
        self.running = self.most = self.sent = 0
        self.asked: list[tuple[str, str]] = []
        """Prompt and cache salt of each request."""
        self.fails = False
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if self.fails:
            return web.Response(status=503, text="no worker")
        body = await request.json()
        self.asked.append((body["prompt"], body["cache_salt"]))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            for done in range(3, body["max_tokens"] + 3, 3):
                count = min(done, body["max_tokens"])
                frame = {"choices": [{"text": "x"}], "usage": {"completion_tokens": count}}
                await response.write(f"data: {json.dumps(frame, separators=(',', ':'))}\n\n".encode())
                await asyncio.sleep(0.002)
            await response.write(
                f'data: {{"choices":[],"usage":{{"completion_tokens":{count}}}}}\n\n'.encode()
            )
            self.sent += count
        finally:
            self.running -= 1
        return response


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    fake = Gateway()
    app = web.Application()
    app.router.add_post("/v1/completions", fake.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    fake.url = f"http://{host}:{port}"
    yield fake
    await runner.cleanup()


def stream_to(gateway: Gateway, concurrency: int) -> Stream:
    target = Target(url=gateway.url, key="k", model="m")
    return Stream(target, Traffic(prompts=(Prompt(text="x"),)), concurrency=concurrency, answer_tokens=6)


async def test_every_token_is_counted_when_it_arrives(gateway):
    stream = stream_to(gateway, 3)
    stream.mark()
    async with stream.running():
        await until(lambda: gateway.sent > 200)
        # To the last whole answer: what is in flight is counted in part.
        assert gateway.sent <= stream.tokens(0, 1e12) + 30
        assert stream.tokens(0, 1e12) <= gateway.sent + 3 * 10 + 30
        assert stream.tokens(0, 1) == 0
    assert gateway.most == 3


async def test_segments_of_a_round_have_the_same_prompts_and_no_cache_in_common(gateway):
    target = Target(url=gateway.url, key="k", model="m")
    prompts = tuple(Prompt(text=f"prompt {number}") for number in range(100))
    stream = Stream(target, Traffic(prompts=prompts), concurrency=1, answer_tokens=3)
    asked: list[list[str]] = []
    async with stream.running():
        for _ in range(2):
            stream.mark(40)
            before = len(gateway.asked)
            await until(lambda before=before: len(gateway.asked) > before + 3)
            # The first may be one that was on its way.
            asked.append([prompt for prompt, _ in gateway.asked[before + 1 : before + 4]])
    assert all(set(names) <= {f"prompt {number}" for number in range(40, 44)} for names in asked)
    assert set(asked[0]) & set(asked[1])
    assert len({salt for _, salt in gateway.asked}) == len(gateway.asked)


def test_lengths_of_answers_differ_and_have_the_given_mean():
    lengths = [length_of(number, 96) for number in range(97 * 3)]
    assert (min(lengths), max(lengths)) == (48, 144)
    assert sum(lengths) / len(lengths) == 96
    assert len(set(lengths[:16])) == 16
    assert min(length_of(number, 1) for number in range(9)) == 1


async def test_the_load_follows_a_change_of_concurrency(gateway):
    stream = stream_to(gateway, 1)
    async with stream.running():
        await until(lambda: gateway.sent > 20)
        assert gateway.most == 1
        stream.change(concurrency=5)
        await until(lambda: gateway.running == 5)
        stream.change(concurrency=2)
        for _ in range(2):  # answers of the others end first
            gateway.most, sent = 0, gateway.sent
            await until(lambda sent=sent: gateway.sent > sent + 100)
        assert gateway.most == 2


async def test_a_refused_request_ends_the_benchmark(gateway):
    gateway.fails = True
    with pytest.raises(BenchmarkError, match="503: no worker"):
        async with stream_to(gateway, 2).running():
            await asyncio.sleep(5)


async def test_a_gateway_that_is_gone_ends_the_benchmark(gateway, monkeypatch):
    async def post(*_arguments, **_named):
        raise aiohttp.ClientPayloadError("cut off")

    monkeypatch.setattr("benchmarks.speculation.load.ask", post)
    with pytest.raises(BenchmarkError, match="a request failed: ClientPayloadError cut off"):
        async with stream_to(gateway, 2).running():
            await asyncio.sleep(5)


# The monitor's own segments


class FakeWorker:
    """A plugin whose counters grow by one step, of one draft, with each reading."""

    def __init__(self) -> None:
        self.commands: list = []
        self.count = 0
        self.probing = 0
        """Readings until the probe in flight has ended."""
        self.epoch = "one"

    async def read(self, _worker, _timeout) -> EngineReading:
        self.count += 1
        self.probing = max(0, self.probing - 1)
        k = self.commands[-1].table[0][2] if self.commands else 3
        counted = getattr(self, "steps", {})
        self.steps = {**counted, (4, k): counted.get((4, k), StepCounters()).plus(StepCounters(steps=1))}
        drafting = SpecDecodeCounters(
            drafts=self.count, draft_tokens=0, accepted_tokens=0, accepted_per_position=()
        )
        return EngineReading(
            controllable=True,
            epoch=self.epoch,
            largest_batch=64,
            choices=(0, 1, 3),
            table=((1, 64, k),),
            is_probing=self.probing > 0,
            step_count=self.count,
            steps=self.steps,
            drafting=drafting,
            busy_seconds=float(self.count),
            catch_up_seconds=self.count / 8,
        )

    async def apply(self, worker, command, timeout_seconds) -> EngineReading:
        self.commands.append(command)
        if command.probe:
            self.probing = 4
        return await self.read(worker, timeout_seconds)


class FakeMonitor:
    """Decides what it is told to, and remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[EngineReading, float]] = []
        self.decision = Decision(mode=SpeculationMode.SPECULATIVE, table=((1, 64, 3),))

    def decide(self, state, reading, _policy, now):
        self.given.append((reading, now))
        return state, self.decision


@pytest.fixture
def monitor(monkeypatch) -> FakeMonitor:
    fake = FakeMonitor()
    monkeypatch.setattr(conductor_module, "decide", fake.decide)
    return fake


async def started(worker: FakeWorker) -> Conductor:
    name = Worker(worker_id=WorkerId("w"), url="http://w")
    return await Conductor.start(worker, name, MonitorSettings(interval_seconds=0.02))


async def test_the_monitor_learns_nothing_from_other_segments(monitor):
    worker = FakeWorker()
    conductor = await started(worker)
    own = 0
    for _ in range(3):
        start = await conductor.switch(ADAPTIVE)
        end, _ = await conductor.adapt(start, 0.05)
        own += end.step_count - start.step_count
        for _ in range(50):
            await conductor.switch(K1)  # 50 steps with K=1, which it must not see
        await asyncio.sleep(0.2)
    assert worker.count > 150
    readings = [reading for reading, _now in monitor.given]
    first = readings[0].step_count
    assert readings[-1].step_count - first <= own
    assert all(later.step_count > earlier.step_count for earlier, later in pairwise(readings))
    assert all((4, 1) not in reading.steps for reading in readings)
    last = readings[-1]
    assert last.drafting.drafts == last.step_count == last.busy_seconds == 8 * last.catch_up_seconds
    # Nor does time pass for it.
    assert monitor.given[-1][1] - monitor.given[0][1] < 0.4
    assert all(later > earlier for (_, earlier), (_, later) in pairwise(monitor.given))


async def test_a_probe_in_flight_belongs_to_the_segment_that_began_it(monitor):
    worker = FakeWorker()
    conductor = await started(worker)
    monitor.decision = replace(monitor.decision, probe=((1, 64),), starts_probe=True)
    end, is_extended = await conductor.adapt(await conductor.switch(ADAPTIVE), 0.01)
    assert is_extended
    assert worker.commands[-1].probe == ((1, 64),)
    assert not end.is_probing
    assert worker.probing == 0


async def test_no_table_ends_a_probe_in_flight(monitor):
    worker = FakeWorker()
    conductor = await started(worker)
    monitor.decision = Decision(mode=SpeculationMode.TARGET_ONLY, table=((1, 64, 0),), probe=((1, 64),))
    await conductor.adapt(await conductor.switch(ADAPTIVE), 0.05)
    assert len(monitor.given) >= 2
    assert len(worker.commands) == 1


async def test_the_monitors_table_is_in_force_again_after_other_segments(monitor):
    worker = FakeWorker()
    conductor = await started(worker)
    monitor.decision = Decision(mode=SpeculationMode.TARGET_ONLY, basis=Reason.COLLAPSED, table=((1, 64, 0),))
    await conductor.adapt(await conductor.switch(ADAPTIVE), 0.03)
    assert conductor.table == ((1, 64, 0),)
    await conductor.switch(K3)
    assert worker.commands[-1].table == ((1, 64, 3),)
    await conductor.switch(ADAPTIVE)
    last = worker.commands[-1]
    assert (last.table, last.mode, last.reason) == (((1, 64, 0),), "target_only", "collapsed")


async def test_a_worker_that_restarts_ends_the_benchmark():
    worker = FakeWorker()
    first = await worker.read(None, 0)
    worker.epoch = "two"
    with pytest.raises(BenchmarkError, match="restarted"):
        without(await worker.read(None, 0), first)


async def test_the_products_monitor_runs_in_these_segments():
    """Not a fake: `appliance.monitor.decide` accepts what it is given."""
    worker = FakeWorker()
    conductor = await started(worker)
    await conductor.adapt(await conductor.switch(ADAPTIVE), 0.1)
    assert isinstance(conductor._state, MonitorState)
    assert conductor._state.draft_tokens(4) == 3


# Segments


async def test_what_follows_a_switch_is_counted_apart(monitor, monkeypatch):
    monkeypatch.setattr("benchmarks.speculation.bench.SETTLE_SECONDS", 0.03)
    spans, firsts = [], []

    class FakeStream:
        def mark(self, first_prompt: int | None) -> None:
            spans.clear()
            firsts.append(first_prompt)

        def tokens(self, begins: float, ends: float) -> int:
            spans.append((begins, ends))
            return len(spans)

    worker = FakeWorker()
    bench = Bench(await started(worker), FakeStream(), {}, Plan(seconds=0.05))
    (first, *_rest) = found = await bench.round(CELL, 0)
    assert {segment.mode for segment in found} == {"adaptive", "K=0", "K=1", "K=3"}
    assert [segment.after for segment in found] == ["adaptive", *(segment.mode for segment in found[:-1])]
    measured, settled = spans
    assert settled[1] == measured[0]
    assert (first.tokens, first.settle_tokens) == (1, 2)
    await bench.round(CELL, 3)
    assert firsts == [0] * 4 + [3 * CELL.concurrency] * 4
    # Differences of a clock round: the last bit may be below what was slept.
    assert round(min(segment.settle_seconds for segment in found), 9) >= 0.03
    assert round(min(segment.seconds for segment in found), 9) >= 0.05
    by_mode = {segment.mode: segment for segment in found}
    assert (by_mode["K=0"].draft_tokens, by_mode["K=3"].draft_tokens) == (0, 3)
    assert [set(by_mode[name].decode_seconds) for name in ("K=0", "K=3")] == [{"K=0"}, {"K=3"}]
    # The reading at its end is a step.
    assert by_mode["K=3"].catch_up_seconds == 1 / 8


async def test_a_step_that_replays_the_prefill_is_waited_for(monkeypatch):
    monkeypatch.setattr("benchmarks.speculation.bench.SETTLE_SECONDS", 0.0)
    worker = FakeWorker()
    stream = SimpleNamespace(mark=lambda _first: None, tokens=lambda _begins, _ends: 0)
    bench = Bench(await started(worker), stream, {}, Plan())
    before = worker.count
    await bench.segment(K3, 0.0)
    # A step with each reading: the switch's, two until it has settled, one at the end.
    assert worker.count - before == 4


def segment(mode: Mode, tokens: int, after: Mode = K1, **changes: object) -> Segment:
    usual = {"seconds": 1.0, "settle_seconds": 0.3, "settle_tokens": round(0.3 * tokens)}
    return Segment(mode=mode.name, after=after.name, tokens=tokens, **usual | changes)


def round_of(*segments: Segment, cell: Cell = CELL) -> Round:
    return Round(cell=cell, commit="abc1234", sitting="monday", segments=segments)


WHOLE = round_of(
    segment(ADAPTIVE, 110, drafts=10, accepted_tokens=5, catch_up_seconds=0.02),
    segment(K0, 100),
    segment(K1, 90, after=K3),
    segment(K3, 100, after=K0, drafts=20, accepted_tokens=30),
)


def test_the_cost_of_a_replayed_prefill_is_told_from_that_of_a_switch():
    slow = segment(K3, 100, after=K0, settle_seconds=0.5, settle_tokens=10)
    found = [round_of(slow, segment(K1, 100, after=K3, settle_tokens=28), segment(ADAPTIVE, 100, after=K0))]
    assert settle_cost(found, replayed=True) == pytest.approx(0.4)
    assert settle_cost(found, replayed=False) == pytest.approx(0.02)
    assert settle_cost([round_of(segment(K0, 100, after=K3))], replayed=False) is None


def test_by_choice_only_the_time_with_another_number_of_draft_tokens_counts():
    seconds = {"K=0": 0.75, "K=3": 0.25}
    noisy = round_of(
        *(segment(ADAPTIVE, 50, decode_seconds=seconds), segment(K0, 100), segment(K1, 90)), segment(K3, 60)
    )
    assert noisy.speeds_by_choice == {**noisy.speeds, "adaptive": pytest.approx(90.0)}
    assert WHOLE.speeds_by_choice == WHOLE.speeds  # no whole decode step is known
    text = markdown({}, [noisy] * 20)
    assert "| 0.500 (0.500 to 0.500) | shown otherwise | 0.900 (0.900 to 0.900) | shown otherwise |" in text


def test_traffic_by_turns_has_no_speed_by_choice():
    """K follows the text there, and the speeds of the fixed ones are of both texts."""
    turns = replace(WHOLE, cell=Cell(kind=Kind.TURNS, concurrency=1))
    text = markdown({}, [turns] * 20)
    assert "| 1.100 (1.100 to 1.100) | shown | - | - |" in text


# Files and reports


def test_a_run_resumes_where_a_crash_cut_it_off(tmp_path: Path):
    path = tmp_path / "results" / "rounds.jsonl"
    first = Records(path, {"plan": {"seconds": 1.5}}, parse_round)
    first.load()
    first.add(WHOLE)
    first.add(replace(WHOLE, sitting="tuesday"))
    text = path.read_text()
    path.write_text(text[:-20])
    again = Records(path, {"plan": {"seconds": 1.5}}, parse_round)
    again.load()
    assert again.rows == [WHOLE]
    again.add(replace(WHOLE, sitting="tuesday"))
    assert path.read_text() == text


def test_rounds_of_other_options_are_not_mixed(tmp_path: Path):
    Records(tmp_path / "rounds", {"seconds": 1.5}, parse_round).load()
    with pytest.raises(BenchmarkError, match="other options"):
        Records(tmp_path / "rounds", {"seconds": 2.0}, parse_round).load()


def test_the_report_has_a_verdict_for_each_cell():
    other = Cell(kind=Kind.BASE64, concurrency=1)
    lost = [replace(WHOLE, cell=other, segments=(segment(ADAPTIVE, 50), *WHOLE.segments[1:]))] * 20
    text = markdown({"hardware": "a machine"}, [*[WHOLE] * 20, *lost, replace(WHOLE, sitting="tuesday")])
    counts = "shown in 1 of 2 cells, not shown in 0 of 2 cells, shown otherwise in 1 of 2 cells"
    assert f"- measured: {counts}\n- by choice: {counts}\n" in text
    assert "| code | 4 | 21 | K=0 | 1.100 (1.100 to 1.100) | shown |" in text
    assert "| 0.00 | 2.0% |" in text
    assert "| base64 | 1 | 20 | K=0 | 0.500 (0.500 to 0.500) | shown otherwise |" in text
    assert "| code | 4 | 100 | 90 | 100 | 110 |" in text
    assert "| code | 4 | 2.50 | 0 | 0 |" in text
    for part in ("a machine", "abc1234", "2 starts of the processes"):
        assert part in text
    whole_tables(text)


def whole_tables(text: str) -> None:
    """Every table has as many columns as headings."""
    tables = "\n".join(line if line.startswith("|") else "" for line in text.splitlines()).split("\n\n")
    blocks = [block for block in (block.strip() for block in tables) if block]
    assert blocks
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1


CODE, NOISE = (Cell(kind=kind, concurrency=2) for kind in (Kind.CODE, Kind.BASE64))


def change(at: float | None, *, was_right: bool = True) -> Change:
    trace = [(0.0, 3), *([(at, 0)] if at is not None else []), (60.0, 3 if at is None else 0)]
    return Change(
        before=CODE,
        after=NOISE,
        trace=trace,
        speeds={0: 100.0, 3: 80.0},
        right=[0],
        was_right=was_right,
        commit="abc1234",
        sitting="monday",
    )


def test_reactions_are_told_by_percentiles_of_those_that_count():
    changes = [*(change(float(at)) for at in range(1, 20)), change(59.0), change(1.0, was_right=False)]
    text = reaction.markdown({}, changes)
    # The one that was right for a second only is one of twenty; the last does not count.
    assert "| code to base64, concurrency 2 | 25% | 20 of 21 | 10.0 s | 19.0 s | 200 | 380 |" in text
    assert "over 60 s" in reaction.markdown({}, [change(None)] * 2)
    assert "| 0 of 1 | - | - |" in reaction.markdown({}, [change(1.0, was_right=False)])
    whole_tables(text)


def test_a_change_is_read_as_it_was_written(tmp_path: Path):
    records = Records(tmp_path / "changes", {}, parse_change)
    records.load()
    records.add(change(4.0))
    again = Records(tmp_path / "changes", {}, parse_change)
    again.load()
    assert again.rows == [change(4.0)]
    assert (again.rows[0].seconds, again.rows[0].lost) == (4.0, 80.0)


def test_the_courses_hold_all_changes():
    moves = {(a.kind, b.kind, a.concurrency, b.concurrency) for c in courses([2]) for a, b in pairwise(c)}
    good, mediocre, useless = reaction.GOOD, reaction.MEDIOCRE, reaction.USELESS
    assert moves >= {
        *((good, useless, 2, 2), (useless, good, 2, 2), (good, mediocre, 2, 2)),
        *((mediocre, useless, 2, 2), (useless, mediocre, 2, 2)),
        *((mediocre, mediocre, 1, 16), (mediocre, mediocre, 16, 1)),
    }


def test_a_draft_is_recorded_by_the_tokens_of_its_frame():
    """Not the token of the prompt, the cut last step, nor two steps that came as one."""
    assert accepted_of([1, 4, 1, 3, 6, 2, 1], most=3) == "3021"
    assert accepted_of([1], most=3) == ""


def test_changes_are_repeated_until_each_has_enough():
    records = SimpleNamespace(rows=[change(1.0)] * 2)
    assert remaining(records, (CODE, NOISE), 3)
    assert not remaining(records, (CODE, NOISE), 2)
    assert remaining(records, (CODE, NOISE, CODE), 2)


def test_processes_without_a_draft_are_compared_start_by_start():
    text = target_alone.lines_of({CODE: [1.5, 1.2, 1.7]})
    assert text[-1] == "| code | 2 | 3 | 1.50 | 1.20 | 1.70 |"


# Control by override


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        (ADAPTIVE, {"mode": "auto"}),
        (K0, {"mode": "target_only"}),
        (K3, {"mode": "speculative", "draft_tokens": 3}),
    ],
)
def test_a_mode_is_ordered_as_the_admin_api_wants_it(mode: Mode, wanted: dict):
    body = order(mode)
    assert {name: body.get(name) for name in wanted} == wanted
    assert body["worker"] == "*"


@pytest.mark.parametrize(
    ("override", "reason", "spans", "done"),
    [
        ({}, "operator_override", [[1, 64, 3]], [K3]),
        ({}, "operator_override", [[1, 4, 3], [5, 64, 0]], []),
        ({}, "operator_override", [], []),
        (None, "operator_override", [[1, 64, 3]], []),
        (None, "healthy", [[1, 64, 3]], [ADAPTIVE]),
    ],
)
def test_a_worker_follows_when_its_whole_table_does(
    override: dict | None, reason: str, spans: list, done: list[Mode]
):
    order = None if override is None else {"mode": "speculative"}
    worker = {"override": order, "reason": reason, "table": spans}
    assert [mode for mode in (K0, K3, ADAPTIVE) if follows(worker, mode)] == done


@pytest.mark.parametrize("module", ["benchmarks.speculation", "benchmarks.speculation.reaction"])
def test_the_command_shows_its_options_without_starting_anything(module: str):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
    )
    assert "--minutes" in done.stdout
