"""Properties of `appliance.monitor.decide` for any sequence of readings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.monitor import decide
from appliance.speculation.evidence import Acceptance as Evidence
from appliance.speculation.exploration import PROMISING_SECONDS
from appliance.speculation.state import BUDGET_SECONDS, LOAN_SECONDS, MonitorState
from appliance.speculation.values import (
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    buckets_up_to,
    draft_tokens_at,
)
from tests.scenarios import CODE, CPU, HEX, POLICY, WARM, at_payoff, in_turn
from tests.simulated_worker import Acceptance, Engine, SimulatedWorker, Traffic, polls

START = MonitorState(mode=SpeculationMode.SPECULATIVE)
SPECULATIVE, TARGET_ONLY = SpeculationMode
ENGINE = replace(CPU, largest_batch=48)
"""Slow enough for a few hundred steps a second; its largest batch is not a power of two."""
TEXTS: tuple[Acceptance, ...] = (CODE, HEX, WARM, at_payoff(CPU, 0.0), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))


@dataclass(frozen=True)
class Second:
    """One second of traffic, and the fault in the reading at its end."""

    text: Acceptance
    batch: int
    mishap: str
    override: SpeculationMode | None


SECONDS = st.builds(
    Second,
    text=st.sampled_from(TEXTS),
    batch=st.sampled_from((0, 1, 1, 2, 7, 48)),
    mishap=st.sampled_from(("",) * 12 + ("outage", "restart", "reset", "short", "untold", "garbled")),
    override=st.just(None),
)
ORDERED = st.builds(
    Second,
    text=st.sampled_from(TEXTS),
    batch=st.sampled_from((0, 1, 7, 48)),
    mishap=st.just(""),
    override=st.sampled_from((None, None, None, SPECULATIVE, TARGET_ONLY)),
)
HISTORIES = st.lists(
    st.tuples(SECONDS, st.integers(1, 8)).map(lambda pair: [pair[0]] * pair[1]), max_size=10
).map(lambda runs: [second for run in runs for second in run])
"""Traffic that stays constant for some seconds, then changes."""


@dataclass(frozen=True)
class Tick:
    """One call of `decide`, with its inputs and outputs."""

    now: float
    before: MonitorState
    reading: EngineReading | None
    after: MonitorState
    worker: SimulatedWorker
    override: SpeculationMode | None


def live(
    seconds: list[Second], *, engine: Engine = ENGINE, seed: int = 0, start: MonitorState = START
) -> Iterator[Tick]:
    """A worker under control, second by second."""
    current = [Second(CODE, 1, "", None)]
    traffic = Traffic(acceptance=lambda _now: current[0].text, batch=lambda _now: current[0].batch)
    worker, state = SimulatedWorker(engine, traffic, seed=seed), start
    for count, second in enumerate(seconds, start=1):
        current[0] = second
        if second.mishap == "restart":
            worker.restart()
        worker.run_until(float(count))
        reading = spoilt(worker.reading(), second.mishap)
        before = state
        state, decision = decide(state, reading, POLICY, float(count), override=second.override)
        yield Tick(float(count), before, reading, state, worker, second.override)
        if reading is not None and second.mishap != "untold":
            worker.apply(decision, reading)


def spoilt(reading: EngineReading | None, mishap: str) -> EngineReading | None:
    """The reading after the fault."""
    if reading is None or mishap == "outage":
        return None
    drafting = reading.drafting
    match mishap:
        case "reset":
            drafting = replace(
                drafting,
                drafts=drafting.drafts // 2,
                draft_tokens=drafting.draft_tokens // 2,
                accepted_tokens=drafting.accepted_tokens // 2,
            )
        case "short":
            drafting = replace(
                drafting,
                accepted_per_position=drafting.accepted_per_position[:1],
                drafted_per_position=drafting.drafted_per_position[:2],
            )
        case "garbled":
            steps = {kind: replace(cell, seconds=-cell.seconds) for kind, cell in reading.steps.items()}
            return replace(reading, steps=steps, batch=999)
    return replace(reading, drafting=drafting)


def drafts_by_bucket(state: MonitorState) -> dict[int, bool]:
    """Whether the worker drafts, by batch bucket."""
    return {bucket: state.draft_tokens(bucket) > 0 for bucket in buckets_up_to(48)}


def after(seconds: list[Second], *, engine: Engine = ENGINE, seed: int = 0) -> Tick:
    """The last tick of a run."""
    *_, last = live(seconds, engine=engine, seed=seed)
    return last


def constant(text: Acceptance, count: int, batch: int = 1) -> list[Second]:
    """This many seconds of constant traffic."""
    return [Second(text, batch, "", None)] * count


@given(HISTORIES, st.integers(0, 99))
@settings(max_examples=60)
def test_every_reading_gives_valid_tables_and_names(seconds: list[Second], seed: int):
    """The table covers every batch with choices of this engine; a verdict needs one that does not draft."""
    for tick in live(seconds, seed=seed):
        state = tick.after
        if state.last is not None:
            ranges = state.table
            assert [first for first, _, _ in ranges] == [1, *(last + 1 for _, last, _ in ranges[:-1])]
            assert ranges[-1][1] == state.largest_batch
            assert {k for _, _, k in ranges} <= set(state.choices)
        assert state.starts_probe <= (state.probe != ())
        assert {k for k, _steps in state.probe} <= set(state.choices)
        assert (state.verdict is not None) == (state.mode is TARGET_ONLY)
        if state.mode is TARGET_ONLY:
            assert state.basis is state.verdict
        if state.bucket is not None and state.table != tick.before.table:
            # With another table the mode is that of the batch size in use.
            assert (state.mode is SPECULATIVE) == (state.draft_tokens(state.bucket_in_use) > 0)


@given(HISTORIES, st.integers(0, 99))
@settings(max_examples=60)
def test_exploration_stays_within_its_budget(seconds: list[Second], seed: int):
    """Its expected price is at most a hundredth of engine time and the debt, a loan and few probes."""
    share = POLICY.exploration_share
    # One that promised to cost nothing at batch size 1, and then the largest batch came.
    dearest = 1.25 * PROMISING_SECONDS / ENGINE.seconds(1, 0) * ENGINE.seconds(48, 3)
    kept = 0.0
    for tick in live(seconds, seed=seed):
        state = tick.after
        if not state.engine_seconds:
            kept = state.bank  # over a restart of the engine
        assert 0.0 <= state.bank <= share * BUDGET_SECONDS
        assert 0.0 <= state.debt <= share * LOAN_SECONDS + 2 * dearest
        # Of what was earned minutes ago less is left in `engine_seconds`.
        earned = 1.1 * share * state.engine_seconds
        assert 0.0 <= state.lost_seconds <= earned + kept + state.debt + 1e-9


@given(HISTORIES, SECONDS, st.integers(0, 99))
@settings(max_examples=60)
def test_an_outage_changes_only_the_reason(seconds: list[Second], following: Second, seed: int):
    """The decision after it is the same as without it."""
    tick = after([*seconds, following], seed=seed)
    missed, _decision = decide(tick.before, None, POLICY, tick.now - 0.5)
    assert missed == replace(tick.before, reason=Reason.SCRAPE_FAILED, starts_probe=False)
    assert decide(missed, tick.reading, POLICY, tick.now) == (tick.after, tick.after.decision)


@given(HISTORIES, st.sampled_from(TEXTS), st.integers(1, 6), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=150)
@example([], HEX, 1, 1.0, 0)
@example(constant(CODE, 20), HEX, 1, 0.3, 0)
@example(constant(WARM, 3), WARM, 2, 0.2, 0)
def test_more_accepted_tokens_never_stop_a_worker(
    seconds: list[Second], text: Acceptance, count: int, share: float, seed: int
):
    """From the same state, a reading with more accepted tokens stops no bucket that the other keeps."""
    for tick in list(live([*seconds, *constant(text, count)], seed=seed))[-count:]:
        if tick.reading is None or tick.before.last is None or tick.before.mode is not SPECULATIVE:
            continue
        better = with_more_accepted(tick.before.last, tick.reading, share)
        then, _decision = decide(tick.before, better, POLICY, tick.now)
        for bucket, drafts in drafts_by_bucket(tick.after).items():
            assert drafts_by_bucket(then)[bucket] >= drafts


def with_more_accepted(before: EngineReading, reading: EngineReading, share: float) -> EngineReading:
    """The reading with a share of its rejected tokens accepted."""
    difference = reading.drafting.since(before.drafting)
    if difference is None or len(difference.drafted_per_position) != len(difference.accepted_per_position):
        return reading
    accepted, limit = [], difference.drafts
    for old, fresh, drafted in zip(
        reading.drafting.accepted_per_position,
        difference.accepted_per_position,
        difference.drafted_per_position,
        strict=True,
    ):
        limit = fresh + int(share * max(0, min(limit, drafted) - fresh))
        accepted.append(old - fresh + limit)
    drafting = replace(reading.drafting, accepted_per_position=tuple(accepted), accepted_tokens=sum(accepted))
    return replace(reading, drafting=drafting)


def test_the_monotony_examples_contain_a_stop():
    """Without one the property above is vacuous."""
    stopped = after([*constant(CODE, 20), *constant(HEX, 1)])
    assert (stopped.before.mode, stopped.after.mode) == (SPECULATIVE, TARGET_ONLY)
    assert stopped.reading is not None
    assert stopped.before.last is not None
    better = with_more_accepted(stopped.before.last, stopped.reading, 0.5)
    assert decide(stopped.before, better, POLICY, stopped.now)[1].mode is SPECULATIVE


@given(HISTORIES, st.integers(0, 99))
@settings(max_examples=40)
def test_a_new_control_process_adopts_the_workers_last_command(seconds: list[Second], seed: int):
    """Mode, table and verdict survive the process that decided them."""
    for tick in live(seconds, seed=seed):
        reading = tick.worker.reading()
        if reading is None or reading.mode is None:
            continue
        adopted, decision = decide(START, reading, POLICY, tick.now)
        assert (adopted.table, adopted.mode) == (reading.table, reading.mode)
        assert decision.probe == ()
        assert adopted.verdict is (reading.reason if reading.mode is TARGET_ONLY else None)


@given(st.lists(ORDERED, max_size=40), st.integers(0, 99))
@settings(max_examples=60)
def test_an_override_applies_at_once_and_ends_cleanly(seconds: list[Second], seed: int):
    """During it the mode is the operator's and nothing is probed; then the choice from before is in force."""
    choice = START.choice
    for tick in live(seconds, seed=seed):
        started = tick.before.basis is not Reason.OPERATOR_OVERRIDE
        if tick.override is not None:
            if started or tick.before.last is None:
                choice = tick.before.choice if tick.before.last is not None else tick.after.choice
            assert tick.after.mode is tick.override
            assert (tick.after.reason, tick.after.probe) == (Reason.OPERATOR_OVERRIDE, ())
            assert tick.after.verdict is None
            assert {k > 0 for _, _, k in tick.after.table} == {tick.override is SPECULATIVE}
            assert tick.after.choice == choice
            continue
        assert tick.after.basis is not Reason.OPERATOR_OVERRIDE
        assert tick.after.override_draft_tokens is None


