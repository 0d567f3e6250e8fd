"""One start of a worker until its end: its time limits, its result, and the delay before the next start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorTiming:
    """Times in seconds."""

    poll: float = 0.5
    """Between two health checks of a starting worker."""
    check: float = 5.0
    """Between two health checks of a healthy worker; its end is noticed at once."""
    answer: float = 5.0
    unresponsive: float = 120.0
    """Without an answer until a healthy worker counts as dead; longer than the longest step."""
    longest_delay: float = 60.0
    """Maximum time between two starts."""
    stable: float = 300.0
    """Health after which the delays start from 1 s again."""
    kill: float = 15.0
    """Beyond the worker's own drain time, after which it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRun:
    reached_health: bool
    healthy_seconds: float
    detail: str
    exit_code: int | None


def restart_delay_seconds(deaths: int, longest: float) -> float:
    """1, 2, 4 seconds and so on, up to `longest`."""
    return min(longest, 2.0 ** min(deaths, 30))
