"""
Drafts and steps that workers counted since some moment, for one worker or several together.

Workers count since their start.  A restarted worker counts from zero under another epoch: its former counts
are kept, and the new ones are added.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from types import MappingProxyType

from appliance.serving.worker import WorkerId
from appliance.speculation.values import NO_STEPS, EngineReading, SpecDecodeCounters, StepCounters

Kind = tuple[int, int]
"""Batch bucket and draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    drafts: int = 0
    accepted: tuple[int, ...] = ()
    """Drafts whose tokens were accepted up to each position."""
    drafted: tuple[int, ...] = ()
    """Drafts that reached each position."""
    cells: Mapping[Kind, StepCounters] = field(default_factory=lambda: MappingProxyType({}))
    """Steps that drafted."""

    def plus(self, other: "DraftCounts", sign: int = 1) -> "DraftCounts":
        kinds = {*self.cells, *other.cells}
        put = StepCounters.plus if sign > 0 else StepCounters.since
        cells = {kind: put(self.cells.get(kind, NO_STEPS), other.cells.get(kind, NO_STEPS)) for kind in kinds}
        return DraftCounts(
            drafts=self.drafts + sign * other.drafts,
            accepted=_summed(self.accepted, other.accepted, sign),
            drafted=_summed(self.drafted, other.drafted, sign),
            cells=MappingProxyType(cells),
        )

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        return self.plus(earlier, -1)

    @property
    def is_possible(self) -> bool:
        """Whether this is a difference of the same counters: none of them decreases."""
        steps = (cell.steps for cell in self.cells.values())
        return min(self.drafts, *self.accepted, *self.drafted, *steps, 0) >= 0

    @property
    def drafting(self) -> SpecDecodeCounters:
        positions = min(len(self.accepted), len(self.drafted))
        return SpecDecodeCounters(
            drafts=self.drafts,
            draft_tokens=sum(self.drafted),
            accepted_tokens=sum(self.accepted),
            accepted_per_position=self.accepted[:positions],
            drafted_per_position=self.drafted[:positions],
        )


NOTHING = DraftCounts()


def counts_of(reading: EngineReading) -> DraftCounts:
    drafting = reading.drafting
    return DraftCounts(
        drafts=drafting.drafts,
        accepted=drafting.accepted_per_position,
        drafted=drafting.drafted_per_position,
        cells=MappingProxyType({kind: cell for kind, cell in reading.steps.items() if kind[1] > 0}),
    )


@dataclass(slots=True)
class WorkerCounter:
    """One worker's counts since its first reading, across restarts."""

    epoch: str = ""
    kept: DraftCounts = NOTHING
    """Of former epochs."""
    first: DraftCounts = NOTHING
    last: DraftCounts = NOTHING

    def observe(self, reading: EngineReading) -> None:
        """Add a reading; one without an epoch (no plugin) is ignored."""
        if not reading.epoch:
            return
        now = counts_of(reading)
        if reading.epoch != self.epoch or not now.since(self.last).is_possible:
            self.kept, self.epoch, self.first = self.total, reading.epoch, now
        self.last = now

    @property
    def total(self) -> DraftCounts:
        return self.kept.plus(self.last.since(self.first))


class WorkerCounters:
    def __init__(self) -> None:
        self._counters: dict[WorkerId, WorkerCounter] = {}

    def observe(self, worker_id: WorkerId, reading: EngineReading) -> None:
        self._counters.setdefault(worker_id, WorkerCounter()).observe(reading)

    def total(self, workers: Iterable[WorkerId] | None = None) -> DraftCounts:
        """Sum over these workers; over all if None."""
        wanted = self._counters.keys() if workers is None else set(workers)
        totals = (counter.total for worker_id, counter in self._counters.items() if worker_id in wanted)
        return reduce(DraftCounts.plus, totals, NOTHING)


class RecentCounts:
    """What workers counted in the last minutes: how they compare before anything is changed."""

    def __init__(self, *, seconds: float = 600.0, apart: float = 30.0) -> None:
        """`seconds` is the maximum age of the oldest mark, `apart` the seconds between marks."""
        self._seconds = seconds
        self._apart = apart
        self._counters = WorkerCounters()
        self._marks: list[tuple[float, dict[WorkerId, DraftCounts]]] = []

    def observe(self, readings: Mapping[WorkerId, EngineReading], now: float) -> None:
        for worker_id, reading in readings.items():
            self._counters.observe(worker_id, reading)
        if self._marks and now < self._marks[-1][0] + self._apart:
            return
        mark = {worker_id: self._counters.total((worker_id,)) for worker_id in readings}
        self._marks = [kept for kept in self._marks if kept[0] >= now - self._seconds] + [(now, mark)]

    def counts(self, workers: Iterable[WorkerId]) -> DraftCounts:
        """Sum over these workers since the oldest mark."""
        wanted = tuple(workers)
        total = self._counters.total(wanted)
        if self._marks:
            for worker_id in wanted:
                total = total.since(self._marks[0][1].get(worker_id, NOTHING))
        return total

    def forget(self) -> None:
        """Start again: drafts have changed, so former counts are no basis for comparison."""
        self._counters, self._marks = WorkerCounters(), []


def _summed(one: tuple[int, ...], other: tuple[int, ...], sign: int) -> tuple[int, ...]:
    """Position by position; workers may draft to different depths."""
    return tuple(left + sign * right for left, right in zip_longest(one, other, fillvalue=0))