def test_after_an_override_the_worker_does_what_it_did_before():
    """At once, with the verdict of its own evidence."""
    ticks = list(live([*constant(CODE, 20), *constant(HEX, 20)]))
    stopped = ticks[-1].after
    reading = ticks[-1].reading
    forced, _decision = decide(stopped, reading, POLICY, 40.0, override=SPECULATIVE)
    assert forced.table == ((1, 48, 3),)
    back, decision = decide(forced, reading, POLICY, 41.0)
    assert (back.table, back.mode, back.verdict) == (stopped.table, TARGET_ONLY, Reason.COLLAPSED)
    assert decision.basis is Reason.COLLAPSED


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (3, 3), (2, 2), (1, 1), (9, 3)])
def test_an_override_may_set_the_number_of_draft_tokens(asked: int | None, given: int):
    """Up to the engine's maximum; at every batch size, whatever was measured."""
    tick = after(constant(WARM, 20))
    state, _decision = decide(
        tick.after, tick.reading, POLICY, tick.now, override=SPECULATIVE, draft_tokens=asked
    )
    assert state.table == ((1, 48, given),)


def test_reasons_show_a_collapse_and_a_recovery_in_order():
    ticks = list(live([*constant(CODE, 30), *constant(HEX, 30), *constant(CODE, 60)]))
    shown = [tick.after.reason for tick in ticks]
    changes = [one for one, other in pairwise([*shown, None]) if one is not other]
    # Before it is sure that drafting pays again, it may be sure that tokens are accepted again.
    passing = {Reason.TOO_FEW_DRAFTS, Reason.BELOW_BREAK_EVEN}
    changes = [reason for reason in changes if reason not in passing]
    assert changes[:4] == [Reason.HEALTHY, Reason.COLLAPSED, Reason.RECOVERED, Reason.HEALTHY]
    during = [tick.after.verdict for tick in ticks if tick.after.mode is TARGET_ONLY and tick.now <= 60]
    assert set(during) == {Reason.COLLAPSED}
    assert ticks[-1].after.basis is not Reason.COLLAPSED


