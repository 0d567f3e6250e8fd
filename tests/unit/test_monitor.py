"""Properties of `appliance.monitor.decide` for any sequence of readings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.monitor import _wait_for_probe, decide
from appliance.speculation.probes import FREE_SWEEPS, SWEEP_STEPS
from appliance.speculation.state import MonitorState
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
SPECULATIVE, PROBING, TARGET_ONLY = SpeculationMode
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
def test_drafting_never_stops_or_starts_twice_within_the_cooldown(seconds: list[Second], seed: int):
    """Only another engine may be found in another mode than was decided."""
    changed_at = -100.0
    for tick in live(seconds, seed=seed):
        if tick.reading is None or tick.before.last is None:
            continue
        was_found = tick.before.last.epoch != tick.reading.epoch
        if was_found and tick.before.mode is not tick.after.mode:
            changed_at = tick.now
        elif not was_found and drafts_by_bucket(tick.before) != drafts_by_bucket(tick.after):
            assert tick.now - changed_at >= POLICY.cooldown_seconds
            changed_at = tick.now


@given(HISTORIES, st.integers(0, 99))
@settings(max_examples=60)
def test_every_reading_gives_valid_windows_and_tables(seconds: list[Second], seed: int):
    """Windows hold no negative counts, the table covers every batch with choices of this engine."""
    for tick in live(seconds, seed=seed):
        state = tick.after
        for window in (state.window, state.long_window, *state.probed, state.stopped_for):
            assert min(window.drafts, window.draft_tokens, window.accepted_tokens) >= 0
            assert all(count >= 0 for count in window.accepted_per_position)
        if state.last is not None:
            ranges = state.table
            assert [first for first, _, _ in ranges] == [1, *(last + 1 for _, last, _ in ranges[:-1])]
            assert ranges[-1][1] == state.largest_batch
            assert {k for _, _, k in ranges} <= set(state.choices)
        assert state.starts_probe <= (state.probe is not None)
        if state.probe is not None:
            assert {k for k, _steps in state.probe.parts} <= set(state.choices)


@given(HISTORIES, st.integers(0, 99))
@settings(max_examples=60)
def test_probes_and_sweeps_stay_within_their_budget(seconds: list[Second], seed: int):
    """A fiftieth of all steps, plus one probe and the first sweeps of each batch bucket."""
    sweep = 2 * SWEEP_STEPS * len(ENGINE.choices)
    for tick in live(seconds, seed=seed):
        state = tick.after
        if state.last is not None:
            free = sweep * sum(min(entry.sweeps, FREE_SWEEPS) for entry in state.buckets.values())
            free += 1 + POLICY.probe_drafts
            assert state.probed_steps <= POLICY.probe_share * state.last.step_count + free


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
    """Mode, table and verdict survive the process that decided them; a probe in flight has failed."""
    for tick in live(seconds, seed=seed):
        reading = tick.worker.reading()
        if reading is None or reading.mode is None:
            continue
        adopted, _decision = decide(START, reading, POLICY, tick.now)
        assert adopted.table == reading.table
        assert adopted.mode is (TARGET_ONLY if reading.mode is PROBING else reading.mode)
        if adopted.mode is TARGET_ONLY:
            assert adopted.verdict in {Reason.COLLAPSED, Reason.BELOW_BREAK_EVEN}


@given(st.lists(ORDERED, max_size=40), st.integers(0, 99))
@settings(max_examples=60)
def test_an_override_applies_at_once_and_ends_cleanly(seconds: list[Second], seed: int):
    """During it the mode is the operator's and nothing is probed; after it control resumes from before."""
    was_stopped = False
    for tick in live(seconds, seed=seed):
        started = tick.before.basis is not Reason.OPERATOR_OVERRIDE
        if tick.override is not None:
            was_stopped = tick.before.mode is not SPECULATIVE if started else was_stopped
            assert tick.after.mode is tick.override
            assert (tick.after.reason, tick.after.probe) == (Reason.OPERATOR_OVERRIDE, None)
            assert {k > 0 for _, _, k in tick.after.table} == {tick.override is SPECULATIVE}
            continue
        assert tick.after.basis is not Reason.OPERATOR_OVERRIDE
        assert (tick.after.before_override, tick.after.override_draft_tokens) == (None, None)
        if not started:
            assert (tick.after.mode is not SPECULATIVE) == was_stopped
            assert (tick.after.verdict is not None) == was_stopped


