"""
How often speculation changes its mind where it hardly matters: `python -m benchmarks.borderline`.

Mixes code and base64 until drafting and not drafting are equally fast on this machine, which
is where a monitor without hysteresis would swing to and fro.  Then leaves the choice to the monitor
for ten minutes and counts how often it changes the mode.  Prints what it finds; writes nothing.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.speculation.appliances import Side
from benchmarks.speculation.load import Stream
from benchmarks.speculation.plan import ADAPTIVE, Kind, fixed
from benchmarks.speculation.provenance import provenance_of
from benchmarks.speculation.traffic import Prompt, Traffic, prompts_of
from demo.process import ApplianceProcess
from demo.training.corpus import load_corpus

OFF, LONGEST = fixed(0), fixed(3)
TOKENS = 96
WARM_UP_SECONDS = 2.0
MIXTURE = 400
"""Prompts before a mixture begins again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line said."""

    minutes: float
    concurrency: int
    seconds: float
    halvings: int


def main() -> None:
    options = parse()
    provenance = provenance_of(
        "python -m benchmarks.borderline", model="demo-coder", draft="demo-coder-eagle31"
    )
    print(f"{provenance.hardware}; commit {provenance.source}; {provenance.date}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        ApplianceProcess(
            "up", data=Path(scratch), environment={"APPLIANCE_LOG__LEVEL": "warning"}
        ) as appliance,
    ):
        uvloop.run(measure(appliance, options))


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.strip().partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the monitor decides")
    parser.add_argument("--concurrency", type=int, default=2, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=8.0, help="each measurement of a mixture")
    parser.add_argument("--halvings", type=int, default=5, help="steps of the search for the mixture")
    return Options(**vars(parser.parse_args()))


async def measure(appliance: ApplianceProcess, options: Options) -> None:
    """Search the mixture, let the monitor decide on it, and count."""
    side = await Side.connect(appliance)
    stream = Stream(side.target, mixture(0.5), concurrency=options.concurrency, answer_tokens=TOKENS)
    async with stream.running():
        await search(side, stream, options)


async def search(side: Side, stream: Stream, options: Options) -> None:
    async def speed(share: float, seconds: float) -> float:
        stream.change(traffic=mixture(share))
        await asyncio.sleep(WARM_UP_SECONDS)
        stream.mark()
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        return stream.tokens(began, began + seconds) / seconds

    low, high = 0.0, 1.0
    for _ in range(options.halvings):
        share = (low + high) / 2
        ratios = []
        for modes in ((OFF, LONGEST), (LONGEST, OFF)):
            speeds = {}
            for mode in modes:
                await side.choose(mode)
                speeds[mode.name] = await speed(share, options.seconds)
            ratios.append(speeds[LONGEST.name] / speeds[OFF.name])
        ratio = sum(ratios) / len(ratios)
        print(f"{share:6.1%} code   drafting is {ratio:.3f} as fast as not drafting", flush=True)
        low, high = (low, share) if ratio > 1 else (share, high)
    share = (low + high) / 2
    print(f"{share:6.1%} code   the monitor decides for {options.minutes:g} minutes", flush=True)
    await side.choose(ADAPTIVE)
    await speed(share, 30.0)
    before = await side.changes()
    started = time.monotonic()
    mean = await speed(share, 60 * options.minutes)
    changes = [change for change in await side.changes() if change not in before]
    states = [drafts_at(change["table"], options.concurrency) for change in changes]
    stays = drafts_at(before[-1]["table"], options.concurrency) if before else True
    flips = sum(state != previous for previous, state in zip([stays, *states], states, strict=False))
    for change in changes:
        table = ", ".join(change["table"])
        print(f"   {change['time']}  {change['mode']:<12} {change['reason']:<17} {table}", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(
        f"{flips} changes between drafting and not drafting in {minutes:.1f} minutes, "
        f"{mean:.0f} tokens/s at concurrency {options.concurrency}"
    )


def drafts_at(table: list[str], batch: int) -> bool:
    """Whether a table, such as `["1-8: 1", "9-64: 0"]`, has a batch of this size draft."""
    for entry in table:
        sizes, _, tokens = entry.partition(": ")
        first, _, last = sizes.partition("-")
        if int(first) <= batch <= int(last or first):
            return int(tokens) > 0
    return False


def mixture(share: float) -> Traffic:
    """Code and base64 in a fixed shuffled order, so much of it code."""
    corpus = load_corpus()
    code, noise = prompts_of(Kind.CODE, corpus), prompts_of(Kind.BASE64, corpus)
    number = round(MIXTURE * share)
    kinds: list[tuple[Prompt, ...]] = [code] * number + [noise] * (MIXTURE - number)
    random.Random(11).shuffle(kinds)
    return Traffic(prompts=tuple(kind[place % len(kind)] for place, kind in enumerate(kinds)))


if __name__ == "__main__":
    main()
