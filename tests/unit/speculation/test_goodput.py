"""Break-even, payoff, gain, and costs from steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.speculation.goodput import (
    NO_COSTS,
    Costs,
    Estimate,
    acceptance_length,
    aged,
    best_choice,
    between_window_variance,
    borrowed,
    deepest,
    gain,
    payoff,
    payoffs,
    rise,
    update_costs,
)
from appliance.speculation.values import NO_DRAFTS, SpecDecodeCounters, StepCounters


def drafted(drafts: int, *accepted: int, reached: tuple[int, ...] = ()) -> SpecDecodeCounters:
    """Counters of drafts with this many accepted at each position."""
    reached = reached or (drafts,) * len(accepted)
    return SpecDecodeCounters(
        drafts=drafts,
        draft_tokens=sum(reached),
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        drafted_per_position=reached,
    )


def steps(count: int, each: float, spread: float = 0.0) -> StepCounters:
    """Counters of steps with this mean and standard deviation of seconds."""
    squared = count * (each**2 + spread**2)
    return StepCounters(
        steps=count, seconds=count * each, seconds_squared=squared, requests=count, tokens=2 * count
    )


def known(variance: float = 0.0, **ratios: float) -> Costs:
    """Costs with these S(K)/S(0), such as `k3=2.0`."""
    return Costs(
        ratios={
            int(name[1:]): Estimate(mean=math.log(ratio), variance=variance) for name, ratio in ratios.items()
        }
    )


def test_the_acceptance_length_of_k_counts_its_first_k_positions():
    """Drafts of three tokens also measure drafts of one or two."""
    seen = drafted(400, 300, 200, 100)
    lengths = [acceptance_length(seen, k) for k in (1, 2, 3)]
    assert [length.mean for length in lengths if length is not None] == pytest.approx([1.75, 2.25, 2.5])


@pytest.mark.parametrize("k", [0, -1, 4])
def test_acceptance_length_is_unknown_for_numbers_never_drafted(k: int):
    assert acceptance_length(drafted(400, 300, 200, 100), k) is None
    assert acceptance_length(NO_DRAFTS, 1) is None


def test_drafts_of_different_lengths_are_combined_by_position():
    """The second position is judged by the half of the drafts that reached it."""
    length = acceptance_length(drafted(400, 200, 100, reached=(400, 200)), 2)
    assert length is not None
    assert length.mean == pytest.approx(1 + 0.5 + 0.5)


def test_few_drafts_without_acceptance_leave_uncertainty():
    """Thirty failures leave room for one success in thirty, and three thousand hardly any."""
    few, many = acceptance_length(drafted(30, 0), 1), acceptance_length(drafted(3000, 0), 1)
    assert few is not None
    assert many is not None
    assert few.upper(2.0) > 1.03
    assert many.upper(2.0) < 1.01


@given(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(-3, 9), max_size=4))
def test_any_counters_give_an_estimate_or_none(k: int, accepted: list[int], reached: list[int]):
    """With lists of different lengths, empty positions and invalid values."""
    nonsense = drafted(7, *accepted, reached=tuple(reached))
    for found in (acceptance_length(nonsense, k), payoff(nonsense, known(k1=1.1, k2=1.2), k)):
        assert found is None or found.variance >= 0.0


def test_break_even_is_the_ratio_of_step_times():
    """A step with three draft tokens that takes twice as long pays above two tokens a draft."""
    costs = update_costs(NO_COSTS, {0: steps(100, 0.010), 3: steps(100, 0.020)}, now=5.0)
    assert costs.break_even(3) == pytest.approx(2.0)
    assert costs.break_even(1) is None
    assert costs.seconds_per_token[3] == pytest.approx(0.010)
    above, below = payoff(drafted(400, 400, 40, 4), costs, 3), payoff(drafted(400, 300, 40, 4), costs, 3)
    assert above is not None
    assert below is not None
    assert above.mean == pytest.approx(math.log(2.11 / 2.0))
    assert below.mean < 0 < above.mean


@pytest.mark.parametrize(
    "span",
    [
        {3: steps(100, 0.02)},
        {0: steps(3, 0.01), 3: steps(100, 0.02)},
        {0: steps(100, 0.01), 3: steps(3, 0.02)},
        {0: steps(100, 0.0), 3: steps(100, 0.02)},
        {0: steps(100, 0.01), 3: steps(-5, 0.02)},
        {},
    ],
)
def test_costs_need_both_sides_of_a_comparison(span: dict[int, StepCounters]):
    """Steps of one kind only, too few of them, or counters gone backwards compare nothing."""
    assert update_costs(NO_COSTS, span, now=1.0) is NO_COSTS


def test_repeated_measurements_are_weighted_by_certainty():
    """Two equal measurements count alike, and both together are more certain."""
    first = update_costs(NO_COSTS, {0: steps(50, 0.010, 0.001), 3: steps(50, 0.020, 0.002)}, now=0.0)
    second = update_costs(first, {0: steps(50, 0.010, 0.001), 3: steps(50, 0.022, 0.0022)}, now=0.0)
    assert second.ratios[3].mean == pytest.approx((math.log(2.0) + math.log(2.2)) / 2, abs=0.01)
    assert second.ratios[3].variance == pytest.approx(first.ratios[3].variance / 2, rel=0.1)


def test_a_slower_machine_changes_no_cost():
    """Costs are only compared within a span, so twice the seconds on both sides are the same ratio."""
    first = update_costs(NO_COSTS, {0: steps(50, 0.010), 3: steps(50, 0.020)}, now=0.0)
    second = update_costs(first, {0: steps(50, 0.020), 3: steps(50, 0.040)}, now=0.0)
    assert second.break_even(3) == pytest.approx(2.0)


def test_costs_grow_uncertain_with_time_and_batch_distance():
    """Three per cent in ten minutes; and those of another batch size are hardly more than a guess."""
    costs = update_costs(NO_COSTS, {0: steps(100, 0.010), 3: steps(100, 0.020)}, now=0.0)
    fresh, later = costs.ratios[3].variance, aged(costs, 600.0).ratios[3].variance
    assert later - fresh == pytest.approx(0.03**2)
    assert borrowed(costs).ratios[3].variance > 0.05
    assert aged(costs, 600.0).break_even(3) == pytest.approx(2.0)


def test_measuring_one_cost_does_not_refresh_another():
    both = {0: steps(100, 0.01), 1: steps(100, 0.012), 3: steps(100, 0.02)}
    costs = update_costs(
        update_costs(NO_COSTS, both, now=0.0), {0: steps(100, 0.01), 3: steps(100, 0.02)}, now=600.0
    )
    assert costs.ratios[1].variance > 0.03**2 > costs.ratios[3].variance


def test_the_best_choice_has_the_highest_payoff():
    """Two draft tokens, where the third is hardly ever accepted and costs as much as the others."""
    seen = drafted(400, 320, 240, 20)
    best = best_choice(seen, known(k1=1.2, k2=1.4, k3=1.6), (0, 1, 2, 3))
    assert best is not None
    assert best[0] == 2
    assert best_choice(seen, NO_COSTS, (0, 1, 2, 3)) is None


def test_choices_with_too_few_drafts_can_be_excluded():
    """Four drafts of three say too little about the third position."""
    seen = drafted(400, 320, 3, 3, reached=(400, 4, 4))
    costs = known(k1=1.2, k2=1.4, k3=1.6)
    assert set(payoffs(seen, costs, (0, 1, 2, 3))) == {1, 2, 3}
    assert set(payoffs(seen, costs, (0, 1, 2, 3), least_drafts=32)) == {1}
    assert (deepest(seen, 32), deepest(seen, 4), deepest(seen, 401)) == (1, 3, 0)


def test_a_gain_is_more_certain_than_its_two_payoffs():
    """First positions and steps at K=0 are shared, and cancel out."""
    seen, costs = drafted(400, 300, 200, 100), known(0.01, k1=1.2, k3=1.5)
    better = gain(seen, costs, 3, 1)
    one, other = payoff(seen, costs, 3), payoff(seen, costs, 1)
    assert better is not None
    assert one is not None
    assert other is not None
    assert better.mean == pytest.approx(one.mean - other.mean)
    assert better.variance < one.variance + other.variance - 0.0099
    assert gain(seen, costs, 3, 2) is None


def test_a_rise_is_measured_in_deviations_of_the_earlier_text():
    """Twelve accepted tokens after a text without any are significant; so is the reverse."""
    good, bad = drafted(400, 300, 200, 100), drafted(400, 20, 4, 1)
    up, down = rise(drafted(12, 9, 5, 2), bad, 3), rise(drafted(64, 2, 0, 0), good, 3)
    same = rise(drafted(64, 48, 32, 16), good, 3)
    assert up is not None
    assert down is not None
    assert same is not None
    assert down < -5.0
    assert same == pytest.approx(0.0, abs=0.1)
    assert up > 5.0
    assert rise(NO_DRAFTS, bad, 1) is None


def test_uneven_spans_raise_the_variance_of_their_mean():
    """Requests that alternate between two texts."""
    even = [drafted(400, 200, 100)] * 8
    uneven = [drafted(400, 380, 360), drafted(400, 20, 2)] * 4
    assert between_window_variance(even, 2) == pytest.approx(0.0)
    assert math.sqrt(between_window_variance(uneven, 2)) == pytest.approx(
        math.log(2.85 / 1.055) / 2 / math.sqrt(7), rel=0.01
    )
    assert between_window_variance(uneven[:3], 2) == 0.0


def test_costs_are_certain_once_every_choice_is_known():
    """A choice without a good measurement leaves them uncertain; so does age."""
    costs = known(0.0004, k1=1.2, k3=1.5)
    assert costs.are_certain((0, 1, 3), 0.03)
    assert not costs.are_certain((0, 1, 2, 3), 0.03)
    assert not costs.are_certain((0, 1, 3), 0.01)
    assert not aged(costs, 600.0).are_certain((0, 1, 3), 0.03)
    assert costs.exactly().are_certain((0, 1, 3), 0.0)
