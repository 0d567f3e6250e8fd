"""Entries have one encoding, and nothing that is not in the registry can be encoded."""

import json

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from appliance.audit.entry import (
    MAX_INTEGER,
    MAX_LEAF_BYTES,
    Entry,
    decode,
    encode,
    format_decimal,
    format_time,
    new_entry_id,
)
from appliance.audit.entry_types import REGISTRY, EntryType, Kind
from appliance.errors import AuditEntryError

ID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
TIME = "2026-11-20T23:59:59.999Z"


def _value(field):
    if field.values:
        return st.sampled_from(field.values)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    return {
        Kind.STRING: text,
        Kind.INTEGER: st.integers(-MAX_INTEGER, MAX_INTEGER),
        Kind.BOOLEAN: st.booleans(),
        Kind.DECIMAL: st.floats(0, 1000).map(format_decimal),
        Kind.STRINGS: st.lists(text, max_size=3).map(tuple),
    }[field.kind]


@st.composite
def entries(draw):
    entry_type = draw(st.sampled_from(EntryType))
    fields = {
        field.name: draw(_value(field))
        for field in REGISTRY[entry_type].fields.values()
        if field.required or draw(st.booleans())
    }
    return Entry(log="log.test/a", id=ID, type=entry_type, time=TIME, fields=fields)


def _aborted(**fields):
    content = {"request_id": "r1", "reason": "gateway_stopped"} | fields
    return Entry(log="log.test/a", id=ID, type=EntryType.REQUEST_ABORTED, time=TIME, fields=content)


@given(entries())
def test_decoding_returns_the_encoded_entry(entry):
    """Every entry the registry allows survives the round trip, and has one encoding."""
    leaf = encode(entry)
    assert decode(leaf) == entry
    assert encode(decode(leaf)) == leaf


def test_a_leaf_is_flat_canonical_json():
    """The exact bytes, so that a change of format cannot go unnoticed."""
    assert encode(_aborted()) == (
        b'{"id":"01ARZ3NDEKTSV4RRFFQ69G5FAV","log":"log.test/a","reason":"gateway_stopped",'
        b'"request_id":"r1","time":"2026-11-20T23:59:59.999Z","type":"request.aborted","v":1}'
    )


@given(st.binary(max_size=200))
def test_decoding_garbage_raises_only_our_error(leaf):
    """For any bytes, callers have to expect one error."""
    with pytest.raises(AuditEntryError):
        decode(leaf)


@pytest.mark.parametrize(
    "leaf",
    [b"[" * 4000, b"null", b"1" * 4000, b'{"v":1e999}', b"\xff", b'"\\ud800"', b"{" * 5000],
    ids=lambda leaf: repr(leaf[:8]),
)
def test_decoding_hostile_json_raises_only_our_error(leaf):
    """Depth, size, encodings and numbers that break parsers do not break this one."""
    with pytest.raises(AuditEntryError):
        decode(leaf)


@pytest.mark.parametrize(
    "change",
    [
        lambda leaf: leaf.replace(b'"v":1', b'"v": 1'),
        lambda leaf: leaf.replace(b'"v":1', b'"v":1.0'),
        lambda leaf: leaf.replace(b'"v":1', b'"v":true'),
        lambda leaf: leaf.replace(b'"v":1', b'"v":2'),
        lambda leaf: leaf.replace(b'"v":1', b'"v":1,"v":1'),
        lambda leaf: leaf.replace(b"r1", b"\\u0072\\u0031"),
        lambda leaf: leaf.replace(b"gateway_stopped", b"bored"),
        lambda leaf: leaf.replace(b"request.aborted", b"request.unheard"),
        lambda leaf: leaf.replace(b'"r1"', b"null"),
        lambda leaf: leaf.replace(b'"r1"', b'["r1"]'),
        lambda leaf: leaf.replace(b'"r1"', b'{"r":1}'),
        lambda leaf: leaf.replace(b'"log":"log.test/a"', b'"log":7'),
        lambda leaf: leaf.replace(b'"log":"log.test/a"', b'"log":""'),
        lambda leaf: leaf.replace(b"999Z", b"999+00:00"),
        lambda leaf: leaf.replace(b"01ARZ", b"91ARZ"),
        lambda leaf: leaf + b"\n",
        lambda leaf: json.dumps(json.loads(leaf)).encode(),
    ],
)
def test_any_other_spelling_of_a_leaf_is_refused(change):
    """There is one encoding; a second one would be a second hash for the same entry."""
    leaf = encode(_aborted())
    assert change(leaf) != leaf
    with pytest.raises(AuditEntryError):
        decode(change(leaf))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello"},
        {"request_id": 7},
        {"request_id": None},
        {"request_id": "\ud800"},
        {"request_id": "x" * MAX_LEAF_BYTES},
        {"reason": "bored"},
    ],
)
def test_entry_outside_its_schema_cannot_be_written(fields):
    """Unknown fields, wrong types, unknown words and oversize are refused before anything is stored."""
    with pytest.raises(AuditEntryError):
        encode(_aborted(**fields))


