"""
The HTTP API as an OpenAPI document, for reference and fuzzing; the gateway never serves it.

Paths and summaries come from the routes, and the routes to workers from their own table.  Handlers read their
bodies themselves, so `OPERATIONS` describes what they accept; the parsers are authoritative.  Of a worker's
answer only status and media type are described.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from appliance.audit.reading import OPERATIONS as OPERATIONS_READ
from appliance.serving.dialects.routes import ANTHROPIC, ROUTES, Route
from appliance.tenancy import AdminScope

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
    """The schema of an object with these members and no others."""
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one operation reads and how it answers a valid request."""

    body: Schema | None = None
    media: str = JSON
    status: int = 200
    answers: tuple[str, ...] = (JSON,)
    """Media types."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    may_wait: bool = False
    """Whether it answers 202 under the two-person rule."""


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
    ("get", "/readyz"): Operation(query={"exclude": {"type": "string", "examples": ["workers"]}}),
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
        may_wait=True,
        body=members(
            ("tenant", "basis"),
            tenant=TENANT,
            requests={"type": "array", "items": STRING},
            before={**MOMENT, "type": ["string", "null"]},
            basis=LINE,
        ),
    ),
    ("post", "/admin/v1/audit/prunes"): Operation(may_wait=True, body=members(("before",), before=MOMENT)),
    ("post", "/admin/v1/audit/holds"): Operation(status=201, body=HOLD),
    ("post", "/admin/v1/audit/holds/releases"): Operation(may_wait=True, status=201, body=HOLD),
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
        status=201,
        body=members(
            models=MODELS,
            limits={**LIMITS, "type": ["object", "null"]},
            manage_keys=FLAG,
            admin=FLAG,
            scopes={"type": ["array", "null"], "items": {"enum": [*AdminScope]}, "minItems": 1},
            expires_at=EXPIRY,
        )
        | {
            "anyOf": [
                {"properties": {"scopes": {"type": "null"}}},
                {"required": ["admin"], "properties": {"admin": {"const": True}}},
            ]
        },
    ),
    ("post", "/admin/v1/keys/{key_id}/rotate"): Operation(
        status=201,
        body=members(
            overlap_seconds={"type": "integer", "minimum": 0, "maximum": 365 * 86400}, expires_at=EXPIRY
        ),
    ),
    ("post", "/v1/appliance/keys"): Operation(
        status=201,
        body=members(models=MODELS, limits={**LIMITS, "type": ["object", "null"]}, expires_at=EXPIRY),
    ),
    ("post", "/v1/appliance/keys/{key_id}/rotate"): Operation(
        status=201,
        body=members(
            overlap_seconds={"type": "integer", "minimum": 0, "maximum": 365 * 86400}, expires_at=EXPIRY
        ),
    ),
    ("post", "/admin/v1/keys/{key_id}/revoke"): Operation(body=members(reason=NOTE)),
}
"""By method and path; an operation that is not listed reads nothing and answers 200 in JSON."""

OPEN = {"/healthz", "/readyz", "/metrics"}
"""Paths that need no key."""
STRING_OR_NULL: Schema = {"type": ["string", "null"]}
SCHEMAS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": STRING,
                    "type": STRING,
                    "param": STRING_OR_NULL,
                    "code": STRING_OR_NULL,
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": STRING, "message": STRING},
            },
        },
    },
}
TAGS = {
    "Inference": (),
    "Models": ("/v1/models",),
    "Files and batches": ("/v1/files", "/v1/batches"),
    "Health and metrics": ("/healthz", "/readyz", "/metrics", "/admin/v1/status"),
    "Tenants and keys": ("/admin/v1/tenants", "/admin/v1/keys", "/v1/appliance/keys"),
    "Workers": ("/admin/v1/workers",),
    "Speculation and drafts": ("/admin/v1/speculation", "/admin/v1/drafts"),
    "Audit log": ("/admin/v1/audit",),
    "Egress": ("/admin/v1/egress",),
}
"""Groups of routes by how their paths begin; the first has all others."""
BEARER = {"type": "http", "scheme": "bearer"}


def openapi_document(routes: Sequence[BaseRoute], version: str) -> dict[str, Any]:
    """Describe an application's routes; equal routes give an equal document."""
    made = get_openapi(title="Sovereign serving appliance", version=version, routes=routes)
    paths: dict[str, Any] = made["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            operation["summary"] = operation["description"].partition("\n")[0]
            operation.pop("description")
            operation.pop("operationId")
            _complete(operation, path, OPERATIONS.get((method, path), Operation()))
    for route in ROUTES.values():
        operation = {"summary": f"Asks a worker: {route.worker_path}."}
        _complete(operation, route.path, _relayed(route))
        paths[route.path] = {"post": operation}
    made["tags"] = [{"name": name} for name in TAGS]
    made["components"] = {
        "schemas": SCHEMAS,
        "securitySchemes": {
            "tenant": {**BEARER, "description": "A tenant's key."},
            "admin": {**BEARER, "description": "An admin key."},
        },
    }
    return made


def _relayed(route: Route) -> Operation:
    """The members that the gateway reads of a request for a model."""
    properties: dict[str, Schema] = {"model": {"type": "string", "minLength": 1}}
    if route.dialect.streams:
        properties["stream"] = {"type": ["boolean", "null"]}
    body: Schema = {
        "type": "object",
        "required": ["model"],
        "properties": properties,
        "anyOf": [{"required": list(names)} for names in route.needs],
    }
    return Operation(body=body, answers=(JSON, EVENTS) if route.dialect.streams else (JSON,))


def _complete(operation: dict[str, Any], path: str, said: Operation) -> None:
    answer = {"description": "As asked for.", "content": {media: {"schema": {}} for media in said.answers}}
    responses = {str(said.status): answer}
    if path not in OPEN:
        operation["security"] = [{"admin" if path.startswith("/admin/") else "tenant": []}]
        error = "AnthropicError" if path.startswith(ANTHROPIC) else "Error"
        content = {JSON: {"schema": {"$ref": f"#/components/schemas/{error}"}}}
        responses["4XX"] = {"description": "What is wrong with the request.", "content": content}
        responses["5XX"] = {"description": "What is wrong here.", "content": content}
    if said.may_wait:
        responses["202"] = {**answer, "description": "Waits for a second administrator."}
    if path == "/readyz":
        responses["503"] = {**answer, "description": "What is missing."}
    operation["responses"] = responses
    operation["tags"] = [next((tag for tag, starts in TAGS.items() if path.startswith(starts)), "Inference")]
    if said.query:
        operation["parameters"] = [
            *operation.get("parameters", []),
            *({"name": name, "in": "query", "schema": schema} for name, schema in said.query.items()),
        ]
    if said.body is not None:
        required = bool(said.body["required"])
        operation["requestBody"] = {"required": required, "content": {said.media: {"schema": said.body}}}
