"""
Whether a draft may be tried on served traffic: the reasons against it.

Fails closed: a draft passes only if the intervals prove that it loses at most the margin.  Too few prompts to
tell is a refusal as well, which asks for more.
"""

from collections.abc import Iterable

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.evaluation_results import Evaluation
from appliance.drafts.evaluation.intervals import ConfidenceInterval
from appliance.drafts.lint.rules import Finding, Severity
from appliance.drafts.training_record import TrainingRecord

MIN_PROMPTS = 8
"""Intervals of fewer are not reliable."""
TRAINING_RULES = "training-"
"""Prefix of the lint rules about the training record."""
NAMES = {Arm.CANDIDATE: "its", Arm.INCUMBENT: "the incumbent's"}


def objections(
    record: TrainingRecord, registered_target: str, target: str, lint: Iterable[Finding]
) -> tuple[str, ...]:
    """Why a draft must not be loaded with this target (digests), one line each; `lint` is of this pair."""
    found = []
    if record.target is not None and record.target != target:
        found.append(f"its training record names the target {_short(record.target)}, not {_short(target)}")
    if registered_target != target:
        found.append(f"it is registered for the target {_short(registered_target)}, not {_short(target)}")
    found += [
        f"{finding.rule}: {finding.message}; {finding.advice}"
        for finding in lint
        # Warnings about the training record concern flags that no later measurement can detect.
        if finding.severity is Severity.ERROR or finding.rule.startswith(TRAINING_RULES)
    ]
    return tuple(found)


def refusal_reasons(measured: Evaluation, speed_problem: str) -> tuple[str, ...]:
    """Reasons to refuse the measured draft, one line each; empty if it passes."""
    reasons = [
        f"{equality.mismatches} of {equality.compared} of {NAMES[equality.arm]} greedy answers differ from "
        "the target's own beyond rounding: a draft may not change what is answered"
        for equality in measured.equalities
        if equality.mismatches
    ]
    if not measured.complete:
        reason = "the time was over before every round was measured: run the same command to continue"
        return (*reasons, reason)
    if measured.compared < MIN_PROMPTS:
        answered = f"{measured.compared} were answered by every arm, and {MIN_PROMPTS} are needed"
        few = f"too few prompts for a decision: {answered}; evaluate with more --prompts, or harvest more"
        return (*reasons, few)
    against = "the target's alone"
    if measured.incumbent is not None:
        against = "the incumbent's"
        reasons += _weigh("acceptance length", measured.acceptance_ratio, against, measured.margin, "")
    reasons += _weigh("speed", measured.speed_ratio, against, measured.margin, speed_problem)
    return tuple(reasons)


def _weigh(
    what: str, ratio: ConfidenceInterval | None, against: str, margin: float, problem: str
) -> list[str]:
    limit = 1.0 - margin
    if ratio is None:
        why = problem or "too few prompts for a decision"
        return [f"its {what} cannot be compared with {against}: {why}"]
    if ratio.low >= limit:
        return []
    bounds = f"{ratio.low:.3f} to {ratio.high:.3f} with 95 % confidence"
    if ratio.high < limit:
        return [f"its {what} is {ratio.value:.3f} times {against} ({bounds}), less than {limit:.3f}"]
    bound = f"its {what} is {bounds} times {against}, and has to be {limit:.3f} at least"
    return [f"too few prompts for a decision: {bound}; evaluate with more --prompts"]


def _short(digest: str) -> str:
    return digest[:19]  # `sha256:` and twelve digits
