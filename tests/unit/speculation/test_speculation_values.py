"""Names, buckets, tables, and differences of counters."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.speculation.values import (
    NO_DRAFTS,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    StepCounters,
    bucket_of,
    buckets_up_to,
    draft_tokens_at,
    parse_names,
    table_of,
)


def counters(drafts: int, accepted: tuple[int, ...], drafted: tuple[int, ...] = ()) -> SpecDecodeCounters:
    """Counters of drafts as long as `accepted`."""
    return SpecDecodeCounters(
        drafts=drafts,
        draft_tokens=drafts * len(accepted),
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        drafted_per_position=drafted,
    )


@pytest.mark.parametrize(
    ("batch", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64), (65, 128)]
)
def test_a_bucket_is_named_by_its_largest_batch(batch: int, bucket: int):
    """Buckets are powers of two, and each batch size falls into the next."""
    assert bucket_of(batch) == bucket


@pytest.mark.parametrize(
    ("largest", "buckets"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 8)), (8, (1, 2, 4, 8))]
)
def test_the_last_bucket_holds_the_largest_batch(largest: int, buckets: tuple[int, ...]):
    """No batch size a worker can have is left without a bucket."""
    assert buckets_up_to(largest) == buckets


@given(st.integers(1, 300), st.data())
def test_a_table_gives_each_batch_size_its_buckets_choice(largest: int, data: st.DataObject):
    """Ranges run from 1 to the largest batch, and no two neighbours are equal."""
    chosen = {bucket: data.draw(st.integers(0, 3)) for bucket in buckets_up_to(largest)}
    table = table_of(chosen, largest)
    assert [first for first, _last, _k in table] == [1, *(last + 1 for _first, last, _k in table[:-1])]
    assert table[-1][1] == largest
    assert all(one[2] != other[2] for one, other in pairwise(table))
    for batch in range(1, largest + 1):
        assert draft_tokens_at(table, batch) == chosen[bucket_of(batch)]


def test_a_table_extends_its_last_range():
    """To larger batches than announced; without a table nothing is drafted."""
    assert draft_tokens_at(((1, 8, 3), (9, 16, 1)), 40) == 1
    assert draft_tokens_at((), 1) == 0


def test_acceptance_counts_the_bonus_token():
    """Fifty drafts with ninety accepted tokens gave 2.8 tokens each."""
    seen = counters(50, (45, 30, 15))
    assert seen.acceptance_length == pytest.approx(2.8)
    assert seen.acceptance_rate == pytest.approx(0.6)
    assert (NO_DRAFTS.acceptance_length, NO_DRAFTS.acceptance_rate) == (1.0, 0.0)


def test_a_position_is_judged_by_the_drafts_that_reached_it():
    """A third position that only ten of a hundred drafts reached is judged by those ten."""
    mixed = counters(100, (80, 40, 5), (100, 50, 10))
    assert mixed.acceptance_rate_per_position == pytest.approx((0.8, 0.8, 0.5))
    assert counters(100, (80, 40, 5)).acceptance_rate_per_position == pytest.approx((0.8, 0.4, 0.05))


@pytest.mark.parametrize(
    "later",
    [counters(9, (5, 5)), counters(20, (4, 6)), counters(20, (6, 6), (20, 20)), counters(20, (6,))],
)
def test_counters_that_went_backwards_have_no_difference(later: SpecDecodeCounters):
    """Nor counters with another number of positions."""
    assert later.since(counters(10, (5, 5))) is None


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_difference_never_holds_a_negative_count(drafts: int, first: int, second: int, more: int):
    """It is the counts in between, or None."""
    earlier = counters(drafts, (first, second))
    difference = counters(drafts + more, (first + more, second)).since(earlier)
    assert difference is not None
    assert (difference.drafts, difference.accepted_per_position) == (more, (more, 0))
    backwards = earlier.since(counters(drafts + 1, (first, second)))
    assert backwards is None


def test_step_counters_subtract_and_average():
    """Mean seconds are those of the steps in between."""
    earlier = StepCounters(steps=10, seconds=1.0, seconds_squared=0.1, requests=10, tokens=20)
    later = StepCounters(steps=14, seconds=1.8, seconds_squared=0.26, requests=14, tokens=28)
    between = later.since(earlier)
    assert (between.steps, between.requests, between.tokens) == (4, 4, 8)
    assert between.seconds_per_step == pytest.approx(0.2)
    assert StepCounters().seconds_per_step == 0.0


@pytest.mark.parametrize(
    ("mode", "reason", "names"),
    [
        ("speculative", "healthy", (SpeculationMode.SPECULATIVE, Reason.HEALTHY)),
        ("target_only", "collapsed", (SpeculationMode.TARGET_ONLY, Reason.COLLAPSED)),
        ("probing", "probing", (SpeculationMode.TARGET_ONLY, Reason.BELOW_BREAK_EVEN)),
        ("target_only", "probe_failed", (SpeculationMode.TARGET_ONLY, Reason.BELOW_BREAK_EVEN)),
        (None, None, (None, None)),
    ],
)
def test_names_of_an_earlier_version_are_read(
    mode: str | None, reason: str | None, names: tuple[SpeculationMode | None, Reason | None]
):
    """A gateway of that version may have set the worker's table."""
    assert parse_names(mode, reason) == names


@pytest.mark.parametrize(("mode", "reason"), [("idle", None), (None, "tired")])
def test_other_names_are_refused(mode: str | None, reason: str | None):
    with pytest.raises(ValueError, match=r"idle|tired"):
        parse_names(mode, reason)
