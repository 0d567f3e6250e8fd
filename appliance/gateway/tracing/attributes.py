"""
The attributes of spans, an allow-list: nothing that is not in a table here is ever sent.

Names follow OpenTelemetry's semantic conventions for HTTP and generative AI; other names start with
`appliance.`.  The conventions' attributes for content (`gen_ai.input.messages` and others) are not here, and
no setting adds them.
"""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

Attributes = dict[str, str | int | float | bool | tuple[str, ...]]

COMPLETED = "completed"
PROVIDER = "vllm"

OPERATIONS = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/responses": "chat",
        "/v1/messages": "chat",
        "/v1/completions": "text_completion",
        "/v1/embeddings": "embeddings",
    }
)
"""`gen_ai.operation.name` by route; for other routes it is the end of the path."""

OF_REQUEST = MappingProxyType(
    {
        "outcome": "appliance.outcome",
        "status": "http.response.status_code",
        "retries": "appliance.retries",
        "worker": "appliance.worker",
        "queued_ms": "appliance.queued_ms",
        "ttft_ms": "appliance.time_to_first_token_ms",
        "speculation_forbidden": "appliance.speculation.forbidden_by",
    }
)
"""Attributes of the gateway's span by field of the `request.outcome` entry."""

OF_ANSWER = MappingProxyType(
    {
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "tokens_estimated": "appliance.tokens_estimated",
        "context_bucket": "appliance.context_bucket",
        "engine": "appliance.engine",
        "drafts": "appliance.speculation.drafts",
        "draft_tokens": "appliance.speculation.draft_tokens",
        "accepted_tokens": "appliance.speculation.accepted_tokens",
        "speculation_mode": "appliance.speculation.mode",
        "speculation_reason": "appliance.speculation.reason",
    }
)
"""Attributes of the worker's span by field of the `request.outcome` entry."""

FINISH_REASONS = frozenset(
    {
        *("stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"),
        *("end_turn", "max_tokens", "stop_sequence", "tool_use", "completed", "incomplete", "failed"),
    }
)
"""Values a worker may send; any other value is omitted."""


def operation(route: str) -> str:
    return OPERATIONS.get(route) or route.rpartition("/")[2]


def request_attributes(*, request_id: str, tenant: str, route: str, model: str) -> Attributes:
    return {
        "http.request.method": "POST",
        "http.route": route,
        "gen_ai.operation.name": operation(route),
        "gen_ai.request.model": model,
        "appliance.request_id": request_id,
        "appliance.tenant": tenant,
    }


def worker_attributes(*, route: str, model: str, url: str) -> Attributes:
    made: Attributes = {
        "gen_ai.operation.name": operation(route),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
    parts = urlsplit(url)
    if parts.hostname:
        made["server.address"] = parts.hostname
    if parts.port:
        made["server.port"] = parts.port
    return made


def ending_attributes(fields: Mapping[str, Any]) -> Attributes:
    return _taken(fields, OF_REQUEST) | _error(fields)


def answer_attributes(fields: Mapping[str, Any]) -> Attributes:
    """For the last worker's span."""
    made = _taken(fields, OF_ANSWER) | _error(fields)
    if "acceptance_length" in fields:
        made["appliance.speculation.acceptance_length"] = float(fields["acceptance_length"])
    if fields.get("finish_reason") in FINISH_REASONS:
        made["gen_ai.response.finish_reasons"] = (fields["finish_reason"],)
    return made


def is_error(fields: Mapping[str, Any]) -> bool:
    """Whether the appliance failed; a refused request or a client that left is no error."""
    return bool(fields["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR)


def _taken(fields: Mapping[str, Any], table: Mapping[str, str]) -> Attributes:
    return {name: fields[field] for field, name in table.items() if field in fields}


def _error(fields: Mapping[str, Any]) -> Attributes:
    return {} if fields["outcome"] == COMPLETED else {"error.type": str(fields["outcome"])}
