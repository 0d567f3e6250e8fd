"""
What is known and decided about one worker's speculation, in the units people read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.goodput import Costs, best_choice
from appliance.speculation.state import Watch
from appliance.speculation.values import Reason, SpeculationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """One batch bucket."""

    bucket: int
    draft_tokens: int
    reason: Reason
    break_even: float | None
    """Of the best number of draft tokens above 0."""
    break_evens: Mapping[int, float]
    """Of each that was measured."""
    payoff: float | None
    tokens_per_second: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker."""

    since: float
    buckets: tuple[BucketView, ...]
    probes_failed: int
    next_probe_in_seconds: float | None
    controllable: bool
    problems: tuple[str, ...]


def view_of(snapshot: WorkerSnapshot, *, now: float, wall_now: float) -> WorkerView:
    """
    Put what is remembered of a worker into a view.

    Args:
        snapshot: the worker as last seen.
        now: reading of the monotonic clock that the watch's times are of.
        wall_now: Unix time at the same moment.
    """
    watch, reading = snapshot.watch, snapshot.reading
    waits = watch.verdict is not None or any(not entry.draft_tokens for entry in watch.buckets.values())
    return WorkerView(
        since=wall_now - (now - watch.since),
        buckets=tuple(_bucket(watch, bucket) for bucket in sorted(watch.buckets)),
        probes_failed=watch.probes_failed,
        next_probe_in_seconds=max(0.0, watch.next_probe_at - now) if waits else None,
        controllable=reading is not None and reading.controllable,
        problems=reading.problems if reading is not None else (),
    )


def _bucket(watch: Watch, bucket: int) -> BucketView:
    costs: Costs = watch.buckets[bucket].costs
    best = best_choice(watch.window, costs, watch.choices)
    draft_tokens = watch.draft_tokens(bucket)
    stopped = watch.mode is not SpeculationMode.SPECULATIVE
    reason = watch.reason if draft_tokens or stopped else Reason.BELOW_BREAK_EVEN
    return BucketView(
        bucket=bucket,
        draft_tokens=draft_tokens,
        reason=reason,
        break_even=costs.break_even(best[0] if best is not None else max(watch.choices)),
        break_evens=MappingProxyType({k: math.exp(ratio.mean) for k, ratio in sorted(costs.ratios.items())}),
        payoff=best[1].mean if best is not None else None,
        tokens_per_second=MappingProxyType(
            {k: 1.0 / seconds for k, seconds in sorted(costs.seconds_per_token.items()) if seconds > 0}
        ),
    )
