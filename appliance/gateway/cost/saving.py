"""
What drafting saved: the time of steps with drafts, against what the same tokens take without.

A step with K draft tokens gave `tokens / requests` tokens to each request and took S(K); without drafts it
would have given one and taken S(0).  S(K) / S(0) is what the monitor measures side by side on the running
engine, with its variance (`appliance.speculation.goodput`); the number of tokens is counted exactly.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.speculation.goodput import Costs
from appliance.speculation.values import StepCounters

Z = 1.96
"""Standard deviations on either side of a mean that hold it with 95 % confidence."""
Steps = Mapping[tuple[int, int], StepCounters]
"""By batch bucket and draft tokens, as the worker's plugin counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Engine seconds of whole decode steps with drafts, and of the same tokens without."""

    seconds: float = 0.0
    tokens: int = 0
    target_only: float = 0.0
    low: float = 0.0
    """Lower bound of `target_only`: 95 %, as if every measurement erred the same way."""
    high: float = 0.0


def compare(
    steps: Steps, costs_of: Callable[[int], Costs]
) -> tuple[Saving, dict[tuple[int, int], StepCounters]]:
    """
    Compare steps with what they would have been without drafts.

    Args:
        steps: what was counted.
        costs_of: what is known of drafting at a batch bucket.

    Returns:
        The comparison, and the steps of which nothing is known to compare them with.
    """
    seconds = target_only = low = high = 0.0
    tokens, left = 0, {}
    for (bucket, k), taken in steps.items():
        if not k or not taken.requests:
            continue
        ratio = costs_of(bucket).ratios.get(k)
        if ratio is None:
            left[bucket, k] = taken
            continue
        without = taken.seconds * taken.tokens / taken.requests
        seconds += taken.seconds
        tokens += taken.tokens
        target_only += without * math.exp(-ratio.mean)
        low += without * math.exp(-ratio.upper(Z))
        high += without * math.exp(-ratio.lower(Z))
    saving = Saving(seconds=seconds, tokens=tokens, target_only=target_only, low=low, high=high)
    return saving, left


def added(first: Steps, second: Steps) -> dict[tuple[int, int], StepCounters]:
    """What was counted by either."""
    total = dict(first)
    for kind, more in second.items():
        known = total.get(kind)
        total[kind] = more if known is None else known.plus(more)
    return total


def since(later: Steps, earlier: Steps) -> dict[tuple[int, int], StepCounters]:
    """What the same engine counted after `earlier`; nothing of the kinds that had no step."""
    return {
        kind: cell.since(earlier[kind]) if kind in earlier else cell
        for kind, cell in later.items()
        if kind not in earlier or cell.steps > earlier[kind].steps
    }
