"""
The entry types as JSON Schema (draft 2020-12), for readers that are not ours.

`docs/reference/audit-format.schema.json` is this module's output.  It says what `entry.decode`
accepts, with two exceptions that JSON Schema cannot express: the canonical spelling of the bytes and
their number.  Pure.
"""

import json
from typing import Any

from appliance.audit.entry import FORMAT_VERSION, MAX_INTEGER
from appliance.audit.registry import REGISTRY, EntryType, Field, Kind, Schema

DIALECT = "https://json-schema.org/draft/2020-12/schema"
IDENTIFIER = f"urn:sovereign-appliance:audit-format:{FORMAT_VERSION}"

# Spelt for ECMA 262, the dialect JSON Schema names: no \d, which some readers take for any digit.
_ID = "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"
_TIME = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{3}Z$"
_DECIMAL = "^(0|[1-9][0-9]{0,8})\\.[0-9]{3}$"


def json_schema() -> dict[str, Any]:
    """Return the schema of one entry: exactly one of the types."""
    return {
        "$schema": DIALECT,
        "$id": IDENTIFIER,
        "title": "One entry of the audit log",
        "description": "A leaf, once parsed.  Its bytes must also be canonical JSON (RFC 8785).",
        "oneOf": [{"$ref": f"#/$defs/{entry_type}"} for entry_type in EntryType],
        "$defs": {str(entry_type): _entry(entry_type, REGISTRY[entry_type]) for entry_type in EntryType},
    }


def json_schema_page() -> str:
    """Return the schema as a file: indented JSON that ends in a newline."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _entry(entry_type: EntryType, schema: Schema) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        "v": {"const": FORMAT_VERSION},
        "log": {"type": "string", "minLength": 1},
        "id": {"type": "string", "pattern": _ID},
        "type": {"const": str(entry_type)},
        "time": {"type": "string", "pattern": _TIME},
    }
    fields = schema.fields.values()
    return {
        "type": "object",
        "description": " ".join(schema.reason.split()),
        "properties": envelope | {field.name: _field(field) for field in fields},
        "required": [*envelope, *(field.name for field in fields if field.required)],
        "additionalProperties": False,
    }


def _field(field: Field) -> dict[str, Any]:
    return {"description": field.meaning, **_kind(field)}


def _kind(field: Field) -> dict[str, Any]:
    match field.kind:
        case Kind.STRING:
            return {"type": "string", "enum": list(field.values)} if field.values else {"type": "string"}
        case Kind.DECIMAL:
            return {"type": "string", "pattern": _DECIMAL}
        case Kind.BOOLEAN:
            return {"type": "boolean"}
        case Kind.INTEGER:
            return {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
        case Kind.STRINGS:
            return {"type": "array", "items": {"type": "string"}}
