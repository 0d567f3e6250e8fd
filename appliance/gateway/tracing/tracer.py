"""
Traces as OpenTelemetry spans.  Imported only if tracing is on.

    POST /v1/chat/completions     the gateway: from the request's first byte to the outcome's entry
      queue                       the wait for a worker with room, if there was one
      chat demo-coder             one for each worker that the request was forwarded to
        llm_request               vLLM's own

The gateway chooses which requests are traced, unless the settings let callers continue their own traces.  It
passes the choice to the worker with the request, and the worker traces no other requests.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from appliance.gateway.tracing.attributes import (
    answer_attributes,
    ending_attributes,
    is_error,
    operation,
    request_attributes,
    worker_attributes,
)
from appliance.infra.settings import TracingSettings

SERVICE = "sovereign-appliance-gateway"
MAX_VALUE_CHARACTERS = 256  # of an attribute; none of ours is longer, but content would be
NANOSECONDS = 1_000_000_000
PROPAGATOR = TraceContextTextMapPropagator()
"""W3C Trace Context.  `tracestate` is neither read nor sent: it is free text, and nothing here uses it."""


def make_provider(
    settings: TracingSettings, *, processor: SpanProcessor, version: str, gateway: str
) -> TracerProvider:
    """Reads nothing from the environment and is not registered globally."""
    by_ratio = TraceIdRatioBased(settings.sample_ratio)
    provider = TracerProvider(
        sampler=ParentBased(by_ratio) if settings.client_context == "continue" else by_ratio,
        resource=Resource(
            {"service.name": SERVICE, "service.version": version, "service.instance.id": gateway}
        ),
        span_limits=SpanLimits(max_attribute_length=MAX_VALUE_CHARACTERS),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return provider


class Tracing:
    def __init__(
        self,
        tracer: Tracer,
        settings: TracingSettings,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._tracer = tracer
        self._client_context = settings.client_context
        self._clock = clock
        self._wall_clock = wall_clock

    def begin(
        self, *, request_id: str, tenant: str, route: str, model: str, traceparent: str | None, started: float
    ) -> "Trace":
        """`traceparent` is the client's header, unchecked."""
        parent = None if self._client_context == "ignore" else read_parent(traceparent)
        context, links = Context(), list[Link]()
        if parent is not None and self._client_context == "continue":
            context = set_span_in_context(NonRecordingSpan(parent), context)
        elif parent is not None:
            links.append(Link(parent))
        return Trace(
            self._tracer,
            context,
            links,
            request_attributes(request_id=request_id, tenant=tenant, route=route, model=model),
            epoch=self._wall_clock() - self._clock(),
            started=started,
        )


class Trace:
    """Times are readings of the gateway's monotonic clock, in seconds."""

    def __init__(
        self,
        tracer: Tracer,
        context: Context,
        links: Sequence[Link],
        attributes: dict[str, Any],
        *,
        epoch: float,
        started: float,
    ) -> None:
        """
        Start the gateway's span; its attributes name route and model.

        `context` holds its parent, if it has one; `links` the client's span, if that is not the parent.
        `epoch` is the monotonic clock's 0 in Unix time.
        """
        self._tracer = tracer
        self._epoch = epoch
        self._route, self._model = attributes["http.route"], attributes["gen_ai.request.model"]
        self._root = tracer.start_span(
            f"POST {self._route}",
            context=context,
            kind=SpanKind.SERVER,
            attributes=attributes,
            links=links,
            start_time=self._at(started),
        )
        self._inside = set_span_in_context(self._root, Context())
        self._worker_span: Span | None = None
        self._left = started
        own = self._root.get_span_context()
        # Both are None if the trace is not sampled; `exemplar` names it in a histogram.
        self.sampled_id = f"{own.trace_id:032x}" if own.trace_flags.sampled else None
        self.exemplar = {"trace_id": self.sampled_id} if self.sampled_id else None

    def waited(self, began: float, ended: float) -> None:
        """Add a wait for a worker with room, however it ended."""
        span = self._tracer.start_span("queue", context=self._inside, start_time=self._at(began))
        span.end(self._at(ended))

    def forward(self, url: str, now: float) -> dict[str, str]:
        """Returns the headers that make the worker's spans part of this trace."""
        self._worker_span = self._tracer.start_span(
            f"{operation(self._route)} {self._model}",
            context=self._inside,
            kind=SpanKind.CLIENT,
            attributes=worker_attributes(route=self._route, model=self._model, url=url),
            start_time=self._at(now),
        )
        # Also if it is not sampled: otherwise the worker would choose for itself.
        own = self._worker_span.get_span_context()
        return {"traceparent": f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags.sampled:02x}"}

    def leave(self, now: float, *, is_retried: bool) -> None:
        """End the worker's span if `is_retried`; the last one waits for the outcome."""
        self._left = now
        if is_retried and self._worker_span is not None:
            self._worker_span.set_attribute("error.type", "worker_failed")
            self._worker_span.set_status(StatusCode.ERROR)
            self._worker_span.end(self._at(now))
            self._worker_span = None

    def finish(self, fields: Mapping[str, Any], now: float) -> None:
        """`fields` are those of the `request.outcome` entry that `attributes` lists."""
        if self._worker_span is not None:
            _end(self._worker_span, answer_attributes(fields), fields, self._at(self._left))
        _end(self._root, ending_attributes(fields), fields, self._at(now))

    def _at(self, reading: float) -> int:
        return int((self._epoch + reading) * NANOSECONDS)


def _end(span: Span, attributes: Mapping[str, Any], fields: Mapping[str, Any], at: int) -> None:
    span.set_attributes(attributes)
    if is_error(fields):
        span.set_status(StatusCode.ERROR)
    span.end(at)


def read_parent(traceparent: str | None) -> SpanContext | None:
    """The client's span in a `traceparent` header; None if it names none."""
    if traceparent is None or traceparent != traceparent.strip():
        return None  # the propagator tolerates white space, the standard does not
    parent = get_current_span(PROPAGATOR.extract({"traceparent": traceparent}, Context())).get_span_context()
    return parent if parent.is_valid else None
