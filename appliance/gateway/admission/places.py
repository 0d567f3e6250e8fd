"""
How many requests a worker should hold: as many as it batches, and a few more.

More than it batches, so that a place in the batch never stays empty while the next request is on its way.
Only a few, because those wait inside the worker, which knows nothing of tenants and priorities.

How many it batches it says itself, where our plugin runs in it; but a worker with long contexts runs out
of KV cache long before, and one that several gateways share belongs to none of them alone.  Both show in
the worker's own queue.  So its length, as the last look found it, corrects the number.
"""

from appliance.serving.worker import WorkerSnapshot

UNKNOWN_BATCH = 256
"""vLLM's own `max_num_seqs` on most hardware, for a worker that does not say."""


def most_places(snapshot: WorkerSnapshot, *, fixed: int | None, headroom: int) -> int:
    """
    Most requests a worker may hold, whatever its queue says.

    Args:
        snapshot: the worker.
        fixed: what the settings say, if anything.
        headroom: requests to hold beyond its batch.
    """
    if fixed is not None:
        return fixed
    reading = snapshot.reading
    batch = reading.largest_batch if reading is not None and reading.controllable else UNKNOWN_BATCH
    return batch + headroom


def corrected_places(places: int, *, most: int, headroom: int, ours: int, running: int, waiting: int) -> int:
    """
    Places of a worker after another look at it.

    A queue longer than the headroom takes the places down to what the worker runs and the headroom,
    of which this gateway gets the part that it has of all requests.  An empty queue gives some back.

    Args:
        places: as they were.
        most: what they may come to.
        headroom: requests that may wait inside the worker.
        ours: requests this gateway had with it then.
        running: requests in its batch.
        waiting: requests in its queue.

    Returns:
        At least 1, so that there is always something to learn from.
    """
    if waiting > headroom:
        total = running + waiting
        fair = -(-(running + headroom) * min(ours, total) // total)
        return max(1, min(most, fair))
    if not waiting:
        return min(most, places + max(1, headroom))
    return min(most, places)
