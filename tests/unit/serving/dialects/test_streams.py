"""
Content passes, and what ends a stream is held back.

The streams were recorded from a real worker; see `tests.recorder`.
"""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import WorkerFailedError
from appliance.infra.json_members import parse_members
from appliance.serving import sse
from appliance.serving.dialects.dialect import Dialect, data_of
from appliance.serving.dialects.routes import CHAT, MESSAGES, RESPONSES, ROUTES
from appliance.serving.error_text import ErrorText
from appliance.serving.usage import Usage
from tests.recorder import RECORDED_AT

STREAMS = {
    "chat": ROUTES["/v1/chat/completions"].dialect,
    "text": ROUTES["/v1/completions"].dialect,
    "responses": ROUTES["/v1/responses"].dialect,
    "messages": ROUTES["/v1/messages"].dialect,
}
EVERY = pytest.mark.parametrize("name", STREAMS)
BROKEN = ErrorText(status=502, kind="server_error", message="The worker broke off.", code="worker_failed")


def recorded(name: str) -> bytes:
    """Return a recorded stream."""
    return (RECORDED_AT / f"{name}.sse").read_bytes()


@dataclass
class Relayed:
    """The result of a stream."""

    passed: bytes = b""
    held: bytes = b""
    usage: Usage | None = None
    finish_reason: str | None = None
    pieces: int = 0
    is_end: bool = False
    has_failed: bool = False
    looked_at: list[bytes] = field(default_factory=list)


def relay(
    dialect: Dialect, reads: list[bytes], *, wants_usage: bool = True, wants_metrics: bool = True
) -> Relayed:
    """Process the reads of a stream as the gateway does."""
    buffer, relayed = sse.FrameBuffer(), Relayed()
    for read in reads:
        frames = buffer.feed(read)
        if dialect.needs_care(frames):
            relayed.looked_at.append(frames)
            found = dialect.sort(
                sse.split_frames(frames), wants_usage=wants_usage, wants_metrics=wants_metrics
            )
            frames, relayed.held, relayed.is_end = found.passed, relayed.held + found.held, found.is_end
            relayed.usage = found.usage or relayed.usage
            relayed.finish_reason = found.finish_reason or relayed.finish_reason
            relayed.has_failed |= found.has_failed
        relayed.passed += frames
        relayed.pieces += dialect.count_pieces(frames)
        relayed.finish_reason = dialect.finish_reason(frames) or relayed.finish_reason
    return relayed


@EVERY
@given(data=st.data())
def test_stream_is_the_same_wherever_reads_end(name: str, data: st.DataObject):
    """Frames are forwarded as the worker sent them, and the end is held back."""
    stream = recorded(name)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    reads = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    relayed = relay(STREAMS[name], reads)
    assert relayed.passed + relayed.held == stream
    assert (relayed.is_end, relayed.has_failed) == (True, False)


@EVERY
def test_stream_reports_usage_and_finish_reason(name: str):
    """Six tokens were requested, and all recorded answers were cut off there."""
    relayed = relay(STREAMS[name], [recorded(name)])
    assert relayed.usage is not None
    assert (relayed.usage.completion_tokens, relayed.usage.estimated) == (6, False)
    assert relayed.usage.prompt_tokens > 0
    assert relayed.finish_reason in {"length", "max_output_tokens", "max_tokens"}
    assert 0 < relayed.pieces <= 8


@EVERY
def test_only_the_last_event_waits_for_the_outcome(name: str):
    """Content is sent to the client at once."""
    held = sse.split_frames(relay(STREAMS[name], [recorded(name)]).held)
    ends = {
        "chat": [b"", b""],
        "text": [b"", b""],
        "responses": [b"response.completed"],
        "messages": [b"message_stop"],
    }
    assert [
        event.partition(b"\n")[0].removeprefix(b"event: ") for event in held if event.startswith(b"event")
    ] == [event for event in ends[name] if event]
    assert len(held) == len(ends[name])


