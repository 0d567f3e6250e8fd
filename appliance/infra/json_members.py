"""
The members of a JSON object, found and replaced without touching the bytes around them.

Everything else is forwarded exactly as it came: re-encoding a body would alter numbers, escapes and key order
that a client or worker may depend on.
"""

import json
import re
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from appliance.errors import InvalidRequestError

_WHITESPACE = " \t\n\r"
_DECODER = json.JSONDecoder()
# Possessive, and a string without its end reaches to the end of the text: every match succeeds without
# a way back, so that no text takes more than one pass, nor memory for the places to go back to.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_USUAL_KEY = re.compile(r'"([a-z_]+)":[ \t\n\r]*(?=[^ \t\n\r])')
_AFTER_NUMBER = re.compile(r"(?<=[0-9]),")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))
MAX_DEPTH = 200
"""Nesting beyond this is refused before anything recursive sees it."""
MAX_VALUES = 100_000
"""Maximum values in a body, at all depths: in memory an empty list takes thirty times its two characters."""
MAX_NUMBERS = 1_000_000
"""Maximum numbers in lists in addition, on routes that take tokens: those are lists of numbers."""
MAX_MEMBERS = 1000


class Member(NamedTuple):
    start: int
    """Offset of the opening quote of the key."""
    value_start: int
    end: int
    """Offset just after the value."""
    value: Any


def decode_body(body: bytes | bytearray) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        message = "The body is not UTF-8 text. Send JSON with `Content-Type: application/json`."
        raise InvalidRequestError(message, code="invalid_json") from error


def parse_members(text: str, *, max_numbers: int = MAX_NUMBERS, bounded: bool = True) -> dict[str, Member]:
    """
    Find the top-level members of a JSON object; a worker's own answers are not `bounded`.

    `max_numbers` are allowed in lists in addition to `MAX_VALUES` values.

    Raises InvalidRequestError if the text is not a JSON object, has a key twice, which two parsers could read
    differently, or is beyond a bound.
    """
    if bounded:
        _refuse_bombs(text, max_numbers)
    try:
        return _scan(text, MAX_MEMBERS if bounded else len(text))
    except (ValueError, IndexError, RecursionError) as error:
        place = f" (character {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        message = f"The body is not a JSON object{place}. Send one with `Content-Type: application/json`."
        raise InvalidRequestError(message, code="invalid_json") from error


def value_of(members: Mapping[str, Member], name: str) -> Any:  # noqa: ANN401 - decoded JSON
    return members[name].value if name in members else None


def count_of(members: Mapping[str, Member], name: str) -> int | None:
    """A member that is a whole number of at least 0, also if it is written as `16.0`; None for all others."""
    value = value_of(members, name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def replace_member(text: str, members: dict[str, Member], key: str, value: str) -> str:
    """Return `text` with `key` set to the JSON text `value`, added first when it was missing."""
    member = members.get(key)
    if member is not None:
        return text[: member.value_start] + value + text[member.end :]
    opening = text.index("{") + 1
    comma = "," if members else ""
    return f"{text[:opening]}{json.dumps(key)}:{value}{comma}{text[opening:]}"


def cut_member(text: str, members: dict[str, Member], key: str) -> str:
    member = members.get(key)
    if member is None:
        return text
    before, after = text[: member.start].rstrip(_WHITESPACE), text[member.end :].lstrip(_WHITESPACE)
    if after.startswith(","):
        return before + after[1:].lstrip(_WHITESPACE)
    return before.removesuffix(",") + after


def _scan(text: str, most: int) -> dict[str, Member]:
    members: dict[str, Member] = {}
    at = skip_space(text, 0)
    if text[at] != "{":
        raise json.JSONDecodeError("no object", text, at)
    at = skip_space(text, at + 1)
    if text[at] == "}":
        return _end(text, at + 1, members)
    while True:
        start, (key, value_start) = at, _key(text, at)
        if key in members:
            raise json.JSONDecodeError("a key twice", text, start)
        if len(members) == most:
            message = f"The body has more than {most} members."
            raise InvalidRequestError(message, code="invalid_json")
        value, end = _DECODER.raw_decode(text, value_start)
        members[key] = Member(start, value_start, end, value)
        at = end if text[end] in ",}" else skip_space(text, end)
        if text[at] == "}":
            return _end(text, at + 1, members)
        if text[at] != ",":
            raise json.JSONDecodeError("no comma", text, at)
        at = skip_space(text, at + 1)


def _key(text: str, at: int) -> tuple[str, int]:
    """The key that begins at `at`, and where its value begins."""
    if found := _USUAL_KEY.match(text, at):
        return found[1], found.end()
    if text[at] != '"':
        raise json.JSONDecodeError("no key", text, at)
    key, at = _DECODER.raw_decode(text, at)
    at = skip_space(text, at)
    if text[at] != ":":
        raise json.JSONDecodeError("no colon", text, at)
    return key, skip_space(text, at + 1)


def _end(text: str, at: int, members: dict[str, Member]) -> dict[str, Member]:
    if text[at:].strip(_WHITESPACE):
        raise json.JSONDecodeError("text after the object", text, at)
    return members


def skip_space(text: str, at: int) -> int:
    while text[at] in _WHITESPACE:
        at += 1
    return at


def skip_back(text: str, at: int) -> int:
    """The end of what precedes the space before `at`."""
    while text[at - 1] in _WHITESPACE:
        at -= 1
    return at


def _refuse_bombs(text: str, max_numbers: int) -> None:
    """Refuse what would take far more memory or time than its size lets expect; linear in that size."""
    # Brackets and commas inside of strings are counted too, which at worst costs the second look.
    openings = text.count("[") + text.count("{")
    if openings <= MAX_DEPTH and text.count(",") < MAX_VALUES - MAX_DEPTH:
        return
    bare = _STRING.sub("", text)
    values = bare.count("[") + bare.count("{") + bare.count(",")
    if values > MAX_VALUES:
        # A number in a list has a comma after it or a bracket: only the former need counting.
        numbers = len(bare) - len(_AFTER_NUMBER.sub("", bare)) if values <= MAX_VALUES + max_numbers else 0
        if values - numbers > MAX_VALUES:
            message = f"The body holds more than {MAX_VALUES:,} values. Send it in parts."
            raise InvalidRequestError(message, code="invalid_json")
    steps = array("b", bare.encode(errors="replace").translate(_STEPS, _NO_BRACKETS))
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        message = f"The body nests deeper than {MAX_DEPTH} levels."
        raise InvalidRequestError(message, code="invalid_json")
