"""
Time saved by drafts: steps with drafts, compared with the same tokens without.

A step with K draft tokens gave `tokens / requests` tokens to each request and took S(K); without drafts it
would have given one and taken S(0).  S(K) / S(0) is what the monitor measures side by side on the running
engine, with its variance (`appliance.speculation.costs`); the number of tokens is counted exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.speculation.goodput import Estimate
from appliance.speculation.values import StepCounters

Z = 1.96  # standard deviations of a 95 % confidence interval
Steps = Mapping[tuple[int, int], StepCounters]  # by batch bucket and draft tokens, as the plugin counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Engine seconds of decode steps with drafts, and of the same tokens without."""

    seconds: float = 0.0
    tokens: int = 0
    target_only: float = 0.0
    low: float = 0.0  # 95 % bound of `target_only`, as if every measurement erred the same way
    high: float = 0.0


def compare(
    steps: Steps, costs: Mapping[tuple[int, int], Estimate]
) -> tuple[StepComparison, dict[tuple[int, int], StepCounters]]:
    """The comparison, and the steps without a cost: log S(K)/S(0) by batch bucket and K."""
    seconds = target_only = low = high = 0.0
    tokens, left = 0, {}
    for (bucket, k), taken in steps.items():
        if not k or not taken.requests:
            continue
        ratio = costs.get((bucket, k))
        if ratio is None:
            left[bucket, k] = taken
            continue
        without = taken.seconds * taken.tokens / taken.requests
        seconds += taken.seconds
        tokens += taken.tokens
        target_only += without * math.exp(-ratio.mean)
        low += without * math.exp(-ratio.upper(Z))
        high += without * math.exp(-ratio.lower(Z))
    saving = StepComparison(seconds=seconds, tokens=tokens, target_only=target_only, low=low, high=high)
    return saving, left


def added(first: Steps, second: Steps) -> dict[tuple[int, int], StepCounters]:
    total = dict(first)
    for kind, more in second.items():
        known = total.get(kind)
        total[kind] = more if known is None else known.plus(more)
    return total


def since(later: Steps, earlier: Steps) -> dict[tuple[int, int], StepCounters]:
    """Steps of the same engine, without kinds that had no step."""
    return {
        kind: cell.since(earlier[kind]) if kind in earlier else cell
        for kind, cell in later.items()
        if kind not in earlier or cell.steps > earlier[kind].steps
    }
