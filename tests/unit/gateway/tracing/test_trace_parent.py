"""The gateway reads `traceparent` as W3C Trace Context demands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from appliance.gateway.tracing.tracer import PROPAGATOR, read_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=True, trace_flags=TraceFlags(1))


def test_reads_the_example_of_the_standard():
    assert read_parent(f"00-{TRACE}-{SPAN}-01") == GOOD


def test_a_later_version_may_have_more_fields():
    """Section 3.2.1: readers of version 00 ignore what follows the flags."""
    assert read_parent(f"01-{TRACE}-{SPAN}-01-more") == GOOD


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_ignores_a_malformed_header(text):
    assert read_parent(text) is None


@given(trace=st.integers(1, 2**128 - 1), span=st.integers(1, 2**64 - 1), sampled=st.booleans())
def test_reads_the_header_it_writes(trace, span, sampled):
    own = SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(sampled))
    headers = {}
    PROPAGATOR.inject(headers, set_span_in_context(NonRecordingSpan(own), Context()))
    assert headers == {"traceparent": f"00-{trace:032x}-{span:016x}-{sampled:02x}"}
    found = read_parent(headers["traceparent"])
    assert (found.trace_id, found.span_id, found.trace_flags.sampled) == (trace, span, sampled)
