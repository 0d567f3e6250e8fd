"""
Errors as clients of each family parse them: one account of what went wrong, two shapes of it.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

ANTHROPIC_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""Anthropic's error types by status, where they are not the two of `anthropic_type`."""
SERVER_ERROR = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """What a client is told of an error."""

    status: int
    """HTTP status, or the one it would have been, where a stream has begun."""
    kind: str
    """OpenAI's `type`."""
    message: str
    param: str | None = None
    code: str | None = None


def openai_error(error: ErrorText) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, all four always there."""
    content = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": content}


def anthropic_error(error: ErrorText) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}}`."""
    return {"type": "error", "error": {"type": anthropic_type(error.status), "message": error.message}}


def anthropic_type(status: int) -> str:
    """Anthropic's word for a status."""
    usual = "api_error" if status >= SERVER_ERROR else "invalid_request_error"
    return ANTHROPIC_TYPES.get(status, usual)


def encode_error(content: dict[str, Any]) -> str:
    """The JSON of an error; escaped, because half a surrogate pair has no UTF-8."""
    return json.dumps(content)
