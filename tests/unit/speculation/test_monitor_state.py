"""What a reading adds to the memory, adoption of an engine, and following another gateway."""

import math
from dataclasses import replace
from operator import add
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.monitor import decide
from appliance.speculation.exploration import start_probe
from appliance.speculation.state import MonitorPolicy, MonitorState, observe
from appliance.speculation.values import (
    DraftTokenTable,
    EngineReading,
    Reason,
    SpecDecodeCounters,
    SpeculationMode,
    StepCounters,
    buckets_up_to,
    draft_tokens_at,
)

POLICY = MonitorPolicy(min_drafts=10, collapsed_below=1.2)
START = MonitorState(mode=SpeculationMode.SPECULATIVE)
SPECULATIVE, TARGET_ONLY = SpeculationMode
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
    steps: dict[tuple[int, int], tuple[int, float]] | None = None,
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
        step_count=sum(count for count, _seconds in (steps or {}).values()),
        steps={
            kind: StepCounters(
                steps=count, seconds=seconds, seconds_squared=seconds**2 / count, requests=count, tokens=count
            )
            for kind, (count, seconds) in (steps or {}).items()
        },
    )


def seen(*readings: EngineReading | None, start: MonitorState = START) -> MonitorState:
    """The state after these readings, a second apart."""
    state = start
    for second, poll in enumerate(readings):
        state = observe(state, poll, POLICY, float(second))
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


def test_the_evidence_is_what_readings_add():
    """Counts before the first poll are not in it."""
    window = seen(reading(1000, (900, 800, 700)), reading(1050, (940, 830, 720))).acceptance.total
    assert (window.drafts, window.accepted_tokens) == (50, 90)


def test_idle_polls_change_no_evidence():
    """They neither push drafts out of it nor take memory."""
    busy = seen(reading(0), reading(60, (30, 0, 0)))
    assert seen(*[reading(60, (30, 0, 0))] * 100, start=busy).acceptance == busy.acceptance


def test_a_failed_scrape_changes_only_the_reason():
    """No probe is started twice."""
    before = replace(seen(reading(0), reading(50, (40, 20, 5))), starts_probe=True)
    after = observe(before, None, POLICY, 1.0)
    assert after == replace(before, reason=Reason.SCRAPE_FAILED, starts_probe=False)
    assert seen(reading(60, (50, 20, 5)), start=after) == seen(reading(60, (50, 20, 5)), start=before)


@pytest.mark.parametrize("after", [reading(10, (5, 5, 5)), reading(60, (39, 30, 30)), reading(60, (40, 20))])
def test_counters_that_went_backwards_empty_the_evidence(after: EngineReading):
    """No number combines two starts of a worker."""
    state = seen(reading(0), reading(50, (40, 20, 5)), after)
    assert state.reason is Reason.COUNTER_RESET
    assert state.acceptance.total.drafts == 0
    assert decide(state, after, POLICY, 2.0)[1].reason is Reason.TOO_FEW_DRAFTS


def test_another_engine_is_measured_from_the_start():
    """Only how much requests differ is kept: it gets the same traffic."""
    old = seen(reading(500), reading(900, (300, 200, 100), steps={(1, 0): (50, 0.5), (1, 3): (50, 1.0)}))
    old = replace(old, acceptance=replace(old.acceptance, scores=(9.0,) * 20), probed_steps=9)
    assert old.costs.is_measured(1)
    state = seen(reading(3, epoch="two"), start=old)
    assert state.reason is Reason.COUNTER_RESET
    assert state.acceptance.overdispersion == old.acceptance.overdispersion > 1
    assert (state.probed_steps, state.acceptance.total.drafts, state.mode) == (0, 0, SPECULATIVE)
    assert not state.costs.is_measured(1)


