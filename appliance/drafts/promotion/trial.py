"""
Is a new draft as good as the one in service?  A test that may be looked at as often as one likes.

Both serve at the same time, each on its own workers, and whenever both have made so many drafts more a
*window* is closed.  A window gives two numbers, both logarithms of a ratio, the new draft over the other:
of acceptance lengths, at the greatest depth that both drafted to; and of tokens per engine second and
request, over the batch buckets and numbers of draft tokens (K) that both had steps of.  The draft
passes once both means are, with confidence, above the loss that is allowed, and is refused once either
is, with confidence, below it.  For the means there are confidence sequences: intervals that hold at all
times together, so looking at them after every window costs nothing.

The interval is the two-sided normal mixture (Robbins, "Statistical methods related to the law of the
iterated logarithm", Ann. Math. Statist. 41, 1970; Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform,
nonparametric, nonasymptotic confidence sequences", Ann. Statist. 49, 2021): for a sum S of n standard
normal variables, |S| stays below sqrt((n + rho) log((n + rho) / (rho alpha^2))) for all n with
probability 1 - alpha.  With a variance that is estimated it holds in the limit (Waudby-Smith, Arbour,
Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences",
2021).  The variance is that from window to window, with what neighbouring windows have in common, and
steadied by what drafts twice as alike as independent ones would give: drafts of one request are alike,
so their number says too much.

Two machines are not equally fast.  What the first worker's steps were faster or slower than the others'
before its draft was changed is taken off its speed, and its uncertainty is added.

It fails closed: what is not decided in time is refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType

from appliance.drafts.promotion.evidence import NOTHING, Counts, Kind
from appliance.drafts.promotion.promotion import Numbers
from appliance.speculation.goodput import CORRELATED, LEAST_STEPS, Estimate, acceptance_length
from appliance.speculation.values import StepCounters

ALPHA = 0.05
"""Of each of the two measures, for both sides of its interval together: a draft that loses exactly what
is allowed is refused with a probability of at most 2.5 % by each."""
RHO = 6.0
"""Makes the interval tightest after some sixty windows."""
WINDOWS = 20
"""Windows that the fewest drafts of a trial are divided into."""
LEAST_WINDOW = 32
"""Drafts; fewer give a ratio that is far from normal."""
LEAST_WINDOWS = 8
"""Fewer windows do not tell how much they differ."""
STEADY = 8.0
"""Windows that the expected variance counts for beside the observed one."""
BASE_STEPS = 64
"""Steps of one kind on both sides before the change, to tell how much two machines differ."""
Z = 2.24
"""Standard deviations for what is measured once: 2.5 % on both sides together."""


class Verdict(StrEnum):
    """What is to be done with the draft."""

    GO_ON = "go_on"
    PASSED = "passed"
    WORSE = "worse"
    UNDECIDED = "undecided"
    """Time is up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the settings ask of a trial."""

    drafts: int
    """Fewest drafts of the new draft."""
    seconds: float
    """Most time it may take."""
    margin: float
    """Share that may be lost, of either measure."""

    @property
    def window(self) -> int:
        """Drafts on either side that close a window."""
        return max(LEAST_WINDOW, self.drafts // WINDOWS)

    @property
    def threshold(self) -> float:
        """Logarithm of the least ratio that is allowed."""
        return math.log1p(-self.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one window says of one measure."""

    value: float
    """Logarithm of the ratio."""
    variance: float
    """As its counts let expect."""
    shared: float = 0.0
    """Variance of what is the same in every window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial under way."""

    rules: Rules
    began: float = 0.0
    """Clock reading when both sides served."""
    handicaps: Mapping[Kind, Estimate] = field(default_factory=lambda: MappingProxyType({}))
    """Logarithm of the first worker's speed over the others', from before."""
    reference: Counts | None = None
    """What the draft in service counted before, where none serves beside the new one."""
    canary: Counts = NOTHING
    others: Counts = NOTHING
    marks: tuple[Counts, Counts] = (NOTHING, NOTHING)
    """Both when the last window was closed."""
    lengths: tuple[Sample, ...] = ()
    speeds: tuple[Sample, ...] = ()

    def beginning(self, now: float) -> "Trial":
        """It, as it begins now."""
        return replace(self, began=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with the bounds it is between."""

    lower: float
    mean: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a trial says at one moment."""

    verdict: Verdict
    reason: str
    """One line."""
    numbers: Numbers


def handicaps(canary: Counts, others: Counts) -> Mapping[Kind, Estimate]:
    """
    How much faster the first worker's steps are than the others', by kind, with the same draft on all.

    Logarithms.  What the steps give is left out: it depends on the text, and machines do not.

    Args:
        canary: what it counted lately.
        others: what the others counted over the same time.
    """
    found: dict[Kind, Estimate] = {}
    for kind in canary.cells.keys() & others.cells.keys():
        mine, theirs = canary.cells[kind], others.cells[kind]
        if min(mine.steps, theirs.steps) < BASE_STEPS:
            continue
        if min(mine.seconds, theirs.seconds) > 0:
            mean = math.log(theirs.seconds_per_step / mine.seconds_per_step)
            found[kind] = Estimate(mean=mean, variance=CORRELATED * (_unrest(mine) + _unrest(theirs)))
    return MappingProxyType(found)


def follow(trial: Trial, canary: Counts, others: Counts) -> Trial:
    """
    Take one look into a trial, and close a window if both sides have drafted enough for one.

    Args:
        trial: as it was.
        canary: what the new draft has counted since the trial began.
        others: likewise of the one in service; ignored where a reference stands for it.
    """
    trial = replace(trial, canary=canary, others=others)
    mine = canary.since(trial.marks[0])
    theirs = trial.reference if trial.reference is not None else others.since(trial.marks[1])
    if mine.drafts < trial.rules.window or theirs.drafts < trial.rules.window:
        return trial
    length = _length_sample(mine, theirs, is_fixed=trial.reference is not None)
    if length is None:
        return trial
    speed = _speed_sample(mine, theirs, trial.handicaps, is_fixed=trial.reference is not None)
    return replace(
        trial,
        marks=(canary, others),
        lengths=(*trial.lengths, length),
        speeds=trial.speeds if speed is None else (*trial.speeds, speed),
    )


def judge(trial: Trial, now: float) -> Judgement:
    """Decide, as things are."""
    rules, threshold = trial.rules, trial.rules.threshold
    found = {
        "acceptance length": interval(trial.lengths),
        "tokens per engine second": interval(trial.speeds),
    }
    numbers = _numbers(trial, found["tokens per engine second"])
    for name, bounds in found.items():
        if bounds is not None and bounds.upper < threshold:
            reason = f"its {name} is {_said(bounds)}, and {1 - rules.margin:.1%} is the least allowed"
            return Judgement(verdict=Verdict.WORSE, reason=reason, numbers=numbers)
    known = [bounds for bounds in found.values() if bounds is not None]
    is_safe = len(known) == len(found) and all(bounds.lower >= threshold for bounds in known)
    said = "; ".join(f"{name} {_said(bounds)}" for name, bounds in found.items() if bounds is not None)
    if is_safe and trial.canary.drafts >= rules.drafts:
        return Judgement(verdict=Verdict.PASSED, reason=said, numbers=numbers)
    if now - trial.began < rules.seconds:
        return Judgement(verdict=Verdict.GO_ON, reason=said or "too few drafts yet", numbers=numbers)
    reason = f"undecided after {rules.seconds:g} s: {_lacking(trial)}{said or 'nothing could be compared'}"
    return Judgement(verdict=Verdict.UNDECIDED, reason=reason, numbers=numbers)


def interval(samples: Sequence[Sample]) -> Interval | None:
    """Bounds for the mean that hold at all times together; None for too few windows."""
    count = len(samples)
    if count < LEAST_WINDOWS:
        return None
    mean = fmean([sample.value for sample in samples])
    deviations = [sample.value - mean for sample in samples]
    total = sum(deviation**2 for deviation in deviations)
    expected = fmean([sample.variance for sample in samples])
    alike = sum(one * next_one for one, next_one in pairwise(deviations)) / total if total > 0 else 0.0
    variance = (STEADY * expected + total) / (STEADY + count - 1) * (1.0 + 2.0 * max(0.0, alike))
    reach = math.sqrt((count + RHO) * math.log((count + RHO) / (RHO * ALPHA**2))) / count
    half = math.sqrt(variance) * reach + Z * math.sqrt(max(sample.shared for sample in samples))
    return Interval(lower=mean - half, mean=mean, upper=mean + half)


def _length_sample(mine: Counts, theirs: Counts, *, is_fixed: bool) -> Sample | None:
    """Acceptance lengths at the greatest depth to which half of a window's drafts went, on both sides."""
    depth = _depth(mine, theirs)
    lengths = [acceptance_length(counts.drafting, depth) if depth else None for counts in (mine, theirs)]
    if lengths[0] is None or lengths[1] is None:
        return None
    spreads = [length.variance / length.mean**2 for length in lengths if length is not None]
    value = math.log(lengths[0].mean / lengths[1].mean)
    return _sample(value, spreads[0], spreads[1], 0.0, is_fixed=is_fixed)


def _speed_sample(
    mine: Counts, theirs: Counts, handicaps: Mapping[Kind, Estimate], *, is_fixed: bool
) -> Sample | None:
    """Speeds over the kinds of steps that both had, each by how much it can tell; None without any."""
    weights = value = own = other = shared = 0.0
    for kind in sorted(mine.cells.keys() & theirs.cells.keys()):
        paces = _pace(mine.cells[kind], kind[1]), _pace(theirs.cells[kind], kind[1])
        if paces[0] is None or paces[1] is None:
            continue
        steps = mine.cells[kind].steps, theirs.cells[kind].steps
        weight = steps[0] * steps[1] / (steps[0] + steps[1])
        handicap = handicaps.get(kind, Estimate(mean=0.0, variance=0.0))
        weights += weight
        value += weight * (paces[0].mean - paces[1].mean - handicap.mean)
        own += weight**2 * paces[0].variance
        other += weight**2 * paces[1].variance
        shared += weight * handicap.variance
    if not weights:
        return None
    return _sample(value / weights, own / weights**2, other / weights**2, shared / weights, is_fixed=is_fixed)


def _sample(value: float, own: float, other: float, shared: float, *, is_fixed: bool) -> Sample:
    """What is fixed has the same error in every window, which no number of windows takes away."""
    if is_fixed:
        return Sample(value=value, variance=own, shared=shared + other)
    return Sample(value=value, variance=own + other, shared=shared)


def _depth(mine: Counts, theirs: Counts) -> int:
    """The greatest depth that at least half of the drafts reached on both sides."""
    depth = 0
    for reached, others_reached in zip(mine.drafted, theirs.drafted, strict=False):
        if 2 * reached < mine.drafts or 2 * others_reached < theirs.drafts:
            break
        depth += 1
    return depth


def _pace(cell: StepCounters, draft_tokens: int) -> Estimate | None:
    """Logarithm of a cell's tokens per engine second and request; None where it measured too little."""
    if cell.steps < LEAST_STEPS or cell.requests <= 0 or cell.tokens <= 0 or cell.seconds <= 0:
        return None
    tokens = cell.tokens / cell.requests
    # A step gives a request between one and K + 1 tokens: no spread is larger than half of that range.
    of_tokens = (draft_tokens / 2) ** 2 / tokens**2 / cell.requests
    variance = CORRELATED * (_unrest(cell) + of_tokens)
    return Estimate(mean=math.log(tokens / cell.seconds_per_step), variance=variance)


def _unrest(cell: StepCounters) -> float:
    """Variance of the logarithm of a cell's mean step."""
    seconds = cell.seconds_per_step
    return max(0.0, cell.seconds_squared / cell.steps - seconds**2) / seconds**2 / cell.steps


def _numbers(trial: Trial, speed: Interval | None) -> Numbers:
    others = trial.reference if trial.reference is not None else trial.others
    depth = _depth(trial.canary, others)
    lengths = [
        acceptance_length(counts.drafting, depth) if depth else None for counts in (trial.canary, others)
    ]
    return Numbers(
        drafts=trial.canary.drafts,
        acceptance_length=lengths[0].mean if lengths[0] is not None else None,
        previous_acceptance_length=lengths[1].mean if lengths[1] is not None else None,
        speed_ratio=math.exp(speed.mean) if speed is not None else None,
    )


def _said(bounds: Interval) -> str:
    low, mean, high = (math.exp(min(bound, 5.0)) for bound in (bounds.lower, bounds.mean, bounds.upper))
    return f"{mean:.1%} of the other's ({low:.1%} to {high:.1%})"


def _lacking(trial: Trial) -> str:
    """What there was too little of, for the person who wonders why nothing was decided."""
    sides = [("the new draft", trial.canary)]
    if trial.reference is None:
        sides.append(("the one in service", trial.others))
    few = [
        f"{name} made {counts.drafts} drafts" for name, counts in sides if counts.drafts < trial.rules.drafts
    ]
    if few:
        return " and ".join(few) + f" of at least {trial.rules.drafts} (no traffic, or drafting is stopped); "
    if len(trial.speeds) < LEAST_WINDOWS:
        return "steps of one batch size and number of draft tokens were too few on both sides together; "
    return ""
