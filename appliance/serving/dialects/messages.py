"""
Anthropic's Messages.

Frames are named events.  The prompt's tokens come with the first, the answer's with the last but one;
`message_stop` ends a stream.  Errors have Anthropic's shape.
"""

from collections.abc import Iterable, Mapping

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member
from appliance.serving.dialects.dialect import (
    Answered,
    Dialect,
    Sorted,
    data_of,
    event_frame,
    event_of,
    value_of,
    word_of,
)
from appliance.serving.error_text import ErrorText, anthropic_error, encode_error
from appliance.serving.refusal import SERVER_ERROR, worker_error
from appliance.serving.usage import Usage, count_of, object_of, parse_answer


class Messages(Dialect):
    """`/v1/messages`."""

    generates = True
    streams = True

    def check(self, members: Mapping[str, Member]) -> None:
        """No other server is called; vLLM would answer as if that had not been asked for."""
        if value_of(members, "mcp_servers"):
            message = "`mcp_servers`: no other server is called from here. Leave it out, or offer `tools`."
            raise InvalidRequestError(message, param="mcp_servers", code="unsupported_parameter")

    def read_answer(self, text: str, *, wants_metrics: bool) -> Answered:  # noqa: ARG002 - it has none
        """Counts, and why the model stopped."""
        members = parse_answer(text)
        return Answered(
            text=text,
            usage=_usage(value_of(members, "usage")),
            finish_reason=word_of(value_of(members, "stop_reason")),
        )

    def needs_care(self, frames: bytes) -> bool:
        """All but the blocks of content between the first event and the last two."""
        return b"event: message_" in frames or b"event: error" in frames

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> Sorted:  # noqa: ARG002
        """Read the counts where they stand, and hold back the end."""
        passed, usage, finish_reason = b"", None, None
        for frame in frames:
            match event_of(frame):
                case b"message_start":
                    message = object_of(value_of(parse_answer(data_of(frame)), "message"))
                    # What the answer will cost is not known yet.
                    usage = _usage(message.get("usage"), estimated=True)
                case b"message_delta":
                    members = parse_answer(data_of(frame))
                    usage = _usage(value_of(members, "usage"))
                    finish_reason = word_of(object_of(value_of(members, "delta")).get("stop_reason"))
                case b"message_stop":
                    return Sorted(
                        passed=passed, held=frame, usage=usage, finish_reason=finish_reason, is_end=True
                    )
                case b"error":
                    # The last frame, whatever the worker sends after it.
                    held = self.error_frame(worker_error(data_of(frame), SERVER_ERROR))
                    return Sorted(
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
        return Sorted(passed=passed, usage=usage, finish_reason=finish_reason)

    def count_pieces(self, frames: bytes) -> int:
        """Deltas of content; the other events only frame them."""
        return frames.count(b"event: content_block_delta\n")

    def error_body(self, error: ErrorText) -> str:
        """An error as Anthropic's clients parse it."""
        return encode_error(anthropic_error(error))

    def error_frame(self, error: ErrorText, *, after: bytes = b"") -> bytes:  # noqa: ARG002 - see responses
        """The `error` event."""
        return event_frame("error", self.error_body(error))


def _usage(value: object, *, estimated: bool = False) -> Usage:
    """Counts as Anthropic gives them: what was read from a cache or written to it is counted apart."""
    usage = object_of(value)
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return Usage(
        prompt_tokens=sum(count_of(usage.get(part)) or 0 for part in parts),
        completion_tokens=count_of(usage.get("output_tokens")) or 0,
        estimated=estimated or not usage,
    )
