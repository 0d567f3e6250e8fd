"""
The pure choice of a worker: filter, score, pick.
"""

from collections.abc import Iterable, Mapping

from appliance.errors import NoWorkerAvailableError
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot

WAITING_WEIGHT = 4.0
CACHE_WEIGHT = 16.0
TARGET_ONLY_PENALTY = 2.0
"""
Running requests by which a worker without a draft must be less loaded before it is preferred.

Few enough that it helps out as soon as the others are busier than it: the more requests a batch
holds, the less a draft gains.
"""


def pick(
    model: str,
    snapshots: Iterable[WorkerSnapshot],
    in_flight: Mapping[WorkerId, int],
    *,
    tried: frozenset[WorkerId] = frozenset(),
    may_speculate: bool = True,
) -> Worker:
    """
    Return the worker a request for `model` should go to.

    Workers that are to be avoided are taken only where there is no other.

    Args:
        model: name the client asked for.
        snapshots: every worker known.
        in_flight: requests this gateway has with each worker now; fresher than any scrape.
        tried: workers that already failed this request.
        may_speculate: False leaves only workers that were started without a draft.

    Raises:
        NoWorkerAvailableError: none takes requests, serves the model, is untried and may be used.
    """
    candidates = [
        snapshot
        for snapshot in snapshots
        if snapshot.takes_requests
        and snapshot.serves(model)
        and snapshot.worker.worker_id not in tried
        and (may_speculate or not snapshot.speculates)
    ]
    if not candidates:
        kind = "worker" if may_speculate else "target-only worker"
        message = f"No {kind} is ready for {model} right now. Try again in a moment."
        raise NoWorkerAvailableError(message)
    best = min(candidates, key=lambda snapshot: (snapshot.avoided, *score(snapshot, in_flight)))
    return best.worker


def score(snapshot: WorkerSnapshot, in_flight: Mapping[WorkerId, int]) -> tuple[float, str]:
    """
    Load of a worker, lower is better; equal loads are ordered by name.

    A waiting request weighs more than a running one, because it tells of a full batch, and a full
    KV cache more than either, because it makes the worker preempt what it already computed.  A
    worker without a draft counts as busier than it is, by `TARGET_ONLY_PENALTY`.
    """
    worker_id = snapshot.worker.worker_id
    load = float(in_flight.get(worker_id, 0))
    if snapshot.metrics is not None:
        load = max(load, snapshot.metrics.running)
        load += WAITING_WEIGHT * snapshot.metrics.waiting + CACHE_WEIGHT * snapshot.metrics.kv_cache_usage
    return (load if snapshot.speculates else load + TARGET_ONLY_PENALTY, worker_id)


def has_target_only(model: str, snapshots: Iterable[WorkerSnapshot]) -> bool:
    """
    Whether some worker answers for `model` without a draft, or will once it is back.

    One that was started without a draft and has not said yet what it serves may be the one.
    """
    return any(
        not snapshot.speculates and (snapshot.serves(model) or not snapshot.models) for snapshot in snapshots
    )
