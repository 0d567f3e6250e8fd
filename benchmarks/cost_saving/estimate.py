"""
What drafting saved, from engine time measured with and without drafts in turn.  Pure.

A round is one segment of requests without drafts and one where the appliance drafts as it likes.  The
tokens of the second, at what a token of the first cost at the same batch bucket, are what the target alone
would have taken.  Its ratio to what they did take, over the ratio that the same steps and tokens have by the
times of all rounds, is one measurement: which steps there were and what they gave is counted and certain.
Rounds differ by more than their steps do, so the uncertainty is that of the rounds (Student's t), not of the
steps.

The report does not see these segments: it goes by the monitor's probes.  So the two are independent.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.gateway.cost.saving import Steps, added

LEAST_STEPS = 8
"""Fewer steps than this at one batch bucket do not tell what a token costs there."""
LEAST_ROUNDS = 2
FAR = 2.0
"""How many 95 % bounds of their difference two figures of the same lie apart once in 10,000 times."""
WRONG = (0.5, 2.0)
"""How many times the saving a report tells that is wrong."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t on either side of which lie 2.5 %, for 1 degree of freedom, 2, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and its bounds, which hold with 95 % confidence."""

    mean: float
    low: float
    high: float

    def agrees(self, other: "Interval") -> bool:
        """Whether chance explains how far apart the two are, if both measured the same."""
        lower, upper = sorted((self, other), key=lambda each: each.mean)
        bound = math.hypot(lower.high - lower.mean, upper.mean - upper.low)
        return upper.mean - lower.mean <= FAR * bound

    def plus(self, other: "Interval") -> "Interval":
        """The sum, as if both erred the same way."""
        return Interval(mean=self.mean + other.mean, low=self.low + other.low, high=self.high + other.high)

    def since(self, earlier: "Interval") -> "Interval":
        """What was added to a running sum."""
        return Interval(
            mean=self.mean - earlier.mean, low=self.low - earlier.low, high=self.high - earlier.high
        )

    def times(self, factor: float) -> "Interval":
        """So many times as much."""
        return Interval(mean=self.mean * factor, low=self.low * factor, high=self.high * factor)


NOTHING = Interval(mean=0.0, low=0.0, high=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What drafting saved over some steps, from any source."""

    spent: float = 0.0
    """Engine seconds of the steps with drafts."""
    tokens: int = 0
    """What they gave."""
    seconds: Interval = NOTHING
    """Engine seconds saved."""
    money: Interval = NOTHING

    @property
    def spread(self) -> float:
        """How many times the upper bound of what the target alone would take is the lower one."""
        low, high = self.seconds.low + self.spent, self.seconds.high + self.spent
        return high / low if low > 0 else math.inf

    @property
    def tokens_saved(self) -> Interval:
        """Tokens that the same engine time would not have given without drafts."""

        def saved(seconds: float) -> float:
            alone = seconds + self.spent
            return self.tokens * seconds / alone if alone > 0 else 0.0

        seconds = self.seconds
        return Interval(mean=saved(seconds.mean), low=saved(seconds.low), high=saved(seconds.high))

    def plus(self, other: "Saved") -> "Saved":
        """Both together."""
        return Saved(
            spent=self.spent + other.spent,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds.plus(other.seconds),
            money=self.money.plus(other.money),
        )

    def since(self, earlier: "Saved") -> "Saved":
        """What was added to a running sum."""
        return Saved(
            spent=self.spent - earlier.spent,
            tokens=self.tokens - earlier.tokens,
            seconds=self.seconds.since(earlier.seconds),
            money=self.money.since(earlier.money),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A segment without drafts and one with, one right after the other."""

    without: Steps
    drafted: Steps
    """Steps with drafts of the second, and no others."""
    told: Saved
    """What the report says of the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One concurrency: what was measured, and what the report said."""

    concurrency: int
    rounds: int
    without_per_token: float
    """Engine seconds."""
    drafted_per_token: float
    """Engine seconds."""
    measured: Saved
    told: Saved

    @property
    def agrees(self) -> bool:
        """Whether report and measurement leave room for the same truth."""
        return self.agrees_with(1.0)

    @property
    def is_sharp(self) -> bool:
        """Whether a report of half the saving, or of twice as much, would not agree."""
        return not any(self.agrees_with(factor) for factor in WRONG)

    def agrees_with(self, factor: float) -> bool:
        """Whether a report of so many times the saving would agree."""
        return self.told.seconds.times(factor).agrees(self.measured.seconds)


def read_saving(report: Mapping[str, Any]) -> Saved:
    """What a report, as JSON, says was saved until it was made."""
    saving = report["saving"]

    def interval(name: str) -> Interval:
        return Interval(mean=saving[name], low=saving[f"{name}_low"], high=saving[f"{name}_high"])

    return Saved(
        spent=saving["compared_seconds"],
        tokens=saving["compared_tokens"],
        seconds=interval("seconds"),
        money=interval("money"),
    )


def compare(concurrency: int, rounds: Sequence[Round], *, price: float) -> Comparison:
    """
    Compare the report with the rounds.

    Args:
        concurrency: of the requests.
        rounds: at least two of them with enough steps that drafted; others are excluded, on both sides.
        price: of a second of the worker.

    Raises:
        ValueError: too few rounds drafted, or nothing was decoded without drafts.
    """
    drafting = [each for each in rounds if sum(cell.steps for cell in each.drafted.values()) >= LEAST_STEPS]
    if len(drafting) < LEAST_ROUNDS:
        message = f"only {len(drafting)} of {len(rounds)} rounds drafted: give it more --rounds, or --learn"
        raise ValueError(message)
    without = together(each.without for each in drafting)
    usual = rates(without)
    drafted = together(each.drafted for each in drafting)
    ratios = [
        math.log(alone_ratio(each, usual) / usual_ratio(each.drafted, usual, drafted)) for each in drafting
    ]
    mean = statistics.fmean(ratios) + math.log(usual_ratio(drafted, usual, drafted))
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) * student(len(ratios) - 1)
    spent, tokens = seconds_of(drafted), tokens_of(drafted)
    seconds = Interval(
        mean=spent * math.expm1(mean),
        low=spent * math.expm1(mean - error),
        high=spent * math.expm1(mean + error),
    )
    told = Saved()
    for each in drafting:
        told = told.plus(each.told)
    return Comparison(
        concurrency=concurrency,
        rounds=len(drafting),
        without_per_token=seconds_of(without) / tokens_of(without),
        drafted_per_token=spent / tokens,
        measured=Saved(spent=spent, tokens=tokens, seconds=seconds, money=seconds.times(price)),
        told=told,
    )


