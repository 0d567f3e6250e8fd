"""
Rounds in which every mode was measured once, and the report of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from appliance.drafts.evaluation.intervals import TAIL
from benchmarks.speculation.bench import SETTLE_SECONDS, SETTLE_STEPS, Segment
from benchmarks.speculation.plan import ADAPTIVE, Cell, Kind, fixed, parse_cell
from benchmarks.speculation.records import table
from benchmarks.speculation.verdicts import GOAL, Comparison, Verdict, compare

NO_DRAFTS = fixed(0).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Every mode of a cell, measured once."""

    cell: Cell
    commit: str
    sitting: str
    """Differs between starts of the processes."""
    segments: tuple[Segment, ...]

    @property
    def speeds(self) -> dict[str, float]:
        return {segment.mode: segment.speed for segment in self.segments}

    @property
    def speeds_by_choice(self) -> dict[str, float]:
        """
        As `speeds`; adaptive's are those of the fixed modes, by the time it decoded with each K.

        What two segments with the same K differ by is noise, which is not in it, and the time of switches.
        """
        speeds = self.speeds
        spent = next(each.decode_seconds for each in self.segments if each.mode == ADAPTIVE.name)
        if total := sum(spent.values()):
            speeds[ADAPTIVE.name] = sum(part / total * speeds[name] for name, part in spent.items())
        return speeds


def parse_round(row: Mapping[str, Any]) -> Round:
    return Round(
        cell=parse_cell(row["cell"]),
        commit=row["commit"],
        sitting=row["sitting"],
        segments=tuple(Segment(**segment) for segment in row["segments"]),
    )


def settle_cost(rounds: Iterable[Round], *, replayed: bool) -> float | None:
    """
    Mean seconds of work lost in the settling time after a switch to drafting; None without one.

    Args:
        rounds: of one cell.
        replayed: after K=0, so that the deferred prefill was replayed; otherwise after another K.
    """
    lost = [
        segment.settle_seconds - segment.settle_tokens / segment.speed
        for each in rounds
        for segment in each.segments
        if segment.mode not in (ADAPTIVE.name, NO_DRAFTS) and segment.speed
        if segment.after != ADAPTIVE.name and (segment.after == NO_DRAFTS) is replayed
    ]
    return mean(lost) if lost else None


def markdown(head: Mapping[str, Any], rounds: Sequence[Round]) -> str:
    """The report; every figure is of the rounds alone."""
    cells = {each.cell: [other for other in rounds if other.cell == each.cell] for each in rounds}
    measured = {cell: compare([each.speeds for each in group]) for cell, group in cells.items()}
    chosen = {
        cell: compare([each.speeds_by_choice for each in group])
        for cell, group in cells.items()
        if cell.kind is not Kind.TURNS
    }
    commits = ", ".join(dict.fromkeys(each.commit for each in rounds))
    lines = [
        "# Adaptive control against each fixed number of draft tokens",
        "",
        *(f"- {name}: {value}" for name, value in head.items()),
        f"- commit {commits}; {len({each.sitting for each in rounds})} starts of the processes",
        "",
        "One worker process behind the gateway, under the same load throughout.  A round measures adaptive",
        "and each fixed K once, in random order, with the same prompts; requests that run when a segment",
        "begins go on in it.  The monitor is given counters and time of its own",
        f"segments only.  The first {SETTLE_SECONDS} s after each switch, and at least {SETTLE_STEPS} steps,",
        "are reported apart.  The ratio is adaptive's median over that of the best fixed K, K=0 included,",
        f"with its {1 - 2 * TAIL:.0%} interval from a bootstrap over rounds: it says nothing about other",
        f"processes.  Shown: the interval lies at {GOAL} or above; shown otherwise: below.",
        "",
        "By choice: the same for the speeds that the fixed K of each round had, by the time that adaptive",
        "decoded with each K.  It has less noise, because two segments with the same K count as equal.  It",
        "leaves out the time of adaptive's own switches (last table), what its draft took to catch up (last",
        "column, of all its time), and traffic by turns, where the choice follows the text.",
        "",
        f"Adaptive at {GOAL} of the best fixed K or more:",
        "",
        *(f"- {way}: {_counted(found)}" for way, found in (("measured", measured), ("by choice", chosen))),
        "",
        *table(
            (
                *("traffic", "concurrency", "pairs", "best", "adaptive / best", "verdict"),
                *("by choice", "verdict", "adaptive's mean K", "catching up"),
            ),
            [
                (
                    *(*_name(cell), str(len(group)), measured[cell].best, *_compared(measured[cell])),
                    *(_compared(chosen[cell]) if cell in chosen else ("-", "-")),
                    _mean_k(group),
                    _catch_up(group),
                )
                for cell, group in cells.items()
            ],
        ),
        "",
        "Tokens per second, medians over rounds:",
        "",
    ]
    *fixed_names, _adaptive = names = sorted(rounds[0].speeds, key=lambda name: (len(name), name))
    lines += table(
        ("traffic", "concurrency", *names),
        [
            (*_name(cell), *(f"{median(each.speeds[name] for each in group):.0f}" for name in names))
            for cell, group in cells.items()
        ],
    )
    lines += ["", "Acceptance length with the largest K, and milliseconds lost by a switch to drafting:", ""]
    lines += table(
        ("traffic", "concurrency", "acceptance length", "after another K", "after K=0, prefill replayed"),
        [
            (
                *_name(cell),
                _length(group, fixed_names[-1]),
                *(_ms(settle_cost(group, replayed=replayed)) for replayed in (False, True)),
            )
            for cell, group in cells.items()
        ],
    )
    return "\n".join(lines) + "\n"


def _name(cell: Cell) -> tuple[str, str]:
    return cell.kind.label, str(cell.concurrency)


def _compared(found: Comparison) -> tuple[str, ...]:
    return f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})", str(found.verdict)


def _counted(found: Mapping[Cell, Comparison]) -> str:
    verdicts = [comparison.verdict for comparison in found.values()]
    return ", ".join(
        f"{verdict} in {verdicts.count(verdict)} of {len(verdicts)} cells" for verdict in Verdict
    )


def _mean_k(group: Sequence[Round]) -> str:
    return f"{mean(s.draft_tokens for each in group for s in each.segments if s.mode == ADAPTIVE.name):.2f}"


def _catch_up(group: Sequence[Round]) -> str:
    own = [segment for each in group for segment in each.segments if segment.mode == ADAPTIVE.name]
    share = sum(segment.catch_up_seconds for segment in own) / sum(segment.seconds for segment in own)
    return f"{share:.1%}"


def _length(group: Sequence[Round], name: str) -> str:
    segments = [segment for each in group for segment in each.segments if segment.mode == name]
    drafts = sum(segment.drafts for segment in segments)
    return f"{1 + sum(segment.accepted_tokens for segment in segments) / drafts:.2f}" if drafts else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f}"
