"""
The last minutes of every worker's acceptance, for the chart.

In memory only: Prometheus keeps what should last.  A crash loses the chart and nothing else.  Fails open: a
defect here is logged, once until it is gone, and leaves a hole in the chart.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from appliance.control.loop import ControlLoop
from appliance.infra.logs import Logger
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import SpeculationMode, bucket_of

SAMPLE_SECONDS = 2.0
KEPT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One worker at one moment."""

    at: float
    """Clock reading, in seconds."""
    length: float | None
    """Mean tokens per draft over the monitor's window; None while it has no drafts."""
    break_even: float | None
    """What it has to be for speculation to pay at the present batch size; None where not measured."""
    mode: SpeculationMode


class History:
    """Looks at all workers now and then, and remembers."""

    def __init__(
        self, *, pool: WorkerPool, control: ControlLoop, clock: Callable[[], float], logger: Logger
    ) -> None:
        self._pool, self._control, self._clock, self._logger = pool, control, clock, logger
        self._is_failing = False
        self.samples: dict[str, deque[Sample]] = {}
        """By worker, oldest first."""

    async def run(self) -> None:
        """Look until cancelled, whatever goes wrong with a look."""
        while True:
            try:
                self.look()
            except Exception as defect:
                # A chart is no reason for the gateway to end.
                if not self._is_failing:
                    self._logger.exception("console_history_failed", error=type(defect).__name__)
                self._is_failing = True
            else:
                self._is_failing = False
            await asyncio.sleep(SAMPLE_SECONDS)

    def look(self) -> None:
        """Take one sample of each worker, and forget those that left the pool long ago."""
        now = self._clock()
        # First, so that nothing grows while samples fail.
        self._forget_before(now - KEPT_SECONDS)
        for snapshot in self._pool.snapshots:
            sample = self._sample(snapshot, now)
            self.samples.setdefault(snapshot.worker.worker_id, deque()).append(sample)

    def _forget_before(self, time: float) -> None:
        for worker, kept in list(self.samples.items()):
            while kept and kept[0].at < time:
                kept.popleft()
            if not kept:
                del self.samples[worker]

    def _sample(self, snapshot: WorkerSnapshot, now: float) -> Sample:
        window = snapshot.figures.window
        return Sample(
            at=now,
            length=window.acceptance_length if window.drafts else None,
            break_even=self.break_even(snapshot),
            mode=snapshot.decision.mode,
        )

    def break_even(self, snapshot: WorkerSnapshot) -> float | None:
        """The break-even at the batch size the worker has now, or the nearest it was measured at."""
        view = self._control.view(snapshot.worker.worker_id)
        known = {bucket.bucket: bucket.break_even for bucket in view.buckets} if view else {}
        measured = {name: value for name, value in known.items() if value is not None}
        if not measured:
            return None
        wanted = bucket_of(max(1, snapshot.reading.batch if snapshot.reading else 1))
        return measured[min(measured, key=lambda name: (abs(name - wanted), name))]
