from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from appliance.drafts.report_template import render_template
from appliance.drafts.training.progress import Point
from appliance.infra import svg

WIDTH, HEIGHT, LEFT, BELOW = 900, 220, 46, 24
TICKS = 4
MAX_POINTS = 400
COLOURS = ("#2563a8", "#c77700", "#3a7d34", "#a83264", "#6b4fa0", "#54707a")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 3")
Curve = tuple[str, list[tuple[float, float]]]
"""A name and its points: step and value."""


def render_page(title: str, facts: dict[str, Any], points: Sequence[Point]) -> str:
    measured = [(point.step, point.held_out) for point in points if point.held_out is not None]
    return render_template(
        "training.html",
        title=title,
        facts=facts,
        nothing="No step was recorded.",
        loss=_plot("Loss over steps", [("loss", [(point.step, point.loss) for point in points])]),
        agreement=_plot(
            "Agreement by draft token over steps",
            _by_token([(point.step, point.agreement) for point in points]),
            top=1.0,
        ),
        held_out=_plot("Agreement on held-out samples over steps", _by_token(measured), top=1.0),
    )


def _by_token(steps: Sequence[tuple[int, tuple[float, ...]]]) -> list[Curve]:
    count = max((len(shares) for _, shares in steps), default=0)
    return [
        (f"token {place + 1}", [(step, shares[place]) for step, shares in steps if place < len(shares)])
        for place in range(count)
    ]


def _plot(label: str, curves: list[Curve], top: float | None = None) -> Markup | None:
    """Draw curves over steps from 0 to `top` (default: their maximum); None without a point."""
    values = [value for _, curve in curves for _, value in curve]
    if not values:
        return None
    steps = [step for _, curve in curves for step, _ in curve]
    first, last = min(steps), max(*steps, min(steps) + 1)
    top = top or max(values) * 1.05 or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT)
        return x, HEIGHT - min(1.0, max(0.0, value / top)) * HEIGHT

    parts: list[Markup] = []
    for tick in range(TICKS + 1):
        height = HEIGHT - tick / TICKS * HEIGHT
        parts.append(svg.line(LEFT, height, WIDTH, height, class_="grid"))
        parts.append(svg.label(0, max(11.0, height), f"{top * tick / TICKS:.2f}"))
    for number, (name, curve) in enumerate(curves):
        colour, text = COLOURS[number % len(COLOURS)], f"{name}: {curve[-1][1]:.3f}"
        kept = [*curve[: -1 : max(1, len(curve) // MAX_POINTS)], curve[-1]]
        parts.append(
            svg.element(
                "polyline",
                svg.element("title", f"{text} at the end"),
                style=f"stroke:{colour}",
                stroke_dasharray=DASHES[number % len(DASHES)],
                points=svg.points([place(step, value) for step, value in kept]),
            )
        )
        parts.append(svg.label(LEFT + 8 + number * 130, 14, text, style=f"fill:{colour}"))
    parts.append(svg.label(LEFT, HEIGHT + 16, f"step {first}"))
    parts.append(svg.label(WIDTH, HEIGHT + 16, f"step {last}", text_anchor="end"))
    return svg.drawing(label, WIDTH, HEIGHT + BELOW, *parts)
