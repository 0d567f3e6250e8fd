"""Read usage, draft counts and the finish reason from the JSON of a worker's answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import InvalidRequestError, WorkerFailedError
from appliance.infra.json_members import Member, parse_members
from appliance.speculation.values import acceptance_length_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    """True if the worker reported no usage: tokens are then estimated from frames, rather too low."""
    drafts: int | None = None
    """None if the worker reported no speculation for this answer."""
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    rejected_drafts: int | None = None
    """Drafts of which no token was accepted."""

    @property
    def acceptance_length(self) -> float | None:
        if not self.drafts or self.accepted_tokens is None:
            return None
        return acceptance_length_of(self.drafts, self.accepted_tokens)


def parse_answer(text: str) -> dict[str, Member]:
    """The members of an answer; raises WorkerFailedError if it is not a JSON object."""
    try:
        return parse_members(text, bounded=False)
    except InvalidRequestError as error:
        raise WorkerFailedError("The worker's answer is not JSON.") from error


def first_finish_reason(members: Mapping[str, Member]) -> str | None:
    choices = members["choices"].value if "choices" in members else None
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
        return reason if isinstance(reason, str) else None
    return None


def parse_usage(
    members: Mapping[str, Member], *, prompt: str = "prompt_tokens", completion: str = "completion_tokens"
) -> Usage:
    """
    Values that are absent or malformed count as not reported; `prompt` and `completion` are their names.
    """
    usage = object_of(members["usage"].value) if "usage" in members else {}
    metrics = object_of(members["metrics"].value) if "metrics" in members else {}
    drafting = object_of(metrics.get("speculative_decoding"))
    histogram = drafting.get("acceptance_histogram")
    return Usage(
        prompt_tokens=count_of(usage.get(prompt)) or 0,
        completion_tokens=count_of(usage.get(completion)) or 0,
        estimated=not usage,
        drafts=count_of(drafting.get("num_spec_steps")),
        draft_tokens=count_of(drafting.get("num_draft_tokens")),
        accepted_tokens=count_of(drafting.get("num_accepted_draft_tokens")),
        rejected_drafts=count_of(histogram[0]) if isinstance(histogram, list) and histogram else None,
    )


def object_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def count_of(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
