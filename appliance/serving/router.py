"""The pure choice of a worker: filter, score, pick."""

from collections.abc import Iterable, Mapping

from appliance.errors import NoWorkerAvailableError
from appliance.serving.worker import WorkerId, WorkerSnapshot

WAITING_WEIGHT = 4.0
CACHE_WEIGHT = 16.0
TARGET_ONLY_PENALTY = 2.0
"""Running requests by which a worker without a draft must be less loaded to be preferred.  Small, so that it
helps as soon as the others are busier: the larger the batch, the smaller the gain of a draft."""
AFFINITY_CHARACTERS = 2048
"""Characters of a known conversation prefix, about 500 tokens that need no prefill, that weigh as much as one
running request.  With at most 16,384 characters remembered, a worker is never preferred that has more than
eight requests more than another."""
NO_AFFINITY: Mapping[WorkerId, int] = {}


def candidates(
    model: str, snapshots: Iterable[WorkerSnapshot], *, may_speculate: bool = True
) -> tuple[WorkerSnapshot, ...]:
    """Workers that may answer, whatever their load; without `may_speculate` only those without a draft."""
    return tuple(
        snapshot
        for snapshot in snapshots
        if snapshot.takes_requests and snapshot.serves(model) and (may_speculate or not snapshot.speculates)
    )


def lightest(
    able: Iterable[WorkerSnapshot],
    in_flight: Mapping[WorkerId, int],
    *,
    seen_by: Mapping[WorkerId, int] = NO_AFFINITY,
) -> WorkerSnapshot | None:
    """
    The worker that a request should go to; avoided ones only if there is no other.

    `in_flight` counts this gateway's requests and is fresher than any scrape; `seen_by` is how many
    characters of the request's prefix a worker has processed.
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
    Load of a worker and its name as a tie-break; lower is better.

    A waiting request weighs more than a running one, because the batch is full, and a full KV cache more than
    either, because the worker then preempts requests it has already computed.
    """
    worker_id = snapshot.worker.worker_id
    load = float(in_flight.get(worker_id, 0))
    if snapshot.metrics is not None:
        load = max(load, snapshot.metrics.running)
        load += WAITING_WEIGHT * snapshot.metrics.waiting + CACHE_WEIGHT * snapshot.metrics.kv_cache_usage
    return (load if snapshot.speculates else load + TARGET_ONLY_PENALTY, worker_id)


def no_worker(model: str, *, may_speculate: bool) -> NoWorkerAvailableError:
    kind = "worker" if may_speculate else "target-only worker"
    return NoWorkerAvailableError(f"No {kind} is ready for {model} right now. Try again in a moment.")


def has_target_only(model: str, snapshots: Iterable[WorkerSnapshot]) -> bool:
    """Whether some worker serves `model` without a draft, or may: one that has not listed its models yet."""
    return any(
        not snapshot.speculates and (snapshot.serves(model) or not snapshot.models) for snapshot in snapshots
    )
