"""
The control loop: poll each worker, decide what it does about speculation, apply the decision.

    scrape ─► parse_metrics, plugin's reading ─► monitor.decide (observes) ─► apply ─► pool, metrics, changes

Every gateway runs one and keeps its own pool fresh; only the one that holds the lease applies decisions.
The others follow what the workers report.  The monitor's memory of each worker is held here only; a
`WorkerSnapshot` carries the decision and figures.

It fails static: a worker that cannot be scraped keeps its mode (`serving.scraper`).  A defect while polling
one worker is logged and counted, and stops neither the loop nor the gateway.  If the loop itself is gone,
workers keep their table, and exploration ends by itself.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from appliance.control.changes import ChangeLog, SpeculationChange
from appliance.control.gauges import publish_steps, publish_worker
from appliance.control.hard_off import (
    HardOffPolicy,
    RestartHistory,
    due,
    forget,
    note_collapses,
    note_refusal,
    note_restart,
)
from appliance.control.override import Override, OverrideStore, override_for
from appliance.control.recycle import Recycler, RecycleResult
from appliance.control.view import WorkerView, view_of
from appliance.errors import ControlUnavailableError, WorkerFailedError
from appliance.gateway.cost.metering import NO_METERING, Metering
from appliance.infra.lease import Lease, require_lease
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import MonitorSettings
from appliance.monitor import decide
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient, SpeculationCommand
from appliance.serving.pool import WorkerPool
from appliance.serving.scraper import WorkerScraper
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.speculation.state import MonitorPolicy, MonitorState
from appliance.speculation.values import EngineReading, Reason, SpecDecodeCounters, SpeculationMode

HARD_OFF_RETRY_SECONDS = 6 * 3600.0  # from a hard-off to the restart that tries the draft again
OUTSIDE = "outside"
"""Epoch of counters from the metrics page, where a restart shows in counters that go backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlParts:
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
    """Polls every worker of a pool once per interval."""

    def __init__(
        self,
        parts: ControlParts,
        *,
        settings: MonitorSettings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`clock` gives monotonic seconds; `wall_clock` Unix time, for overrides from other machines."""
        self._parts = parts
        self._settings = settings
        self._clock = clock
        self._wall_clock = wall_clock
        self._policy = policy_of(settings)
        self._scraper = WorkerScraper(
            pool=parts.pool,
            client=parts.client,
            speculation=parts.speculation,
            timeout_seconds=settings.scrape_timeout_seconds,
            failures=parts.metrics.scrape_failures,
            clock=clock,
        )
        self._states: dict[WorkerId, tuple[Worker, MonitorState]] = {}
        self._is_acting = False
        self._overrides: tuple[Override, ...] = ()
        self._hard_off = HardOffPolicy(
            after_seconds=settings.hard_off_after_seconds, retry_seconds=HARD_OFF_RETRY_SECONDS
        )
        self._restarts = RestartHistory()

    async def run(self) -> None:
        try:
            while True:
                await self.tick()
                await asyncio.sleep(self._settings.interval_seconds)
        finally:
            await asyncio.shield(self._parts.recycler.close())
            await asyncio.shield(self._parts.lease.release())

    async def tick(self) -> None:
        """Workers are polled concurrently, so that a slow one delays no other."""
        await self._prepare()
        snapshots = self._parts.pool.snapshots
        results = await asyncio.gather(
            *(self.poll(snapshot) for snapshot in snapshots), return_exceptions=True
        )
        for snapshot, result in zip(snapshots, results, strict=True):
            if isinstance(result, Exception):
                self._parts.metrics.control_failures.inc()
                self._parts.logger.error(
                    "control_poll_failed",
                    worker=snapshot.worker.worker_id,
                    error=type(result).__name__,
                    exc_info=result,
                )
            elif isinstance(result, BaseException):
                raise result
        listed = {snapshot.worker.worker_id for snapshot in self._parts.pool.snapshots}
        self._states = {name: known for name, known in self._states.items() if name in listed}
        if self._is_acting:
            self._restart_if_due()

    async def poll(self, before: WorkerSnapshot) -> None:
        """The decision is applied only if this gateway holds the lease."""
        parts, worker_id = self._parts, before.worker.worker_id
        parts.costs.poll_started(worker_id)
        scraped = await self._scraper.scrape(before)
        current = parts.pool.snapshot(worker_id)
        if current is None or current.worker is not before.worker:
            # The worker was replaced meanwhile: the scrape is of its predecessor.
            return
        after = self._decide(scraped)
        parts.pool.update(after)
        parts.pool.set_avoided(worker_id, after.decision.avoid)
        self._publish(before, after)
        if self._is_acting:
            if before.metrics is not None or (after.reading is not None and after.reading.controllable):
                # Of a new worker that cannot be controlled, nothing has been decided.
                parts.changes.record(before, after)
            await self._apply(after)
        parts.costs.observe(after, acting=self._is_acting)

    def request_recycle(self, worker_id: WorkerId, *, with_draft: bool, note: str, actor: str) -> None:
        """Raises ControlRefusedError without the lease, or if the worker may not be recycled now."""
        require_lease(is_held=self._is_acting)
        reason = Reason.OPERATOR_OVERRIDE
        self._parts.recycler.begin(
            worker_id, with_draft=with_draft, reason=reason, actor=actor, note=note or None
        )
        # The operator's restart replaces any that was scheduled.
        self._restarts = forget(self._restarts, worker_id)

    def view(self, worker_id: WorkerId) -> WorkerView | None:
        snapshot = self._parts.pool.snapshot(worker_id)
        if snapshot is None:
            return None
        return view_of(snapshot, now=self._clock(), wall_now=self._wall_clock())

    def events(self, after: int) -> tuple[SpeculationChange, ...]:
        return self._parts.changes.since(after)

    @property
    def is_acting(self) -> bool:
        """Whether this loop holds the lease and applies decisions."""
        return self._is_acting

    async def _prepare(self) -> None:
        was_acting = self._is_acting
        self._is_acting = self._settings.control == "auto" and await self._parts.lease.hold()
        if self._is_acting is not was_acting:
            self._parts.logger.info("control_lease_changed", state="held" if self._is_acting else "lost")
        self._parts.metrics.control_acting.set(self._is_acting)
        if self._is_acting:
            # The overrides last read stay in force: a slow disk does not end one.
            with suppress(ControlUnavailableError):
                self._overrides = await self._parts.overrides.list()

    def _restart_if_due(self) -> None:
        """Begin the restart that has been due longest and may be done."""
        now, snapshots = self._clock(), self._parts.pool.snapshots
        self._restarts = note_collapses(self._restarts, snapshots, now)
        for restart in due(self._restarts, snapshots, self._hard_off, now):
            if self._parts.recycler.refusal(restart.worker_id) is None:
                task = self._parts.recycler.begin(
                    restart.worker_id, with_draft=restart.with_draft, reason=restart.reason
                )
                self._restarts = note_restart(self._restarts, restart, now)
                task.add_done_callback(partial(self._note_if_refused, restart.worker_id))
                return

    def _note_if_refused(self, worker_id: WorkerId, task: asyncio.Task[RecycleResult]) -> None:
        if not task.cancelled() and task.result() is RecycleResult.NOT_RESTARTED:
            self._restarts = note_refusal(self._restarts, worker_id, self._clock())

    def _decide(self, scraped: WorkerSnapshot) -> WorkerSnapshot:
        worker, metrics, now = scraped.worker, scraped.metrics, scraped.seen_at
        known = self._states.get(worker.worker_id)
        # Each start of a worker is another `Worker`, without a past.
        state = known[1] if known is not None and known[0] is worker else MonitorState(mode=worker.mode)
        if scraped.missed or metrics is None:
            state, decision = decide(state, None, self._policy, now)
        elif metrics.speculation is None:
            reason = worker.reason or Reason.OPERATOR_OVERRIDE
            state = MonitorState(mode=SpeculationMode.TARGET_ONLY, reason=reason, basis=reason)
            decision = state.decision
        else:
            override = override_for(self._overrides, worker.worker_id, self._wall_clock())
            state, decision = decide(
                state,
                _with_page_counters(scraped.reading, metrics.speculation),
                self._policy,
                now,
                acting=self._is_acting,
                override=override.mode if override is not None else None,
                draft_tokens=override.draft_tokens if override is not None else None,
            )
        self._states[worker.worker_id] = (worker, state)
        return replace(scraped, decision=decision, figures=state.figures)

    async def _apply(self, after: WorkerSnapshot) -> None:
        decision, reading = after.decision, after.reading
        if reading is None or not reading.controllable or not after.healthy or not decision.table:
            return
        commanded = (reading.table, reading.mode, reading.reason)
        if commanded == (decision.table, decision.mode, decision.basis) and not decision.starts_probe:
            return
        if decision.probe and not decision.starts_probe:
            return  # a table would end the probe in flight
        command = SpeculationCommand(
            table=decision.table, mode=decision.mode, reason=decision.basis, probe=decision.probe
        )
        try:
            await self._parts.speculation.apply(after.worker, command, self._settings.scrape_timeout_seconds)
        except WorkerFailedError as error:
            # The next poll finds that the worker does not follow the decision, and sends it again.
            self._parts.logger.warning(
                "decision_not_applied", worker=after.worker.worker_id, error=str(error)
            )

    def _publish(self, before: WorkerSnapshot, after: WorkerSnapshot) -> None:
        publish_worker(self._parts.metrics, after)
        publish_steps(self._parts.metrics, before, after)
        if after.healthy != before.healthy:
            self._parts.logger.info(
                "worker_health_changed",
                worker=after.worker.worker_id,
                state="up" if after.healthy else "down",
            )


def _with_page_counters(reading: EngineReading | None, drafting: SpecDecodeCounters) -> EngineReading | None:
    """The metrics page's counters count if the plugin cannot control the engine."""
    if reading is None or reading.controllable:
        return reading
    return replace(reading, epoch=reading.epoch or OUTSIDE, drafting=drafting)


def policy_of(settings: MonitorSettings) -> MonitorPolicy:
    return MonitorPolicy(
        min_drafts=settings.min_drafts,
        collapsed_below=settings.collapsed_below,
        exploration_share=settings.exploration_share,
    )
