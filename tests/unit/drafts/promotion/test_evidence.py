"""Over restarts, over several workers, and since when."""

import random

from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.promotion.evidence import NOTHING, Counts, Meters, Recent, counts_of
from appliance.serving.worker import WorkerId
from appliance.speculation.values import EngineReading
from tests.unit.drafts.promotion.drafting import Side

A, B = WorkerId("a"), WorkerId("b")


@given(st.lists(st.sampled_from(["request", "restart", "look"]), max_size=40), st.integers(0, 9))
def test_everything_that_was_seen_is_counted_once(events, seed):
    """Restarts lose what came after the last look, and nothing else, whatever the order."""
    side, meters, unseen, expected = Side(random.Random(seed), 0.6), Meters(), 0, 0
    meters.saw(A, side.reading)
    for event in events:
        if event == "request":
            side.request()
            unseen += 30
        elif event == "restart":
            side.restart()
            meters.saw(A, side.reading)
            unseen = 0
        else:
            meters.saw(A, side.reading)
            expected, unseen = expected + unseen, 0
    total = meters.total()
    assert total.drafts == expected
    assert total.is_possible
    assert total.cells.get((1, 3), None) is None or total.cells[(1, 3)].steps == expected


def test_workers_are_counted_together_or_one_by_one():
    """Also where they draft to different depths."""
    chance = random.Random(1)
    sides = {A: Side(chance, 0.6), B: Side(chance, 0.6)}
    meters = Meters()
    for _ in range(3):
        for name, side in sides.items():
            meters.saw(name, side.reading)
            side.request()
            meters.saw(name, side.reading)
    assert meters.total().drafts == 180
    assert meters.total((B,)).drafts == 90
    assert meters.total((WorkerId("c"),)) == NOTHING
    deep = Counts(drafts=1, accepted=(1, 1, 1, 1), drafted=(1, 1, 1, 1))
    assert meters.total().plus(deep).drafted == (181, 181, 181, 1)


def test_a_worker_without_the_plugin_counts_nothing():
    """Its reading has no epoch, so nothing could be told from a restart."""
    meters = Meters()
    for _ in range(2):
        meters.saw(A, EngineReading(controllable=False, epoch=""))
    assert meters.total() == NOTHING


def test_only_steps_that_drafted_are_kept():
    """What the target does alone says nothing about a draft."""
    side = Side(random.Random(1), 0.6)
    side.request()
    reading = side.reading
    assert set(counts_of(reading).cells) == {(1, 3)}


def test_the_recent_past_reaches_back_so_far_and_no_further():
    """What was long ago was under other traffic."""
    side, recent = Side(random.Random(1), 0.6), Recent(seconds=100.0, apart=10.0)
    for second in range(300):
        side.request()
        recent.saw({A: side.reading}, float(second))
    assert 90 * 30 <= recent.counts((A,)).drafts <= 110 * 30
    assert recent.counts((B,)) == NOTHING
    recent.forget()
    assert recent.counts((A,)) == NOTHING
    recent.saw({A: side.reading}, 300.0)
    side.request()
    recent.saw({A: side.reading}, 301.0)
    assert recent.counts((A,)).drafts == 30
