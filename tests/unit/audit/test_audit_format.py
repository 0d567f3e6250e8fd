"""The published format is what the log writes: page, JSON Schema and `entry` agree."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from appliance.audit.entry import Entry, decode, encode, format_time, new_entry_id
from appliance.audit.entry_types import REGISTRY, EntryType, Kind
from appliance.errors import AuditEntryError
from docs.audit_format import audit_format_page, json_schema

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
VALIDATOR = Draft202012Validator(json_schema())
WRONG = {
    Kind.STRING: 1,
    Kind.INTEGER: "1",
    Kind.BOOLEAN: "true",
    Kind.DECIMAL: "1.5",
    Kind.STRINGS: "one",
}

SHORT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


def _values(field):
    match field.kind:
        case Kind.STRING:
            return st.sampled_from(field.values) if field.values else SHORT
        case Kind.INTEGER:
            return st.integers(-(2**53) + 1, 2**53 - 1)
        case Kind.BOOLEAN:
            return st.booleans()
        case Kind.DECIMAL:
            return st.integers(0, 10**12 - 1).map(lambda value: f"{value // 1000}.{value % 1000:03d}")
        case Kind.STRINGS:
            return st.lists(SHORT, max_size=3).map(tuple)


@st.composite
def entries(draw, entry_type=None):
    """Any entry the registry allows."""
    kind = entry_type or draw(st.sampled_from(list(EntryType)))
    fields = {
        name: draw(_values(field))
        for name, field in REGISTRY[kind].fields.items()
        if field.required or draw(st.booleans())
    }
    now_ms = draw(st.integers(0, 2**41))
    entry_id = new_entry_id(now_ms, draw(st.binary(min_size=10, max_size=10)))
    return Entry(log="appliance.test/audit", id=entry_id, type=kind, time=format_time(now_ms), fields=fields)


def _parsed(entry):
    return json.loads(encode(entry))


def _refused_by_the_log(content):
    try:
        decode(json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())
    except AuditEntryError:
        return True
    return False


def test_schema_is_a_valid_json_schema():
    """It is a JSON Schema of the draft it names."""
    Draft202012Validator.check_schema(json_schema())


def test_published_schema_is_up_to_date():
    """A changed type or field without a changed file fails here."""
    assert json.loads((REFERENCE / "audit-format.schema.json").read_text(encoding="utf-8")) == json_schema()


@given(entries())
def test_schema_accepts_every_entry_that_can_be_encoded(entry):
    """For any field values that the registry allows."""
    VALIDATOR.validate(_parsed(entry))


async def test_schema_accepts_what_a_running_log_writes(open_log, memory_store, intent, outcome):
    """The log's own entries and those of a request are valid as they lie in the store."""
    async with open_log(memory_store) as log:
        await log.append(EntryType.REQUEST_INTENT, **intent("a"))
        await log.append(EntryType.REQUEST_OUTCOME, **outcome("a"))
        await log.append(EntryType.REQUEST_INTENT, **intent("b"))
    types = [leaf.type for leaf in memory_store.stored]
    assert {"audit.started", "request.intent", "request.outcome", "request.aborted"} <= set(types)
    for leaf in memory_store.stored:
        VALIDATOR.validate(json.loads(leaf.leaf))


@pytest.mark.parametrize("entry_type", list(EntryType))
@given(data=st.data())
@settings(max_examples=3)
def test_schema_refuses_what_the_log_refuses(entry_type, data):
    """A missing, unknown or mistyped field is refused by the schema as by the log."""
    # No other definition accepts any of them: each asks for its own type.
    definition = VALIDATOR.evolve(schema={**VALIDATOR.schema, "oneOf": [{"$ref": f"#/$defs/{entry_type}"}]})
    good = _parsed(data.draw(entries(entry_type)))
    wrong = [{**good, "prompt": "secret"}, {**good, "v": 2}, {**good, "time": "yesterday"}]
    wrong += [{**good, "id": "I" * 26}, {**good, "log": ""}, {**good, "type": "something.else"}]
    for name, field in REGISTRY[entry_type].fields.items():
        wrong.append({**good, name: WRONG[field.kind]})
        if field.values:
            wrong.append({**good, name: "none of them"})
        if field.required:
            wrong.append({key: value for key, value in good.items() if key != name})
    for content in wrong:
        assert not definition.is_valid(content), content
        assert _refused_by_the_log(content), content


def test_published_page_is_up_to_date():
    """A changed type, field or exit code without a changed page fails here."""
    assert (REFERENCE / "audit-format.md").read_text(encoding="utf-8") == audit_format_page()


def test_page_lists_every_type_and_field():
    """An auditor can look up everything that is recorded."""
    page = audit_format_page()
    for entry_type, schema in REGISTRY.items():
        assert f"### `{entry_type}`" in page
        assert all(f"| `{name}` |" in page for name in schema.fields)
