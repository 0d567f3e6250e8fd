"""
One entry of the audit log, and its canonical encoding.

A leaf is the RFC 8785 canonical JSON of a flat object: the envelope (`v`, `log`, `id`, `type`, `time`), the
place in the sequence of the gateway that accepted it (`ACCEPTED`) if another integrated it, and the fields
that the type's schema allows.  No floats, no nulls, no nesting: every implementation encodes an entry as the
same bytes.  Pure; time and randomness are arguments.

Both directions are strict and raise only `AuditEntryError`: no entry is written that could not be read back.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from appliance.audit.entry_types import REGISTRY, EntryType, Field, Kind
from appliance.errors import AuditEntryError

JSON = str | int | bool | tuple[str, ...]
"""What a field may hold; a list is accepted for a tuple, and read back as a tuple."""

FORMAT_VERSION = 1
MAX_LEAF_BYTES = 4096
ENVELOPE = ("v", "log", "id", "type", "time")
ACCEPTED = MappingProxyType(
    {
        field.name: field
        for field in (
            Field(name="writer", kind=Kind.STRING, meaning="gateway that accepted the entry, by its name"),
            Field(name="epoch", kind=Kind.INTEGER, meaning="start of the gateway; grows with each"),
            Field(
                name="sequence",
                kind=Kind.INTEGER,
                meaning="place among the entries that the gateway accepted: 1, 2, 3, without gaps",
            ),
        )
    }
)
"""All or none of them are in an entry of any type: in those that another gateway integrated."""
MAX_INTEGER = 2**53 - 1
"""Beyond this two JSON readers may see different numbers (RFC 8785, section 3.2.2.3)."""

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = tuple(high + low for high in _ALPHABET for low in _ALPHABET)
_TIME_SHIFTS, _RANDOM_SHIFTS = tuple(range(40, -1, -10)), tuple(range(70, -1, -10))
_ID_RANDOM_BYTES = 10
_ID = re.compile(rf"[0-7][{_ALPHABET}]{{25}}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)
_DECIMAL = re.compile(r"(0|[1-9]\d{0,8})\.\d{3}", re.ASCII)
# For what an entry may hold (ASCII names; text, integers, booleans, lists of text) this is RFC 8785 to
# the byte, tested against a library for it, which is far slower.
_canonical = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, sort_keys=True, separators=(",", ":")
).encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that happened."""

    v: int = FORMAT_VERSION
    log: str
    """Origin of the log it belongs to, so that a leaf cannot be moved to another log."""
    id: str
    type: EntryType
    time: str
    """RFC 3339, UTC, milliseconds: `2026-11-20T23:59:59.999Z`."""
    fields: Mapping[str, JSON]


def new_entry_id(now_ms: int, random_bytes: bytes) -> str:
    """Return a ULID: 48 bits of time in ms, 80 random bits, Crockford's base 32; raises AuditEntryError."""
    if len(random_bytes) != _ID_RANDOM_BYTES or not 0 <= now_ms < 2**48:
        raise AuditEntryError("an entry id takes a time below 2^48 ms and ten random bytes")
    number = int.from_bytes(random_bytes)
    return _id_time(now_ms) + "".join([_PAIRS[number >> shift & 1023] for shift in _RANDOM_SHIFTS])


@lru_cache(maxsize=8)
def _id_time(now_ms: int) -> str:
    return "".join([_PAIRS[now_ms >> shift & 1023] for shift in _TIME_SHIFTS])


def format_time(now_ms: int) -> str:
    """Return milliseconds since the epoch as an entry's `time`."""
    return f"{_format_second(now_ms // 1000)}.{now_ms % 1000:03d}Z"


@lru_cache(maxsize=8)
def _format_second(second: int) -> str:
    return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=second):%Y-%m-%dT%H:%M:%S}"


def new_entry(
    log: str,
    entry_type: EntryType,
    fields: Mapping[str, JSON | None],
    *,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes],
) -> Entry:
    """Return an entry of this moment, without the fields that are None."""
    now_ms = int(clock() * 1000)
    return Entry(
        log=log,
        id=new_entry_id(now_ms, random_bytes(_ID_RANDOM_BYTES)),
        type=entry_type,
        time=format_time(now_ms),
        fields={name: value for name, value in fields.items() if value is not None},
    )


def format_decimal(value: float) -> str:
    """Return a fraction as it is written in an entry: three decimal places."""
    return f"{value:.3f}"


