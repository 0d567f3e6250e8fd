"""
The workers the gateway may choose from, and what was last seen of each.

Owned by one event loop: the control loop writes snapshots, the gateway counts its own requests and
reports a worker it could not reach.  A worker nobody has looked at yet counts as unhealthy.

Whether a worker is admitted or avoided is set here and nowhere else: neither a look at it nor its
restart changes that, so what is being drained or tried out gets no request by accident.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.watch import Watch


class WorkerPool:
    """A registry of workers with their latest snapshots."""

    def __init__(self) -> None:
        self._snapshots: dict[WorkerId, WorkerSnapshot] = {}
        self._in_flight: dict[WorkerId, int] = {}
        self._idle: dict[WorkerId, asyncio.Event] = {}
        self._became_healthy = asyncio.Event()

    def add(self, worker: Worker) -> None:
        """
        Take a worker in, unhealthy until it is looked at; one with the same id is replaced.

        The names its predecessor served stay known: during a restart a client is told to wait, not
        that the model does not exist.
        """
        snapshot = WorkerSnapshot(worker=worker, watch=Watch(mode=worker.mode))
        before = self._snapshots.get(worker.worker_id)
        if before is not None:
            snapshot = replace(
                snapshot, models=before.models, admission=before.admission, avoided=before.avoided
            )
        self._snapshots[worker.worker_id] = snapshot
        self._in_flight.setdefault(worker.worker_id, 0)

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Store what a look at a worker showed, unless the worker has left meanwhile."""
        current = self._snapshots.get(snapshot.worker.worker_id)
        if current is not None:
            self._put(replace(snapshot, admission=current.admission, avoided=current.avoided))

    def report_unreachable(self, worker_id: WorkerId) -> None:
        """Leave a worker out of routing until the next successful look."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, healthy=False))

    def set_admission(self, worker_id: WorkerId, admission: Admission) -> None:
        """Say whether a worker gets requests, whatever its health; one that has left stays away."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, admission=admission))

    def set_avoided(self, worker_id: WorkerId, avoided: bool) -> None:  # noqa: FBT001 - the new value
        """Say whether any other worker is to be taken first; one that has left stays away."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, avoided=avoided))

    async def drain(self, worker_id: WorkerId) -> None:
        """
        Send a worker nothing more, and return once it has answered what this gateway gave it.

        Whoever waits sets the limit: a stream may go on for as long as its client reads.  The worker
        stays as it is, draining, also where the wait is given up.
        """
        self.set_admission(worker_id, Admission.DRAINING)
        while self._in_flight.get(worker_id, 0):
            await self._idle.setdefault(worker_id, asyncio.Event()).wait()

    @property
    def snapshots(self) -> tuple[WorkerSnapshot, ...]:
        """Every worker's latest snapshot, in the order they were added."""
        return tuple(self._snapshots.values())

    def snapshot(self, worker_id: WorkerId) -> WorkerSnapshot | None:
        """One worker's latest snapshot, or None when it is not in the pool."""
        return self._snapshots.get(worker_id)

    @property
    def in_flight(self) -> dict[WorkerId, int]:
        """Requests this gateway has with each worker now."""
        return self._in_flight

    @contextmanager
    def occupy(self, worker_id: WorkerId) -> Iterator[None]:
        """Count one request as in flight with a worker for as long as the context lasts."""
        self._in_flight[worker_id] = self._in_flight.get(worker_id, 0) + 1
        try:
            yield
        finally:
            self._in_flight[worker_id] -= 1
            if not self._in_flight[worker_id] and worker_id in self._idle:
                self._idle.pop(worker_id).set()

    def models(self) -> dict[str, ServedModel]:
        """Every model name some worker serves, healthy or not, so that a restart hides nothing."""
        return {served.name: served for snapshot in self._snapshots.values() for served in snapshot.models}

    async def wait_healthy(self) -> None:
        """Return once a worker could take a request for the first time."""
        await self._became_healthy.wait()

    def any_healthy(self) -> bool:
        """Whether at least one worker can take a request."""
        return any(snapshot.takes_requests for snapshot in self._snapshots.values())

    def _put(self, snapshot: WorkerSnapshot) -> None:
        self._snapshots[snapshot.worker.worker_id] = snapshot
        if self.any_healthy():
            self._became_healthy.set()
