"""It measures what the report estimates, and says how well."""

import asyncio
import json
import math
import random
from dataclasses import replace
from datetime import date
from typing import Any
from zoneinfo import ZoneInfo

import aiohttp
import pytest

from appliance.gateway.cost.report import Saving
from appliance.gateway.cost.rows import Recorded, RecordingPeriod, WorkerKey, WorkerTime, begin_of
from appliance.gateway.cost.saving import Steps, added
from appliance.gateway.cost.saving import compare as reported
from appliance.gateway.cost.summary import make_report
from appliance.infra.settings import CostSettings
from appliance.speculation.goodput import Estimate
from appliance.speculation.values import EngineReading, StepCounters
from benchmarks.cost_saving import run
from benchmarks.cost_saving.__main__ import parse
from benchmarks.cost_saving.estimate import (
    NOTHING,
    Interval,
    Round,
    Saved,
    alone_ratio,
    compare,
    read_saving,
    student,
)
from benchmarks.cost_saving.run import WITHOUT, Driver, Found, Plan, keep_busy
from benchmarks.cost_saving.table import Load, markdown, verdict
from benchmarks.speculation.load import BenchmarkError, Target
from benchmarks.speculation.plan import ADAPTIVE, Mode
from benchmarks.speculation.provenance import Provenance
from benchmarks.speculation.traffic import Prompt, Traffic
from demo.training.corpus import Corpus

PRICE = 0.001
CORPUS = Corpus(
    training=[], held_out=["".join(f"def f{n}():\n    return {n}\n" for n in range(500))] * 2, dialogues=[]
)
SINGLE = 0.010
"""Seconds of a step without drafts at batch size 1."""


def cell(steps: int, seconds: float, batch: int, per_request: float = 1.0) -> StepCounters:
    return StepCounters(
        steps=steps, seconds=seconds, requests=steps * batch, tokens=round(steps * batch * per_request)
    )


def without(noise: float = 1.0, *, batch: int = 1, step: float = SINGLE) -> Steps:
    return {(batch, 0): cell(200, 200 * step * noise, batch)}


def drafted(noise: float = 1.0, *, batch: int = 1, step: float = SINGLE, k: int = 3) -> Steps:
    """A step with drafts takes half as long again and gives 2.5 tokens: 5/3 of the speed."""
    return {(batch, k): cell(100, 100 * 1.5 * step * noise, batch, 2.5)}


def a_round(first: float = 1.0, second: float = 1.0, told: Saved | None = None) -> Round:
    return Round(without=without(first), drafted=drafted(second), told=told or Saved())


def exactly(mean: float, spread: float = 0.0) -> Interval:
    return Interval(mean=mean, low=mean - spread, high=mean + spread)


def test_the_saving_of_rounds_that_are_all_alike():
    """250 tokens that took 1.5 seconds take 2.5 without drafts."""
    found = compare(1, [a_round()] * 3, price=PRICE)
    assert found.measured.spent == pytest.approx(4.5)
    assert found.measured.tokens == 750
    for bound in (found.measured.seconds.low, found.measured.seconds.mean, found.measured.seconds.high):
        assert bound == pytest.approx(3.0)
    assert found.measured.money.mean == pytest.approx(0.003)
    assert found.measured.tokens_saved.mean == pytest.approx(300), "4.5 seconds alone give 450"
    assert found.without_per_token == pytest.approx(SINGLE)
    assert found.drafted_per_token == pytest.approx(0.006)


def test_it_is_what_the_report_says_where_costs_are_certain():
    """From other figures: the report knows S(3)/S(0), the benchmark tokens and seconds of both."""
    rounds = [a_round()] * 2
    drafted = added(rounds[0].drafted, rounds[1].drafted)
    told, _left = reported(drafted, dict.fromkeys(drafted, Estimate(mean=math.log(1.5), variance=0.0)))
    measured = compare(1, rounds, price=PRICE).measured
    assert measured.seconds.mean == pytest.approx(told.target_only - told.seconds)
    assert (measured.spent, measured.tokens) == (pytest.approx(told.seconds), told.tokens)


