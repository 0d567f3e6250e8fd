"""Promises of the comparison with the target's own answers, and of the trails it is made on."""

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
    """What else the target could have said: at `at2` token 9 with this gap, and so on."""
    choices = [
        [LikelyToken(token_id=token, gap=0.0), LikelyToken(token_id=9, gap=gaps.get(f"at{place}", 3.0))]
        for place, token in enumerate(OWN)
    ]
    return near_tokens(ASKED, OWN, choices, epsilon=1.0)


def compared(other: tuple[int, ...], **gaps: float):
    return compare(trail_of(ASKED, OWN), near(**gaps), trail_of(ASKED, other), EPSILON)


def test_the_same_tokens_are_the_same_answer():
    """Whatever else was near."""
    assert compared(OWN, at2=0.0).agreement is Agreement.SAME


def test_an_answer_that_parts_at_a_tie_counts_as_rounding_whatever_follows():
    """After a tie the text is another one, and no evidence."""
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
        ((*OWN, 9), {}, None),  # went on
        ((), {}, None),
    ],
)
def test_anything_else_is_a_mismatch(other, gaps, gap):
    """It has to be the very token, at the very place, within epsilon."""
    found = compared(other, **gaps)
    assert (found.agreement, found.gap) == (Agreement.MISMATCH, gap)


def test_only_the_first_place_where_they_part_counts():
    """A tie later on does not excuse an earlier difference."""
    assert compared((9, 6, 9, 8), at2=0.0).agreement is Agreement.MISMATCH


def test_several_tokens_may_tie():
    """In half precision three tokens can have the very same logit."""
    choices = [[LikelyToken(token_id=token, gap=gap) for token, gap in ((5, 0.0), (9, 0.0), (10, 0.0))]]
    found = near_tokens(ASKED, (5,), choices, epsilon=1.0)
    for token in (9, 10):
        assert compare(trail_of(ASKED, (5,)), found, trail_of(ASKED, (token,)), EPSILON).agreement == "tie"


@given(answers, answers)
def test_trails_part_exactly_where_the_answers_do(one, other):
    """Comparing trails is comparing tokens."""
    first, second = trail_of(ASKED, one), trail_of(ASKED, other)
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert first[:same] == second[:same]
    assert all(mine != theirs for mine, theirs in zip(first[same:], second[same:], strict=False))


def test_a_trail_cannot_be_tried_out_without_the_sealed_salt_and_the_prompt():
    """The same words in answer to another request leave another trail."""
    trails = {
        trail_of(each, OWN) for each in (ASKED, prompt(salt="01"), prompt(token_ids=(1, 2, 3)), prompt(1))
    }
    assert len({step for trail in trails for step in trail}) == 4 * len(OWN)
    # The seed and the labels are known to everybody, so they are no secret to make a key of.
    assert trail_of(prompt(seed=9, request_id="x", template="y"), OWN) == trail_of(ASKED, OWN)


def test_what_counts_as_rounding_follows_the_arithmetic():
    """Coarser numbers, more ties; an unknown type gets no licence."""
    assert EPSILONS["float32"] < EPSILONS["float16"] < EPSILONS["bfloat16"]
    assert epsilon_of("float8_e4m3fn") == min(EPSILONS.values())
