"""An equal draft passes, a worse one does not, however often the trial is judged."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.promotion.trial import (
    LEAST_WINDOWS,
    Trial,
    TrialRules,
    TrialVerdict,
    WindowSample,
    acceptance_length,
    follow,
    handicaps,
    interval,
    judge,
)
from appliance.drafts.promotion.trial_counts import NOTHING, WorkerCounters, counts_of
from appliance.serving.worker import WorkerId
from appliance.speculation.values import NO_DRAFTS, SpecDecodeCounters
from tests.unit.drafts.promotion.drafting import STEP_SECONDS, Side

A, B = WorkerId("a"), WorkerId("b")
RULES = TrialRules(drafts=1000, seconds=1800.0, margin=0.05)
USUAL = 0.7


def loss(share: float) -> float:
    """The acceptance rate that lowers the acceptance length by this share."""
    wanted = (1 + USUAL + USUAL**2 + USUAL**3) * (1 - share)
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if 1 + rate + rate**2 + rate**3 < wanted else (low, rate)
    return low


def run(canary: Side, mate: Side, *, rules: TrialRules = RULES, requests: int = 600, **trial) -> Trial:
    """Let both sides serve, judge after every window, and stop once the trial is decided."""
    mine, theirs = WorkerCounters(), WorkerCounters()
    now, judged = Trial(rules=rules, **trial), 0
    mine.observe(A, canary.reading)
    theirs.observe(B, mate.reading)
    for _ in range(requests):
        canary.request()
        mate.request()
        mine.observe(A, canary.reading)
        theirs.observe(B, mate.reading)
        now = follow(now, mine.total(), theirs.total())
        if len(now.lengths) > judged and judge(now, 0.0).verdict is not TrialVerdict.CONTINUE:
            break
        judged = len(now.lengths)
    return now


def verdicts(trials: int, **canary) -> list[TrialVerdict]:
    found = []
    for seed in range(trials):
        chance = random.Random(seed)
        trial = run(Side(chance, **{"rate": USUAL, **canary}), Side(chance, USUAL))
        found.append(judge(trial, 0.0).verdict)
    return found


def test_equal_draft_passes_and_is_rarely_refused():
    """Judged after every window."""
    found = verdicts(40)
    assert found.count(TrialVerdict.WORSE) <= 2
    assert found.count(TrialVerdict.PASSED) >= 36


def test_draft_with_10_percent_less_acceptance_is_refused():
    found = verdicts(20, rate=loss(0.1))
    assert found.count(TrialVerdict.PASSED) == 0
    assert found.count(TrialVerdict.WORSE) >= 19


def test_draft_with_12_percent_slower_steps_is_refused():
    """At equal acceptance."""
    found = verdicts(20, step_seconds=STEP_SECONDS * 1.12)
    assert found.count(TrialVerdict.PASSED) == 0
    assert found.count(TrialVerdict.WORSE) >= 19


def test_a_better_draft_passes():
    found = verdicts(20, rate=USUAL + 0.06)
    assert found.count(TrialVerdict.PASSED) >= 19
    assert TrialVerdict.WORSE not in found


def test_error_rate_holds_for_a_loss_equal_to_the_margin():
    """The hardest case, over all evaluations together."""
    found = verdicts(20, rate=loss(RULES.margin))
    assert found.count(TrialVerdict.PASSED) <= 2
    assert found.count(TrialVerdict.WORSE) <= 2


def test_no_draft_passes_before_the_minimum_of_drafts():
    chance = random.Random(1)
    rules = replace(RULES, drafts=12_000)
    trial = run(Side(chance, 0.9), Side(chance, USUAL), rules=rules, requests=390)
    assert judge(trial, 0.0).verdict is TrialVerdict.CONTINUE
    assert len(trial.lengths) >= LEAST_WINDOWS
    trial = run(Side(chance, 0.9), Side(chance, USUAL), rules=rules, requests=420)
    assert judge(trial, 0.0).verdict is TrialVerdict.PASSED


def test_undecided_trial_is_refused_at_the_time_limit_with_the_reason():
    chance = random.Random(1)
    trial = run(Side(chance, USUAL), Side(chance, USUAL), requests=3)
    assert judge(trial, RULES.seconds - 1).verdict is TrialVerdict.CONTINUE
    judgement = judge(trial, RULES.seconds)
    assert judgement.verdict is TrialVerdict.UNDECIDED
    assert "undecided after 1800 s" in judgement.reason
    assert "the new draft made 90 drafts and the one in service made 90 drafts of at least 1000" in (
        judgement.reason
    )


def test_trial_without_comparable_steps_is_undecided():
    """One side decodes eight requests together, the other one: acceptance alone is not enough."""
    chance = random.Random(1)
    trial = run(Side(chance, USUAL, bucket=8), Side(chance, USUAL), requests=700)
    judgement = judge(trial, RULES.seconds)
    assert (judgement.verdict, trial.speeds) == (TrialVerdict.UNDECIDED, ())
    assert "steps of one batch size" in judgement.reason


def test_speed_difference_of_the_machines_is_subtracted():
    """And a slower draft on the slower machine is still refused."""
    for seed in range(4):
        chance = random.Random(seed)
        slow, mate = Side(chance, USUAL, STEP_SECONDS * 1.3), Side(chance, USUAL)
        for _ in range(500):
            slow.request()
            mate.request()
        known = handicaps(counts_of(slow.reading), counts_of(mate.reading))
        slow.restart()
        trial = run(slow, mate, handicaps=known, requests=1500)
        assert judge(trial, 0.0).verdict is TrialVerdict.PASSED
        slow.restart()
        slow.step_seconds *= 1.2
        assert judge(run(slow, mate, handicaps=known), 0.0).verdict is TrialVerdict.WORSE
        slow.restart()
        slow.step_seconds /= 1.2
        assert judge(run(slow, mate), 0.0).verdict is TrialVerdict.WORSE


def test_restart_of_a_worker_loses_no_counts():
    chance = random.Random(3)
    canary, mate = Side(chance, USUAL), Side(chance, USUAL)
    mine, theirs, trial = WorkerCounters(), WorkerCounters(), Trial(rules=RULES)
    for number in range(400):
        mine.observe(A, canary.reading)
        theirs.observe(B, mate.reading)
        canary.request()
        mate.request()
        theirs.observe(B, mate.reading)
        if number % 50 == 49:
            mate.restart()
        mine.observe(A, canary.reading)
        theirs.observe(B, mate.reading)
        trial = follow(trial, mine.total(), theirs.total())
    assert trial.others.drafts == trial.canary.drafts == 400 * 30
    assert min(trial.others.accepted) > 0
    assert judge(trial, 0.0).verdict is not TrialVerdict.WORSE


def test_single_worker_is_compared_with_its_former_counts():
    """Their uncertainty does not shrink with more windows."""
    for seed in range(5):
        chance = random.Random(seed)
        before = Side(chance, USUAL)
        for _ in range(400):
            before.request()
        for rate, expected in (
            (USUAL, {TrialVerdict.PASSED, TrialVerdict.CONTINUE}),
            (loss(0.15), {TrialVerdict.WORSE}),
        ):
            mine, side = WorkerCounters(), Side(chance, rate)
            trial = Trial(rules=RULES, reference=counts_of(before.reading))
            for _ in range(600):
                mine.observe(A, side.reading)
                side.request()
                mine.observe(A, side.reading)
                trial = follow(trial, mine.total(), NOTHING)
                if judge(trial, 0.0).verdict is not TrialVerdict.CONTINUE:
                    break
            assert judge(trial, 0.0).verdict in expected
    assert trial.lengths[0].shared > 0


def test_numbers_cover_the_whole_trial():
    chance = random.Random(5)
    trial = run(Side(chance, loss(0.2)), Side(chance, USUAL))
    numbers = judge(trial, 0.0).numbers
    assert numbers.drafts == trial.canary.drafts
    assert numbers.acceptance_length == pytest.approx(1 + sum(trial.canary.accepted) / trial.canary.drafts)
    assert numbers.previous_acceptance_length == pytest.approx(
        1 + sum(trial.others.accepted) / trial.others.drafts
    )
    assert 0.7 < numbers.speed_ratio < 0.9
    assert set(numbers.audit_fields()) == {
        *("drafts", "acceptance_length", "previous_acceptance_length", "speed_ratio")
    }


SAMPLES = st.lists(
    st.builds(WindowSample, value=st.floats(-0.5, 0.5), variance=st.floats(1e-6, 0.1), shared=st.just(0.0)),
    min_size=LEAST_WINDOWS,
    max_size=40,
)


@given(SAMPLES)
def test_interval_narrows_around_its_mean_with_more_windows(samples):
    once, twice, often = (interval(samples * times) for times in (1, 2, 20))
    assert once.lower <= once.mean <= once.upper
    for fewer, more in ((once, twice), (twice, often)):
        assert more.mean == pytest.approx(fewer.mean, abs=1e-9)
        # Neighbours may be found to be alike only once there are more of them.
        assert more.upper - more.lower <= (fewer.upper - fewer.lower) * 1.25 + 1e-9
    assert often.upper - often.lower < once.upper - once.lower + 1e-9


@given(SAMPLES, st.floats(0.0, 0.01))
def test_error_shared_by_all_windows_does_not_average_out(samples, shared):
    alike = [replace(sample, shared=shared) for sample in samples]
    bounds = interval(alike * 50)
    assert bounds.upper - bounds.mean >= 2.2 * math.sqrt(shared)


def test_too_few_windows_give_no_interval():
    assert interval([WindowSample(value=0.0, variance=0.01)] * (LEAST_WINDOWS - 1)) is None


def drafted(drafts: int, *accepted: int, reached: tuple[int, ...] = ()) -> SpecDecodeCounters:
    """Counters of drafts with this many accepted at each position."""
    reached = reached or (drafts,) * len(accepted)
    return SpecDecodeCounters(
        drafts=drafts,
        draft_tokens=sum(reached),
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        drafted_per_position=reached,
    )


def test_the_acceptance_length_of_k_counts_its_first_k_positions():
    """Drafts of three tokens also measure drafts of one or two."""
    seen = drafted(400, 300, 200, 100)
    lengths = [acceptance_length(seen, k) for k in (1, 2, 3)]
    assert [length.mean for length in lengths if length is not None] == pytest.approx([1.75, 2.25, 2.5])


@pytest.mark.parametrize("k", [0, -1, 4])
def test_acceptance_length_is_unknown_for_numbers_never_drafted(k: int):
    assert acceptance_length(drafted(400, 300, 200, 100), k) is None
    assert acceptance_length(NO_DRAFTS, 1) is None


def test_drafts_of_different_lengths_are_combined_by_position():
    """The second position is judged by the half of the drafts that reached it."""
    length = acceptance_length(drafted(400, 200, 100, reached=(400, 200)), 2)
    assert length is not None
    assert length.mean == pytest.approx(1 + 0.5 + 0.5)


def test_few_drafts_without_acceptance_leave_uncertainty():
    """Thirty failures leave room for one success in thirty, and three thousand hardly any."""
    few, many = acceptance_length(drafted(30, 0), 1), acceptance_length(drafted(3000, 0), 1)
    assert few is not None
    assert many is not None
    assert few.upper(2.0) > 1.03
    assert many.upper(2.0) < 1.01


@given(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(-3, 9), max_size=4))
def test_any_counters_give_an_estimate_or_none(k: int, accepted: list[int], reached: list[int]):
    """With lists of different lengths, empty positions and invalid values."""
    nonsense = drafted(7, *accepted, reached=tuple(reached))
    found = acceptance_length(nonsense, k)
    assert found is None or found.variance >= 0.0