def test_bounds_are_of_step_times_and_not_of_what_the_drafts_gave():
    """Prompts drafted well and badly in turn, and to other depths, are counted; no time was uncertain."""
    rounds = [
        Round(without=without(), drafted={(1, k): cell(100, seconds, 1, tokens)}, told=Saved())
        for k, seconds, tokens in ((3, 1.5, 1.5), (3, 1.5, 3.5), (1, 1.1, 1.2), (1, 1.1, 1.8))
    ]
    saved = compare(1, rounds, price=PRICE).measured.seconds
    for bound in (saved.low, saved.mean, saved.high):
        assert bound == pytest.approx(800 * SINGLE - 5.2)


def test_each_batch_bucket_is_compared_with_its_own():
    """A token of four requests at once costs less; they must not be mixed."""
    mixed = Round(
        without={**without(), **without(batch=4, step=0.02)},
        drafted={**drafted(), **drafted(batch=4, step=0.02)},
        told=Saved(),
    )
    assert alone_ratio(mixed, {}) == pytest.approx(2.5 / 1.5)
    one_sided = Round(without=mixed.without, drafted=drafted(batch=4, step=0.02), told=Saved())
    assert alone_ratio(one_sided, {}) == pytest.approx(2.5 / 1.5)


def test_a_bucket_that_a_round_lacks_is_taken_from_the_others():
    """And one that none has goes by the ratio of those that are known; too few steps do not count."""
    lacking = Round(without=without(), drafted=drafted(batch=4, step=0.02), told=Saved())
    assert alone_ratio(lacking, {4: 0.02 / 4}) == pytest.approx(2.5 / 1.5)
    with pytest.raises(ValueError, match="nothing was decoded without drafts at the batch size"):
        alone_ratio(lacking, {})
    few = {(4, 0): cell(3, 9.0, 4)}
    partly = Round(without={**without(), **few}, drafted={**drafted(), **drafted(batch=4)}, told=Saved())
    assert alone_ratio(partly, {}) == pytest.approx(2.5 / 1.5)


def test_rounds_that_did_not_draft_are_left_out():
    """Two are needed to tell how they differ; a handful of steps before the monitor stopped is none."""
    idle = Round(without=without(), drafted={}, told=Saved())
    stopped = Round(without=without(), drafted={(1, 3): cell(5, 9.0, 1)}, told=Saved(spent=9.0))
    found = compare(1, [a_round(), idle, stopped, a_round()], price=PRICE)
    assert (found.rounds, found.told.spent, found.measured.tokens) == (2, 0.0, 500)
    with pytest.raises(ValueError, match="only 1 of 3 rounds drafted"):
        compare(1, [a_round(), idle, idle], price=PRICE)


@pytest.mark.parametrize("rounds", [3, 6])
def test_bounds_hold_in_nineteen_of_twenty_runs(rounds):
    """With either segment off by a tenth, as on a machine that others use."""
    noise, held, runs = random.Random(11), 0, 2000
    truth = rounds * (2.5 - 1.5)
    for _run in range(runs):
        found = compare(
            1,
            [a_round(noise.lognormvariate(0, 0.1), noise.lognormvariate(0, 0.1)) for _ in range(rounds)],
            price=PRICE,
        )
        # What was spent is counted, whatever it should have been.
        scale = found.measured.spent / (1.5 * rounds)
        held += found.measured.seconds.low <= truth * scale <= found.measured.seconds.high
    assert 0.93 < held / runs < 0.97


def test_students_t_is_that_of_the_tables():
    """Published: 12.706 for one degree of freedom, 2.571 for five; more than 30 are taken for 30."""
    assert (student(1), student(5), student(30), student(1000)) == (12.706, 2.571, 2.042, 2.042)


