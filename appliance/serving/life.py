"""
One start of a worker until its end: how long things are waited for, how it went, when the next follows.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things are waited for, in seconds."""

    poll: float = 0.5
    """Between two looks at a starting worker."""
    check: float = 5.0
    """Between two looks at a healthy worker; its end is noticed at once."""
    answer: float = 5.0
    """For one look."""
    unresponsive: float = 120.0
    """Without an answer until a healthy worker counts as dead; longer than any step may take."""
    longest_delay: float = 60.0
    """Most time between two starts."""
    stable: float = 300.0
    """Of health after which the delays start from 1 s again."""
    kill: float = 15.0
    """More than the worker's own drain time, after which it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """How one start of the worker went."""

    reached_health: bool
    healthy_seconds: float
    detail: str
    exit_code: int | None


def restart_delay(deaths: int, longest: float) -> float:
    """Seconds to wait after that many deaths before this one: 1, 2, 4, up to the longest."""
    return min(longest, 2.0 ** min(deaths, 30))