def encode(entry: Entry) -> bytes:
    """Return the leaf of an entry, canonical JSON; raises AuditEntryError if it does not fit its schema."""
    _check_envelope(entry)
    _check_fields(entry.type, entry.fields)
    envelope: dict[str, Any] = {
        "v": entry.v,
        "log": entry.log,
        "id": entry.id,
        "type": entry.type.value,
        "time": entry.time,
    }
    envelope.update(entry.fields)
    try:
        leaf = _canonical(envelope).encode()
    except UnicodeEncodeError as error:
        raise AuditEntryError(f"{entry.type}: text that is not Unicode: {error.reason}") from error
    if len(leaf) > MAX_LEAF_BYTES:
        raise AuditEntryError(
            f"{entry.type}: {len(leaf)} bytes, more than the {MAX_LEAF_BYTES} a leaf may have"
        )
    return leaf


def decode(leaf: bytes) -> Entry:
    """Read a leaf back; `encode` gives the same bytes again.  Raises AuditEntryError if it would not."""
    if len(leaf) > MAX_LEAF_BYTES:
        raise AuditEntryError(f"a leaf of {len(leaf)} bytes, more than {MAX_LEAF_BYTES}")
    try:
        # Duplicate members need no hook: they cannot survive the comparison below.
        content = json.loads(leaf, parse_float=_refuse_number, parse_constant=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise AuditEntryError(f"a leaf that is not JSON: {error}") from error
    if not isinstance(content, dict) or not content.keys() >= set(ENVELOPE):
        raise AuditEntryError(f"a leaf without {', '.join(ENVELOPE)}")
    v, log, entry_id, name, time = (content.pop(key) for key in ENVELOPE)
    if type(v) is not int or not all(isinstance(text, str) for text in (log, entry_id, name, time)):
        raise AuditEntryError(f"a leaf whose {', '.join(ENVELOPE)} are not an integer and strings")
    if name not in REGISTRY:
        raise AuditEntryError(f"a leaf of unknown type {name!r}")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    entry = Entry(v=v, log=log, id=entry_id, type=EntryType(name), time=time, fields=fields)
    if encode(entry) != leaf:
        raise AuditEntryError(f"{name}: a leaf that is not in canonical form")
    return entry


def without_place(leaf: bytes) -> bytes:
    """Return the leaf as it was before a gateway gave it a place in its sequence; raises AuditEntryError."""
    entry = decode(leaf)
    fields = {name: value for name, value in entry.fields.items() if name not in ACCEPTED}
    return leaf if len(fields) == len(entry.fields) else encode(replace(entry, fields=fields))


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not an integer")


def _check_envelope(entry: Entry) -> None:
    if entry.v != FORMAT_VERSION:
        message = f"v: {entry.v}, where {FORMAT_VERSION} is the one format known"
    elif not entry.log:
        message = "log: must be the origin of the log"
    elif not _ID.fullmatch(entry.id):
        message = "id: must be a ULID"
    elif not _TIME.fullmatch(entry.time):
        message = "time: must be RFC 3339 in UTC with milliseconds"
    else:
        return
    raise AuditEntryError(message)


def _check_fields(entry_type: EntryType, fields: Mapping[str, JSON]) -> None:
    checks, required = _CHECKS[entry_type]
    for name, value in fields.items():
        check = checks.get(name)
        if check is None:
            raise AuditEntryError(f"{entry_type}: unknown field {name!r}")
        if not check(value):
            field = REGISTRY[entry_type].fields.get(name) or ACCEPTED[name]
            expected = f"one of {', '.join(field.values)}" if field.values else f"of kind {field.kind}"
            raise AuditEntryError(f"{entry_type}: {name} must be {expected}")
    if not required <= fields.keys():
        missing = next(name for name in REGISTRY[entry_type].fields if name in required.difference(fields))
        raise AuditEntryError(f"{entry_type}: {missing} is missing")
    accepted = [name for name in ACCEPTED if name in fields]
    if accepted and len(accepted) < len(ACCEPTED):
        raise AuditEntryError(f"{entry_type}: {accepted[0]} without {', '.join(ACCEPTED)}")


def _check_of(field: Field) -> Callable[[object], bool]:
    """What a value of the field must pass."""
    match field.kind:
        case Kind.STRING if field.values:
            allowed = frozenset(field.values)
            return lambda value: isinstance(value, str) and value in allowed
        case Kind.STRING:
            return lambda value: isinstance(value, str)
        case Kind.DECIMAL:
            return lambda value: isinstance(value, str) and _DECIMAL.fullmatch(value) is not None
        case Kind.BOOLEAN:
            return lambda value: isinstance(value, bool)
        case Kind.INTEGER:
            return lambda value: (
                isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER
            )
        case Kind.STRINGS:
            return lambda value: (
                isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
            )


_CHECKS = {
    entry_type: (
        {name: _check_of(field) for name, field in {**ACCEPTED, **schema.fields}.items()},
        frozenset(name for name, field in schema.fields.items() if field.required),
    )
    for entry_type, schema in REGISTRY.items()
}
"""By type: a check for each field, and the names of the required ones."""