def test_a_report_that_is_wrong_does_not_agree():
    """Half of what was saved, or all tokens but the first of a step as if steps cost nothing more."""
    right = Saved(spent=1.5, tokens=250, seconds=exactly(1.0, 0.05), money=NOTHING)
    rounds = [
        a_round(0.99, 1.0, right), a_round(1.01, 1.0, right), a_round(1.0, 1.01, right), a_round(told=right)
    ]  # fmt: skip
    assert compare(1, rounds, price=PRICE).agrees
    assert compare(1, rounds, price=PRICE).told.seconds.mean == pytest.approx(4.0)
    for seconds in (0.5, 1.5 * 2.5 - 1.5):
        wrong = replace(right, seconds=exactly(seconds, 0.05))
        assert not compare(1, [replace(each, told=wrong) for each in rounds], price=PRICE).agrees


def test_figures_of_the_same_agree_and_a_wrong_one_is_found():
    """Almost always, with bounds as wide as here; whichever is asked."""
    noise, apart, found, runs = random.Random(7), 0, 0, 20_000
    for _run in range(runs):
        one, other = (
            Interval(mean=mean, low=mean - 1.96 * sd, high=mean + 1.96 * sd)
            for sd in (0.06, 0.08)
            for mean in [noise.gauss(1.0, sd)]
        )
        assert one.agrees(other) is other.agrees(one)
        apart += not one.agrees(other)
        found += not one.times(0.5).agrees(other)
    assert apart < 0.0005 * runs
    assert found > 0.9 * runs


def test_a_report_is_read_as_it_is_written():
    """Every name; the tokens by the report's own formula."""
    zone, day = ZoneInfo("Africa/Nairobi"), date(2026, 11, 20)
    slot = begin_of(day, zone)
    time = WorkerTime(
        observed_us=3_600_000_000,
        busy_us=2_000_000_000,
        draft_us=900_000_000,
        draft_tokens=1000,
        target_only_us=1_800_000_000,
        target_only_low_us=1_500_000_000,
        target_only_high_us=2_100_000_000,
    )
    until = slot + 3600
    period = RecordingPeriod(start="s", gateway="g", began_at=slot, until=until, flush_seconds=1, closed=True)
    report = make_report(
        Recorded(periods=(period,), shares=(), workers=(("s", WorkerKey(slot, "w"), time),)),
        first=day,
        end=date(2026, 11, 21),
        zone=zone,
        now=float(until),
        settings=CostSettings(worker_price_per_hour=3.6),
    )
    read = read_saving(json.loads(report.model_dump_json()))
    assert (read.spent, read.tokens) == (900, 1000)
    assert read.seconds == Interval(mean=900, low=600, high=1200)
    assert read.money.mean == pytest.approx(900 * PRICE)
    saving = report.saving
    tokens = Interval(mean=saving.tokens, low=saving.tokens_low, high=saving.tokens_high)
    assert read.tokens_saved == Interval(
        mean=pytest.approx(tokens.mean), low=pytest.approx(tokens.low), high=pytest.approx(tokens.high)
    )


def test_running_sums_are_told_apart():
    """What was added since, and both together again."""
    first = Saved(spent=1.0, tokens=10, seconds=exactly(2.0, 0.5), money=exactly(0.2, 0.05))
    both = first.plus(Saved(spent=2.0, tokens=30, seconds=exactly(1.0, 0.25), money=exactly(0.1, 0.025)))
    more = both.since(first)
    assert (more.spent, more.tokens, more.seconds) == (2.0, 30, exactly(1.0, 0.25))
    assert more.money.mean == pytest.approx(0.1)
    assert Saved().tokens_saved == NOTHING


class FakeSide:
    """A worker whose counters grow with each segment, and what was ordered of it."""

    target: Any = None
    engine = "vllm 0"

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.steps: Steps = {}
        self.stray: Steps = {}

    async def choose(self, mode: Mode) -> None:
        self.modes.append(mode)
        self.steps = added(self.steps, self.stray)

    async def reading(self) -> EngineReading:
        return EngineReading(controllable=True, epoch="one", steps=self.steps)

    def serve(self) -> None:
        self.steps = added(self.steps, without() if self.modes[-1] is WITHOUT else drafted())