def test_a_mode_without_a_new_table_is_said_after_it_has_held():
    """A short burst of a batch size that does not draft is no change of mode."""
    dear = replace(
        ENGINE, seconds=lambda batch, k: 0.004 * (1.0 + k * (0.1 if batch < 8 else 0.9)), noise=0.05
    )
    learnt = [*constant(CODE, 20), *constant(CODE, 20, 48), *constant(CODE, 30)]
    ticks = list(
        live([*learnt, *constant(CODE, 4, 48), *constant(CODE, 8), *constant(CODE, 30, 48)], engine=dear)
    )
    assert (ticks[69].after.draft_tokens(1), ticks[69].after.draft_tokens(64)) == (3, 0)
    assert {tick.after.mode for tick in ticks[65:82]} == {SPECULATIVE}
    last = ticks[-1].after
    assert (last.mode, last.verdict) == (TARGET_ONLY, Reason.BELOW_BREAK_EVEN)
    changed = next(tick for tick in ticks[82:] if tick.after.mode is TARGET_ONLY)
    has_new_table = changed.after.table != changed.before.table
    assert has_new_table or changed.now - 82 >= POLICY.recent_seconds


@pytest.mark.parametrize(("text", "verdict"), [(HEX, Reason.COLLAPSED), (WARM, Reason.BELOW_BREAK_EVEN)])
def test_collapsed_and_below_break_even_are_different_verdicts(text: Acceptance, verdict: Reason):
    """The first is an alarm, the second is normal."""
    assert after(constant(text, 60)).after.verdict is verdict


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_a_useless_draft_is_said_to_have_collapsed_and_stops_at_every_batch_size(batch: int, seed: int):
    """Whatever the batch size in use, and at those that were never used."""
    last = after(constant((0.03, 0.01, 0.0), 30, batch), seed=seed).after
    assert (last.mode, last.verdict) == (TARGET_ONLY, Reason.COLLAPSED)
    assert last.draft_tokens(last.bucket_in_use) == 0
    assert sum(last.choice.values()) <= 3


