"""
Meters engine time, energy and tokens while a gateway runs, and writes them at least once a minute.

A request costs a few additions here.  It fails open: no request waits for the database or fails because of
it; rows stay in memory until they can be written.  A crash loses unwritten rows; the report shows the gap.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Self
from zoneinfo import ZoneInfo

from appliance.errors import CostUnavailableError
from appliance.gateway.cost.account import Interval, Power, WorkerAccount, WorkerSample
from appliance.gateway.cost.presence import ActiveRequests
from appliance.gateway.cost.prices import HOURS_PER_MONTH, capital_per_hour
from appliance.gateway.cost.rows import (
    SLOT_SECONDS,
    RecordingPeriod,
    ShareKey,
    UsageLedger,
    WorkerKey,
    slot_of,
)
from appliance.gateway.cost.store import CostStore
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import CostSettings
from appliance.serving.usage import Usage
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.costs import CostModel
from appliance.speculation.goodput import Estimate

MICRO, MILLI = 1e6, 1e3
DAY = 86400.0
Clock = Callable[[], float]


class CostMeter:
    """
    Meter of one gateway, owned by one event loop; see `opened`.

    `start` names this start of the gateway and is never used again; `zone` is that of the slots' hours;
    `clock` is the control loop's, monotonic; `wall_clock` is Unix time.
    """

    def __init__(
        self,
        *,
        store: CostStore,
        gateway: str,
        start: str,
        settings: CostSettings,
        zone: ZoneInfo,
        clock: Clock,
        wall_clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._store, self._settings, self._zone = store, settings, zone
        self._clock, self._wall_clock = clock, wall_clock
        self._metrics, self._logger = metrics, logger
        self._power = Power(idle=settings.watts_idle, busy=settings.watts_busy, host=settings.watts_host)
        self._accounts: dict[WorkerId, WorkerAccount] = {}
        self._ledger = UsageLedger()
        now = int(wall_clock())
        self._period = RecordingPeriod(
            start=start,
            gateway=gateway,
            began_at=now,
            until=now,
            flush_seconds=round(settings.flush_seconds),
            closed=False,
        )
        self._slot = slot_of(now, zone)
        self._alone = True
        self._failure: str | None = None
        self._pruned_at = float("-inf")
        # Two concurrent writes could replace newer sums by older ones.
        self._writing = asyncio.Lock()
        for of, price in _prices(settings).items():
            metrics.cost_price.labels(of).set(price)

    def begin(self, worker_id: WorkerId, tenant: str, model: str) -> ActiveRequests:
        return self._account(worker_id).presence.begin(tenant, model, self._clock())

    def end(self, group: ActiveRequests) -> None:
        group.presence.end(group, self._clock())

    def count(self, worker_id: WorkerId, tenant: str, model: str, usage: Usage) -> None:
        row = self._ledger.share(ShareKey(self._current_slot(), worker_id, model, tenant))
        row.requests += 1
        row.prompt_tokens += usage.prompt_tokens
        row.delivered_tokens += usage.completion_tokens
        row.draft_tokens += usage.draft_tokens or 0
        row.accepted_tokens += usage.accepted_tokens or 0

    def poll_started(self, worker_id: WorkerId) -> None:
        self._account(worker_id).presence.reset_peak()

    def observe(self, snapshot: WorkerSnapshot, *, acting: bool) -> None:
        reading, metrics = snapshot.reading, snapshot.metrics
        if reading is None or snapshot.missed:
            return  # the next successful poll covers this time as well
        now = self._clock()
        sample = WorkerSample(
            at=now,
            reading=reading,
            requests=metrics.running + metrics.waiting if metrics is not None else 0,
            costs=_costs(snapshot.figures.costs, now) if acting else None,
        )
        worker_id = snapshot.worker.worker_id
        interval = self._account(worker_id).observe(sample, alone=self._alone)
        if interval is not None:
            self._record(worker_id, interval)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """Write a last time when the block ends, and close the store; `run` must run meanwhile."""
        try:
            # At once, so that a crash within the first minute is a gap in reports.
            await self.flush()
            yield self
        finally:
            await self.flush(closed=True)
            self._store.close()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._settings.flush_seconds)
            await self.flush()

    async def flush(self, *, closed: bool = False) -> None:
        """Write changed rows; rows that cannot be written are kept."""
        async with self._writing:
            now = self._wall_clock()
            shares, workers = self._ledger.take_changed()
            period = replace(self._period, until=max(self._period.until, int(now)), closed=closed)
            try:
                others = await asyncio.to_thread(self._store.write, period, shares, workers)
                if now - self._pruned_at >= DAY:
                    oldest = int(now - self._settings.retention_days * DAY)
                    await asyncio.to_thread(self._store.prune, oldest)
                    self._pruned_at = now
            except CostUnavailableError as error:
                self._ledger.roll_back(shares, workers)
                self._fail(str(error))
                return
            except BaseException:
                self._ledger.roll_back(shares, workers)
                raise
            self._period, self._alone = period, not others
            self._ledger.drop_before(self._current_slot())
            self._drop_gone()
            self._metrics.cost_written_time.set(now)
            if self._failure is not None:
                self._failure = None
                self._logger.info("cost_written")

    def _fail(self, failure: str) -> None:
        if self._failure is None:
            self._logger.warning("cost_not_written", error=failure)
        self._failure = failure

    def _account(self, worker_id: WorkerId) -> WorkerAccount:
        account = self._accounts.get(worker_id)
        if account is None:
            account = self._accounts[worker_id] = WorkerAccount(self._power)
        return account

    def _drop_gone(self) -> None:
        """Those not observed for an hour: addresses change."""
        before = self._clock() - SLOT_SECONDS
        for worker_id in [name for name, account in self._accounts.items() if account.is_left_since(before)]:
            del self._accounts[worker_id]

    def _current_slot(self) -> int:
        """A clock that is set back does not reopen an earlier slot."""
        now = self._wall_clock()
        if now >= self._slot + SLOT_SECONDS:
            self._slot = slot_of(now, self._zone)
        return self._slot

    def _record(self, worker_id: WorkerId, interval: Interval) -> None:
        slot, time = self._current_slot(), interval.time
        self._ledger.add_time(WorkerKey(slot, worker_id), time)
        self._metrics.worker_busy_seconds.labels(worker_id).inc(time.busy_us / MICRO)
        self._metrics.worker_observed_seconds.labels(worker_id).inc(time.observed_us / MICRO)
        self._metrics.worker_energy_joules.labels(worker_id).inc(time.millijoules / MILLI)
        self._metrics.worker_unattributed_seconds.labels(worker_id).inc(interval.unattributed_us / MICRO)
        saved = (time.target_only_us - time.draft_us) / MICRO
        self._metrics.speculation_saved_seconds.labels(worker_id).inc(saved)
        for bound, target_only_us in (("low", time.target_only_low_us), ("high", time.target_only_high_us)):
            saved = (target_only_us - time.draft_us) / MICRO
            self._metrics.speculation_saved_bound.labels(worker_id, bound).inc(saved)
        for (tenant, model), (engine_us, millijoules) in interval.shares.items():
            row = self._ledger.share(ShareKey(slot, worker_id, model, tenant))
            row.engine_us += engine_us
            row.millijoules += millijoules
            self._metrics.engine_seconds.labels(tenant, model).inc(engine_us / MICRO)
            self._metrics.energy_joules.labels(tenant, model).inc(millijoules / MILLI)


def _prices(settings: CostSettings) -> dict[str, float]:
    people, energy = settings.people_per_month, settings.power_price_per_kwh
    prices = {
        "worker_hour": capital_per_hour(settings),
        "site_hour": None if people is None else people / HOURS_PER_MONTH,
        "kwh": None if energy is None else energy * settings.pue,
    }
    return {of: price for of, price in prices.items() if price is not None}


def _costs(costs: CostModel, now: float) -> dict[tuple[int, int], Estimate]:
    """
    Of all steps with drafts, unless their K was measured nowhere.

    Under changing load different K may be measured at different batch sizes.  Without an estimate from
    another batch size such steps would stay uncompared.
    """
    measured = {k for by_k in costs.seconds_per_token.values() for k in by_k}
    return {(bucket, k): costs.ratio(bucket, k, 0, now) for bucket, k in costs.kinds if k in measured}
