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
from tests.scenarios import CPU, GPU, HEX, POLICY, at_length
from tests.simulated_worker import Acceptance, Engine, SimulatedWorker, Traffic, length_of

SPECULATIVE = SpeculationMode.SPECULATIVE
START = MonitorState(mode=SPECULATIVE)
WEAK = at_length(1.38)
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("length", "promised"), [(1.25, 2.7), (1.27, 3.4)])
def test_a_draft_far_below_its_record_has_collapsed(length: float, promised: float, seed: int):
    """Within seconds: the default limit is below or hardly above its length, and that of the record far."""
    found = collapse(live(at_length(length), promised, 30, seed=seed))
    assert found is not None
    assert found[1].mode is SpeculationMode.TARGET_ONLY


@pytest.mark.parametrize("seed", range(5))
def test_without_a_record_the_same_draft_has_not_collapsed(seed: int):
    """1.38 may be all that such a draft ever gave."""
    assert collapse(live(WEAK, None, 60, seed=seed)) is None
    assert collapse(live(WEAK, 3.4, 60, seed=seed)) is not None


def test_a_useless_draft_with_a_record_is_detected_at_once():
    """No later than without a record."""
    with_promise, without = (collapse(live(HEX, expected, 60)) for expected in (2.7, None))
    assert with_promise is not None
    assert without is not None
    assert with_promise[0] <= without[0]


def test_a_worker_without_control_is_avoided_by_its_record():
    promised = [state for _worker, state in live(WEAK, 3.4, 60, outside=True) if state.avoid]
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
    state = observe(START, reading, POLICY, 0.0)
    shown = 1.0 + sum(rates[:depth])
    limit = collapse_limit(state, POLICY, depth)
    assert limit == POLICY.collapsed_below or limit <= shown


@given(st.floats(1, 17), st.integers(0, 16))
def test_a_record_only_raises_the_collapse_limit(promised: float, depth: int):
    """A record of almost no acceptance cannot suppress an alarm."""
    state = observe(START, reading_of(promised), POLICY, 0.0)
    assert collapse_limit(state, POLICY, depth) >= POLICY.collapsed_below


def reading_of(promised: float | None, *, epoch: str = "one", choices: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    """The first reading of a plugin."""
    return EngineReading(controllable=True, epoch=epoch, choices=choices, expected_length=promised)


def test_without_a_record_the_limit_is_that_of_the_settings():
    assert collapse_limit(observe(START, reading_of(None), POLICY, 0.0), POLICY, 3) == POLICY.collapsed_below


def test_another_engine_has_the_record_of_its_own_draft():
    first = observe(START, reading_of(2.7), POLICY, 0.0)
    for promised in (1.9, None):
        assert observe(first, reading_of(promised, epoch="two"), POLICY, 1.0).expected_length == promised


def test_a_draft_that_pays_drafts_whatever_its_record_promised():
    """Traffic may differ from the record's."""
    *_, (_worker, state) = live(at_length(1.5), 4.0, 60, engine=GPU)
    assert (state.mode, state.verdict) == (SPECULATIVE, None)
