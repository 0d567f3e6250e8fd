"""
How many requests a worker may hold: as many as it batches, and a few more.

More than it batches, so that its batch stays full while the next request is on its way.  Only a few, because
those wait inside the worker, which knows neither tenants nor priorities.

The worker reports its batch size through our plugin.  But a worker with long contexts runs out of KV cache
long before, and a worker that several gateways share must be divided among them.  Both show in the worker's
own queue, so its length at the last scrape corrects the number.
"""

from appliance.serving.worker import WorkerSnapshot

DEFAULT_BATCH = 256
"""vLLM's default `max_num_seqs` on most hardware, for a worker that reports none."""


def max_slots(snapshot: WorkerSnapshot, *, fixed: int | None, headroom: int) -> int:
    """
    Maximum requests of a worker, whatever its queue.

    Args:
        snapshot: the worker.
        fixed: the number in the settings, if any.
        headroom: requests to hold beyond its batch.
    """
    if fixed is not None:
        return fixed
    reading = snapshot.reading
    batch = reading.largest_batch if reading is not None and reading.controllable else DEFAULT_BATCH
    return batch + headroom


def adjusted_slots(slots: int, *, most: int, headroom: int, ours: int, running: int, waiting: int) -> int:
    """
    Slots of a worker after a scrape.

    A queue longer than the headroom lowers the slots to what the worker runs and the headroom, of which this
    gateway gets its part of all requests.  An empty queue raises them step by step.

    Args:
        slots: as they were.
        most: the maximum.
        headroom: requests that may wait inside the worker.
        ours: requests of this gateway in flight at the worker.
        running: requests in its batch.
        waiting: requests in its queue.

    Returns:
        At least 1, so that the gateway keeps observing the worker.
    """
    if waiting > headroom:
        total = running + waiting
        fair = -(-(running + headroom) * min(ours, total) // total)
        return max(1, min(most, fair))
    if not waiting:
        return min(most, slots + max(1, headroom))
    return min(most, slots)
