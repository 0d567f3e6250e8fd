"""
The control plane: scrape each worker, watch its acceptance length, publish what was seen.

    scrape ─► vllm_metrics.parse ─► monitor.observe ─► pool + metrics

It fails by holding still: a worker that cannot be scraped keeps its mode, and is only left out of
routing after `MISSES_UNTIL_DOWN` looks in a row, because a busy worker answers late.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from appliance.errors import WorkerFailedError
from appliance.logs import Logger
from appliance.metrics import Metrics
from appliance.monitor import MonitorPolicy, Reason, SpeculationMode, Watch, observe
from appliance.serving.client import WorkerClient
from appliance.serving.pool import WorkerPool
from appliance.serving.vllm_metrics import WorkerMetrics, parse_metrics
from appliance.serving.worker import WorkerSnapshot
from appliance.settings import MonitorSettings

MISSES_UNTIL_DOWN = 3


class ControlLoop:
    """Looks at every worker of a pool once per interval."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        client: WorkerClient,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        settings: MonitorSettings,
    ) -> None:
        self._pool = pool
        self._client = client
        self._metrics = metrics
        self._logger = logger
        self._clock = clock
        self._settings = settings
        self._policy = MonitorPolicy(
            window_drafts=settings.window_drafts,
            min_drafts=settings.min_drafts,
            collapsed_below=settings.collapsed_below,
        )

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await self.tick()
            await asyncio.sleep(self._settings.interval_seconds)

    async def tick(self) -> None:
        """Look at all workers at once, so that a slow one delays no other."""
        await asyncio.gather(*(self.look(snapshot) for snapshot in self._pool.snapshots))

    async def look(self, before: WorkerSnapshot) -> WorkerSnapshot:
        """Scrape one worker, and store and publish what was seen."""
        timeout = self._settings.scrape_timeout_seconds
        try:
            metrics = parse_metrics(await self._client.metrics_page(before.worker, timeout))
            models, engine = before.models, before.engine
            if not before.healthy or not models:
                # A worker that was away may have come back as another version with another model.
                models = await self._client.models(before.worker, timeout)
                engine = await self._client.engine(before.worker, timeout)
        except WorkerFailedError:
            # The gateway may have reported the worker meanwhile: a failed look must not undo that.
            after = self._missed(self._pool.snapshot(before.worker.worker_id) or before)
        else:
            now = self._clock()
            after = replace(
                before,
                healthy=True,
                models=models,
                engine=engine,
                metrics=metrics,
                watch=self._watch(before.watch, metrics),
                tokens_per_second=_rate(before, metrics, now),
                seen_at=now,
                missed=0,
            )
        current = self._pool.snapshot(before.worker.worker_id)
        if current is None or current.worker is not before.worker:
            # The worker was replaced while it was being looked at: what was seen is of another one.
            return before
        self._pool.update(after)
        self._publish(before, after)
        return after

    def _missed(self, before: WorkerSnapshot) -> WorkerSnapshot:
        missed = before.missed + 1
        self._metrics.scrape_failures.labels(before.worker.worker_id).inc()
        return replace(
            before,
            healthy=before.healthy and missed < MISSES_UNTIL_DOWN,
            watch=observe(before.watch, None, self._policy),
            tokens_per_second=0.0,
            missed=missed,
        )

    def _watch(self, watch: Watch, metrics: WorkerMetrics) -> Watch:
        if metrics.speculation is None:
            return Watch(mode=SpeculationMode.TARGET_ONLY, reason=Reason.NOT_CONTROLLABLE)
        return observe(replace(watch, mode=SpeculationMode.SPECULATIVE), metrics.speculation, self._policy)

    def _publish(self, before: WorkerSnapshot, after: WorkerSnapshot) -> None:
        worker, metrics, watch = after.worker.worker_id, self._metrics, after.watch
        metrics.worker_up.labels(worker).set(after.healthy)
        metrics.worker_tokens_per_second.labels(worker).set(after.tokens_per_second)
        if after.metrics is not None:
            metrics.worker_running.labels(worker).set(after.metrics.running)
            metrics.worker_waiting.labels(worker).set(after.metrics.waiting)
            metrics.worker_kv_cache_usage.labels(worker).set(after.metrics.kv_cache_usage)
        for mode in SpeculationMode:
            metrics.speculation_mode.labels(worker, mode).set(watch.mode is mode)
        for reason in Reason:
            metrics.speculation_reason.labels(worker, reason).set(watch.reason is reason)
        window = watch.window
        metrics.window_drafts.labels(worker).set(window.drafts)
        if window.drafts:
            metrics.acceptance_length.labels(worker).set(window.acceptance_length)
            metrics.acceptance_rate.labels(worker).set(window.acceptance_rate)
            for position, rate in enumerate(window.acceptance_rate_per_position):
                metrics.acceptance_rate_per_position.labels(worker, str(position)).set(rate)
        if after.healthy != before.healthy:
            self._logger.info("worker_health_changed", worker=worker, state="up" if after.healthy else "down")
        if watch.reason is not before.watch.reason:
            self._logger.info(
                "speculation_reason_changed",
                worker=worker,
                mode=watch.mode,
                reason=watch.reason,
                acceptance_length=round(window.acceptance_length, 3),
            )


def _rate(before: WorkerSnapshot, metrics: WorkerMetrics, now: float) -> float:
    """Generated tokens per second since the last look; 0 after a restart."""
    if before.metrics is None or now <= before.seen_at:
        return 0.0
    tokens = metrics.generation_tokens_total - before.metrics.generation_tokens_total
    return max(0.0, tokens / (now - before.seen_at))
