"""When a line of a batch may start."""

from dataclasses import replace

import pytest

from appliance.gateway.batch.idle import IdleCapacity, RunningLines, may_begin
from appliance.serving.worker import ServedModel, Worker, WorkerId, WorkerSnapshot
from appliance.serving.worker_metrics import parse_metrics
from tests.fakes import METRICS

IDLE = IdleCapacity(concurrency=8, worker_requests=10, share=0.5)
ALONE = RunningLines(all=0, mine=0, batches=1)


def worker(name="w1", *, model="demo", running=0, waiting=0, healthy=True):
    metrics = replace(parse_metrics(METRICS), running=running, waiting=waiting)
    return WorkerSnapshot(
        worker=Worker(worker_id=WorkerId(name), url="http://127.0.0.1:1"),
        healthy=healthy,
        models=(ServedModel(name=model, max_model_len=None, created=1),),
        metrics=metrics,
    )


def test_an_idle_worker_takes_a_line():
    assert may_begin("demo", ALONE, IDLE, [worker()], {})


@pytest.mark.parametrize(("running", "begins"), [(4, True), (5, False)])
def test_a_worker_at_its_share_takes_none(running, begins):
    """All clients' requests count: the worker reports those of other gateways."""
    assert may_begin("demo", ALONE, IDLE, [worker(running=running)], {}) is begins


@pytest.mark.parametrize(("in_flight", "begins"), [(4, True), (5, False)])
def test_requests_sent_since_the_last_poll_count(in_flight, begins):
    assert may_begin("demo", ALONE, IDLE, [worker()], {"w1": in_flight}) is begins


def test_lines_count_before_a_worker_reports_them():
    assert may_begin("demo", RunningLines(all=4, mine=4, batches=1), IDLE, [worker()], {})
    assert not may_begin("demo", RunningLines(all=5, mine=5, batches=1), IDLE, [worker()], {})


def test_no_line_starts_while_requests_wait():
    assert not may_begin("demo", ALONE, IDLE, [worker(), worker("w2", waiting=1)], {})
    assert may_begin("demo", ALONE, IDLE, [worker(), worker("w2", waiting=1, model="other")], {})


def test_two_workers_have_twice_the_share():
    """One that is down has none."""
    busy = [worker(running=5), worker("w2", running=4)]
    assert may_begin("demo", ALONE, IDLE, busy, {})
    assert not may_begin("demo", ALONE, IDLE, [busy[0], replace(busy[1], healthy=False)], {})


def test_unknown_model_is_answered_at_once_without_waiting():
    """A missing worker comes back; a wrong name stays wrong, and its line needs the error."""
    assert not may_begin("demo", ALONE, IDLE, [], {})
    assert not may_begin("demo", ALONE, IDLE, [worker(healthy=False)], {})
    assert may_begin("wrong", ALONE, IDLE, [worker()], {})


@pytest.mark.parametrize(
    ("lines", "begins"),
    [
        (RunningLines(all=7, mine=7, batches=1), True),
        (RunningLines(all=8, mine=8, batches=1), False),
        (RunningLines(all=7, mine=4, batches=2), False),
        (RunningLines(all=7, mine=3, batches=2), True),
        (RunningLines(all=7, mine=0, batches=100), True),
        (RunningLines(all=7, mine=1, batches=100), False),
    ],
)
def test_running_batches_get_equal_parts(lines, begins):
    assert may_begin("demo", lines, replace(IDLE, worker_requests=1000), [worker()], {}) is begins
