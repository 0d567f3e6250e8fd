"""
Entries as a gateway writes them: an intent and an outcome for each request, with the usual fields.
"""

from appliance.audit.entry import JSON
from appliance.audit.entry_types import EntryType


def pair(request_id: str) -> tuple[tuple[EntryType, dict[str, JSON]], tuple[EntryType, dict[str, JSON]]]:
    """Type and fields of the two entries of one request."""
    common: dict[str, JSON] = {
        "request_id": request_id,
        "tenant": "bench",
        "key_id": "abcd2345",
        "route": "/v1/chat/completions",
        "model": "bench",
    }
    intent: dict[str, JSON] = {
        **common,
        "stream": True,
        "client": "loopback",
        "body_bytes": 512,
        "content_mode": "none",
        "worker": "w1",
    }
    outcome: dict[str, JSON] = {
        **common,
        "outcome": "completed",
        "status": 200,
        "duration_ms": 1234,
        "worker": "w1",
        "engine": "vllm 0.32.0",
        "speculation_mode": "speculative",
        "speculation_reason": "healthy",
        "acceptance_length": "2.670",
        "prompt_tokens": 100,
        "completion_tokens": 64,
        "draft_tokens": 72,
        "accepted_tokens": 40,
        "drafts": 24,
        "finish_reason": "stop",
        "ttft_ms": 45,
    }
    return (EntryType.REQUEST_INTENT, intent), (EntryType.REQUEST_OUTCOME, outcome)
