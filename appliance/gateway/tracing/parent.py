"""
The trace a client says its request belongs to, and how we say it to a worker: W3C Trace Context, level 1.

`tracestate` is neither read nor passed on: it is free text, and nothing of ours needs it.
"""

import re
from dataclasses import dataclass

HEADER = "traceparent"
SAMPLED = 0x01
SHAPE = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
CURRENT = "00"
INVALID = "ff"


@dataclass(frozen=True, slots=True)
class Parent:
    """A span of somebody else's."""

    trace_id: int
    """128 bits, not 0."""
    span_id: int
    """64 bits, not 0."""
    is_sampled: bool


def read_parent(text: str | None) -> Parent | None:
    """The span that a `traceparent` header names; None if it names none (section 3.2 of the standard)."""
    found = SHAPE.fullmatch(text) if text else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == INVALID or (version == CURRENT and more):
        return None
    parent = Parent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def write_parent(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    """The `traceparent` header that names a span of ours."""
    return f"{CURRENT}-{trace_id:032x}-{span_id:016x}-{SAMPLED if is_sampled else 0:02x}"
