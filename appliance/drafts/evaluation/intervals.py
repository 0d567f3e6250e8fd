"""
Estimates with 95 % confidence intervals; the independent observations are requests.

The drafts of one request are correlated: counted as independent, ten requests of a thousand drafts would look
as certain as ten thousand requests.  Variances are cluster-robust over requests (linearised ratio of two
sums), with Student's quantile for the number of requests.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import ClassVar

from appliance.errors import ApplianceError, DraftRefusedError
from appliance.infra.canonical_json import CanonicalModel

MIN_OBSERVATIONS = 2
"""For a variance."""
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantile 0.975 of Student's t for 1 to 30 degrees of freedom."""
NORMAL, EXPANSION = 1.96, 2.372
"""Above 30 degrees of freedom: 1.96 + 2.372 / degrees of freedom."""
WIDEST = 50.0
"""Maximum half-width of a ratio's interval, as a logarithm: JSON can hold the bounds."""
DRAWS = 2000
"""Of a bootstrap."""
TAIL = 0.025
"""Error of each limit of an interval."""


class EvaluationModel(CanonicalModel):
    """A file of an evaluation, or a part of one."""

    refusal: ClassVar[type[ApplianceError]] = DraftRefusedError
    remedy: ClassVar[str] = "evaluate the draft again"


class ConfidenceInterval(EvaluationModel):
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDrafts:
    drafts: int
    accepted: int
    """Accepted draft tokens, without the bonus tokens."""


def student(freedom: int) -> float:
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL + EXPANSION / freedom


def acceptance_length(requests: Sequence[RequestDrafts], draft_tokens: int) -> ConfidenceInterval | None:
    """Mean tokens per draft with the bonus token; None without drafts."""
    seen = [request for request in requests if request.drafts]
    if not seen:
        return None
    length, spread = _length(seen)
    most = 1.0 + draft_tokens
    if len(seen) < MIN_OBSERVATIONS:
        return ConfidenceInterval(value=length, low=1.0, high=most)  # the possible range
    width = student(len(seen) - 1) * _deviation(spread)
    return ConfidenceInterval(value=length, low=max(1.0, length - width), high=min(most, length + width))


def length_ratio(pairs: Sequence[tuple[RequestDrafts, RequestDrafts]]) -> ConfidenceInterval | None:
    """
    Ratio of two drafts' acceptance lengths over requests that both drafted for; None for fewer than two.

    Each request counts on both sides, so its difficulty cancels.
    """
    seen = [pair for pair in pairs if pair[0].drafts and pair[1].drafts]
    if len(seen) < MIN_OBSERVATIONS:
        return None
    mine, my_spread = _length([first for first, _second in seen])
    other, other_spread = _length([second for _first, second in seen])
    spread = [here / mine - there / other for here, there in zip(my_spread, other_spread, strict=True)]
    return _ratio(math.log(mine / other), student(len(seen) - 1) * _deviation(spread))


def mean_ratio(ratios: Sequence[float]) -> ConfidenceInterval | None:
    """Geometric mean of ratios of independent rounds; None for fewer than two."""
    if len(ratios) < MIN_OBSERVATIONS:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = sum(logs) / len(logs)
    deviation = _deviation([(value - mean) / len(logs) for value in logs])
    return _ratio(mean, student(len(logs) - 1) * deviation)


def median_ratio(pairs: Sequence[tuple[float, float]]) -> ConfidenceInterval:
    """Ratio of the medians of two sides that were measured in the same rounds, at least one."""
    drawn = drawn_ratios(pairs)
    low, high = percentile(drawn, TAIL), percentile(drawn, 1 - TAIL)
    return ConfidenceInterval(value=ratio_of_medians(pairs), low=low, high=high)


def drawn_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """
    Ratios of medians of a bootstrap that draws whole rounds.

    What a machine does to both sides of a round stays together; the draws are the same for equally many
    rounds.
    """
    chance = random.Random(0)  # noqa: S311 - it has to come out the same again
    return [ratio_of_medians(chance.choices(pairs, k=len(pairs))) for _ in range(DRAWS)]


def ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    return median(first for first, _ in pairs) / max(1e-9, median(second for _, second in pairs))


def lower_of_several(interval: ConfidenceInterval, count: int) -> float:
    """
    The lower limit if so many intervals are to hold together (Bonferroni).

    The interval is widened as if its ratio's logarithm were normal: the tail it takes has too few draws.
    """
    wider = NormalDist().inv_cdf(TAIL / count) / NormalDist().inv_cdf(TAIL)
    share = min(1.0, interval.low / max(1e-9, interval.value))
    return interval.value * math.pow(share, wider)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _length(requests: Sequence[RequestDrafts]) -> tuple[float, list[float]]:
    """The acceptance length, and the influence of each request on it."""
    drafts = sum(request.drafts for request in requests)
    rate = sum(request.accepted for request in requests) / drafts
    return 1.0 + rate, [(request.accepted - rate * request.drafts) / drafts for request in requests]


def _deviation(influences: Sequence[float]) -> float:
    """Standard deviation of an estimate from the influence of each observation."""
    count = len(influences)
    return math.sqrt(count / (count - 1) * sum(influence**2 for influence in influences))


def _ratio(logarithm: float, width: float) -> ConfidenceInterval:
    width = min(width, WIDEST)
    return ConfidenceInterval(
        value=math.exp(logarithm), low=math.exp(logarithm - width), high=math.exp(logarithm + width)
    )
