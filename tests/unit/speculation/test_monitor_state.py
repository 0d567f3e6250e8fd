"""Windows, adoption of an engine, and reasons."""

from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.monitor import decide
from appliance.speculation.goodput import Costs, Estimate
from appliance.speculation.state import (
    DIPS_KEPT,
    WINDOWS_KEPT,
    Bucket,
    MonitorPolicy,
    MonitorState,
    observe,
    tail,
    total_of,
)
from appliance.speculation.values import (
    DraftTokenTable,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    buckets_up_to,
    draft_tokens_at,
)

POLICY = MonitorPolicy(window_drafts=100, min_drafts=10, collapsed_below=1.2)
START = MonitorState(mode=SpeculationMode.SPECULATIVE)
K = 3


def counters(drafts: int, accepted: tuple[int, ...] = (0, 0, 0)) -> SpecDecodeCounters:
    """Counters after this many full drafts."""
    return SpecDecodeCounters(
        drafts=drafts,
        draft_tokens=K * drafts,
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        drafted_per_position=(drafts,) * len(accepted),
    )


def reading(
    drafts: int = 0,
    accepted: tuple[int, ...] = (0, 0, 0),
    *,
    epoch: str = "one",
    mode: SpeculationMode | None = None,
    reason: Reason | None = None,
    table: DraftTokenTable = ((1, 64, 3),),
    controllable: bool = True,
) -> EngineReading:
    """A plugin's reading."""
    return EngineReading(
        controllable=controllable,
        epoch=epoch,
        largest_batch=64,
        choices=(0, 1, 2, 3),
        table=table,
        mode=mode,
        reason=reason,
        drafting=counters(drafts, accepted),
    )


def seen(
    *readings: EngineReading | None, policy: MonitorPolicy = POLICY, start: MonitorState = START
) -> MonitorState:
    """The state after these readings, as `decide` keeps it."""
    state = start
    for poll in readings:
        state = observe(state, poll, policy)
        state = state if poll is None else replace(state, last=poll)
    return state


