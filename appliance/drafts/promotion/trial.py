"""
Is a new draft as good as the one in service?  A sequential test that may be evaluated at any time.

Each time both drafts, on their own workers, have made `window` more drafts, a *window* is closed.  It gives
two logarithms of a ratio, new draft over incumbent: of acceptance lengths, at the greatest depth that both
drafted to; and of tokens per engine second and request, over the batch buckets and numbers of draft tokens
(K) that both have steps of.  The draft passes once both means are, with confidence, above the allowed loss,
and is refused once either is below it.  The bounds hold at all times together, so every window may be tested.

The interval is the two-sided normal mixture (Robbins, "Statistical methods related to the law of the iterated
logarithm", Ann. Math. Statist. 41, 1970; Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
nonasymptotic confidence sequences", Ann. Statist. 49, 2021): for a sum S of n standard normal variables, |S|
stays below sqrt((n + rho) log((n + rho) / (rho alpha^2))) for all n with probability 1 - alpha.  With an
estimated variance it holds asymptotically (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform
central limit theory and asymptotic confidence sequences", 2021).  The variance is that between windows, with
the correlation of neighbouring windows, shrunk towards twice the variance of independent drafts: drafts of
one request are correlated.

Machines differ in speed: how much faster the canary worker's steps were before the change is subtracted.

Fails closed: a trial that is undecided at its time limit refuses the draft.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType

from appliance.drafts.promotion.promotion import TrialNumbers
from appliance.drafts.promotion.trial_counts import NOTHING, DraftCounts, Kind
from appliance.speculation.evidence import reached
from appliance.speculation.goodput import CORRELATED, LEAST_STEPS, Estimate
from appliance.speculation.values import SpecDecodeCounters, StepCounters

ALPHA = 0.05
"""Two-sided error of each measure: it refuses a draft that loses exactly what is allowed in at most 2.5 %."""
RHO = 6.0
"""The interval is tightest after about sixty windows."""
WINDOWS = 20
"""Windows in the minimum number of drafts."""
LEAST_WINDOW = 32
"""Drafts; with fewer the ratio is far from normal."""
LEAST_WINDOWS = 8
"""Minimum for a variance between windows."""
PRIOR_WINDOWS = 8.0
"""Weight of the expected variance, in windows."""
BASE_STEPS = 64
"""Minimum steps of one kind on both sides to measure how two machines differ."""
Z = 2.24
"""Standard deviations for a quantity that is measured once: 2.5 % two-sided."""


class TrialVerdict(StrEnum):
    CONTINUE = "continue"
    PASSED = "passed"
    WORSE = "worse"
    UNDECIDED = "undecided"
    """The time limit has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRules:
    drafts: int
    """Minimum drafts of the new draft."""
    seconds: float
    margin: float
    """Allowed loss of either measure, as a share."""

    @property
    def window(self) -> int:
        """Drafts on each side that close a window."""
        return max(LEAST_WINDOW, self.drafts // WINDOWS)

    @property
    def threshold(self) -> float:
        """Logarithm of the lowest allowed ratio."""
        return math.log1p(-self.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSample:
    value: float
    """Logarithm of the ratio."""
    variance: float
    """Expected from its counts."""
    shared: float = 0.0
    """Variance of the error that all windows have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    rules: TrialRules
    began: float = 0.0
    """Monotonic seconds."""
    handicaps: Mapping[Kind, Estimate] = field(default_factory=lambda: MappingProxyType({}))
    """Logarithm of the canary worker's speed over the others', measured before the change."""
    reference: DraftCounts | None = None
    """Counts of the incumbent before the change, if no other worker serves it now."""
    canary: DraftCounts = NOTHING
    others: DraftCounts = NOTHING
    marks: tuple[DraftCounts, DraftCounts] = (NOTHING, NOTHING)
    """Both sides when the last window was closed."""
    lengths: tuple[WindowSample, ...] = ()
    speeds: tuple[WindowSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanBounds:
    lower: float
    mean: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJudgement:
    verdict: TrialVerdict
    reason: str
    numbers: TrialNumbers


def handicaps(canary: DraftCounts, others: DraftCounts) -> Mapping[Kind, Estimate]:
    """How much faster the canary worker's steps are than the others' with one draft, by kind (logarithms)."""
    found: dict[Kind, Estimate] = {}
    for kind in canary.cells.keys() & others.cells.keys():
        mine, theirs = canary.cells[kind], others.cells[kind]
        if min(mine.steps, theirs.steps) < BASE_STEPS:
            continue
        if min(mine.seconds, theirs.seconds) > 0:
            # Without tokens per step, which depend on the text, not on the machine.
            mean = math.log(theirs.seconds_per_step / mine.seconds_per_step)
            variance = CORRELATED * (_variance_of_mean(mine) + _variance_of_mean(theirs))
            found[kind] = Estimate(mean=mean, variance=variance)
    return MappingProxyType(found)


def follow(trial: Trial, canary: DraftCounts, others: DraftCounts) -> Trial:
    """Close a window if both sides have enough drafts; `others` is ignored if the trial has a reference."""
    trial = replace(trial, canary=canary, others=others)
    mine = canary.since(trial.marks[0])
    theirs = trial.reference if trial.reference is not None else others.since(trial.marks[1])
    if mine.drafts < trial.rules.window or theirs.drafts < trial.rules.window:
        return trial
    length = _length_sample(trial, mine, theirs)
    if length is None:
        return trial
    speed = _speed_sample(trial, mine, theirs)
    return replace(
        trial,
        marks=(canary, others),
        lengths=(*trial.lengths, length),
        speeds=trial.speeds if speed is None else (*trial.speeds, speed),
    )


def judge(trial: Trial, now: float) -> TrialJudgement:
    rules, threshold = trial.rules, trial.rules.threshold
    found = {"acceptance length": interval(trial.lengths), "tokens per engine second": interval(trial.speeds)}
    numbers = _numbers(trial, found["tokens per engine second"])
    for name, bounds in found.items():
        if bounds is not None and bounds.upper < threshold:
            reason = f"its {name} is {_described(bounds)}, and {1 - rules.margin:.1%} is the least allowed"
            return TrialJudgement(verdict=TrialVerdict.WORSE, reason=reason, numbers=numbers)
    is_safe = all(bounds is not None and bounds.lower >= threshold for bounds in found.values())
    summary = "; ".join(
        f"{name} {_described(bounds)}" for name, bounds in found.items() if bounds is not None
    )
    if is_safe and trial.canary.drafts >= rules.drafts:
        return TrialJudgement(verdict=TrialVerdict.PASSED, reason=summary, numbers=numbers)
    if now - trial.began < rules.seconds:
        reason = summary or "too few drafts yet"
        return TrialJudgement(verdict=TrialVerdict.CONTINUE, reason=reason, numbers=numbers)
    reason = f"undecided after {rules.seconds:g} s: {_lacking(trial)}{summary or 'nothing could be compared'}"
    return TrialJudgement(verdict=TrialVerdict.UNDECIDED, reason=reason, numbers=numbers)


def interval(samples: Sequence[WindowSample]) -> MeanBounds | None:
    """Bounds for the mean that hold at all times together; None if there are too few windows."""
    count = len(samples)
    if count < LEAST_WINDOWS:
        return None
    mean = fmean([sample.value for sample in samples])
    deviations = [sample.value - mean for sample in samples]
    total = sum(deviation**2 for deviation in deviations)
    expected = fmean([sample.variance for sample in samples])
    correlation = sum(one * next_one for one, next_one in pairwise(deviations)) / total if total > 0 else 0.0
    variance = (
        (PRIOR_WINDOWS * expected + total) / (PRIOR_WINDOWS + count - 1) * (1.0 + 2.0 * max(0.0, correlation))
    )
    reach = math.sqrt((count + RHO) * math.log((count + RHO) / (RHO * ALPHA**2))) / count
    half = math.sqrt(variance) * reach + Z * math.sqrt(max(sample.shared for sample in samples))
    return MeanBounds(lower=mean - half, mean=mean, upper=mean + half)


def _length_sample(trial: Trial, mine: DraftCounts, theirs: DraftCounts) -> WindowSample | None:
    own, other = _lengths(mine, theirs)
    if own is None or other is None:
        return None
    spreads = own.variance / own.mean**2, other.variance / other.mean**2
    return _sample(trial, math.log(own.mean / other.mean), *spreads, shared=0.0)


def _speed_sample(trial: Trial, mine: DraftCounts, theirs: DraftCounts) -> WindowSample | None:
    """Ratio of speeds over the kinds of steps that both sides have; None without any."""
    weights = value = own = other = shared = 0.0
    for kind in sorted(mine.cells.keys() & theirs.cells.keys()):
        paces = _pace(mine.cells[kind], kind[1]), _pace(theirs.cells[kind], kind[1])
        if paces[0] is None or paces[1] is None:
            continue
        steps = mine.cells[kind].steps, theirs.cells[kind].steps
        weight = steps[0] * steps[1] / (steps[0] + steps[1])
        handicap = trial.handicaps.get(kind, Estimate(mean=0.0, variance=0.0))
        weights += weight
        value += weight * (paces[0].mean - paces[1].mean - handicap.mean)
        own += weight**2 * paces[0].variance
        other += weight**2 * paces[1].variance
        shared += weight * handicap.variance
    if not weights:
        return None
    return _sample(trial, value / weights, own / weights**2, other / weights**2, shared=shared / weights)


def _sample(trial: Trial, value: float, own: float, other: float, *, shared: float) -> WindowSample:
    """A fixed reference has the same error in every window, which no number of windows averages away."""
    if trial.reference is not None:
        return WindowSample(value=value, variance=own, shared=shared + other)
    return WindowSample(value=value, variance=own + other, shared=shared)


def _lengths(mine: DraftCounts, theirs: DraftCounts) -> tuple[Estimate | None, Estimate | None]:
    """Acceptance lengths at the greatest depth that at least half of the drafts of both sides reached."""
    depth = 0
    for own, other in zip(mine.drafted, theirs.drafted, strict=False):
        if 2 * own < mine.drafts or 2 * other < theirs.drafts:
            break
        depth += 1
    if not depth:
        return None, None
    return acceptance_length(mine.drafting, depth), acceptance_length(theirs.drafting, depth)


def acceptance_length(counters: SpecDecodeCounters, k: int) -> Estimate | None:
    """
    Mean tokens per draft that K draft tokens would give, from drafts of K or more.

    A draft is a chain: whether its first K tokens are accepted does not depend on how many follow.
    None if no draft was that long.
    """
    counts = reached(counters)
    # A worker may report fewer positions of one kind than of the other: use those that both have.
    pairs = list(zip(counters.accepted_per_position, counts, strict=False))[: max(0, k)]
    if not pairs or len(pairs) < k or min(drafts for _accepted, drafts in pairs) <= 0:
        return None
    # Half a success and half a failure more: none in thirty does not prove a rate of zero.
    safe = [(accepted + 0.5) / (drafts + 1) for accepted, drafts in pairs]
    mean = sum(safe)
    square = sum((2 * position + 1) * rate for position, rate in enumerate(safe))
    variance = max(0.0, square - mean**2)
    length = 1.0 + sum(accepted / drafts for accepted, drafts in pairs)
    return Estimate(mean=length, variance=CORRELATED * variance / pairs[-1][1])


def _pace(cell: StepCounters, draft_tokens: int) -> Estimate | None:
    """Logarithm of a cell's tokens per engine second and request; None for too few steps."""
    if cell.steps < LEAST_STEPS or cell.requests <= 0 or cell.tokens <= 0 or cell.seconds <= 0:
        return None
    tokens = cell.tokens / cell.requests
    # A step yields 1 to K + 1 tokens per request: the standard deviation is at most half of that range.
    of_tokens = (draft_tokens / 2) ** 2 / tokens**2 / cell.requests
    variance = CORRELATED * (_variance_of_mean(cell) + of_tokens)
    return Estimate(mean=math.log(tokens / cell.seconds_per_step), variance=variance)


def _variance_of_mean(cell: StepCounters) -> float:
    """Variance of the logarithm of a cell's mean step."""
    seconds = cell.seconds_per_step
    return max(0.0, cell.seconds_squared / cell.steps - seconds**2) / seconds**2 / cell.steps


def _numbers(trial: Trial, speed: MeanBounds | None) -> TrialNumbers:
    others = trial.reference if trial.reference is not None else trial.others
    own, other = _lengths(trial.canary, others)
    return TrialNumbers(
        drafts=trial.canary.drafts,
        acceptance_length=own.mean if own is not None else None,
        previous_acceptance_length=other.mean if other is not None else None,
        speed_ratio=math.exp(speed.mean) if speed is not None else None,
    )


def _described(bounds: MeanBounds) -> str:
    low, mean, high = (math.exp(min(bound, 5.0)) for bound in (bounds.lower, bounds.mean, bounds.upper))
    return f"{mean:.1%} of the other's ({low:.1%} to {high:.1%})"


def _lacking(trial: Trial) -> str:
    sides = [("the new draft", trial.canary)]
    if trial.reference is None:
        sides.append(("the one in service", trial.others))
    least = trial.rules.drafts
    few = [f"{name} made {counts.drafts} drafts" for name, counts in sides if counts.drafts < least]
    if few:
        return f"{' and '.join(few)} of at least {least} (no traffic, or drafting is stopped); "
    if len(trial.speeds) < LEAST_WINDOWS:
        return "steps of one batch size and number of draft tokens were too few on both sides together; "
    return ""
