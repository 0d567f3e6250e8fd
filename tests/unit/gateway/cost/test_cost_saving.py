"""Steps with drafts are compared with what was measured without."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.cost.saving import added, compare, since
from appliance.speculation.goodput import Estimate
from tests.unit.gateway.cost.readings import cell

DRAFTED = {(2, 3): cell(steps=50, seconds=1.5, requests=100, tokens=250)}


def test_the_same_tokens_without_drafts():
    """2.5 tokens per request and step; a step with drafts takes 1.2 times as long as one without."""
    saving, left = compare(DRAFTED, {(2, 3): Estimate(mean=math.log(1.2), variance=0.0)})
    assert saving.target_only == pytest.approx(1.5 * 2.5 / 1.2)
    assert saving.low == pytest.approx(saving.target_only)
    assert saving.high == pytest.approx(saving.target_only)
    assert (saving.seconds, saving.tokens, left) == (1.5, 250, {})


@given(st.floats(min_value=-1, max_value=2), st.floats(min_value=1e-6, max_value=0.5))
def test_bounds_enclose_the_estimate(mean, variance):
    saving, _left = compare(DRAFTED, {(2, 3): Estimate(mean=mean, variance=variance)})
    assert saving.low < saving.target_only < saving.high


def test_a_draft_that_fails_costs():
    """One token per step, and the step takes longer: the saving is negative."""
    failed = {(1, 3): cell(steps=50, seconds=1.5, requests=50, tokens=50)}
    saving, _left = compare(failed, {(1, 3): Estimate(mean=math.log(1.2), variance=0.0001)})
    assert saving.high < saving.seconds


def test_steps_without_measured_cost_are_kept():
    """A cost of another K does not help; steps without drafts save nothing and are not kept."""
    steps = {**DRAFTED, (2, 0): cell(steps=9, seconds=0.1, requests=18, tokens=18)}
    saving, left = compare(steps, {(2, 1): Estimate(mean=0.0, variance=0.0)})
    assert (saving.seconds, left) == (0.0, DRAFTED)


def test_differences_and_sums_of_counts():
    later = {(2, 3): cell(steps=60, seconds=1.7, requests=120, tokens=300), (1, 1): DRAFTED[2, 3]}
    new = since(later, DRAFTED)
    assert new[2, 3].tokens == 50
    assert new[1, 1] == DRAFTED[2, 3]
    assert since(DRAFTED, DRAFTED) == {}
    assert added(DRAFTED, new)[2, 3].requests == 120
