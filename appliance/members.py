"""
The members of a JSON object, found and replaced without touching the bytes around them.

The gateway must read a few members and change one or two, and hand on everything else exactly as it
came: re-encoding a body would alter numbers, escapes and key order that a client or worker may
depend on.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from appliance.errors import InvalidRequestError

_WHITESPACE = " \t\n\r"
_DECODER = json.JSONDecoder()
_BRACKETS_AND_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
MAX_DEPTH = 200
"""Nesting beyond this is refused before anything recursive sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member: where it stands in the text, and its value."""

    start: int
    """Offset of the opening quote of the key."""
    value_start: int
    end: int
    """Offset just after the value."""
    value: Any


def parse_members(text: str) -> dict[str, Member]:
    """
    Find the top-level members of the JSON object `text`.

    Raises:
        InvalidRequestError: the text is no JSON object, and where it stops being one; or it gives a
            key twice, which two parsers could read differently.
    """
    _refuse_depth(text)
    try:
        return _scan(text)
    except (ValueError, IndexError, RecursionError) as error:
        place = f" (character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        message = f"The body is not a JSON object{place}. Send one with `Content-Type: application/json`."
        raise InvalidRequestError(message, code="invalid_json") from error


def replace_member(text: str, members: dict[str, Member], key: str, value: str) -> str:
    """Return `text` with `key` set to the JSON text `value`, added first when it was missing."""
    member = members.get(key)
    if member is not None:
        return text[: member.value_start] + value + text[member.end :]
    opening = text.index("{") + 1
    comma = "," if members else ""
    return f"{text[:opening]}{json.dumps(key)}:{value}{comma}{text[opening:]}"


def cut_member(text: str, members: dict[str, Member], key: str) -> str:
    """Return `text` without `key` and without the comma that belonged to it."""
    member = members.get(key)
    if member is None:
        return text
    before, after = text[: member.start].rstrip(_WHITESPACE), text[member.end :].lstrip(_WHITESPACE)
    if after.startswith(","):
        return before + after[1:].lstrip(_WHITESPACE)
    return before.removesuffix(",") + after


def _scan(text: str) -> dict[str, Member]:
    members: dict[str, Member] = {}
    at = _skip(text, 0)
    if text[at] != "{":
        raise json.JSONDecodeError("no object", text, at)
    at = _skip(text, at + 1)
    if text[at] == "}":
        return _end(text, at + 1, members)
    while True:
        start = at
        if text[at] != '"':
            raise json.JSONDecodeError("no key", text, at)
        key, at = _DECODER.raw_decode(text, at)
        if key in members:
            raise json.JSONDecodeError("a key twice", text, start)
        at = _skip(text, at)
        if text[at] != ":":
            raise json.JSONDecodeError("no colon", text, at)
        value_start = _skip(text, at + 1)
        value, end = _DECODER.raw_decode(text, value_start)
        members[key] = Member(start=start, value_start=value_start, end=end, value=value)
        at = _skip(text, end)
        if text[at] == "}":
            return _end(text, at + 1, members)
        if text[at] != ",":
            raise json.JSONDecodeError("no comma", text, at)
        at = _skip(text, at + 1)


def _end(text: str, at: int, members: dict[str, Member]) -> dict[str, Member]:
    if text[at:].strip(_WHITESPACE):
        raise json.JSONDecodeError("text after the object", text, at)
    return members


def _skip(text: str, at: int) -> int:
    while text[at] in _WHITESPACE:
        at += 1
    return at


def _refuse_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _BRACKETS_AND_STRINGS.finditer(text):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        if depth > MAX_DEPTH:
            message = f"The body nests deeper than {MAX_DEPTH} levels."
            raise InvalidRequestError(message, code="invalid_json")
