"""
The trail of an answer: what it takes to compare two answers without keeping either.

An evaluation may be killed and go on later, so what its arms answered has to be on the disk; but the
answers are content, and content lies nowhere but sealed in the audit database, where it can be
erased.  So of each token a keyed hash of everything up to it is kept.  The key is made from the prompt
and the salt of its sample, which are sealed with the content: once a request is erased, nobody can try
out words on its trail.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from appliance.drafts.evaluation.arms import Prompt

DIGEST_BYTES = 8
TOKEN_BYTES = 4
Near = tuple[int, str, float]
"""Position, trail of another token there, and by how much less likely it is (difference of logarithms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A token that could have come at some position of an answer."""

    token_id: int
    gap: float
    """Logarithm of the likeliest token's probability less that of this one's; 0 for a tie."""


def trail_of(prompt: Prompt, answer: Sequence[int]) -> tuple[str, ...]:
    """A hash for each token of an answer, which depends on all tokens before it."""
    walk = _begin(prompt)
    trail = []
    for token in answer:
        walk.update(_bytes(token))
        trail.append(walk.copy().hexdigest())
    return tuple(trail)


def near_tokens(
    prompt: Prompt,
    answer: Sequence[int],
    choices: Sequence[Iterable[Candidate]],
    *,
    epsilon: float,
) -> tuple[Near, ...]:
    """
    The tokens that could as well have come, position by position.

    Args:
        prompt: what was asked.
        answer: token ids of the target's own answer.
        choices: for each position the likeliest tokens.
        epsilon: how much less likely a token may be and still count.
    """
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
