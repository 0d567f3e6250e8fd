"""Every gap is counted, as if it had been observed one by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from appliance.infra.metrics.gaps import GAP_SECONDS, GapHistogram, Gaps

STREAMS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0.0, *GAP_SECONDS, 0.0071, 60.0))))
"""Number of pieces sent together, and seconds since the previous ones."""


def stream(*sent: tuple[int, float]) -> Gaps:
    """The gaps of a stream that began at second 1000."""
    gaps, now = Gaps(), 1000.0
    for pieces, after in sent:
        now += after
        gaps.observe(pieces, now)
    return gaps


def buckets(histogram: Histogram) -> dict[str, float]:
    (family,) = histogram.collect()
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(STREAMS, max_size=3))
def test_histogram_gets_the_gaps_that_were_observed(streams):
    """Over several streams; pieces sent together have gaps of 0."""
    registry = CollectorRegistry()
    added = GapHistogram("added", "Added.", buckets=GAP_SECONDS, registry=registry)
    observed = Histogram("added", "Added.", buckets=GAP_SECONDS, registry=None)
    for sent in streams:
        added.add(stream(*sent))
        now, times = 1000.0, []
        for pieces, after in sent:
            now += after
            times += [now] * pieces
        for earlier, later in pairwise(times):
            observed.observe(later - earlier)
    ours, theirs = buckets(added), buckets(observed)
    assert ours.pop("added_sum") == pytest.approx(theirs.pop("added_sum"))
    assert ours == theirs


def test_a_gap_on_a_bound_is_in_its_bucket():
    """`le` means: at most."""
    gaps = Gaps()
    for now in (0.0, 0.25, 0.5, 3.0):
        gaps.observe(1, now)
    assert gaps.counts[GAP_SECONDS.index(0.3)] == 2
    assert gaps.counts[GAP_SECONDS.index(2.5)] == 1
    assert (sum(gaps.counts), gaps.seconds) == (3, 3.0)


def test_a_stream_that_stalls_shows_in_the_last_bucket():
    assert stream((1, 0.0), (1, 30.0)).counts[-1] == 1


@pytest.mark.parametrize("sent", [(), ((1, 5.0),)])
def test_less_than_two_pieces_have_no_gap(sent):
    """An answer that never began, or came in one piece."""
    gaps = stream(*sent)
    assert (sum(gaps.counts), gaps.seconds, gaps.pieces) == (0, 0.0, len(sent))
    assert (gaps.first is None) is (not sent)


def test_each_model_has_a_histogram_of_its_own():
    """With the same buckets."""
    registry = CollectorRegistry()
    family = GapHistogram("gap", "Gap.", ("model",), buckets=GAP_SECONDS, registry=registry)
    family.labels("a").add(stream((1, 0.0), (2, 0.05)))
    family.labels("b").add(stream((1, 0.0), (1, 0.05)))
    counts = {model: registry.get_sample_value("gap_count", {"model": model}) for model in "ab"}
    assert counts == {"a": 2, "b": 1}
    assert registry.get_sample_value("gap_bucket", {"model": "a", "le": "0.08"}) == 2
