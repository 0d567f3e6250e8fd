"""
Anthropic's Messages.

Frames are named events.  Prompt tokens come with the first, completion tokens with the last but one;
`message_stop` ends a stream.  Errors have Anthropic's shape.
"""

from collections.abc import Iterable, Mapping

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, value_of
from appliance.serving.dialects.dialect import (
    Dialect,
    ParsedAnswer,
    SortedFrames,
    data_of,
    event_frame,
    event_of,
    word_of,
)
from appliance.serving.error_text import SERVER_ERROR, ErrorText, anthropic_error, encode_error, worker_error
from appliance.serving.usage import Usage, count_of, object_of, parse_answer


class Messages(Dialect):
    generates = True
    streams = True

    def check(self, members: Mapping[str, Member]) -> None:
        """No other server is called; vLLM would answer as if the member were absent."""
        if value_of(members, "mcp_servers"):
            message = "`mcp_servers` is not supported: no other server is called. Omit it, or use `tools`."
            raise InvalidRequestError(message, param="mcp_servers", code="unsupported_parameter")

    def read_answer(self, text: str, *, wants_metrics: bool) -> ParsedAnswer:  # noqa: ARG002 - it has none
        members = parse_answer(text)
        return ParsedAnswer(
            text=text,
            usage=_usage(value_of(members, "usage")),
            finish_reason=word_of(value_of(members, "stop_reason")),
        )

    def needs_care(self, frames: bytes) -> bool:
        """All frames except the blocks of content between the first event and the last two."""
        return b"event: message_" in frames or b"event: error" in frames

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> SortedFrames:  # noqa: ARG002
        passed, usage, finish_reason = b"", None, None
        for frame in frames:
            match event_of(frame):
                case b"message_start":
                    message = object_of(value_of(parse_answer(data_of(frame)), "message"))
                    # The completion tokens are not known yet.
                    usage = _usage(message.get("usage"), estimated=True)
                case b"message_delta":
                    members = parse_answer(data_of(frame))
                    usage = _usage(value_of(members, "usage"))
                    finish_reason = word_of(object_of(value_of(members, "delta")).get("stop_reason"))
                case b"message_stop":
                    return SortedFrames(
                        passed=passed, held=frame, usage=usage, finish_reason=finish_reason, is_end=True
                    )
                case b"error":
                    # The last frame: frames after it are dropped.
                    held = self.error_frame(worker_error(data_of(frame), SERVER_ERROR))
                    return SortedFrames(
                        passed=passed,
                        held=held,
                        usage=usage,
                        finish_reason=finish_reason,
                        is_end=True,
                        has_failed=True,
                    )
                case _:
                    pass
            passed += frame
        return SortedFrames(passed=passed, usage=usage, finish_reason=finish_reason)

    def count_pieces(self, frames: bytes) -> int:
        """Deltas of content; the other events only frame them."""
        return frames.count(b"event: content_block_delta\n")

    def error_body(self, error: ErrorText) -> str:
        return encode_error(anthropic_error(error))

    def error_frame(self, error: ErrorText, *, after: bytes = b"") -> bytes:  # noqa: ARG002 - see responses
        return event_frame("error", self.error_body(error))


def _usage(value: object, *, estimated: bool = False) -> Usage:
    """Usage as Anthropic reports it: tokens read from a cache or written to it are counted separately."""
    usage = object_of(value)
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return Usage(
        prompt_tokens=sum(count_of(usage.get(part)) or 0 for part in parts),
        completion_tokens=count_of(usage.get("output_tokens")) or 0,
        estimated=estimated or not usage,
    )
