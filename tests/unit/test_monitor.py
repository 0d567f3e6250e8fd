"""Promises of `appliance.monitor`: what the window holds, and what is said about it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.monitor import (
    MonitorPolicy,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    Watch,
    observe,
)

POLICY = MonitorPolicy(window_drafts=100, min_drafts=10, collapsed_below=1.2)
START = Watch(mode=SpeculationMode.SPECULATIVE)
K = 3


def reading(drafts: int, accepted: tuple[int, ...] = (0, 0, 0)) -> SpecDecodeCounters:
    """Return counters after `drafts` full drafts with so many accepted at each position."""
    return SpecDecodeCounters(
        drafts=drafts, draft_tokens=K * drafts, accepted_tokens=sum(accepted), accepted_per_position=accepted
    )


def watch_of(*readings: SpecDecodeCounters | None, policy: MonitorPolicy = POLICY) -> Watch:
    """Return what is known after these readings."""
    watch = START
    for counters in readings:
        watch = observe(watch, counters, policy)
    return watch


STEPS = st.lists(
    st.none()
    | st.just("reset")
    | st.tuples(st.integers(0, 40), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    max_size=60,
)


def readings_of(steps: list) -> list[SpecDecodeCounters | None]:
    """Turn steps into cumulative counters as a worker would show them."""
    drafts, accepted, shown = 0, [0] * K, []
    for step in steps:
        if step is None:
            shown.append(None)
            continue
        if step == "reset":
            drafts, accepted = 0, [0] * K
        else:
            more, *rates = step
            drafts += more
            reached = more
            for position, rate in enumerate(rates):
                reached = int(reached * rate)
                accepted[position] += reached
        shown.append(reading(drafts, tuple(accepted)))
    return shown


def test_a_window_is_the_difference_between_its_ends():
    """What a worker counted before the first look is not in the window."""
    window = watch_of(reading(1000, (900, 800, 700)), reading(1050, (940, 830, 720))).window
    assert (window.drafts, window.accepted_tokens) == (50, 90)
    assert window.acceptance_length == pytest.approx(1 + 90 / 50)


def test_acceptance_is_told_for_every_position():
    """Each position has its own share of drafts."""
    window = watch_of(reading(0), reading(50, (40, 20, 5))).window
    assert window.acceptance_rate_per_position == pytest.approx((0.8, 0.4, 0.1))
    assert window.acceptance_rate == pytest.approx(65 / 150)


def test_the_window_is_counted_in_drafts_not_in_looks():
    """A hundred idle looks do not push evidence out of the window."""
    busy = watch_of(reading(0), reading(60, (30, 0, 0)))
    idle = busy
    for _ in range(100):
        idle = observe(idle, reading(60, (30, 0, 0)), POLICY)
    assert idle.window == busy.window


def test_old_drafts_leave_the_window():
    """A window of 100 drafts forgets what came before them."""
    watch = watch_of(reading(0), reading(100, (100, 100, 100)), reading(200, (100, 100, 100)))
    assert watch.window.drafts == 100
    assert watch.window.acceptance_length == 1.0
    assert watch.reason is Reason.COLLAPSED


def test_an_idle_worker_keeps_nothing_but_its_window():
    """Looks without a change add no reading, so an idle month takes no memory."""
    watch = watch_of(*[reading(5)] * 1000)
    assert len(watch.samples) == 1


def test_without_drafts_the_acceptance_length_is_one():
    """No drafts means one token a step: the bonus token."""
    assert START.window.acceptance_length == 1.0
    assert watch_of(reading(7)).window.acceptance_length == 1.0
    assert watch_of(reading(7)).window.acceptance_rate == 0.0


@pytest.mark.parametrize(
    ("drafts", "accepted", "reason"),
    [
        (9, 27, Reason.TOO_FEW_DRAFTS),
        (10, 30, Reason.HEALTHY),
        (10, 2, Reason.HEALTHY),
        (10, 1, Reason.COLLAPSED),
        (10, 0, Reason.COLLAPSED),
    ],
)
def test_the_verdict_follows_the_thresholds(drafts: int, accepted: int, reason: Reason):
    """Too few drafts give no verdict; at the limit a draft is healthy, below it collapsed."""
    assert watch_of(reading(0), reading(drafts, (accepted, 0, 0))).reason is reason


def test_a_failed_scrape_changes_nothing_but_the_reason():
    """Mode and window hold still when a worker cannot be read."""
    before = watch_of(reading(0), reading(50, (40, 20, 5)))
    after = observe(before, None, POLICY)
    assert (after.mode, after.samples, after.window) == (before.mode, before.samples, before.window)
    assert after.reason is Reason.SCRAPE_FAILED


def test_the_verdict_returns_with_the_next_good_scrape():
    """A failed scrape in between costs nothing."""
    assert watch_of(reading(0), None, reading(50, (50, 50, 50))).reason is Reason.HEALTHY
    assert (
        watch_of(reading(0), reading(50, (50, 50, 50)), None, reading(50, (50, 50, 50))).reason
        is Reason.HEALTHY
    )


@pytest.mark.parametrize(
    "after",
    [
        reading(10, (5, 5, 5)),
        reading(60, (39, 30, 30)),
        SpecDecodeCounters(drafts=60, draft_tokens=10, accepted_tokens=99, accepted_per_position=(40, 20, 5)),
        SpecDecodeCounters(drafts=60, draft_tokens=180, accepted_tokens=70, accepted_per_position=(40, 20)),
    ],
)
def test_counters_that_went_backwards_empty_the_window(after: SpecDecodeCounters):
    """A restarted worker starts a new window; no number is made of the two lives."""
    watch = watch_of(reading(0), reading(50, (40, 20, 5)), after)
    assert watch.reason is Reason.COUNTER_RESET
    assert watch.window.drafts == 0
    assert watch.samples == (after,)


def test_the_reset_is_over_with_the_next_reading():
    """After a reset the window grows again from zero."""
    watch = watch_of(reading(50), reading(5), reading(30, (25, 25, 25)))
    assert (watch.window.drafts, watch.reason) == (25, Reason.HEALTHY)


def test_watching_never_changes_the_mode():
    """Watching only reports; it switches nothing."""
    steps = (reading(0), reading(100), None, reading(3), reading(200))
    for mode in SpeculationMode:
        watch = Watch(mode=mode)
        for counters in steps:
            watch = observe(watch, counters, POLICY)
            assert watch.mode is mode


@given(STEPS)
def test_no_sequence_of_readings_leaves_the_possible_range(steps: list):
    """Whatever comes, nothing raises and acceptance length stays between 1 and 1 + K."""
    watch = START
    for counters in readings_of(steps):
        watch = observe(watch, counters, POLICY)
        assert 1.0 <= watch.window.acceptance_length <= 1 + K
        assert all(0.0 <= rate <= 1.0 for rate in watch.window.acceptance_rate_per_position)
        assert 0.0 <= watch.window.acceptance_rate <= 1.0


@given(STEPS, st.integers(1, 80))
def test_the_window_spans_all_it_should_and_no_look_more_than_it_must(steps: list, size: int):
    """It reaches over `window_drafts` as soon as that many were seen, and one reading less would not."""
    policy = MonitorPolicy(window_drafts=size, min_drafts=1, collapsed_below=1.2)
    watch, seen = START, []
    for counters in readings_of(steps):
        watch = observe(watch, counters, policy)
        if counters is None:
            continue
        if seen and (counters.since(seen[-1]) is None):
            seen = []
        seen.append(counters)
        available = seen[-1].drafts - seen[0].drafts
        assert watch.window.drafts >= min(size, available)
        if len(watch.samples) > 2:
            assert watch.samples[-1].drafts - watch.samples[1].drafts < size


@given(STEPS)
def test_memory_is_bounded_by_the_size_of_the_window(steps: list):
    """A reading is only kept if something was counted, so there are never many more than drafts."""
    watch = START
    for counters in readings_of(steps):
        watch = observe(watch, counters, POLICY)
        assert len(watch.samples) <= POLICY.window_drafts + 2