def alone_ratio(of: Round, usual: Mapping[int, float]) -> float:
    """
    Engine time that the drafted tokens of a round would have taken without drafts, over what they took.

    Args:
        of: the round.
        usual: seconds of a token without drafts by batch bucket over all rounds, for buckets that this
            one did not have without drafts.

    Raises:
        ValueError: no bucket of it was decoded without drafts in any round.
    """
    rate = {**usual, **rates(of.without)}
    known = {kind: cell for kind, cell in of.drafted.items() if kind[0] in rate}
    if not known:
        message = "nothing was decoded without drafts at the batch size that drafted"
        raise ValueError(message)
    alone = math.fsum(cell.tokens * rate[bucket] for (bucket, _k), cell in known.items())
    return alone / seconds_of(known)


def rates(steps: Steps) -> dict[int, float]:
    """Engine seconds of a token without drafts, at each batch bucket that had enough such steps."""
    return {
        bucket: cell.seconds / cell.tokens
        for (bucket, k), cell in steps.items()
        if not k and cell.steps >= LEAST_STEPS and cell.tokens
    }


def together(parts: Iterable[Steps]) -> Steps:
    """Steps of several segments."""
    total: Steps = {}
    for steps in parts:
        total = added(total, steps)
    return total


def drafted_of(steps: Steps) -> Steps:
    """Those with drafts."""
    return {kind: cell for kind, cell in steps.items() if kind[1]}


def seconds_of(steps: Steps) -> float:
    """Engine seconds of all of them."""
    return math.fsum(cell.seconds for cell in steps.values())


def usual_ratio(steps: Steps, usual: Mapping[int, float], drafted: Steps) -> float:
    """
    What `alone_ratio` is for these steps, had each taken the mean time of its kind.

    Args:
        steps: with drafts, of one round or of all.
        usual: seconds of a token without drafts by batch bucket over all rounds.
        drafted: steps with drafts of all rounds.
    """
    known = {kind: cell for kind, cell in steps.items() if kind[0] in usual}
    alone = math.fsum(cell.tokens * usual[bucket] for (bucket, _k), cell in known.items())
    means = {kind: cell.seconds / cell.requests for kind, cell in drafted.items()}
    return alone / math.fsum(cell.requests * means[kind] for kind, cell in known.items())


def tokens_of(steps: Steps) -> int:
    """What all of them gave."""
    return sum(cell.tokens for cell in steps.values())


def student(freedom: int) -> float:
    """Student's t for 95 %; for many degrees of freedom a little too much."""
    return STUDENT[min(freedom, len(STUDENT)) - 1]
