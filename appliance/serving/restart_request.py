"""
The wish that a worker be started anew: with its draft or without, and with which.

It goes from whoever recycles to a supervisor, in this process or by way of the plugin in the worker and
a file.  A draft that is only being tried is named together with the promotion that tries it: the
supervisor starts it for as long as that promotion goes on, and the draft in service otherwise.
"""

import re
from dataclasses import dataclass
from typing import Any

DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
"""A content digest, as `serving.weights` writes it."""
PROMOTION = re.compile(r"[0-9A-Z]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A draft that is being tried."""

    draft: str
    """Content digest of its weights."""
    promotion: str
    """Id of the promotion that tries it; without that the name of the draft counts for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a worker is to be started anew."""

    with_draft: bool
    candidate: Candidate | None = None
    """The draft to try; None for the one in service."""

    def body(self) -> dict[str, Any]:
        """The JSON that the plugin takes and the supervisor finds."""
        wish: dict[str, Any] = {"with_draft": self.with_draft}
        if self.candidate is not None:
            wish |= {"draft": self.candidate.draft, "promotion": self.candidate.promotion}
        return wish


WITH_DRAFT = Wish(with_draft=True)
"""With the draft in service: what every worker is first started by."""


def parse_wish(content: object) -> Wish | None:
    """Read a wish out of JSON; None for what is none, which nobody may act on."""
    if not isinstance(content, dict) or not isinstance(content.get("with_draft"), bool):
        return None
    with_draft = content["with_draft"]
    draft, promotion = content.get("draft"), content.get("promotion")
    if draft is None and promotion is None:
        return Wish(with_draft=with_draft)
    if not (with_draft and is_digest(draft) and isinstance(promotion, str)):
        return None
    if PROMOTION.fullmatch(promotion) is None:
        return None
    return Wish(with_draft=True, candidate=Candidate(draft=str(draft), promotion=promotion))


def is_digest(value: object) -> bool:
    """Whether a value is a content digest."""
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None
