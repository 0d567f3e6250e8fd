"""
OpenAI's Responses, without state: every request contains its whole conversation.

Frames are named events.  The one that ends a stream carries the whole response, usage included.  vLLM 0.32
stores nothing by default, but its own default for `store` is true, and it can be configured to keep answers
in memory for ever: the gateway sets `store: false` unless the client does.
"""

import json
import re
from collections.abc import Iterable, Mapping

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, cut_member, replace_member, value_of
from appliance.serving.dialects.dialect import (
    Dialect,
    Edits,
    ParsedAnswer,
    SortedFrames,
    data_of,
    event_frame,
    event_of,
    refuse_state,
    with_data,
    word_of,
)
from appliance.serving.error_text import SERVER_ERROR, ErrorText, openai_error, worker_error
from appliance.serving.usage import Usage, object_of, parse_answer, parse_usage

ENDS = (b"response.completed", b"response.incomplete", b"response.failed", b"response.cancelled")
FAILED = b"response.failed"
ERROR = b"error"
_SEQUENCE = re.compile(rb'"sequence_number"\s*:\s*([0-9]{1,9})\b')
CLIENT_TOOLS = frozenset({"function", "custom", "namespace"})
SEND_ALL = "Send the whole conversation in `input`."


class Responses(Dialect):
    generates = True
    streams = True

    def check(self, members: Mapping[str, Member]) -> None:
        refuse_state(members, "store", "Leave it out or send false.")
        refuse_state(members, "background", "Leave it out; use `stream` for long answers.")
        for name in ("previous_response_id", "conversation"):
            refuse_state(members, name, SEND_ALL)
        tools = value_of(members, "tools")
        for tool in tools if isinstance(tools, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind not in CLIENT_TOOLS:
                # vLLM would answer as if the tool were absent.
                message = f"`tools`: `{kind[:64]}` is not supported. Omit it, or use a `function`."
                raise InvalidRequestError(message, param="tools", code="unsupported_parameter")

    def edits(self, members: Mapping[str, Member], *, is_stream: bool) -> Edits:  # noqa: ARG002 - as the base
        return {} if value_of(members, "store") is False else {"store": "false"}

    def read_answer(self, text: str, *, wants_metrics: bool) -> ParsedAnswer:
        members = parse_answer(text)
        return ParsedAnswer(
            text=text if wants_metrics else cut_member(text, members, "metrics"),
            usage=_usage(members),
            finish_reason=_finish_reason(members),
        )

    def needs_care(self, frames: bytes) -> bool:
        """The events that end a stream; content that names one is parsed in vain."""
        return b"event: error" in frames or any(b"event: " + event in frames for event in ENDS)

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> SortedFrames:  # noqa: ARG002
        passed = b""
        for frame in frames:
            event = event_of(frame)
            if event in ENDS:
                text = data_of(frame)
                outer = parse_answer(text)
                response = _response(text, outer)
                members = parse_answer(response)
                if "metrics" in members and not wants_metrics:
                    cut = replace_member(text, outer, "response", cut_member(response, members, "metrics"))
                    frame = with_data(frame, cut)  # noqa: PLW2901 - the same event
                return SortedFrames(
                    passed=passed,
                    held=frame,
                    usage=_usage(members),
                    finish_reason=_finish_reason(members),
                    is_end=True,
                    has_failed=event == FAILED,
                )
            if event == ERROR:
                error = worker_error(data_of(frame), SERVER_ERROR)
                held = _error_event(error, next(iter(_sequences(frame)), 0))
                return SortedFrames(passed=passed, held=held, is_end=True, has_failed=True)
            passed += frame
        return SortedFrames(passed=passed)

    def count_pieces(self, frames: bytes) -> int:
        """Deltas; the other events only frame them."""
        return frames.count(b".delta\ndata:")

    def error_frame(self, error: ErrorText, *, after: bytes = b"") -> bytes:
        *_, last = (-1, *_sequences(after))
        return _error_event(error, last + 1)


def _error_event(error: ErrorText, sequence: int) -> bytes:
    """Its members as OpenAI documents them, and below `error`, on which alone OpenAI's client raises."""
    content = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": sequence,
        **openai_error(error),
    }
    return event_frame("error", json.dumps(content))


def _sequences(frames: bytes) -> list[int]:
    """Sequence numbers of events.  Quotes inside content are escaped, so none of them is part of a text."""
    return [int(digits) for digits in _SEQUENCE.findall(frames)]


def _usage(members: Mapping[str, Member]) -> Usage:
    return parse_usage(members, prompt="input_tokens", completion="output_tokens")


def _response(text: str, members: Mapping[str, Member]) -> str:
    member = members.get("response")
    if member is None or not isinstance(member.value, dict):
        return "{}"
    return text[member.value_start : member.end]


def _finish_reason(members: Mapping[str, Member]) -> str | None:
    """`completed`, `failed` and so on, or why it is incomplete."""
    reason = object_of(value_of(members, "incomplete_details")).get("reason") or value_of(members, "status")
    return word_of(reason)
