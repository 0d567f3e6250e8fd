"""
The pure choice of a worker: filter, score, pick.
"""

from collections.abc import Iterable, Mapping

from appliance.errors import NoWorkerAvailableError
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot


def pick(
    model: str,
    snapshots: Iterable[WorkerSnapshot],
    in_flight: Mapping[WorkerId, int],
    *,
    tried: frozenset[WorkerId] = frozenset(),
) -> Worker:
    """
    Return the worker a request for `model` should go to.

    Args:
        model: name the client asked for.
        snapshots: every worker known.
        in_flight: requests this gateway has with each worker now; fresher than any scrape.
        tried: workers that already failed this request.

    Raises:
        NoWorkerAvailableError: none is healthy, serves the model and is untried.
    """
    candidates = [
        snapshot
        for snapshot in snapshots
        if snapshot.healthy and snapshot.serves(model) and snapshot.worker.worker_id not in tried
    ]
    if not candidates:
        message = f"No worker is ready for {model} right now. Try again in a moment."
        raise NoWorkerAvailableError(message)
    return min(candidates, key=lambda snapshot: score(snapshot, in_flight)).worker


def score(snapshot: WorkerSnapshot, in_flight: Mapping[WorkerId, int]) -> tuple[float, str]:
    """
    Load of a worker, lower is better; equal loads are ordered by name.

    A waiting request weighs more than a running one, because it tells of a full batch, and a full
    KV cache more than either, because it makes the worker preempt what it already computed.
    """
    worker_id = snapshot.worker.worker_id
    own = in_flight.get(worker_id, 0)
    if snapshot.metrics is None:
        return (float(own), worker_id)
    running = max(own, snapshot.metrics.running)
    return (running + 4.0 * snapshot.metrics.waiting + 16.0 * snapshot.metrics.kv_cache_usage, worker_id)
