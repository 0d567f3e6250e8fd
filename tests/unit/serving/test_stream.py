"""Promises of `appliance.serving.stream`: content passes, and what ends a stream is held back."""

import json

import pytest

from appliance.errors import WorkerFailedError
from appliance.serving.stream import sort_frames
from appliance.serving.usage import Usage
from tests.fakes import SPECULATION, USAGE, frame_of

DONE = b"data: [DONE]\n\n"
CONTENT = frame_of({"choices": [{"delta": {"content": 'of "usage": {'}}]})
COUNTS = frame_of({"choices": [], "usage": USAGE, "metrics": SPECULATION})
READ = Usage(prompt_tokens=7, completion_tokens=10, drafts=4, draft_tokens=12, accepted_tokens=6)


@pytest.mark.parametrize(
    ("wants_usage", "wants_metrics", "held"),
    [
        (False, False, DONE),
        (False, True, DONE),
        (True, False, frame_of({"choices": [], "usage": USAGE}) + DONE),
        (True, True, COUNTS + DONE),
    ],
)
def test_the_usage_frame_goes_to_whoever_asked_with_metrics_for_whoever_asked(
    wants_usage: bool, wants_metrics: bool, held: bytes
):
    """It is always read, and never sent before the outcome is durable."""
    found = sort_frames([CONTENT, COUNTS, DONE], wants_usage=wants_usage, wants_metrics=wants_metrics)
    assert (found.passed, found.held, found.usage) == (CONTENT, held, READ)
    assert (found.is_end, found.has_failed) == (True, False)


def test_content_with_usage_in_it_passes():
    """Usage asked for in every frame must not stop the stream; the last counts are kept."""
    frames = [
        frame_of({"choices": [{"index": 0}], "usage": {**USAGE, "completion_tokens": count}})
        for count in (1, 2)
    ]
    found = sort_frames(frames, wants_usage=True, wants_metrics=False)
    assert (found.passed, found.held, found.is_end) == (b"".join(frames), b"", False)
    assert found.usage == Usage(prompt_tokens=7, completion_tokens=2)


def test_nothing_follows_an_error():
    """`[DONE]` after an error would make a failure look whole."""
    error = frame_of({"error": {"message": "engine died", "code": 500}})
    found = sort_frames([CONTENT, error, DONE], wants_usage=True, wants_metrics=True)
    assert (found.passed, found.is_end, found.has_failed) == (CONTENT, True, True)
    assert json.loads(found.held.removeprefix(b"data: "))["error"]["message"] == "engine died"


def test_a_usage_frame_that_cannot_be_read_is_a_failed_worker():
    """Cut or forged counts are not passed on."""
    with pytest.raises(WorkerFailedError):
        sort_frames([b'data: {"usage":{"prompt_tokens":1}\n\n'], wants_usage=True, wants_metrics=False)
