"""It fails open, loses nothing it can still write, and stays small."""

import math
from dataclasses import replace
from datetime import date
from zoneinfo import ZoneInfo

import pytest
from prometheus_client import CollectorRegistry

from appliance.errors import CostUnavailableError
from appliance.gateway.cost.meter import CostMeter
from appliance.gateway.cost.rows import RecordingPeriod, begin_of
from appliance.infra.logs import configure_logs
from appliance.infra.metrics import Metrics
from appliance.infra.settings import CostSettings, LogSettings
from appliance.serving.usage import Usage
from appliance.serving.worker import Worker, WorkerId, WorkerSnapshot
from appliance.speculation.state import SpeculationFigures
from tests.unit.gateway.cost.readings import cell, costs, reading

ZONE = ZoneInfo("Asia/Kolkata")
MIDNIGHT = begin_of(date(2026, 11, 21), ZONE)
W = WorkerId("w")


class Store:
    """Rows in memory; may be unavailable."""

    def __init__(self) -> None:
        self.away, self.others, self.pruned = False, 0, []
        self.periods: list[RecordingPeriod] = []
        self.shares, self.workers = {}, {}

    def write(self, period, shares, workers) -> int:
        if self.away:
            raise CostUnavailableError("away")
        self.periods.append(period)
        self.shares |= shares
        self.workers |= workers
        return self.others

    def prune(self, before) -> None:
        self.pruned.append(before)


class Site:
    """A meter with clocks of its own."""

    def __init__(self, **prices: float) -> None:
        self.now, self.wall = 50.0, MIDNIGHT - 10.0
        self.store, self.metrics = Store(), Metrics(CollectorRegistry())
        self.meter = CostMeter(
            store=self.store,
            gateway="a",
            start="s1",
            settings=CostSettings(watts_idle=100, watts_busy=400, **prices),
            zone=ZONE,
            clock=lambda: self.now,
            wall_clock=lambda: self.wall,
            metrics=self.metrics,
            logger=configure_logs(LogSettings(level="error"), terminal=False),
        )

    def pass_(self, seconds: float) -> None:
        self.now, self.wall = self.now + seconds, self.wall + seconds

    def look(self, busy: float, **more) -> None:
        self.meter.poll_started(W)
        snapshot = WorkerSnapshot(worker=Worker(worker_id=W, url="http://w"), reading=reading(busy), **more)
        self.meter.observe(snapshot, acting=True)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@pytest.fixture
def site() -> Site:
    return Site()


async def test_a_second_of_two_tenants(site):
    """Rows, metrics and energy of one second, to the microsecond."""
    site.look(10.0)
    lines = [site.meter.begin(W, tenant, "m") for tenant in ("red", "blue")]
    site.pass_(1.0)
    site.look(10.8)
    for line in lines:
        site.meter.end(line)
    usage = Usage(prompt_tokens=7, completion_tokens=20, drafts=9, draft_tokens=27, accepted_tokens=11)
    site.meter.count(W, "red", "m", usage)
    await site.meter.flush()
    (red,) = (share for key, share in site.store.shares.items() if key.tenant == "red")
    assert (red.engine_us, red.millijoules, red.requests) == (400_000, 160_000, 1)
    assert (red.prompt_tokens, red.delivered_tokens, red.draft_tokens, red.accepted_tokens) == (7, 20, 27, 11)
    ((key, time),) = site.store.workers.items()
    assert key.slot == MIDNIGHT - 3600
    assert (time.observed_us, time.busy_us, time.millijoules) == (1_000_000, 800_000, 340_000)
    assert site.value("appliance_engine_seconds_total", tenant="red", model="m") == pytest.approx(0.4)
    assert site.value("appliance_energy_joules_total", tenant="red", model="m") == pytest.approx(160)
    assert site.value("appliance_worker_busy_seconds_total", worker="w") == pytest.approx(0.8)
    assert site.value("appliance_cost_written_timestamp_seconds") == site.wall


async def test_a_new_day_begins_new_rows(site):
    """At local midnight, which is 18:30 UTC."""
    site.look(0.0)
    site.pass_(9.0)
    site.look(1.0)
    site.pass_(2.0)
    site.look(3.0)
    await site.meter.flush()
    assert {key.slot: time.busy_us for key, time in site.store.workers.items()} == {
        MIDNIGHT - 3600: 1_000_000,
        MIDNIGHT: 2_000_000,
    }


async def test_unavailable_database_does_not_lose_counts(site):
    """Nor those of earlier slots; a clock set back does not reopen one."""
    site.look(0.0)
    site.pass_(5.0)
    site.look(1.0)
    site.store.away = True
    await site.meter.flush()
    site.pass_(7200.0)
    site.look(2.0)
    await site.meter.flush()
    site.store.away = False
    await site.meter.flush()
    assert sum(time.busy_us for time in site.store.workers.values()) == 2_000_000
    assert len(site.store.workers) == 2
    site.wall -= 7200.0
    site.pass_(1.0)
    site.look(2.5)
    await site.meter.flush()
    assert sum(time.busy_us for time in site.store.workers.values()) == 2_500_000
    assert site.store.periods[-1].until >= site.store.periods[-2].until


