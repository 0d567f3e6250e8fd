"""
Whether a draft left the target's greedy answers as they are.

It has to: a draft proposes, the target decides.  But the target computes several tokens at once when
it verifies a draft, and one at a time when it does not; sums are then added in another order, and
where two tokens are as likely as each other to the last digits, either may come out first.  What
follows such a tie is another text, and says nothing.  So answers are compared up to the first place
where they differ, and there the question is whether the target alone had the two tokens within
rounding of each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from appliance.drafts.evaluation.trail import Near

EPSILONS: Mapping[str, float] = MappingProxyType({"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5})
"""
Difference of two logarithms of probabilities that counts as rounding, by arithmetic type.

Of the half types it is four steps of a logit between 16 and 32 (float16 has steps of 1/64 there,
bfloat16 of 1/8); of float32, where a step is 2e-6, what sums over thousands of products come to.
"""
STRICTEST = 1e-3
"""For a type that is not named."""


class Agreement(StrEnum):
    """How an answer stands to the target's own."""

    SAME = "same"
    TIE = "tie"
    """It parts where the target had two tokens within rounding of each other."""
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One comparison."""

    agreement: Agreement
    position: int | None = None
    """Of the first token that differs."""
    gap: float | None = None
    """How much less likely the target had that token; None where it was not near at all."""


def epsilon_of(dtype: str) -> float:
    """What counts as rounding in this arithmetic type."""
    return EPSILONS.get(dtype, STRICTEST)


def compare(own: Sequence[str], near: Sequence[Near], other: Sequence[str], epsilon: float) -> Compared:
    """
    Compare an answer with the target's own.

    Args:
        own: trail of the target's answer.
        near: what could as well have come there.
        other: trail of the answer that is compared.
        epsilon: what counts as rounding.
    """
    position = next(
        (place for place, (mine, theirs) in enumerate(zip(own, other, strict=False)) if mine != theirs),
        min(len(own), len(other)),
    )
    if position == len(own) == len(other):
        return Compared(agreement=Agreement.SAME)
    # An answer that is only shorter or longer ended elsewhere: no token there to be tied with.
    said = other[position] if position < min(len(own), len(other)) else None
    gap = next((gap for place, trail, gap in near if (place, trail) == (position, said)), None)
    tied = gap is not None and gap <= epsilon
    agreement = Agreement.TIE if tied else Agreement.MISMATCH
    return Compared(agreement=agreement, position=position, gap=gap)
