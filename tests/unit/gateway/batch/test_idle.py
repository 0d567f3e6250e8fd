"""When a line of a batch may begin."""

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
    """Nobody else wants it."""
    assert may_begin("demo", ALONE, IDLE, [worker()], {})


@pytest.mark.parametrize(("running", "begins"), [(4, True), (5, False)])
def test_a_worker_at_its_share_takes_none(running, begins):
    """Everybody's requests count: those of other gateways are in what the worker says."""
    assert may_begin("demo", ALONE, IDLE, [worker(running=running)], {}) is begins


@pytest.mark.parametrize(("in_flight", "begins"), [(4, True), (5, False)])
def test_what_was_sent_since_the_last_look_counts(in_flight, begins):
    """A burst of requests is noticed at once, not a second later."""
    assert may_begin("demo", ALONE, IDLE, [worker()], {"w1": in_flight}) is begins


def test_lines_that_have_just_begun_count_before_a_worker_knows_of_them():
    """Otherwise all that are there would begin at once."""
    assert may_begin("demo", RunningLines(all=4, mine=4, batches=1), IDLE, [worker()], {})
    assert not may_begin("demo", RunningLines(all=5, mine=5, batches=1), IDLE, [worker()], {})


def test_nothing_begins_while_anything_waits():
    """A queue in one worker of the model is a queue."""
    assert not may_begin("demo", ALONE, IDLE, [worker(), worker("w2", waiting=1)], {})
    assert may_begin("demo", ALONE, IDLE, [worker(), worker("w2", waiting=1, model="other")], {})


def test_two_workers_have_twice_the_share():
    """And one that is down has none."""
    busy = [worker(running=5), worker("w2", running=4)]
    assert may_begin("demo", ALONE, IDLE, busy, {})
    assert not may_begin("demo", ALONE, IDLE, [busy[0], replace(busy[1], healthy=False)], {})


def test_without_a_worker_it_waits_and_a_model_nobody_serves_is_answered_at_once():
    """A worker that is away comes back; a wrong name never does, and its line must hear so."""
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
def test_batches_share_what_there_is(lines, begins):
    """None takes more than its part, and each gets one."""
    assert may_begin("demo", lines, replace(IDLE, worker_requests=1000), [worker()], {}) is begins
