"""
Traces as OpenTelemetry spans.  Imported only where tracing is on.

    POST /v1/chat/completions     the gateway: from the request's first byte to the outcome's entry
      queue                       a wait for a worker with room, if there was one
      chat demo-coder             a worker being asked; one for each worker that was
        llm_request               vLLM's own

Which requests are traced is our choice alone, unless the settings say that callers may continue their own
traces.  A worker is told of it with the request, and traces what it is told to and nothing else.
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
LONGEST_VALUE = 256
"""Characters of an attribute that are kept; none of ours is longer, and a text would be."""
NANOSECONDS = 1_000_000_000
PROPAGATOR = TraceContextTextMapPropagator()
"""W3C Trace Context.  `tracestate` is neither read nor sent: it is free text, and nothing here uses it."""


def make_provider(
    settings: TracingSettings, *, processor: SpanProcessor, version: str, gateway: str
) -> TracerProvider:
    """What makes spans; nothing of it is read from the environment, and nothing is global."""
    by_chance = TraceIdRatioBased(settings.sample_ratio)
    provider = TracerProvider(
        sampler=ParentBased(by_chance) if settings.client_context == "continue" else by_chance,
        resource=Resource(
            {"service.name": SERVICE, "service.version": version, "service.instance.id": gateway}
        ),
        span_limits=SpanLimits(max_attribute_length=LONGEST_VALUE),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return provider


class SpanTracing:
    """`appliance.gateway.tracing.trace.Tracing` by a tracer."""

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
        self,
        *,
        request_id: str,
        tenant: str,
        route: str,
        model: str,
        traceparent: str | None,
        started: float,
    ) -> "SpanTrace":
        """Begin the trace of one request."""
        said = None if self._client_context == "ignore" else read_parent(traceparent)
        context, links = Context(), list[Link]()
        if said is not None and self._client_context == "continue":
            context = set_span_in_context(NonRecordingSpan(said), context)
        elif said is not None:
            links.append(Link(said))
        return SpanTrace(
            self._tracer,
            context,
            links,
            request_attributes(request_id=request_id, tenant=tenant, route=route, model=model),
            epoch=self._wall_clock() - self._clock(),
            started=started,
        )


class SpanTrace:
    """`appliance.gateway.tracing.trace.Trace` by spans."""

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
        Begin the gateway's span.

        Args:
            tracer: makes it.
            context: holds its parent, if it has one.
            links: to the client's span, where that is not its parent.
            attributes: what it says from the start; route and model are read from it.
            epoch: the monotonic clock's 0 in Unix time, in seconds.
            started: when the request came, by the monotonic clock.
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
        self._asked: Span | None = None
        self._left = started
        own = self._root.get_span_context()
        self.sampled_id = f"{own.trace_id:032x}" if own.trace_flags.sampled else None
        self.exemplar = {"trace_id": self.sampled_id} if self.sampled_id else None

    def waited(self, began: float, ended: float) -> None:
        """Add the span of a wait."""
        span = self._tracer.start_span("queue", context=self._inside, start_time=self._at(began))
        span.end(self._at(ended))

    def ask(self, url: str, now: float) -> dict[str, str]:
        """Begin the span of a worker being asked."""
        self._asked = self._tracer.start_span(
            f"{operation(self._route)} {self._model}",
            context=self._inside,
            kind=SpanKind.CLIENT,
            attributes=worker_attributes(route=self._route, model=self._model, url=url),
            start_time=self._at(now),
        )
        headers: dict[str, str] = {}
        # Also if it is not sampled: otherwise the worker would choose for itself.
        PROPAGATOR.inject(headers, set_span_in_context(self._asked, Context()))
        return headers

    def leave(self, now: float, *, goes_on: bool) -> None:
        """End that span if another will follow; the last one waits for what the request came to."""
        self._left = now
        if goes_on and self._asked is not None:
            self._asked.set_attribute("error.type", "worker_failed")
            self._asked.set_status(StatusCode.ERROR)
            self._asked.end(self._at(now))
            self._asked = None

    def finish(self, fields: Mapping[str, Any], now: float) -> None:
        """End what has not ended."""
        if self._asked is not None:
            _end(self._asked, answer_attributes(fields), fields, self._at(self._left))
        _end(self._root, ending_attributes(fields), fields, self._at(now))

    def _at(self, reading: float) -> int:
        return int((self._epoch + reading) * NANOSECONDS)


def _end(span: Span, attributes: Mapping[str, Any], fields: Mapping[str, Any], at: int) -> None:
    span.set_attributes(attributes)
    if is_error(fields):
        span.set_status(StatusCode.ERROR)
    span.end(at)


def read_parent(traceparent: str | None) -> SpanContext | None:
    """The span of the client that a `traceparent` header names; None if it names none."""
    if traceparent is None or traceparent != traceparent.strip():
        return None  # the propagator tolerates white space, the standard does not
    parent = get_current_span(PROPAGATOR.extract({"traceparent": traceparent}, Context())).get_span_context()
    return parent if parent.is_valid else None
