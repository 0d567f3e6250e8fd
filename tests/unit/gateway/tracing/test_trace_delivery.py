"""A collector that is away costs a counter and a line, never a request."""

import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from appliance.gateway.tracing.delivery import Delivery, Outbox
from appliance.gateway.tracing.tracer import make_provider
from appliance.infra.metrics import Metrics
from appliance.infra.settings import TracingSettings

QUEUE = 64


class Collector(SpanExporter):
    """One that takes batches, refuses them, or does not answer until it is let go."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()
        self.result = SpanExportResult.SUCCESS
        self.spans = 0

    def export(self, spans):
        self.asked.set()
        assert self.answers.wait(60)
        self.spans += len(spans)
        return self.result

    def shutdown(self) -> None:
        pass


class Lines:
    """The operator log."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def info(self, event: str) -> None:
        self.said.append((event, ""))

    def warning(self, event: str, reason: str) -> None:
        self.said.append((event, reason))


class Traced:
    """Spans on their way to it."""

    def __init__(self, outside=lambda: None) -> None:
        self.collector = Collector()
        self.metrics = Metrics(CollectorRegistry())
        self.log = Lines()
        outbox = Outbox(self.collector, outside=outside, metrics=self.metrics, logger=self.log)
        self.delivery = Delivery(outbox, queue_spans=QUEUE, interval_seconds=0.01, metrics=self.metrics)
        self._provider = make_provider(
            TracingSettings(enabled=True, sample_ratio=1.0),
            processor=self.delivery,
            version="1",
            gateway="g",
        )

    def make(self, count: int) -> None:
        tracer = self._provider.get_tracer("test")
        for _ in range(count):
            tracer.start_span("span").end()

    def counted(self, result: str) -> int:
        return int(self.metrics.trace_spans.labels(result)._value.get())


@pytest.fixture
def traced():
    made = Traced()
    yield made
    made.collector.answers.set()
    made.delivery.shutdown()


def test_what_is_taken_is_counted(traced):
    traced.make(10)
    traced.delivery.force_flush()
    assert (traced.counted("sent"), traced.counted("dropped")) == (10, 0)


def test_a_queue_that_is_full_drops_and_does_not_wait(traced):
    """What it holds is sent once the collector answers; every span is counted once."""
    traced.collector.answers.clear()
    traced.make(1)
    assert traced.collector.asked.wait(60)
    traced.make(3 * QUEUE)
    assert traced.counted("dropped") == 2 * QUEUE + 1
    traced.collector.answers.set()
    traced.delivery.force_flush()
    assert traced.counted("sent") == traced.collector.spans == QUEUE
    traced.make(5)
    traced.delivery.force_flush()
    assert traced.counted("sent") == QUEUE + 5


def test_a_collector_that_refuses_is_said_once(traced):
    """And once more when it is back."""
    traced.collector.result = SpanExportResult.FAILURE
    for _ in range(3):
        traced.make(4)
        traced.delivery.force_flush()
    traced.collector.result = SpanExportResult.SUCCESS
    traced.make(4)
    traced.delivery.force_flush()
    assert (traced.counted("sent"), traced.counted("dropped")) == (4, 12)
    assert [event for event, _ in traced.log.said] == ["trace_collector_failing", "trace_collector_back"]


def test_a_collector_that_has_moved_outside_gets_nothing():
    """Its name is looked up before each batch."""
    traced = Traced(outside=lambda: "8.8.8.8")
    traced.make(4)
    traced.delivery.force_flush()
    assert traced.collector.spans == 0
    assert traced.counted("dropped") == 4
    assert "8.8.8.8, a public address" in traced.log.said[0][1]
    traced.delivery.shutdown()
