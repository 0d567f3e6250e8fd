"""
A circuit breaker for one worker: a worker that keeps failing gets a rest, then one request to try.

    closed ── failures in a row ──► open ── its time is over ──► half-open ── an answer ──► closed
                                     ▲                              │
                                     └────────── a failure ─────────┘  (twice as long)

It sees what the health check cannot: a worker whose health page is fine and whose answers are errors.
Only failures in a row count, as in Envoy's outlier detection, so that requests which no worker could
answer do not close a worker for the others.  Pure: values in, values out, the clock is passed in.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

LONGEST_DOUBLINGS = 6
"""A worker that never answers is tried every 64 times `seconds`."""


class BreakerState(StrEnum):
    """Whether a worker gets requests, as far as its breaker is concerned."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When a breaker opens, and for how long."""

    failures: int = 5
    """Failures in a row that open it."""
    seconds: float = 5.0
    """How long it stays open the first time; doubles with each trial that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """One worker's breaker; times are readings of one monotonic clock, in seconds."""

    failures: int = 0
    """Failures in a row."""
    until: float | None = None
    """When it may be tried; None while it is closed."""
    trials_failed: int = 0
    """Trials in a row that failed."""
    trial_until: float = 0.0
    """Until then the answer to the trial is waited for; a client that leaves takes its trial along."""

    @property
    def is_closed(self) -> bool:
        """Whether it lets everything through."""
        return self.until is None

    def state(self, now: float) -> BreakerState:
        """Where it stands."""
        if self.until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self.until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may go to the worker now."""
        return self.until is None or (now >= self.until and now >= self.trial_until)

    def begun(self, now: float, policy: BreakerPolicy) -> "Breaker":
        """After a request went to the worker; in `half_open` it is the trial."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return self
        return replace(self, trial_until=now + policy.seconds)

    def succeeded(self) -> "Breaker":
        """After an answer that is no failure."""
        return CLOSED

    def failed(self, now: float, policy: BreakerPolicy) -> "Breaker":
        """After a failure: it could not be reached, broke off before its answer, or answered 5xx."""
        failures = self.failures + 1
        if self.until is None:
            is_open = failures >= policy.failures
            return Breaker(failures=failures, until=now + policy.seconds if is_open else None)
        if now < self.until:
            return replace(self, failures=failures)  # one that was on its way when it opened
        trials = self.trials_failed + 1
        wait = policy.seconds * 2.0 ** min(trials, LONGEST_DOUBLINGS)
        return Breaker(failures=failures, until=now + wait, trials_failed=trials)


CLOSED = Breaker()
