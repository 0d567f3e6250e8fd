"""
When a line of a batch may begin: only in capacity that nobody else wants.

Pure.  What workers do is what was last seen of them, and what this gateway has with them now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.gateway.admission.places import most_places
from appliance.serving.worker import WorkerId, WorkerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """How much of a pool batches may use."""

    concurrency: int
    """Most lines at once in this gateway."""
    share: float
    """Part of what workers batch up to which lines are begun, everybody's requests counted."""
    worker_requests: int | None = None
    """Requests a worker batches; None for what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines that are under way in this gateway."""

    all: int
    mine: int
    """Those of the batch that asks."""
    batches: int
    """Batches that are run, the one that asks among them."""


def may_begin(
    model: str, lines: Lines, idle: Idle, workers: Sequence[WorkerSnapshot], in_flight: Mapping[WorkerId, int]
) -> bool:
    """
    Whether one more line may begin.

    Not while requests wait in a worker of its model, not while workers are busier than their share,
    and not before its turn: batches that run at the same time share alike.
    """
    fair = max(1, idle.concurrency // max(1, lines.batches))
    if lines.all >= idle.concurrency or lines.mine >= fair:
        return False
    named = {served.name for worker in workers for served in worker.models}
    if named and model not in named:
        return True  # it will be refused, and need not wait for that
    serving = [worker for worker in workers if worker.takes_requests and worker.serves(model)]
    if any(worker.metrics.waiting for worker in serving if worker.metrics):
        return False
    busy = sum(_busy(worker, in_flight.get(worker.worker.worker_id, 0)) for worker in serving)
    # Of lines that have just begun no worker knows yet.
    room = sum(most_places(worker, fixed=idle.worker_requests, headroom=0) for worker in serving)
    return max(busy, lines.all) < idle.share * room


def _busy(worker: WorkerSnapshot, in_flight: int) -> int:
    """Requests in a worker: as it said, other gateways' among them, or as many as we have sent since."""
    return max(in_flight, int(worker.metrics.running) if worker.metrics else 0)
