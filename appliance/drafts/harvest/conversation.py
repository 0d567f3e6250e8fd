"""
A request and its answer as text.  Pure.

A request whose tokens cannot be reproduced is refused with a reason; `harvest.rendering` compares the
others token by token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

EOS = "eos"
"""Ended by the tokenizer's EOS token."""


class Skipped(StrEnum):
    """Why a request is skipped: the first reason that applies."""

    # Known from the log.
    NOT_COMPLETED = "not_completed"
    OTHER_ROUTE = "other_route"
    """No answer to train on."""
    OTHER_MODEL = "other_model"
    OTHER_WEIGHTS = "other_weights"
    UNCOUNTED = "uncounted"
    """The worker did not report token counts, so a tokenization cannot be checked."""
    TRUNCATED = "truncated"
    NO_ANSWER = "no_answer"
    TOOL_CALL = "tool_call"
    """The worker does not return the text a tool call was parsed from."""
    TOO_LONG = "too_long"
    # A limit of the selection.
    NO_ROOM = "no_room"
    # Known from the content.
    WITHDRAWN = "withdrawn"
    ERASED = "erased"
    """Or its key is not on this machine."""
    ALTERED = "altered"
    """Differs from the log's commitment: run `appliance audit verify`."""
    UNREADABLE = "unreadable"
    MEDIA = "media"
    SEVERAL_ANSWERS = "several_answers"
    REASONING = "reasoning"
    UNUSUAL = "unusual"
    """An option changes how text maps to tokens."""
    PROMPT_DIFFERS = "prompt_differs"
    """The target's template gives another number of tokens than the worker counted."""
    ANSWER_DIFFERS = "answer_differs"
    """The text does not map back to the tokens the worker counted."""
    DUPLICATE = "duplicate"


class UnusableError(Exception):
    """A request cannot be used; stays in this package and never holds any of its text."""

    def __init__(self, reason: Skipped) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """The content of a prompt: messages, a text, or tokens."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    """For the chat template; `content` is a text, or a list of texts."""
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the chat template."""
    text: str | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    text: str
    end: str | int | None
    """`eos`, the ID of the last token, or None if length or a stop text ended it."""
    stop: str = ""
    """The stop text, which the answer leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    prompt: PromptSource
    answer: SampledAnswer


def refuse(reason: Skipped) -> NoReturn:
    raise UnusableError(reason)


def parse_object(text: str | bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else refuse(Skipped.UNREADABLE)


def text_of(value: object) -> str:
    return value if isinstance(value, str) else refuse(Skipped.UNREADABLE)


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else refuse(Skipped.UNREADABLE)


def object_of(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else refuse(Skipped.UNREADABLE)
