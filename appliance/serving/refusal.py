"""
A worker's error in the shape OpenAI clients expect, with the worker's own words kept.

vLLM sends `code` as a number, and some errors without the `error` envelope.  How the result looks in
each family is the business of `serving.dialects`.
"""

import json
from typing import Any

from appliance.serving.error_text import ErrorText

SERVER_ERROR = 500
CLIENT_ERROR = 400
TOO_LONG = (
    "maximum context length",
    "longer than the maximum model length",
    "exceeds the max_model_len",
)
"""How vLLM says on one route or another that a prompt does not fit."""
NOT_FOUND = 404
NO_ROUTE = "Not Found"
"""What the worker's web framework says of a path that it does not serve."""


def worker_error(text: str, status: int) -> ErrorText:
    """
    Read a worker's error, whatever its shape.

    Args:
        text: the body, or the data of a frame.
        status: HTTP status, or what it would have been.
    """
    inner = _inner(text)
    message = str(inner.get("message") or inner.get("detail") or f"The worker answered {status}.")
    code, param = inner.get("code"), inner.get("param")
    if any(words in message for words in TOO_LONG):
        code = "context_length_exceeded"
    if status == NOT_FOUND and message == NO_ROUTE:
        message = "This model does not serve this route: its worker was started for another task."
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
