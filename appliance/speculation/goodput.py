"""
Does speculation pay?  Acceptance length against the measured cost of drafting, with confidence bounds.

With K draft tokens a step gives AL(K) tokens per request instead of one, and takes S(K) seconds
instead of S(0).  So K pays iff AL(K) > S(K) / S(0), the *break-even* acceptance length; the logarithm
of AL(K) * S(0) / S(K) is called the *payoff* here: 0.1 is about a tenth more tokens per second.
"""

import math
from dataclasses import dataclass

CORRELATED = 2.0
"""Neighbouring drafts, and neighbouring steps, correlate: n of them are worth n/2 independent ones."""
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

    def minus(self, other: "Estimate") -> "Estimate":
        """The difference of two that err independently."""
        return Estimate(mean=self.mean - other.mean, variance=self.variance + other.variance)
