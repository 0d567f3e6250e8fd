"""
The acceptance of every worker over the last minutes, for the chart.

In memory only: Prometheus keeps long histories, and a crash loses only the chart.  Fails open: a defect here
is logged once until it is gone, and leaves a gap in the chart.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.control.loop import ControlLoop
from appliance.infra.logs import Logger
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import bucket_of

SAMPLE_SECONDS = 2.0
KEPT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSample:
    at: float
    """In seconds."""
    length: float | None
    """Over the monitor's window; None without drafts."""
    break_even: float | None
    """At the current batch size; None if not measured."""


class History:
    def __init__(
        self, *, pool: WorkerPool, control: ControlLoop, clock: Callable[[], float], logger: Logger
    ) -> None:
        self._pool, self._control, self._clock, self._logger = pool, control, clock, logger
        self._is_failing = False
        self.samples: dict[str, deque[AcceptanceSample]] = {}
        """By worker, oldest first."""

    async def run(self) -> None:
        """Sample until cancelled, also after defects."""
        while True:
            try:
                self.sample()
            except Exception as defect:
                # A defect of the chart must not end the gateway.
                if not self._is_failing:
                    self._logger.exception("console_history_failed", error=type(defect).__name__)
                self._is_failing = True
            else:
                self._is_failing = False
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self) -> None:
        now = self._clock()
        # First, so that memory stays bounded if sampling fails.
        self._drop_before(now - KEPT_SECONDS)
        for snapshot in self._pool.snapshots:
            window = snapshot.figures.window
            sample = AcceptanceSample(
                at=now,
                length=window.acceptance_length if window.drafts else None,
                break_even=self.break_even(snapshot),
            )
            self.samples.setdefault(snapshot.worker.worker_id, deque()).append(sample)

    def _drop_before(self, time: float) -> None:
        for worker, kept in list(self.samples.items()):
            while kept and kept[0].at < time:
                kept.popleft()
            if not kept:
                del self.samples[worker]

    def break_even(self, snapshot: WorkerSnapshot) -> float | None:
        """The break-even at the worker's current batch size, or at the nearest measured one."""
        view = self._control.view(snapshot.worker.worker_id)
        return at_batch(snapshot, {each.bucket: each.break_even for each in view.buckets} if view else {})


def at_batch(snapshot: WorkerSnapshot, by_bucket: Mapping[int, float | None]) -> float | None:
    """The figure at the worker's current batch size, or at the nearest measured one."""
    measured = {bucket: value for bucket, value in by_bucket.items() if value is not None}
    if not measured:
        return None
    wanted = bucket_of(max(1, snapshot.reading.batch if snapshot.reading else 1))
    return measured[min(measured, key=lambda bucket: (abs(bucket - wanted), bucket))]
