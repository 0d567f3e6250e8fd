"""A draft passes only if it is proven to lose at most the margin."""

import pytest

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.evaluation_results import Equality, Evaluation, LengthRatio, TrafficAspect
from appliance.drafts.evaluation.intervals import ConfidenceInterval
from appliance.drafts.evaluation.verdict import MIN_PROMPTS, objections, refusal_reasons
from appliance.drafts.lint.rules import Finding, Rule, Severity
from appliance.drafts.training_record import TrainingRecord
from tests.unit.drafts.evaluation.bare_report import bare_report
from tests.unit.drafts.evaluation.evaluation_parts import digest_of

BETTER = ConfidenceInterval(value=1.1, low=1.05, high=1.15)
SLIGHTLY_LESS = ConfidenceInterval(value=0.99, low=0.981, high=1.0)
UNKNOWN = ConfidenceInterval(value=1.0, low=0.9, high=1.1)
WORSE = ConfidenceInterval(value=0.9, low=0.85, high=0.95)


def equality(mismatches: int = 0, arm: Arm = Arm.CANDIDATE) -> Equality:
    return Equality(arm=arm, compared=64, same=60 - mismatches, ties=4, mismatches=mismatches)


def measured(
    acceptance: ConfidenceInterval | None = BETTER, speed_problem: str = "", **more
) -> tuple[Evaluation, str]:
    """A report without a verdict, and why its speed could not be measured."""
    ratio = {"aspect": TrafficAspect.ALL, "value": "all", "requests": 64}
    values = {
        "incumbent": digest_of("b"),
        "compared": 64,
        "comparisons": () if acceptance is None else (LengthRatio(ratio=acceptance, **ratio),),
        "speed_ratio": BETTER,
        "equalities": (equality(), equality(arm=Arm.INCUMBENT)),
    }
    return bare_report(digest_of("c"), digest_of("a"), **{**values, **more}), speed_problem


@pytest.mark.parametrize(
    "found",
    [
        measured(),
        measured(acceptance=SLIGHTLY_LESS),
        measured(speed_ratio=SLIGHTLY_LESS),
        measured(acceptance=ConfidenceInterval(value=0.99, low=0.98, high=1.0)),
        measured(acceptance=UNKNOWN, speed_ratio=UNKNOWN, margin=0.1),
        measured(compared=MIN_PROMPTS),
        measured(incumbent=None, acceptance=None),
    ],
)
def test_draft_proven_to_lose_at_most_the_margin_passes(found):
    """Without an incumbent only speed counts."""
    assert refusal_reasons(*found) == ()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (measured(acceptance=WORSE), "its acceptance length is 0.900 times the incumbent's (0.850 to 0.950 "),
        (measured(speed_ratio=WORSE), "its speed is 0.900 times the incumbent's (0.850 to 0.950 with 95 % "),
        (
            measured(acceptance=UNKNOWN),
            "too few prompts for a decision: its acceptance length is 0.900 to 1.100 with 95 % confidence ",
        ),
        (measured(speed_ratio=UNKNOWN), "too few prompts for a decision: its speed is 0.900 to 1.100 "),
        (
            measured(acceptance=None),
            "its acceptance length cannot be compared with the incumbent's: too few prompts",
        ),
        (
            measured(speed_ratio=None, speed_problem="the worker runs without the plugin"),
            "its speed cannot be compared with the incumbent's: the worker runs without the plugin",
        ),
        (
            measured(incumbent=None, acceptance=None, speed_ratio=WORSE),
            "its speed is 0.900 times the target's alone (0.850 to 0.950 with 95 % confidence), less",
        ),
        (
            measured(equalities=(equality(3),)),
            "3 of 64 of its greedy answers differ from the target's own beyond rounding",
        ),
        (
            measured(equalities=(equality(), equality(1, Arm.INCUMBENT))),
            "1 of 64 of the incumbent's greedy answers differ from the target's own beyond rounding",
        ),
        (
            measured(compared=MIN_PROMPTS - 1),
            "too few prompts for a decision: 7 were answered by every arm",
        ),
        (measured(complete=False, acceptance=WORSE), "the time was over before every round was measured: "),
        (measured(margin=0.0, acceptance=SLIGHTLY_LESS), "too few prompts for a decision: its acceptance "),
    ],
)
def test_any_other_result_is_refused_with_one_reason(found, reason):
    reasons = refusal_reasons(*found)
    assert [each for each in reasons if each.startswith(reason)], reasons
    assert len(reasons) == 1
    assert "\n" not in reasons[0]


def test_all_reasons_are_given_at_once():
    reasons = refusal_reasons(*measured(acceptance=WORSE, speed_ratio=WORSE, equalities=(equality(1),)))
    assert len(reasons) == 3


def test_mismatch_is_a_reason_even_with_too_few_prompts():
    """Intervals of seven requests are not quoted."""
    found = measured(compared=7, acceptance=WORSE, equalities=(equality(1),))
    reasons = refusal_reasons(*found)
    assert [reason.split()[0] for reason in reasons] == ["1", "too"]


def test_draft_of_another_target_has_an_objection():
    """By its training record or by its registration."""
    here, elsewhere = digest_of("a"), digest_of("b")
    assert objections(TrainingRecord(target=here), here, here, ()) == ()
    assert objections(TrainingRecord(), here, here, ()) == ()
    (reason,) = objections(TrainingRecord(target=elsewhere), here, here, ())
    assert reason.startswith("its training record names the target sha256:bbbbbbbbbbbb, not sha256:aaaa")
    (reason,) = objections(TrainingRecord(), elsewhere, here, ())
    assert reason.startswith("it is registered for the target sha256:bbbbbbbbbbbb, not sha256:aaaa")


@pytest.mark.parametrize("rule", list(Rule))
def test_lint_errors_and_training_record_warnings_are_objections(rule):
    here = digest_of("a")
    found = objections(TrainingRecord(), here, here, [Finding(rule=rule, message="it is so")])
    refuses = rule.severity is Severity.ERROR or "training" in rule
    assert found == ((f"{rule}: it is so; {rule.advice}",) if refuses else ())
