"""Comparison with the target's own answers, by trails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.evaluation.equality import (
    EPSILONS,
    Agreement,
    LikelyToken,
    compare,
    epsilon_of,
    near_tokens,
    trail_of,
)
from tests.unit.drafts.evaluation.evaluation_parts import prompt

ASKED = prompt()
OWN = (5, 6, 7, 8)
EPSILON = 1e-3
answers = st.lists(st.integers(0, 2**20), max_size=12)


def near(**gaps: float):
    """Alternatives in the target's answer: `at2` is the gap of token 9 at position 2, and so on."""
    choices = [
        [LikelyToken(token_id=token, gap=0.0), LikelyToken(token_id=9, gap=gaps.get(f"at{place}", 3.0))]
        for place, token in enumerate(OWN)
    ]
    return near_tokens(ASKED, OWN, choices, epsilon=1.0)


def compared(other: tuple[int, ...], **gaps: float):
    return compare(trail_of(ASKED, OWN), near(**gaps), trail_of(ASKED, other), EPSILON)


def test_equal_answers_agree():
    """Whatever the alternatives were."""
    assert compared(OWN, at2=0.0).agreement is Agreement.SAME


def test_first_difference_within_epsilon_is_a_tie():
    """The text after it is no evidence."""
    found = compared((5, 6, 9, 1), at2=0.0004)
    assert (found.agreement, found.position, found.gap) == (Agreement.TIE, 2, 0.0004)


@pytest.mark.parametrize(
    ("other", "gaps", "gap"),
    [
        ((5, 6, 9, 8), {"at2": 0.0011}, 0.0011),  # near, but not within rounding
        ((5, 6, 9, 8), {"at2": 3.0}, None),  # not near at all
        ((5, 6, 4, 8), {"at2": 0.0}, None),  # another token than the one that was near
        ((5, 6, 9, 8), {"at1": 0.0, "at3": 0.0}, None),  # near elsewhere
        ((5, 6), {"at2": 0.0}, None),  # ended early
        ((*OWN, 9), {}, None),  # longer
        ((), {}, None),
    ],
)
def test_any_other_difference_is_a_mismatch(other, gaps, gap):
    """A tie needs the same token at the same position within epsilon."""
    found = compared(other, **gaps)
    assert (found.agreement, found.gap) == (Agreement.MISMATCH, gap)


def test_only_the_first_difference_counts():
    """A later tie does not excuse an earlier difference."""
    assert compared((9, 6, 9, 8), at2=0.0).agreement is Agreement.MISMATCH


def test_several_tokens_may_tie():
    """In half precision three tokens can have equal logits."""
    choices = [[LikelyToken(token_id=token, gap=gap) for token, gap in ((5, 0.0), (9, 0.0), (10, 0.0))]]
    found = near_tokens(ASKED, (5,), choices, epsilon=1.0)
    for token in (9, 10):
        assert compare(trail_of(ASKED, (5,)), found, trail_of(ASKED, (token,)), EPSILON).agreement == "tie"


@given(answers, answers)
def test_trails_differ_from_the_first_different_token_on(one, other):
    first, second = trail_of(ASKED, one), trail_of(ASKED, other)
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert first[:same] == second[:same]
    assert all(mine != theirs for mine, theirs in zip(first[same:], second[same:], strict=False))


def test_trail_depends_on_the_sealed_salt_and_the_prompt():
    """So guesses cannot be tested against it once the content is erased."""
    trails = {
        trail_of(each, OWN) for each in (ASKED, prompt(salt="01"), prompt(token_ids=(1, 2, 3)), prompt(1))
    }
    assert len({step for trail in trails for step in trail}) == 4 * len(OWN)
    # The seed and the labels are public, so no key can be derived from them.
    assert trail_of(prompt(seed=9, request_id="x", template="y"), OWN) == trail_of(ASKED, OWN)


def test_epsilon_depends_on_the_arithmetic_type():
    """An unknown type gets the strictest."""
    assert EPSILONS["float32"] < EPSILONS["float16"] < EPSILONS["bfloat16"]
    assert epsilon_of("float8_e4m3fn") == min(EPSILONS.values())
