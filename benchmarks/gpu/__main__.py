"""
Benchmark the appliance on one NVIDIA GPU: `sh benchmarks/gpu/run.sh WHEELS`, or `python -m benchmarks.gpu`.

Runs step after step, each in a process of its own that takes at most eight minutes.  Ctrl-C ends it at any
moment: the same command continues, and begins again what was cut off.  The report is written after each call.
"""

import argparse
import importlib.metadata
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.gpu.appliances import drill, paired
from benchmarks.gpu.report import plots, report
from benchmarks.gpu.sizes import FULL, TINY, Sizes
from benchmarks.gpu.steps import Found, Slice, State, Step, next_step
from benchmarks.gpu.training import train_the_draft, train_the_target
from benchmarks.gpu.workers import costs, plugin
from benchmarks.speculation.provenance import provenance_of

LIMIT_SECONDS = 480.0
SLICE_SECONDS = 360.0
"""After this, a step that can resume writes what it has and ends."""
END_SECONDS = 60.0
TAIL = 20
"""Lines of a failed step's output that the report shows."""


def steps_of(sizes: Sizes) -> tuple[Step, ...]:
    pair = () if sizes.serves_demo else ("draft",)
    return (
        Step(name="check", run=partial(check, sizes)),
        *(
            Step(name=f"plugin-v{runner}", run=partial(plugin, sizes, runner=runner), needs=("check",))
            for runner in (1, 2)
        ),
        Step(name="target", run=partial(train_the_target, sizes), needs=("check",)),
        Step(name="draft", run=partial(train_the_draft, sizes), needs=("target",)),
        Step(name="paired", run=partial(paired, sizes), needs=("check", *pair)),
        Step(name="drill", run=partial(drill, sizes), needs=("check", *pair)),
        *(
            Step(
                name=f"costs-{shape.name}-{depth}",
                run=partial(costs, sizes, shape=shape, depth=depth),
                needs=("check",),
            )
            for shape in sizes.shapes
            for depth in shape.depths
        ),
    )


def check(sizes: Sizes, _part: Slice) -> Found:
    """Versions; fails without the GPU that is wanted, or without a part of the software."""
    import torch  # noqa: PLC0415 - the process that starts the steps must not open the GPU
    import vllm  # noqa: PLC0415

    if sizes.device == "gpu" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU; `--tiny` tries the steps on the CPU")
    importlib.metadata.version("sovereign-appliance")
    gpu = torch.cuda.get_device_properties(0) if sizes.device == "gpu" else None
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu and gpu.name,
        "gpu_gib": gpu and round(gpu.total_memory / 2**30, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, help="directory for models, results and logs of the steps")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"), help="of the report")
    parser.add_argument("--tiny", action="store_true", help="try all steps on the CPU, in minutes")
    parser.add_argument("--minutes", type=float, help="start no step that might end later than this")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    state = State((options.state or Path(".bench", "gpu-tiny" if options.tiny else "gpu")).absolute())
    steps = steps_of(sizes)
    if options.step:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        perform(next(step for step in steps if step.name == options.step), state)
        return
    ends = time.monotonic() + options.minutes * 60 if options.minutes else None
    try:
        run_all(steps, state, ends)
    except KeyboardInterrupt:
        say("stopped early; the same command continues")
    results, failures = state.results(steps), state.failures(steps)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(report(steps, results, failures), encoding="utf-8")
    for name, plot in plots(results).items():
        (options.out / name).write_text(plot, encoding="utf-8")
    say(f"wrote {options.out / 'report.md'}: {len(results)} of {len(steps)} steps are done")
    raise SystemExit(len(results) < len(steps))


def run_all(steps: tuple[Step, ...], state: State, ends: float | None) -> None:
    """Run steps in processes of their own until none is left, or the time is used up."""
    failed: set[str] = set()
    while (step := next_step(steps, state.results(steps), failed)) is not None:
        if ends is not None and time.monotonic() + LIMIT_SECONDS > ends:
            say(f"no time is left for {step.name}; the same command continues")
            return
        began = time.monotonic()
        say(f"{step.name} ...")
        if reason := failure_of(step, state):
            failed.add(step.name)
            state.fail(step.name, reason)
        ended = f"failed, see {state.log(step.name)}" if reason else "ended"
        say(f"{step.name} {ended} after {time.monotonic() - began:.0f} s")


def failure_of(step: Step, state: State) -> str:
    """Run one slice of a step; the end of its output if it failed, else nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:], "--step", step.name]
    with state.log(step.name).open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            log.write(f"it took more than {LIMIT_SECONDS:.0f} seconds\n")
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if not process.returncode:
        return ""
    lines = state.log(step.name).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL:])


def perform(step: Step, state: State) -> None:
    """Run one slice of a step in this process, and keep its result if that was the last."""
    began = time.monotonic()
    part = Slice(state=state.directory, is_over=lambda: time.monotonic() > began + SLICE_SECONDS)
    found = step.run(part)
    if found is not None:
        command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
        provenance = provenance_of(command.partition(" --step")[0], model="", draft="")
        seconds = time.monotonic() - began
        state.finish(step.name, {"seconds": seconds, "machine": asdict(provenance), "found": found})


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