@pytest.mark.parametrize(
    ("mode", "reason", "verdict"),
    [
        (None, None, None),
        (SPECULATIVE, Reason.HEALTHY, None),
        (TARGET_ONLY, Reason.COLLAPSED, Reason.COLLAPSED),
        (TARGET_ONLY, Reason.BELOW_BREAK_EVEN, Reason.BELOW_BREAK_EVEN),
        (TARGET_ONLY, Reason.OPERATOR_OVERRIDE, None),
    ],
)
def test_a_new_state_resumes_from_the_workers_last_command(
    mode: SpeculationMode | None, reason: Reason | None, verdict: Reason | None
):
    """The worker kept the mode of another control process."""
    state = seen(reading(10, mode=mode, reason=reason))
    assert (state.mode, state.verdict) == (mode or SPECULATIVE, verdict)


@pytest.mark.parametrize(
    "table", [((1, 64, 2),), ((1, 32, 3), (33, 64, 1)), ((1, 1, 3), (2, 8, 1), (9, 64, 0)), ((1, 64, 0),)]
)
def test_the_workers_table_is_adopted_unchanged(table: DraftTokenTable):
    """By a new state, and by a gateway that follows."""
    told = reading(mode=SPECULATIVE, reason=Reason.HEALTHY, table=table)
    assert seen(told).table == table
    followed, decision = decide(seen(reading()), told, POLICY, 0.0, acting=False)
    assert followed.table == decision.table == table


def test_an_engine_without_a_command_drafts_the_most_at_every_batch_size():
    """The table it was started with was not decided."""
    assert seen(reading(table=((1, 8, 3), (9, 64, 1)))).table == ((1, 64, 3),)


def test_a_following_gateway_shows_the_workers_report():
    """Mode and reason are another gateway's decision."""
    told = reading(20, mode=TARGET_ONLY, reason=Reason.COLLAPSED, table=((1, 64, 0),))
    state, decision = decide(seen(reading()), told, POLICY, 0.0, acting=False)
    assert (state.mode, state.reason, state.last) == (TARGET_ONLY, Reason.COLLAPSED, told)
    assert (decision.mode, decision.reason, decision.verdict) == (state.mode, state.reason, Reason.COLLAPSED)
    assert decide(state, None, POLICY, 0.0, acting=False)[1].reason is Reason.SCRAPE_FAILED


def test_a_worker_without_control_has_no_table():
    assert START.table == ()
    assert seen(reading(controllable=False)).table == ()


def test_the_bucket_in_use_is_that_of_most_recent_engine_time():
    """A burst of another size changes it after some seconds, not at once."""
    state = seen(reading(), reading(steps={(1, 3): (100, 20.0)}))
    assert state.bucket_in_use == 1
    state = seen(reading(steps={(1, 3): (100, 20.0), (8, 3): (5, 1.0)}), start=state)
    assert (state.bucket, state.bucket_in_use) == (8, 1)
    state = seen(reading(steps={(1, 3): (100, 20.0), (8, 3): (90, 18.0)}), start=state)
    assert (state.bucket, state.bucket_in_use) == (8, 8)


def test_a_probe_costs_what_the_table_would_have_given_more():
    """Steps in which as much is given cost nothing."""
    start = replace(seen(reading()), choice=MappingProxyType(dict.fromkeys(buckets_up_to(64), 0)))
    probing = replace(start, probe=((3, 11), (0, 11)), bank=1.0)
    hopeless = reading(1000, (0, 0, 0), steps={(1, 0): (100, 1.0), (1, 3): (10, 0.2)})
    lost = seen(hopeless, start=probing)
    assert lost.probe == ()
    # 10 steps of 0.02 s, of which each gave as much as one of 0.01 s.
    assert lost.bank == pytest.approx(1.0 + 0.01 * 1.2 - 0.1, abs=0.01)
    assert lost.figures.exploration_share == pytest.approx(0.1 / 1.2, rel=0.1)
    perfect = reading(1000, (1000, 1000, 1000), steps={(1, 0): (100, 1.0), (1, 3): (10, 0.2)})
    assert seen(perfect, start=probing).bank == pytest.approx(1.0 + 0.01 * 1.2)
    assert seen(hopeless, start=replace(start, bank=1.0)).bank == pytest.approx(1.0 + 0.01 * 1.2)


