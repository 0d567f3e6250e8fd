"""
The interface of a route family.

A dialect has no state: one value serves all requests.  Frames and answers pass unchanged; a dialect only
decides which of them must be parsed, what they report, and when a stream has ended.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member, skip_back, skip_space, value_of
from appliance.serving import sse
from appliance.serving.error_text import ErrorText, encode_error, openai_error
from appliance.serving.usage import Usage

WORD = re.compile(r"[a-z_]{1,32}")
Edits = Mapping[str, str | None]
"""New JSON text by key; None removes the member."""
Splice = tuple[int, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    text: str
    """What the client receives."""
    usage: Usage
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedFrames:
    """A run of frames, sorted."""

    passed: bytes = b""
    """Bytes that may be sent to the client now."""
    held: bytes = b""
    """Bytes that must not be sent before the outcome is durable."""
    usage: Usage | None = None
    finish_reason: str | None = None
    is_end: bool = False
    """Whether nothing after these frames belongs to the answer."""
    has_failed: bool = False


class Dialect:
    """A family without streams, with OpenAI's errors; subclasses override what differs."""

    generates = False
    """Whether a request samples tokens, so that drafts may help and some parameters forbid them."""
    streams = False

    def check(self, members: Mapping[str, Member]) -> None:
        """Refuse members that only this family has, by InvalidRequestError with the member's name."""

    def wants_usage(self, members: Mapping[str, Member]) -> bool:  # noqa: ARG002 - see chat
        """Whether the client requested the usage of a stream; most families always report it."""
        return True

    def edits(self, members: Mapping[str, Member], *, is_stream: bool) -> Edits:  # noqa: ARG002 - see chat
        """Changes to the body that the gateway's guarantees need."""
        return {}

    def read_answer(self, text: str, *, wants_metrics: bool) -> ParsedAnswer:
        """Read a whole answer; `wants_metrics` keeps the worker's `metrics` in its text."""
        raise NotImplementedError

    def needs_care(self, frames: bytes) -> bool:
        """Whether a run of whole frames contains one that must be parsed before it is forwarded."""
        raise NotImplementedError

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> SortedFrames:
        """Sort single frames, each with its blank line; raises WorkerFailedError if one is malformed."""
        raise NotImplementedError

    def finish_reason(self, frames: bytes) -> str | None:  # noqa: ARG002 - see chat
        """Why the model stopped, if frames that need no parsing contain it."""
        return None

    def count_pieces(self, frames: bytes) -> int:
        """Frames with content in a run: the estimate for an answer without usage."""
        return frames.count(sse.SEPARATOR)

    def error_body(self, error: ErrorText) -> str:
        return encode_error(openai_error(error))

    def error_frame(self, error: ErrorText, *, after: bytes = b"") -> bytes:  # noqa: ARG002 - see responses
        """An error as the last frame of a stream; `after` are the frames sent before it."""
        return f"data: {self.error_body(error)}\n\n".encode()


def splices_of(text: str, members: Mapping[str, Member], edits: Edits) -> list[Splice]:
    """
    Start, end and replacement of each change of several members at once, in order.

    At least one member must remain, and no key may need an escape.
    """
    splices: list[Splice] = []
    # From the end: if the next member is cut too, its comma may be the one that remains.
    for key in sorted(edits.keys() & members.keys(), key=lambda key: members[key].start, reverse=True):
        value, member = edits[key], members[key]
        if value is not None:
            splices.append((member.value_start, member.end, value))
            continue
        start, end = skip_back(text, member.start), skip_space(text, member.end)
        if splices and end == splices[-1][0]:
            end = splices.pop()[1]
        if text[end] == ",":
            end = skip_space(text, end + 1)
        elif text[start - 1] == ",":
            start -= 1
        if splices and end >= splices[-1][0]:
            end = splices.pop()[1]
        splices.append((start, end, ""))
    added = [f'"{key}":{value},' for key, value in edits.items() if value is not None and key not in members]
    if added:
        opening = text.index("{") + 1
        splices.append((opening, opening, "".join(added)))
    return splices[::-1]


def word_of(value: object) -> str | None:
    """The value if it is a word as APIs use for a finish reason, else None."""
    return value if isinstance(value, str) and WORD.fullmatch(value) else None


def refuse_state(members: Mapping[str, Member], name: str, advice: str) -> None:
    """Refuse a member that needs stored answers; null and false are accepted."""
    if value_of(members, name):
        message = f"`{name}` needs stored answers, and this gateway stores none. {advice}"
        raise InvalidRequestError(message, param=name, code="unsupported_parameter")


def event_frame(event: str, data: str) -> bytes:
    return f"event: {event}\ndata: {data}\n\n".encode()


def event_of(frame: bytes) -> bytes:
    line = frame[: frame.find(b"\n")]
    return line[len(b"event:") :].strip() if line.startswith(b"event:") else b""


def data_of(frame: bytes) -> str:
    """The data of a frame of one event, on one line as vLLM writes it."""
    return frame.decode("utf-8", "replace").partition("\ndata:")[2].strip()


def with_data(frame: bytes, text: str) -> bytes:
    return event_frame(event_of(frame).decode(), text)