@EVERY
def test_completion_is_estimated_until_the_stream_reports_usage(name: str):
    """A stream that breaks off has not reported its usage."""
    frames = sse.split_frames(recorded(name))
    half = relay(STREAMS[name], frames[: len(frames) // 2])
    assert not half.is_end
    assert half.usage is None or half.usage.estimated


@EVERY
def test_metrics_are_removed_unless_requested(name: str):
    """They are for the operator."""
    relayed = relay(STREAMS[name], [recorded(name)], wants_metrics=False)
    assert b'"metrics"' not in relayed.passed + relayed.held
    for frame in sse.split_frames(relayed.held):
        if frame.startswith(b"event"):
            parse_members(data_of(frame))


@EVERY
def test_content_that_quotes_frames_is_content(name: str):
    """A model that explains these APIs writes their events."""
    quoted = (
        'event: response.completed\ndata: {"usage": {}, "error": {}}\n\nevent: message_stop\ndata: [DONE]'
    )
    delta = {
        "chat": {"choices": [{"index": 0, "delta": {"content": quoted}}]},
        "text": {"choices": [{"index": 0, "text": quoted}]},
        "responses": {"type": "response.output_text.delta", "delta": quoted},
        "messages": {"type": "content_block_delta", "delta": {"type": "text_delta", "text": quoted}},
    }[name]
    event = f"event: {delta['type']}\n" if "type" in delta else ""
    frame = f"{event}data: {json.dumps(delta)}\n\n".encode()
    relayed = relay(STREAMS[name], [frame])
    assert (relayed.passed, relayed.held, relayed.is_end, relayed.pieces) == (frame, b"", False, 1)


@EVERY
def test_gateway_error_ends_a_stream_in_its_dialect(name: str):
    """In one frame, which the dialect itself recognises as an error."""
    dialect = STREAMS[name]
    frame = dialect.error_frame(BROKEN)
    relayed = relay(dialect, [frame])
    assert (relayed.passed, relayed.held) == (b"", frame)
    assert (relayed.is_end, relayed.has_failed) == (True, True)


def test_stream_errors_have_the_shape_of_their_dialect():
    """OpenAI's as bare data, the others as an event."""
    openai = {
        "message": "The worker broke off.",
        "type": "server_error",
        "param": None,
        "code": "worker_failed",
    }
    assert json.loads(CHAT.error_frame(BROKEN).removeprefix(b"data: ")) == {"error": openai}
    sent = b'data: {"sequence_number":5}\n\ndata: {"delta":"\\"sequence_number\\":9","sequence_number":6}\n\n'
    frame = RESPONSES.error_frame(BROKEN, after=sent)
    assert frame.startswith(b"event: error\n")
    assert json.loads(data_of(frame)) == {
        "type": "error",
        "code": "worker_failed",
        "message": "The worker broke off.",
        "param": None,
        "sequence_number": 7,
        "error": openai,
    }
    frame = MESSAGES.error_frame(BROKEN)
    assert frame.startswith(b"event: error\n")
    assert json.loads(data_of(frame)) == {
        "type": "error",
        "error": {"type": "api_error", "message": "The worker broke off."},
    }


@pytest.mark.parametrize(
    ("dialect", "frame"),
    [
        (CHAT, b'data: {"error":{"message":"engine died","code":500}}\n\n'),
        (RESPONSES, b'event: error\ndata: {"type":"error","message":"engine died","sequence_number":3}\n\n'),
        (RESPONSES, b'event: error\ndata: {"error":{"message":"engine died"},"sequence_number":3}\n\n'),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"message":"engine died"}}\n\n'),
    ],
)
def test_worker_error_keeps_its_message_and_ends_the_stream(dialect: Dialect, frame: bytes):
    """Frames after it would make a failure look complete."""
    end = {CHAT: b"data: [DONE]\n\n", RESPONSES: b'event: response.completed\ndata: {"response":{}}\n\n'}
    relayed = relay(
        dialect, [frame + end.get(dialect, b'event: message_stop\ndata: {"type":"message_stop"}\n\n')]
    )
    assert (relayed.is_end, relayed.has_failed) == (True, True)
    assert relayed.held.count(b"engine died") in (1, 2)
    assert len(sse.split_frames(relayed.held)) == 1
    if dialect is RESPONSES:
        assert json.loads(data_of(relayed.held))["sequence_number"] == 3


def test_failed_response_is_forwarded_unchanged():
    """Clients wait for this end; it contains the reason."""
    frame = b'event: response.failed\ndata: {"response":{"status":"failed","usage":null}}\n\n'
    relayed = relay(RESPONSES, [frame])
    assert (relayed.held, relayed.is_end, relayed.has_failed) == (frame, True, True)
    assert relayed.finish_reason == "failed"
    assert relayed.usage == Usage(estimated=True)


@pytest.mark.parametrize(
    ("dialect", "frame"),
    [
        (CHAT, b'data: {"usage":{"prompt_tokens":1}\n\n'),
        (RESPONSES, b'event: response.completed\ndata: {"response":\n\n'),
        (MESSAGES, b"event: message_delta\ndata: x\n\n"),
        (MESSAGES, b"event: message_start\ndata: \n\n"),
    ],
)
def test_malformed_usage_is_a_worker_failure(dialect: Dialect, frame: bytes):
    with pytest.raises(WorkerFailedError):
        relay(dialect, [frame])


@pytest.mark.parametrize(
    "data",
    [
        b'{"response":null}',
        b'{"response":[1]}',
        b'{"response":{"usage":[],"status":{},"incomplete_details":5}}',
    ],
)
def test_unusual_last_event_ends_the_stream(data: bytes):
    """It is forwarded; the counts are then an estimate."""
    frame = b"event: response.completed\ndata: " + data + b"\n\n"
    relayed = relay(RESPONSES, [frame], wants_metrics=False)
    assert (relayed.held, relayed.is_end) == (frame, True)
    assert relayed.usage == Usage(estimated=True)


def test_cached_tokens_count_as_prompt_tokens():
    """Anthropic counts them separately."""
    usage = {
        "input_tokens": 2,
        "cache_read_input_tokens": 16,
        "cache_creation_input_tokens": 1,
        "output_tokens": 5,
    }
    answer = MESSAGES.read_answer(
        json.dumps({"usage": usage, "stop_reason": "end_turn"}), wants_metrics=False
    )
    assert (answer.usage, answer.finish_reason) == (Usage(prompt_tokens=19, completion_tokens=5), "end_turn")