BUSY = replace(
    CPU,
    seconds=lambda batch, k: 4 * CPU.seconds(batch, k),
    noise=0.5,
    stalls=((0.03, 5.0),),
    prompts=0.1,
    wander=0.2,
)
"""A worker on a busy machine: fifty steps a second, with very uneven times."""


@pytest.mark.parametrize("seed", range(16))
def test_a_collapse_is_detected_on_a_machine_too_busy_for_costs(seed: int):
    """Drafts that seem to pay do not keep running until the budget allows another sweep."""
    code, noise = Second(CODE, 2, "", None), Second((0.15, 0.05, 0.02), 2, "", None)
    stopped = (
        tick.now for tick in live([code] * 12 + [noise] * 60, engine=BUSY, seed=seed)
        if tick.now > 12 and not tick.after.draft_tokens(2)
    )  # fmt: skip
    assert next(stopped) - 12 <= 15


def test_probe_does_not_wait_for_the_tables_of_other_batch_sizes():
    """While those change from tick to tick, the batch size in use is explored."""
    changed = [
        tick for seed in range(8) for tick in live([*constant(CODE, 12, 2), *constant(HEX, 6, 2)], seed=seed)
        if tick.after.bucket is not None and tick.after.choice != tick.before.choice
    ]  # fmt: skip
    own = [tick for tick in changed if tick.after.choice[2] != tick.before.choice[2]]
    others = [tick for tick in changed if tick.after.choice[2] == tick.before.choice[2]]
    assert any(tick.after.starts_probe for tick in others)
    assert not any(tick.after.starts_probe for tick in own), "its drafts are of the text before"


def test_the_tenth_collapse_is_detected_as_soon_as_the_first():
    """Code and noise alternating by the minute are two kinds of traffic, not a borderline."""
    turns = 10
    ticks = list(live([*constant(CODE, 60, 2), *constant(HEX, 60, 2)] * turns))
    took = [
        next(tick.now for tick in ticks if tick.now > noise and not tick.after.draft_tokens(2)) - noise
        for noise in range(60, 120 * turns, 120)
    ]
    assert max(took[-3:]) <= 3, took