def test_an_operators_mode_changes_are_no_evidence_about_traffic():
    """The monitor stops and probes no later than without the override."""
    orders = [*[Second(CODE, 1, "", TARGET_ONLY)] * 3, *[Second(CODE, 1, "", None)] * 3] * 6
    calm = list(live([*constant(CODE, 96), *constant(HEX, 60)]))
    ordered = list(live([*constant(CODE, 60), *orders, *constant(HEX, 60)]))
    assert not ordered[95].after.flips
    stops = [
        next(tick for tick in ticks[96:] if tick.after.mode is not SPECULATIVE) for ticks in (calm, ordered)
    ]
    assert stops[1].now <= stops[0].now + 1
    assert stops[1].after.hold_seconds == stops[0].after.hold_seconds


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (3, 3), (2, 2), (1, 1), (9, 3)])
def test_an_override_may_set_the_number_of_draft_tokens(asked: int | None, given: int):
    """Up to the engine's maximum; at every batch size, whatever was measured."""
    tick = after(constant(WARM, 20))
    state, _decision = decide(
        tick.after, tick.reading, POLICY, tick.now, override=SPECULATIVE, draft_tokens=asked
    )
    assert state.table == ((1, 48, given),)


def waits(ticks: list[Tick]) -> list[float]:
    """The back-off after each failed probe."""
    return [
        later.after.next_probe_at - later.now
        for earlier, later in pairwise(ticks)
        if later.after.probes_failed > earlier.after.probes_failed
    ]


def test_probes_of_a_draft_that_never_paid_back_off():
    """The interval doubles with each failed probe, up to the maximum for hopeless drafts."""
    ticks = list(live(constant(HEX, 4000)))
    assert ticks[-1].after.verdict is Reason.COLLAPSED
    assert not ticks[-1].after.has_paid
    assert waits(ticks)[:8] == pytest.approx([10, 20, 40, 80, 160, 320, 640, 900])
    assert max(waits(ticks)) == POLICY.probe_hopeless_seconds


def test_a_draft_that_has_paid_is_probed_at_a_fixed_interval():
    """Every twenty seconds, because text changes back."""
    ticks = list(live([*constant(CODE, 60), *constant(HEX, 300)]))
    assert ticks[-1].after.has_paid
    assert waits(ticks)[:2] == pytest.approx([10, 20])
    assert max(waits(ticks)) == POLICY.probe_longest_seconds


def test_reasons_show_a_collapse_and_a_recovery_in_order():
    ticks = list(live([*constant(CODE, 30), *constant(HEX, 30), *constant(CODE, 60)]))
    shown = [tick.after.reason for tick in ticks]
    changes = [one for one, other in pairwise([*shown, None]) if one is not other]
    assert changes[:4] == [Reason.TOO_FEW_DRAFTS, Reason.HEALTHY, Reason.COLLAPSED, Reason.PROBING]
    assert changes[-3:] == [Reason.PROBING, Reason.RECOVERED, Reason.HEALTHY]
    assert Reason.PROBE_FAILED in changes
    during = [tick.after.verdict for tick in ticks if tick.after.mode is not SPECULATIVE]
    assert set(during) == {Reason.COLLAPSED}


@pytest.mark.parametrize(("text", "verdict"), [(HEX, Reason.COLLAPSED), (WARM, Reason.BELOW_BREAK_EVEN)])
def test_collapsed_and_below_break_even_are_different_verdicts(text: Acceptance, verdict: Reason):
    """The first is an alarm, the second is normal."""
    assert after(constant(text, 60)).after.verdict is verdict


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


@pytest.mark.parametrize("seed", range(8))
def test_a_collapse_after_short_dips_stops_every_batch_size(seed: int):
    """Dips delay the proof of a collapse; the batch size in use stops before."""
    code, noise = Second(CODE, 2, "", None), Second(HEX, 2, "", None)
    dips = ([code] * 8 + [noise]) * 6
    ticks = live([*[code] * 12, *dips, *[code] * 8, *[noise] * 30], seed=seed)
    stopped = [tick.after for tick in ticks if tick.now > 74 and not tick.after.draft_tokens(2)]
    assert stopped[0].verdict is Reason.COLLAPSED
    assert not any(k for _first, _last, k in stopped[0].table)


def test_the_tenth_collapse_is_detected_as_soon_as_the_first():
    """Code and noise alternating by the minute are two kinds of traffic, not a borderline."""
    turns = 10
    ticks = list(live([*constant(CODE, 60, 2), *constant(HEX, 60, 2)] * turns))
    took = [
        next(tick.now for tick in ticks if tick.now > noise and not tick.after.draft_tokens(2)) - noise
        for noise in range(60, 120 * turns, 120)
    ]
    assert max(took[-3:]) <= 3, took


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_repeated_collapse_after_short_dips_is_detected_as_soon_as_the_first(seed: int):
    """The fall itself does not make the traffic one of several kinds, which would take longer to judge."""
    code, noise = Second(CODE, 2, "", None), Second(HEX, 2, "", None)
    dips = ([code] * 8 + [noise]) * 6
    ticks = list(live([*[code] * 12, *dips, *[code] * 8, *([noise] * 60 + [code] * 10) * 4], seed=seed))
    for began in range(74, 74 + 4 * 70, 70):
        stopped = [
            tick for tick in ticks if began < tick.now <= began + 60 and tick.after.mode is TARGET_ONLY
        ]
        assert stopped[0].now - began <= 3
        assert any(tick.after.probes_failed for tick in stopped)


