"""The monitor's decision and figures of one worker, in the units of the admin API."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import Decision, Reason, SpeculationMode


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    bucket: int
    draft_tokens: int
    reason: Reason
    break_even: float | None  # of the best number of draft tokens above 0; None if not measured
    break_evens: Mapping[int, float]  # by number of draft tokens, as far as measured
    payoff: float | None  # logarithm of the gain in tokens per second of the best choice above 0 over none
    tokens_per_second: Mapping[int, float]  # per engine second, by number of draft tokens, as last measured


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    since: float  # Unix time of the last change of mode
    buckets: tuple[BucketView, ...]
    exploration_share: float  # of engine time, lost to steps with other numbers of draft tokens
    controllable: bool
    problems: tuple[str, ...]


def view_of(snapshot: WorkerSnapshot, *, now: float, wall_now: float) -> WorkerView:
    """`now` is of the control loop's monotonic clock; `wall_now` is the same moment in Unix time."""
    figures, reading = snapshot.figures, snapshot.reading
    return WorkerView(
        since=wall_now - (now - figures.since),
        buckets=tuple(_bucket(snapshot, bucket) for bucket in figures.draft_tokens),
        exploration_share=figures.exploration_share,
        controllable=reading is not None and reading.controllable,
        problems=_problems(snapshot),
    )


def _problems(snapshot: WorkerSnapshot) -> tuple[str, ...]:
    """A worker that is down is a fault of its own."""
    if snapshot.reading is not None or not snapshot.healthy:
        return snapshot.reading.problems if snapshot.reading else ()
    at = urlsplit(snapshot.worker.control_url).netloc
    return (f"the plugin at {at} did not answer the last poll: may a firewall drop its port?",)


def _bucket(snapshot: WorkerSnapshot, bucket: int) -> BucketView:
    decision, figures = snapshot.decision, snapshot.figures
    draft_tokens, break_evens = figures.draft_tokens[bucket], figures.costs.break_evens(bucket)
    seconds_per_token = figures.costs.seconds_per_token[bucket]
    payoffs = {k: figures.acceptance.gain(k, 0).mean - math.log(even) for k, even in break_evens.items()}
    best = max(payoffs, key=payoffs.__getitem__, default=None) if figures.window.drafts else None
    return BucketView(
        bucket=bucket,
        draft_tokens=draft_tokens,
        reason=_reason(decision, draft_tokens),
        break_even=break_evens.get(max(figures.choices) if best is None else best),
        break_evens=break_evens,
        payoff=None if best is None else payoffs[best],
        tokens_per_second=MappingProxyType(
            {k: 1.0 / seconds for k, seconds in sorted(seconds_per_token.items()) if seconds > 0}
        ),
    )


def _reason(decision: Decision, draft_tokens: int) -> Reason:
    """The decision's is of the bucket in use: where another one does otherwise, only its cost says why."""
    if (draft_tokens > 0) is (decision.mode is SpeculationMode.SPECULATIVE):
        return decision.reason
    return Reason.HEALTHY if draft_tokens else Reason.BELOW_BREAK_EVEN
