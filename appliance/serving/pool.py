"""
The workers that the gateway may choose from, with the latest snapshot of each.

Owned by one event loop: the control loop writes snapshots; the gateway counts its requests and reports
workers it could not reach.  A worker that was never scraped counts as unhealthy.

Only this module sets whether a worker is admitted, avoided, drained, starting or leaving: neither a scrape
nor a restart changes that, so a worker that is drained or under test receives no request by accident.

The capacity callback runs synchronously on every change that may free a slot, so no wake-up is lost.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.speculation.values import Decision


class WorkerPool:
    def __init__(self, *, on_gone: Callable[[WorkerId], None] | None = None) -> None:
        self._on_gone = on_gone
        self._snapshots: dict[WorkerId, WorkerSnapshot] = {}
        self._in_flight: dict[WorkerId, int] = {}
        self._idle: dict[WorkerId, asyncio.Event] = {}
        self._became_healthy = asyncio.Event()
        self._on_capacity: Callable[[], None] | None = None
        self.version = 0
        """Changes with every snapshot; callers that cache derived values compare it."""

    def on_capacity(self, callback: Callable[[], None]) -> None:
        self._on_capacity = callback

    def add(self, worker: Worker, *, starting: bool = False) -> None:
        """
        Add a worker, unhealthy until its first scrape; it replaces one with the same id.

        One that is `starting` is not scraped before `report_started`.

        The model names of its predecessor stay known, and when it was last up: during a restart requests
        wait, and no client receives that the model does not exist.
        """
        snapshot = WorkerSnapshot(worker=worker, decision=Decision(mode=worker.mode))
        before = self._snapshots.get(worker.worker_id)
        if before is not None:
            snapshot = _kept(replace(snapshot, models=before.models, seen_at=before.seen_at), before)
        snapshot = replace(snapshot, starting=starting)
        self._in_flight.setdefault(worker.worker_id, 0)
        self._put(snapshot)

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Store the result of a scrape, unless the worker has left or was replaced meanwhile."""
        current = self._snapshots.get(snapshot.worker.worker_id)
        if current is not None and current.worker == snapshot.worker:
            self._put(_kept(snapshot, current))

    def report_started(self, worker_id: WorkerId) -> None:
        self._change(worker_id, starting=False)

    def report_unreachable(self, worker_id: WorkerId) -> None:
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None and snapshot.healthy:
            self._put(replace(snapshot, healthy=False))

    def set_admission(self, worker_id: WorkerId, admission: Admission) -> None:
        """Set whether a worker receives requests, whatever its health; ignored if it has left."""
        self._change(worker_id, admission=admission)

    def set_avoided(self, worker_id: WorkerId, avoided: bool) -> None:  # noqa: FBT001 - the new value
        self._change(worker_id, avoided=avoided)

    def set_drained(self, worker_id: WorkerId, drained: bool) -> None:  # noqa: FBT001 - the new value
        """Set whether an operator keeps requests away from a worker; it finishes those in flight."""
        self._change(worker_id, drained=drained)

    def leave(self, worker_id: WorkerId) -> None:
        """Send a worker no more requests, and forget it once those of this gateway are finished."""
        self._change(worker_id, leaving=True)
        self._forget_if_gone(worker_id)

    def stay(self, worker_id: WorkerId) -> None:
        self._change(worker_id, leaving=False)

    async def drain(self, worker_id: WorkerId) -> None:
        """
        Send a worker no more requests, and return once those of this gateway are finished.

        The caller sets the time limit: a stream lasts as long as its client reads.  If it cancels, the worker
        stays `draining`.
        """
        self.set_admission(worker_id, Admission.DRAINING)
        while self._in_flight.get(worker_id, 0):
            await self._idle.setdefault(worker_id, asyncio.Event()).wait()

    @property
    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        return tuple(self._snapshots.values())

    def snapshot(self, worker_id: WorkerId) -> WorkerSnapshot | None:
        return self._snapshots.get(worker_id)

    @property
    def in_flight(self) -> dict[WorkerId, int]:
        """Sequences of this gateway's requests: one each, unless a request has several inputs or answers."""
        return self._in_flight

    def begin(self, worker_id: WorkerId, sequences: int = 1) -> None:
        self._in_flight[worker_id] = self._in_flight.get(worker_id, 0) + sequences

    def end(self, worker_id: WorkerId, sequences: int = 1) -> None:
        left = self._in_flight[worker_id] = self._in_flight[worker_id] - sequences
        if not left:
            if worker_id in self._idle:
                self._idle.pop(worker_id).set()
            self._forget_if_gone(worker_id)
        if self._on_capacity is not None:
            self._on_capacity()

    def models(self) -> dict[str, ServedModel]:
        """Every model name that some worker serves, healthy or not, so that a restart hides none."""
        return {served.name: served for snapshot in self._snapshots.values() for served in snapshot.models}

    async def wait_healthy(self) -> None:
        await self._became_healthy.wait()

    def had_healthy(self) -> bool:
        """Whether any worker has been healthy since the start."""
        return self._became_healthy.is_set()

    def any_healthy(self) -> bool:
        return any(snapshot.takes_requests for snapshot in self._snapshots.values())

    def _change(self, worker_id: WorkerId, **state: Any) -> None:  # noqa: ANN401 - members of the snapshot
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, **state))

    def _put(self, snapshot: WorkerSnapshot) -> None:
        self._snapshots[snapshot.worker.worker_id] = snapshot
        self.version += 1
        if snapshot.takes_requests:
            self._became_healthy.set()
            if self._on_capacity is not None:
                self._on_capacity()

    def _forget_if_gone(self, worker_id: WorkerId) -> None:
        snapshot = self._snapshots.get(worker_id)
        if snapshot is None or not snapshot.leaving or self._in_flight[worker_id]:
            return
        del self._snapshots[worker_id], self._in_flight[worker_id]
        self.version += 1
        if self._on_gone is not None:
            self._on_gone(worker_id)


def _kept(snapshot: WorkerSnapshot, before: WorkerSnapshot) -> WorkerSnapshot:
    """The new snapshot, with the state that only the pool sets."""
    return replace(
        snapshot,
        admission=before.admission,
        avoided=before.avoided,
        drained=before.drained,
        starting=before.starting,
        leaving=before.leaving,
    )
