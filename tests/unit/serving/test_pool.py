"""Which workers may be chosen, and how busy they are."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from appliance.serving.pool import WorkerPool
from appliance.serving.worker import Admission, ServedModel, Worker, WorkerId
from appliance.speculation.values import SpeculationMode

A = Worker(worker_id=WorkerId("a"), url="http://127.0.0.1:1", mode=SpeculationMode.TARGET_ONLY)
B = Worker(worker_id=WorkerId("b"), url="http://127.0.0.1:2")
DEMO = ServedModel(name="demo", max_model_len=2048, created=1)


def looked_at(pool: WorkerPool, worker: Worker) -> None:
    """Store a successful scrape of a worker."""
    pool.update(replace(pool.snapshot(worker.worker_id), healthy=True, models=(DEMO,)))


@contextmanager
def occupied(pool: WorkerPool, worker_id: WorkerId) -> Iterator[None]:
    """Have one request in flight with a worker."""
    pool.begin(worker_id)
    try:
        yield
    finally:
        pool.end(worker_id)


@pytest.fixture
def pool() -> WorkerPool:
    """A pool of two workers that were not scraped."""
    pool = WorkerPool()
    pool.add(A)
    pool.add(B)
    return pool


def test_new_worker_is_unhealthy_until_it_is_scraped(pool: WorkerPool):
    assert not pool.any_healthy()
    looked_at(pool, A)
    assert pool.any_healthy()


def test_a_new_worker_is_in_the_mode_it_was_started_in(pool: WorkerPool):
    """The first snapshot has the mode and reason of the start."""
    assert pool.snapshot(A.worker_id).decision.mode is SpeculationMode.TARGET_ONLY


def test_workers_keep_the_order_they_came_in(pool: WorkerPool):
    """Status pages rely on a stable order."""
    looked_at(pool, A)
    assert [seen.worker.worker_id for seen in pool.snapshots] == ["a", "b"]


def test_unreachable_worker_is_excluded_until_its_next_scrape(pool: WorkerPool):
    """The gateway reports it, the control loop readmits it."""
    looked_at(pool, A)
    pool.report_unreachable(A.worker_id)
    assert not pool.any_healthy()
    looked_at(pool, A)
    assert pool.any_healthy()


def test_reporting_an_unknown_worker_is_ignored(pool: WorkerPool):
    """It may have left meanwhile."""
    pool.report_unreachable(WorkerId("gone"))
    assert pool.snapshot(WorkerId("gone")) is None


def test_scrape_of_a_worker_that_left_is_dropped():
    """A late scrape does not add a worker."""
    pool, other = WorkerPool(), WorkerPool()
    other.add(A)
    pool.update(other.snapshot(A.worker_id))
    assert pool.snapshots == ()


def test_a_worker_that_is_down_still_has_its_models(pool: WorkerPool):
    """A restart must not turn 503 into 404."""
    looked_at(pool, A)
    pool.report_unreachable(A.worker_id)
    assert pool.models() == {"demo": DEMO}


def test_requests_are_counted_for_as_long_as_they_last(pool: WorkerPool):
    """Also requests that fail."""
    with occupied(pool, A.worker_id), occupied(pool, A.worker_id):
        assert pool.in_flight == {"a": 2, "b": 0}
    with pytest.raises(KeyError), occupied(pool, A.worker_id):
        raise KeyError
    assert pool.in_flight == {"a": 0, "b": 0}


def test_replaced_worker_keeps_its_requests_in_flight(pool: WorkerPool):
    """The same id at another address is unhealthy at first; running requests stay counted."""
    looked_at(pool, A)
    with occupied(pool, A.worker_id):
        pool.add(replace(A, url="http://127.0.0.1:3"))
        assert not pool.snapshot(A.worker_id).healthy
        assert pool.in_flight[A.worker_id] == 1
    assert pool.in_flight[A.worker_id] == 0


def test_pool_is_not_ready_without_an_admitted_worker(pool: WorkerPool):
    """Readiness means that a request would be accepted, not that a process lives."""
    looked_at(pool, A)
    for admission in (Admission.DRAINING, Admission.CANARY):
        pool.set_admission(A.worker_id, admission)
        assert not pool.any_healthy()
    pool.set_admission(A.worker_id, Admission.ADMITTED)
    assert pool.any_healthy()


async def test_admitting_a_worker_ends_the_wait_for_health(pool: WorkerPool):
    """It was healthy before it was admitted."""
    pool.set_admission(A.worker_id, Admission.CANARY)
    looked_at(pool, A)
    waiting = asyncio.ensure_future(pool.wait_healthy())
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.set_admission(A.worker_id, Admission.ADMITTED)
    async with asyncio.timeout(1):
        await waiting


def test_scrape_changes_neither_admission_nor_avoidance(pool: WorkerPool):
    """Not even a scrape that began before the change."""
    before = pool.snapshot(A.worker_id)
    pool.set_admission(A.worker_id, Admission.DRAINING)
    pool.set_avoided(A.worker_id, True)
    for seen in (before, replace(before, healthy=True, admission=Admission.CANARY)):
        pool.update(seen)
        after = pool.snapshot(A.worker_id)
        assert (after.admission, after.avoided) == (Admission.DRAINING, True)
        assert after.healthy is seen.healthy
    pool.set_avoided(A.worker_id, False)
    assert pool.snapshot(A.worker_id).avoided is False


def test_restart_does_not_admit_a_worker(pool: WorkerPool):
    """A restarted worker stays excluded until it is admitted."""
    pool.set_admission(A.worker_id, Admission.CANARY)
    pool.set_avoided(A.worker_id, True)
    pool.add(replace(A, url="http://127.0.0.1:3"))
    looked_at(pool, A)
    assert pool.snapshot(A.worker_id).worker.url == "http://127.0.0.1:3"
    assert pool.snapshot(A.worker_id).avoided
    assert not pool.any_healthy()


async def test_draining_ends_with_the_last_request(pool: WorkerPool):
    """No new requests are sent, running ones finish, and other workers continue."""
    looked_at(pool, A)
    looked_at(pool, B)
    with occupied(pool, B.worker_id):
        with occupied(pool, A.worker_id):
            with occupied(pool, A.worker_id):
                waiting = asyncio.ensure_future(pool.drain(A.worker_id))
                await asyncio.sleep(0)
                assert pool.snapshot(A.worker_id).admission is Admission.DRAINING
                assert pool.any_healthy()
            await asyncio.sleep(0)
            assert not waiting.done()
        async with asyncio.timeout(1):
            await waiting
    async with asyncio.timeout(1):
        await pool.drain(A.worker_id)


async def test_wait_for_draining_can_be_cancelled(pool: WorkerPool):
    """The worker keeps draining, and the next wait ends as well."""
    with occupied(pool, A.worker_id):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pool.drain(A.worker_id)
        assert pool.snapshot(A.worker_id).admission is Admission.DRAINING
        again = asyncio.ensure_future(pool.drain(A.worker_id))
        await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await again


async def test_unknown_worker_is_drained_at_once():
    """It may have left meanwhile; none of the setters brings it back."""
    pool = WorkerPool()
    async with asyncio.timeout(1):
        await pool.drain(A.worker_id)
    pool.set_admission(A.worker_id, Admission.ADMITTED)
    pool.set_avoided(A.worker_id, True)
    assert pool.snapshots == ()


def test_drained_worker_receives_nothing_until_undrained(pool: WorkerPool):
    """Its health and restarts do not change that."""
    looked_at(pool, A)
    pool.set_drained(A.worker_id, True)
    assert not pool.any_healthy()
    looked_at(pool, A)
    pool.add(replace(A, url="http://127.0.0.1:3"))
    looked_at(pool, A)
    pool.set_admission(A.worker_id, Admission.ADMITTED)
    assert not pool.any_healthy()
    pool.set_drained(A.worker_id, False)
    assert pool.any_healthy()


def test_leaving_worker_finishes_its_requests():
    """Then the pool forgets it and calls `on_gone`."""
    gone: list[WorkerId] = []
    pool = WorkerPool(on_gone=gone.append)
    pool.add(A)
    looked_at(pool, A)
    with occupied(pool, A.worker_id):
        with occupied(pool, A.worker_id):
            pool.leave(A.worker_id)
            assert not pool.any_healthy()
        assert (pool.models(), gone) == ({"demo": DEMO}, [])
    assert (pool.snapshots, pool.in_flight, gone) == ((), {}, ["a"])


def test_an_idle_worker_leaves_at_once(pool: WorkerPool):
    """Leaving twice is not an error."""
    pool.leave(A.worker_id)
    pool.leave(A.worker_id)
    assert [seen.worker for seen in pool.snapshots] == [B]


def test_a_worker_that_is_listed_again_stays(pool: WorkerPool):
    """If it was not forgotten yet; a scrape meanwhile does not cancel `leave`."""
    looked_at(pool, A)
    with occupied(pool, A.worker_id):
        pool.leave(A.worker_id)
        looked_at(pool, A)
        assert not pool.any_healthy()
        pool.stay(A.worker_id)
        assert pool.any_healthy()
    assert pool.snapshot(A.worker_id) is not None


def test_every_gain_of_capacity_is_reported(pool: WorkerPool):
    """A request ended; a worker was added, admitted, or became healthy."""
    told: list[str] = []
    pool.on_capacity(lambda: told.append(now))
    changes = {
        "seen": lambda: looked_at(pool, A),
        "ended": lambda: (pool.begin(A.worker_id), pool.end(A.worker_id)),
        "admitted": lambda: pool.set_admission(A.worker_id, Admission.ADMITTED),
        "undrained": lambda: pool.set_drained(A.worker_id, False),
        "stays": lambda: pool.stay(A.worker_id),
        "not avoided": lambda: pool.set_avoided(A.worker_id, False),
    }
    for now, change in changes.items():  # noqa: B007 - `told` reads it
        change()
    assert set(told) == set(changes)


def test_every_change_of_a_snapshot_changes_the_version(pool: WorkerPool):
    """Values derived from old snapshots are recomputed."""
    changes = (
        lambda: pool.add(A),
        lambda: looked_at(pool, A),
        lambda: pool.report_unreachable(A.worker_id),
        lambda: pool.set_admission(A.worker_id, Admission.CANARY),
        lambda: pool.set_avoided(A.worker_id, True),
        lambda: pool.set_drained(A.worker_id, True),
        lambda: pool.leave(A.worker_id),
    )
    for change in changes:
        before = pool.version
        change()
        assert pool.version > before
