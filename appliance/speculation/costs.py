"""
What drafting costs: log S(K)/S(0) at every batch bucket, as one Gaussian estimate.

Steps of two kinds are only compared within one short span, so that growing contexts or a busy machine are
not taken for a cost of drafting.  Each comparison is one observation of a Kalman filter over all batch
buckets and K.  What was never measured is guessed from what is near: half the deviation of the neighbouring
batch bucket.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from appliance.speculation.goodput import CORRELATED, LEAST_STEPS, Estimate
from appliance.speculation.values import StepCounters, buckets_up_to

Kind = tuple[int, int]
"""Batch bucket and draft tokens."""
DAY = 86400.0
AGE_OF_TEXT = 5400.0
"""Seconds that a change of text counts as: how many tokens a step sends on changes what it takes."""
LEAST_NOISE = 0.02
"""Standard deviation of a step's seconds, relative to their mean, that is assumed at least."""
NO_TIME = 1e-9
"""No step takes so few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    spread: float = 0.0
    """Standard deviation of a cost that was never measured; its variance is gained again in a day."""
    at: float = 0.0
    kinds: tuple[Kind, ...] = ()
    mean: tuple[float, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    seconds_per_token: Mapping[int, Mapping[int, float]] = field(default_factory=lambda: MappingProxyType({}))
    """By measured batch bucket and K, as last measured."""

    @classmethod
    def unmeasured(
        cls, largest_batch: int, choices: tuple[int, ...], *, spread: float, now: float
    ) -> "CostModel":
        """The most draft tokens may cost `spread`, give or take as much; fewer in proportion."""
        kinds = tuple((bucket, k) for bucket in buckets_up_to(largest_batch) for k in choices if k)
        return cls(
            spread=spread,
            at=now,
            kinds=kinds,
            mean=tuple(spread * k / max(choices) for _bucket, k in kinds),
            covariance=tuple(tuple(spread**2 * like for like in row) for row in _likeness(kinds)),
        )

    def is_measured(self, bucket: int) -> bool:
        return bucket in self.seconds_per_token

    def ratio(self, bucket: int, k: int, instead_of: int, now: float) -> Estimate:
        """Logarithm of S(K) over the seconds of a step with another K."""
        weights = self._weights(bucket, k, instead_of)
        gained, likeness = self._gained(now), _likeness(self.kinds)
        mean = sum([sign * self.mean[index] for index, sign in weights])
        variance = sum(
            [
                one * other * (self.covariance[i][j] + gained * likeness[i][j])
                for i, one in weights
                for j, other in weights
            ]
        )
        return Estimate(mean=mean, variance=max(0.0, variance))

    def break_evens(self, bucket: int) -> Mapping[int, float]:
        """Acceptance lengths above which K draft tokens pay, by K, as far as measured at a batch bucket."""
        measured = sorted(self.seconds_per_token.get(bucket, {}))
        return MappingProxyType({k: math.exp(self.ratio(bucket, k, 0, self.at).mean) for k in measured if k})

    def measured(self, bucket: int, steps: Mapping[int, StepCounters], now: float) -> "CostModel":
        """The model after one span of steps at a batch bucket, by K; one K alone says nothing."""
        usable = {
            k: taken
            for k, taken in steps.items()
            if taken.steps >= LEAST_STEPS and taken.seconds_per_step > NO_TIME and taken.tokens > 0
            if not k or (bucket, k) in self.kinds
        }
        if len(usable) < 2:  # noqa: PLR2004 - a comparison needs two
            return self
        reference = max(usable, key=lambda k: usable[k].steps)
        model = self._aged(now)
        for k, taken in usable.items():
            if k != reference:
                other = usable[reference]
                found = Estimate(
                    mean=math.log(taken.seconds_per_step / other.seconds_per_step),
                    variance=CORRELATED * (_relative_variance(taken) + _relative_variance(other)),
                )
                model = model.updated(self._weights(bucket, k, reference), found)
        fresh = {k: taken.seconds / taken.tokens for k, taken in usable.items()}
        seconds = {**self.seconds_per_token, bucket: {**self.seconds_per_token.get(bucket, {}), **fresh}}
        return replace(model, seconds_per_token=MappingProxyType(seconds))

    def _weights(self, bucket: int, k: int, instead_of: int) -> tuple[tuple[int, float], ...]:
        pairs = ((k, 1.0), (instead_of, -1.0))
        return tuple((self.kinds.index((bucket, number)), sign) for number, sign in pairs if number)

    def _gained(self, now: float) -> float:
        """Variance that each cost gained since the last measurement."""
        return max(0.0, now - self.at) / DAY * self.spread**2

    def _aged(self, now: float) -> "CostModel":
        gained, rows = self._gained(now), zip(self.covariance, _likeness(self.kinds), strict=True)
        covariance = tuple(
            [tuple([old + gained * like for old, like in zip(*row, strict=True)]) for row in rows]
        )
        return replace(self, covariance=covariance, at=now)

    def updated(self, weights: tuple[tuple[int, float], ...], found: Estimate) -> "CostModel":
        projected = [sum([sign * row[index] for index, sign in weights]) for row in self.covariance]
        expected = sum([sign * self.mean[index] for index, sign in weights])
        variance = sum([sign * projected[index] for index, sign in weights]) + found.variance
        gains = [value / variance for value in projected]
        return replace(
            self,
            mean=tuple(
                mean + gain * (found.mean - expected) for mean, gain in zip(self.mean, gains, strict=True)
            ),
            covariance=tuple(
                [
                    tuple([value - gain * other for value, other in zip(row, projected, strict=True)])
                    for row, gain in zip(self.covariance, gains, strict=True)
                ]
            ),
        )


NO_MEASUREMENT = CostModel()


@lru_cache(maxsize=64)
def _likeness(kinds: tuple[Kind, ...]) -> tuple[tuple[float, ...], ...]:
    """Correlation of each two costs: a half for neighbouring batch buckets, more for neighbouring K."""

    def likeness(one: Kind, other: Kind) -> float:
        apart = abs(one[0].bit_length() - other[0].bit_length())
        return float(0.5**apart * math.sqrt(min(one[1], other[1]) / max(one[1], other[1])))

    return tuple(tuple(likeness(one, other) for other in kinds) for one in kinds)


def _relative_variance(taken: StepCounters) -> float:
    """Variance of the mean seconds of a step, relative to its square; never zero."""
    mean = taken.seconds_per_step
    spread = max(0.0, taken.seconds_squared / taken.steps - mean**2) / mean**2
    return (spread + LEAST_NOISE**2) / taken.steps
