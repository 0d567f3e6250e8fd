"""What has left is exported no longer."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from appliance.infra.metrics import Metrics


def test_a_worker_that_left_takes_its_series_along():
    """With all their other labels; series of other workers, and without workers, stay."""
    metrics = Metrics(CollectorRegistry())
    for worker in ("a", "b"):
        metrics.worker_up.labels(worker).set(1)
        metrics.worker_restarts.labels(worker).inc()
        metrics.speculation_mode.labels(worker, "speculative").set(1)
    metrics.retries.labels("demo").inc()
    metrics.forget_worker("a")
    metrics.forget_worker("never seen")
    page = generate_latest(metrics.registry).decode()
    assert 'worker="a"' not in page
    assert page.count('worker="b"') >= 3
    assert 'appliance_retries_total{model="demo"} 1.0' in page


@pytest.mark.parametrize(("up", "health"), [(1, "up"), (0, "down"), (None, "down")])
def test_it_is_known_whether_a_worker_was_up_when_it_left(up: int | None, health: str):
    """One that was taken away was; one that failed, or was never there, was not."""
    metrics = Metrics(CollectorRegistry())
    if up is not None:
        metrics.worker_up.labels("a").set(up)
    metrics.worker_up.labels("b").set(1 - (up or 0))
    metrics.forget_worker("a")
    counts = {
        each: metrics.registry.get_sample_value("appliance_workers_left_total", {"health": each})
        for each in ("up", "down")
    }
    assert counts == {"up": 0, "down": 0, health: 1}


def test_steps_of_an_engine_that_is_no_more_are_forgotten():
    """Those of other workers stay."""
    metrics = Metrics(CollectorRegistry())
    for worker in ("a", "b"):
        metrics.worker_step_tokens.labels(worker, "3", "1").copy(100)
        metrics.worker_step_seconds.labels(worker, "3", "1").copy(2.5)
    metrics.forget_steps("a")
    page = generate_latest(metrics.registry).decode()
    assert 'worker="a"' not in page
    assert 'appliance_worker_step_seconds_total{batch="1",draft_tokens="3",worker="b"} 2.5' in page
