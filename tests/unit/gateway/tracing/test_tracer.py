"""The tree of a request's spans: who is whose parent, what they say, and who decides what is traced."""

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from appliance.gateway.tracing.tracer import SpanTracing, make_provider, read_parent
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
    """A tracer whose spans stay here."""

    def __init__(self, **settings) -> None:
        chosen = TracingSettings(enabled=True, **{"sample_ratio": 1.0, **settings})
        self._exporter = InMemorySpanExporter()
        provider = make_provider(
            chosen, processor=SimpleSpanProcessor(self._exporter), version="1", gateway="g"
        )
        self.tracing = SpanTracing(
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


def test_a_request_that_waited(traced):
    """Three spans of one tree, with the times they had."""
    trace = traced.begin()
    trace.waited(101.0, 102.0)
    headers = trace.ask("http://10.0.0.5:8000", 102.0)
    trace.leave(103.0, goes_on=False)
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
    told = read_parent(headers["traceparent"])
    assert (told.trace_id, told.span_id) == (root.context.trace_id, asked.context.span_id)
    assert told.trace_flags.sampled
    assert trace.sampled_id == f"{root.context.trace_id:032x}"
    assert trace.exemplar == {"trace_id": trace.sampled_id}


def test_what_spans_say(traced):
    """What the tables name, by the conventions' names; a field nobody has thought about is left out."""
    trace = traced.begin()
    trace.ask("http://10.0.0.5:8000", 100.0)
    trace.leave(101.0, goes_on=False)
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


def test_a_worker_cannot_say_what_it_likes(traced):
    """A reason to stop that is none is not passed on: it could hold anything."""
    trace = traced.begin()
    trace.ask("http://10.0.0.5:8000", 100.0)
    trace.finish({**FIELDS, "finish_reason": "because the patient"}, 101.0)
    assert "gen_ai.response.finish_reasons" not in traced.spans["chat demo"].attributes


def test_a_retry(traced):
    """Each worker that was asked has a span; the one that failed says so and has no tokens."""
    trace = traced.begin()
    first = trace.ask("http://10.0.0.5:8000", 100.0)
    trace.leave(101.0, goes_on=True)
    failed = traced.spans["chat demo"]
    assert failed.attributes["error.type"] == "worker_failed"
    assert failed.status.status_code is StatusCode.ERROR
    assert "gen_ai.usage.output_tokens" not in failed.attributes
    assert trace.ask("http://10.0.0.6:8000", 101.0) != first
    trace.leave(102.0, goes_on=False)
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
def test_errors(traced, outcome, status, expected):
    """`error.type` always says it; the span is an error only where the fault is the appliance's."""
    trace = traced.begin()
    trace.finish({**FIELDS, "outcome": outcome, "status": status}, 101.0)
    root = traced.spans["POST /v1/chat/completions"]
    assert root.attributes["error.type"] == outcome
    assert root.status.status_code is expected


def test_a_clients_trace_is_linked(traced):
    """It can be found from ours, and decides nothing."""
    traced.begin(THEIRS).finish(FIELDS, 101.0)
    root = traced.spans["POST /v1/chat/completions"]
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" not in THEIRS
    (link,) = root.links
    assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" in THEIRS


def test_a_clients_trace_is_ignored():
    """Where the settings say so."""
    traced = Traced(client_context="ignore")
    traced.begin(THEIRS).finish(FIELDS, 101.0)
    assert traced.spans["POST /v1/chat/completions"].links == ()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_callers_trace_is_continued(ratio):
    """Where the settings say so it is the caller that decides, whatever our own share is."""
    traced = Traced(client_context="continue", sample_ratio=ratio)
    traced.begin(THEIRS[:-1] + "0").finish(FIELDS, 101.0)
    assert not traced.spans
    traced.begin(THEIRS).finish(FIELDS, 101.0)
    root = traced.spans["POST /v1/chat/completions"]
    assert f"{root.context.trace_id:032x}-{root.parent.span_id:016x}" in THEIRS


@pytest.mark.parametrize("said", [None, THEIRS])
def test_a_client_cannot_have_itself_traced(said):
    """Not sampled is not sampled; and the worker is told so, or it would choose for itself."""
    traced = Traced(sample_ratio=0.0)
    trace = traced.begin(said)
    headers = trace.ask("http://10.0.0.5:8000", 100.0)
    trace.leave(101.0, goes_on=False)
    trace.finish(FIELDS, 102.0)
    assert not traced.spans
    assert not read_parent(headers["traceparent"]).trace_flags.sampled
    assert trace.sampled_id is None
    assert trace.exemplar is None


def test_the_environment_has_no_say(monkeypatch):
    """Attributes of the resource are ours alone."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=secret")
    traced = Traced()
    traced.begin().finish(FIELDS, 101.0)
    assert dict(traced.spans["POST /v1/chat/completions"].resource.attributes) == {
        "service.name": "sovereign-appliance-gateway",
        "service.version": "1",
        "service.instance.id": "g",
    }
