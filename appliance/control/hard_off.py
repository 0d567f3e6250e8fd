"""
When a worker is restarted without its draft, and when with it again.

A soft-off leaves the draft in memory and still costs a little at each step.  A draft that has not paid for
long is worth a restart without it, and, since that also ends exploration, another one later to try it again.
This only decides; `appliance.control.recycle` restarts, and refuses if no other worker could serve meanwhile.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason

UNCONTROLLABLE_SECONDS = 60.0  # longest wait of a worker that cannot be controlled: it keeps wasting steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartHistory:
    """Monotonic time of each worker's last collapse, restart without draft, and refusal."""

    collapsed: Mapping[WorkerId, float] = field(default_factory=lambda: MappingProxyType({}))
    without_draft: Mapping[WorkerId, float] = field(default_factory=lambda: MappingProxyType({}))
    refused: Mapping[WorkerId, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HardOffPolicy:
    after_seconds: float | None  # from a collapse to the restart without draft; None: never
    retry_seconds: float  # from that restart to one with the draft, and from a refusal to the next attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    worker_id: WorkerId
    with_draft: bool
    reason: Reason


def note_collapses(
    history: RestartHistory, snapshots: Iterable[WorkerSnapshot], now: float
) -> RestartHistory:
    seen = {snapshot.worker.worker_id: snapshot for snapshot in snapshots}
    collapsed = {
        worker_id: history.collapsed.get(worker_id, now)
        for worker_id, snapshot in seen.items()
        if snapshot.speculates and snapshot.decision.verdict is Reason.COLLAPSED
    }
    # A worker that drafts again needs no restart with its draft.
    without = {
        worker_id: since
        for worker_id, since in history.without_draft.items()
        if worker_id in seen and not (seen[worker_id].takes_requests and seen[worker_id].speculates)
    }
    return replace(history, collapsed=MappingProxyType(collapsed), without_draft=MappingProxyType(without))


def note_restart(history: RestartHistory, restart: Restart, now: float) -> RestartHistory:
    left = forget(history, restart.worker_id)
    if restart.with_draft:
        return left
    without = {**left.without_draft, restart.worker_id: now}
    return replace(left, without_draft=MappingProxyType(without))


def note_refusal(history: RestartHistory, worker_id: WorkerId, now: float) -> RestartHistory:
    """The retry waits as long as after a restart."""
    left = forget(history, worker_id)
    return replace(left, refused=MappingProxyType({**left.refused, worker_id: now}))


def forget(history: RestartHistory, worker_id: WorkerId) -> RestartHistory:
    """Drop a worker's times, so that they count from its next event."""

    def others(times: Mapping[WorkerId, float]) -> Mapping[WorkerId, float]:
        return MappingProxyType({name: since for name, since in times.items() if name != worker_id})

    return RestartHistory(
        collapsed=others(history.collapsed),
        without_draft=others(history.without_draft),
        refused=others(history.refused),
    )


def due(
    history: RestartHistory, snapshots: Iterable[WorkerSnapshot], policy: HardOffPolicy, now: float
) -> tuple[Restart, ...]:
    """The longest due first."""
    if policy.after_seconds is None:
        return ()
    seen = {snapshot.worker.worker_id: snapshot for snapshot in snapshots}
    waits: list[tuple[float, Restart]] = []
    for worker_id, since in history.collapsed.items():
        uncontrollable = seen[worker_id].decision.basis is Reason.NOT_CONTROLLABLE
        wait = min(UNCONTROLLABLE_SECONDS, policy.after_seconds) if uncontrollable else policy.after_seconds
        restart = Restart(worker_id=worker_id, with_draft=False, reason=Reason.COLLAPSED)
        waits.append((since + wait, restart))
    for worker_id, since in history.without_draft.items():
        restart = Restart(worker_id=worker_id, with_draft=True, reason=Reason.TOO_FEW_DRAFTS)
        waits.append((since + policy.retry_seconds, restart))
    waits.sort(key=lambda pair: pair[0])
    return tuple(
        restart
        for when, restart in waits
        if when <= now and now >= history.refused.get(restart.worker_id, -math.inf) + policy.retry_seconds
    )
