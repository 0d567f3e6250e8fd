"""Rows are written once, also after retries."""

from contextlib import closing

import pytest

from appliance.errors import CostUnavailableError
from appliance.gateway.cost.rows import RecordingPeriod, ShareKey, TenantUsage, WorkerKey, WorkerTime
from appliance.gateway.cost.store import CostStore
from appliance.infra.schema import upgrade_database

SHARE, TIME = ShareKey(7200, "w", "m", "red"), WorkerKey(7200, "w")


def period(
    start: str = "s1", gateway: str = "a", until: int = 7500, *, closed: bool = False
) -> RecordingPeriod:
    return RecordingPeriod(
        start=start, gateway=gateway, began_at=7000, until=until, flush_seconds=30, closed=closed
    )


@pytest.fixture
def store(url):
    upgrade_database(url)
    with closing(CostStore(url)) as opened:
        yield opened


def test_row_written_twice_counts_once(store):
    """A commit in doubt is retried, together with newer rows."""
    store.write(period(), {SHARE: TenantUsage(engine_us=5)}, {TIME: WorkerTime(busy_us=5)})
    store.write(
        period(until=7530), {SHARE: TenantUsage(engine_us=9, requests=2)}, {TIME: WorkerTime(busy_us=9)}
    )
    found = store.read(0, 10_000)
    assert found.periods == (period(until=7530),)
    assert found.shares == (("s1", SHARE, TenantUsage(engine_us=9, requests=2)),)
    assert found.workers == (("s1", TIME, WorkerTime(busy_us=9)),)


def test_each_start_has_its_own_rows(store):
    store.write(period(), {SHARE: TenantUsage(engine_us=5)}, {})
    store.write(period("s2"), {SHARE: TenantUsage(engine_us=7)}, {})
    assert sorted(share.engine_us for _start, _key, share in store.read(0, 10_000).shares) == [5, 7]


def test_gateways_know_of_each_other(store):
    """Of running gateways, not of ended or silent ones, nor of their own former starts."""
    assert store.write(period(), {}, {}) == 0
    assert store.write(period("s2", "b"), {}, {}) == 1
    assert store.write(period("s3", "a"), {}, {}) == 1
    store.write(period("s2", "b", closed=True), {}, {})
    assert store.write(period("s3", "a"), {}, {}) == 0
    store.write(period("s4", "c"), {}, {})
    assert store.write(period("s3", "a", until=7500 + 91), {}, {}) == 0


def test_a_report_reads_its_slots_only(store):
    later = ShareKey(10_800, "w", "m", "red")
    store.write(period(), {SHARE: TenantUsage(engine_us=5), later: TenantUsage(engine_us=6)}, {})
    assert [key for _start, key, _share in store.read(7200, 10_800).shares] == [SHARE]


def test_many_rows_are_written_in_one_go(store):
    rows = {ShareKey(7200, "w", "m", f"t{n}"): TenantUsage(requests=1) for n in range(1500)}
    store.write(period(), rows, {})
    assert len(store.read(0, 10_000).shares) == len(rows)


def test_old_rows_are_deleted(store):
    store.write(period(), {SHARE: TenantUsage(engine_us=5)}, {TIME: WorkerTime(busy_us=5)})
    store.prune(7200)
    assert len(store.read(0, 10_000).shares) == 1
    store.prune(7600)
    assert store.read(0, 10_000) == ((), (), ())


def test_a_database_without_tables_is_an_error_of_ours(tmp_path):
    with (
        closing(CostStore(f"sqlite:///{tmp_path / 'none.db'}")) as opened,
        pytest.raises(CostUnavailableError, match="no such table"),
    ):
        opened.read(0, 1)
