"""Acceptance length of counters, and what costs say of a choice."""

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
    borrowed,
    costs_at,
    deepest,
)
from appliance.speculation.values import NO_DRAFTS, SpecDecodeCounters


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
    found = acceptance_length(nonsense, k)
    assert found is None or found.variance >= 0.0


def test_the_best_choice_has_the_highest_payoff():
    """Two draft tokens, where the third is hardly ever accepted and costs as much as the others."""
    seen = drafted(400, 320, 240, 20)
    best = best_choice(seen, known(k1=1.2, k2=1.4, k3=1.6), (0, 1, 2, 3))
    assert best is not None
    assert best[0] == 2
    assert best_choice(seen, NO_COSTS, (0, 1, 2, 3)) is None


def test_a_choice_without_a_cost_or_without_drafts_is_none():
    seen = drafted(400, 320, 240, 20, reached=(400, 400, 0))
    best = best_choice(seen, known(k2=1.4, k3=1.0), (0, 1, 2, 3))
    assert best is not None
    assert best[0] == 2
    assert best[1].mean == pytest.approx(math.log(2.4 / 1.4))


def test_the_depth_of_drafts_counts_those_that_reached_it():
    seen = drafted(400, 320, 3, 3, reached=(400, 4, 4))
    assert (deepest(seen, 32), deepest(seen, 4), deepest(seen, 401)) == (1, 3, 0)


def test_costs_grow_uncertain_with_time_and_batch_distance():
    """Three per cent in ten minutes; and those of another batch size are hardly more than a guess."""
    costs = known(k3=2.0)
    assert aged(costs, 600.0).ratios[3].variance == pytest.approx(0.0333**2, rel=0.02)
    assert aged(costs, 600.0).break_even(3) == pytest.approx(2.0)
    assert borrowed(costs).ratios[3].variance > 0.05
    assert costs_at({8: costs}, 8) is costs
    assert costs_at({8: costs}, 64).ratios[3].variance > 0.05
    assert not costs_at({8: NO_COSTS}, 64).is_known()
    assert costs.break_even(1) is None
