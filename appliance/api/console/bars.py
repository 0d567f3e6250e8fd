"""Stacked bars over time, and the table of the same figures.  Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from appliance.infra import svg

WIDTH, HEIGHT = 720, 190
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 14, 24
GROUPS = 6
"""Colours; if there are more groups, the smallest share the last one."""
LABELS = 8
ROWS = 4
OTHERS = "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    label: str
    """Below the bar."""
    title: str
    values: Mapping[str, float]
    """By group, 0 or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    drawing: Markup
    groups: tuple[str, ...]
    """The largest first; a group's place selects its colour."""
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    """Of the table: each bar's title, its values by group, and its total."""


def draw_bars(what: str, bars: Sequence[Bar]) -> BarChart | None:
    """`what` describes the drawing to screen readers; None if every value is 0."""
    sums: dict[str, float] = {}
    for bar in bars:
        for group, value in bar.values.items():
            sums[group] = sums.get(group, 0.0) + value
    ranked = sorted(sums, key=lambda group: (-sums[group], group))
    drawn = ranked if len(ranked) <= GROUPS else ranked[: GROUPS - 1]
    stacks = [[bar.values.get(group, 0.0) for group in drawn] for bar in bars]
    if len(drawn) < len(ranked):
        for bar, stack in zip(bars, stacks, strict=True):
            stack.append(sum(bar.values.get(group, 0.0) for group in ranked[len(drawn) :]))
    highest = max((sum(stack) for stack in stacks), default=0.0)
    if highest <= 0:
        return None
    step = _step(highest)
    top = step * math.ceil(highest / step)
    return BarChart(
        drawing=svg.drawing(what, WIDTH, HEIGHT, *_scale(step, top), *_bars(bars, stacks, top)),
        groups=(*drawn, *([OTHERS] if len(drawn) < len(ranked) else ())),
        rows=tuple((bar.title, (*stack, sum(stack))) for bar, stack in zip(bars, stacks, strict=True)),
    )


def _step(highest: float) -> float:
    """Between two rows: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(highest / ROWS))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * ROWS >= highest)


def _scale(step: float, top: float) -> list[Markup]:
    parts = []
    for number in range(round(top / step) + 1):
        down = _down(number * step, top)
        parts.append(svg.line(LEFT, down, WIDTH - RIGHT, down, class_="grid"))
        words = _short(number * step)
        parts.append(svg.label(LEFT - 6, down + 3, words, class_="scale", text_anchor="end"))
    return parts


def _bars(bars: Sequence[Bar], stacks: Sequence[Sequence[float]], top: float) -> list[Markup]:
    parts = []
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    labelled = -(-len(bars) // LABELS)
    for place, (bar, stack) in enumerate(zip(bars, stacks, strict=True)):
        left, below = LEFT + place * step, 0.0
        for number, value in enumerate(stack, start=1):
            if value:
                up = _down(below + value, top)
                box = {"x": left + step * 0.1, "y": up, "width": step * 0.8, "height": _down(below, top) - up}
                shown = {name: f"{length:.1f}" for name, length in box.items()}
                parts.append(svg.element("rect", class_=f"bar-{number}", **shown))
                below += value
        if place % labelled == 0:
            middle = left + step / 2
            parts.append(svg.label(middle, HEIGHT - 7, bar.label, class_="scale", text_anchor="middle"))
    return parts


def _down(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:.3g}"
