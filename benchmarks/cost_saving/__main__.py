"""
Whether the cost report's savings are right: `python -m benchmarks.cost_saving`.

Starts the appliance on the demo pair, sends code without drafts and with them in turn, and compares what
`appliance cost report` says was saved with what the worker's counters say.  Writes a table; ends with 1 where
the two do not agree.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from benchmarks.cost_saving.run import ENVIRONMENT, Driver, Found, Plan
from benchmarks.cost_saving.table import Load, markdown, verdict
from benchmarks.speculation.load import BenchmarkError
from benchmarks.speculation.provenance import provenance_of
from demo.process import ApplianceProcess, StartError

RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    plan, out = parse(sys.argv[1:])
    provenance = provenance_of(
        shlex.join(["python", "-m", "benchmarks.cost_saving", *sys.argv[1:]]),
        model=DEMO_TARGET.name,
        draft=DEMO_DRAFT.name,
    )
    before = os.getloadavg()[0]
    found, failure = Found(), ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say(f"about {plan.estimate_seconds / 60:.0f} minutes, after the start")
    try:
        with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch:
            arguments = ("--model", str(DEMO_TARGET), "--draft", str(DEMO_DRAFT))
            with ApplianceProcess("up", *arguments, data=Path(scratch), environment=ENVIRONMENT) as appliance:
                asyncio.run(measure(appliance, plan, found))
    except KeyboardInterrupt:
        failure = "stopped early"
    except (BenchmarkError, StartError) as error:
        failure = str(error)
    if found.comparisons:
        load = Load(before=before, after=os.getloadavg()[0])
        text = markdown(plan, replace(provenance, engine=found.engine), load, found.comparisons)
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"cost-saving-{provenance.commit}.md"
        path.write_text(text, encoding="utf-8")
        say(f"{text}\nwrote {path}")
    if failure or not all(each.agrees for each in found.comparisons):
        raise SystemExit(f"benchmarks.cost_saving: {failure or verdict(found.comparisons)[0]}")


async def measure(appliance: ApplianceProcess, plan: Plan, found: Found) -> None:
    """Add what is found."""
    driver = await Driver.connect(appliance, plan, say)
    await driver.run(found)


def parse(arguments: list[str]) -> tuple[Plan, Path]:
    usual = Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_saving")
    add = parser.add_argument
    add("--concurrency", nargs="+", type=_count, default=usual.concurrency, metavar="N")
    add("--rounds", type=_count, default=usual.rounds, help=f"of each concurrency (default {usual.rounds})")
    add("--seconds", type=float, default=usual.seconds, help=f"of a segment (default {usual.seconds:g})")
    add("--learn", type=float, default=usual.learn, help=f"of the monitor, first (default {usual.learn:g})")
    add("--max-tokens", type=_count, default=usual.max_tokens, help="length of each answer")
    add("--out", type=Path, default=RESULTS, help="where the table is written")
    said = parser.parse_args(arguments)
    if said.rounds < 2:
        parser.error("--rounds must be 2 or more: uncertainty is told by how rounds differ")
    if min(said.seconds, said.learn) <= 0:
        parser.error("--seconds and --learn must be more than 0")
    plan = Plan(
        concurrency=tuple(dict.fromkeys(said.concurrency)),
        rounds=said.rounds,
        seconds=said.seconds,
        learn=said.learn,
        max_tokens=said.max_tokens,
    )
    return plan, said.out


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        message = f"{text} is not 1 or more"
        raise argparse.ArgumentTypeError(message)
    return count


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
