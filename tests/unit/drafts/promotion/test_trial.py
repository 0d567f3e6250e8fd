"""An equal draft passes, a worse one does not, however often one looks."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.drafts.promotion.evidence import NOTHING, Meters, counts_of
from appliance.drafts.promotion.trial import (
    LEAST_WINDOWS,
    Rules,
    Sample,
    Trial,
    Verdict,
    follow,
    handicaps,
    interval,
    judge,
)
from appliance.serving.worker import WorkerId
from tests.unit.drafts.promotion.drafting import STEP_SECONDS, Side

A, B = WorkerId("a"), WorkerId("b")
RULES = Rules(drafts=1000, seconds=1800.0, margin=0.05)
USUAL = 0.7


def loss(share: float) -> float:
    """The acceptance rate that gives so much less acceptance length than usual."""
    wanted = (1 + USUAL + USUAL**2 + USUAL**3) * (1 - share)
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if 1 + rate + rate**2 + rate**3 < wanted else (low, rate)
    return low


def run(canary: Side, mate: Side, *, rules: Rules = RULES, requests: int = 600, **trial) -> Trial:
    """Let both serve side by side, and judge after every window; the trial as it was decided, or not."""
    mine, theirs = Meters(), Meters()
    now, judged = Trial(rules=rules, **trial), 0
    mine.saw(A, canary.reading)
    theirs.saw(B, mate.reading)
    for _ in range(requests):
        canary.request()
        mate.request()
        mine.saw(A, canary.reading)
        theirs.saw(B, mate.reading)
        now = follow(now, mine.total(), theirs.total())
        if len(now.lengths) > judged and judge(now, 0.0).verdict is not Verdict.GO_ON:
            break
        judged = len(now.lengths)
    return now


def verdicts(trials: int, **canary) -> list[Verdict]:
    found = []
    for seed in range(trials):
        chance = random.Random(seed)
        trial = run(Side(chance, **{"rate": USUAL, **canary}), Side(chance, USUAL))
        found.append(judge(trial, 0.0).verdict)
    return found


def test_an_equal_draft_is_hardly_ever_refused_and_passes_with_traffic_enough():
    """However often one looks: after every window here."""
    found = verdicts(40)
    assert found.count(Verdict.WORSE) <= 2
    assert found.count(Verdict.PASSED) >= 36


def test_a_draft_that_accepts_a_tenth_less_never_passes_and_is_nearly_always_refused():
    """Soon, since it costs the requests that it is tried on."""
    found = verdicts(20, rate=loss(0.1))
    assert found.count(Verdict.PASSED) == 0
    assert found.count(Verdict.WORSE) >= 19


def test_a_draft_that_takes_a_tenth_longer_is_refused_as_well():
    """It accepts as much, and gives fewer tokens per engine second."""
    found = verdicts(20, step_seconds=STEP_SECONDS * 1.12)
    assert found.count(Verdict.PASSED) == 0
    assert found.count(Verdict.WORSE) >= 19


def test_a_better_draft_passes():
    """That is what it is all for."""
    found = verdicts(20, rate=USUAL + 0.06)
    assert found.count(Verdict.PASSED) >= 19
    assert Verdict.WORSE not in found


def test_a_loss_at_the_edge_of_what_is_allowed_is_seldom_decided_wrongly():
    """The error that is promised holds where it is hardest: at the edge, over all looks together."""
    found = verdicts(20, rate=loss(RULES.margin))
    assert found.count(Verdict.PASSED) <= 2
    assert found.count(Verdict.WORSE) <= 2


def test_no_draft_passes_before_the_fewest_drafts():
    """However good it looks."""
    chance = random.Random(1)
    rules = replace(RULES, drafts=12_000)
    trial = run(Side(chance, 0.9), Side(chance, USUAL), rules=rules, requests=390)
    assert judge(trial, 0.0).verdict is Verdict.GO_ON
    assert len(trial.lengths) >= LEAST_WINDOWS
    trial = run(Side(chance, 0.9), Side(chance, USUAL), rules=rules, requests=420)
    assert judge(trial, 0.0).verdict is Verdict.PASSED


def test_what_is_not_decided_in_time_is_refused_with_the_reason():
    """Without traffic, or while the monitor stops drafting, there is nothing to tell."""
    chance = random.Random(1)
    trial = run(Side(chance, USUAL), Side(chance, USUAL), requests=3)
    assert judge(trial, RULES.seconds - 1).verdict is Verdict.GO_ON
    judgement = judge(trial, RULES.seconds)
    assert judgement.verdict is Verdict.UNDECIDED
    assert "undecided after 1800 s" in judgement.reason
    assert "the new draft made 90 drafts and the one in service made 90 drafts of at least 1000" in (
        judgement.reason
    )


def test_steps_that_cannot_be_compared_leave_it_undecided():
    """The one side decodes eight requests together, the other one: acceptance alone is not enough."""
    chance = random.Random(1)
    trial = run(Side(chance, USUAL, bucket=8), Side(chance, USUAL), requests=700)
    judgement = judge(trial, RULES.seconds)
    assert (judgement.verdict, trial.speeds) == (Verdict.UNDECIDED, ())
    assert "steps of one batch size" in judgement.reason


def test_a_slower_machine_is_not_the_drafts_fault():
    """What it was slower by before is taken off, and a slower draft on it is still found."""
    for seed in range(4):
        chance = random.Random(seed)
        slow, mate = Side(chance, USUAL, STEP_SECONDS * 1.3), Side(chance, USUAL)
        for _ in range(500):
            slow.request()
            mate.request()
        known = handicaps(counts_of(slow.reading), counts_of(mate.reading))
        slow.restart()
        trial = run(slow, mate, handicaps=known, requests=1500)
        assert judge(trial, 0.0).verdict is Verdict.PASSED
        slow.restart()
        slow.step_seconds *= 1.2
        assert judge(run(slow, mate, handicaps=known), 0.0).verdict is Verdict.WORSE
        slow.restart()
        slow.step_seconds /= 1.2
        assert judge(run(slow, mate), 0.0).verdict is Verdict.WORSE


def test_counters_that_begin_anew_lose_nothing():
    """A worker that has restarted counts from zero; what it had counted is kept."""
    chance = random.Random(3)
    canary, mate = Side(chance, USUAL), Side(chance, USUAL)
    mine, theirs, trial = Meters(), Meters(), Trial(rules=RULES)
    for number in range(400):
        mine.saw(A, canary.reading)
        theirs.saw(B, mate.reading)
        canary.request()
        mate.request()
        theirs.saw(B, mate.reading)
        if number % 50 == 49:
            mate.restart()
        mine.saw(A, canary.reading)
        theirs.saw(B, mate.reading)
        trial = follow(trial, mine.total(), theirs.total())
    assert trial.others.drafts == trial.canary.drafts == 400 * 30
    assert min(trial.others.accepted) > 0
    assert judge(trial, 0.0).verdict is not Verdict.WORSE


def test_without_others_it_is_compared_with_what_was_counted_before():
    """A site of one worker; the uncertainty of before does not go away with more windows."""
    for seed in range(5):
        chance = random.Random(seed)
        before = Side(chance, USUAL)
        for _ in range(400):
            before.request()
        for rate, expected in ((USUAL, {Verdict.PASSED, Verdict.GO_ON}), (loss(0.15), {Verdict.WORSE})):
            mine, side = Meters(), Side(chance, rate)
            trial = Trial(rules=RULES, reference=counts_of(before.reading))
            for _ in range(600):
                mine.saw(A, side.reading)
                side.request()
                mine.saw(A, side.reading)
                trial = follow(trial, mine.total(), NOTHING)
                if judge(trial, 0.0).verdict is not Verdict.GO_ON:
                    break
            assert judge(trial, 0.0).verdict in expected
    assert trial.lengths[0].shared > 0


def test_the_numbers_are_those_of_the_whole_trial():
    """What the audit log says is what was counted."""
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
    st.builds(Sample, value=st.floats(-0.5, 0.5), variance=st.floats(1e-6, 0.1), shared=st.just(0.0)),
    min_size=LEAST_WINDOWS,
    max_size=40,
)


@given(SAMPLES)
def test_more_of_the_same_evidence_tells_more(samples):
    """The interval closes around its mean, and never opens again."""
    once, twice, often = (interval(samples * times) for times in (1, 2, 20))
    assert once.lower <= once.mean <= once.upper
    for fewer, more in ((once, twice), (twice, often)):
        assert more.mean == pytest.approx(fewer.mean, abs=1e-9)
        # Neighbours may be found to be alike only once there are more of them.
        assert more.upper - more.lower <= (fewer.upper - fewer.lower) * 1.25 + 1e-9
    assert often.upper - often.lower < once.upper - once.lower + 1e-9


@given(SAMPLES, st.floats(0.0, 0.01))
def test_what_is_the_same_in_every_window_is_never_averaged_away(samples, shared):
    """A handicap that was measured badly stays measured badly."""
    alike = [replace(sample, shared=shared) for sample in samples]
    bounds = interval(alike * 50)
    assert bounds.upper - bounds.mean >= 2.2 * math.sqrt(shared)


def test_few_windows_say_nothing():
    """Their spread is not known yet."""
    assert interval([Sample(value=0.0, variance=0.01)] * (LEAST_WINDOWS - 1)) is None
