"""
How many tokens are reserved for a request before they are counted.

The estimate is high on purpose: what turns out to be too much is returned at once, but what turns out
to be too little was used before it could be refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.infra.json_members import Member

BYTES_PER_TOKEN = 3
"""English and code have about four bytes per token, most other scripts about three."""
MEDIA_TOKENS = 1024
"""For each picture or sound in the body, whose bytes do not tell its tokens."""
MOST_TOKENS = 2**40
"""Caps what clients ask for, so that sums stay small."""
_MEDIA = re.compile(r'"data:[^"]*"')
_COMPLETION = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_ANSWERS = ("n", "best_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    prompt: int
    completion: int
    is_guess: bool = False
    """Whether the client set no maximum for the answer: the reservation for it may then be reduced."""

    @property
    def total(self) -> int:
        return self.prompt + self.completion


def estimate_tokens(text: str, members: Mapping[str, Member], *, guess: int) -> TokenEstimate:
    """Estimate a request's tokens from its body; `guess` is for answers without a maximum."""
    size, media = len(text), 0
    if size > BYTES_PER_TOKEN * MEDIA_TOKENS and ";base64," in text:
        found = _MEDIA.findall(text)
        size, media = size - sum(map(len, found)), len(found)
    elif not text.isascii():
        size = len(text.encode(errors="surrogatepass"))
    bounds = [bound for name in _COMPLETION if (bound := _number(members, name)) is not None]
    answers = max((number for name in _ANSWERS if (number := _number(members, name)) is not None), default=1)
    completion = max(bounds) if bounds else guess
    return TokenEstimate(
        prompt=-(-size // BYTES_PER_TOKEN) + media * MEDIA_TOKENS,
        completion=min(MOST_TOKENS, completion * max(1, answers)),
        is_guess=not bounds,
    )


def _number(members: Mapping[str, Member], name: str) -> int | None:
    """A member if it is a count; other values are left for the worker to reject."""
    value = members[name].value if name in members else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return min(value, MOST_TOKENS)
