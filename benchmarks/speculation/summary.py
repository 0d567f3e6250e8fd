"""
From segments to what a table says: medians over rounds, ratios within rounds, break-even.

Ratios are made within a round, whose segments were measured minutes apart at most, and only then is
the median taken.  The best fixed number is the one that was fastest over all rounds, known in
hindsight.  It still has the luck of those rounds on its side: a monitor that always chose right would
come out a little below 1.

By steps, the same is asked without the speed of the machine in it.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from appliance.speculation.values import NO_STEPS, StepCounters, bucket_of
from benchmarks.speculation.figures import Figures, acceptance_length, steps_of
from benchmarks.speculation.plan import ADAPTIVE, TARGET_ALONE, Cell, Control, Mode

GOAL = 0.95
LEAST_STEPS = 8
"""Fewer steps than this of one kind say nothing about their cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One segment, and where it belongs."""

    cell: Cell
    mode: Mode
    number: int
    """Of the round, from 0."""
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The monitor's state of one batch bucket at the end of a cell."""

    bucket: int
    draft_tokens: int
    """The draft tokens it chose."""
    reason: str
    break_even: float | None
    """For the number of draft tokens it thinks best."""
    break_evens: Mapping[int, float] = field(default_factory=dict)
    """For each K it has measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median over rounds, with the least and the most."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSummary:
    """One mode in one cell."""

    mode: Mode
    rounds: int
    total: Spread
    """Tokens per second of all users."""
    per_user: Spread
    ttft: Spread
    """Seconds."""
    tpot: Spread
    """Seconds."""
    acceptance_length: float | None
    mean_draft_tokens: float | None
    """Draft tokens per decode step: what an adaptive mode chose on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Whether K draft tokens paid in one cell, by the worker's own clock."""

    draft_tokens: int
    acceptance_length: float | None
    measured: float | None
    """Acceptance length from which on K pays: what a step with K took over what one without took."""
    learnt: float | None
    """The monitor's estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One line of the table."""

    cell: Cell
    modes: tuple[ModeSummary, ...]
    against_fixed: Spread | None
    """Adaptive over the best fixed K of the same worker, by tokens per second; None where not measured."""
    against_all: Spread | None
    """Likewise over the best of everything, the target alone included."""
    of_medians: float | None
    """Adaptive over the best fixed K, each by its median over all rounds."""
    by_steps: float | None
    """Likewise by decode steps alone: what the monitor's choices were worth (see `_by_steps`)."""
    break_even: tuple[BreakEven, ...]
    learnt: tuple[Learnt, ...]

    def of(self, mode: Mode) -> ModeSummary | None:
        """One mode, if it was measured."""
        return next((summary for summary in self.modes if summary.mode == mode), None)

    @property
    def baseline(self) -> ModeSummary | None:
        """The base of speed-ups: the target-only worker, or K=0 without one."""
        return self.of(TARGET_ALONE) or self.of(Mode(control=Control.FIXED, draft_tokens=0))

    def speed_up(self, mode: Mode) -> float | None:
        """Tokens per second per user over the baseline's."""
        mine, base = self.of(mode), self.baseline
        return mine.per_user.median / base.per_user.median if mine and base and base.per_user.median else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How many cells reached the goal."""

    cells: int
    against_fixed: int
    against_all: int
    by_steps: int
    worst: CellSummary


def summarise(
    measured: Iterable[Measured], learnt: Mapping[Cell, tuple[Learnt, ...]]
) -> tuple[CellSummary, ...]:
    """Every cell that has a segment, in the order of measuring."""
    cells: dict[Cell, list[Measured]] = {}
    for segment in measured:
        cells.setdefault(segment.cell, []).append(segment)
    return tuple(_cell(cell, segments, learnt.get(cell, ())) for cell, segments in cells.items())


def by_traffic(cells: Iterable[CellSummary]) -> list[tuple[str, list[CellSummary]]]:
    """Cells of one kind and temperature together, with their title."""
    groups: dict[str, list[CellSummary]] = {}
    for cell in cells:
        title = f"{cell.cell.kind.label}, temperature {cell.cell.temperature:g}"
        groups.setdefault(title, []).append(cell)
    return list(groups.items())


def verdict(cells: Sequence[CellSummary]) -> Verdict | None:
    """Count the cells whose median reaches the goal; None where nothing was compared."""
    compared = [(cell, cell.against_fixed, cell.against_all) for cell in cells]
    known = [(cell, fixed, every) for cell, fixed, every in compared if fixed and every]
    if not known:
        return None
    return Verdict(
        cells=len(known),
        against_fixed=sum(fixed.median >= GOAL for _cell, fixed, _every in known),
        against_all=sum(every.median >= GOAL for _cell, _fixed, every in known),
        by_steps=sum((cell.by_steps or 0.0) >= GOAL for cell, _fixed, _every in known),
        worst=min(known, key=lambda each: each[1].median)[0],
    )


def parse_learnt(worker: Mapping[str, Any]) -> tuple[Learnt, ...]:
    """The buckets of a worker as `GET /admin/v1/speculation` shows it."""
    return tuple(
        Learnt(
            bucket=bucket["bucket"],
            draft_tokens=bucket["draft_tokens"],
            reason=bucket["reason"],
            break_even=bucket["break_even"],
            break_evens={int(k): value for k, value in (bucket.get("break_evens") or {}).items()},
        )
        for bucket in worker["buckets"]
    )


def ratios(segments: Iterable[Measured], *, fixed_only: bool) -> list[float]:
    """Adaptive over what was best of all else in hindsight, for each round that was measured completely."""
    segments = list(segments)
    wanted = {segment.mode for segment in segments}
    if fixed_only:
        wanted -= {TARGET_ALONE}
    complete: list[dict[Mode, float]] = []
    for number in sorted({segment.number for segment in segments}):
        speeds = {
            segment.mode: segment.figures.tokens_per_second
            for segment in segments
            if segment.number == number and segment.mode in wanted
        }
        # A round that was interrupted may lack the very mode that is best.
        if ADAPTIVE in speeds and len(speeds) == len(wanted):
            complete.append(speeds)
    others = wanted - {ADAPTIVE}
    if not complete or not others:
        return []
    best = max(others, key=lambda mode: sum(speeds[mode] for speeds in complete))
    return [speeds[ADAPTIVE] / speeds[best] for speeds in complete if speeds[best]]


def spread(values: Sequence[float]) -> Spread | None:
    """Median, least and most; None of nothing."""
    if not values:
        return None
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def _cell(cell: Cell, segments: list[Measured], learnt: tuple[Learnt, ...]) -> CellSummary:
    by_mode: dict[Mode, list[Figures]] = {}
    for segment in segments:
        by_mode.setdefault(segment.mode, []).append(segment.figures)
    modes = tuple(_mode(mode, by_mode[mode]) for mode in sorted(by_mode, key=_column))
    totals = {summary.mode: summary.total.median for summary in modes}
    fixed = [total for mode, total in totals.items() if mode.control is Control.FIXED]
    comparable = ADAPTIVE in totals and fixed and max(fixed) > 0
    return CellSummary(
        cell=cell,
        modes=modes,
        against_fixed=spread(ratios(segments, fixed_only=True)),
        against_all=spread(ratios(segments, fixed_only=False)),
        of_medians=totals[ADAPTIVE] / max(fixed) if comparable else None,
        by_steps=_by_steps(cell, by_mode),
        break_even=_break_even(cell, by_mode, learnt),
        learnt=learnt,
    )


def _column(mode: Mode) -> tuple[int, int]:
    return (list(Control).index(mode.control), mode.draft_tokens or 0)


def _mode(mode: Mode, segments: Sequence[Figures]) -> ModeSummary:
    def over(value: Callable[[Figures], float]) -> Spread:
        values = [value(figures) for figures in segments]
        return Spread(median=statistics.median(values), low=min(values), high=max(values))

    steps = steps_of(segments)
    count = sum(counters.steps for counters in steps.values())
    return ModeSummary(
        mode=mode,
        rounds=len(segments),
        total=over(lambda figures: figures.tokens_per_second),
        per_user=over(lambda figures: figures.tokens_per_second_per_user),
        ttft=over(lambda figures: figures.ttft),
        tpot=over(lambda figures: figures.tpot),
        acceptance_length=acceptance_length(segments),
        mean_draft_tokens=(
            sum(k * counters.steps for (_bucket, k), counters in steps.items()) / count if count else None
        ),
    )


def _by_steps(cell: Cell, by_mode: Mapping[Mode, Sequence[Figures]]) -> float | None:
    """
    Tokens per second of adaptive's decode steps over those of the best fixed K, on one and the same machine.

    The speed of a shared machine swings by more from segment to segment than a choice is worth.  So each
    of adaptive's steps is taken to have lasted as long as a step with its K did in the segments of that K.
    Where it ran the best K throughout, this is 1 but for the luck of the prompts, however slow the machine
    was just then.  Prompts, waiting and the gateway are not in it, nor steps that a request joined.

    None where too few steps were timed.
    """
    fixed = {k: _at(cell, segments, k) for k, segments in _fixed(by_mode).items()}
    timed = {k: steps for k, steps in fixed.items() if steps.steps >= LEAST_STEPS}
    best = max((steps.tokens / steps.seconds for steps in timed.values() if steps.seconds > 0), default=0.0)
    chosen = {k: _at(cell, by_mode.get(ADAPTIVE, ()), k) for k in timed}
    seconds = sum(steps.steps * timed[k].seconds_per_step for k, steps in chosen.items())
    if not best or seconds <= 0 or sum(steps.steps for steps in chosen.values()) < LEAST_STEPS:
        return None
    return sum(steps.tokens for steps in chosen.values()) / seconds / best


def _fixed(by_mode: Mapping[Mode, Sequence[Figures]]) -> dict[int, Sequence[Figures]]:
    """The segments of each fixed K."""
    return {mode.draft_tokens or 0: found for mode, found in by_mode.items() if mode.control is Control.FIXED}


def _at(cell: Cell, segments: Iterable[Figures], k: int) -> StepCounters:
    """The decode steps with K draft tokens at this concurrency."""
    return steps_of(segments).get((bucket_of(cell.concurrency), k), NO_STEPS)


def _break_even(
    cell: Cell, by_mode: Mapping[Mode, Sequence[Figures]], learnt: tuple[Learnt, ...]
) -> tuple[BreakEven, ...]:
    """Each K's own segments against those of K=0, at the bucket of this concurrency."""
    known = next((entry for entry in learnt if entry.bucket == bucket_of(cell.concurrency)), None)
    fixed = _fixed(by_mode)
    cost = {k: _at(cell, segments, k) for k, segments in fixed.items()}
    none = cost.get(0, NO_STEPS)
    rows = []
    for k in sorted(fixed):
        if not k:
            continue
        is_timed = min(none.steps, cost[k].steps) >= LEAST_STEPS and none.seconds > 0
        rows.append(
            BreakEven(
                draft_tokens=k,
                acceptance_length=acceptance_length(fixed[k]),
                measured=cost[k].seconds_per_step / none.seconds_per_step if is_timed else None,
                learnt=known.break_evens.get(k) if known else None,
            )
        )
    return tuple(rows)
