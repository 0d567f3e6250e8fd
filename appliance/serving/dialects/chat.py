"""
OpenAI's chat and text completions.

Frames are bare `data:`; the last is `data: [DONE]`.  Usage comes in a frame of its own, and only on
request: the gateway always requests it, and removes that frame for clients that did not.
"""

import json
from collections.abc import Iterable, Mapping

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, cut_member, value_of
from appliance.serving import sse
from appliance.serving.dialects.dialect import Dialect, Edits, ParsedAnswer, SortedFrames
from appliance.serving.error_text import SERVER_ERROR, worker_error
from appliance.serving.usage import first_finish_reason, parse_answer, parse_usage

MAX_OPTIONS = 4096
"""Characters of `stream_options`, which the gateway writes again; it has three flags."""
ASKING = '{"include_usage": true}'


class Chat(Dialect):
    generates = True
    streams = True

    def check(self, members: Mapping[str, Member]) -> None:
        """`stream_options` must be an object, so that the gateway can add to it."""
        options = value_of(members, "stream_options")
        if options is not None and not isinstance(options, dict):
            raise InvalidRequestError("`stream_options` must be an object.", param="stream_options")
        if options and members["stream_options"].end - members["stream_options"].value_start > MAX_OPTIONS:
            message = f"`stream_options` has more than {MAX_OPTIONS} characters."
            raise InvalidRequestError(message, param="stream_options")

    def wants_usage(self, members: Mapping[str, Member]) -> bool:
        options = value_of(members, "stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def edits(self, members: Mapping[str, Member], *, is_stream: bool) -> Edits:
        """Request usage on streams: metering needs it."""
        if not is_stream or self.wants_usage(members):
            return {}
        options = value_of(members, "stream_options")
        given = options if isinstance(options, dict) else {}
        return {"stream_options": json.dumps({**given, "include_usage": True}) if given else ASKING}

    def read_answer(self, text: str, *, wants_metrics: bool) -> ParsedAnswer:
        members = parse_answer(text)
        return ParsedAnswer(
            text=text if wants_metrics else cut_member(text, members, "metrics"),
            usage=parse_usage(members),
            finish_reason=first_finish_reason(members),
        )

    def needs_care(self, frames: bytes) -> bool:
        return sse.needs_care(frames)

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> SortedFrames:
        """Read usage, hold back the end, and drop the usage frame if only the gateway requested it."""
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
                # The last frame: a following `[DONE]` would make the answer look complete.
                held += self.error_frame(worker_error(sse.payload(frame), SERVER_ERROR))
                return SortedFrames(passed=passed, held=held, usage=usage, is_end=True, has_failed=True)
            else:
                passed += frame
        return SortedFrames(passed=passed, held=held, usage=usage, is_end=is_end)

    def finish_reason(self, frames: bytes) -> str | None:
        return sse.finish_reason(frames)
