"""
Errors as clients parse them: one `ErrorText`, in OpenAI's shape or in Anthropic's.

`worker_error` reads a worker's error and keeps its message.  vLLM sends `code` as a number, and some errors
without the `error` envelope.
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
"""Anthropic's error types by status; `anthropic_type` gives the other two."""
SERVER_ERROR = 500
CLIENT_ERROR = 400
TOO_LONG = ("maximum context length", "longer than the maximum model length", "exceeds the max_model_len")
"""How vLLM's routes report a prompt that does not fit."""
NOT_FOUND = 404
NO_ROUTE = "Not Found"
"""Answer of the worker's web framework for a path that it does not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    status: int
    """HTTP status, or the one it would have been if the stream had not begun."""
    kind: str
    """OpenAI's `type`."""
    message: str
    param: str | None = None
    code: str | None = None


def openai_error(error: ErrorText) -> dict[str, Any]:
    """All four members are always present."""
    content = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": content}


def anthropic_error(error: ErrorText) -> dict[str, Any]:
    return {"type": "error", "error": {"type": anthropic_type(error.status), "message": error.message}}


def anthropic_type(status: int) -> str:
    usual = "api_error" if status >= SERVER_ERROR else "invalid_request_error"
    return ANTHROPIC_TYPES.get(status, usual)


def encode_error(content: dict[str, Any]) -> str:
    """JSON text; escaped, because a lone surrogate has no UTF-8."""
    return json.dumps(content)


def worker_error(text: str, status: int) -> ErrorText:
    """Parse the body, or the data of a frame, of a worker's error of any shape."""
    inner = _inner(text)
    message = str(inner.get("message") or inner.get("detail") or f"The worker answered {status}.")
    code, param = inner.get("code"), inner.get("param")
    if any(words in message for words in TOO_LONG):
        code = "context_length_exceeded"
    if status == NOT_FOUND and message == NO_ROUTE:
        message = "This model does not serve this route: its worker runs another task."
        code = "route_not_served"
    return ErrorText(
        status=status,
        kind="server_error" if status >= SERVER_ERROR else "invalid_request_error",
        message=message,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def _inner(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {"message": text.strip()[:2000]}
    if not isinstance(content, dict):
        return {}
    inner = content.get("error") or content
    return inner if isinstance(inner, dict) else {"message": str(inner)}
