"""
A request to restart a worker: with its draft or without, and with which draft.

A recycler sends it to a supervisor, in this process or through the plugin in the worker and a file.  A
draft under test is named together with the promotion that tests it: the supervisor starts it while that
promotion is running, and the active draft otherwise.
"""

import re
from dataclasses import dataclass
from typing import Any

DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
"""As `serving.weights` writes it."""
PROMOTION = re.compile(r"[0-9A-Z]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateDraft:
    draft: str
    """Content digest of its weights."""
    promotion: str
    """Id of the promotion that tests it; a draft without a promotion is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequest:
    with_draft: bool
    candidate: CandidateDraft | None = None
    """None for the active draft."""

    def body(self) -> dict[str, Any]:
        request: dict[str, Any] = {"with_draft": self.with_draft}
        if self.candidate is not None:
            request |= {"draft": self.candidate.draft, "promotion": self.candidate.promotion}
        return request


WITH_DRAFT = RestartRequest(with_draft=True)
"""How every worker is first started."""


def parse_restart_request(content: object) -> RestartRequest | None:
    """Parse a request from decoded JSON; None if it is malformed, and then it must be ignored."""
    if not isinstance(content, dict) or not isinstance(content.get("with_draft"), bool):
        return None
    with_draft = content["with_draft"]
    draft, promotion = content.get("draft"), content.get("promotion")
    if draft is None and promotion is None:
        return RestartRequest(with_draft=with_draft)
    if not (with_draft and is_digest(draft) and isinstance(promotion, str)):
        return None
    if PROMOTION.fullmatch(promotion) is None:
        return None
    return RestartRequest(with_draft=True, candidate=CandidateDraft(draft=str(draft), promotion=promotion))


def is_digest(value: object) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None