@pytest.mark.parametrize(
    ("known", "bank", "probe"),
    [
        # Steps are guessed to take 0.0067 s: of each part three are not measured, and 12 are of both.
        (False, 9.0, ((3, 11), (0, 9), (3, 11), (0, 9))),
        (True, 9.0, ((3, 8), (0, 15))),
        # Each is expected to lose 0.0042 s: for 11, too few for two parts.
        (False, 0.05, ((3, 11), (0, 11))),
    ],
)
def test_a_probe_alternates_with_the_table_while_its_cost_is_in_doubt(known, bank, probe):
    """And if it can pay for enough steps of each part."""
    steps = {(1, 3): (400, 4.0)} | ({(1, 0): (400, 4.0)} if known else {})
    perfect = reading(1000, (1000, 1000, 1000), steps=steps)
    state = replace(seen(reading(), perfect), bank=bank, probes=3)
    state = replace(state, costs=seen(reading(), perfect).costs)
    assert start_probe(state, 1, POLICY, 2.0).probe == probe


def test_catching_up_is_part_of_the_price_and_prompts_are_not():
    """Both happen in steps that are not measured."""
    start = seen(replace(reading(), busy_seconds=0.0, catch_up_seconds=1.0))
    start = replace(start, choice=MappingProxyType(dict.fromkeys(buckets_up_to(64), 0)))
    perfect = reading(1000, (1000, 1000, 1000), steps={(1, 0): (100, 1.0), (1, 3): (10, 0.2)})
    for busy, price in ((1.6, 0.0), (2.4, 0.6)):
        after = seen(
            replace(perfect, busy_seconds=busy, catch_up_seconds=1.0 + price),
            start=replace(start, probe=((3, 11),), bank=1.0),
        )
        assert after.bank == pytest.approx(1.0 + 0.01 * busy - price)


def test_another_text_casts_doubt_on_costs():
    """A text that only may be another does not."""
    good = [reading(drafts, (drafts * 8 // 10, drafts // 2, drafts // 4)) for drafts in (0, 40, 80, 120)]
    last = good[-1].drafting.accepted_per_position

    def gained(*accepted: int) -> tuple[float, float]:
        newest = reading(140, tuple(map(add, last, accepted)))
        before, state = seen(*good), seen(*good, newest)
        doubt, more = (each.costs.ratio(2, 1, 0, 4.0).variance for each in (before, state))
        return state.suspected_at, more - doubt

    assert gained(16, 10, 5) == (-math.inf, 0.0)
    assert gained(8, 5, 2) == (4.0, 0.0)
    assert gained(0, 0, 0) == (4.0, pytest.approx(0.1**2))


def test_figures_show_what_was_measured():
    """Draft tokens in force, by measured bucket."""
    state = seen(reading(), reading(400, (300, 200, 100), steps={(4, 0): (50, 0.5), (4, 3): (50, 1.0)}))
    figures = state.figures
    assert (figures.window.drafts, dict(figures.draft_tokens)) == (400, {4: 3})
    assert set(figures.costs.break_evens(4)) == {3}


@given(STEPS)
def test_any_readings_give_non_negative_counts(steps: list):
    """And never raise."""
    state = START
    for poll in readings_of(steps):
        state = seen(poll, start=state)
        window = state.acceptance.total
        counts = (window.drafts, window.draft_tokens, window.accepted_tokens)
        assert min(*counts, *window.accepted_per_position, *window.drafted_per_position, 0) >= 0
        assert 1.0 <= window.acceptance_length <= 1 + K


@given(st.integers(1, 100), st.data())
def test_the_table_covers_every_batch_with_choices_only(largest: int, data: st.DataObject):
    """From 1 to the largest batch, without a gap, whatever was chosen."""
    chosen = data.draw(st.dictionaries(st.sampled_from(buckets_up_to(largest)), st.sampled_from((0, 1, 3))))
    state = replace(
        START, last=reading(), largest_batch=largest, choices=(0, 1, 3), choice=MappingProxyType(chosen)
    )
    assert [first for first, _, _ in state.table] == [1, *(last + 1 for _, last, _ in state.table[:-1])]
    assert state.table[-1][1] == largest
    assert {draft_tokens_at(state.table, batch) for batch in range(1, largest + 1)} <= {0, 1, 3}
