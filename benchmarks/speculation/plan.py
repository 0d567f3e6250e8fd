"""
The measurements in their order: cells of traffic, temperature and concurrency, and modes in turn.

Values only.  A mode's neighbours change from round to round, so that what a machine does to the mode that
comes third, or comes after a slow one, falls on all modes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

SWITCH_SECONDS = 2.5
"""Typical time of a change of mode, for the estimate."""
DRAIN_SECONDS = 2.0
"""Typical time of requests in flight at the end of a segment, likewise."""
SHIFT_PHASES = 2


class Kind(StrEnum):
    """A kind of traffic."""

    CODE = "code"
    CHAT = "chat"
    OWN_CHAT = "chat-own"
    LONG = "long"
    HEX = "hex"
    MIXED = "mixed"
    SHIFT = "shift"

    @property
    def label(self) -> str:
        """What people read."""
        return LABELS[self]


LABELS = {
    Kind.CODE: "code",
    Kind.CHAT: "chat, template changed",
    Kind.OWN_CHAT: "chat, the model's own template",
    Kind.LONG: "long context",
    Kind.HEX: "hex",
    Kind.MIXED: "mixed",
    Kind.SHIFT: "code and hex by turns",
}
DEFAULT_KINDS = (Kind.CODE, Kind.CHAT, Kind.LONG, Kind.HEX, Kind.MIXED, Kind.SHIFT)


class Control(StrEnum):
    """Who decides on draft tokens."""

    TARGET_ALONE = "target alone"
    """None: a worker that has loaded no draft."""
    FIXED = "fixed"
    """The benchmark, by an operator's override."""
    ADAPTIVE = "adaptive"
    """The appliance's monitor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to decode."""

    control: Control
    draft_tokens: int | None = None
    """K, where it is fixed."""

    @property
    def name(self) -> str:
        """The column's heading."""
        return str(self.control) if self.draft_tokens is None else f"K={self.draft_tokens}"


TARGET_ALONE = Mode(control=Control.TARGET_ALONE)
ADAPTIVE = Mode(control=Control.ADAPTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One load: everything in it is compared."""

    kind: Kind
    temperature: float
    concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole run."""

    kinds: tuple[Kind, ...]
    temperatures: tuple[float, ...]
    concurrency: tuple[int, ...]
    rounds: int
    """In one pair of worker processes."""
    modes: tuple[Mode, ...]
    seconds: float
    """Measured time of a segment."""
    warm_up: float
    """Time under the same load before it, in every mode alike."""
    learn: float
    """Time that the monitor gets with a cell's traffic before its first round."""
    shift_seconds: float
    """How long traffic of the kind `shift` stays of one sort."""
    max_tokens: int
    restarts: int = 1
    """
    How often all of it is measured, each time in new processes: two processes of one program differ by
    a tenth on some machines, for as long as they live.
    """

    @property
    def cells(self) -> tuple[Cell, ...]:
        """In the order they are measured."""
        return tuple(
            Cell(kind=kind, temperature=temperature, concurrency=concurrency)
            for kind in self.kinds
            for temperature in self.temperatures
            for concurrency in self.concurrency
        )

    def window(self, kind: Kind) -> float:
        """Measured seconds of a segment; traffic that shifts is seen in each of its phases."""
        return max(self.seconds, SHIFT_PHASES * self.shift_seconds) if kind is Kind.SHIFT else self.seconds

    def order(self, number: int) -> tuple[Mode, ...]:
        """The modes of a round, from 0: they rotate, and every other round goes backwards."""
        count, way = len(self.modes), 1 if number % 2 == 0 else -1
        return tuple(self.modes[(number + way * place) % count] for place in range(count))

    @property
    def estimate_seconds(self) -> float:
        """About how long it takes, without starting the workers."""
        overhead = SWITCH_SECONDS + self.warm_up + DRAIN_SECONDS
        segments = self.rounds * len(self.modes)
        return self.restarts * sum(
            segments * (overhead + self.window(cell.kind))
            + (self.learn + DRAIN_SECONDS if ADAPTIVE in self.modes else 0.0)
            for cell in self.cells
        )


def modes_of(choices: Sequence[int], *, separate_target: bool) -> tuple[Mode, ...]:
    """Every mode there is: the target alone, each K a worker is prepared for, and the monitor."""
    fixed = tuple(Mode(control=Control.FIXED, draft_tokens=k) for k in sorted(choices))
    return (*((TARGET_ALONE,) if separate_target else ()), *fixed, ADAPTIVE)


def is_code(elapsed: float, shift_seconds: float) -> bool:
    """
    Whether shifting traffic is code just now, and not hex.

    Args:
        elapsed: seconds since the measured part began; negative during warm-up, which is hex, so
            that every measured part holds a change either way.
        shift_seconds: how long each lasts.
    """
    return elapsed >= 0 and int(elapsed / shift_seconds) % SHIFT_PHASES == 0