async def test_rows_are_replaced_not_added(site):
    site.look(0.0)
    for busy in (1.0, 2.0, 3.0):
        site.pass_(1.0)
        site.look(busy)
        await site.meter.flush()
    (time,) = site.store.workers.values()
    assert time.busy_us == 3_000_000


async def test_failed_poll_is_covered_by_the_next(site):
    """The plugin did not answer once: the next interval covers both, measured."""
    site.look(0.0)
    site.pass_(1.0)
    site.meter.observe(WorkerSnapshot(worker=Worker(worker_id=W, url="http://w"), reading=None), acting=True)
    site.look(0.7, missed=1)
    site.pass_(1.0)
    site.look(1.5)
    await site.meter.flush()
    (time,) = site.store.workers.values()
    assert (time.observed_us, time.busy_us, time.estimated_us) == (2_000_000, 1_500_000, 0)


async def test_close_is_recorded_and_old_rows_are_pruned(site):
    await site.meter.flush()
    await site.meter.flush(closed=True)
    assert [period.closed for period in site.store.periods] == [False, True]
    assert site.store.pruned == [int(site.wall - 800 * 86400)]


async def test_accounts_of_removed_workers_are_dropped(site):
    site.look(0.0)
    site.meter.poll_started(WorkerId("never seen"))
    site.pass_(4000.0)
    await site.meter.flush()
    assert site.meter._accounts == {}


async def test_saved_time_is_exported_with_its_bounds(site):
    """A third of the engine time; low, mean and high are in order."""
    drafted = {(1, 3): cell(steps=100, seconds=2.0, requests=100, tokens=300)}
    figures = SpeculationFigures(costs=costs((1, {0: 1.0, 3: 1.5}), noise=1.58))
    snapshot = WorkerSnapshot(
        worker=Worker(worker_id=W, url="http://w"), reading=reading(0.0), figures=figures
    )
    site.meter.observe(snapshot, acting=True)
    site.pass_(3.0)
    site.meter.observe(replace(snapshot, reading=reading(2.0, steps=drafted)), acting=True)
    saved = site.value("appliance_speculation_saved_engine_seconds", worker="w")
    low, high = (
        site.value("appliance_speculation_saved_bound_engine_seconds", worker="w", bound=bound)
        for bound in ("low", "high")
    )
    assert saved == pytest.approx(2.0, rel=0.01)
    assert low == pytest.approx(1.29, rel=0.02)
    assert high == pytest.approx(2.87, rel=0.02)


async def test_unmeasured_k_is_estimated_from_other_batch_sizes(site):
    """With wide bounds, instead of leaving it out; one that was measured nowhere waits."""
    known = costs((2, {0: 1.0, 1: 1.5, 3: 2.0}), (4, {0: 1.0, 3: 1.0}))
    snapshot = WorkerSnapshot(
        worker=Worker(worker_id=W, url="http://w"),
        reading=reading(0.0),
        figures=SpeculationFigures(costs=known),
    )
    site.meter.observe(snapshot, acting=True)
    site.pass_(3.0)
    steps = {
        (4, 3): cell(steps=100, seconds=1.0, requests=400, tokens=800),
        (4, 1): cell(steps=100, seconds=1.5, requests=400, tokens=600),
        (4, 2): cell(steps=100, seconds=1.0, requests=400, tokens=700),
    }
    site.meter.observe(replace(snapshot, reading=reading(4.0, steps=steps)), acting=True)
    await site.meter.flush()
    (time,) = site.store.workers.values()
    assert (time.draft_us, time.draft_tokens) == (2_500_000, 1400)
    guess = known.ratio(4, 1, 0, site.now)
    doubt = 1.96 * math.sqrt(guess.variance)
    assert doubt > 0.5
    own, guessed = 2_000_000, 2_250_000 * math.exp(-guess.mean)
    assert time.target_only_us == pytest.approx(own + guessed, rel=0.001)
    assert time.target_only_high_us == pytest.approx(own + guessed * math.exp(doubt), rel=0.01)
    assert time.target_only_low_us == pytest.approx(own + guessed * math.exp(-doubt), rel=0.01)


def test_prices_of_the_settings_are_exported():
    """Those that are set: per hour, and per kWh at the meter."""
    prices = {"worker_price": 35_064.0, "people_per_month": 7305.0, "power_price_per_kwh": 0.3, "pue": 1.5}
    site = Site(**prices)
    values = [site.value("appliance_cost_price", of=of) for of in ("worker_hour", "site_hour", "kwh")]
    assert values == pytest.approx([1.0, 10.0, 0.45])
    assert Site().value("appliance_cost_price", of="kwh") is None
