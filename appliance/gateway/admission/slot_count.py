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


def max_slots(snapshot: WorkerSnapshot, *, fixed: int | None, headroom: int) -> int:
    """`fixed` is the number in the settings, if any; `headroom` the requests to hold beyond its batch."""
    if fixed is not None:
        return fixed
    reading = snapshot.reading
    batch = reading.largest_batch if reading is not None and reading.controllable else DEFAULT_BATCH
    return batch + headroom


def adjusted_slots(slots: int, *, most: int, headroom: int, ours: int, running: int, waiting: int) -> int:
    """
    Slots after a scrape: at least 1, so that the gateway keeps observing the worker.

    A queue longer than the headroom lowers the slots to what the worker runs and the headroom, of which this
    gateway gets its part (`ours`) of all requests.  An empty queue raises them step by step.
    """
    if waiting > headroom:
        total = running + waiting
        fair = -(-(running + headroom) * min(ours, total) // total)
        return max(1, min(most, fair))
    if not waiting:
        return min(most, slots + max(1, headroom))
    return min(most, slots)