STEPS = st.lists(
    st.none()
    | st.sampled_from(["reset", "restart", "short"])
    | st.tuples(st.integers(0, 250), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    max_size=60,
)


def readings_of(steps: list) -> list[EngineReading | None]:
    """Steps as a worker's cumulative counters."""
    drafts, accepted, shown, epoch, positions = 0, [0] * K, [], 0, K
    for step in steps:
        if step is None:
            shown.append(None)
            continue
        if isinstance(step, str):
            drafts, accepted = 0, [0] * K
            epoch += step == "restart"
            positions = K - 1 if step == "short" else K
        else:
            more, *rates = step
            drafts += more
            reached = more
            for position, rate in enumerate(rates):
                reached = int(reached * rate)
                accepted[position] += reached
        shown.append(reading(drafts, tuple(accepted[:positions]), epoch=str(epoch)))
    return shown


def test_a_window_is_the_difference_between_its_ends():
    """Counts before the first poll are not in the window."""
    window = seen(reading(1000, (900, 800, 700)), reading(1050, (940, 830, 720))).window
    assert (window.drafts, window.accepted_tokens) == (50, 90)
    assert window.acceptance_length == pytest.approx(1 + 90 / 50)


def test_the_window_is_counted_in_drafts_not_in_polls():
    """A hundred idle polls neither push evidence out of the window nor take memory."""
    busy = seen(reading(0), reading(60, (30, 0, 0)))
    idle = seen(*[reading(60, (30, 0, 0))] * 100, start=busy)
    assert (idle.window, idle.samples) == (busy.window, busy.samples)


def test_old_drafts_leave_the_window_but_not_the_long_one():
    """Eight windows are kept besides."""
    state = seen(reading(0), reading(100, (100, 100, 100)), reading(200, (100, 100, 100)))
    assert (state.window.drafts, state.window.acceptance_length) == (100, 1.0)
    assert (state.long_window.drafts, state.long_window.acceptance_length) == (200, 2.5)
    assert [window.acceptance_length for window in state.windows] == [4.0, 1.0]


def test_the_newest_drafts_come_from_the_window_that_has_them():
    """Few in the last readings, many in the long window."""
    state = seen(*(reading(drafts) for drafts in range(0, 500, 40)))
    found = [state.newest(drafts) for drafts in (1, 41, 100, 300, 10_000)]
    assert [counted and counted.drafts for counted in found] == [40, 80, 120, 480, None]


@pytest.mark.parametrize(
    ("drafts", "reason"), [(9, Reason.TOO_FEW_DRAFTS), (10, Reason.HEALTHY), (99, Reason.HEALTHY)]
)
def test_too_few_drafts_show_as_the_reason(drafts: int, reason: Reason):
    assert seen(reading(0), reading(drafts)).reason is reason


def test_a_recovery_is_shown_until_a_window_has_confirmed_it():
    back = replace(seen(reading(0)), basis=Reason.RECOVERED)
    assert seen(reading(50), start=back).reason is Reason.RECOVERED
    assert seen(reading(50), reading(100), start=back).reason is Reason.HEALTHY


def test_a_failed_scrape_changes_only_the_reason():
    """Mode and windows stay, and no probe is started twice."""
    before = replace(seen(reading(0), reading(50, (40, 20, 5))), starts_probe=True)
    after = observe(before, None, POLICY)
    assert after == replace(before, reason=Reason.SCRAPE_FAILED, starts_probe=False)
    assert seen(reading(60, (50, 20, 5)), start=after) == seen(reading(60, (50, 20, 5)), start=before)


@pytest.mark.parametrize("after", [reading(10, (5, 5, 5)), reading(60, (39, 30, 30)), reading(60, (40, 20))])
def test_counters_that_went_backwards_empty_the_windows(after: EngineReading):
    """No number combines two starts of a worker."""
    state = seen(reading(0), reading(50, (40, 20, 5)), after)
    assert state.reason is Reason.COUNTER_RESET
    assert (state.window.drafts, state.long_window.drafts) == (0, 0)
    assert (state.samples, state.history) == ((after.drafting,), (after.drafting,))
    assert seen(replace(after, drafting=after.drafting), start=state).reason is Reason.TOO_FEW_DRAFTS


def test_another_engine_keeps_only_what_is_known_of_the_draft():
    """Costs and probes were the old engine's; the draft's baseline stays."""
    old = replace(seen(reading(500)), has_paid=True, baseline_length=2.7, probed_steps=9, flips=(1.0,))
    state = seen(reading(3, epoch="two"), start=old)
    assert state.reason is Reason.COUNTER_RESET
    assert (state.has_paid, state.baseline_length, state.flips) == (True, 2.7, (1.0,))
    assert (state.probed_steps, state.window.drafts, state.mode) == (0, 0, SpeculationMode.SPECULATIVE)


@pytest.mark.parametrize(
    ("mode", "reason", "adopted", "verdict"),
    [
        (None, None, SpeculationMode.SPECULATIVE, None),
        (SpeculationMode.SPECULATIVE, Reason.HEALTHY, SpeculationMode.SPECULATIVE, None),
        (SpeculationMode.TARGET_ONLY, Reason.COLLAPSED, SpeculationMode.TARGET_ONLY, Reason.COLLAPSED),
        (SpeculationMode.PROBING, Reason.PROBING, SpeculationMode.TARGET_ONLY, Reason.COLLAPSED),
        (
            SpeculationMode.TARGET_ONLY,
            Reason.BELOW_BREAK_EVEN,
            SpeculationMode.TARGET_ONLY,
            Reason.BELOW_BREAK_EVEN,
        ),
        (SpeculationMode.TARGET_ONLY, Reason.OPERATOR_OVERRIDE, SpeculationMode.TARGET_ONLY, None),
    ],
)
def test_a_new_state_resumes_from_the_workers_last_command(
    mode: SpeculationMode | None, reason: Reason | None, adopted: SpeculationMode, verdict: Reason | None
):
    """The worker kept the mode of another control process."""
    state = seen(reading(10, mode=mode, reason=reason))
    assert (state.mode, state.verdict) == (adopted, verdict)


@pytest.mark.parametrize(
    "table", [((1, 64, 2),), ((1, 32, 3), (33, 64, 1)), ((1, 1, 3), (2, 8, 1), (9, 64, 0))]
)
def test_the_workers_table_is_adopted_unchanged(table: DraftTokenTable):
    """By a new state, and by a gateway that follows."""
    told = reading(mode=SpeculationMode.SPECULATIVE, reason=Reason.HEALTHY, table=table)
    assert seen(told).table == table
    followed, decision = decide(seen(reading()), told, POLICY, 0.0, acting=False)
    assert followed.table == decision.table == table


def test_a_following_gateway_shows_the_workers_report():
    """Mode and reason are another gateway's decision."""
    told = reading(20, mode=SpeculationMode.TARGET_ONLY, reason=Reason.COLLAPSED)
    state, decision = decide(seen(reading()), told, POLICY, 0.0, acting=False)
    assert (state.mode, state.reason, state.last) == (SpeculationMode.TARGET_ONLY, Reason.COLLAPSED, told)
    assert (decision.mode, decision.reason) == (state.mode, state.reason)
    assert decide(state, None, POLICY, 0.0, acting=False)[1].reason is Reason.SCRAPE_FAILED


def test_a_worker_without_control_has_no_table():
    assert START.table == ()
    assert seen(reading(controllable=False)).table == ()


def test_an_unmeasured_batch_takes_the_nearest_smaller_ones_choice():
    """The larger the batch, the less a draft is worth; nothing larger can be inferred from it."""
    buckets = MappingProxyType({4: Bucket(draft_tokens=2), 16: Bucket(draft_tokens=0)})
    state = replace(seen(reading()), buckets=buckets)
    assert [state.draft_tokens(bucket) for bucket in buckets_up_to(64)] == [3, 3, 2, 2, 0, 0, 0]
    assert state.table == ((1, 2, 3), (3, 8, 2), (9, 64, 0))
    stopped = replace(state, mode=SpeculationMode.TARGET_ONLY)
    assert stopped.table == ((1, 64, 0),)


def test_unknown_costs_are_guessed_from_the_nearest_batch():
    """With so little certainty that the first measurement outweighs the guess."""
    costs = Costs(ratios={3: Estimate(mean=0.5, variance=0.0001)})
    state = replace(START, buckets=MappingProxyType({8: Bucket(draft_tokens=3, costs=costs)}))
    assert state.costs(8) is costs
    guessed = state.costs(64).ratios[3]
    assert (guessed.mean, guessed.variance > 0.05) == (0.5, True)
    assert not START.costs(1).is_known()


def test_flips_are_forgotten_after_a_while():
    state = replace(START, flips=(0.0, 1000.0, 2000.0))
    assert state.recent_flips(2100.0) == (1000.0, 2000.0)


def test_spans_of_one_engine_add_up():
    """Position by position."""
    total = total_of([counters(10, (5, 4, 3)), counters(20, (6, 5, 4))])
    assert (total.drafts, total.accepted_per_position) == (30, (11, 9, 7))
    assert total.drafted_per_position == (30, 30, 30)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 300))
