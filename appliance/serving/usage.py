"""
What a worker says about its answer: usage, drafts and the finish reason, read from its JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import InvalidRequestError, WorkerFailedError
from appliance.members import Member, parse_members


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token and draft counts of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    """True when the worker never said: tokens were then counted by frames, too few rather than too many."""
    drafts: int | None = None
    """None when the worker reported no speculation for this answer."""
    draft_tokens: int | None = None
    accepted_tokens: int | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per draft with the bonus token, or None without drafts."""
        if not self.drafts or self.accepted_tokens is None:
            return None
        return 1.0 + self.accepted_tokens / self.drafts


def parse_answer(text: str) -> dict[str, Member]:
    """
    Find the members of an answer.

    Raises:
        WorkerFailedError: it is not a JSON object.
    """
    try:
        return parse_members(text)
    except InvalidRequestError as error:
        message = "The worker's answer is not JSON."
        raise WorkerFailedError(message) from error


def first_finish_reason(members: Mapping[str, Member]) -> str | None:
    """Why the first choice of a whole answer ended."""
    choices = members["choices"].value if "choices" in members else None
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
        return reason if isinstance(reason, str) else None
    return None


def parse_usage(members: Mapping[str, Member]) -> Usage:
    """Read the counts out of an answer's members; what is absent or malformed counts as unsaid."""
    usage = _object(members["usage"].value) if "usage" in members else {}
    metrics = _object(members["metrics"].value) if "metrics" in members else {}
    drafting = _object(metrics.get("speculative_decoding"))
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens")) or 0,
        completion_tokens=_count(usage.get("completion_tokens")) or 0,
        estimated=not usage,
        drafts=_count(drafting.get("num_spec_steps")),
        draft_tokens=_count(drafting.get("num_draft_tokens")),
        accepted_tokens=_count(drafting.get("num_accepted_draft_tokens")),
    )


def _object(value: Any) -> Mapping[str, Any]:  # noqa: ANN401 - decoded JSON
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:  # noqa: ANN401 - decoded JSON
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
