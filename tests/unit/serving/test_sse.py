"""Frames are the same wherever reads end."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving import sse

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
FRAME = st.lists(LINE.filter(bool), min_size=1, max_size=3).map(
    lambda lines: "\n".join(lines).encode() + b"\n\n"
)
FRAMES = st.lists(FRAME, max_size=12)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


def fed(reads: list[bytes]) -> tuple[bytes, bytes]:
    """The frames and the rest after these reads."""
    buffer = sse.FrameBuffer()
    return b"".join(buffer.feed(read) for read in reads), buffer.rest


@given(FRAMES, LINE, st.lists(st.integers(0), max_size=30))
def test_frames_are_the_same_wherever_reads_end(frames: list[bytes], unfinished: str, places: list[int]):
    """Also inside characters; the rest is the same too."""
    stream = b"".join(frames) + unfinished.encode()
    whole, rest = fed(cut(stream, places))
    assert whole == b"".join(frames)
    assert rest == unfinished.encode()


@given(FRAMES)
def test_frames_are_split_as_they_were_joined(frames: list[bytes]):
    assert sse.split_frames(b"".join(frames)) == frames


@given(st.text("a\n", max_size=12).map(str.encode), st.lists(st.integers(0, 12), max_size=12))
def test_extra_blank_lines_are_cut_the_same_way_too(stream: bytes, places: list[int]):
    """Blank lines between frames are allowed, and do not depend on where reads end."""
    assert fed(cut(stream, places)) == fed([stream])


@given(st.text("a\n", max_size=30).map(str.encode))
def test_no_byte_is_lost_or_added(stream: bytes):
    """Neither by the buffer nor by `split_frames`."""
    frames, rest = fed([stream])
    assert frames + rest == stream
    assert b"".join(sse.split_frames(frames)) == frames


def test_frames_are_forwarded_as_soon_as_they_are_complete():
    """A frame does not wait for the next one."""
    buffer = sse.FrameBuffer()
    assert buffer.feed(b"data: 1\n") == b""
    assert buffer.feed(b"\ndata: 2") == b"data: 1\n\n"
    assert buffer.rest == b"data: 2"


@pytest.mark.parametrize(
    ("frame", "done", "usage", "error"),
    [
        (b"data: [DONE]\n\n", True, False, False),
        (b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n', False, True, False),
        (b'data: {"choices":[],"usage" : {"prompt_tokens":1}}\n\n', False, True, False),
        (b'data: {"choices":[{"delta":{"content":"x"}}],"usage":null}\n\n', False, False, False),
        (b'data: {"error":{"message":"x"}}\n\n', False, False, True),
        (b'data: { "error" : {"message":"x"}}\n\n', False, False, True),
        (b'data: {"choices":[{"delta":{"content":"error"}}]}\n\n', False, False, False),
        (b": keep-alive\n\n", False, False, False),
    ],
)
def test_frames_are_classified(frame: bytes, done: bool, usage: bool, error: bool):
    """The end, usage and errors are recognised, and no other frame."""
    assert (sse.is_done(frame), sse.is_usage(frame), sse.is_error(frame)) == (done, usage, error)


@given(st.text())
def test_completion_text_is_never_mistaken_for_a_member(text: str):
    """Inside a string, model output is neither end, usage nor error."""
    for content in (
        text,
        f'"usage":{{{text}',
        f'data: {{"error":{text}',
        "data: [DONE]\n\n",
        f"{text}[DONE]",
    ):
        for ascii_only in (True, False):
            chunk = {"id": "c", "choices": [{"delta": {"content": content}, "finish_reason": None}]}
            encoded = json.dumps(chunk, ensure_ascii=ascii_only, separators=(",", ":"))
            frame = f"data: {encoded}\n\n".encode("utf-8", "surrogatepass")
            assert sse.split_frames(frame) == [frame]
            assert not sse.is_done(frame)
            assert not sse.is_usage(frame)
            assert not sse.is_error(frame)
            assert sse.finish_reason(frame) is None


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (b'data: {"choices":[{"finish_reason":null}]}\n\n', None),
        (b'data: {"choices":[{"finish_reason":"stop"}]}\n\n', "stop"),
        (b'data: {"choices":[{"finish_reason" : "tool_calls"}]}\n\n', "tool_calls"),
        (b'data: {"finish_reason":"stop"}\n\ndata: {"finish_reason":"length"}\n\n', "length"),
    ],
)
def test_the_last_finish_reason_counts(frames: bytes, reason: str | None):
    assert sse.finish_reason(frames) == reason


def test_a_payload_is_the_text_after_data():
    """The text of a frame, without its field name and blank line."""
    assert sse.payload(b'data: {"a":"\xc3\xa9"}\n\n') == '{"a":"é"}'


@pytest.mark.parametrize("frame", [b"data: [DONE]\n\n", b'data: {"usage":{}}\n\n', b'data: {"error":{}}\n\n'])
def test_every_meaningful_frame_needs_care(frame: bytes):
    """`needs_care` may report too many frames, never too few."""
    assert sse.needs_care(b'data: {"choices":[]}\n\n' + frame)
