"""
What operations read and answer that the framework cannot know: handlers read their bodies themselves.

For the OpenAPI document alone; the parsers are what holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.audit.reading import OPERATIONS as OPERATIONS_READ

Schema = dict[str, Any]
JSON, FORM, TEXT, EVENTS = "application/json", "multipart/form-data", "text/plain", "text/event-stream"
BYTES = "application/octet-stream"

STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
INDEX: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
LINE: Schema = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[ -~]+$"}
NOTE: Schema = {"type": "string", "maxLength": 200, "pattern": r"^[ -~]*$"}
TENANT: Schema = {"type": "string", "pattern": r"^[a-z0-9][a-z0-9.-]{0,62}$"}
MOMENT: Schema = {"type": "string", "format": "date-time", "pattern": r"^20[0-9][0-9]-"}
EXPIRY: Schema = {"type": ["string", "null"], "format": "date-time", "pattern": r"^20[3-9][0-9]-"}
MODELS: Schema = {"type": ["array", "null"], "items": STRING}


def members(required: Sequence[str] = (), /, **properties: Schema) -> Schema:
    """An object of these members and no other."""
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one operation reads and how it answers when all is well."""

    body: Schema | None = None
    media: str = JSON
    status: int = 200
    answers: tuple[str, ...] = (JSON,)
    """Media types."""
    query: Mapping[str, Schema] = field(default_factory=dict)


BOUND: Schema = {"type": ["integer", "null"], "minimum": 0, "maximum": 2**53}
BOUNDS: dict[str, Schema] = dict.fromkeys(
    (
        "requests_per_minute",
        "tokens_per_minute",
        "concurrent_requests",
        "tokens_per_day",
        "tokens_per_month",
    ),
    BOUND,
)
LIMITS = members(**BOUNDS, by_model={"type": ["object", "null"], "additionalProperties": members(**BOUNDS)})
POLICY: dict[str, Schema] = {
    "models": MODELS,
    "speculation": {"enum": ["auto", "off", False, None]},  # as YAML reads a bare `off`
    "content": {"enum": ["none", "digest", "encrypted", None]},
    "limits": {**LIMITS, "type": ["object", "null"]},
    "disabled": {"type": ["boolean", "null"]},
}
PAGE: dict[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string", "minLength": 1, "maxLength": 64},
}
KEPT = members(
    ("anchor", "seconds"),
    anchor={"const": "created_at"},
    seconds={"type": "integer", "minimum": 3600, "maximum": 30 * 86400},
)
HOLD = members(("tenant", "reason"), tenant=TENANT, reason=LINE)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/metrics"): Operation(answers=(TEXT,)),
    ("get", "/v1/files"): Operation(
        query={
            **PAGE,
            "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
            "order": {"enum": ["asc", "desc"]},
            "purpose": STRING,
        },
    ),
    ("post", "/v1/files"): Operation(
        media=FORM,
        body={
            "type": "object",
            "required": ["file", "purpose"],
            "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
        },
    ),
    ("get", "/v1/files/{file_id}/content"): Operation(answers=(BYTES,)),
    ("get", "/v1/batches"): Operation(query=PAGE),
    ("post", "/v1/batches"): Operation(
        body=members(
            ("input_file_id", "endpoint", "completion_window"),
            input_file_id={"type": "string", "minLength": 1},
            endpoint={"enum": ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]},
            completion_window={"type": "string", "pattern": "^[1-9]h$"},
            metadata={"type": ["object", "null"], "additionalProperties": NOTE, "maxProperties": 3},
            output_expires_after=KEPT,
        )
    ),
    ("post", "/admin/v1/audit/reads"): Operation(
        status=201,
        body=members(
            ("account", "operation", "start", "end"),
            account={"type": "string", "minLength": 1, "maxLength": 64, "pattern": r"^[ -~]+$"},
            operation={"enum": sorted(OPERATIONS_READ)},
            start=INDEX,
            end=INDEX,
            purpose=NOTE,
        ),
    ),
    ("post", "/admin/v1/audit/erasures"): Operation(
        body=members(
            ("tenant", "basis"),
            tenant=TENANT,
            requests={"type": "array", "items": STRING},
            before={**MOMENT, "type": ["string", "null"]},
            basis=LINE,
        )
    ),
    ("post", "/admin/v1/audit/prunes"): Operation(body=members(("before",), before=MOMENT)),
    ("post", "/admin/v1/audit/holds"): Operation(status=201, body=HOLD),
    ("post", "/admin/v1/audit/holds/releases"): Operation(status=201, body=HOLD),
    ("get", "/admin/v1/speculation/events"): Operation(query={"after": {**INDEX, "maximum": 10**16 - 1}}),
    ("put", "/admin/v1/speculation/override"): Operation(
        body=members(
            ("worker", "mode"),
            worker={"type": "string", "minLength": 1},
            mode={"enum": ["speculative", "target_only", "auto"]},
            draft_tokens={"type": ["integer", "null"], "minimum": 1, "maximum": 16},
            seconds={"type": "number", "minimum": 1},
            note=NOTE,
        )
    ),
    ("post", "/admin/v1/speculation/probe"): Operation(status=202, body=members(("worker",), worker=STRING)),
    ("post", "/admin/v1/drafts/promotions"): Operation(
        status=202,
        body=members(
            ("draft",), draft={"type": "string", "minLength": 1}, without_evaluation=LINE, allow_downtime=FLAG
        ),
    ),
    ("post", "/admin/v1/drafts/rollbacks"): Operation(
        status=202,
        body=members(
            ("reason",),
            to={"type": ["string", "null"], "minLength": 1},
            reason=LINE,
            model={"type": ["string", "null"], "minLength": 1},
            allow_downtime=FLAG,
        ),
    ),
    ("post", "/admin/v1/workers/{worker}/recycle"): Operation(
        status=202, body=members(with_draft=FLAG, note=NOTE)
    ),
    ("post", "/admin/v1/workers/{worker}/drain"): Operation(status=202, body=members(force=FLAG, note=NOTE)),
    ("post", "/admin/v1/workers/{worker}/undrain"): Operation(body=members(note=NOTE)),
    ("post", "/admin/v1/tenants"): Operation(status=201, body=members(("name",), name=TENANT, **POLICY)),
    ("patch", "/admin/v1/tenants/{name}"): Operation(body=members(**POLICY)),
    ("post", "/admin/v1/tenants/{name}/keys"): Operation(
        status=201, body=members(models=MODELS, admin=FLAG, expires_at=EXPIRY)
    ),
    ("post", "/admin/v1/keys/{key_id}/rotate"): Operation(
        status=201,
        body=members(
            overlap_seconds={"type": "integer", "minimum": 0, "maximum": 365 * 86400}, expires_at=EXPIRY
        ),
    ),
    ("post", "/admin/v1/keys/{key_id}/revoke"): Operation(body=members(reason=NOTE)),
}
"""By method and path; an operation that is not here reads nothing and answers 200 in JSON."""
