"""
How many tokens are reserved for a request before they are counted.

The estimate is high on purpose: what turns out to be too much is returned at once, but what turns out
to be too little was used before it could be refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.infra.json_members import Member, count_of

BYTES_PER_TOKEN = 3
"""English and code have about four bytes per token, most other scripts about three."""
MEDIA_TOKENS = 1024
"""For each picture or sound in the body, whose bytes do not tell its tokens."""
MOST_TOKENS = 2**40
"""Caps what clients ask for, so that sums stay small."""
_MEDIA = re.compile(r'"[a-z_]+"\s*:\s*"data:[^"]*"')
ANSWER_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    prompt: int
    completion: int
    sequences: int = 1
    is_guess: bool = False
    """Whether the client set no maximum for the answer: the reservation for it may then be reduced."""

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """What a body says about the tokens of its request."""

    prompt: int
    answer: int | None = None
    """The client's maximum for each answer; None if it set none."""
    sequences: int = 1

    def estimate(self, guess: int) -> TokenEstimate:
        """`guess` is for each answer without a maximum."""
        completion = guess if self.answer is None else self.answer
        return TokenEstimate(
            prompt=self.prompt,
            completion=min(MOST_TOKENS, completion * self.sequences),
            sequences=self.sequences,
            is_guess=self.answer is None,
        )


def size_of(text: str, members: Mapping[str, Member], *, sequences: int = 1) -> RequestSize:
    size, media = len(text), 0
    if size > BYTES_PER_TOKEN * MEDIA_TOKENS and ";base64," in text:
        found = _MEDIA.findall(text)
        size, media = size - sum(map(len, found)), len(found)
    elif not text.isascii():
        size = len(text.encode(errors="surrogatepass"))
    bounds = [
        bound for name in ANSWER_LIMITS if name in members and (bound := count_of(members, name)) is not None
    ]
    return RequestSize(
        prompt=-(-size // BYTES_PER_TOKEN) + media * MEDIA_TOKENS,
        answer=max(bounds) if bounds else None,
        sequences=sequences,
    )
