"""
May a draft be tried on served traffic?  Numbers in, a verdict with its reasons out.

It fails towards refusing: a draft passes only where the intervals prove that it loses no more than the
margin.  What cannot be told from so few prompts is a refusal too, with the advice to use more.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.intervals import Interval
from appliance.drafts.evaluation.report import Equality, Verdict
from appliance.drafts.lint.rules import Finding, Severity
from appliance.drafts.record import TrainingRecord

LEAST_PROMPTS = 8
"""With fewer the intervals are not to be trusted."""
TRAINING_RULES = "training-"
"""Beginning of the rules about what the trainer wrote down."""
SHOWN_DIGITS = 19
"""Of a digest, in a reason: `sha256:` and twelve digits."""
NAMES = {Arm.CANDIDATE: "its", Arm.INCUMBENT: "the incumbent's"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured, as far as a verdict depends on it."""

    complete: bool
    """Whether every round was measured."""
    compared: int
    """Prompts that every arm answered."""
    has_incumbent: bool
    acceptance: Interval | None
    """Acceptance length over the incumbent's; None where it could not be told, or there is no incumbent."""
    speed: Interval | None
    """Tokens per engine second over the incumbent's, or over the target's alone."""
    speed_problem: str
    """Why speed could not be measured; empty where it could."""
    equalities: tuple[Equality, ...]
    margin: float
    """Share that may be lost."""


def objections(
    record: TrainingRecord, registered_target: str, target: str, lint: Iterable[Finding]
) -> tuple[str, ...]:
    """
    Return what speaks against loading a draft at all; one line each.

    Args:
        record: what its trainer wrote down.
        registered_target: digest of the target that its revision names.
        target: digest of the target it is to serve.
        lint: what was found about it and this target.
    """
    found = []
    if record.target is not None and record.target != target:
        found.append(f"its training record names the target {_short(record.target)}, not {_short(target)}")
    if registered_target != target:
        found.append(f"it is registered for the target {_short(registered_target)}, not {_short(target)}")
    found += [
        f"{finding.rule}: {finding.message}; {finding.advice}"
        for finding in lint
        # A warning of what its trainer wrote down is about flags that no later measurement can tell.
        if finding.severity is Severity.ERROR or finding.rule.startswith(TRAINING_RULES)
    ]
    return tuple(found)


def judge(measured: Measured) -> tuple[Verdict, tuple[str, ...]]:
    """Decide; every reason is one line."""
    reasons = [
        f"{equality.mismatches} of {equality.compared} of {NAMES[equality.arm]} greedy answers differ from "
        "the target's own beyond rounding: a draft may not change what is answered"
        for equality in measured.equalities
        if equality.mismatches
    ]
    if not measured.complete:
        reasons.append(
            "the time was over before every round was measured: the same command goes on from there"
        )
        return Verdict.REFUSED, tuple(reasons)
    if measured.compared < LEAST_PROMPTS:
        reasons.append(
            f"too few prompts for a decision: {measured.compared} were answered by every arm, and "
            f"{LEAST_PROMPTS} are needed; evaluate with more --prompts, or harvest more"
        )
        return Verdict.REFUSED, tuple(reasons)
    against = "the incumbent's" if measured.has_incumbent else "the target's alone"
    if measured.has_incumbent:
        reasons += _weigh("acceptance length", measured.acceptance, against, measured.margin, "")
    reasons += _weigh("speed", measured.speed, against, measured.margin, measured.speed_problem)
    return Verdict.REFUSED if reasons else Verdict.PASSED, tuple(reasons)


def _weigh(what: str, ratio: Interval | None, against: str, margin: float, problem: str) -> list[str]:
    """The reason against a draft by one ratio, if there is one."""
    limit = 1.0 - margin
    if ratio is None:
        why = problem or "too few prompts for a decision"
        return [f"its {what} cannot be compared with {against}: {why}"]
    if ratio.low >= limit:
        return []
    bounds = f"{ratio.low:.3f} to {ratio.high:.3f} with 95 % confidence"
    if ratio.high < limit:
        return [f"its {what} is {ratio.value:.3f} times {against} ({bounds}), less than {limit:.3f}"]
    told = f"its {what} is {bounds} times {against}, and has to be {limit:.3f} at least"
    return [f"too few prompts for a decision: {told}; evaluate with more --prompts"]


def _short(digest: str) -> str:
    return digest[:SHOWN_DIGITS]
