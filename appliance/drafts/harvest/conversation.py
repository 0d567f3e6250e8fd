"""
A request and its answer as text, from the bytes that were kept of both.

Pure.  What cannot be brought back to the tokens the worker saw is refused with its reason; the rest
is still compared, token by token, by `harvest.rendering`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from appliance.drafts.harvest.reasons import Skipped

EOS = "eos"
"""Ended by the tokenizer's own last token."""


class UnusableError(Exception):
    """Why a request cannot be used; never leaves this package, and never holds any of its text."""

    def __init__(self, reason: Skipped) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the prompt is made of: messages, a text, or tokens."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    """For the chat template; `content` is a text, or a list of texts."""
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    text: str | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came, and how it ended."""

    text: str
    end: str | int | None
    """`eos`, the token that ended it, or None: it was cut off by its length or by a stop text."""
    stop: str = ""
    """The text that stopped it, which the answer leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Both."""

    asked: Asked
    answer: Answer


def refuse(reason: Skipped) -> NoReturn:
    """Give a request up; raises UnusableError."""
    raise UnusableError(reason)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text; raises UnusableError."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else refuse(Skipped.UNREADABLE)


def text_of(value: object) -> str:
    """A text; raises UnusableError for anything else."""
    return value if isinstance(value, str) else refuse(Skipped.UNREADABLE)


def list_of(value: object) -> list[Any]:
    """A list; raises UnusableError for anything else."""
    return value if isinstance(value, list) else refuse(Skipped.UNREADABLE)


def object_of(value: object) -> dict[str, Any]:
    """An object; raises UnusableError for anything else."""
    return value if isinstance(value, dict) else refuse(Skipped.UNREADABLE)
