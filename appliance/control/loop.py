"""
The control plane: look at each worker, decide what it does about speculation, make it so.

    scrape ─► vllm_metrics.parse, plugin's reading ─► monitor.decide ─► steer ─► pool, metrics, changes

Every gateway runs one and keeps its own pool fresh; only the one that holds the lease steers.  The
others show what the workers say they were told.

It fails by holding still: a worker that cannot be scraped keeps its mode, and is only left out of
routing after `MISSES_UNTIL_DOWN` looks in a row, because a busy worker answers late.  A defect while
looking at one worker is logged and counted, and stops neither the loop nor the gateway.  If the loop
itself is gone, workers keep the table they have, and a probe ends by itself.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from appliance.control.changes import ChangeLog, SpeculationChange
from appliance.control.hard_off import (
    HardOffPolicy,
    Ledger,
    due,
    forget,
    note_collapses,
    note_refusal,
    note_restart,
)
from appliance.control.override import Override, OverrideStore, override_for
from appliance.control.recycle import Recycler, RecycleResult
from appliance.control.view import WorkerView, view_of
from appliance.errors import ControlRefusedError, ControlUnavailableError, WorkerFailedError
from appliance.gateway.cost.metering import NO_METERING, Metering
from appliance.infra.lease import Lease
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import MonitorSettings
from appliance.monitor import decide
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient, SpeculationCommand
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import WorkerMetrics, parse_metrics
from appliance.speculation.state import MonitorPolicy, Watch, follow, observe
from appliance.speculation.values import EngineReading, Reason, SpeculationMode

MISSES_UNTIL_DOWN = 3
HARD_OFF_RETRY_SECONDS = 6 * 3600.0
"""From a hard-off to the restart that tries the draft again."""
OUTSIDE = "outside"
"""Epoch of counters read off the metrics page: they tell of restarts by going backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlParts:
    """What the loop works with, built by the composition root."""

    pool: WorkerPool
    client: WorkerClient
    speculation: SpeculationClient
    lease: Lease
    overrides: OverrideStore
    recycler: Recycler
    changes: ChangeLog
    metrics: Metrics
    logger: Logger
    costs: Metering = NO_METERING


