"""
The workers the gateway may choose from, and what was last seen of each.

Owned by one event loop: the control loop writes snapshots, the gateway counts its own requests and
reports a worker it could not reach.  A worker nobody has looked at yet counts as unhealthy.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from appliance.monitor import Watch
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot


class WorkerPool:
    """A registry of workers with their latest snapshots."""

    def __init__(self) -> None:
        self._snapshots: dict[WorkerId, WorkerSnapshot] = {}
        self._in_flight: dict[WorkerId, int] = {}
        self._became_healthy = asyncio.Event()

    def add(self, worker: Worker) -> None:
        """
        Take a worker in, unhealthy until it is looked at; one with the same id is replaced.

        The names its predecessor served stay known: during a restart a client is told to wait, not
        that the model does not exist.
        """
        before = self._snapshots.get(worker.worker_id)
        self._snapshots[worker.worker_id] = WorkerSnapshot(
            worker=worker, models=before.models if before else (), watch=Watch(mode=worker.mode)
        )
        self._in_flight.setdefault(worker.worker_id, 0)

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Store what a look at a worker showed, unless the worker has left meanwhile."""
        if snapshot.worker.worker_id in self._snapshots:
            self._snapshots[snapshot.worker.worker_id] = snapshot
        if self.any_healthy():
            self._became_healthy.set()

    def report_unreachable(self, worker_id: WorkerId) -> None:
        """Leave a worker out of routing until the next successful look."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._snapshots[worker_id] = replace(snapshot, healthy=False)

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

    def models(self) -> dict[str, ServedModel]:
        """Every model name some worker serves, healthy or not, so that a restart hides nothing."""
        return {served.name: served for snapshot in self._snapshots.values() for served in snapshot.models}

    async def wait_healthy(self) -> None:
        """Return once a worker has been healthy for the first time."""
        await self._became_healthy.wait()

    def any_healthy(self) -> bool:
        """Whether at least one worker can take a request."""
        return any(snapshot.healthy for snapshot in self._snapshots.values())
