"""
Spans on their way to the collector: in batches, from a thread of their own, out of a bounded queue.

Tracing fails open.  A collector that is away costs the spans that find no room, a counter and one line in the
log; no request waits for it.
"""

import threading
from collections.abc import Callable, Sequence

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import TracingSettings

BATCH_SPANS = 512
MILLISECONDS = 1000


def make_exporter(settings: TracingSettings) -> SpanExporter:
    """OTLP over HTTP to the endpoint of the settings: past any proxy, and following no redirect."""
    session = requests.Session()
    session.trust_env = False
    return OTLPSpanExporter(
        endpoint=settings.endpoint,
        certificate_file=str(settings.ca_file) if settings.ca_file else None,
        timeout=settings.timeout_seconds,
        compression=Compression.Gzip,
        headers={},
        session=session,
    )


class Outbox(SpanExporter):
    """Hands batches to an exporter, and keeps count; called by the one thread of `Delivery`."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        outside: Callable[[], str | None],
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        """
        Take what it hands batches to.

        Args:
            exporter: where they go.
            outside: the public address the collector is at now, if it is at one.
            metrics: where spans are counted.
            logger: is told when the collector goes away, and when it is back.
        """
        self.handed_on = 0
        """Spans that have left the queue, whatever became of them."""
        self._exporter = exporter
        self._outside = outside
        self._sent = metrics.trace_spans.labels("sent")
        self._dropped = metrics.trace_spans.labels("dropped")
        self._logger = logger
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch; it is not tried again later."""
        address = self._outside()
        if address is not None:
            result, reason = SpanExportResult.FAILURE, f"its name leads to {address}, a public address"
        else:
            result, reason = self._exporter.export(spans), "it does not take them"
        self.handed_on += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._sent.inc(len(spans))
            if self._is_failing:
                self._logger.info("trace_collector_back")
        else:
            self._dropped.inc(len(spans))
            if not self._is_failing:
                self._logger.warning("trace_collector_failing", reason=reason)
        self._is_failing = result is not SpanExportResult.SUCCESS
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


class Delivery(BatchSpanProcessor):
    """Queues ended spans; one that finds no room is dropped, rather than one that waits."""

    def __init__(
        self, outbox: Outbox, *, queue_spans: int, interval_seconds: float, metrics: Metrics
    ) -> None:
        super().__init__(
            outbox,
            # One more than we let in: the queue's own way of dropping writes a line for each span.
            max_queue_size=queue_spans + BATCH_SPANS,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
            schedule_delay_millis=interval_seconds * MILLISECONDS,
        )
        self._outbox = outbox
        self._queue_spans = queue_spans
        self._taken = 0
        self._dropped = metrics.trace_spans.labels("dropped")
        self._lock = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended; at once, whatever the collector does."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        with self._lock:
            if self._taken - self._outbox.handed_on >= self._queue_spans:
                self._dropped.inc()
                return
            self._taken += 1
        super().on_end(span)
