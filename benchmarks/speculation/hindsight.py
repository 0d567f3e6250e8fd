"""
How soon a table is right after a change of traffic, judged by speeds that were measured for each fixed K.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf
from statistics import median

from appliance.drafts.evaluation.intervals import median_ratio
from benchmarks.speculation.verdicts import GOAL

HOLD_SECONDS = 5.0
"""A table counts as right once it stays so for this long."""

Speeds = Mapping[int, float]
"""Tokens per second by K."""
Rounds = Mapping[int, Sequence[float]]
"""The same of each of some rounds."""
Trace = Sequence[tuple[float, int]]
"""Seconds after the change, and K from then on; the first at 0, in order."""


def medians_of(rounds: Rounds) -> Speeds:
    return {k: median(speeds) for k, speeds in rounds.items()}


def right_of(rounds: Rounds) -> tuple[int, ...]:
    """Every K that the rounds do not show to be more than 5 % slower than the best."""
    best = max(rounds.values(), key=median)
    return tuple(
        k for k, speeds in rounds.items() if median_ratio(list(zip(speeds, best, strict=True))).high >= GOAL
    )


def reaction_seconds(
    trace: Trace, right: Collection[int], ended: float, hold: float = HOLD_SECONDS
) -> float | None:
    """Seconds from the change until K is right for at least `hold`; None if it was not before `ended`."""
    since: float | None = None
    for at, k in [*trace, (ended, -1)]:
        if since is not None and at - since >= hold:
            return since
        if k not in right:
            since = None
        elif since is None:
            since = at
    return None


def lost_tokens(trace: Trace, speeds: Speeds, until: float) -> float:
    """Tokens that the best K would have given more, from the change to `until`."""
    ends = [*(at for at, _k in trace[1:]), inf]
    best = max(speeds.values())
    return sum(
        (best - speeds[k]) * max(0.0, min(end, until) - at) for (at, k), end in zip(trace, ends, strict=True)
    )
