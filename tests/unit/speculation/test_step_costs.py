"""Costs of steps: one estimate over all batch buckets and draft tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.speculation.costs import CostModel
from appliance.speculation.values import StepCounters

START = CostModel.unmeasured(16, (0, 1, 2, 3), spread=0.4, now=0.0)


def steps(count: int, each: float, spread: float = 0.0) -> StepCounters:
    """Counters of steps with this mean and standard deviation of seconds."""
    squared = count * (each**2 + spread**2)
    return StepCounters(
        steps=count, seconds=count * each, seconds_squared=squared, requests=count, tokens=2 * count
    )


def cost(model: CostModel, bucket: int = 1, k: int = 3, instead_of: int = 0, now: float = 0.0) -> float:
    """S(K) over the seconds of a step with another K."""
    return math.exp(model.ratio(bucket, k, instead_of, now).mean)


def doubt(model: CostModel, bucket: int = 1, k: int = 3, instead_of: int = 0, now: float = 0.0) -> float:
    """The standard deviation of its logarithm."""
    return math.sqrt(model.ratio(bucket, k, instead_of, now).variance)


def test_a_cost_is_the_ratio_of_step_times():
    """A step with three draft tokens that takes twice as long pays above two tokens a draft."""
    model = START.measured(1, {0: steps(100, 0.010), 3: steps(100, 0.020)}, 5.0)
    assert cost(model) == pytest.approx(2.0, rel=0.01)
    assert model.break_evens(1) == pytest.approx({3: 2.0}, rel=0.01)
    assert model.break_evens(2) == {}
    assert set(model.seconds_per_token) == {1}
    assert model.seconds_per_token[1] == pytest.approx({0: 0.005, 3: 0.010})


def test_what_was_never_measured_is_a_guess():
    assert doubt(START) == pytest.approx(0.4)
    assert cost(START, k=1) < cost(START, k=3)
    assert not START.is_measured(1)
    assert START.break_evens(1) == {}


@pytest.mark.parametrize(
    "span",
    [
        {3: steps(100, 0.02)},
        {0: steps(3, 0.01), 3: steps(100, 0.02)},
        {0: steps(100, 0.01), 3: steps(3, 0.02)},
        {0: steps(100, 0.0), 3: steps(100, 0.02)},
        {0: steps(100, 0.01), 3: steps(-5, 0.02)},
        {0: steps(100, 0.01), 7: steps(100, 0.02)},
        {},
    ],
)
def test_costs_need_both_sides_of_a_comparison(span: dict[int, StepCounters]):
    """Steps of one kind only, too few of them, of an unknown kind, or counters gone backwards."""
    assert START.measured(1, span, 1.0) is START


def test_steps_with_draft_tokens_can_be_compared_with_each_other():
    """Which of both is better is then known; whether either pays is not."""
    model = START.measured(1, {1: steps(100, 0.010), 3: steps(100, 0.014)}, 0.0)
    assert cost(model, instead_of=1) == pytest.approx(1.4, rel=0.01)
    assert doubt(model, instead_of=1) < 0.01
    assert doubt(model) > 0.25


def test_a_neighbouring_batch_bucket_is_half_known():
    """And the farther, the less; another K at the same one, more."""
    model = START.measured(4, {0: steps(100, 0.010), 3: steps(100, 0.020)}, 0.0)
    guesses = [cost(model, bucket) for bucket in (4, 8, 16)]
    assert guesses == sorted(guesses, reverse=True)
    assert doubt(model, 4) < 0.01
    assert 0.3 < doubt(model, 8) < doubt(model, 16) < 0.4
    assert doubt(model, 4, k=2) < doubt(model, 8, k=3)


def test_measurements_add_up_and_age():
    """Three per cent in ten minutes, and all of the first doubt in a day."""
    one = START.measured(1, {0: steps(50, 0.010, 0.003), 3: steps(50, 0.020, 0.006)}, 0.0)
    two = one.measured(1, {0: steps(50, 0.010, 0.003), 3: steps(50, 0.024, 0.007)}, 0.0)
    assert cost(two) == pytest.approx(math.sqrt(2.0 * 2.4), rel=0.01)
    assert doubt(two) == pytest.approx(doubt(one) / math.sqrt(2), rel=0.05)
    assert doubt(two, now=600.0) ** 2 - doubt(two) ** 2 == pytest.approx(0.0333**2, rel=0.02)
    assert doubt(two, now=86400.0) == pytest.approx(0.4, rel=0.02)
    later = two.measured(1, {0: steps(50, 0.010, 0.003), 3: steps(50, 0.030, 0.009)}, 86400.0)
    assert cost(later) == pytest.approx(3.0, rel=0.03)


def test_a_slower_machine_changes_no_cost():
    """Costs are only compared within a span, so twice the seconds on both sides are the same ratio."""
    one = START.measured(1, {0: steps(50, 0.010), 3: steps(50, 0.020)}, 0.0)
    two = one.measured(1, {0: steps(50, 0.020), 3: steps(50, 0.040)}, 0.0)
    assert cost(two) == pytest.approx(cost(one), rel=0.001)


SPAN = st.tuples(
    st.sampled_from((1, 2, 4, 8, 16)),
    st.dictionaries(
        st.integers(0, 3),
        st.builds(steps, st.integers(-5, 300), st.floats(-0.1, 0.1), st.floats(0, 0.1)),
        max_size=4,
    ),
    st.floats(0, 100),
)


@given(st.lists(SPAN, max_size=20))
def test_any_steps_give_a_valid_estimate(spans: list):
    """Variances stay at or above zero and never exceed the first one."""
    model, now = START, 0.0
    for bucket, taken, waited in spans:
        now += waited
        model = model.measured(bucket, taken, now)
    for bucket, k in model.kinds:
        found = model.ratio(bucket, k, 0, now)
        assert math.isfinite(found.mean)
        assert 0.0 <= found.variance <= 0.16 * (1 + now / 86400) + 1e-9
