"""Counts are read where they are, and never invented."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.infra.json_members import parse_members
from appliance.serving.usage import Usage, parse_usage

VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["prompt_tokens", "completion_tokens", "speculative_decoding", "num_spec_steps"]),
            inner,
        )
    ),
    max_leaves=6,
)


def parsed(answer: dict) -> Usage:
    """Parse the usage of an answer."""
    return parse_usage(parse_members(json.dumps(answer)))


def drafting(**counts: object) -> dict:
    """Return an answer with these speculation counts."""
    return {"metrics": {"speculative_decoding": counts}}


def test_counts_are_read_from_usage_and_metrics():
    """Tokens from `usage`, drafts from the worker's own `metrics`."""
    usage = parsed(
        {
            "usage": {"prompt_tokens": 7, "completion_tokens": 10, "total_tokens": 17},
            **drafting(num_spec_steps=4, num_draft_tokens=12, num_accepted_draft_tokens=6),
        }
    )
    assert usage == Usage(
        prompt_tokens=7, completion_tokens=10, drafts=4, draft_tokens=12, accepted_tokens=6, estimated=False
    )
    assert usage.acceptance_length == pytest.approx(2.5)


@pytest.mark.parametrize("answer", [{}, {"usage": None}, {"usage": []}, {"usage": {}}, {"usage": "17"}])
def test_missing_usage_is_an_estimate(answer: dict):
    """Unreported tokens are not zero tokens."""
    assert parsed(answer).estimated


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"metrics": None},
        {"metrics": {}},
        {"metrics": {"speculative_decoding": None}},
        drafting(),
        drafting(num_spec_steps=0),
    ],
)
def test_without_drafts_there_is_no_acceptance_length(answer: dict):
    """A worker that did not speculate has none; 1.0 would look like a collapsed draft."""
    assert parsed(answer).acceptance_length is None


@pytest.mark.parametrize("count", [-1, True, 1.0, "4", None, [], {}])
def test_malformed_count_is_not_reported(count: object):
    """Negative, fractional or textual counts do not get into a bill."""
    assert parsed({"usage": {"prompt_tokens": count, "completion_tokens": 3}}).prompt_tokens == 0
    assert parsed(drafting(num_spec_steps=count)).drafts is None


@pytest.mark.parametrize(
    ("histogram", "rejected"), [([2, 0, 1], 2), ([0], 0), ([], None), ([-1, 3], None), ("21", None)]
)
def test_rejected_drafts_are_the_first_of_the_histogram(histogram: object, rejected: int | None):
    assert parsed(drafting(num_spec_steps=3, acceptance_histogram=histogram)).rejected_drafts == rejected


@given(st.dictionaries(st.sampled_from(["usage", "metrics", "choices"]), VALUE))
def test_any_answer_of_a_worker_is_parsed_or_refused(answer: dict):
    """Counts are always whole numbers of zero or more."""
    usage = parsed(answer)
    assert usage.prompt_tokens >= 0
    assert usage.completion_tokens >= 0
    assert usage.acceptance_length is None or usage.acceptance_length >= 1.0
