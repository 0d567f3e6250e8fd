"""
Judges what was measured of each method.  Pure.

Two processes of one program may differ in speed by a tenth for their whole life.  So every number of draft
tokens (K) is compared with K=0 of the same process, round by round, and methods only by these ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from appliance.drafts.comparison.asked import NO_METHOD
from appliance.drafts.evaluation.intervals import (
    ConfidenceInterval,
    EvaluationModel,
    lower_of_several,
    median_ratio,
)
from appliance.speculation.values import acceptance_length_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMeasurement:
    """All requests of one round at one number of draft tokens."""

    round: int
    concurrency: int
    draft_tokens: int
    tokens: int
    seconds: float
    drafts: int
    accepted_tokens: int

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class ComparisonCell(EvaluationModel):
    concurrency: int
    draft_tokens: int
    tokens_per_second: float
    """Median of the rounds."""
    ratio: ConfidenceInterval | None = None
    """To K=0 of the same process; None at K=0."""
    acceptance_length: float | None = None
    """None without drafts."""


class MethodFigures(EvaluationModel):
    method: str
    draft: str | None = None
    """Directory."""
    cells: tuple[ComparisonCell, ...] = ()
    problem: str = ""
    """Why it could not be measured."""


class Recommendation(EvaluationModel):
    method: str
    draft: str | None = None
    draft_tokens: int | None = None
    undecided: bool = False
    """Whether a method may pay, which these rounds do not show."""


class MethodComparison(EvaluationModel):
    engine: str
    target: str
    """Directory."""
    prompts: int
    rounds: int
    max_tokens: int
    methods: tuple[MethodFigures, ...]
    recommendation: Recommendation | None = None
    """None if nothing could be measured."""


def summarise(measured: Sequence[RoundMeasurement]) -> tuple[ComparisonCell, ...]:
    """The cells, by concurrency and number of draft tokens; every cell was measured in every round."""
    cells: dict[tuple[int, int], list[RoundMeasurement]] = {}
    for each in sorted(measured, key=lambda each: (each.concurrency, each.draft_tokens, each.round)):
        cells.setdefault((each.concurrency, each.draft_tokens), []).append(each)
    return tuple(
        ComparisonCell(
            concurrency=concurrency,
            draft_tokens=draft_tokens,
            tokens_per_second=median(each.speed for each in group),
            ratio=_ratio(group, cells[concurrency, 0]) if draft_tokens else None,
            acceptance_length=_length(group),
        )
        for (concurrency, draft_tokens), group in cells.items()
    )


def _ratio(group: Sequence[RoundMeasurement], without: Sequence[RoundMeasurement]) -> ConfidenceInterval:
    return median_ratio([(mine.speed, base.speed) for mine, base in zip(group, without, strict=True)])


def _length(group: Sequence[RoundMeasurement]) -> float | None:
    drafts = sum(each.drafts for each in group)
    accepted = sum(each.accepted_tokens for each in group)
    return acceptance_length_of(drafts, accepted) if drafts else None


def recommend(methods: Sequence[MethodFigures]) -> Recommendation | None:
    """
    The method with the largest ratio, as the geometric mean over concurrencies; None if none was measured.

    At each concurrency the best number counts if it is shown to pay, otherwise 1: the monitor can stop there.
    One of many ratios is above 1 by chance alone, so its interval is widened for the number of all of them.
    """
    measured = [method for method in methods if method.cells]
    if not measured:
        return None
    ratios = [cell.ratio for method in measured for cell in method.cells if cell.ratio is not None]
    best, paying = max(
        ((method, _paying(method, len(ratios))) for method in measured),
        key=lambda pair: math.prod(map(_value, pair[1])),
    )
    if not paying:
        return Recommendation(method=NO_METHOD, undecided=any(ratio.high > 1 for ratio in ratios))
    # It is the maximum that the monitor chooses from.
    most = max(cell.draft_tokens for cell in paying)
    return Recommendation(method=best.method, draft=best.draft, draft_tokens=most)


def _paying(method: MethodFigures, count: int) -> list[ComparisonCell]:
    """By concurrency, the cell with the largest ratio of those that pay also as one of so many."""
    found: dict[int, ComparisonCell] = {}
    for cell in sorted(method.cells, key=_value):
        if cell.ratio is not None and lower_of_several(cell.ratio, count) > 1:
            found[cell.concurrency] = cell
    return list(found.values())


def _value(cell: ComparisonCell) -> float:
    return cell.ratio.value if cell.ratio is not None else 1.0
