"""
OpenAI's chat and text completions.

Frames are bare `data:`; the last is `data: [DONE]`.  Counts come in a frame of their own, and only if
they are asked for: the gateway always asks, and keeps that frame from clients that did not.
"""

import json
from collections.abc import Iterable, Mapping

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, cut_member
from appliance.serving import sse
from appliance.serving.dialects.dialect import Answered, Dialect, Sorted, value_of
from appliance.serving.dialects.edits import Edits
from appliance.serving.refusal import SERVER_ERROR, worker_error
from appliance.serving.usage import first_finish_reason, parse_answer, parse_usage

ASKING = '{"include_usage": true}'


class Chat(Dialect):
    """`/v1/chat/completions` and `/v1/completions`."""

    generates = True
    streams = True

    def check(self, members: Mapping[str, Member]) -> None:
        """`stream_options` must be what the gateway can add to."""
        options = value_of(members, "stream_options")
        if options is not None and not isinstance(options, dict):
            message = "`stream_options` must be an object."
            raise InvalidRequestError(message, param="stream_options")

    def wants_usage(self, members: Mapping[str, Member]) -> bool:
        """Whether `stream_options.include_usage` is true."""
        options = value_of(members, "stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def edits(self, members: Mapping[str, Member], *, is_stream: bool) -> Edits:
        """Usage is asked for on streams: metering needs it."""
        if not is_stream or self.wants_usage(members):
            return {}
        options = value_of(members, "stream_options")
        given = options if isinstance(options, dict) else {}
        return {"stream_options": json.dumps({**given, "include_usage": True}) if given else ASKING}

    def read_answer(self, text: str, *, wants_metrics: bool) -> Answered:
        """Counts and drafts, and why the first choice ended."""
        members = parse_answer(text)
        return Answered(
            text=text if wants_metrics else cut_member(text, members, "metrics"),
            usage=parse_usage(members),
            finish_reason=first_finish_reason(members),
        )

    def needs_care(self, frames: bytes) -> bool:
        """Counts, errors and the end; all other frames are content."""
        return sse.needs_care(frames)

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> Sorted:
        """Read counts, hold back the end, and drop the frame that exists only because we asked for it."""
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
                # Clients that did not ask for the frame with empty `choices` may index `choices[0]`.
                if "choices" in members and members["choices"].value:
                    passed += rewritten
                elif wants_usage:
                    held += rewritten
            elif sse.is_error(frame):
                # The last frame, whatever the worker sends after it: `[DONE]` would make it look whole.
                held += self.error_frame(worker_error(sse.payload(frame), SERVER_ERROR))
                return Sorted(passed=passed, held=held, usage=usage, is_end=True, has_failed=True)
            else:
                passed += frame
        return Sorted(passed=passed, held=held, usage=usage, is_end=is_end)

    def finish_reason(self, frames: bytes) -> str | None:
        """It stands next to the last content."""
        return sse.finish_reason(frames)