@pytest.mark.parametrize("seed", range(4))
def test_a_collapse_after_a_dip_is_detected_in_seconds_however_often_speculation_stopped(seed: int):
    """Even traffic waits for three times the dip, not longer with each stop of the last half hour."""
    stopped_often = replace(START, dips=(64,), flips=tuple(number / 20 for number in range(20)))
    ticks = live([*constant(CODE, 40, 2), *constant(HEX, 60, 2)], seed=seed, start=stopped_often)
    stop = next(tick for tick in ticks if tick.after.mode is TARGET_ONLY)
    assert (stop.after.verdict, stop.after.dips) == (Reason.COLLAPSED, (64,))
    assert 40 < stop.now <= 44


def test_a_collapse_of_even_traffic_is_probed_in_seconds_whatever_dips_there_were():
    """Drills in a row: many changes lately, and a dip when the last one ended, are no borderline."""
    state = replace(START, dips=(64,), flips=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert _wait_for_probe(state, POLICY, 10.0, Reason.COLLAPSED).hold_seconds <= POLICY.probe_longest_seconds
    uneven = replace(state, squared_z_scores=(50.0,) * 12)
    assert _wait_for_probe(uneven, POLICY, 10.0, Reason.COLLAPSED).hold_seconds > 60


def test_free_sweeps_end_once_costs_are_roughly_known():
    """On a quiet machine after two sweeps; on a busy one after more, but they end."""
    quiet = after(constant(CODE, 40)).after
    busy = after([Second(CODE, 2, "", None)] * 90, engine=BUSY).after
    sweep = 2 * SWEEP_STEPS * len(ENGINE.choices)
    assert quiet.free_steps <= 2 * sweep
    assert 2 * sweep < busy.free_steps <= FREE_SWEEPS * sweep


def test_a_draft_that_is_cheap_enough_may_pay_with_little():
    """Under the collapse limit it is not collapsed if its steps hardly cost more."""
    cheap = replace(ENGINE, seconds=lambda _batch, k: 0.004 * (1.0 + 0.01 * k))
    *_, last = live(constant((0.15, 0.1, 0.1), 60), engine=cheap)
    assert last.after.window.acceptance_length < POLICY.collapsed_below
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
    """At growing intervals until it recovers, then without interruption."""
    shown = outside(Traffic(acceptance=in_turn((20, CODE), (700, HEX), (0, CODE))), 1600)
    assert {state.mode for state in shown} == {SPECULATIVE}
    assert {state.reason for state in shown} == {Reason.NOT_CONTROLLABLE}
    assert {state.table for state in shown} == {()}
    starts = [second for second, (one, other) in enumerate(pairwise(shown)) if other.avoid and not one.avoid]
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    assert 19 <= starts[0] <= 22
    assert pauses == sorted(pauses)
    assert pauses[-1] > 150
    assert not any(state.avoid for state in shown[-100:])
    assert (shown[-1].verdict, shown[-1].probes_failed) == (None, 0)


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


def test_a_load_at_which_nothing_pays_stops_only_that_load():
    """A smaller load continues without a probe or a wait."""
    dear = replace(
        ENGINE, seconds=lambda batch, k: 0.004 * (1.0 + k * (0.1 if batch < 8 else 0.9)), noise=0.05
    )
    ticks = list(live([*constant(CODE, 20), *constant(CODE, 40, 48), *constant(CODE, 20)], engine=dear))
    at_64, back = ticks[59].after, ticks[-1].after
    assert (draft_tokens_at(at_64.table, 48), draft_tokens_at(at_64.table, 1)) == (0, 3)
    assert (at_64.mode, at_64.reason) == (SPECULATIVE, Reason.BELOW_BREAK_EVEN)
    assert draft_tokens_at(back.table, 1) == 3
    assert back.reason is Reason.HEALTHY


def test_a_loss_at_a_large_batch_does_not_stop_a_smaller_one():
    """Nothing is known of the smaller one, so it drafts at once."""
    dear = replace(
        ENGINE, seconds=lambda batch, k: 0.004 * (1.0 + k * (0.1 if batch < 8 else 0.9)), noise=0.05
    )
    ticks = list(live([*constant(CODE, 40, 48), *constant(CODE, 10)], engine=dear))
    assert ticks[39].after.table == ((1, 32, 3), (33, 48, 0))
    large, small = ticks[39].reading, ticks[40].reading
    assert large is not None
    assert small is not None
    assert small.drafting.drafts > large.drafting.drafts
    assert draft_tokens_at(ticks[-1].after.table, 1) == 3


def test_the_simulated_control_loop_and_this_one_agree():
    """The simulation tests apply decisions by the same rules as the runs here."""
    worker = SimulatedWorker(ENGINE, Traffic(acceptance=lambda _now: CODE), seed=3)
    simulated = [poll.state for poll in polls(worker, POLICY, 30.0)]
    assert simulated == [tick.after for tick in live(constant(CODE, 30), seed=3)]
