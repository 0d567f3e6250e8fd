"""
What a worker says about its answer: usage, drafts and the finish reason, read from its JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import InvalidRequestError, WorkerFailedError
from appliance.infra.json_members import Member, parse_members


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
        return parse_members(text, bounded=False)
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


def parse_usage(
    members: Mapping[str, Member], *, prompt: str = "prompt_tokens", completion: str = "completion_tokens"
) -> Usage:
    """
    Read the counts out of an answer's members; what is absent or malformed counts as unsaid.

    Args:
        members: of the answer.
        prompt: what the prompt's tokens are called in `usage`.
        completion: what the answer's are.
    """
    usage = object_of(members["usage"].value) if "usage" in members else {}
    metrics = object_of(members["metrics"].value) if "metrics" in members else {}
    drafting = object_of(metrics.get("speculative_decoding"))
    return Usage(
        prompt_tokens=count_of(usage.get(prompt)) or 0,
        completion_tokens=count_of(usage.get(completion)) or 0,
        estimated=not usage,
        drafts=count_of(drafting.get("num_spec_steps")),
        draft_tokens=count_of(drafting.get("num_draft_tokens")),
        accepted_tokens=count_of(drafting.get("num_accepted_draft_tokens")),
    )


def object_of(value: object) -> Mapping[str, Any]:
    """A decoded object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def count_of(value: object) -> int | None:
    """A decoded count, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
