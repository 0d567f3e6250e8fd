"""
How a training went, as one HTML page that needs nothing else: no script, no font, no address.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from appliance.drafts.training.progress import Point

STYLE = """
:root { color-scheme: light dark; --line: #2563a8; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid #8884; }
svg { width: 100%; height: auto; } text { font-size: 11px; fill: currentColor; }
polyline { fill: none; stroke: var(--line); stroke-width: 1.5; }
.grid { stroke: #8884; stroke-width: 1; }
"""
WIDTH, HEIGHT, LEFT, BELOW = 900, 220, 46, 24
TICKS = 4
MOST_POINTS = 400
COLOURS = ("#2563a8", "#c77700", "#3a7d34", "#a83264", "#6b4fa0", "#54707a")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 3")
Line = tuple[str, list[tuple[float, float]]]
"""A name, and its points: step and value."""


def render_page(title: str, facts: dict[str, Any], points: Sequence[Point]) -> str:
    """Make the page, whole."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<table>{rows}</table>",
        "<h2>Loss</h2>",
        _plot("Loss over steps", [("loss", [(point.step, point.loss) for point in points])]),
        "<h2>Agreement with the target's first choice</h2>",
        _plot("Agreement by draft token over steps", _agreement(points), most=1.0),
        "<p>Of each draft token, smoothed over the last steps, on what was trained on.</p>",
    ]
    measured = [point for point in points if point.held_out is not None]
    if measured:
        parts += [
            "<h2>Agreement on held-out samples</h2>",
            _plot("Agreement on held-out samples over steps", _held_out(measured), most=1.0),
            "<p>On samples that were not trained on. An evaluation measures what is accepted in service.</p>",
        ]
    return "".join((*parts, "</body></html>\n"))


def _agreement(points: Sequence[Point]) -> list[Line]:
    count = max((len(point.agreement) for point in points), default=0)
    return [
        (f"token {place + 1}", [(p.step, p.agreement[place]) for p in points if place < len(p.agreement)])
        for place in range(count)
    ]


def _held_out(points: Sequence[Point]) -> list[Line]:
    count = max(len(point.held_out or ()) for point in points)
    return [
        (f"token {place + 1}", [(p.step, p.held_out[place]) for p in points if p.held_out])
        for place in range(count)
    ]


def _plot(label: str, lines: list[Line], most: float | None = None) -> str:
    """Lines over steps; the range of values is theirs, from 0."""
    values = [value for _, line in lines for _, value in line]
    if not values:
        return "<p>Nothing was noted.</p>"
    steps = [step for _, line in lines for step, _ in line]
    first, last = min(steps), max(*steps, min(steps) + 1)
    top = most or max(values) * 1.05 or 1.0
    parts = [_grid(top)]
    for place, (name, line) in enumerate(lines):
        colour, dash = COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]
        stride = max(1, len(line) // MOST_POINTS)
        kept = [*line[:-1:stride], line[-1]]
        spots = " ".join(
            f"{LEFT + (step - first) / (last - first) * (WIDTH - LEFT):.1f},"
            f"{HEIGHT - min(1.0, max(0.0, value / top)) * HEIGHT:.1f}"
            for step, value in kept
        )
        parts.append(
            f'<polyline style="stroke:{colour}" stroke-dasharray="{dash}" points="{spots}">'
            f"<title>{escape(name)}: {line[-1][1]:.3f} in the end</title></polyline>"
            f'<text x="{LEFT + 8 + place * 130}" y="14" style="fill:{colour}">'
            f"{escape(name)}: {line[-1][1]:.3f}</text>"
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT + 16}">step {first}</text>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT + 16}" text-anchor="end">step {last}</text>')
    box = f"0 0 {WIDTH} {HEIGHT + BELOW}"
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{box}">{"".join(parts)}</svg>'


def _grid(top: float) -> str:
    parts = []
    for tick in range(TICKS + 1):
        height = HEIGHT - tick / TICKS * HEIGHT
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text x="0" y="{max(11.0, height):.1f}">{top * tick / TICKS:.2f}</text>'
        )
    return "".join(parts)
