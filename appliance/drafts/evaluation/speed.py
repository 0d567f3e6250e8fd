"""
How much faster a draft makes its target: tokens per engine second, by whole decode steps.

What is counted is what the worker's plugin counts: engine seconds of steps in which every request
verified a whole draft, by batch bucket and number of draft tokens.  Prompts, waiting and the network
are in none of it.

Without drafts means here: the same process with drafting switched off.  On a GPU vLLM 0.32 then still
runs the draft once a step, so over a target that never had one a gain is a little smaller than shown;
between two drafts that cancels.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from appliance.drafts.evaluation.arms import Arm
from appliance.drafts.evaluation.intervals import Interval, mean_ratio
from appliance.drafts.evaluation.results import Pace, StepResult

LEAST_STEPS = 8
"""Fewer steps of one kind in a round measure nothing."""


def gain(paces: Iterable[Pace]) -> float | None:
    """
    Tokens per engine second with drafts over without, in one round of one worker.

    Steps are compared with steps of the same batch bucket, and each bucket weighs as much as its time
    without drafts.  None where no bucket was measured both ways.
    """
    cells: defaultdict[tuple[int, bool], list[Pace]] = defaultdict(list)
    for pace in paces:
        cells[pace.batch, pace.draft_tokens > 0].append(pace)
    drafting = without = 0.0
    for (batch, drafts), found in cells.items():
        plain = cells.get((batch, False), [])
        if not drafts or not _is_measured(found) or not _is_measured(plain):
            continue
        seconds_per_token = _seconds(plain) / _tokens(plain)
        drafting += _seconds(found)
        without += _tokens(found) * seconds_per_token
    return without / drafting if drafting and without else None


def gains(results: Iterable[StepResult], arm: Arm) -> dict[int, float]:
    """The gain of an arm's draft in each round in which it could be measured."""
    found = {result.number: gain(result.paces) for result in results if result.arm is arm}
    return {number: value for number, value in found.items() if value is not None}


def speed_ratio(candidate: Mapping[int, float], incumbent: Mapping[int, float] | None) -> Interval | None:
    """
    How many times as fast the candidate is, over rounds that both have; None for fewer than two.

    Args:
        candidate: its gain by round.
        incumbent: the same of the draft in service; None where the target serves alone.
    """
    if incumbent is None:
        return mean_ratio(list(candidate.values()))
    both = sorted(candidate.keys() & incumbent.keys())
    return mean_ratio([candidate[number] / incumbent[number] for number in both])


def total(results: Iterable[StepResult], arm: Arm) -> tuple[Pace, ...]:
    """Everything counted of an arm, by batch bucket and draft tokens."""
    cells: defaultdict[tuple[int, int], list[Pace]] = defaultdict(list)
    for result in results:
        for pace in result.paces if result.arm is arm else ():
            cells[pace.batch, pace.draft_tokens].append(pace)
    return tuple(
        Pace(
            batch=batch,
            draft_tokens=draft_tokens,
            steps=sum(pace.steps for pace in found),
            seconds=_seconds(found),
            requests=sum(pace.requests for pace in found),
            tokens=_tokens(found),
        )
        for (batch, draft_tokens), found in sorted(cells.items())
    )


def _is_measured(paces: list[Pace]) -> bool:
    return sum(pace.steps for pace in paces) >= LEAST_STEPS and _seconds(paces) > 0 and _tokens(paces) > 0


def _seconds(paces: list[Pace]) -> float:
    return sum(pace.seconds for pace in paces)


def _tokens(paces: list[Pace]) -> int:
    return sum(pace.tokens for pace in paces)
