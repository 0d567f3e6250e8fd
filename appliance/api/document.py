"""
The HTTP surface as an OpenAPI document: for reference and for fuzzing, never served.

Paths and summaries come from the routes, and the routes to workers from their own table.  An answer of
a worker is described as far as the gateway vouches for it: its status and its media type.
"""

from collections.abc import Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from starlette.routing import BaseRoute

from appliance.api.operations import EVENTS, JSON, OPERATIONS, Operation, Schema
from appliance.serving.dialects.routes import ANTHROPIC, ROUTES, Route

OPEN = {"/healthz", "/readyz", "/metrics"}
"""Paths that ask for no key."""
STRING: Schema = {"type": "string"}
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
BEARER = {"type": "http", "scheme": "bearer"}


def openapi_document(routes: Sequence[BaseRoute], version: str) -> dict[str, Any]:
    """The document of an application's routes; equal routes give an equal one."""
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
    made["components"] = {
        "schemas": SCHEMAS,
        "securitySchemes": {
            "tenant": {**BEARER, "description": "A tenant's key."},
            "admin": {**BEARER, "description": "An admin key."},
        },
    }
    return made


def _relayed(route: Route) -> Operation:
    """What the gateway reads of a request for a model; the rest is the worker's."""
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
    if path == "/readyz":
        responses["503"] = {**answer, "description": "What is missing."}
    operation["responses"] = responses
    if said.query:
        operation["parameters"] = [
            *operation.get("parameters", []),
            *({"name": name, "in": "query", "schema": schema} for name, schema in said.query.items()),
        ]
    if said.body is not None:
        required = bool(said.body["required"])
        operation["requestBody"] = {"required": required, "content": {said.media: {"schema": said.body}}}
