"""
What the gateway asks of a family of routes.

A dialect has no state: one value serves all requests.  Frames and answers pass as they came; a
dialect only says which of them must be looked at, what they say, and when a stream has ended.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from appliance.errors import InvalidRequestError
from appliance.infra.json_members import Member
from appliance.serving import sse
from appliance.serving.dialects.edits import Edits
from appliance.serving.error_text import ErrorText, encode_error, openai_error
from appliance.serving.usage import Usage

WORD = re.compile(r"[a-z_]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A whole answer, read."""

    text: str
    """What the client gets."""
    usage: Usage
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """A run of frames, sorted."""

    passed: bytes = b""
    """What may go to the client now."""
    held: bytes = b""
    """What may not go before the outcome is durable."""
    usage: Usage | None = None
    """The last counts the worker gave, if it gave any."""
    finish_reason: str | None = None
    """Why the model stopped, where these frames say so."""
    is_end: bool = False
    """Whether nothing that comes after these frames belongs to the answer."""
    has_failed: bool = False
    """Whether the end is an error."""


class Dialect:
    """A family without streams, whose errors look like OpenAI's; the others say what is different."""

    generates = False
    """Whether a request samples tokens, so that drafts may help and some parameters forbid them."""
    streams = False
    """Whether `stream` is read."""

    def check(self, members: Mapping[str, Member]) -> None:
        """
        Refuse what only this family has.

        Raises:
            InvalidRequestError: with the member's name.
        """

    def wants_usage(self, members: Mapping[str, Member]) -> bool:  # noqa: ARG002 - see chat
        """Whether the client itself asked for the counts of a stream; most families always give them."""
        return True

    def edits(self, members: Mapping[str, Member], *, is_stream: bool) -> Edits:  # noqa: ARG002 - see chat
        """What has to be changed in a body for the gateway to keep its promises."""
        return {}

    def read_answer(self, text: str, *, wants_metrics: bool) -> Answered:
        """
        Read a whole answer.

        Args:
            text: as the worker sent it.
            wants_metrics: whether the worker's `metrics` stay in it.

        Raises:
            WorkerFailedError: it cannot be read.
        """
        raise NotImplementedError

    def needs_care(self, frames: bytes) -> bool:
        """Whether a run of whole frames holds one that must be looked at before it is sent on."""
        raise NotImplementedError

    def sort(self, frames: Iterable[bytes], *, wants_usage: bool, wants_metrics: bool) -> Sorted:
        """
        Sort whole frames of a stream.

        Args:
            frames: single frames, each with its blank line.
            wants_usage: what `wants_usage` said of the request.
            wants_metrics: whether the worker's `metrics` stay in them.

        Raises:
            WorkerFailedError: a frame that must be looked at cannot be read.
        """
        raise NotImplementedError

    def finish_reason(self, frames: bytes) -> str | None:  # noqa: ARG002 - see chat
        """Why the model stopped, where frames say so that need no care."""
        return None

    def count_pieces(self, frames: bytes) -> int:
        """How many frames of a run carry content: the estimate of an answer nobody counted."""
        return frames.count(sse.SEPARATOR)

    def error_body(self, error: ErrorText) -> str:
        """An error as the body of an answer."""
        return encode_error(openai_error(error))

    def error_frame(self, error: ErrorText, *, after: bytes = b"") -> bytes:  # noqa: ARG002 - see responses
        """
        An error as the last frame of a stream.

        Args:
            error: what went wrong.
            after: the frames that were sent last.
        """
        return f"data: {self.error_body(error)}\n\n".encode()


def value_of(members: Mapping[str, Member], name: str) -> object:
    """The value of a member, or None."""
    return members[name].value if name in members else None


def word_of(value: object) -> str | None:
    """A word such as APIs use for why something ended, or None for anything else."""
    return value if isinstance(value, str) and WORD.fullmatch(value) else None


def refuse_state(members: Mapping[str, Member], name: str, advice: str) -> None:
    """Refuse a member that only makes sense where answers are kept; null and false ask for nothing."""
    if value_of(members, name):
        message = f"`{name}` needs answers to be kept, and this gateway keeps none. {advice}"
        raise InvalidRequestError(message, param=name, code="unsupported_parameter")


def event_frame(event: str, data: str) -> bytes:
    """One frame with an event's name."""
    return f"event: {event}\ndata: {data}\n\n".encode()


def event_of(frame: bytes) -> bytes:
    """The event's name in a frame, or nothing."""
    line = frame[: frame.find(b"\n")]
    return line[len(b"event:") :].strip() if line.startswith(b"event:") else b""


def data_of(frame: bytes) -> str:
    """The data of a frame of one event, on one line as vLLM writes it."""
    return frame.decode("utf-8", "replace").partition("\ndata:")[2].strip()


def with_data(frame: bytes, text: str) -> bytes:
    """A frame with other data."""
    return event_frame(event_of(frame).decode(), text)
