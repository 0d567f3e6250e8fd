"""
Whether adaptive control reaches its goal in a cell, from rounds in which every mode was measured once.

The ratio is of medians over rounds.  Its interval comes from a bootstrap that draws whole rounds, so that
what a machine does to all modes of a round stays together.  Adaptive is compared with *every* fixed K, not
with the one that happened to be best: the lower limit is the least of all, each at 97.5 % (all must reach
the goal, so no correction is due), the upper one the least of all with the error divided among them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from appliance.drafts.evaluation.intervals import TAIL, drawn_ratios, percentile, ratio_of_medians
from benchmarks.speculation.plan import ADAPTIVE

GOAL = 0.95
LEAST_PAIRS = 20
"""Fewer rounds than this show nothing."""

Round = Mapping[str, float]
"""Tokens per second by mode name."""


class Verdict(StrEnum):
    SHOWN = "shown"
    NOT_SHOWN = "not shown"
    SHOWN_OTHERWISE = "shown otherwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    pairs: int
    best: str
    """The fixed mode with the largest median."""
    ratio: float
    """Adaptive's median over that of `best`."""
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        if self.pairs >= LEAST_PAIRS and self.low >= GOAL:
            return Verdict.SHOWN
        if self.pairs >= LEAST_PAIRS and self.high < GOAL:
            return Verdict.SHOWN_OTHERWISE
        return Verdict.NOT_SHOWN


def compare(rounds: Sequence[Round]) -> Comparison:
    """At least one round, all with the same modes."""
    names = [name for name in rounds[0] if name != ADAPTIVE.name]
    pairs = {name: [(each[ADAPTIVE.name], each[name]) for each in rounds] for name in names}
    drawn = {name: drawn_ratios(found) for name, found in pairs.items()}
    best = min(names, key=lambda name: ratio_of_medians(pairs[name]))
    return Comparison(
        pairs=len(rounds),
        best=best,
        ratio=ratio_of_medians(pairs[best]),
        low=min(percentile(found, TAIL) for found in drawn.values()),
        high=min(percentile(found, 1 - TAIL / len(names)) for found in drawn.values()),
    )
