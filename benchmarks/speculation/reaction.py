"""
How soon the monitor follows a change of traffic: `make bench-reaction`.

On one worker, traffic changes kind or concurrency again and again.  Each sitting first measures every fixed K
under each load; the monitor learns nothing from that.  Then each change is followed until the table has been
right, by those speeds, for ten seconds.  Writes every change to a file at once; run the same command again
to continue.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from math import inf
from statistics import mean
from typing import Any

import uvloop

from appliance.drafts.evaluation.intervals import percentile
from benchmarks.speculation.bench import (
    Bench,
    add_options,
    appliance_of,
    conduct,
    count_of,
    head_of,
    open_bench,
    plan_of,
    say,
)
from benchmarks.speculation.hindsight import (
    HOLD_SECONDS,
    Rounds,
    Speeds,
    Trace,
    lost_tokens,
    medians_of,
    reaction_seconds,
    right_of,
)
from benchmarks.speculation.plan import ADAPTIVE, Cell, Kind, fixed, parse_cell
from benchmarks.speculation.provenance import RESULTS, provenance_of
from benchmarks.speculation.records import Records, table
from demo.process import ApplianceProcess

GOOD, MEDIOCRE, USELESS = Kind.CHAT, Kind.CODE, Kind.BASE64
"""For the demo pair: its draft gains most with chat, and loses with base64."""
FEW, MANY = 1, 16
SETTLED_SECONDS = 2 * HOLD_SECONDS
"""A change is followed until the table has been right for this long, or to the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of traffic."""

    before: Cell
    after: Cell
    trace: Trace
    """Of the table at the batch size of `after`; its last entry is the end."""
    speeds: Speeds
    """Tokens per second of each fixed K under `after`, in this sitting."""
    right: Sequence[int]
    """The K that were right for `after`."""
    was_right: bool
    """Whether the table was right for `before` when traffic changed; if not, the change does not count."""
    commit: str
    sitting: str

    @property
    def seconds(self) -> float | None:
        return reaction_seconds(self.trace, self.right, self.trace[-1][0])

    @property
    def lost(self) -> float:
        """Tokens lost until the table was right."""
        until = self.trace[-1][0] if self.seconds is None else self.seconds
        return lost_tokens(self.trace, self.speeds, until)

    @property
    def stake(self) -> float:
        """How much faster the best K is than the one in force when traffic changed."""
        return max(self.speeds.values()) / self.speeds[self.trace[0][1]] - 1


def parse_change(row: Mapping[str, Any]) -> Change:
    return Change(
        before=parse_cell(row["before"]),
        after=parse_cell(row["after"]),
        trace=[(at, k) for at, k in row["trace"]],
        speeds={int(k): speed for k, speed in row["speeds"].items()},
        **{name: row[name] for name in ("right", "was_right", "commit", "sitting")},
    )


def courses(concurrency: Sequence[int]) -> list[tuple[Cell, ...]]:
    """Loads that follow each other."""
    kinds = (GOOD, USELESS, GOOD, MEDIOCRE, USELESS, MEDIOCRE)
    loads = (FEW, MANY, FEW)
    return [
        *(tuple(Cell(kind=kind, concurrency=count) for kind in kinds) for count in concurrency),
        tuple(Cell(kind=MEDIOCRE, concurrency=count) for count in loads),
    ]


def main() -> None:
    options = parse(sys.argv[1:])
    command = shlex.join(["python", "-m", "benchmarks.speculation.reaction", *sys.argv[1:]])
    provenance = provenance_of(command, model=options.model.name, draft=options.draft.name)
    path = options.state or RESULTS / f"reaction-{provenance.commit}.jsonl"
    records = Records(path, {**head_of(options), "limit": options.limit}, parse_change)
    failure = conduct(lambda: sit(options, records, provenance.source))
    if records.rows:
        report = path.with_suffix(".md")
        text = markdown({"command": f"`{command}`", **records.head}, records.rows)
        report.write_text(text, encoding="utf-8")
        say(f"{text}\nwrote {report}")
    if failure:
        raise SystemExit(f"benchmarks.speculation.reaction: {failure}")


def sit(options: argparse.Namespace, records: Records[Change], commit: str) -> None:
    """One start of the processes, if anything is left to measure."""
    records.load()
    moves = courses(options.concurrency)
    if options.minutes > 0 and any(remaining(records, course, options.repeats) for course in moves):
        with appliance_of(options) as appliance:
            uvloop.run(measure(appliance, options, records, commit))


async def measure(
    appliance: ApplianceProcess, options: argparse.Namespace, records: Records[Change], commit: str
) -> None:
    ends, sitting = time.monotonic() + 60 * options.minutes, datetime.now(UTC).isoformat(timespec="seconds")
    async with open_bench(appliance, plan_of(options), (GOOD, MEDIOCRE, USELESS)) as bench:
        for course in courses(options.concurrency):
            if time.monotonic() >= ends or not remaining(records, course, options.repeats):
                continue
            rounds = {cell: await rounds_of(bench, cell, options.rounds) for cell in dict.fromkeys(course)}
            right = {cell: right_of(found) for cell, found in rounds.items()}
            while remaining(records, course, options.repeats) and time.monotonic() < ends:
                bench.load(course[0])
                await bench.segment(ADAPTIVE, options.learn)
                for before, after in pairwise(course):
                    until = settled(right[after])
                    k_before, trace = await bench.follow(before, after, options.limit, until)
                    found = Change(
                        before=before,
                        after=after,
                        trace=trace,
                        speeds=medians_of(rounds[after]),
                        right=right[after],
                        was_right=k_before in right[before],
                        commit=commit,
                        sitting=sitting,
                    )
                    records.add(found)
                    say(f"{name_of(before, after)}: {_seconds(found.seconds)}, {found.lost:.0f} tokens lost")


def settled(right: Collection[int]) -> Callable[[Trace, float], bool]:
    """Whether a change has been followed long enough."""
    return lambda trace, now: reaction_seconds(trace, right, now, SETTLED_SECONDS) is not None


async def rounds_of(bench: Bench, cell: Cell, count: int) -> Rounds:
    """Tokens per second of each fixed K, in rounds of random order."""
    bench.load(cell)
    measured = [
        {each.mode: each.speed for each in await bench.round(cell, number)} for number in range(count)
    ]
    ks = [mode.draft_tokens for mode in bench.modes if mode.draft_tokens is not None]
    rounds = {k: [speeds[fixed(k).name] for speeds in measured] for k in ks}
    found = ", ".join(f"K={k} {speed:.0f}" for k, speed in medians_of(rounds).items())
    say(f"{cell.name}: {found} tokens/s; right: {', '.join(map(str, right_of(rounds)))}")
    return rounds


def remaining(records: Records[Change], course: Sequence[Cell], repeats: int) -> bool:
    done = [(each.before, each.after) for each in records.rows]
    return any(done.count(move) < repeats for move in pairwise(course))


def markdown(head: Mapping[str, Any], changes: Sequence[Change]) -> str:
    """The report; every figure is of the changes alone."""
    moves: dict[tuple[Cell, Cell], list[Change]] = {}
    for each in changes:
        moves.setdefault((each.before, each.after), []).append(each)
    commits = ", ".join(dict.fromkeys(each.commit for each in changes))
    lines = [
        "# Reactions to a change of traffic",
        "",
        *(f"- {name}: {value}" for name, value in head.items()),
        f"- commit {commits}; {len({each.sitting for each in changes})} starts of the processes",
        "",
        "The time from a change of traffic until the draft-token table is right at the batch size in use and",
        f"stays so for {HOLD_SECONDS:g} s.  Right is every K that is not shown (95 %) to be over 5 % slower",
        "than the best fixed one, by rounds measured under that load in the same process, from which the",
        "monitor learns nothing.  Tokens lost: what the best K would have given more until then, by the same",
        "speeds.  At stake: how much faster the best K is than the one in force at the change.  A change",
        "counts if the table was right before.",
        "",
    ]
    heading = ("change", "at stake", "counted", "p50", "p95", "tokens lost, p50", "p95")
    return "\n".join([*lines, *table(heading, [_row(*move, group) for move, group in moves.items()])]) + "\n"


def _row(before: Cell, after: Cell, group: Sequence[Change]) -> tuple[str, ...]:
    counted = [each for each in group if each.was_right]
    times = [inf if each.seconds is None else each.seconds for each in counted]
    lost = [each.lost for each in counted]
    limit = max(each.trace[-1][0] for each in group)
    shares = (0.5, 0.95)
    return (
        name_of(before, after),
        f"{mean(each.stake for each in counted):.0%}" if counted else "-",
        f"{len(counted)} of {len(group)}",
        *(_seconds(percentile(times, share), limit) if counted else "-" for share in shares),
        *(f"{percentile(lost, share):.0f}" if counted else "-" for share in shares),
    )


def name_of(before: Cell, after: Cell) -> str:
    if before.kind is after.kind:
        return f"{after.kind.label}, concurrency {before.concurrency} to {after.concurrency}"
    return f"{before.kind.label} to {after.kind.label}, concurrency {after.concurrency}"


def _seconds(seconds: float | None, limit: float | None = None) -> str:
    if seconds is None or seconds == inf:
        return "not in time" if limit is None else f"over {limit:.0f} s"
    return f"{seconds:.1f} s"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation.reaction")
    add = parser.add_argument
    add("--repeats", type=count_of, default=20, help="of each change (default %(default)d)")
    add("--concurrency", nargs="+", type=count_of, default=[2, 8], metavar="N", help="where the kind changes")
    add(
        "--limit", type=float, default=60.0, help="seconds a change is followed at most (default %(default)g)"
    )
    add("--rounds", type=count_of, default=16, help="that measure each fixed K first (default %(default)d)")
    add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
