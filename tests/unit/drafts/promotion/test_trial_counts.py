"""Counts across restarts, over several workers, since a moment."""

import random

from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.promotion.trial_counts import (
    NOTHING,
    DraftCounts,
    RecentCounts,
    WorkerCounters,
    counts_of,
)
from appliance.serving.worker import WorkerId
from appliance.speculation.values import EngineReading
from tests.unit.drafts.promotion.drafting import Side

A, B = WorkerId("a"), WorkerId("b")


@given(st.lists(st.sampled_from(["request", "restart", "look"]), max_size=40), st.integers(0, 9))
def test_every_observed_draft_is_counted_once(events, seed):
    """A restart loses what was counted after the last reading, and nothing else."""
    side, meters, unseen, expected = Side(random.Random(seed), 0.6), WorkerCounters(), 0, 0
    meters.observe(A, side.reading)
    for event in events:
        if event == "request":
            side.request()
            unseen += 30
        elif event == "restart":
            side.restart()
            meters.observe(A, side.reading)
            unseen = 0
        else:
            meters.observe(A, side.reading)
            expected, unseen = expected + unseen, 0
    total = meters.total()
    assert total.drafts == expected
    assert total.is_possible
    assert total.cells.get((1, 3), None) is None or total.cells[(1, 3)].steps == expected


def test_totals_sum_over_the_selected_workers():
    """Including workers that draft to different depths."""
    chance = random.Random(1)
    sides = {A: Side(chance, 0.6), B: Side(chance, 0.6)}
    meters = WorkerCounters()
    for _ in range(3):
        for name, side in sides.items():
            meters.observe(name, side.reading)
            side.request()
            meters.observe(name, side.reading)
    assert meters.total().drafts == 180
    assert meters.total((B,)).drafts == 90
    assert meters.total((WorkerId("c"),)) == NOTHING
    deep = DraftCounts(drafts=1, accepted=(1, 1, 1, 1), drafted=(1, 1, 1, 1))
    assert meters.total().plus(deep).drafted == (181, 181, 181, 1)


def test_a_worker_without_the_plugin_counts_nothing():
    """Without an epoch a restart could not be detected."""
    meters = WorkerCounters()
    for _ in range(2):
        meters.observe(A, EngineReading(controllable=False, epoch=""))
    assert meters.total() == NOTHING


def test_steps_without_draft_tokens_are_not_counted():
    side = Side(random.Random(1), 0.6)
    side.request()
    reading = side.reading
    assert set(counts_of(reading).cells) == {(1, 3)}


def test_recent_counts_cover_at_most_the_configured_time():
    """Older counts are of other traffic."""
    side, recent = Side(random.Random(1), 0.6), RecentCounts(seconds=100.0, apart=10.0)
    for second in range(300):
        side.request()
        recent.observe({A: side.reading}, float(second))
    assert 90 * 30 <= recent.counts((A,)).drafts <= 110 * 30
    assert recent.counts((B,)) == NOTHING
    recent.forget()
    assert recent.counts((A,)) == NOTHING
    recent.observe({A: side.reading}, 300.0)
    side.request()
    recent.observe({A: side.reading}, 301.0)
    assert recent.counts((A,)).drafts == 30
