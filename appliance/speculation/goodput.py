"""
Does speculation pay?  Acceptance length against the measured cost of drafting, with confidence bounds.

With K draft tokens a step gives AL(K) tokens per request instead of one, and takes S(K) seconds
instead of S(0).  So K pays iff AL(K) > S(K) / S(0), the *break-even* acceptance length; the logarithm
of AL(K) * S(0) / S(K) is called the *payoff* here: 0.1 is about a tenth more tokens per second.

Acceptance depends on the text and moves quickly; it is counted in drafts.  Costs depend on batch
size, context length and machine, and move slowly; they are only compared within one short span
of steps, so that growing contexts or a busy machine are not taken for a cost of drafting.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.speculation.values import NO_DRAFTS, SpecDecodeCounters, StepCounters

CORRELATED = 2.0
"""Neighbouring drafts, and neighbouring steps, correlate: n of them are worth n/2 independent ones."""
DRIFT_PER_SECOND = 0.03**2 / 600
"""Variance that a cost gains: it may move by 3 % in ten minutes."""
LEAST_STEPS = 4
"""Minimum steps of one kind for a measurement."""
LEAST_SPANS = 4
"""Minimum spans for the variance between them."""
UNKNOWN_SPREAD = 0.25**2
"""Variance of a cost that was only measured at another batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with the variance of that mean."""

    mean: float
    variance: float

    def lower(self, z: float) -> float:
        """Lower confidence bound, z standard deviations below the mean."""
        return self.mean - z * math.sqrt(self.variance)

    def upper(self, z: float) -> float:
        return self.mean + z * math.sqrt(self.variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What drafting costs at one batch size: log S(K)/S(0) for each K measured."""

    ratios: Mapping[int, Estimate] = field(default_factory=lambda: MappingProxyType({}))
    measured_at: float = 0.0
    seconds_per_token: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Engine seconds for each token delivered, by K, when last measured; for display only."""

    def is_known(self) -> bool:
        return bool(self.ratios)

    def are_certain(self, choices: Iterable[int], spread: float) -> bool:
        """Whether every K above 0 was measured with at most this standard deviation of log S(K)/S(0)."""
        return all(k in self.ratios and self.ratios[k].variance <= spread**2 for k in choices if k)

    def exactly(self) -> "Costs":
        """The costs without uncertainty."""
        ratios = {k: replace(ratio, variance=0.0) for k, ratio in self.ratios.items()}
        return replace(self, ratios=MappingProxyType(ratios))

    def break_even(self, k: int) -> float | None:
        """Acceptance length above which K draft tokens pay, or None if their cost was not measured."""
        return math.exp(self.ratios[k].mean) if k in self.ratios else None


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFigures:
    """What the control loop measured of one worker, for those who show or count it."""

    window: SpecDecodeCounters = NO_DRAFTS
    """The latest drafts."""
    since: float = 0.0
    """Monotonic time of the last change of mode."""
    choices: tuple[int, ...] = (0,)
    draft_tokens: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Draft tokens in force, by known batch bucket."""
    costs: Mapping[int, Costs] = field(default_factory=lambda: MappingProxyType({}))
    """By known batch bucket."""
    probes_failed: int = 0
    probed_steps: int = 0
    next_probe_at: float | None = None
    """Monotonic time of the next probe; None if speculation is stopped at no batch size."""


def costs_at(costs: Mapping[int, Costs], bucket: int) -> Costs:
    """Costs at a batch bucket, or the nearest measured one's as a guess."""
    known = {name: found for name, found in costs.items() if found.is_known()}
    if bucket in known:
        return known[bucket]
    if not known:
        return NO_COSTS
    return borrowed(known[min(known, key=lambda name: (abs(name - bucket), name))])


def acceptance_length(counters: SpecDecodeCounters, k: int) -> Estimate | None:
    """
    Mean tokens per draft that K draft tokens would give, from drafts of K or more.

    A draft is a chain: whether its first K tokens are accepted does not depend on how many follow.
    None if no draft was that long.
    """
    reached = _reached(counters)
    # A worker may report fewer positions of one kind than of the other: use those that both have.
    pairs = list(zip(counters.accepted_per_position, reached, strict=False))[: max(0, k)]
    if not pairs or len(pairs) < k or min(drafts for _accepted, drafts in pairs) <= 0:
        return None
    # Half a success and half a failure more: none in thirty does not prove a rate of zero.
    safe = [(accepted + 0.5) / (drafts + 1) for accepted, drafts in pairs]
    mean = sum(safe)
    square = sum((2 * position + 1) * rate for position, rate in enumerate(safe))
    variance = max(0.0, square - mean**2)
    length = 1.0 + sum(accepted / drafts for accepted, drafts in pairs)
    return Estimate(mean=length, variance=CORRELATED * variance / pairs[-1][1])


def payoff(counters: SpecDecodeCounters, costs: Costs, k: int) -> Estimate | None:
    """The payoff of K draft tokens, or None if its acceptance or cost is unknown."""
    length = acceptance_length(counters, k)
    if length is None or k not in costs.ratios:
        return None
    ratio = costs.ratios[k]
    return Estimate(
        mean=math.log(length.mean) - ratio.mean,
        variance=length.variance / length.mean**2 + ratio.variance,
    )


def payoffs(
    counters: SpecDecodeCounters, costs: Costs, choices: Iterable[int], *, least_drafts: int = 1
) -> dict[int, Estimate]:
    """The known payoffs of every K above 0 that at least `least_drafts` drafts reached."""
    known = {k: payoff(counters, costs, k) for k in choices if 0 < k <= deepest(counters, least_drafts)}
    return {k: estimate for k, estimate in known.items() if estimate is not None}


