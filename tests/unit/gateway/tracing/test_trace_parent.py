"""`traceparent`: what the standard lets through, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import INVALID_SPAN, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from appliance.gateway.tracing.parent import Parent, read_parent, write_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = Parent(int(TRACE, 16), int(SPAN, 16), is_sampled=True)


def test_reads_the_standards_own_example():
    assert read_parent(f"00-{TRACE}-{SPAN}-01") == GOOD


def test_a_later_version_may_say_more():
    """Section 3.2.1: what follows the flags is for those who know the version."""
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
def test_reads_nothing_into_what_is_none(text):
    assert read_parent(text) is None


@given(trace=st.integers(1, 2**128 - 1), span=st.integers(1, 2**64 - 1), sampled=st.booleans())
def test_others_read_what_is_written(trace, span, sampled):
    """By OpenTelemetry's own reader, which is the worker's; and by ours."""
    text = write_parent(trace, span, is_sampled=sampled)
    assert read_parent(text) == Parent(trace, span, sampled)
    found = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": text}))
    assert found is not INVALID_SPAN
    own = found.get_span_context()
    assert (own.trace_id, own.span_id, own.trace_flags.sampled) == (trace, span, sampled)
