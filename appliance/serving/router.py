"""
The pure choice of a worker: filter, score, pick.
"""

from collections.abc import Iterable, Mapping

from appliance.errors import NoWorkerAvailableError
from appliance.serving.worker import WorkerId, WorkerSnapshot

WAITING_WEIGHT = 4.0
CACHE_WEIGHT = 16.0
TARGET_ONLY_PENALTY = 2.0
"""
Running requests by which a worker without a draft must be less loaded before it is preferred.

Few enough that it helps out as soon as the others are busier than it: the more requests a batch
holds, the less a draft gains.
"""
AFFINITY_CHARACTERS = 2048
"""
Characters of a conversation that a worker has seen before, about 500 tokens it need not compute again,
that weigh as much as one running request.  With at most 16,384 characters remembered, a worker is never
preferred that has more than eight requests more than another.
"""
NOBODY: Mapping[WorkerId, int] = {}


def candidates(
    model: str, snapshots: Iterable[WorkerSnapshot], *, may_speculate: bool = True
) -> tuple[WorkerSnapshot, ...]:
    """
    The workers that may answer a request for `model`, whatever their load.

    Args:
        model: name the client asked for.
        snapshots: every worker known.
        may_speculate: False leaves only workers that were started without a draft.
    """
    return tuple(
        snapshot
        for snapshot in snapshots
        if snapshot.takes_requests and snapshot.serves(model) and (may_speculate or not snapshot.speculates)
    )


def lightest(
    able: Iterable[WorkerSnapshot],
    in_flight: Mapping[WorkerId, int],
    *,
    seen_by: Mapping[WorkerId, int] = NOBODY,
) -> WorkerSnapshot | None:
    """
    The one of several workers that a request should go to; None for none.

    Workers that are to be avoided are taken only where there is no other.

    Args:
        able: those that may answer it.
        in_flight: requests this gateway has with each worker now; fresher than any scrape.
        seen_by: characters of the request's beginning that workers have seen before.
    """
    best, lowest = None, (True, 0.0, "")
    for snapshot in able:
        load, worker_id = score(snapshot, in_flight)
        load -= seen_by.get(snapshot.worker.worker_id, 0) / AFFINITY_CHARACTERS
        mine = (snapshot.avoided, load, worker_id)
        if best is None or mine < lowest:
            best, lowest = snapshot, mine
    return best


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


def no_worker(model: str, *, may_speculate: bool) -> NoWorkerAvailableError:
    """The error where no worker may answer a request."""
    kind = "worker" if may_speculate else "target-only worker"
    return NoWorkerAvailableError(f"No {kind} is ready for {model} right now. Try again in a moment.")


def has_target_only(model: str, snapshots: Iterable[WorkerSnapshot]) -> bool:
    """
    Whether some worker answers for `model` without a draft, or will once it is back.

    One that was started without a draft and has not said yet what it serves may be the one.
    """
    return any(
        not snapshot.speculates and (snapshot.serves(model) or not snapshot.models) for snapshot in snapshots
    )