def test_a_draft_that_is_cheap_enough_may_pay_with_little():
    """Under the collapse limit it is not collapsed if its steps hardly cost more."""
    cheap = replace(ENGINE, seconds=lambda _batch, k: 0.004 * (1.0 + 0.01 * k))
    *_, last = live(constant((0.15, 0.1, 0.1), 60), engine=cheap)
    assert last.after.acceptance.total.acceptance_length < POLICY.collapsed_below
    assert (last.after.mode, last.after.verdict) == (SPECULATIVE, None)


def outside(traffic: Traffic, seconds: int, *, seed: int = 1) -> list[MonitorState]:
    """States of a worker without control; it drafts while it is not avoided."""
    asked = [True]
    seen_by_avoidance = replace(traffic, batch=lambda now: traffic.batch(now) if asked[0] else 0)
    worker, state, shown = SimulatedWorker(ENGINE, seen_by_avoidance, seed=seed), START, []
    for second in range(1, seconds + 1):
        asked[0] = not state.avoid
        worker.run_until(float(second))
        reading = worker.reading()
        assert reading is not None
        counted = EngineReading(controllable=False, epoch="outside", drafting=reading.drafting)
        state, _decision = decide(state, counted, POLICY, float(second))
        shown.append(state)
    return shown


def test_a_collapsed_worker_without_control_is_avoided_and_retried():
    """For a hundred times as long as it took to find out, at most ten minutes."""
    shown = outside(Traffic(acceptance=in_turn((20, CODE), (700, HEX), (0, CODE))), 1600)
    assert {state.mode for state in shown} == {SPECULATIVE}
    assert {state.reason for state in shown} == {Reason.NOT_CONTROLLABLE}
    assert {state.table for state in shown} == {()}
    avoided = [state.avoid for state in shown]
    first = avoided.index(True) + 1
    assert 20 <= first <= 23
    assert not any(avoided[-100:])
    assert sum(avoided[20:700]) > 0.95 * 680
    assert shown[-1].verdict is None


def test_a_worker_that_lost_control_is_speculative_if_it_drafts():
    """A plugin that withdrew has restored the engine's first table."""
    tick = after([*constant(CODE, 20), *constant(HEX, 20)])
    assert tick.after.mode is TARGET_ONLY
    assert tick.reading is not None
    drafting = tick.reading.drafting
    more = SpecDecodeCounters(
        drafts=drafting.drafts + 100,
        draft_tokens=drafting.draft_tokens + 300,
        accepted_tokens=drafting.accepted_tokens,
        accepted_per_position=drafting.accepted_per_position,
        drafted_per_position=tuple(count + 100 for count in drafting.drafted_per_position),
    )
    withdrawn = replace(tick.reading, controllable=False, problems=("a hook failed",), drafting=more)
    state, _decision = decide(tick.after, withdrawn, POLICY, tick.now + 1)
    assert (state.mode, state.reason, state.table) == (SPECULATIVE, Reason.NOT_CONTROLLABLE, ())
    # Without drafts to judge by, the alarm from before stays.
    unjudged = replace(tick.after, acceptance=Evidence())
    state, decision = decide(unjudged, replace(withdrawn, drafting=drafting), POLICY, tick.now + 1)
    assert (state.mode, state.avoid, decision.verdict) == (TARGET_ONLY, False, Reason.COLLAPSED)


def test_a_load_at_which_nothing_pays_stops_only_that_load():
    """A smaller load drafts again at once."""
    dear = replace(
        ENGINE, seconds=lambda batch, k: 0.004 * (1.0 + k * (0.1 if batch < 8 else 0.9)), noise=0.05
    )
    ticks = list(live([*constant(CODE, 20), *constant(CODE, 40, 48), *constant(CODE, 20)], engine=dear))
    at_64, back = ticks[59].after, ticks[-1].after
    assert (draft_tokens_at(at_64.table, 48), draft_tokens_at(at_64.table, 1)) == (0, 3)
    assert (at_64.mode, at_64.reason) == (TARGET_ONLY, Reason.BELOW_BREAK_EVEN)
    assert draft_tokens_at(back.table, 1) == 3
    assert (back.mode, back.reason) == (SPECULATIVE, Reason.HEALTHY)


def test_the_simulated_control_loop_and_this_one_agree():
    """The simulation tests apply decisions by the same rules as the runs here."""
    worker = SimulatedWorker(ENGINE, Traffic(acceptance=lambda _now: CODE), seed=3)
    simulated = [poll.state for poll in polls(worker, POLICY, 30.0)]
    assert simulated == [tick.after for tick in live(constant(CODE, 30), seed=3)]
