"""
Speed-up of speculation at each concurrency, and the monitor's choices: `make bench-speculation`.

Starts the appliance twice on one pair, with its draft and without, and measures in turn the target
alone, each fixed number of draft tokens (K), and the appliance's own choice, on several kinds of
traffic.  Results are files: a table (Markdown, CSV, JSON) and two plots (SVG).  Nothing is asserted:
figures depend on the machine and are written with it.  Ctrl-C ends it early; what was measured until
then is written.
"""

import shlex
import signal
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.speculation.appliances import Side
from benchmarks.speculation.charts import break_even_chart, speed_chart
from benchmarks.speculation.data import document, table
from benchmarks.speculation.load import BenchmarkError
from benchmarks.speculation.options import Options, parse
from benchmarks.speculation.plan import TARGET_ALONE, Plan
from benchmarks.speculation.provenance import Provenance, provenance_of
from benchmarks.speculation.report import markdown, verdict_lines
from benchmarks.speculation.run import Records, Runner
from benchmarks.speculation.standstill import Standstill
from benchmarks.speculation.summary import summarise
from demo.process import ApplianceProcess, StartError
from demo.training.corpus import load_corpus


def main() -> None:
    options = parse(sys.argv[1:])
    plan = options.plan
    command = shlex.join(["python", "-m", "benchmarks.speculation", *sys.argv[1:]])
    provenance = provenance_of(command, model=options.model.name, draft=options.draft.name)
    count = plan.restarts * plan.rounds * len(plan.modes) * len(plan.cells)
    minutes = plan.estimate_seconds / 60
    say(f"{count} segments in {len(plan.cells)} cells: about {minutes:.0f} minutes, after the start")
    records, failure = Records(), ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number in range(plan.restarts):
            with ExitStack() as stack:
                speculative = start(stack, options, "--draft", str(options.draft))
                alone = start(stack, options, "--no-draft") if TARGET_ALONE in plan.modes else None
                uvloop.run(measure(plan, speculative, alone, records, number))
    except KeyboardInterrupt:
        failure = "stopped early"
    except (BenchmarkError, StartError) as error:
        failure = str(error)
    if records.measured:
        write(options.out, plan, replace(provenance, engine=records.engine), records)
    if failure:
        raise SystemExit(f"benchmarks.speculation: {failure}")


Started = tuple[ApplianceProcess, Standstill]


def start(stack: ExitStack, options: Options, *arguments: str) -> Started:
    """One appliance with a data directory of its own, stopped once it is ready."""
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="appliance-bench-"))
    say(f"starting the appliance: {' '.join(arguments)}")
    environment = {
        "APPLIANCE_LOG__LEVEL": "warning",
        "APPLIANCE_WORKER__DRAFT_TOKENS": str(options.draft_tokens),
    }
    appliance = stack.enter_context(
        ApplianceProcess(
            *("up", "--model", str(options.model), *arguments), data=Path(scratch), environment=environment
        )
    )
    standstill = Standstill(appliance.process.pid)
    # It has to continue before it can be stopped in order.
    stack.callback(standstill.end)
    standstill.begin()
    return appliance, standstill


async def measure(
    plan: Plan, speculative: Started, alone: Started | None, records: Records, number: int
) -> None:
    """Carry the plan out on the appliances that were started."""
    side = await Side.connect(*speculative)
    records.engine = side.engine
    runner = Runner(
        plan,
        speculative=side,
        alone=await Side.connect(*alone) if alone else None,
        corpus=load_corpus(),
        say=say,
    )
    await runner.run(records, start=number)


def write(directory: Path, plan: Plan, provenance: Provenance, records: Records) -> None:
    """Every file of results, and the verdict."""
    cells = summarise(records.measured, records.learnt)
    name = f"speculation-{provenance.commit}"
    plots = (f"{name}.svg", f"{name}-break-even.svg")
    files = {
        f"{name}.md": markdown(plan, provenance, cells, plots=plots),
        f"{name}.csv": table(cells),
        f"{name}.json": document(plan, provenance, cells, records.measured),
        plots[0]: speed_chart(provenance, cells),
        plots[1]: break_even_chart(provenance, cells),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (directory / file).write_text(content, encoding="utf-8")
        say(f"wrote {directory / file}")
    say("\n".join(verdict_lines(cells)))


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