def best_choice(
    counters: SpecDecodeCounters, costs: Costs, choices: Iterable[int], *, least_drafts: int = 1
) -> tuple[int, Estimate] | None:
    """The K above 0 with the highest mean payoff, or None if no payoff is known."""
    known = payoffs(counters, costs, choices, least_drafts=least_drafts)
    return max(known.items(), key=lambda pair: pair[1].mean, default=None)


def deepest(counters: SpecDecodeCounters, drafts: int) -> int:
    """The largest number of draft tokens that at least this many drafts had."""
    return sum(count >= drafts for count in _reached(counters))


def gain(counters: SpecDecodeCounters, costs: Costs, k: int, instead_of: int) -> Estimate | None:
    """
    The payoff of one K over that of another.

    They share the first draft tokens and the steps at K=0, and that noise cancels: all of the
    shorter one's acceptance, and half of a cost, since K=0 was measured in as many steps as K.
    """
    mine, other = payoff(counters, costs, k), payoff(counters, costs, instead_of)
    lengths = acceptance_length(counters, k), acceptance_length(counters, instead_of)
    if mine is None or other is None or lengths[0] is None or lengths[1] is None:
        return None
    shared = min(length.variance / length.mean**2 for length in lengths if length is not None)
    shared += min(costs.ratios[k].variance, costs.ratios[instead_of].variance) / 2
    variance = mine.variance + other.variance - 2 * shared
    return Estimate(mean=mine.mean - other.mean, variance=max(0.0, variance))


def rise(counters: SpecDecodeCounters, earlier: SpecDecodeCounters, k: int) -> float | None:
    """
    How much higher AL(K) is than it was, in standard deviations of drafts of the earlier text.

    Of the earlier, because a few drafts without an accepted token look more certain than they are.
    """
    now, then = acceptance_length(counters, k), acceptance_length(earlier, k)
    if now is None or then is None:
        return None
    more = _reached(earlier)[k - 1] / _reached(counters)[k - 1]
    return (now.mean - then.mean) / math.sqrt(then.variance * (1.0 + more))


def squared_z_score(earlier: SpecDecodeCounters, later: SpecDecodeCounters) -> float | None:
    """Squared difference of AL between two spans, in variances; None if either is unknown."""
    least = max(1, min(earlier.drafts, later.drafts) // 2)
    k = min(deepest(earlier, least), deepest(later, least))
    then, now = acceptance_length(earlier, k), acceptance_length(later, k)
    if then is None or now is None:
        return None
    return (now.mean - then.mean) ** 2 / (then.variance + now.variance)


def between_window_variance(spans: Iterable[SpecDecodeCounters], k: int) -> float:
    """
    Variance of the mean of log AL(K) over equally long spans, as measured between them.

    Requests differ more than by chance, and drafts of one request are alike.
    """
    lengths = [math.log(length.mean) for span in spans if (length := acceptance_length(span, k)) is not None]
    if len(lengths) < LEAST_SPANS:
        return 0.0
    mean = sum(lengths) / len(lengths)
    return sum((length - mean) ** 2 for length in lengths) / (len(lengths) - 1) / len(lengths)


def update_costs(costs: Costs, steps: Mapping[int, StepCounters], now: float) -> Costs:
    """
    Add one span of steps at one batch size, by K, to the costs; without K=0 nothing can be compared.

    `now` is of the same clock as `costs.measured_at`.
    """
    none = steps.get(0)
    if none is None or not _is_measured(none):
        return costs
    seen = {
        k: Estimate(
            mean=math.log(taken.seconds_per_step / none.seconds_per_step),
            variance=CORRELATED * (_relative_variance(taken) + _relative_variance(none)),
        )
        for k, taken in steps.items()
        if k and _is_measured(taken)
    }
    if not seen:
        return costs
    ratios = dict(aged(costs, now).ratios)
    for k, found in seen.items():
        known = ratios.get(k, found)
        # Weighted by certainty; a first measurement counts in full.
        weight = known.variance / (known.variance + found.variance) if k in ratios else 1.0
        ratios[k] = Estimate(
            mean=known.mean + weight * (found.mean - known.mean),
            variance=weight * found.variance,
        )
    fresh = {k: taken.seconds / taken.tokens for k, taken in steps.items() if taken.tokens > 0}
    return Costs(
        ratios=MappingProxyType(ratios),
        measured_at=now,
        seconds_per_token=MappingProxyType({**costs.seconds_per_token, **fresh}),
    )


def aged(costs: Costs, now: float) -> Costs:
    """The costs with the uncertainty gained since they were measured."""
    return _spread(costs, DRIFT_PER_SECOND * max(0.0, now - costs.measured_at))


def borrowed(costs: Costs) -> Costs:
    """The costs of another batch size, as a first guess."""
    return _spread(costs, UNKNOWN_SPREAD)


def _spread(costs: Costs, variance: float) -> Costs:
    ratios = {k: replace(ratio, variance=ratio.variance + variance) for k, ratio in costs.ratios.items()}
    return replace(costs, ratios=MappingProxyType(ratios))


def _reached(counters: SpecDecodeCounters) -> tuple[int, ...]:
    """Drafts that had each position."""
    return counters.drafted_per_position or (counters.drafts,) * len(counters.accepted_per_position)


def _is_measured(taken: StepCounters) -> bool:
    return taken.steps >= LEAST_STEPS and taken.seconds > 0.0


def _relative_variance(taken: StepCounters) -> float:
    """Variance of the mean seconds of a step, relative to its square; never zero."""
    mean = taken.seconds_per_step
    spread = max(0.0, taken.seconds_squared / taken.steps - mean**2) / mean**2
    return (spread + 0.02**2) / taken.steps
