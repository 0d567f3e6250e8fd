"""
A worker's error in the shape OpenAI clients expect, with the worker's own words kept.

vLLM sends `code` as a number, and some errors without the `error` envelope.
"""

import json
from typing import Any

SERVER_ERROR = 500
CLIENT_ERROR = 400


def normalise_error(text: str, status: int) -> str:
    """Return the JSON of `{"error": {message, type, param, code}}` for a worker's error body."""
    inner = _inner(text)
    message = str(inner.get("message") or inner.get("detail") or f"The worker answered {status}.")
    code, param = inner.get("code"), inner.get("param")
    if "maximum context length" in message or "longer than the maximum model length" in message:
        code = "context_length_exceeded"
    content = {
        "message": message,
        "type": "server_error" if status >= SERVER_ERROR else "invalid_request_error",
        "param": param if isinstance(param, str) else None,
        "code": code if isinstance(code, str) else None,
    }
    return json.dumps({"error": content})  # escaped: half a surrogate pair has no UTF-8


def _inner(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {"message": text.strip()[:2000]}
    if not isinstance(content, dict):
        return {}
    inner = content.get("error", content)
    return inner if isinstance(inner, dict) else {"message": str(inner)}
