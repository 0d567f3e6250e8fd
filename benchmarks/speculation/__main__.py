"""
Adaptive control against each fixed number of draft tokens, on one worker: `make bench-speculation`.

Writes every round to a file at once; run the same command again to continue.  Ctrl-C and `--minutes` end a
sitting; the report is of all sittings.  Figures depend on the machine, which is written with them.
"""

import argparse
import shlex
import sys
import time
from datetime import UTC, datetime

import uvloop

from benchmarks.speculation.bench import (
    add_options,
    appliance_of,
    conduct,
    count_of,
    head_of,
    open_bench,
    plan_of,
    say,
)
from benchmarks.speculation.paired import Round, markdown, parse_round
from benchmarks.speculation.plan import ADAPTIVE, Cell, Kind
from benchmarks.speculation.provenance import RESULTS, provenance_of
from benchmarks.speculation.records import Records
from benchmarks.speculation.verdicts import LEAST_PAIRS
from demo.process import ApplianceProcess


def main() -> None:
    options = parse(sys.argv[1:])
    command = shlex.join(["python", "-m", "benchmarks.speculation", *sys.argv[1:]])
    provenance = provenance_of(command, model=options.model.name, draft=options.draft.name)
    path = options.state or RESULTS / f"paired-{provenance.commit}.jsonl"
    records = Records(path, head_of(options), parse_round)
    failure = conduct(lambda: sit(options, records, provenance.source))
    if records.rows:
        report = path.with_suffix(".md")
        text = markdown({"command": f"`{command}`", **records.head}, records.rows)
        report.write_text(text, encoding="utf-8")
        say(f"{text}\nwrote {report}")
    if failure:
        raise SystemExit(f"benchmarks.speculation: {failure}")


def sit(options: argparse.Namespace, records: Records[Round], commit: str) -> None:
    """One start of the processes, if anything is left to measure."""
    records.load()
    if options.minutes > 0 and any(pairs_of(records, cell) < options.pairs for cell in cells_of(options)):
        with appliance_of(options) as appliance:
            uvloop.run(measure(appliance, options, records, commit))


async def measure(
    appliance: ApplianceProcess, options: argparse.Namespace, records: Records[Round], commit: str
) -> None:
    ends, sitting = time.monotonic() + 60 * options.minutes, datetime.now(UTC).isoformat(timespec="seconds")
    async with open_bench(appliance, plan_of(options), options.kinds) as bench:
        for cell in cells_of(options):
            if pairs_of(records, cell) >= options.pairs or time.monotonic() >= ends:
                continue
            say(f"{cell.name}: the monitor learns for {options.learn:g} s")
            bench.load(cell)
            await bench.segment(ADAPTIVE, options.learn)
            while (number := pairs_of(records, cell)) < options.pairs and time.monotonic() < ends:
                segments = await bench.round(cell, number)
                records.add(Round(cell=cell, commit=commit, sitting=sitting, segments=segments))
                speeds = ", ".join(f"{segment.mode} {segment.speed:.0f}" for segment in segments)
                say(f"{cell.name}: pair {number + 1} of {options.pairs}: {speeds} tokens/s")


def pairs_of(records: Records[Round], cell: Cell) -> int:
    return sum(each.cell == cell for each in records.rows)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    return [Cell(kind=kind, concurrency=count) for kind in options.kinds for count in options.concurrency]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    add = parser.add_argument
    add("--kinds", nargs="+", type=Kind, default=list(Kind), metavar="KIND", help=", ".join(Kind))
    add("--concurrency", nargs="+", type=count_of, default=[1, 2, 4, 8, 16], metavar="N")
    add("--pairs", type=count_of, default=LEAST_PAIRS, help="rounds of a cell (default %(default)d)")
    add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
