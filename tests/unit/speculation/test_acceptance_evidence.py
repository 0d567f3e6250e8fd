"""Acceptance: what counts as the present text, and how much of it is worth one independent draft."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.speculation.evidence import MAXIMUM_OVERDISPERSION, SPANS, Acceptance, deepest, total_of
from appliance.speculation.values import SpecDecodeCounters

MEMORY, LEAST = 3200, 32


def drafts(count: int, *accepted: int, reached: tuple[int, ...] = ()) -> SpecDecodeCounters:
    """Drafts of one span with this many accepted at each position."""
    reached = reached or (count,) * len(accepted)
    return SpecDecodeCounters(
        drafts=count,
        draft_tokens=sum(reached),
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        drafted_per_position=reached,
    )


GOOD, DEAD = drafts(20, 15, 10, 6), drafts(32, 2, 0, 0)


def counted(*spans: SpecDecodeCounters, start: Acceptance | None = None) -> tuple[Acceptance, list[bool]]:
    """The evidence after these spans, and at which of them the text had changed."""
    found, changes = start or Acceptance(), []
    for span in spans:
        found, has_changed = found.counted(span, memory=MEMORY, least=LEAST)
        changes.append(has_changed)
    return found, changes


def test_the_length_of_k_counts_its_first_k_positions():
    found, _changes = counted(*[GOOD] * 20)
    lengths = [found.length(k).mean for k in range(4)]
    assert lengths == pytest.approx([1.0, 1.75, 2.25, 2.55], abs=0.01)
    assert found.length(0).variance == 0.0


def test_a_position_that_was_never_drafted_is_guessed_with_hardly_any_certainty():
    """As likely as the one before it made its own: three in four of three in four."""
    found, _changes = counted(*[drafts(20, 15)] * 20)
    assert found.length(2).mean == pytest.approx(1 + 0.75 + 0.75**2, abs=0.01)
    assert found.length(2).variance > 20 * found.length(1).variance
    nothing = Acceptance().length(3)
    assert nothing.mean == pytest.approx(1.875)
    assert math.sqrt(nothing.variance) > 1.0


def test_a_gain_is_more_certain_than_its_two_lengths():
    """The first positions are shared, and cancel."""
    found, _changes = counted(*[GOOD] * 20)
    gain = found.gain(3, 2)
    assert gain.mean == pytest.approx(math.log(2.55 / 2.25), abs=0.005)
    apart = sum(found.length(k).variance / found.length(k).mean ** 2 for k in (2, 3))
    assert gain.variance < apart / 3
    back = found.gain(2, 3)
    assert (back.mean, back.variance) == (-gain.mean, gain.variance)


def test_another_text_replaces_the_one_before_at_once():
    """A collapse, and the few drafts of a probe that show its end."""
    collapsed, changes = counted(*[GOOD] * 20, DEAD)
    assert changes.index(True) == 20
    assert collapsed.total == DEAD
    few = drafts(3, 2, 2, 1)
    recovered, changes = counted(*[DEAD] * 20, few, few, few)
    assert True in changes
    assert recovered.total.drafts <= 9
    assert recovered.length(3).mean > 2


def test_a_change_is_found_where_it_began():
    """Small ones take several spans; all of them but the one in which it may have happened are kept."""
    before, after = drafts(20, 12, 7, 4), drafts(20, 9, 4, 2)
    found, changes = counted(*[before] * 25, *[after] * 30)
    assert changes.count(True) == 1
    assert found.total.drafts == 580


def test_the_same_text_is_never_another_one():
    """With the same mean, a little more and a little less each time."""
    texts = [drafts(20, 14 + number % 3, 10, 5 + number % 2) for number in range(200)]
    assert True not in counted(*texts)[1]


def test_memory_is_bounded_in_drafts_and_in_spans():
    found, _changes = counted(*[GOOD] * 2000)
    assert MEMORY <= found.total.drafts < 1.5 * MEMORY
    assert len(found.spans) <= SPANS
    assert total_of(found.spans) == found.total


def test_requests_of_several_kinds_at_once_count_less():
    """Every window differs from the next; and neither kind is a change of text."""
    one, other = drafts(64, 48, 32, 20), drafts(64, 16, 6, 2)
    mixed, _changes = counted(*[one, other] * 20)
    assert 10 < mixed.overdispersion <= MAXIMUM_OVERDISPERSION
    _again, changes = counted(*[one, other] * 20, start=mixed)
    assert True not in changes
    even, _changes = counted(*[one] * 40)
    assert even.overdispersion == 1.0
    assert mixed.gain(3, 0).variance > 10 * even.gain(3, 0).variance


def test_one_kind_after_the_other_is_not_overdispersed():
    """And too few windows say nothing."""
    one, other = drafts(64, 48, 32, 20), drafts(64, 16, 6, 2)
    assert counted(*[one] * 10, *[other] * 10, *[one] * 10)[0].overdispersion == 1.0
    assert counted(one, other, one, other)[0].overdispersion == 1.0


@pytest.mark.parametrize("stopped", [True, False], ids=["collapses", "turns"])
def test_a_collapse_that_stopped_drafting_is_no_turn(stopped: bool):
    """It has few drafts because of that, and a probe finds its end; requests in turn go on drafting."""
    found = Acceptance()
    for _ in range(16):
        found, _changes = counted(*[drafts(64, 48, 32, 20)] * 2, drafts(48, 2, 0, 0), start=found)
        found, _has_changed = found.counted(
            drafts(24, 18, 12, 8), memory=MEMORY, least=LEAST, are_probes=stopped
        )
    assert (found.overdispersion == 1.0) is stopped


SPAN = st.tuples(st.integers(0, 300), st.floats(0, 1), st.floats(0, 1), st.integers(0, 3))


@given(st.lists(SPAN, max_size=80), st.integers(0, 5), st.integers(0, 5))
def test_any_drafts_give_estimates(spans: list[tuple[int, float, float, int]], k: int, other: int):
    """Of any depth, with anything accepted."""
    found = Acceptance()
    for count, first, more, depth in spans:
        reached = tuple(count if position < depth else 0 for position in range(3))
        accepted, chance = [], first
        for each in reached:
            accepted.append(int(each * chance))
            chance *= more
        found, _changed = found.counted(drafts(count, *accepted, reached=reached), memory=MEMORY, least=LEAST)
    gain = found.gain(k, other)
    assert math.isfinite(gain.mean)
    assert gain.variance >= 0.0
    assert abs(gain.mean) <= math.log(1 + max(k, other)) + 1e-9
    assert found.total.drafts == sum(span.drafts for span in found.spans)


def test_the_depth_of_drafts_counts_those_that_reached_it():
    seen = drafts(400, 320, 3, 3, reached=(400, 4, 4))
    assert (deepest(seen, 32), deepest(seen, 4), deepest(seen, 401)) == (1, 3, 0)
