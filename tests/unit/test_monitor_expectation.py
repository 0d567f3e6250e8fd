"""A draft's record raises the collapse alarm sooner, and changes nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from appliance.monitor import decide
from appliance.speculation.state import MonitorPolicy, MonitorState, collapse_limit, observe
from appliance.speculation.values import EngineReading, Expectation, Reason, SpeculationMode
from tests.scenarios import CODE, CPU, GPU, HEX, POLICY, WARM, at_length
from tests.simulated_worker import Acceptance, Engine, SimulatedWorker, Traffic, length_of

SPECULATIVE = SpeculationMode.SPECULATIVE
START = MonitorState(mode=SPECULATIVE)
FIRST_WINDOW = 400
"""Drafts of a window, by default."""
WEAK = at_length(1.3)
"""A draft loaded with wrong layers, for example; above the default collapse limit."""


def live(
    text: Acceptance,
    expected: float | None,
    seconds: int,
    *,
    engine: Engine = CPU,
    seed: int = 1,
    policy: MonitorPolicy = POLICY,
    outside: bool = False,
) -> Iterator[tuple[SimulatedWorker, MonitorState]]:
    """A worker under control, second by second, whose draft has this record."""
    asked = [True]
    traffic = Traffic(acceptance=lambda _now: text, batch=lambda _now: int(asked[0]))
    worker, state = SimulatedWorker(engine, traffic, seed=seed), START
    for second in range(1, seconds + 1):
        asked[0] = not state.avoid
        worker.run_until(float(second))
        reading = worker.reading()
        assert reading is not None
        reading = replace(reading, expected_length=expected, controllable=not outside)
        state, decision = decide(state, reading, policy, float(second))
        yield worker, state
        if not outside:
            worker.apply(decision, reading)


def collapse(lives: Iterator[tuple[SimulatedWorker, MonitorState]]) -> tuple[int, MonitorState] | None:
    """Drafts until the draft was collapsed, and the state then; None if it never was."""
    for worker, state in lives:
        if state.verdict is Reason.COLLAPSED:
            return worker.drafts_made, state
    return None


@pytest.mark.parametrize("seed", range(12))
def test_a_draft_far_below_its_record_has_collapsed(seed: int):
    """1.25 against a recorded 2.7; it counts as one that never paid."""
    found = collapse(live(at_length(1.25), 2.7, 90, seed=seed))
    assert found is not None
    _drafts, state = found
    assert not state.has_paid
    assert state.mode is SpeculationMode.TARGET_ONLY


@pytest.mark.parametrize("seed", range(12))
def test_a_clear_shortfall_is_detected_within_the_first_window(seed: int):
    """1.27 is above the default limit, and far below that of a recorded 3.4."""
    found = collapse(live(at_length(1.27), 3.4, 90, seed=seed))
    assert found is not None
    # What it took beyond the window are the drafts of the seconds in which it was seen and doubted.
    assert found[0] <= 2 * FIRST_WINDOW


@pytest.mark.parametrize("seed", range(5))
def test_without_a_record_the_same_draft_has_not_collapsed(seed: int):
    """1.3 may be all that such a draft ever gave."""
    assert collapse(live(WEAK, None, 60, seed=seed)) is None
    assert collapse(live(WEAK, 2.9, 60, seed=seed)) is not None


def test_a_useless_draft_with_a_record_is_detected_at_once():
    """No later than without a record."""
    with_promise, without = (collapse(live(HEX, expected, 60)) for expected in (2.7, None))
    assert with_promise is not None
    assert without is not None
    assert with_promise[0] <= without[0]
    assert not with_promise[1].has_paid


def test_a_worker_without_control_is_avoided_by_its_record():
    promised = [state for _worker, state in live(WEAK, 2.9, 60, outside=True) if state.avoid]
    assert promised
    assert {state.verdict for state in promised} == {Reason.COLLAPSED}
    assert not any(state.avoid for _worker, state in live(WEAK, None, 60, outside=True))


PROMISES = st.integers(1, 3).flatmap(
    lambda tokens: st.lists(
        st.integers(0, 1000).map(lambda thousandths: thousandths / 1000), min_size=tokens, max_size=tokens
    ).map(tuple)
)
"""For each position, the chance of a draft token whose predecessors were accepted."""


@given(PROMISES, st.sampled_from((CPU, GPU)), st.integers(0, 99))
@example((1.0, 0.0, 0.0), CPU, 0)
@example((1.0, 1.0, 1.0), CPU, 0)
@example((0.3, 1.0, 1.0), GPU, 0)
@settings(max_examples=30)
def test_a_draft_that_performs_as_recorded_never_collapses_by_it(text: Acceptance, engine: Engine, seed: int):
    """The limit is always below its acceptance length, or the default one."""
    recorded = Expectation(acceptance_length=length_of(text, len(text)), draft_tokens=len(text))
    text = (*text, *(0.0,) * (3 - len(text)))
    promised = recorded.at(max(engine.choices))
    for _worker, state in live(text, promised, 20, engine=engine, seed=seed):
        if state.has_paid:
            break
        for k in (1, 2, 3):
            limit = collapse_limit(state, POLICY, k)
            assert limit == POLICY.collapsed_below or limit <= length_of(text, k)
    # What was said of it was said without the promise, too.
    alone = collapse(live(text, None, 20, engine=engine, seed=seed))
    told = collapse(live(text, promised, 20, engine=engine, seed=seed))
    assert told is None or alone is not None


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=16).map(lambda rates: sorted(rates, reverse=True)),
    st.integers(1, 16),
    st.integers(1, 16),
)
@example([0.5] * 16, 16, 1)
@example([1.0] * 8, 16, 1)
def test_the_limit_of_a_record_stays_below_its_own_acceptance(rates: list[float], most: int, depth: int):
    """For any number of draft tokens in the record, the worker and the drafts."""
    depth = min(depth, most)
    recorded = Expectation(acceptance_length=1.0 + sum(rates), draft_tokens=len(rates))
    reading = reading_of(recorded.at(most), choices=(0, *range(1, most + 1)))
    state = observe(START, reading, POLICY)
    shown = 1.0 + sum(rates[:depth])
    limit = collapse_limit(state, POLICY, depth)
    assert limit == POLICY.collapsed_below or limit <= shown


@given(st.floats(1, 17), st.integers(0, 16))
def test_a_record_only_raises_the_collapse_limit(promised: float, depth: int):
    """A record of almost no acceptance cannot suppress an alarm."""
    state = observe(START, reading_of(promised), POLICY)
    assert collapse_limit(state, POLICY, depth) >= POLICY.collapsed_below


def reading_of(promised: float | None, *, epoch: str = "one", choices: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """The first reading of a plugin."""
    return EngineReading(controllable=True, epoch=epoch, choices=choices, expected_length=promised)


@given(st.sampled_from((CODE, HEX, WARM, WEAK)), st.integers(0, 99))
@settings(max_examples=15)
def test_a_worker_without_a_record_is_judged_as_before(text: Acceptance, seed: int):
    """Baseline and limit are those without records."""
    for _worker, state in live(text, None, 30, seed=seed):
        assert (state.baseline_length is None) is (not state.has_paid)
        if not state.has_paid:
            assert collapse_limit(state, POLICY, 3) == POLICY.collapsed_below


class TestWhatWasLearnt:
    """The measured baseline replaces the record's."""

    def test_the_record_counts_until_the_draft_has_paid(self):
        """Then the measured length replaces it at once."""
        told, learnt = [], []
        for _worker, state in live(CODE, 3.9, 30):
            (learnt if state.has_paid else told).append(state.baseline_length)
        assert set(told) == {3.9}
        assert learnt
        assert max(learnt) < length_of(CODE, 3) + 0.3

    def test_a_restart_keeps_the_measured_baseline(self):
        *_, (_worker, state) = live(CODE, 3.9, 30)
        again = observe(state, reading_of(3.9, epoch="two"), POLICY)
        assert (again.has_paid, again.baseline_length) == (True, state.baseline_length)

    def test_a_restart_before_a_baseline_takes_the_new_record(self):
        first = observe(START, reading_of(2.7), POLICY)
        first = replace(first, last=reading_of(2.7))
        assert first.baseline_length == 2.7
        for promised in (1.9, None):
            assert observe(first, reading_of(promised, epoch="two"), POLICY).baseline_length == promised

    def test_another_draft_starts_without_a_baseline(self):
        """A restart without any draft keeps it."""
        *_, (_worker, state) = live(CODE, None, 30)
        state = replace(state, draft="sha256:one")
        alone = replace(reading_of(None, epoch="alone"), controllable=False)
        state = replace(observe(state, alone, POLICY), last=alone)
        back = observe(state, replace(reading_of(2.7, epoch="two"), draft="sha256:one"), POLICY)
        assert (back.has_paid, back.baseline_length, back.draft) == (
            True,
            state.baseline_length,
            "sha256:one",
        )
        other = observe(state, replace(reading_of(2.7, epoch="two"), draft="sha256:two"), POLICY)
        assert (other.has_paid, other.baseline_length, other.draft) == (False, 2.7, "sha256:two")
        assert (other.squared_z_scores, other.dips, other.flips) == ((), (), ())

    def test_a_worker_recovers_from_an_excessive_record(self):
        """Traffic may differ from the record's: a probe that pays resumes speculation for good."""
        *_, (_worker, state) = live(at_length(1.5), 4.0, 240, engine=GPU)
        assert state.has_paid
        assert state.mode is SPECULATIVE
        assert state.baseline_length is not None
        assert state.baseline_length < 1.6
