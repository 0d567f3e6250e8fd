"""
Does speculation pay?  Acceptance length against the measured cost of drafting, with confidence bounds.

With K draft tokens a step gives AL(K) tokens per request instead of one, and takes S(K) seconds
instead of S(0).  So K pays iff AL(K) > S(K) / S(0), the *break-even* acceptance length; the logarithm
of AL(K) * S(0) / S(K) is called the *payoff* here: 0.1 is about a tenth more tokens per second.

Acceptance depends on the text and moves quickly; it is counted in drafts.  Costs depend on batch
size, context length and machine, and move slowly; they are only ever compared within one short span
of steps, so that growing contexts or a busy machine do not pass for a cost of drafting.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.speculation.values import SpecDecodeCounters, StepCounters

CORRELATED = 2.0
"""Neighbouring drafts, and neighbouring steps, are alike: n of them tell as much as n/2 would."""
DRIFT_PER_SECOND = 0.03**2 / 600
"""Variance a cost gains with time: it may move by 3 % in ten minutes."""
LEAST_STEPS = 4
"""Fewer steps than this of one kind measure nothing."""
LEAST_SPANS = 4
"""Fewer spans than this do not tell how much they differ."""
UNKNOWN_SPREAD = 0.25**2
"""Variance of a cost that was only measured at another batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with the variance of that mean."""

    mean: float
    variance: float

    def lower(self, z: float) -> float:
        """The bound it is above with the confidence of so many standard deviations."""
        return self.mean - z * math.sqrt(self.variance)

    def upper(self, z: float) -> float:
        """The bound it is below, likewise."""
        return self.mean + z * math.sqrt(self.variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What drafting costs at one batch size: log S(K)/S(0) for each K measured."""

    ratios: Mapping[int, Estimate] = field(default_factory=lambda: MappingProxyType({}))
    measured_at: float = 0.0
    seconds_per_token: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Engine seconds for each token delivered, by K, when last measured; for people to look at."""

    def is_known(self) -> bool:
        """Whether any K was compared with none."""
        return bool(self.ratios)

    def are_certain(self, choices: Iterable[int], spread: float) -> bool:
        """Whether every K above 0 was measured to within so much of S(K)/S(0), one standard deviation."""
        return all(k in self.ratios and self.ratios[k].variance <= spread**2 for k in choices if k)

    def exactly(self) -> "Costs":
        """The costs as if their means were known to be right."""
        ratios = {k: Estimate(mean=ratio.mean, variance=0.0) for k, ratio in self.ratios.items()}
        return replace(self, ratios=MappingProxyType(ratios))

    def break_even(self, k: int) -> float | None:
        """Acceptance length above which K draft tokens pay, or None where it was not measured."""
        return math.exp(self.ratios[k].mean) if k in self.ratios else None


NO_COSTS = Costs()


def acceptance_length(counters: SpecDecodeCounters, k: int) -> Estimate | None:
    """
    Mean tokens per draft that K draft tokens would give, from drafts of K or more.

    A draft is a chain: whether its first K tokens are accepted does not depend on how many follow.
    None where no draft was that long.
    """
    reached = _reached(counters)
    # A worker that reports fewer positions of one kind than of the other is read as far as both go.
    pairs = list(zip(counters.accepted_per_position, reached, strict=False))[: max(0, k)]
    if not pairs or len(pairs) < k or min(drafts for _accepted, drafts in pairs) <= 0:
        return None
    # Half a success and half a failure more: none in thirty is no proof that there will never be one.
    safe = [(accepted + 0.5) / (drafts + 1) for accepted, drafts in pairs]
    mean = sum(safe)
    square = sum((2 * position + 1) * rate for position, rate in enumerate(safe))
    variance = max(0.0, square - mean**2)
    length = 1.0 + sum(accepted / drafts for accepted, drafts in pairs)
    return Estimate(mean=length, variance=CORRELATED * variance / pairs[-1][1])


def payoff(counters: SpecDecodeCounters, costs: Costs, k: int) -> Estimate | None:
    """The payoff of K draft tokens, or None where acceptance or cost of it is unknown."""
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
    """The payoff of every K above 0 of which it is known and that so many drafts reached."""
    known = {k: payoff(counters, costs, k) for k in choices if 0 < k <= deepest(counters, least_drafts)}
    return {k: estimate for k, estimate in known.items() if estimate is not None}


def best_choice(
    counters: SpecDecodeCounters, costs: Costs, choices: Iterable[int], *, least_drafts: int = 1
) -> tuple[int, Estimate] | None:
    """The K above 0 with the highest mean payoff, or None where none can be told."""
    known = payoffs(counters, costs, choices, least_drafts=least_drafts)
    return max(known.items(), key=lambda pair: pair[1].mean, default=None)


def deepest(counters: SpecDecodeCounters, drafts: int) -> int:
    """The most draft tokens that so many drafts had."""
    return sum(count >= drafts for count in _reached(counters))


def gain(counters: SpecDecodeCounters, costs: Costs, k: int, instead_of: int) -> Estimate | None:
    """
    The payoff of one K over that of another.

    They share the first draft tokens and the steps without any, and that noise cancels: all of the
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

    Of the earlier, because few drafts of which none was accepted look more certain than they are.
    """
    now, then = acceptance_length(counters, k), acceptance_length(earlier, k)
    if now is None or then is None:
        return None
    more = _reached(earlier)[k - 1] / _reached(counters)[k - 1]
    return (now.mean - then.mean) / math.sqrt(then.variance * (1.0 + more))


def jump(earlier: SpecDecodeCounters, later: SpecDecodeCounters) -> float | None:
    """By how much AL differs between two spans, squared, in variances; None where that cannot be told."""
    least = max(1, min(earlier.drafts, later.drafts) // 2)
    k = min(deepest(earlier, least), deepest(later, least))
    then, now = acceptance_length(earlier, k), acceptance_length(later, k)
    if then is None or now is None:
        return None
    return (now.mean - then.mean) ** 2 / (then.variance + now.variance)


def unevenness(spans: Iterable[SpecDecodeCounters], k: int) -> float:
    """
    Variance of the mean of log AL(K) over equally long spans, as they really differ.

    Requests differ more than chance would have it, and drafts of one request are alike.
    """
    lengths = [math.log(length.mean) for span in spans if (length := acceptance_length(span, k)) is not None]
    if len(lengths) < LEAST_SPANS:
        return 0.0
    mean = sum(lengths) / len(lengths)
    return sum((length - mean) ** 2 for length in lengths) / (len(lengths) - 1) / len(lengths)


def learn(costs: Costs, steps: Mapping[int, StepCounters], now: float) -> Costs:
    """
    Take one span of steps at one batch size into the costs.

    Args:
        costs: what was known.
        steps: what each K gave and took within the span; without K=0 nothing can be compared.
        now: seconds, of the clock that `costs.measured_at` is of.
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
        # Weighted by certainty; a first measurement is taken as it is.
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
    """The costs as uncertain as they have become since they were measured."""
    extra = DRIFT_PER_SECOND * max(0.0, now - costs.measured_at)
    return _spread(costs, extra)


def borrowed(costs: Costs) -> Costs:
    """The costs of another batch size, as a first guess."""
    return _spread(costs, UNKNOWN_SPREAD)


def _spread(costs: Costs, variance: float) -> Costs:
    return Costs(
        ratios=MappingProxyType(
            {
                k: Estimate(mean=ratio.mean, variance=ratio.variance + variance)
                for k, ratio in costs.ratios.items()
            }
        ),
        measured_at=costs.measured_at,
        seconds_per_token=costs.seconds_per_token,
    )


def _reached(counters: SpecDecodeCounters) -> tuple[int, ...]:
    """Drafts that had each position."""
    return counters.drafted_per_position or (counters.drafts,) * len(counters.accepted_per_position)


def _is_measured(taken: StepCounters) -> bool:
    return taken.steps >= LEAST_STEPS and taken.seconds > 0.0


def _relative_variance(taken: StepCounters) -> float:
    """Variance of the mean seconds of a step, relative to its square; never quite nothing."""
    mean = taken.seconds_per_step
    spread = max(0.0, taken.seconds_squared / taken.steps - mean**2) / mean**2
    return (spread + 0.02**2) / taken.steps
