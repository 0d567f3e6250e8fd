"""
Which lines go into which plot.
"""

from collections.abc import Callable, Sequence

from benchmarks.speculation.plan import Control, Mode
from benchmarks.speculation.plot import Line, Panel, Style, svg
from benchmarks.speculation.provenance import Provenance
from benchmarks.speculation.summary import BreakEven, CellSummary, by_traffic

COLOURS = ("#999999", "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#7a5195", "#8c564b", "#bcbd22")
"""By K; after Okabe and Ito, who chose colours that most eyes can tell apart."""
CONCURRENCY = "concurrent users"

Point = tuple[float, float, float, float]


def speed_chart(provenance: Provenance, cells: Sequence[CellSummary]) -> str:
    """Tokens/s per user, and the total over the baseline's, against concurrency."""
    names = {cell.baseline.mode.name for cell in cells if cell.baseline}
    base = names.pop() if len(names) == 1 else "the baseline"
    rows: dict[str, list[Panel]] = {}
    for title, group in by_traffic(cells):
        modes = list(dict.fromkeys(mode.mode for cell in group for mode in cell.modes))
        rows.setdefault(group[0].cell.kind, []).extend(
            (
                Panel(
                    title=title,
                    x_label=CONCURRENCY,
                    y_label="tokens/s per user",
                    lines=tuple(_line(mode, _per_user(group, mode)) for mode in modes),
                ),
                Panel(
                    title=title,
                    x_label=CONCURRENCY,
                    y_label=f"total, times {base}",
                    lines=tuple(_line(mode, _relative(group, mode)) for mode in modes),
                    from_zero=False,
                    mark=1.0,
                ),
            )
        )
    return svg("Speculation by concurrency", provenance.line, list(rows.values()))


def break_even_chart(provenance: Provenance, cells: Sequence[CellSummary]) -> str:
    """The acceptance length from which on K pays, measured and learnt, and what drafts reach."""
    rows: dict[str, list[Panel]] = {}
    for title, group in by_traffic(cells):
        lines: list[Line] = []
        for k in sorted({row.draft_tokens for cell in group for row in cell.break_even}):
            colour = COLOURS[k % len(COLOURS)]
            named: tuple[tuple[str, Style, Callable[[BreakEven], float | None]], ...] = (
                (f"K={k}, measured", Style(colour=colour), lambda row: row.measured),
                (f"K={k}, learnt", Style(colour=colour, dashes="6 4"), lambda row: row.learnt),
                (
                    f"K={k}, accepted",
                    Style(colour=colour, width=1.4, dashes="2 3"),
                    lambda row: row.acceptance_length,
                ),
            )
            lines += [
                Line(name=name, style=style, points=points)
                for name, style, value in named
                if (points := _rows(group, k, value))
            ]
        rows.setdefault(group[0].cell.kind, []).append(
            Panel(
                title=title,
                x_label=CONCURRENCY,
                y_label="acceptance length",
                lines=tuple(lines),
                from_zero=False,
                mark=1.0,
            )
        )
    title = "Break-even: drafting pays if the acceptance length is above"
    return svg(title, provenance.line, list(rows.values()))


def _rows(
    group: Sequence[CellSummary], k: int, value: Callable[[BreakEven], float | None]
) -> tuple[Point, ...]:
    found = [
        (float(cell.cell.concurrency), value(row))
        for cell in group
        for row in cell.break_even
        if row.draft_tokens == k
    ]
    return tuple((x, y, y, y) for x, y in found if y is not None)


def _per_user(group: Sequence[CellSummary], mode: Mode) -> tuple[Point, ...]:
    found = [(cell.cell.concurrency, summary.per_user) for cell in group if (summary := cell.of(mode))]
    return tuple((float(x), speed.median, speed.low, speed.high) for x, speed in found)


def _relative(group: Sequence[CellSummary], mode: Mode) -> tuple[Point, ...]:
    points = []
    for cell in group:
        mine, base = cell.of(mode), cell.baseline
        if mine and base and base.total.median:
            ratio = mine.total.median / base.total.median
            points.append((float(cell.cell.concurrency), ratio, ratio, ratio))
    return tuple(points)


def _line(mode: Mode, points: tuple[Point, ...]) -> Line:
    return Line(name=mode.name, style=style_of(mode), points=points)


def style_of(mode: Mode) -> Style:
    """Colour and line of a mode, in every chart."""
    match mode.control:
        case Control.TARGET_ALONE:
            return Style(colour="#000000", dashes="6 4")
        case Control.ADAPTIVE:
            return Style(colour="#d55e00", width=3.0)
        case Control.FIXED:
            return Style(colour=COLOURS[(mode.draft_tokens or 0) % len(COLOURS)])
