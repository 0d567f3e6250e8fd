"""An unreachable collector costs spans and a log line, never a request."""

import threading

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from appliance.gateway.tracing.delivery import CountingExporter, Delivery
from appliance.gateway.tracing.tracer import make_provider
from appliance.infra.metrics import Metrics
from appliance.infra.settings import TracingSettings

QUEUE = 64


class Collector(SpanExporter):
    """A collector that accepts batches, refuses them, or does not answer until released."""

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
    """Spans delivered to a `Collector`."""

    def __init__(self, public_address=lambda: None) -> None:
        self.collector = Collector()
        self.metrics = Metrics(CollectorRegistry())
        self.log = Lines()
        exporter = CountingExporter(
            self.collector, public_address=public_address, metrics=self.metrics, logger=self.log
        )
        self.delivery = Delivery(exporter, queue_spans=QUEUE, interval_seconds=0.01, metrics=self.metrics)
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


def test_sent_spans_are_counted(traced):
    traced.make(10)
    traced.delivery.force_flush()
    assert (traced.counted("sent"), traced.counted("dropped")) == (10, 0)


def test_a_full_queue_drops_spans_without_waiting(traced):
    """The queued spans are sent once the collector answers; every span is counted once."""
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


def test_a_failing_collector_is_logged_once(traced):
    """And once when it accepts spans again."""
    traced.collector.result = SpanExportResult.FAILURE
    for _ in range(3):
        traced.make(4)
        traced.delivery.force_flush()
    traced.collector.result = SpanExportResult.SUCCESS
    traced.make(4)
    traced.delivery.force_flush()
    assert (traced.counted("sent"), traced.counted("dropped")) == (4, 12)
    assert [event for event, _ in traced.log.said] == ["trace_collector_failing", "trace_collector_back"]


def test_a_collector_at_a_public_address_receives_nothing():
    """Its name is resolved before each batch."""
    traced = Traced(public_address=lambda: "8.8.8.8")
    traced.make(4)
    traced.delivery.force_flush()
    assert traced.collector.spans == 0
    assert traced.counted("dropped") == 4
    assert "8.8.8.8, a public address" in traced.log.said[0][1]
    traced.delivery.shutdown()