def test_a_tail_spans_enough_and_no_reading_more_than_it_must(more: list[int], drafts: int):
    """The fewest newest readings that do; all of them if none do."""
    readings, total = [], 0
    for count in more:
        total += count
        readings.append(counters(total))
    kept = tail(tuple(readings), drafts)
    assert kept == tuple(readings[-len(kept) :])
    if kept != tuple(readings):
        assert kept[-1].drafts - kept[0].drafts >= drafts
    if len(kept) > 2:
        assert kept[-1].drafts - kept[1].drafts < drafts


@given(STEPS)
def test_any_readings_give_non_negative_counts(steps: list):
    """And never raise."""
    state = START
    for poll in readings_of(steps):
        state = seen(poll, start=state)
        for window in (state.window, state.long_window, *state.windows):
            counts = (window.drafts, window.draft_tokens, window.accepted_tokens)
            assert min(*counts, *window.accepted_per_position, *window.drafted_per_position) >= 0
            assert 1.0 <= window.acceptance_length <= 1 + K


@given(STEPS, st.integers(1, 80))
def test_the_windows_span_their_sizes(steps: list, size: int):
    """One window as soon as it has its drafts; the long one eight times as many, and not ten times."""
    policy = replace(POLICY, window_drafts=size)
    state, since_reset = START, []
    for poll in readings_of(steps):
        state = seen(poll, policy=policy, start=state)
        if poll is None:
            continue
        if state.reason is Reason.COUNTER_RESET:
            since_reset = []
        since_reset.append(poll.drafting.drafts)
        available = since_reset[-1] - since_reset[0]
        assert state.window.drafts >= min(size, available)
        assert state.long_window.drafts >= min(WINDOWS_KEPT * size, available)
        largest = max((later - earlier for earlier, later in pairwise(since_reset)), default=0)
        assert state.long_window.drafts <= (WINDOWS_KEPT + 1) * (size + largest)


@given(STEPS)
def test_memory_is_bounded_by_the_size_of_the_window(steps: list):
    """A reading is only kept if something was counted, so there are never many more than drafts."""
    state = START
    for poll in readings_of(steps):
        state = seen(poll, start=state)
        assert len(state.samples) <= POLICY.window_drafts + 2
        assert len(state.history) <= WINDOWS_KEPT + 1


