"""
Scrape a worker: its metrics page, its plugin, and its models if it was away.

Fails static: a failed scrape changes nothing but the count of misses, and only several in a row make a
worker unhealthy, because a busy worker answers late.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from prometheus_client import Counter

from appliance.errors import WorkerFailedError, WorkerLeavingError
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import Worker, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics, parse_metrics
from appliance.speculation.values import EngineReading

MISSES_UNTIL_DOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerScraper:
    pool: WorkerPool
    client: WorkerClient
    speculation: SpeculationClient
    timeout_seconds: float
    failures: Counter
    """By worker."""
    clock: Callable[[], float]
    """Monotonic seconds."""

    async def scrape(self, before: WorkerSnapshot) -> WorkerSnapshot:
        """The snapshot after one scrape; `missed` is above 0 if it failed, or the worker starts or stops."""
        if before.starting:
            # Requests served before its supervisor reports it would precede its start in the audit log.
            return _left(before)
        timeout = self.timeout_seconds
        try:
            page, reading = await asyncio.gather(
                self.client.metrics_page(before.worker, timeout), self._read(before.worker)
            )
            if reading is not None and reading.is_leaving:
                return _left(self.pool.snapshot(before.worker.worker_id) or before)
            metrics = parse_metrics(page)
            models, engine = before.models, before.engine
            if not before.healthy or not models:
                # A worker that was away may have come back as another version with another model.
                models = await self.client.models(before.worker, timeout)
                engine = await self.client.engine(before.worker, timeout)
        except WorkerLeavingError:
            return _left(self.pool.snapshot(before.worker.worker_id) or before)
        except WorkerFailedError:
            self.failures.labels(before.worker.worker_id).inc()
            # The gateway may have reported the worker meanwhile: a failed poll must not undo that.
            return _missed(self.pool.snapshot(before.worker.worker_id) or before)
        now = self.clock()
        return replace(
            before,
            healthy=True,
            models=models,
            engine=engine,
            metrics=metrics,
            reading=reading,
            tokens_per_second=_rate(before, metrics, now),
            seen_at=now,
            missed=0,
        )

    async def _read(self, worker: Worker) -> EngineReading | None:
        """None if the plugin did not answer, which does not make the worker unhealthy."""
        try:
            return await self.speculation.read(worker, self.timeout_seconds)
        except WorkerFailedError:
            return None


def _left(before: WorkerSnapshot) -> WorkerSnapshot:
    """A worker that is starting or stopping receives no requests; its figures stay as they were."""
    return replace(before, healthy=False, tokens_per_second=0.0, missed=before.missed + 1)


def _missed(before: WorkerSnapshot) -> WorkerSnapshot:
    missed = before.missed + 1
    healthy = before.healthy and missed < MISSES_UNTIL_DOWN
    return replace(before, healthy=healthy, tokens_per_second=0.0, missed=missed)


def _rate(before: WorkerSnapshot, metrics: WorkerMetrics, now: float) -> float:
    """Generated tokens per second since the last scrape; 0 after a restart."""
    if before.metrics is None or now <= before.seen_at:
        return 0.0
    tokens = metrics.generation_tokens_total - before.metrics.generation_tokens_total
    return max(0.0, tokens / (now - before.seen_at))
