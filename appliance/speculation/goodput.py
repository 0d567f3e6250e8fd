"""
Does speculation pay?  Acceptance length against the measured cost of drafting, with confidence bounds.

With K draft tokens a step gives AL(K) tokens per request instead of one, and takes S(K) seconds
instead of S(0).  So K pays iff AL(K) > S(K) / S(0), the *break-even* acceptance length; the logarithm
of AL(K) * S(0) / S(K) is called the *payoff* here: 0.1 is about a tenth more tokens per second.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.speculation.values import NO_DRAFTS, SpecDecodeCounters

CORRELATED = 2.0
"""Neighbouring drafts, and neighbouring steps, correlate: n of them are worth n/2 independent ones."""
COST_SPREAD = 0.4
"""Standard deviation of log S(K)/S(0) where it was never measured; gained again in a day."""
DAY = 86400.0
LEAST_STEPS = 4
"""Minimum steps of one kind for a measurement."""


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

    def break_even(self, k: int) -> float | None:
        """Acceptance length above which K draft tokens pay, or None if their cost was not measured."""
        return math.exp(self.ratios[k].mean) if k in self.ratios else None


NO_COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFigures:
    """What the control loop measured of one worker, for those who show or count it."""

    window: SpecDecodeCounters = NO_DRAFTS
    """The drafts of the present text."""
    since: float = 0.0
    """Monotonic time of the last change of mode."""
    choices: tuple[int, ...] = (0,)
    draft_tokens: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Draft tokens in force, by known batch bucket."""
    costs: Mapping[int, Costs] = field(default_factory=lambda: MappingProxyType({}))
    """By batch bucket, with the K measured there."""
    probed_steps: int = 0
    exploration_share: float = 0.0
    """Share of engine time that exploration cost by expectation, over about ten minutes."""


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


def best_choice(
    counters: SpecDecodeCounters, costs: Costs, choices: Iterable[int]
) -> tuple[int, Estimate] | None:
    """The K above 0 with the highest mean payoff, or None if no payoff is known."""
    known: dict[int, Estimate] = {}
    for k in choices:
        length = acceptance_length(counters, k)
        if length is not None and k in costs.ratios:
            ratio = costs.ratios[k]
            known[k] = Estimate(
                mean=math.log(length.mean) - ratio.mean,
                variance=length.variance / length.mean**2 + ratio.variance,
            )
    return max(known.items(), key=lambda pair: pair[1].mean, default=None)


def deepest(counters: SpecDecodeCounters, drafts: float) -> int:
    """The largest number of draft tokens that at least this many drafts had."""
    return sum(count >= drafts for count in reached(counters))


def aged(costs: Costs, now: float) -> Costs:
    """The costs with the uncertainty gained since they were measured."""
    return _spread(costs, COST_SPREAD**2 / DAY * max(0.0, now - costs.measured_at))


def borrowed(costs: Costs) -> Costs:
    """The costs of another batch size, as a first guess."""
    return _spread(costs, COST_SPREAD**2)


def _spread(costs: Costs, variance: float) -> Costs:
    ratios = {k: replace(ratio, variance=ratio.variance + variance) for k, ratio in costs.ratios.items()}
    return replace(costs, ratios=MappingProxyType(ratios))


def reached(counters: SpecDecodeCounters) -> tuple[int, ...]:
    """Drafts that had each position, of those positions that both counts have."""
    positions = len(counters.accepted_per_position)
    return (counters.drafted_per_position or (counters.drafts,) * positions)[:positions]
