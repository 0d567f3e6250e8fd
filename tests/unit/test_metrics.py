"""Promises of `appliance.metrics`: what has left is exported no longer."""

from prometheus_client import CollectorRegistry, generate_latest

from appliance.metrics import Metrics


def test_a_worker_that_left_takes_its_series_along():
    """Whatever other labels they have; another worker's, and those without workers, stay."""
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
