"""
A circuit breaker for one worker: after repeated failures it opens, then one request probes the worker.

    closed ── failures in a row ──► open ── its time is over ──► half-open ── an answer ──► closed
                                     ▲                              │
                                     └────────── a failure ─────────┘  (twice as long)

It catches a worker whose health check passes and whose answers are errors.  Only consecutive failures
count, as in Envoy's outlier detection, so that requests which no worker could answer do not exclude a
worker.  Pure: values in, values out, the clock is an argument.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

LONGEST_DOUBLINGS = 6
"""A worker that never answers is probed every 64 times `seconds`."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    failures: int = 5
    seconds: float = 5.0
    """Time it stays open at first; doubles with each failed probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """One worker's breaker; times are readings of one monotonic clock, in seconds."""

    failures: int = 0
    until: float | None = None
    """When it becomes half-open; None while it is closed."""
    trials_failed: int = 0
    trial_until: float = 0.0
    """Until then no second probe is sent; a probe whose client disconnects has no result."""

    @property
    def is_closed(self) -> bool:
        return self.until is None

    def state(self, now: float) -> BreakerState:
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        return self.until is None or (now >= self.until and now >= self.trial_until)

    def begun(self, now: float, policy: BreakerPolicy) -> "Breaker":
        """After a request was sent; in `half_open` it is the probe."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return self
        return replace(self, trial_until=now + policy.seconds)

    def succeeded(self) -> "Breaker":
        return CLOSED

    def failed(self, now: float, policy: BreakerPolicy) -> "Breaker":
        """After a failure: unreachable, broken off before the answer, or 5xx."""
        failures = self.failures + 1
        if self.until is None:
            is_open = failures >= policy.failures
            return Breaker(failures=failures, until=now + policy.seconds if is_open else None)
        if now < self.until:
            return replace(self, failures=failures)  # a request that was in flight when it opened
        trials = self.trials_failed + 1
        wait = policy.seconds * 2.0 ** min(trials, LONGEST_DOUBLINGS)
        return Breaker(failures=failures, until=now + wait, trials_failed=trials)


CLOSED = Breaker()