class ControlLoop:
    """Looks at every worker of a pool once per interval."""

    def __init__(
        self,
        parts: ControlParts,
        *,
        settings: MonitorSettings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """
        Prepare; nothing runs before `run`.

        Args:
            parts: what to look at and to steer with.
            settings: the `monitor` section.
            clock: monotonic seconds, for windows and waits.
            wall_clock: Unix time, for overrides, which other machines wrote.
        """
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._policy = policy_of(settings)
        self._wanted_probes: set[WorkerId] = set()
        self._is_acting = False
        self._overrides: tuple[Override, ...] = ()
        self._hard_off = HardOffPolicy(
            after_seconds=settings.hard_off_after_seconds, retry_seconds=HARD_OFF_RETRY_SECONDS
        )
        self._ledger = Ledger()

    async def run(self) -> None:
        """Tick until cancelled."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(self._settings.interval_seconds)
        finally:
            await asyncio.shield(self._parts.recycler.close())
            await asyncio.shield(self._parts.lease.release())

    async def tick(self) -> None:
        """Look at all workers at once, so that a slow one delays no other."""
        await self._prepare()
        snapshots = self._parts.pool.snapshots
        results = await asyncio.gather(
            *(self.look(snapshot) for snapshot in snapshots), return_exceptions=True
        )
        for snapshot, result in zip(snapshots, results, strict=True):
            if isinstance(result, Exception):
                self._parts.metrics.control_failures.inc()
                self._parts.logger.error(
                    "control_look_failed",
                    worker=snapshot.worker.worker_id,
                    error=type(result).__name__,
                    exc_info=result,
                )
            elif isinstance(result, BaseException):
                raise result
        if self._is_acting:
            self._restart_when_due()

    async def look(self, before: WorkerSnapshot) -> WorkerSnapshot:
        """Look at one worker, decide, steer it, and publish what was seen."""
        self._parts.costs.looking(before.worker.worker_id)
        after = await self._seen(before)
        current = self._parts.pool.snapshot(before.worker.worker_id)
        if current is None or current.worker is not before.worker:
            # The worker was replaced while it was being looked at: what was seen is of another one.
            return before
        self._parts.pool.update(after)
        self._parts.pool.set_avoided(after.worker.worker_id, after.watch.avoid)
        self._publish(before, after)
        if self._is_acting:
            if before.metrics is not None or (after.reading is not None and after.reading.controllable):
                # Of a worker seen for the first time, and not steered, nothing has been decided.
                self._parts.changes.record(before, after)
            await self._steer(after)
        self._parts.costs.saw(after, acting=self._is_acting)
        return after

    def request_probe(self, worker_id: WorkerId) -> None:
        """
        Have a worker whose speculation is stopped probed at the next tick, whatever its back-off.

        Raises:
            ControlRefusedError: another process holds the lease, or none may steer.
        """
        self._insist_on_acting()
        self._wanted_probes.add(worker_id)

    def request_recycle(self, worker_id: WorkerId, *, with_draft: bool, note: str, actor: str) -> None:
        """
        Begin to recycle a worker in the background.

        Raises:
            ControlRefusedError: this process does not steer, or the worker may not be recycled now.
        """
        self._insist_on_acting()
        reason = Reason.OPERATOR_OVERRIDE
        self._parts.recycler.begin(
            worker_id, with_draft=with_draft, reason=reason, actor=actor, note=note or None
        )
        # Whatever control had in mind with this worker, an operator has decided now.
        self._ledger = forget(self._ledger, worker_id)

    def view(self, worker_id: WorkerId) -> WorkerView | None:
        """What is known of a worker, for people; None where it is not in the pool."""
        snapshot = self._parts.pool.snapshot(worker_id)
        if snapshot is None:
            return None
        return view_of(snapshot, now=self._clock(), wall_now=self._wall_clock())

    def events(self, after: int) -> tuple[SpeculationChange, ...]:
        """The changes after a sequence number."""
        return self._parts.changes.since(after)

    @property
    def is_acting(self) -> bool:
        """Whether this loop holds the lease and steers."""
        return self._is_acting

    def _insist_on_acting(self) -> None:
        if not self._is_acting:
            message = "This gateway does not steer; ask the one that does, or see monitor.control."
            raise ControlRefusedError(message)

    async def _prepare(self) -> None:
        was_acting = self._is_acting
        self._is_acting = self._settings.control == "auto" and await self._parts.lease.hold()
        if self._is_acting is not was_acting:
            self._parts.logger.info("control_lease_changed", state="held" if self._is_acting else "lost")
        self._parts.metrics.control_acting.set(self._is_acting)
        if self._is_acting:
            # What was read last stays in force: an order is not taken back because a disk is slow.
            with suppress(ControlUnavailableError):
                self._overrides = await self._parts.overrides.list()

    def _restart_when_due(self) -> None:
        """Begin the restart that has been due longest and may be done."""
        now, snapshots = self._clock(), self._parts.pool.snapshots
        self._ledger = note_collapses(self._ledger, snapshots, now)
        for restart in due(self._ledger, snapshots, self._hard_off, now):
            if self._parts.recycler.refusal(restart.worker_id) is None:
                task = self._parts.recycler.begin(
                    restart.worker_id, with_draft=restart.with_draft, reason=restart.reason
                )
                self._ledger = note_restart(self._ledger, restart, now)
                task.add_done_callback(partial(self._saw_restart_end, restart.worker_id))
                return

    def _saw_restart_end(self, worker_id: WorkerId, task: asyncio.Task[RecycleResult]) -> None:
        if not task.cancelled() and task.result() is RecycleResult.NOT_RESTARTED:
            self._ledger = note_refusal(self._ledger, worker_id, self._clock())

    async def _seen(self, before: WorkerSnapshot) -> WorkerSnapshot:
        timeout = self._settings.scrape_timeout_seconds
        parts = self._parts
        try:
            page, reading = await asyncio.gather(
                parts.client.metrics_page(before.worker, timeout), self._read(before.worker)
            )
            metrics = parse_metrics(page)
            models, engine = before.models, before.engine
            if not before.healthy or not models:
                # A worker that was away may have come back as another version with another model.
                models = await parts.client.models(before.worker, timeout)
                engine = await parts.client.engine(before.worker, timeout)
        except WorkerFailedError:
            # The gateway may have reported the worker meanwhile: a failed look must not undo that.
            return self._missed(parts.pool.snapshot(before.worker.worker_id) or before)
        now = self._clock()
        return replace(
            before,
            healthy=True,
            models=models,
            engine=engine,
            metrics=metrics,
            reading=reading,
            watch=self._watch(before, metrics, reading, now),
            tokens_per_second=_rate(before, metrics, now),
            seen_at=now,
            missed=0,
        )

    async def _read(self, worker: Worker) -> EngineReading | None:
        """The plugin's reading; None where it did not answer, which says nothing about the worker."""
        try:
            return await self._parts.speculation.read(worker, self._settings.scrape_timeout_seconds)
        except WorkerFailedError:
            return None

    def _missed(self, before: WorkerSnapshot) -> WorkerSnapshot:
        missed = before.missed + 1
        self._parts.metrics.scrape_failures.labels(before.worker.worker_id).inc()
        return replace(
            before,
            healthy=before.healthy and missed < MISSES_UNTIL_DOWN,
            watch=observe(before.watch, None, self._policy),
            tokens_per_second=0.0,
            missed=missed,
        )

    def _watch(
        self, before: WorkerSnapshot, metrics: WorkerMetrics, reading: EngineReading | None, now: float
    ) -> Watch:
        worker, watch = before.worker, before.watch
        if metrics.speculation is None:
            reason = worker.reason or Reason.OPERATOR_OVERRIDE
            return Watch(mode=SpeculationMode.TARGET_ONLY, reason=reason, basis=reason)
        if reading is not None and not reading.controllable:
            # Without the plugin there is still what the metrics page counts.
            epoch = reading.epoch or OUTSIDE
            reading = replace(reading, epoch=epoch, drafting=metrics.speculation)
        if not self._is_acting:
            return follow(watch, reading, self._policy)
        if worker.worker_id in self._wanted_probes:
            self._wanted_probes.discard(worker.worker_id)
            watch = replace(watch, next_probe_at=now)
        override = override_for(self._overrides, worker.worker_id, self._wall_clock())
        if override is None:
            return decide(watch, reading, self._policy, now)
        return decide(
            watch, reading, self._policy, now, override=override.mode, draft_tokens=override.draft_tokens
        )

    async def _steer(self, after: WorkerSnapshot) -> None:
        """Tell the worker what was decided, unless it does so already."""
        watch, reading = after.watch, after.reading
        if reading is None or not reading.controllable or not after.healthy or not watch.table:
            return
        told = (reading.table, reading.mode, reading.reason) == (watch.table, watch.mode, watch.basis)
        if told and not watch.starts_probe:
            return
        if watch.probe is not None and not watch.starts_probe:
            return  # a table would end the probe
        steer = SpeculationCommand(
            table=watch.table,
            mode=watch.mode,
            reason=watch.basis,
            probe=watch.probe.parts if watch.probe is not None else (),
        )
        try:
            await self._parts.speculation.steer(after.worker, steer, self._settings.scrape_timeout_seconds)
        except WorkerFailedError as error:
            # The next look finds the worker doing something else than decided, and tells it again.
            self._parts.logger.warning("worker_not_steered", worker=after.worker.worker_id, error=str(error))

    def _publish(self, before: WorkerSnapshot, after: WorkerSnapshot) -> None:
        publish_worker(self._parts.metrics, after)
        publish_steps(self._parts.metrics, before, after)
        if after.healthy != before.healthy:
            self._parts.logger.info(
                "worker_health_changed",
                worker=after.worker.worker_id,
                state="up" if after.healthy else "down",
            )


def policy_of(settings: MonitorSettings) -> MonitorPolicy:
    """The monitor's policy as the settings have it."""
    return MonitorPolicy(
        window_drafts=settings.window_drafts,
        min_drafts=settings.min_drafts,
        collapsed_below=settings.collapsed_below,
        margin=settings.margin,
        cooldown_seconds=settings.cooldown_seconds,
        probe_share=settings.probe_share,
        probe_seconds=settings.probe_seconds,
        probe_longest_seconds=settings.probe_longest_seconds,
    )


def publish_worker(metrics: Metrics, after: WorkerSnapshot) -> None:
    """Set every metric of one worker to what was last seen of it."""
    worker, watch = after.worker.worker_id, after.watch
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
    metrics.speculation_collapsed.labels(worker).set(watch.verdict is Reason.COLLAPSED)
    metrics.speculation_controllable.labels(worker).set(
        after.reading is not None and after.reading.controllable
    )
    metrics.speculation_probes_failed.labels(worker).set(watch.probes_failed)
    metrics.speculation_probed_steps.labels(worker).set(watch.probed_steps)
    for bucket, entry in watch.buckets.items():
        metrics.speculation_draft_tokens.labels(worker, str(bucket)).set(watch.draft_tokens(bucket))
        break_even = entry.costs.break_even(max(watch.choices))
        if break_even is not None:
            metrics.break_even_length.labels(worker, str(bucket)).set(break_even)
    window = watch.window
    metrics.window_drafts.labels(worker).set(window.drafts)
    if window.drafts:
        metrics.acceptance_length.labels(worker).set(window.acceptance_length)
        metrics.acceptance_rate.labels(worker).set(window.acceptance_rate)
        for position, rate in enumerate(window.acceptance_rate_per_position):
            metrics.acceptance_rate_per_position.labels(worker, str(position)).set(rate)


def publish_steps(metrics: Metrics, before: WorkerSnapshot, after: WorkerSnapshot) -> None:
    """
    Export what each kind of decode step took and gave, as the worker itself counts it.

    An engine that started anew begins with what it has counted since.  Where a worker said nothing, what it
    said last stands.
    """
    worker, earlier, reading = after.worker.worker_id, before.reading, after.reading
    if reading is None:
        return
    known = earlier.steps if earlier is not None and earlier.epoch == reading.epoch else None
    if known is None:
        metrics.forget_steps(worker)
    for kind, cell in reading.steps.items():
        # Few kinds of steps happen between two looks; the others stay as they are.
        if known is None or known.get(kind) != cell:
            batch, draft_tokens = map(str, kind)
            metrics.worker_step_tokens.labels(worker, draft_tokens, batch).copy(cell.tokens)
            metrics.worker_step_seconds.labels(worker, draft_tokens, batch).copy(cell.seconds)


def _rate(before: WorkerSnapshot, metrics: WorkerMetrics, now: float) -> float:
    """Generated tokens per second since the last look; 0 after a restart."""
    if before.metrics is None or now <= before.seen_at:
        return 0.0
    tokens = metrics.generation_tokens_total - before.metrics.generation_tokens_total
    return max(0.0, tokens / (now - before.seen_at))
