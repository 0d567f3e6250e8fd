"""The body of `POST /v1/batches` as a value."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import InvalidRequestError

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
)
SHORTEST_KEPT_SECONDS, LONGEST_KEPT_SECONDS = 3600, 30 * 86400
MOST_METADATA, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512
LONGEST_WINDOW_HOURS = 14 * 24
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_KNOWN = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    input_file_id: str
    endpoint: str
    completion_window: str
    window_seconds: int
    metadata: dict[str, str]
    output_seconds: int | None  # of its output; None for the default


def parse_batch_request(members: Mapping[str, Any]) -> BatchRequest:
    """Raises InvalidRequestError if a member is missing, unknown or of the wrong form."""
    unknown = sorted(members.keys() - _KNOWN)
    if unknown:
        raise InvalidRequestError(
            f"`{unknown[0]}` is not a known parameter.", param=unknown[0], code="unknown_parameter"
        )
    file_id, endpoint = members.get("input_file_id"), members.get("endpoint")
    if not isinstance(file_id, str) or not file_id:
        raise InvalidRequestError(
            "`input_file_id` must name a file; upload one with POST /v1/files.", param="input_file_id"
        )
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise InvalidRequestError(f"`endpoint` must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    window = members.get("completion_window")
    return BatchRequest(
        input_file_id=file_id,
        endpoint=endpoint,
        completion_window=str(window),
        window_seconds=_parse_window(window),
        metadata=_parse_metadata(members.get("metadata")),
        output_seconds=parse_expiry(members.get("output_expires_after"), "output_expires_after"),
    )


def parse_expiry(value: object, name: str) -> int | None:
    """Read `{"anchor": "created_at", "seconds": N}`; None if absent, else InvalidRequestError."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("anchor") != "created_at" or len(value) != len(("a", "s")):
        message = f'`{name}` must be {{"anchor": "created_at", "seconds": ...}}.'
        raise InvalidRequestError(message, param=name)
    seconds = value.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int):
        raise InvalidRequestError(f"`{name}.seconds` must be a whole number.", param=name)
    if not SHORTEST_KEPT_SECONDS <= seconds <= LONGEST_KEPT_SECONDS:
        message = f"`{name}.seconds` must be from {SHORTEST_KEPT_SECONDS} to {LONGEST_KEPT_SECONDS}."
        raise InvalidRequestError(message, param=name)
    return seconds


def _parse_window(value: object) -> int:
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    hours = int(match[1]) * (24 if match[2] == "d" else 1) if match else 0
    if not 1 <= hours <= LONGEST_WINDOW_HOURS:
        message = "`completion_window` must be hours or days, such as `24h`, and at most `14d`."
        raise InvalidRequestError(message, param="completion_window")
    return hours * 3600


def _parse_metadata(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > MOST_METADATA:
        message = f"`metadata` must be an object of at most {MOST_METADATA} members."
        raise InvalidRequestError(message, param="metadata")
    for name, text in value.items():
        if not isinstance(text, str) or len(name) > LONGEST_NAME or len(text) > LONGEST_VALUE:
            message = (
                f"`metadata` must hold strings of at most {LONGEST_VALUE} characters, "
                f"under names of at most {LONGEST_NAME}."
            )
            raise InvalidRequestError(message, param="metadata")
    return dict(value)
