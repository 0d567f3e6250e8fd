"""When a batch's line may start: only in idle capacity, by the last scrapes and our requests in flight."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from appliance.gateway.admission.slot_count import max_slots
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import WorkerId, WorkerSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleCapacity:
    concurrency: int  # maximum lines in this gateway
    share: float  # of the workers' batch size, with all clients' requests, below which lines start
    worker_requests: int | None = None  # batch size of a worker; None for the size it reports


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLines:
    all: int
    mine: int  # of the batch that asks
    batches: int  # running ones, including the one that asks


def may_begin(
    model: str,
    lines: RunningLines,
    idle: IdleCapacity,
    workers: Sequence[WorkerSnapshot],
    in_flight: Mapping[WorkerId, int],
) -> bool:
    """
    Whether one more line may start.

    Not while requests wait in a worker of its model, not while workers are busier than their share,
    and not beyond the batch's fair part: running batches get equal parts.
    """
    fair = max(1, idle.concurrency // max(1, lines.batches))
    if lines.all >= idle.concurrency or lines.mine >= fair:
        return False
    named = {served.name for worker in workers for served in worker.models}
    if named and model not in named:
        return True  # it will be refused, without waiting
    serving = [worker for worker in workers if worker.takes_requests and worker.serves(model)]
    if any(worker.metrics.waiting for worker in serving if worker.metrics):
        return False
    busy = sum(_busy(worker, in_flight.get(worker.worker.worker_id, 0)) for worker in serving)
    # Workers do not report lines that have just started.
    room = sum(max_slots(worker, fixed=idle.worker_requests, headroom=0) for worker in serving)
    return max(busy, lines.all) < idle.share * room


def _busy(worker: WorkerSnapshot, in_flight: int) -> int:
    """Requests as the worker reports, including other gateways', or as many as we have sent since."""
    return max(in_flight, int(worker.metrics.running) if worker.metrics else 0)


class Gate:
    """For all batches of a gateway; used on one event loop."""

    def __init__(self, pool: WorkerPool, idle: IdleCapacity) -> None:
        self._pool = pool
        self._idle = idle
        self._lines = 0
        self._batches = 0

    def admits(self, model: str, mine: int) -> bool:
        """Whether a batch with `mine` lines in flight may start one more now."""
        lines = RunningLines(all=self._lines, mine=mine, batches=self._batches)
        return may_begin(model, lines, self._idle, self._pool.snapshots, self._pool.in_flight)

    @contextmanager
    def batch(self) -> Iterator[None]:
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1

    def line_started(self) -> None:
        self._lines += 1

    def line_ended(self) -> None:
        self._lines -= 1
