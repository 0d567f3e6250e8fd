"""
Results as CSV, a line for each mode of each cell, and as JSON, down to the single segment.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.speculation.plan import ADAPTIVE, Plan
from benchmarks.speculation.provenance import Provenance
from benchmarks.speculation.summary import CellSummary, Measured

COLUMNS = (
    *("traffic", "temperature", "concurrency", "mode", "rounds"),
    *("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"),
    *("tokens_per_second_per_user", "speed_up_per_user", "ttft_ms", "tpot_ms"),
    *("acceptance_length", "mean_draft_tokens", "break_even_measured", "break_even_learnt"),
    *("adaptive_over_best_fixed", "adaptive_over_best_of_all", "adaptive_by_steps"),
)
SEGMENT = (
    *("seconds", "tokens", "requests", "ttft", "tpot"),
    *("drafts", "draft_tokens", "accepted_tokens"),
)


def table(cells: Iterable[CellSummary]) -> str:
    """One line for each mode of each cell, as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        known = {row.draft_tokens: row for row in cell.break_even}
        for mode in cell.modes:
            even = known.get(mode.mode.draft_tokens or 0)
            adaptive = mode.mode == ADAPTIVE
            row: dict[str, Any] = {
                "traffic": cell.cell.kind,
                "temperature": cell.cell.temperature,
                "concurrency": cell.cell.concurrency,
                "mode": mode.mode.name,
                "rounds": mode.rounds,
                "tokens_per_second": mode.total.median,
                "tokens_per_second_low": mode.total.low,
                "tokens_per_second_high": mode.total.high,
                "tokens_per_second_per_user": mode.per_user.median,
                "speed_up_per_user": cell.speed_up(mode.mode),
                "ttft_ms": 1000 * mode.ttft.median,
                "tpot_ms": 1000 * mode.tpot.median,
                "acceptance_length": mode.acceptance_length,
                "mean_draft_tokens": mode.mean_draft_tokens,
                "break_even_measured": even.measured if even else None,
                "break_even_learnt": even.learnt if even else None,
                "adaptive_over_best_fixed": cell.against_fixed.median
                if adaptive and cell.against_fixed
                else None,
                "adaptive_over_best_of_all": cell.against_all.median
                if adaptive and cell.against_all
                else None,
                "adaptive_by_steps": cell.by_steps if adaptive else None,
            }
            writer.writerow(_rounded(row))
    return text.getvalue()


def document(
    plan: Plan, provenance: Provenance, cells: Sequence[CellSummary], measured: Iterable[Measured]
) -> str:
    """Everything, down to the single segment, as JSON."""
    content = {
        "provenance": asdict(provenance),
        "plan": asdict(plan),
    }
    members = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    lists = {"cells": map(asdict, cells), "segments": map(_segment, measured)}
    for name, items in lists.items():
        lines = ",\n".join(json.dumps(_rounded(item)) for item in items)
        members.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(members) + "\n}\n"


def _segment(segment: Measured) -> dict[str, Any]:
    figures = segment.figures
    return {
        **asdict(segment.cell),
        "mode": segment.mode.name,
        "round": segment.number,
        **{name: getattr(figures, name) for name in SEGMENT},
        "steps": [
            {
                "bucket": bucket,
                "draft_tokens": k,
                "steps": counters.steps,
                "seconds": counters.seconds,
                "tokens": counters.tokens,
            }
            for (bucket, k), counters in sorted(figures.steps.items())
        ],
    }


def _rounded(value: Any) -> Any:  # noqa: ANN401 - anything JSON can hold
    """Figures to a precision that they have."""
    match value:
        case float():
            return round(value, 5)
        case dict():
            return {str(name): _rounded(item) for name, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
        case _:
            return value
