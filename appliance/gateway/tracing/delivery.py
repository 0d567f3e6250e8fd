"""
Sends spans to the collector: in batches, from a thread of its own, out of a bounded queue.

Tracing fails open.  While the collector is unreachable, spans beyond the queue are dropped and counted, with
one line in the log; no request waits for it.
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
    """OTLP over HTTP to the configured endpoint, without proxies and redirects."""
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


class CountingExporter(SpanExporter):
    """Called by the one thread of `Delivery`."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        public_address: Callable[[], str | None],
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self.taken = 0  # spans that have left the queue, sent or dropped
        self._exporter = exporter
        self._public_address = public_address
        self._sent = metrics.trace_spans.labels("sent")
        self._dropped = metrics.trace_spans.labels("dropped")
        self._logger = logger
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """A batch that fails is dropped."""
        address = self._public_address()
        if address is not None:
            result, reason = SpanExportResult.FAILURE, f"its name resolves to {address}, a public address"
        else:
            result, reason = self._exporter.export(spans), "it does not accept them"
        self.taken += len(spans)
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
        self._exporter.shutdown()


class Delivery(BatchSpanProcessor):
    """Queues ended spans; a span that finds the queue full is dropped, not one that is queued."""

    def __init__(
        self, exporter: CountingExporter, *, queue_spans: int, interval_seconds: float, metrics: Metrics
    ) -> None:
        super().__init__(
            exporter,
            # Larger than `queue_spans`: the library logs a line for each span that it drops itself.
            max_queue_size=queue_spans + BATCH_SPANS,
            max_export_batch_size=min(BATCH_SPANS, queue_spans),
            schedule_delay_millis=interval_seconds * MILLISECONDS,
        )
        self._counting_exporter = exporter
        self._queue_spans = queue_spans
        self._queued = 0
        self._dropped = metrics.trace_spans.labels("dropped")
        self._lock = threading.Lock()

    def on_end(self, span: ReadableSpan) -> None:
        """Never waits."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        with self._lock:
            if self._queued - self._counting_exporter.taken >= self._queue_spans:
                self._dropped.inc()
                return
            self._queued += 1
        super().on_end(span)
