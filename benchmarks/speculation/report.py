"""
Results as Markdown, for readers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from appliance.speculation.values import bucket_of
from benchmarks.speculation.plan import ADAPTIVE, Control, Kind, Mode, Plan
from benchmarks.speculation.provenance import Provenance
from benchmarks.speculation.summary import (
    GOAL,
    CellSummary,
    ModeSummary,
    Spread,
    by_traffic,
    verdict,
)

NONE = "-"


def markdown(
    plan: Plan, provenance: Provenance, cells: Sequence[CellSummary], *, plots: Sequence[str] = ()
) -> str:
    """The report for readers."""
    lines = [f"# Speculation by concurrency, at commit {provenance.commit}", ""]
    lines += [f"`{provenance.command}`", ""]
    lines += [f"- {provenance.hardware}"]
    lines += [f"- {provenance.engine}, {provenance.model} with {provenance.draft}"]
    lines += [f"- commit {provenance.source}, {provenance.date}", ""]
    lines += [*_method(plan), ""]
    lines += [f"![{name}]({name})\n" for name in plots]
    lines += ["## Verdict", "", *verdict_lines(cells), ""]
    lines += _table(
        (
            "traffic",
            "temperature",
            "concurrency",
            "adaptive / best fixed K",
            "adaptive / best of all",
            "of medians",
            "by steps",
        ),
        [
            (
                *(cell.cell.kind.label, f"{cell.cell.temperature:g}", str(cell.cell.concurrency)),
                *(_range(cell.against_fixed), _range(cell.against_all)),
                *(_ratio(cell.of_medians), _ratio(cell.by_steps)),
            )
            for cell in cells
        ],
    )
    for title, group in by_traffic(cells):
        lines += ["", f"## {title}", "", *_traffic(group)]
    return "\n".join(lines) + "\n"


def verdict_lines(cells: Sequence[CellSummary]) -> list[str]:
    """How close the monitor came to the best that was possible."""
    found = verdict(cells)
    if found is None:
        return ["No cell was measured in all its modes."]
    worst, least = found.worst.cell, found.worst.against_fixed
    where = f"{worst.kind.label}, temperature {worst.temperature:g}, concurrency {worst.concurrency}"
    return [
        f"Adaptive reaches {GOAL:.2f} of the best fixed K in {found.against_fixed} of {found.cells} cells,",
        f"and {GOAL:.2f} of the best of all, the target alone included, in {found.against_all}.",
        f"By steps, which leaves the swings of the machine's speed out, it is {found.by_steps}.",
        f"Its worst cell is {where}: {_range(least)} of the best fixed K.",
    ]


def _method(plan: Plan) -> list[str]:
    shifting = plan.window(Kind.SHIFT)
    return [
        "Real vLLM behind the gateway, audit log on, all on one machine with the clients.  Each cell was",
        f"measured in {plan.rounds * plan.restarts} rounds of all modes, in changing order"
        + (f", with {plan.restarts} starts of the processes" if plan.restarts > 1 else "")
        + f".  A segment is {plan.warm_up:g} s",
        f"of warm-up and {plan.seconds:g} s measured under the same load ({shifting:g} s if traffic shifts).",
        f"Answers are streamed, {plan.max_tokens} tokens long, without hits of the prefix cache.",
        f"The monitor had {plan.learn:g} s with each cell's traffic before its first round, and keeps",
        "what it learns.",
        "Figures are medians over rounds.  Tokens/s per user is the inverse of the time per output token;",
        "the total also holds what waiting and prompts take.  Ratios are of totals within a round, with the",
        "least and the most; the best fixed K is the fastest over all rounds, in hindsight.",
        "*By steps*: of decode steps alone, each of adaptive's taken to have lasted as long as one with its",
        "K did in the segments of that K: what the monitor chose, and not how fast the machine was then.",
    ]


def _traffic(cells: list[CellSummary]) -> list[str]:
    modes = list(dict.fromkeys(mode.mode for cell in cells for mode in cell.modes))
    names = [mode.name for mode in modes]
    base = next((cell.baseline.mode.name for cell in cells if cell.baseline), NONE)
    lines = [f"Tokens/s per user, and speed-up over {base}:", ""]
    lines += _table(("concurrency", *names), [_row(cell, modes, _per_user) for cell in cells])
    lines += ["", "Tokens/s of all users:", ""]
    lines += _table(
        ("concurrency", *names),
        [_row(cell, modes, lambda _cell, mode: f"{mode.total.median:.0f}") for cell in cells],
    )
    lines += ["", "Time to first token / time per output token, in ms:", ""]
    lines += _table(("concurrency", *names), [_row(cell, modes, _latency) for cell in cells])
    drafting = [mode for mode in modes if mode.control is not Control.TARGET_ALONE and mode.draft_tokens != 0]
    if drafting:
        lines += ["", "Acceptance length; for adaptive, also the draft tokens of its mean step:", ""]
        lines += _table(
            ("concurrency", *(mode.name for mode in drafting)),
            [_row(cell, drafting, _length) for cell in cells],
        )
    fixed = sorted({row.draft_tokens for cell in cells for row in cell.break_even})
    if fixed:
        lines += [
            "",
            "Break-even: the acceptance length from which on K pays, measured (learnt by the monitor):",
            "",
        ]
        lines += _table(
            ("concurrency", *(f"K={k}" for k in fixed), "the monitor's choice, why, break-even"),
            [_break_even(cell, fixed) for cell in cells],
        )
    return lines


def _row(cell: CellSummary, modes: Sequence[Mode], show: Any) -> tuple[str, ...]:  # noqa: ANN401 - a lambda
    found = [cell.of(mode) for mode in modes]
    return (str(cell.cell.concurrency), *(show(cell, mode) if mode else NONE for mode in found))


def _per_user(cell: CellSummary, mode: ModeSummary) -> str:
    speed_up = cell.speed_up(mode.mode)
    text = f"{mode.per_user.median:.1f}"
    return text if speed_up is None or mode == cell.baseline else f"{text} ({speed_up:.2f}x)"


def _latency(_cell: CellSummary, mode: ModeSummary) -> str:
    return f"{1000 * mode.ttft.median:.0f} / {1000 * mode.tpot.median:.1f}"


def _length(_cell: CellSummary, mode: ModeSummary) -> str:
    length = NONE if mode.acceptance_length is None else f"{mode.acceptance_length:.2f}"
    if mode.mode != ADAPTIVE or mode.mean_draft_tokens is None:
        return length
    return f"{length} (K {mode.mean_draft_tokens:.1f})"


def _break_even(cell: CellSummary, fixed: Sequence[int]) -> tuple[str, ...]:
    known = {row.draft_tokens: row for row in cell.break_even}
    values = [
        f"{_ratio(known[k].measured)} ({_ratio(known[k].learnt)})" if k in known else NONE for k in fixed
    ]
    return (str(cell.cell.concurrency), *values, _chosen(cell))


def _chosen(cell: CellSummary) -> str:
    """The monitor's final choice for this batch size, and its break-even."""
    # Without an entry of its own, a batch size does as the nearest smaller one.
    smaller = [entry for entry in cell.learnt if entry.bucket <= bucket_of(cell.cell.concurrency)]
    if not smaller:
        return NONE
    entry = max(smaller, key=lambda entry: entry.bucket)
    return f"K={entry.draft_tokens}, {entry.reason}, {_ratio(entry.break_even)}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(heading), " | ".join("---" for _name in heading), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]


def _range(found: Spread | None) -> str:
    return NONE if found is None else f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
