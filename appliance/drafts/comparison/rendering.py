"""A comparison as plain text: table, bars, recommendation.  Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from appliance.drafts.comparison.asked import NO_METHOD
from appliance.drafts.comparison.figures import (
    ComparisonCell,
    MethodComparison,
    MethodFigures,
    Recommendation,
)

BAR = 48
HEAD = ("method", "concurrency", "K", "tokens/s", "ratio (95 % interval)", "acceptance length")
NUMERIC = range(1, 4)
"""Columns aligned to the right."""


def render_comparison(found: MethodComparison) -> str:
    methods = tuple(_with_labels(found.methods))
    found = found.model_copy(update={"methods": methods})
    parts = [_table(found), _legend(found), _plot(methods), _recommendation(found.recommendation)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _with_labels(methods: Sequence[MethodFigures]) -> Iterator[MethodFigures]:
    """Number the drafts of a method after its first."""
    counts = Counter[str]()
    for each in methods:
        counts[each.method] += 1
        number = counts[each.method]
        yield each if number == 1 else each.model_copy(update={"method": f"{each.method} ({number})"})


def _table(found: MethodComparison) -> list[str]:
    rows = [HEAD, *(row for method in found.methods for row in _rows(method))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    problems = [
        f"{method.method}: not measured: {method.problem}" for method in found.methods if method.problem
    ]
    return [_line(row, widths) for row in rows] + problems


def _rows(method: MethodFigures) -> Iterator[tuple[str, ...]]:
    for cell in method.cells:
        ratio = cell.ratio
        yield (
            method.method,
            str(cell.concurrency),
            str(cell.draft_tokens),
            f"{cell.tokens_per_second:.1f}",
            "1" if ratio is None else f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            "-" if cell.acceptance_length is None else f"{cell.acceptance_length:.2f}",
        )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, strict=True)
    placed = [
        text.rjust(width) if at in NUMERIC else text.ljust(width) for at, (text, width) in enumerate(cells)
    ]
    return "  ".join(placed).rstrip()


def _legend(found: MethodComparison) -> list[str]:
    return [
        f"{found.prompts} prompts, {found.rounds} rounds, at most {found.max_tokens} tokens an answer.",
        "The ratio is to K=0 of the same process, paired by round. Each method ran in a process of its own,",
        "and processes differ in speed: compare methods by their ratios, not by their tokens/s.",
        "A setting is recommended if its ratio is above 1 with intervals that hold for all ratios together.",
        *(f"{method.method}: draft {method.draft}" for method in found.methods if method.draft),
    ]


def _plot(methods: Sequence[MethodFigures]) -> list[str]:
    """Bars of the ratios: `#` up to the interval's lower end, `-` up to its upper end, `|` at K=0."""
    drawn = [(method.method, cell) for method in methods for cell in method.cells if cell.ratio is not None]
    if not drawn:
        return []
    labels = [f"{name} at {cell.concurrency}, K={cell.draft_tokens}" for name, cell in drawn]
    width = max(map(len, labels))
    scale = BAR / max(1.0, *(cell.ratio.high for _, cell in drawn if cell.ratio is not None))
    bars = [f"{label:<{width}}  {_bar(cell, scale)}" for label, (_, cell) in zip(labels, drawn, strict=True)]
    return ["Ratio to K=0 (|): # to the interval's lower end, - to its upper end", *bars]


def _bar(cell: ComparisonCell, scale: float) -> str:
    if cell.ratio is None:
        return ""
    low, high, one = (round(scale * value) for value in (cell.ratio.low, cell.ratio.high, 1.0))
    filled = ("#" * low + "-" * (high - low)).ljust(BAR)
    return f"{filled[: one - 1]}|{filled[one:]} {cell.ratio.value:.2f}"


def _recommendation(found: Recommendation | None) -> list[str]:
    if found is None:
        return ["No method could be measured."]
    if found.method == NO_METHOD:
        reason = "No method is shown to pay"
        reason += ", though one may: more rounds or prompts narrow the intervals." if found.undecided else "."
        return [reason, "Recommended settings:", "", "worker:", "  method: none"]
    lines = ["Recommended settings (the monitor chooses among 0 and the numbers up to draft_tokens):", ""]
    lines += ["worker:", f"  method: {found.method}"]
    lines += [f"  draft: {found.draft}"] if found.draft else []
    return [*lines, f"  draft_tokens: {found.draft_tokens}"]
