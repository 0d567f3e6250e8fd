"""The geometry of the acceptance chart, which `_overview.html` draws.  Pure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.api.console.history import KEPT_SECONDS, SAMPLE_SECONDS, AcceptanceSample

WIDTH, HEIGHT = 720, 170
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 10, 22
GAP_SECONDS = 3 * SAMPLE_SECONDS
"""Samples further apart are not joined."""
MAX_LINES = 6
"""Workers drawn; more lines could not be distinguished, and the table has all workers."""

Place = Callable[[float, float], tuple[float, float]]
"""From time and value to a point of the drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    worker: str
    number: int
    """Selects the colour."""
    length: str
    """SVG paths, with gaps."""
    break_even: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLine:
    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceChart:
    lines: tuple[ChartLine, ...]
    rows: tuple[GridLine, ...]
    columns: tuple[GridLine, ...]
    omitted: int
    """Workers that are not drawn."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT

    @property
    def is_empty(self) -> bool:
        return not any(line.length for line in self.lines)


def draw(samples: Mapping[str, Sequence[AcceptanceSample]], now: float) -> AcceptanceChart:
    """Lay out the samples by worker, oldest first; `now`, on their clock, is the right edge."""
    highest = max(
        (value for kept in samples.values() for each in kept for value in _values(each)), default=1.0
    )
    top = max(2.0, math.ceil(highest * 2) / 2)

    def place(at: float, value: float) -> tuple[float, float]:
        right = WIDTH - RIGHT - (now - at) / KEPT_SECONDS * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (value - 1.0) / (top - 1.0) * (HEIGHT - TOP - BOTTOM)
        return round(right, 1), round(down, 1)

    drawn = sorted(samples)[:MAX_LINES]
    lines = tuple(
        ChartLine(
            worker=worker,
            number=number,
            length=_path([(each.at, each.length) for each in samples[worker]], place),
            break_even=_path([(each.at, each.break_even) for each in samples[worker]], place),
        )
        for number, worker in enumerate(drawn, start=1)
    )
    step = 0.5 if top <= 3.0 else 1.0  # noqa: PLR2004 - at most five rows
    rows = tuple(
        GridLine(at=place(now, 1.0 + step * number)[1], label=f"{1.0 + step * number:g}")
        for number in range(int((top - 1.0) / step) + 1)
    )
    minutes = range(0, int(KEPT_SECONDS // 60) + 1, 2)
    columns = tuple(
        GridLine(at=place(now - 60 * minute, 1.0)[0], label=f"-{minute} min" if minute else "now")
        for minute in minutes
    )
    return AcceptanceChart(lines=lines, rows=rows, columns=columns, omitted=len(samples) - len(drawn))


def _values(sample: AcceptanceSample) -> Iterable[float]:
    return (value for value in (sample.length, sample.break_even) if value is not None)


def _path(points: Sequence[tuple[float, float | None]], place: Place) -> str:
    """An SVG path through the points with a value; a gap in time or value starts a new line."""
    words: list[str] = []
    before: tuple[float, float | None] = (-math.inf, None)
    for at, value in points:
        if value is not None:
            joins = before[1] is not None and at - before[0] <= GAP_SECONDS
            right, down = place(at, value)
            words.append(f"{'L' if joins else 'M'}{right:g} {down:g}")
        before = (at, value)
    return " ".join(words)
