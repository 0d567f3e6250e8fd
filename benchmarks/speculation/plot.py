"""
Plots as SVG: panels of lines over a doubling axis, in rows and columns, with one legend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_WIDTH, PANEL_HEIGHT = 330, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 46
"""Room around the lines of a panel, for ticks and titles."""
HEAD, FOOT, LEGEND_ROW = 64, 34, 22
TICKS = 5
TEXT = "font-family='Helvetica, Arial, sans-serif' font-size='11' fill='#222'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Style of a line, the same in every panel."""

    colour: str
    width: float = 1.6
    dashes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one name; a point is x, y, and the least and the most that was measured."""

    name: str
    style: Style
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    from_zero: bool = True
    """Whether the y axis starts at 0."""
    mark: float | None = None
    """A value of y to draw a line at."""


def svg(title: str, source: str, rows: Sequence[Sequence[Panel]]) -> str:
    """
    Draw panels.

    Args:
        title: what all of it shows.
        source: what it was measured on, in one line below.
        rows: panels from top to bottom, from left to right.
    """
    columns = max((len(row) for row in rows), default=1)
    width = columns * PANEL_WIDTH + 20
    lines = list({line.name: line for row in rows for panel in row for line in panel.lines}.values())
    places, legend_rows = _legend_places(lines, width)
    head = HEAD + (legend_rows - 1) * LEGEND_ROW
    source_lines = _wrapped(source, width // 6)
    height = head + len(rows) * PANEL_HEIGHT + FOOT + 14 * (len(source_lines) - 1)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' {TEXT}>",
        f"<rect width='{width}' height='{height}' fill='#fff'/>",
        f"<text x='20' y='24' font-size='15' font-weight='bold'>{escape(title)}</text>",
    ]
    for line, (x, y) in zip(lines, places, strict=True):
        parts.append(_stroke([(x, y - 4), (x + 26, y - 4)], line.style))
        parts.append(f"<text x='{x + 32}' y='{y}'>{escape(line.name)}</text>")
    for number, row in enumerate(rows):
        for column, panel in enumerate(row):
            parts.append(_panel(panel, 10 + column * PANEL_WIDTH, head + number * PANEL_HEIGHT))
    for number, text in enumerate(source_lines):
        y = height - 12 - 14 * (len(source_lines) - 1 - number)
        parts.append(f"<text x='20' y='{y}' font-size='10' fill='#666'>{escape(text)}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, count: int = TICKS) -> tuple[float, ...]:
    """Round values, about so many, of which the first is at most `low` and the last at least `high`."""
    span = max(high - low, 1e-9)
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(step * number, 10) for number in range(first, max(last, first + 1) + 1))


def _panel(panel: Panel, left: float, top: float) -> str:
    points = [point for line in panel.lines for point in line.points]
    right, bottom = left + PANEL_WIDTH - RIGHT, top + PANEL_HEIGHT - BOTTOM
    left, top = left + LEFT, top + TOP
    parts = [f"<text x='{left}' y='{top - 12}' font-weight='bold'>{escape(panel.title)}</text>"]
    if not points:
        return parts[0] + f"<text x='{left}' y='{top + 20}' fill='#666'>not measured</text>"
    across = sorted({point[0] for point in points})
    marks = [panel.mark] if panel.mark is not None else []
    lowest = 0.0 if panel.from_zero else min([*marks, *(point[2] for point in points)])
    down = ticks(lowest, max([*marks, *(point[3] for point in points)]))
    spread = max(math.log2(across[-1] / across[0]), 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        share = math.log2(x / across[0]) / spread if len(across) > 1 else 0.5
        inner = right - left - 20
        return (
            round(left + 10 + share * inner, 1),
            round(bottom - (y - down[0]) / (down[-1] - down[0]) * (bottom - top), 1),
        )

    for value in down:
        _x, y = at(across[0], value)
        parts.append(f"<path d='M{left} {y}H{right}' stroke='#e4e4e4'/>")
        parts.append(f"<text x='{left - 6}' y='{y + 4}' text-anchor='end'>{value:g}</text>")
    for value in across:
        x, _y = at(value, down[0])
        parts.append(f"<path d='M{x} {bottom}v4' stroke='#888'/>")
        parts.append(f"<text x='{x}' y='{bottom + 16}' text-anchor='middle'>{value:g}</text>")
    parts.append(f"<path d='M{left} {top}V{bottom}H{right}' stroke='#888' fill='none'/>")
    for x, y, turn, label in (
        ((left + right) / 2, bottom + 32, 0, panel.x_label),
        (left - 44, (top + bottom) / 2, -90, panel.y_label),
    ):
        place = f"translate({x} {y}) rotate({turn})"
        parts.append(f"<text transform='{place}' text-anchor='middle'>{escape(label)}</text>")
    if panel.mark is not None:
        _x, y = at(across[0], panel.mark)
        parts.append(f"<path d='M{left} {y}H{right}' stroke='#555' stroke-dasharray='2 3'/>")
    parts.extend(
        _line(line, [(at(x, y), at(x, low)[1], at(x, high)[1]) for x, y, low, high in line.points])
        for line in panel.lines
    )
    return "\n".join(parts)


def _line(line: Line, points: Sequence[tuple[tuple[float, float], float, float]]) -> str:
    parts = [_stroke([place for place, _low, _high in points], line.style)]
    for (x, y), low, high in points:
        if high != low:
            parts.append(f"<path d='M{x} {low}V{high}' stroke='{line.style.colour}' stroke-opacity='0.35'/>")
        parts.append(f"<circle cx='{x}' cy='{y}' r='{1 + line.style.width:g}' fill='{line.style.colour}'/>")
    return "\n".join(parts)


def _stroke(points: Sequence[tuple[float, float]], style: Style) -> str:
    dashes = f" stroke-dasharray='{style.dashes}'" if style.dashes else ""
    path = "L".join(f"{x} {y}" for x, y in points)
    return f"<path d='M{path}' fill='none' stroke='{style.colour}' stroke-width='{style.width:g}'{dashes}/>"


def _legend_places(lines: Sequence[Line], width: float) -> tuple[list[tuple[float, float]], int]:
    places, x, row = [], 20.0, 0
    for line in lines:
        needed = 54 + 6.2 * len(line.name)
        if x + needed > width and x > 20:
            x, row = 20.0, row + 1
        places.append((x, 48.0 + row * LEGEND_ROW))
        x += needed
    return places, row + 1


def _wrapped(text: str, characters: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) + 1 > characters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
