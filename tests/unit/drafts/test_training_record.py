"""A training record is parsed completely, or its malformed fields are named."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.training_record import Expectation, TrainingRecord, encode_record, parse_record

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), inner, max_size=3)
    ),
    max_leaves=8,
)
EXPECTATIONS = st.integers(1, 16).flatmap(
    lambda tokens: st.builds(
        Expectation, acceptance_length=st.floats(1, 1 + tokens), draft_tokens=st.just(tokens)
    )
)
DIGESTS = st.none() | st.integers(0, 2**256 - 1).map(lambda number: f"sha256:{number:064x}")
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
RECORDS = st.builds(
    TrainingRecord,
    fc_norm=st.none() | st.booleans(),
    norm_output=st.none() | st.booleans(),
    norm_before_fc=st.none() | st.booleans(),
    aux_layers=st.none() | st.lists(st.integers(0, 99), max_size=4).map(tuple),
    trained_context=st.none() | st.integers(1, 2**20),
    target=DIGESTS,
    parent=DIGESTS,
    dataset=DIGESTS,
    recipe=st.dictionaries(NAMES, PLAIN, max_size=3),
    expected=st.dictionaries(NAMES, EXPECTATIONS, max_size=3),
)
MEMBERS = (
    *("fc_norm", "norm_output", "norm_before_fc", "aux_layers", "trained_context"),
    *("target", "parent", "dataset", "recipe", "expected"),
)


@given(RECORDS)
def test_training_record_round_trips(record: TrainingRecord):
    assert parse_record(encode_record(record)) == (record, ())


@given(st.dictionaries(st.sampled_from(MEMBERS), JSON))
def test_every_field_is_parsed_or_named_as_malformed(content: dict[str, Any]):
    record, wrong = parse_record(content)
    assert set(wrong) <= set(content)
    for name in wrong:
        assert getattr(record, name) in (None, {})
    again, still_wrong = parse_record(encode_record(record))
    assert (repr(again), still_wrong) == (repr(record), ())  # a NaN is not even equal to itself


@pytest.mark.parametrize(
    ("length", "tokens"),
    [
        (0.9, 3),  # fewer tokens than a step without drafts
        (4.1, 3),  # more than were drafted
        (math.nan, 3),
        (math.inf, 3),
        (True, 3),
        ("2.7", 3),
        (None, 3),
        (1.0, 0),  # measured without drafts
        (2.7, -3),
        (2.7, 3.0),
        (2.7, True),
        (2.7, None),
        (2.7, 10**400),
    ],
)
def test_impossible_expectation_is_malformed(length: Any, tokens: Any):
    said = {"all": {"acceptance_length": length, "draft_tokens": tokens}}
    record, wrong = parse_record({"expected": said})
    assert (record.expected, wrong) == ({}, ("expected",))


def test_possible_expectation_is_kept():
    for length, tokens in ((1, 1), (4, 3), (2.7, 3)):
        record, wrong = parse_record(
            {"expected": {"all": {"acceptance_length": length, "draft_tokens": tokens}}}
        )
        assert wrong == ()
        assert record.expected == {"all": Expectation(acceptance_length=float(length), draft_tokens=tokens)}


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=16).map(lambda rates: sorted(rates, reverse=True)),
    st.data(),
)
def test_expectation_for_fewer_draft_tokens_is_never_too_high(rates: list[float], data: st.DataObject):
    tokens = len(rates)
    expectation = Expectation(acceptance_length=1.0 + sum(rates), draft_tokens=tokens)
    k = data.draw(st.integers(0, tokens))
    assert expectation.at(k) <= 1.0 + sum(rates[:k]) + 1e-9
    assert expectation.at(tokens) == expectation.at(tokens + 5) == pytest.approx(1.0 + sum(rates))
