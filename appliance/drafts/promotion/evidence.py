"""
What was counted of drafts and steps since some moment, on one worker or on several together.

Workers count since their start.  One that starts anew counts from zero, under another epoch: what it
had counted until then is kept, and what it counts afterwards is added.  Values and arithmetic only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from appliance.serving.worker import WorkerId
from appliance.speculation.values import NO_STEPS, EngineReading, SpecDecodeCounters, StepCounters

Kind = tuple[int, int]
"""Batch bucket and draft tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Drafts by position, and steps by kind."""

    drafts: int = 0
    accepted: tuple[int, ...] = ()
    """Drafts whose tokens were accepted up to each position."""
    drafted: tuple[int, ...] = ()
    """Drafts that reached each position."""
    cells: Mapping[Kind, StepCounters] = field(default_factory=lambda: MappingProxyType({}))
    """Steps that drafted."""

    def plus(self, other: "Counts") -> "Counts":
        """Both together."""
        return _combined(self, other, 1)

    def since(self, earlier: "Counts") -> "Counts":
        """What was counted after `earlier`."""
        return _combined(self, earlier, -1)

    @property
    def is_possible(self) -> bool:
        """Whether a difference is one of the same counters: none of them goes backwards."""
        steps = (cell.steps for cell in self.cells.values())
        return min(self.drafts, *self.accepted, *self.drafted, *steps, 0) >= 0

    @property
    def drafting(self) -> SpecDecodeCounters:
        """The drafts as the monitor's arithmetic takes them."""
        positions = min(len(self.accepted), len(self.drafted))
        return SpecDecodeCounters(
            drafts=self.drafts,
            draft_tokens=sum(self.drafted),
            accepted_tokens=sum(self.accepted),
            accepted_per_position=self.accepted[:positions],
            drafted_per_position=self.drafted[:positions],
        )


NOTHING = Counts()


def counts_of(reading: EngineReading) -> Counts:
    """What a reading has counted since its engine began."""
    drafting = reading.drafting
    return Counts(
        drafts=drafting.drafts,
        accepted=drafting.accepted_per_position,
        drafted=drafting.drafted_per_position,
        cells=MappingProxyType({kind: cell for kind, cell in reading.steps.items() if kind[1] > 0}),
    )


@dataclass(slots=True)
class Meter:
    """One worker's counts since it was first seen here, over all of its restarts."""

    epoch: str = ""
    kept: Counts = NOTHING
    """Of former epochs."""
    first: Counts = NOTHING
    last: Counts = NOTHING

    def saw(self, reading: EngineReading) -> None:
        """Take one reading in; one without counters tells nothing."""
        if not reading.epoch:
            return
        now = counts_of(reading)
        if reading.epoch != self.epoch or not now.since(self.last).is_possible:
            self.kept, self.epoch, self.first = self.total, reading.epoch, now
        self.last = now

    @property
    def total(self) -> Counts:
        """Everything since it was first seen."""
        return self.kept.plus(self.last.since(self.first))


class Meters:
    """The counts of several workers since a moment."""

    def __init__(self) -> None:
        self._meters: dict[WorkerId, Meter] = {}

    def saw(self, worker_id: WorkerId, reading: EngineReading) -> None:
        """Take one worker's reading in."""
        self._meters.setdefault(worker_id, Meter()).saw(reading)

    def total(self, workers: Iterable[WorkerId] | None = None) -> Counts:
        """Of these workers together; of all without."""
        wanted = self._meters.keys() if workers is None else set(workers)
        total = NOTHING
        for worker_id, meter in self._meters.items():
            if worker_id in wanted:
                total = total.plus(meter.total)
        return total


class Recent:
    """What workers counted lately: it tells them apart before anything about them is changed."""

    def __init__(self, *, seconds: float = 600.0, apart: float = 30.0) -> None:
        """
        Prepare; nothing is remembered yet.

        Args:
            seconds: how far back it reaches, at most.
            apart: time between two readings that are remembered.
        """
        self._seconds = seconds
        self._apart = apart
        self._meters = Meters()
        self._marks: list[tuple[float, dict[WorkerId, Counts]]] = []

    def saw(self, readings: Mapping[WorkerId, EngineReading], now: float) -> None:
        """Take one look at all workers in."""
        for worker_id, reading in readings.items():
            self._meters.saw(worker_id, reading)
        if self._marks and now < self._marks[-1][0] + self._apart:
            return
        mark = {worker_id: self._meters.total((worker_id,)) for worker_id in readings}
        self._marks = [kept for kept in self._marks if kept[0] >= now - self._seconds] + [(now, mark)]

    def counts(self, workers: Iterable[WorkerId]) -> Counts:
        """What these workers counted together since the oldest look that is remembered."""
        wanted = tuple(workers)
        total = self._meters.total(wanted)
        if self._marks:
            for worker_id in wanted:
                total = total.since(self._marks[0][1].get(worker_id, NOTHING))
        return total

    def forget(self) -> None:
        """Begin anew: drafts have changed, and what was counted before is no measure any more."""
        self._meters, self._marks = Meters(), []


def _combined(one: Counts, other: Counts, sign: int) -> Counts:
    kinds = {*one.cells, *other.cells}
    put = StepCounters.plus if sign > 0 else StepCounters.since
    cells = {kind: put(one.cells.get(kind, NO_STEPS), other.cells.get(kind, NO_STEPS)) for kind in kinds}
    return Counts(
        drafts=one.drafts + sign * other.drafts,
        accepted=_summed(one.accepted, other.accepted, sign),
        drafted=_summed(one.drafted, other.drafted, sign),
        cells=MappingProxyType(cells),
    )


def _summed(one: tuple[int, ...], other: tuple[int, ...], sign: int) -> tuple[int, ...]:
    """Position by position; workers may draft to different depths."""
    length = max(len(one), len(other))
    padded = [(*each, *(0,) * (length - len(each))) for each in (one, other)]
    return tuple(left + sign * right for left, right in zip(*padded, strict=True))
