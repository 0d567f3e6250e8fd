"""
The command line of the benchmark, as a plan.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, WorkerSettings
from appliance.serving.launch import draft_token_schedule
from benchmarks.speculation.plan import DEFAULT_KINDS, Kind, Plan, modes_of

RESULTS = Path(__file__).resolve().parent.parent / "results"
FULL: dict[str, Any] = {
    "kinds": DEFAULT_KINDS,
    "temperatures": (0.0, 1.0),
    "concurrency": (1, 2, 4, 8, 16),
    "rounds": 3,
    "seconds": 6.0,
    "learn": 30.0,
}
QUICK: dict[str, Any] = {
    "kinds": (Kind.CODE, Kind.HEX),
    "temperatures": (0.0,),
    "concurrency": (1, 4),
    "rounds": 2,
    "seconds": 4.0,
    "learn": 15.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The parsed command line."""

    plan: Plan
    model: Path
    draft: Path
    draft_tokens: int
    """The largest K."""
    out: Path


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line; defaults are those of the full grid, or of the quick one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    add = parser.add_argument
    add("--quick", action="store_true", help="a small grid: code and hex, greedy, concurrency 1 and 4")
    add("--kinds", nargs="+", type=Kind, metavar="KIND", help=", ".join(Kind))
    add("--temperatures", nargs="+", type=float, metavar="T")
    add("--concurrency", nargs="+", type=_count, metavar="N")
    add("--rounds", type=_count)
    add("--restarts", type=_count, default=1, help="all of it so often, in new processes (default 1)")
    add("--seconds", type=_seconds, help="measured time of a segment (default 6)")
    add("--learn", type=float, help="seconds the monitor gets with each cell's traffic first (default 30)")
    add("--warm-up", type=float, default=2.0, help="seconds of load before each segment (default 2)")
    add("--shift-seconds", type=_seconds, default=8.0, help="how long shifting traffic stays (default 8)")
    add("--max-tokens", type=_count, default=96, help="length of each answer (default 96)")
    add("--model", type=Path, default=DEMO_TARGET, help="directory of the target (default: the demo's)")
    add("--draft", type=Path, default=DEMO_DRAFT, help="directory of the draft (default: the demo's)")
    add("--draft-tokens", type=_count, default=3, help="the largest K (default 3)")
    add("--no-separate-target", action="store_true", help="no second worker that has loaded no draft")
    add("--out", type=Path, default=RESULTS, help="where results are written")
    parsed = parser.parse_args(arguments)
    if (parsed.model == DEMO_TARGET) != (parsed.draft == DEMO_DRAFT):
        parser.error("--model and --draft belong together: give both")
    grid = {name: getattr(parsed, name) for name in FULL}
    defaults = QUICK if parsed.quick else FULL
    grid = {name: defaults[name] if value is None else value for name, value in grid.items()}
    schedule = draft_token_schedule(WorkerSettings(draft_tokens=parsed.draft_tokens))
    choices = sorted({k for _first, _last, k in schedule})
    plan = Plan(
        kinds=_each(grid["kinds"]),
        temperatures=_each(grid["temperatures"]),
        concurrency=_each(grid["concurrency"]),
        rounds=grid["rounds"],
        restarts=parsed.restarts,
        seconds=grid["seconds"],
        learn=grid["learn"],
        modes=modes_of(choices, separate_target=not parsed.no_separate_target),
        warm_up=parsed.warm_up,
        shift_seconds=parsed.shift_seconds,
        max_tokens=parsed.max_tokens,
    )
    return Options(
        plan=plan, model=parsed.model, draft=parsed.draft, draft_tokens=parsed.draft_tokens, out=parsed.out
    )


def _each(values: Sequence[Any]) -> tuple[Any, ...]:
    """Each once, in the order they were given."""
    return tuple(dict.fromkeys(values))


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        message = f"{text} is not 1 or more"
        raise argparse.ArgumentTypeError(message)
    return count


def _seconds(text: str) -> float:
    if (seconds := float(text)) <= 0:
        message = f"{text} is not more than 0"
        raise argparse.ArgumentTypeError(message)
    return seconds