class FakeReporter:
    """A report that is right, as late and as vague as it is told to be."""

    def __init__(self, side: FakeSide, late: int = 0, vague: float = 0.02) -> None:
        self._side, self._late, self._asked, self._vague = side, late, 0, vague

    async def saved(self) -> Saved:
        self._asked += 1
        of = [cell for (_bucket, k), cell in self._side.steps.items() if k]
        behind = self._asked % (self._late + 1)
        tokens = sum(cell.tokens for cell in of) - (100 if behind else 0)
        seconds = sum(cell.seconds for cell in of)
        return Saved(
            spent=seconds,
            tokens=tokens,
            seconds=exactly(seconds * 2 / 3, seconds * self._vague),
            money=NOTHING,
        )


@pytest.fixture
def side(monkeypatch):
    side = FakeSide()

    async def keep_busy(*_: object, **__: object) -> None:
        side.serve()

    monkeypatch.setattr(run, "keep_busy", keep_busy)
    monkeypatch.setattr(run, "load_corpus", lambda: CORPUS)
    monkeypatch.setattr(run, "AGAIN_SECONDS", 0.0)
    return side


async def measured(side: Any, reporter: Any, **plan: Any) -> Found:
    found = Found()
    driver = Driver(side, reporter, Plan(**{"concurrency": (1,), "rounds": 3, **plan}), lambda _line: None)
    await driver.run(found)
    return found


async def test_rounds_take_turns_and_the_report_is_waited_for(side):
    """Learning first; then without and with, with and without; each report only once it has all tokens."""
    found = await measured(side, FakeReporter(side, late=2))
    assert found.engine == "vllm 0"
    (found,) = found.comparisons
    assert side.modes == [ADAPTIVE, WITHOUT, ADAPTIVE, ADAPTIVE, WITHOUT, WITHOUT, ADAPTIVE]
    assert found.agrees
    assert found.told.tokens == found.measured.tokens == 3 * 250
    assert found.told.seconds.mean == pytest.approx(found.measured.seconds.mean)


async def test_a_monitor_that_has_learnt_little_gets_more_time(side):
    """At most four times as much: on some machines it stays vague, and the bounds say so."""
    await measured(side, FakeReporter(side, vague=0.6))
    assert side.modes[:6] == [ADAPTIVE] * 4 + [WITHOUT, ADAPTIVE]


async def test_bounds_too_wide_to_be_wrong_get_more_rounds(side):
    """Only where the plan allows more; half the saving agrees with a report as vague as this one."""
    for vague, most, rounds in ((0.6, 5, 5), (0.6, 0, 3), (0.02, 5, 3)):
        (found,) = (await measured(side, FakeReporter(side, vague=vague), most_rounds=most)).comparisons
        assert (found.rounds, found.is_sharp) == (rounds, vague < 0.1)


def test_how_far_bounds_are_apart():
    """Of what the target alone would take; a lower bound of nothing is as far as can be."""
    assert Saved(spent=2.0, seconds=Interval(mean=0, low=-1, high=1)).spread == 3.0
    assert Saved(spent=1.0, seconds=Interval(mean=0, low=-1, high=1)).spread == math.inf


async def test_a_report_that_never_has_all_is_no_result(side, monkeypatch):
    """It says how much is missing, and ends."""
    monkeypatch.setattr(run, "SETTLE_SECONDS", 0.05)

    class Deaf(FakeReporter):
        async def saved(self) -> Saved:
            return Saved(tokens=7)

    with pytest.raises(BenchmarkError, match="compared 7 of 250 tokens"):
        await measured(side, Deaf(side))


async def test_drafts_outside_of_their_segment_are_no_result(side):
    """The report would speak of more steps than were measured."""
    side.stray = {(1, 1): cell(1, 0.01, 1, 2.0)}
    with pytest.raises(BenchmarkError, match="outside of their segment"):
        await measured(side, FakeReporter(side))