def test_a_missing_required_field_is_refused_by_name():
    """The message says which field."""
    entry = Entry(log="l", id=ID, type=EntryType.REQUEST_ABORTED, time=TIME, fields={"request_id": "r"})
    with pytest.raises(AuditEntryError, match="reason is missing"):
        encode(entry)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acceptance_length", 2.5),
        ("acceptance_length", "2.5"),
        ("acceptance_length", "02.500"),
        ("acceptance_length", "nan"),
        ("status", True),
        ("status", 200.0),
        ("status", 2**53),
        ("verdicts", "allowed"),
        ("verdicts", (1,)),
        ("tokens_estimated", 1),
    ],
)
def test_numbers_have_one_spelling(outcome, name, value):
    """Floats, booleans passing as integers, and integers that readers disagree about are refused."""
    fields = outcome("r1") | {name: value}
    entry = Entry(log="l", id=ID, type=EntryType.REQUEST_OUTCOME, time=TIME, fields=fields)
    with pytest.raises(AuditEntryError, match=name):
        encode(entry)


def test_every_type_has_a_reason_and_no_field_shadows_the_envelope():
    """The registry is complete, and no field can overwrite id, time or type."""
    assert set(REGISTRY) == set(EntryType)
    for schema in REGISTRY.values():
        assert schema.reason.endswith(".")
        assert not schema.fields.keys() & {"v", "log", "id", "type", "time"}
        assert all(field.meaning for field in schema.fields.values())


def test_no_field_can_hold_content():
    """A prompt or completion has no field to be written to: nothing in the registry is named so."""
    names = {field.name for schema in REGISTRY.values() for field in schema.fields.values()}
    assert not names & {"prompt", "completion", "messages", "content", "text", "input", "output"}


def test_entry_ids_are_ulids():
    """Known value of the ULID specification's layout: time first, then randomness, base 32."""
    assert new_entry_id(0, bytes(10)) == "0" * 26
    assert new_entry_id(2**48 - 1, b"\xff" * 10) == "7" + "Z" * 25
    assert new_entry_id(1469918176385, bytes(10)).startswith("01ARYZ6S41")
    with pytest.raises(AuditEntryError):
        new_entry_id(2**48, bytes(10))
    with pytest.raises(AuditEntryError):
        new_entry_id(0, bytes(9))


def test_times_are_utc_with_milliseconds():
    """Milliseconds are cut from integers, so no rounding can move a second."""
    assert format_time(0) == "1970-01-01T00:00:00.000Z"
    assert format_time(1_795_219_199_999) == "2026-11-20T23:59:59.999Z"


@given(st.text(max_size=200))
@example('é\u2028\U0001f600\ue000"\\\n\x01\x7f/')
def test_canonical_form_is_that_of_an_independent_implementation(text):
    """The bytes equal what an RFC 8785 library makes of the parsed leaf, whatever the text."""
    leaf = encode(_aborted(request_id=text))
    assert rfc8785.dumps(json.loads(leaf)) == leaf


def test_text_that_is_not_unicode_is_refused():
    """A lone surrogate has no bytes that another reader would take for the same text."""
    with pytest.raises(AuditEntryError, match="not Unicode"):
        encode(_aborted(request_id="\ud800"))
