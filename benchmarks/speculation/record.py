"""
Records a worker for the simulator: `python -m benchmarks.speculation.record`, about ten minutes.

For each kind of traffic, how many tokens of every draft were accepted; and the seconds of a step with each K
at each batch size.  `tests/scenarios.py` replays the file.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import median

import aiohttp
import uvloop

from appliance.infra.settings import load_settings
from benchmarks.speculation.appliances import Side
from benchmarks.speculation.bench import add_load_options, appliance_of, count_of, open_bench, say
from benchmarks.speculation.conductor import Conductor
from benchmarks.speculation.load import ask, length_of, long_prompts
from benchmarks.speculation.plan import Cell, Kind, Plan, fixed, order_of
from benchmarks.speculation.provenance import provenance_of
from benchmarks.speculation.traffic import traffic_of
from demo.process import ApplianceProcess
from demo.training.corpus import load_corpus

KINDS = tuple(kind for kind in Kind if kind is not Kind.TURNS)
FEWEST_STEPS = 8
"""Of a segment, for its mean to count."""


def main() -> None:
    options = parse(sys.argv[1:])
    command = shlex.join(["python", "-m", "benchmarks.speculation.record", *sys.argv[1:]])
    source = provenance_of(command, model=options.model.name, draft=options.draft.name)
    with appliance_of(options) as appliance:
        engine = uvloop.run(Side.connect(appliance)).engine
        steps = uvloop.run(step_seconds(appliance, options))
        accepted = uvloop.run(accepted_tokens(appliance, options))
    found = {"source": replace(source, engine=engine).line, "accepted": accepted, "steps": steps}
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {options.out}")


async def accepted_tokens(appliance: ApplianceProcess, options: argparse.Namespace) -> dict[str, list[str]]:
    """Of every draft of the largest K, by kind of traffic and answer; one answer at a time."""
    side, corpus = await Side.connect(appliance), load_corpus()
    long = await long_prompts(side.target, side.max_model_len - 2 * options.answer_tokens, corpus)
    found: dict[str, list[str]] = {}
    async with side.plugin() as client, aiohttp.ClientSession() as session:
        conductor = await Conductor.start(client, side.worker, load_settings(environment={}).monitor)
        most = max(conductor.choices)
        await conductor.switch(fixed(most))
        for kind in KINDS:
            traffic, answers = traffic_of(kind, corpus, long=long), list[str]()
            for number in range(options.answers):
                frames: list[int] = []
                body = traffic.at(number, 0.0).body(
                    model=side.target.model,
                    max_tokens=length_of(number, options.answer_tokens),
                    temperature=0.0,
                    salt=f"{kind} {number}",
                )
                await ask(session, side.target, body, frames.append)
                answers.append(accepted_of(frames, most))
            drafts = "".join(answers)
            length = 1 + sum(map(int, drafts)) / len(drafts)
            say(f"{kind}: {len(drafts)} drafts, acceptance length {length:.2f}")
            found[kind] = answers
    return found


def accepted_of(frames: Sequence[int], most: int) -> str:
    """
    Accepted tokens of each draft of an answer, a digit each, by the tokens of its frames.

    The first frame is of the prompt, and the last draft may have been cut off by the answer's length.  Of two
    steps that arrived as one frame nothing is known.
    """
    return "".join([str(tokens - 1) for tokens in frames[1:-1] if tokens <= most + 1])


async def step_seconds(appliance: ApplianceProcess, options: argparse.Namespace) -> list[dict[str, float]]:
    """By batch bucket and K: medians of the rounds, and the deviation of single steps from their mean."""
    means = defaultdict[tuple[int, int], list[float]](list)
    deviations = defaultdict[tuple[int, int], list[float]](list)
    plan = Plan(answer_tokens=options.answer_tokens, draft_tokens=options.draft_tokens)
    async with open_bench(appliance, plan, (Kind.CODE,)) as bench:
        for concurrency in options.concurrency:
            cell = Cell(kind=Kind.CODE, concurrency=concurrency)
            bench.load(cell)
            for number in range(options.rounds):
                for mode in order_of(bench.modes[1:], cell, number):
                    await bench.segment(mode, options.seconds)
                    for (bucket, k), taken in bench.steps.items():
                        if k == mode.draft_tokens and taken.steps >= FEWEST_STEPS:
                            mean = taken.seconds_per_step
                            square = max(0.0, taken.seconds_squared / taken.steps - mean**2)
                            means[bucket, k].append(mean)
                            deviations[bucket, k].append(sqrt(square) / mean)
            say(f"steps at {concurrency} requests measured")
    return [
        {
            "batch": bucket,
            "draft_tokens": k,
            "seconds": median(found),
            "deviation": median(deviations[bucket, k]),
        }
        for (bucket, k), found in sorted(means.items())
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation.record")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the file, replaced")
    add("--answers", type=count_of, default=48, help="of each kind of traffic (default %(default)d)")
    add("--concurrency", nargs="+", type=count_of, default=[1, 2, 4, 8, 16], metavar="N")
    add("--rounds", type=count_of, default=6, help="that measure each fixed K (default %(default)d)")
    add("--seconds", type=float, default=Plan().seconds, help="of a segment (default %(default)g)")
    add_load_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