async def test_a_worker_that_counts_nothing_is_no_result(side):
    async def none() -> None:
        return None

    side.reading = none
    with pytest.raises(BenchmarkError, match="counts no steps"):
        await measured(side, FakeReporter(side))


async def test_the_table_says_what_was_found_and_whether_it_agrees(side):
    """Both figures with their bounds, the load, and how it was measured."""
    found = (await measured(side, FakeReporter(side), concurrency=(1, 4))).comparisons
    provenance = Provenance(
        command="python -m benchmarks.cost_saving",
        hardware="a processor",
        commit="abc1234",
        has_changes=False,
        engine="vllm 0",
        model="m",
        draft="d",
        date="2026-11-22",
    )
    text = markdown(Plan(), provenance, Load(before=0.5, after=3.25), found)
    assert "load of the machine (1 minute): 0.5 before, 3.2 at the end" in text
    assert "The report agrees with the measurement" in text
    assert "| 1 | engine seconds | 3.00 (2.91 to 3.09) | 3.00 (3.00 to 3.00) | 1.00 | yes |" in text
    assert "| all | engine seconds | 6.00" in text
    assert max(map(len, text.splitlines())) <= 120
    wrong = replace(found[1], told=replace(found[1].told, seconds=exactly(9.0)))
    assert verdict([found[0], replace(wrong, concurrency=4)]) == [
        "The report does not agree with the measurement at concurrency 4."
    ]
    assert "| 9.00 (9.00 to 9.00) | 3.00 (3.00 to 3.00) | 3.00 | no |" in markdown(
        Plan(), provenance, Load(before=0, after=0), [found[0], wrong]
    )


@pytest.mark.parametrize("seconds", [0.0, 0.2])
async def test_a_segment_has_enough_answers_however_slow_the_machine_is(monkeypatch, seconds):
    """Two of each request under way at least, and never more requests than that at once."""
    under_way, most, salts = 0, 0, []

    async def ask(_session: Any, _target: Any, body: dict) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        salts.append(body["cache_salt"])
        await asyncio.sleep(0.02)
        under_way -= 1

    monkeypatch.setattr(run, "ask", ask)
    traffic = Traffic(prompts=(Prompt(text="def "), Prompt(text="class ")))
    how = {"concurrency": 4, "first": 9, "seconds": seconds, "least": 8, "max_tokens": 5, "name": "a"}
    await keep_busy(Target(url="http://x", key="k", model="m"), traffic, **how)
    assert most == 4
    assert len(salts) == len(set(salts)) >= 8
    assert salts[0] == "a-9"
    assert len(salts) == 8 or seconds


async def test_a_request_that_fails_is_one_line(monkeypatch):
    """Whatever the others do."""

    async def ask(*_: Any) -> None:
        raise aiohttp.ClientPayloadError("cut off")

    monkeypatch.setattr(run, "ask", ask)
    how = {"concurrency": 2, "first": 0, "seconds": 0.0, "least": 2, "max_tokens": 5, "name": "a"}
    traffic = Traffic(prompts=(Prompt(text="x"),))
    with pytest.raises(BenchmarkError, match="a request failed: ClientPayloadError cut off"):
        await keep_busy(Target(url="http://x", key="k", model="m"), traffic, **how)


def test_one_round_is_refused(capsys):
    """It would have no bounds."""
    with pytest.raises(SystemExit):
        parse(["--rounds", "1"])
    assert "--rounds must be 2 or more" in capsys.readouterr().err
    plan, _out = parse(["--concurrency", "4", "4", "2", "--rounds", "3"])
    assert (plan.concurrency, plan.rounds) == ((4, 2), 3)


def test_what_is_read_is_all_that_a_report_says_of_savings():
    """A field that is added there is looked at here."""
    names = ("seconds", "tokens", "money")
    assert set(Saving.model_fields) == {"compared_seconds", "compared_tokens"} | {
        f"{name}{bound}" for name in names for bound in ("", "_low", "_high")
    }
