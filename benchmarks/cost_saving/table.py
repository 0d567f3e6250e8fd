"""
Both figures side by side, as Markdown.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.cost_saving.estimate import Comparison, Interval, Saved
from benchmarks.cost_saving.run import PRICE_PER_HOUR, Plan
from benchmarks.speculation.provenance import Provenance

LINE = 110
METHOD = """
One appliance on one worker; code, temperature 0, answers of {plan.max_tokens} tokens, audit log on.
{plan.rounds} rounds: a segment of {plan.seconds:g} s without drafts, by an operator's override, and one in
which the monitor decides, in changing order.  The monitor had {plan.learn:g} s with each concurrency first,
up to {plan.learn_times} times where what it learnt was vague.

Measured: tokens of the steps with drafts, at what a token cost without drafts in the same round and at the
same batch size, less what these steps took; by the worker's own counters.  Bounds (95 %) are those of the
rounds' step times, by Student's t.

Report: what `appliance cost report` said after each drafted segment, less what it said before.  It goes by
the monitor's probes and knows nothing of the segments without drafts.  Its bounds (95 %) are as if all
probes erred the same way.  Both speak of the same steps: their tokens were compared.

A worker costs {price:g} EUR an hour here.  Report and measurement agree where their bounds overlap.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Processes that ran or wanted to, averaged over a minute, by the kernel (`/proc/loadavg`)."""

    before: float
    """Before the appliance was started."""
    after: float


def markdown(plan: Plan, provenance: Provenance, load: Load, found: Sequence[Comparison]) -> str:
    """The whole file."""
    lines = [
        f"# What drafting saved: the cost report and a measurement, at commit {provenance.commit}",
        "",
        f"`{provenance.command}`",
        "",
        f"- {provenance.hardware}",
        f"- {provenance.engine}, {provenance.model} with {provenance.draft}",
        f"- commit {provenance.source}, {provenance.date}",
        f"- load of the machine (1 minute): {load.before:.1f} before, {load.after:.1f} at the end",
        "",
        *_method(plan),
        "",
        "## Verdict",
        "",
        *verdict(found),
        "",
        "## Engine time of a token",
        "",
        *_table(
            (
                "concurrency",
                "rounds",
                "without drafts, ms",
                "with drafts, ms",
                "drafted, s",
                "drafted, tokens",
            ),
            [_times(each) for each in found],
        ),
        "",
        "## Saved over the drafted segments",
        "",
        *_table(
            ("concurrency", "what", "`appliance cost report`", "measured", "report / measured", "agree"),
            [row for each in found for row in _saved(str(each.concurrency), each.told, each.measured)]
            + (_saved("all", *_both(found)) if len(found) > 1 else []),
        ),
    ]
    return "\n".join(lines) + "\n"


def verdict(found: Sequence[Comparison]) -> list[str]:
    """Whether the report can be relied on, in words."""
    apart = [str(each.concurrency) for each in found if not each.agrees]
    if not apart:
        return ["The report agrees with the measurement, within what both say of their uncertainty."]
    return [f"The report does not agree with the measurement at concurrency {' and '.join(apart)}."]


def _method(plan: Plan) -> list[str]:
    text = METHOD.format(plan=plan, price=PRICE_PER_HOUR)
    return "\n\n".join(textwrap.fill(part, LINE) for part in text.strip().split("\n\n")).split("\n")


def _times(of: Comparison) -> tuple[str, ...]:
    return (
        str(of.concurrency),
        str(of.rounds),
        f"{1000 * of.without_per_token:.3f}",
        f"{1000 * of.drafted_per_token:.3f}",
        f"{of.measured.spent:.1f}",
        f"{of.measured.tokens}",
    )


def _saved(concurrency: str, told: Saved, measured: Saved) -> list[tuple[str, ...]]:
    figures: list[tuple[str, Callable[[Saved], Interval], int]] = [
        ("engine seconds", lambda saved: saved.seconds, 2),
        ("tokens", lambda saved: saved.tokens_saved, 0),
        ("EUR", lambda saved: saved.money, 5),
    ]
    return [
        (
            *(concurrency, name, _bounds(of(told), digits), _bounds(of(measured), digits)),
            f"{of(told).mean / of(measured).mean:.2f}" if of(measured).mean else "-",
            "yes" if of(told).agrees(of(measured)) else "no",
        )
        for name, of, digits in figures
    ]


def _both(found: Sequence[Comparison]) -> tuple[Saved, Saved]:
    told, measured = Saved(), Saved()
    for each in found:
        told, measured = told.plus(each.told), measured.plus(each.measured)
    return told, measured


def _bounds(of: Interval, digits: int) -> str:
    return f"{of.mean:,.{digits}f} ({of.low:,.{digits}f} to {of.high:,.{digits}f})"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [" | ".join(heading), " | ".join("---" for _name in heading), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]
