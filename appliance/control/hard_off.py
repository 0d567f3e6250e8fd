"""
When a worker is restarted without its draft, and when with it again.

A soft-off leaves the draft in memory and still costs a little at each step.  A draft that has not
paid for long is worth a restart without it, and, since nobody can see any more whether it would
pay, another one later to try it again.  This only decides; `appliance.control.recycle` does it, and refuses
where no other worker could serve meanwhile.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason

UNSTEERED_SECONDS = 60.0
"""A worker that cannot be told to stop goes on wasting steps, so it waits no longer than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Since when what has been so, in monotonic seconds."""

    collapsed: Mapping[WorkerId, float] = field(default_factory=lambda: MappingProxyType({}))
    """Workers whose draft has not paid since then."""
    without_draft: Mapping[WorkerId, float] = field(default_factory=lambda: MappingProxyType({}))
    """Workers that were restarted without it."""
    refused: Mapping[WorkerId, float] = field(default_factory=lambda: MappingProxyType({}))
    """Workers that could not be restarted when they were last asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardOffPolicy:
    """How long is long."""

    after_seconds: float | None
    """None: never."""
    retry_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart that is due."""

    worker_id: WorkerId
    with_draft: bool
    reason: Reason


def note_collapses(ledger: Ledger, snapshots: Iterable[WorkerSnapshot], now: float) -> Ledger:
    """Take one look at the workers into the ledger."""
    seen = {snapshot.worker.worker_id: snapshot for snapshot in snapshots}
    collapsed = {
        worker_id: ledger.collapsed.get(worker_id, now)
        for worker_id, snapshot in seen.items()
        if snapshot.speculates and snapshot.watch.verdict is Reason.COLLAPSED
    }
    # One that drafts again, whoever started it so, is not waiting for its draft any more.
    without = {
        worker_id: since
        for worker_id, since in ledger.without_draft.items()
        if worker_id in seen and not (seen[worker_id].takes_requests and seen[worker_id].speculates)
    }
    return replace(ledger, collapsed=MappingProxyType(collapsed), without_draft=MappingProxyType(without))


def note_restart(ledger: Ledger, restart: Restart, now: float) -> Ledger:
    """Take a restart that has begun into the ledger."""
    left = forget(ledger, restart.worker_id)
    if restart.with_draft:
        return left
    without = {**left.without_draft, restart.worker_id: now}
    return replace(left, without_draft=MappingProxyType(without))


def note_refusal(ledger: Ledger, worker_id: WorkerId, now: float) -> Ledger:
    """Take into the ledger that a worker could not be restarted, which will hardly change soon."""
    left = forget(ledger, worker_id)
    return replace(left, refused=MappingProxyType({**left.refused, worker_id: now}))


def forget(ledger: Ledger, worker_id: WorkerId) -> Ledger:
    """Count anew for a worker."""

    def others(times: Mapping[WorkerId, float]) -> Mapping[WorkerId, float]:
        return MappingProxyType({name: since for name, since in times.items() if name != worker_id})

    return Ledger(
        collapsed=others(ledger.collapsed),
        without_draft=others(ledger.without_draft),
        refused=others(ledger.refused),
    )


def due(
    ledger: Ledger, snapshots: Iterable[WorkerSnapshot], policy: HardOffPolicy, now: float
) -> tuple[Restart, ...]:
    """The restarts whose time has come, the longest due first."""
    if policy.after_seconds is None:
        return ()
    seen = {snapshot.worker.worker_id: snapshot for snapshot in snapshots}
    waits: list[tuple[float, Restart]] = []
    for worker_id, since in ledger.collapsed.items():
        unsteered = seen[worker_id].watch.basis is Reason.NOT_CONTROLLABLE
        wait = min(UNSTEERED_SECONDS, policy.after_seconds) if unsteered else policy.after_seconds
        restart = Restart(worker_id=worker_id, with_draft=False, reason=Reason.COLLAPSED)
        waits.append((since + wait, restart))
    for worker_id, since in ledger.without_draft.items():
        restart = Restart(worker_id=worker_id, with_draft=True, reason=Reason.PROBING)
        waits.append((since + policy.retry_seconds, restart))
    waits.sort(key=lambda pair: pair[0])
    return tuple(
        restart
        for when, restart in waits
        if when <= now and now >= ledger.refused.get(restart.worker_id, -math.inf) + policy.retry_seconds
    )
