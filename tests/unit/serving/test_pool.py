"""Promises of `appliance.serving.pool`: who may be chosen, and how busy they are."""

from dataclasses import replace

import pytest

from appliance.monitor import SpeculationMode
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import ServedModel, Worker, WorkerId

A = Worker(worker_id=WorkerId("a"), url="http://127.0.0.1:1", mode=SpeculationMode.TARGET_ONLY)
B = Worker(worker_id=WorkerId("b"), url="http://127.0.0.1:2")
DEMO = ServedModel(name="demo", max_model_len=2048, created=1)


def looked_at(pool: WorkerPool, worker: Worker) -> None:
    """Store a good look at a worker."""
    pool.update(replace(pool.snapshot(worker.worker_id), healthy=True, models=(DEMO,)))


@pytest.fixture
def pool() -> WorkerPool:
    """A pool of two workers that nobody has looked at."""
    pool = WorkerPool()
    pool.add(A)
    pool.add(B)
    return pool


def test_a_new_worker_is_unhealthy_until_it_is_looked_at(pool: WorkerPool):
    """Nothing is sent to a worker on trust."""
    assert not pool.any_healthy()
    looked_at(pool, A)
    assert pool.any_healthy()


def test_a_new_worker_is_in_the_mode_it_was_started_in(pool: WorkerPool):
    """The first snapshot knows what the start said."""
    assert pool.snapshot(A.worker_id).watch.mode is SpeculationMode.TARGET_ONLY


def test_workers_keep_the_order_they_came_in(pool: WorkerPool):
    """Status pages do not jump."""
    looked_at(pool, A)
    assert [seen.worker.worker_id for seen in pool.snapshots] == ["a", "b"]


def test_an_unreachable_worker_is_left_out_until_it_is_seen_again(pool: WorkerPool):
    """The gateway reports, the control loop brings back."""
    looked_at(pool, A)
    pool.report_unreachable(A.worker_id)
    assert not pool.any_healthy()
    looked_at(pool, A)
    assert pool.any_healthy()


def test_reporting_a_worker_nobody_knows_is_no_error(pool: WorkerPool):
    """It may have left meanwhile."""
    pool.report_unreachable(WorkerId("gone"))
    assert pool.snapshot(WorkerId("gone")) is None


def test_a_look_at_a_worker_that_left_brings_nothing_back():
    """A late look does not add a worker."""
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
    """In and out, also when they fail."""
    with pool.occupy(A.worker_id), pool.occupy(A.worker_id):
        assert pool.in_flight == {"a": 2, "b": 0}
    with pytest.raises(KeyError), pool.occupy(A.worker_id):
        raise KeyError
    assert pool.in_flight == {"a": 0, "b": 0}


def test_a_replaced_worker_starts_anew_but_its_requests_still_count(pool: WorkerPool):
    """The same id at another address is unhealthy at first; what runs is still running."""
    looked_at(pool, A)
    with pool.occupy(A.worker_id):
        pool.add(replace(A, url="http://127.0.0.1:3"))
        assert not pool.snapshot(A.worker_id).healthy
        assert pool.in_flight[A.worker_id] == 1
    assert pool.in_flight[A.worker_id] == 0
