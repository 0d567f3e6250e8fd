"""The tree of a request's spans, their attributes, and the choice of traced requests."""

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from appliance.gateway.tracing.tracer import Tracing, make_provider, read_parent
from appliance.infra.settings import TracingSettings

THEIRS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FIELDS = {
    "outcome": "completed",
    "status": 200,
    "retries": 0,
    "prompt_tokens": 7,
    "completion_tokens": 10,
    "finish_reason": "stop",
    "acceptance_length": "2.500",
    "speculation_mode": "speculative",
    "something_new": "the prompt",
}


class Traced:
    """A tracer that keeps its spans in memory."""

    def __init__(self, **settings) -> None:
        chosen = TracingSettings(enabled=True, **{"sample_ratio": 1.0, **settings})
        self._exporter = InMemorySpanExporter()
        provider = make_provider(
            chosen, processor=SimpleSpanProcessor(self._exporter), version="1", gateway="g"
        )
        self.tracing = Tracing(
            provider.get_tracer("test"), chosen, clock=lambda: 100.0, wall_clock=lambda: 1_000_100.0
        )

    def begin(self, traceparent=None, route="/v1/chat/completions"):
        return self.tracing.begin(
            request_id="r1", tenant="acme", route=route, model="demo", traceparent=traceparent, started=100.0
        )

    @property
    def spans(self):
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def traced() -> Traced:
    return Traced()


def test_a_request_that_waited_has_three_spans(traced):
    """Of one tree, with their own times."""
    trace = traced.begin()
    trace.waited(101.0, 102.0)
    headers = trace.forward("http://10.0.0.5:8000", 102.0)
    trace.leave(103.0, is_retried=False)
    trace.finish(FIELDS, 104.0)
    root, queue, asked = (traced.spans[name] for name in ("POST /v1/chat/completions", "queue", "chat demo"))
    assert root.parent is None
    assert root.links == ()
    assert queue.parent == asked.parent == root.context
    assert (root.kind, asked.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert [(span.start_time, span.end_time) for span in (root, queue, asked)] == [
        (1_000_100 * 10**9, 1_000_104 * 10**9),
        (1_000_101 * 10**9, 1_000_102 * 10**9),
        (1_000_102 * 10**9, 1_000_103 * 10**9),
    ]
    parent = read_parent(headers["traceparent"])
    assert (parent.trace_id, parent.span_id) == (root.context.trace_id, asked.context.span_id)
    assert parent.trace_flags.sampled
    assert trace.sampled_id == f"{root.context.trace_id:032x}"
    assert trace.exemplar == {"trace_id": trace.sampled_id}


def test_spans_have_only_the_attributes_of_the_tables(traced):
    """By the conventions' names; an unknown field is omitted."""
    trace = traced.begin()
    trace.forward("http://10.0.0.5:8000", 100.0)
    trace.leave(101.0, is_retried=False)
    trace.finish(FIELDS, 102.0)
    root, asked = traced.spans["POST /v1/chat/completions"], traced.spans["chat demo"]
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "demo",
        "appliance.request_id": "r1",
        "appliance.tenant": "acme",
        "appliance.outcome": "completed",
        "appliance.retries": 0,
    }
    assert dict(asked.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "demo",
        "server.address": "10.0.0.5",
        "server.port": 8000,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ("stop",),
        "appliance.speculation.mode": "speculative",
        "appliance.speculation.acceptance_length": 2.5,
    }


def test_an_unknown_finish_reason_is_omitted(traced):
    """It could hold anything."""
    trace = traced.begin()
    trace.forward("http://10.0.0.5:8000", 100.0)
    trace.finish({**FIELDS, "finish_reason": "because the patient"}, 101.0)
    assert "gen_ai.response.finish_reasons" not in traced.spans["chat demo"].attributes


def test_each_worker_of_a_retried_request_has_a_span(traced):
    """The span of the failed worker is an error and has no tokens."""
    trace = traced.begin()
    first = trace.forward("http://10.0.0.5:8000", 100.0)
    trace.leave(101.0, is_retried=True)
    failed = traced.spans["chat demo"]
    assert failed.attributes["error.type"] == "worker_failed"
    assert failed.status.status_code is StatusCode.ERROR
    assert "gen_ai.usage.output_tokens" not in failed.attributes
    assert trace.forward("http://10.0.0.6:8000", 101.0) != first
    trace.leave(102.0, is_retried=False)
    trace.finish(FIELDS, 102.0)
    assert traced.spans["chat demo"].attributes["server.address"] == "10.0.0.6"
    assert traced.spans["chat demo"].status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("outcome", "status", "expected"),
    [
        ("worker_failed", 502, StatusCode.ERROR),
        ("client_gone", 499, StatusCode.UNSET),
        ("worker_refused", 400, StatusCode.UNSET),
    ],
)
def test_a_span_is_an_error_if_the_appliance_failed(traced, outcome, status, expected):
    """`error.type` has the outcome in any case."""
    trace = traced.begin()
    trace.finish({**FIELDS, "outcome": outcome, "status": status}, 101.0)
    root = traced.spans["POST /v1/chat/completions"]
    assert root.attributes["error.type"] == outcome
    assert root.status.status_code is expected


def test_a_clients_trace_is_linked(traced):
    """It does not decide what is traced."""
    traced.begin(THEIRS).finish(FIELDS, 101.0)
    root = traced.spans["POST /v1/chat/completions"]
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" not in THEIRS
    (link,) = root.links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" in THEIRS


def test_settings_can_ignore_a_clients_trace():
    traced = Traced(client_context="ignore")
    traced.begin(THEIRS).finish(FIELDS, 101.0)
    assert traced.spans["POST /v1/chat/completions"].links == ()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_settings_can_continue_a_callers_trace(ratio):
    """Then the caller decides what is traced, whatever the sample ratio."""
    traced = Traced(client_context="continue", sample_ratio=ratio)
    traced.begin(THEIRS[:-1] + "0").finish(FIELDS, 101.0)
    assert not traced.spans
    traced.begin(THEIRS).finish(FIELDS, 101.0)
    root = traced.spans["POST /v1/chat/completions"]
    assert f"{root.context.trace_id:032x}-{root.parent.span_id:016x}" in THEIRS


@pytest.mark.parametrize("traceparent", [None, THEIRS])
def test_a_client_cannot_force_its_request_to_be_traced(traceparent):
    """The worker receives the choice too, or it would choose for itself."""
    traced = Traced(sample_ratio=0.0)
    trace = traced.begin(traceparent)
    headers = trace.forward("http://10.0.0.5:8000", 100.0)
    trace.leave(101.0, is_retried=False)
    trace.finish(FIELDS, 102.0)
    assert not traced.spans
    assert not read_parent(headers["traceparent"]).trace_flags.sampled
    assert trace.sampled_id is None
    assert trace.exemplar is None


def test_the_environment_sets_no_resource_attributes(monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=secret")
    traced = Traced()
    traced.begin().finish(FIELDS, 101.0)
    assert dict(traced.spans["POST /v1/chat/completions"].resource.attributes) == {
        "service.name": "sovereign-appliance-gateway",
        "service.version": "1",
        "service.instance.id": "g",
    }
