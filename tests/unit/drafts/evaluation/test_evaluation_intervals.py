"""95 % intervals cover the truth as often as they claim; requests are the unit."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.evaluation.intervals import (
    STUDENT,
    RequestDrafts,
    acceptance_length,
    length_ratio,
    mean_ratio,
    student,
)

K = 3
TRIALS = 400


def drafted(dice: random.Random, ease: float, drafts: int) -> RequestDrafts:
    """One request, whose own ease changes the acceptance of all its draft tokens."""
    accepted = 0
    for _ in range(drafts):
        position = 0
        while position < K and dice.random() < ease:
            position += 1
        accepted += position
    return RequestDrafts(drafts=drafts, accepted=accepted)


def expected_length(easy: float, hard: float) -> float:
    """Acceptance length over all traffic: half of the drafts belong to easy requests, half to hard ones."""
    return 1 + sum(ease**place for ease in (easy, hard) for place in range(1, K + 1)) / 2


def ease_of(dice: random.Random, easy: float, hard: float) -> float:
    return easy if dice.random() < 0.5 else hard


@pytest.mark.parametrize("requests", [12, 48])
def test_acceptance_length_intervals_cover_the_truth_at_95_percent(requests):
    """Requests differ far more than their drafts."""
    dice, truth, hits = random.Random(requests), expected_length(0.8, 0.3), 0
    for _ in range(TRIALS):
        asked = [drafted(dice, ease_of(dice, 0.8, 0.3), dice.randint(20, 50)) for _ in range(requests)]
        found = acceptance_length(asked, K)
        hits += found.low <= truth <= found.high
    assert 0.91 <= hits / TRIALS <= 0.985


def test_intervals_of_independent_drafts_would_be_too_narrow():
    """The same simulation with drafts as the unit."""
    dice, truth, hits = random.Random(5), expected_length(0.8, 0.3), 0
    for _ in range(TRIALS):
        asked = [drafted(dice, ease_of(dice, 0.8, 0.3), dice.randint(20, 50)) for _ in range(24)]
        drafts = sum(each.drafts for each in asked)
        length = 1 + sum(each.accepted for each in asked) / drafts
        # No draft accepts more than K, so this is the widest that independent drafts could be spread.
        width = 1.96 * (K / 2) / math.sqrt(drafts)
        hits += length - width <= truth <= length + width
    assert hits / TRIALS < 0.8


@pytest.mark.parametrize(("requests", "better"), [(16, 1.0), (48, 1.0), (48, 0.9)])
def test_paired_ratio_intervals_cover_the_truth_at_95_percent(requests, better):
    dice, hits = random.Random(requests), 0
    truth = expected_length(0.8 * better, 0.3 * better) / expected_length(0.8, 0.3)
    for _ in range(TRIALS):
        pairs = []
        for _ in range(requests):
            ease = ease_of(dice, 0.8, 0.3)
            drafts = dice.randint(20, 50)
            pairs.append((drafted(dice, ease * better, drafts), drafted(dice, ease, drafts)))
        found = length_ratio(pairs)
        hits += found.low <= truth <= found.high
    assert 0.91 <= hits / TRIALS <= 0.985


def test_pairing_requests_narrows_the_ratio():
    """This is how 64 prompts can decide about 2 %."""
    dice = random.Random(1)
    eases = [ease_of(dice, 0.8, 0.3) for _ in range(64)]
    pairs = [(drafted(dice, ease, 60), drafted(dice, ease, 60)) for ease in eases]
    seconds = [second for _first, second in pairs]
    dice.shuffle(seconds)
    paired = length_ratio(pairs)
    unpaired = length_ratio([(first, second) for (first, _), second in zip(pairs, seconds, strict=True)])
    assert (paired.high - paired.low) < 0.6 * (unpaired.high - unpaired.low)


def test_mean_ratio_intervals_cover_the_truth_at_95_percent():
    """With Student's quantile for eight rounds."""
    dice, hits = random.Random(3), 0
    for _ in range(2 * TRIALS):
        found = mean_ratio([1.1 * math.exp(dice.gauss(0, 0.04)) for _ in range(8)])
        hits += found.low <= 1.1 <= found.high
    assert 0.93 <= hits / (2 * TRIALS) <= 0.97


def test_one_observation_gives_no_interval():
    """Or the possible range."""
    one = RequestDrafts(drafts=100, accepted=150)
    alone = acceptance_length([one], K)
    assert (alone.value, alone.low, alone.high) == (2.5, 1.0, 4.0)
    assert length_ratio([(one, one)]) is None
    assert mean_ratio([1.2]) is None
    assert acceptance_length([RequestDrafts(drafts=0, accepted=0)], K) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 200)).map(
            lambda pair: RequestDrafts(drafts=pair[0], accepted=min(pair[1], K * pair[0]))
        ),
        min_size=1,
        max_size=30,
    )
)
def test_interval_contains_its_estimate_and_stays_in_range(requests):
    found = acceptance_length(requests, K)
    assert 1.0 <= found.low <= found.value <= found.high <= 1.0 + K
    ratio = length_ratio([(each, each) for each in requests])
    if ratio is not None:
        assert ratio.low <= ratio.value <= ratio.high
        assert ratio.value == pytest.approx(1.0)
        assert ratio.high - ratio.low < 1e-6


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12))
def test_bounds_of_ratios_are_finite(ratios):
    """Even of two rounds with nothing in common."""
    found = mean_ratio(ratios)
    assert 0 < found.low <= found.value * (1 + 1e-9)
    assert found.value <= found.high * (1 + 1e-9) < math.inf


def test_student_quantiles_decrease_to_the_normal_quantile():
    quantiles = [student(freedom) for freedom in range(1, 200)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert len(STUDENT) == 30
    assert student(40) == pytest.approx(2.021, abs=2e-3)
    assert student(120) == pytest.approx(1.980, abs=2e-3)
