"""
Whether a draft left the target's greedy answers unchanged, compared without keeping any answer.

A draft proposes, the target decides, so the answers have to be equal.  But the target computes several tokens
at once when it verifies a draft, and one at a time when it does not; sums are then added in another order,
and where two tokens are equally likely up to rounding, either may come first.  The text after such a tie is
no evidence.  So answers are compared up to their first difference, and that is a tie if the target alone had
both tokens within rounding of each other.

A killed evaluation resumes, so what its arms answered has to be on disk; but content may only be in the audit
database, sealed and erasable.  So the evaluation keeps a *trail*: for each token, a keyed hash of all tokens
up to it.  The key is derived from the prompt and the salt of its sample, which are sealed with the content:
once a request is erased, guesses cannot be tested against its trail.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from appliance.drafts.evaluation.arms import Prompt

EPSILONS: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5})
"""
Difference of two log probabilities that counts as rounding, by arithmetic type.

For the half types it is four steps of a logit between 16 and 32 (steps are 1/64 in float16, 1/8 in bfloat16);
for float32, whose step is 2e-6, the error of sums over thousands of products.
"""
STRICTEST = 1e-3
"""For any other type."""
DIGEST_BYTES = 8
TOKEN_BYTES = 4
Near = tuple[int, str, float]
"""Position, trail of another token there, and how much less likely that token is (log probability)."""


class Agreement(StrEnum):
    SAME = "same"
    TIE = "tie"
    """At the first difference the target had two tokens within rounding of each other."""
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComparison:
    agreement: Agreement
    position: int | None = None
    gap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyToken:
    token_id: int
    gap: float
    """Log probability of the likeliest token minus this one's; 0 for a tie."""


def epsilon_of(dtype: str) -> float:
    return EPSILONS.get(dtype, STRICTEST)


def compare(
    own: Sequence[str], near: Sequence[Near], other: Sequence[str], epsilon: float
) -> AnswerComparison:
    """Compare the trail of an answer with that of the target's own, of which `near` are the alternatives."""
    position = next(
        (place for place, (mine, theirs) in enumerate(zip(own, other, strict=False)) if mine != theirs),
        min(len(own), len(other)),
    )
    if position == len(own) == len(other):
        return AnswerComparison(agreement=Agreement.SAME)
    # If one answer is a prefix of the other, there is no token at that position to tie with.
    token = other[position] if position < min(len(own), len(other)) else None
    gap = next((gap for place, trail, gap in near if (place, trail) == (position, token)), None)
    tied = gap is not None and gap <= epsilon
    agreement = Agreement.TIE if tied else Agreement.MISMATCH
    return AnswerComparison(agreement=agreement, position=position, gap=gap)


def trail_of(prompt: Prompt, answer: Sequence[int]) -> tuple[str, ...]:
    """A hash for each token of an answer, over all tokens up to it."""
    walk = _begin(prompt)
    trail = []
    for token in answer:
        walk.update(_bytes(token))
        trail.append(walk.copy().hexdigest())
    return tuple(trail)


def near_tokens(
    prompt: Prompt, answer: Sequence[int], choices: Sequence[Iterable[LikelyToken]], *, epsilon: float
) -> tuple[Near, ...]:
    """The tokens at each position of the target's answer that are less likely by at most `epsilon`."""
    walk = _begin(prompt)
    near: list[Near] = []
    for position, (token, likely) in enumerate(zip(answer, choices, strict=True)):
        for other in likely:
            if other.token_id != token and other.gap <= epsilon:
                step = walk.copy()
                step.update(_bytes(other.token_id))
                near.append((position, step.hexdigest(), other.gap))
        walk.update(_bytes(token))
    return tuple(near)


def _begin(prompt: Prompt) -> "hashlib.blake2b":
    secret = b"".join((prompt.salt.encode(), b"\0", *map(_bytes, prompt.token_ids)))
    key = hashlib.blake2b(secret, person=b"draft evaluation").digest()
    return hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)


def _bytes(token: int) -> bytes:
    return token.to_bytes(TOKEN_BYTES)
