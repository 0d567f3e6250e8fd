"""
What is made of measured times: medians, tails and the figures every table shows.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds, in the middle and at the tail."""

    count: int
    p50: float
    p99: float


def times(seconds: Sequence[float]) -> Times:
    """Summarise durations given in seconds; of none everything is 0."""
    if not seconds:
        return Times(count=0, p50=0.0, p99=0.0)
    ordered = sorted(seconds)
    tail = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Times(count=len(ordered), p50=statistics.median(ordered) * 1000, p99=tail * 1000)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
