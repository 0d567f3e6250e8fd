"""
Lets lines of batches begin, in the capacity that `idle` finds: one for all batches of a gateway.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from appliance.gateway.batch.idle import Idle, Lines, may_begin
from appliance.serving.pool import WorkerPool


class Gate:
    """Counts what is under way; used on one event loop."""

    def __init__(self, pool: WorkerPool, idle: Idle) -> None:
        self._pool = pool
        self._idle = idle
        self._lines = 0
        self._batches = 0

    def lets_in(self, model: str, mine: int) -> bool:
        """Whether a batch with so many lines under way may begin one more now."""
        lines = Lines(all=self._lines, mine=mine, batches=self._batches)
        return may_begin(model, lines, self._idle, self._pool.snapshots, self._pool.in_flight)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Count one batch as being run."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1

    def began(self) -> None:
        """Count one line as under way."""
        self._lines += 1

    def ended(self) -> None:
        """Count it no more."""
        self._lines -= 1