@given(st.integers(1, 100), st.data())
def test_the_table_covers_every_batch_with_choices_only(largest: int, data: st.DataObject):
    """From 1 to the largest batch, without a gap, for any known buckets."""
    known = data.draw(st.dictionaries(st.sampled_from(buckets_up_to(largest)), st.sampled_from((0, 1, 3))))
    state = replace(
        START,
        last=reading(),
        largest_batch=largest,
        choices=(0, 1, 3),
        buckets=MappingProxyType({bucket: Bucket(draft_tokens=k) for bucket, k in known.items()}),
    )
    assert [first for first, _, _ in state.table] == [1, *(last + 1 for _, last, _ in state.table[:-1])]
    assert state.table[-1][1] == largest
    assert {draft_tokens_at(state.table, batch) for batch in range(1, largest + 1)} <= {0, 1, 3}


GOOD, DEAD = (1.6, 0.4), (0.0, 0.0)
"""Mean accepted tokens of a draft, and how much they vary from tick to tick."""


def ticks(*texts: tuple[tuple[float, float], int], start: MonitorState = START) -> MonitorState:
    """The state after ticks of 20 full drafts, a short window each, of one text after another."""
    drafts, accepted, polls = 0, 0.0, [reading()]
    for (mean, spread), count in texts:
        for number in range(count):
            drafts += 20
            accepted += 20 * (mean + spread * (1 if number % 2 else -1) / 4)
            polls.append(reading(drafts, (int(accepted / 2), int(accepted / 3), int(accepted / 6))))
    return seen(*polls, start=start)


def test_a_dip_that_ends_without_a_stop_is_kept():
    """Once it has ended."""
    assert ticks((GOOD, 5), (DEAD, 3)).dips == ()
    assert ticks((GOOD, 5), (DEAD, 3)).dip == 60
    after = ticks((GOOD, 5), (DEAD, 3), (GOOD, 2), (DEAD, 1), (GOOD, 1))
    assert (after.dips, after.dip) == ((60, 20), 0)


def test_a_dip_that_led_to_a_stop_is_not_kept():
    """Its length is unknown."""
    dipped = ticks((GOOD, 5), (DEAD, 3))
    stopped = replace(dipped, mode=SpeculationMode.TARGET_ONLY)
    probed = seen(reading(170, (165, 165, 165)), policy=POLICY, start=stopped)
    assert (probed.dip, probed.dips, probed.marks) == (0, (), ())


def test_the_number_of_kept_dips_is_bounded():
    state = ticks(*((GOOD, 1), (DEAD, 1)) * 40)
    assert len(state.dips) == DIPS_KEPT


def test_one_kind_of_traffic_is_not_overdispersed():
    """Nor is too little traffic."""
    assert ticks((GOOD, 40)).overdispersion == 1.0
    assert ticks((GOOD, 1), (DEAD, 1), (GOOD, 1)).overdispersion == 1.0


def test_several_kinds_at_once_are_overdispersed():
    """Every short window differs from the next."""
    assert ticks(*((GOOD, 1), (DEAD, 1)) * 20).overdispersion > 4


def test_one_kind_after_the_other_is_not_overdispersed():
    """An occasional change is not a mixture."""
    assert ticks((GOOD, 15), (DEAD, 15), (GOOD, 15)).overdispersion == 1.0


def test_traffic_statistics_outlive_the_engine():
    """The next engine gets the same traffic."""
    state = ticks(*((GOOD, 1), (DEAD, 1)) * 20)
    restarted = observe(state, reading(epoch="two"), POLICY)
    assert (restarted.dips, restarted.squared_z_scores) == (state.dips, state.squared_z_scores)
    assert (restarted.dip, restarted.marks) == (0, ())


def test_figures_show_the_next_probe_only_while_speculation_is_stopped():
    """At any batch size; draft tokens are those in force."""
    buckets = MappingProxyType({1: Bucket(draft_tokens=3), 4: Bucket(draft_tokens=3)})
    state = replace(seen(reading()), buckets=buckets, next_probe_at=9.0)
    assert (state.figures.next_probe_at, dict(state.figures.draft_tokens)) == (None, {1: 3, 4: 3})
    in_part = replace(state, buckets=MappingProxyType({**buckets, 4: Bucket(draft_tokens=0)}))
    assert (in_part.figures.next_probe_at, dict(in_part.figures.draft_tokens)) == (9.0, {1: 3, 4: 0})
    stopped = replace(state, mode=SpeculationMode.TARGET_ONLY, verdict=Reason.COLLAPSED)
    assert (stopped.figures.next_probe_at, dict(stopped.figures.draft_tokens)) == (9.0, {1: 0, 4: 0})
    overridden = replace(state, mode=SpeculationMode.TARGET_ONLY)
    assert (overridden.figures.next_probe_at, dict(overridden.figures.draft_tokens)) == (None, {1: 0, 4: 0})
