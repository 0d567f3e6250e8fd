"""
The frames of a worker's stream that need care: which may go now, and which wait for the outcome.

Usage, errors and the end are looked at; all others are content and pass as they came.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from appliance.members import cut_member
from appliance.serving import sse
from appliance.serving.refusal import SERVER_ERROR, normalise_error
from appliance.serving.usage import Usage, parse_answer, parse_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """A run of frames, sorted."""

    passed: bytes = b""
    """What may go to the client now."""
    held: bytes = b""
    """What may not go before the outcome is durable."""
    usage: Usage | None = None
    """The last counts the worker gave, if it gave any."""
    is_end: bool = False
    """Whether nothing that comes after these frames belongs to the answer."""
    has_failed: bool = False
    """Whether the end is an error."""


def sort_frames(frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> Sorted:
    """
    Sort whole frames of a stream for which usage was asked.

    Args:
        frames: single frames, each with its blank line.
        wants_usage: whether the client itself asked for the usage frame.
        wants_metrics: whether the worker's `metrics` stay in that frame.

    Raises:
        WorkerFailedError: a frame with usage is no JSON object.
    """
    passed, held, usage, is_end = b"", b"", None, False
    for frame in frames:
        if sse.is_done(frame):
            held, is_end = held + frame, True
        elif sse.is_usage(frame):
            text = sse.payload(frame)
            members = parse_answer(text)
            usage = parse_usage(members)
            if not wants_metrics:
                text = cut_member(text, members, "metrics")
            rewritten = f"data: {text}\n\n".encode()
            # The frame with empty `choices` exists only because we asked for it; clients that did
            # not ask may index `choices[0]` and break on it.
            if "choices" in members and members["choices"].value:
                passed += rewritten
            elif wants_usage:
                held += rewritten
        elif sse.is_error(frame):
            # The last frame, whatever the worker sends after it: `[DONE]` would make a failure look whole.
            held += f"data: {normalise_error(sse.payload(frame), SERVER_ERROR)}\n\n".encode()
            return Sorted(passed=passed, held=held, usage=usage, is_end=True, has_failed=True)
        else:
            passed += frame
    return Sorted(passed=passed, held=held, usage=usage, is_end=is_end)
