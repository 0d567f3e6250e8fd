"""
Means with the interval that holds the truth with 95 % confidence; requests are the unit.

The drafts of one request are alike, so they are no independent observations: counted as such, ten
requests of a thousand drafts would look as certain as ten thousand drafts of ten thousand requests.
Variances here are those of sums over requests (cluster-robust, by the usual linearisation of a ratio
of two sums), with Student's quantile for as many requests as there are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.drafts.evaluation.part import Part

LEAST = 2
"""Fewer observations have no spread."""
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantile 0.975 of Student's t for 1 to 30 degrees of freedom."""
WIDEST = 50.0
"""Most that a bound of a ratio is away from it, as a logarithm: a number that JSON can hold."""
NORMAL, EXPANSION = 1.96, 2.372
"""The same of the normal distribution, and how it is approached: 1.96 + 2.372 / degrees of freedom."""


class Interval(Part):
    """An estimate, and the bounds that hold the truth with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What drafting for one request came to."""

    drafts: int
    accepted: int
    """Accepted draft tokens, without the bonus tokens."""


def student(freedom: int) -> float:
    """Quantile 0.975 of Student's t."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL + EXPANSION / freedom


def acceptance_length(requests: Sequence[Drafted], draft_tokens: int) -> Interval | None:
    """
    Mean tokens per draft with the bonus token; None where nothing was drafted.

    With one request alone the bounds are all that is possible: 1 to 1 + K.
    """
    seen = [request for request in requests if request.drafts]
    if not seen:
        return None
    length, spread = _length(seen)
    most = 1.0 + draft_tokens
    if len(seen) < LEAST:
        return Interval(value=length, low=1.0, high=most)
    width = student(len(seen) - 1) * _deviation(spread)
    return Interval(value=length, low=max(1.0, length - width), high=min(most, length + width))


def length_ratio(pairs: Sequence[tuple[Drafted, Drafted]]) -> Interval | None:
    """
    Acceptance length of the first over that of the second, of requests both drafted for.

    The same request weighs in both, so what makes it easy or hard cancels.  None for fewer than two.
    """
    seen = [pair for pair in pairs if pair[0].drafts and pair[1].drafts]
    if len(seen) < LEAST:
        return None
    mine, my_spread = _length([first for first, _second in seen])
    other, other_spread = _length([second for _first, second in seen])
    spread = [here / mine - there / other for here, there in zip(my_spread, other_spread, strict=True)]
    return _ratio(math.log(mine / other), student(len(seen) - 1) * _deviation(spread))


def mean_ratio(ratios: Sequence[float]) -> Interval | None:
    """Geometric mean of ratios that were measured one after the other; None for fewer than two."""
    if len(ratios) < LEAST:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    deviation = _deviation([(value - mean) / len(logs) for value in logs])
    return _ratio(mean, student(len(logs) - 1) * deviation)


def _length(requests: Sequence[Drafted]) -> tuple[float, list[float]]:
    """The acceptance length, and by how much each request moves it."""
    drafts = sum(request.drafts for request in requests)
    rate = sum(request.accepted for request in requests) / drafts
    return 1.0 + rate, [(request.accepted - rate * request.drafts) / drafts for request in requests]


def _deviation(influences: Sequence[float]) -> float:
    """Standard deviation of an estimate, from what each of its observations moves it by."""
    count = len(influences)
    return math.sqrt(count / (count - 1) * sum(influence**2 for influence in influences))


def _ratio(logarithm: float, width: float) -> Interval:
    width = min(width, WIDEST)
    return Interval(
        value=math.exp(logarithm), low=math.exp(logarithm - width), high=math.exp(logarithm + width)
    )
