"""
The workers the gateway may choose from, and what was last seen of each.

Owned by one event loop: the control loop writes snapshots, the gateway counts its own requests and
reports a worker it could not reach.  A worker nobody has looked at yet counts as unhealthy.

Whether a worker is admitted, avoided, drained or leaving is set here and nowhere else: neither a look at
it nor its restart changes that, so what is being drained or tried out gets no request by accident.

Whoever waits for a worker is told of every change that may have made room, synchronously, so that no
wake-up is lost.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.speculation.state import Watch


class WorkerPool:
    """A registry of workers with their latest snapshots."""

    def __init__(self, *, on_gone: Callable[[WorkerId], None] | None = None) -> None:
        """
        Begin without workers.

        Args:
            on_gone: called with each worker that has left the pool.
        """
        self._on_gone = on_gone
        self._snapshots: dict[WorkerId, WorkerSnapshot] = {}
        self._in_flight: dict[WorkerId, int] = {}
        self._idle: dict[WorkerId, asyncio.Event] = {}
        self._became_healthy = asyncio.Event()
        self._on_room: Callable[[], None] | None = None
        self.version = 0
        """Changes whenever a snapshot does; whoever keeps something made of them compares it."""

    def tell_of_room(self, on_room: Callable[[], None]) -> None:
        """Have `on_room` called after every change that may let a request through."""
        self._on_room = on_room

    def add(self, worker: Worker) -> None:
        """
        Take a worker in, unhealthy until it is looked at; one with the same id is replaced.

        The names its predecessor served stay known: during a restart a client is told to wait, not
        that the model does not exist.
        """
        snapshot = WorkerSnapshot(worker=worker, watch=Watch(mode=worker.mode))
        before = self._snapshots.get(worker.worker_id)
        if before is not None:
            snapshot = _kept(replace(snapshot, models=before.models), before)
        self._in_flight.setdefault(worker.worker_id, 0)
        self._put(snapshot)

    def update(self, snapshot: WorkerSnapshot) -> None:
        """Store what a look at a worker showed, unless the worker has left meanwhile."""
        current = self._snapshots.get(snapshot.worker.worker_id)
        if current is not None:
            self._put(_kept(snapshot, current))

    def report_unreachable(self, worker_id: WorkerId) -> None:
        """Leave a worker out of routing until the next successful look."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None and snapshot.healthy:
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

    def set_drained(self, worker_id: WorkerId, drained: bool) -> None:  # noqa: FBT001 - the new value
        """Say whether an operator keeps requests away from a worker; what it has is finished."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, drained=drained))

    def leave(self, worker_id: WorkerId) -> None:
        """Send a worker nothing more, and forget it once it has answered what this gateway gave it."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, leaving=True))
            self._forget_if_gone(worker_id)

    def stay(self, worker_id: WorkerId) -> None:
        """Take back that a worker leaves; one that has left stays away."""
        snapshot = self._snapshots.get(worker_id)
        if snapshot is not None:
            self._put(replace(snapshot, leaving=False))

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

    def begin(self, worker_id: WorkerId) -> None:
        """Count a request as in flight with a worker, until `end`."""
        self._in_flight[worker_id] = self._in_flight.get(worker_id, 0) + 1

    def end(self, worker_id: WorkerId) -> None:
        """Count a request as in flight no longer."""
        left = self._in_flight[worker_id] = self._in_flight[worker_id] - 1
        if not left:
            if worker_id in self._idle:
                self._idle.pop(worker_id).set()
            self._forget_if_gone(worker_id)
        if self._on_room is not None:
            self._on_room()

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
        self.version += 1
        if snapshot.takes_requests:
            self._became_healthy.set()
            if self._on_room is not None:
                self._on_room()

    def _forget_if_gone(self, worker_id: WorkerId) -> None:
        snapshot = self._snapshots.get(worker_id)
        if snapshot is None or not snapshot.leaving or self._in_flight[worker_id]:
            return
        del self._snapshots[worker_id], self._in_flight[worker_id]
        self.version += 1
        if self._on_gone is not None:
            self._on_gone(worker_id)


def _kept(snapshot: WorkerSnapshot, before: WorkerSnapshot) -> WorkerSnapshot:
    """A new snapshot with what only the pool decides."""
    return replace(
        snapshot,
        admission=before.admission,
        avoided=before.avoided,
        drained=before.drained,
        leaving=before.leaving,
    )
