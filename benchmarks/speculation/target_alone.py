"""
The appliance with its draft over one without: `python -m benchmarks.speculation.target_alone`.

Unlike the paired benchmark, this compares *different processes*, whose speeds differ by up to 30 % on shared
machines for as long as they live.  So each start counts once, starts with and without the draft alternate,
and no verdict is given.  Prints what it finds.
"""

import argparse
import asyncio
import shlex
import sys
import time
from statistics import median

import uvloop

from benchmarks.speculation.appliances import Side
from benchmarks.speculation.bench import add_load_options, appliance_of, conduct, count_of, say
from benchmarks.speculation.load import Stream
from benchmarks.speculation.plan import Cell, Kind
from benchmarks.speculation.provenance import provenance_of
from benchmarks.speculation.records import table
from benchmarks.speculation.traffic import traffic_of
from demo.process import ApplianceProcess
from demo.training.corpus import load_corpus

MEASURED_SECONDS = 20.0

Ratios = dict[Cell, list[float]]
"""Of each pair of starts."""


def main() -> None:
    options = parse(sys.argv[1:])
    command = shlex.join(["python", "-m", "benchmarks.speculation.target_alone", *sys.argv[1:]])
    provenance = provenance_of(command, model=options.model.name, draft=options.draft.name)
    ratios: Ratios = {}
    failure = conduct(lambda: compare_starts(options, ratios))
    say("\n".join([provenance.line, "", *lines_of(ratios)]))
    if failure:
        raise SystemExit(f"benchmarks.speculation.target_alone: {failure}")


def compare_starts(options: argparse.Namespace, ratios: Ratios) -> None:
    cells = [Cell(kind=kind, concurrency=count) for kind in options.kinds for count in options.concurrency]
    for number in range(options.starts):
        speeds: dict[bool, dict[Cell, float]] = {}
        for draft in (True, False) if number % 2 else (False, True):
            with appliance_of(options, draft=draft, control="auto") as appliance:
                speeds[draft] = uvloop.run(speeds_of(appliance, options, cells))
        for cell in cells:
            with_draft, alone = speeds[True][cell], speeds[False][cell]
            ratios.setdefault(cell, []).append(with_draft / alone)
            say(f"start {number + 1}, {cell.name}: {with_draft:.0f} with its draft, {alone:.0f} without")


async def speeds_of(
    appliance: ApplianceProcess, options: argparse.Namespace, cells: list[Cell]
) -> dict[Cell, float]:
    side, corpus = await Side.connect(appliance), load_corpus()
    traffic = {kind: traffic_of(kind, corpus) for kind in options.kinds}
    stream = Stream(side.target, traffic[cells[0].kind], concurrency=1, answer_tokens=options.answer_tokens)
    speeds = {}
    async with stream.running():
        for cell in cells:
            stream.change(traffic=traffic[cell.kind], concurrency=cell.concurrency)
            await asyncio.sleep(options.learn)
            stream.mark()
            began = time.perf_counter()
            await asyncio.sleep(MEASURED_SECONDS)
            speeds[cell] = stream.tokens(began, began + MEASURED_SECONDS) / MEASURED_SECONDS
    return speeds


def lines_of(ratios: Ratios) -> list[str]:
    heading = ("traffic", "concurrency", "starts", "with its draft / without: median", "least", "most")
    rows = [
        (
            *(cell.kind.label, str(cell.concurrency), str(len(found))),
            *(f"{value:.2f}" for value in (median(found), min(found), max(found))),
        )
        for cell, found in ratios.items()
    ]
    return table(heading, rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation.target_alone")
    add, kinds = parser.add_argument, [Kind.CODE, Kind.BASE64]
    add("--starts", type=count_of, default=5, help="with and without the draft (default %(default)d)")
    add("--kinds", nargs="+", type=Kind, default=kinds, metavar="KIND", help="any but long and turns")
    add("--concurrency", nargs="+", type=count_of, default=[1, 4], metavar="N")
    add_load_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
