"""
What the gateway adds to a request, with everything on, next to other gateways: `make bench`.

One scripted upstream, and in turn, interleaved: the client on it directly, through this gateway (audit
log strict, keys, limits, metrics), through a relay in Python without any feature, nginx, the vLLM project's
Rust router and LiteLLM's proxy.  Each is one process, whose CPU time is measured: on shared cores time on the
clock says little.  Client and upstream share the cores with them: compare figures within a run only.
Frames are stamped by the upstream and the stamps read by the client.  Nothing is asserted; results are files,
written with the machine.
"""

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.audit.figures import markdown
from benchmarks.gateway.cases import LOADS, Found, Load, measure, paced_loads, resident_growth
from benchmarks.gateway.client import Target
from benchmarks.gateway.contenders import (
    NotThereError,
    appliance,
    bare_relay,
    litellm,
    nginx,
    vllm_router,
)
from benchmarks.gateway.upstream import upstream
from benchmarks.speculation.provenance import Provenance, provenance_of

RESULTS = Path(__file__).resolve().parent / "results"
OTHERS = {"bare-relay": bare_relay, "nginx": nginx, "vllm-router": vllm_router, "litellm": litellm}
SLOW = "LiteLLM"
"""Gets fewer requests in a round: the others would wait for it most of the time."""
SLOW_SHARE = 10
SLOW_STREAMS = 100
"""More paced streams than this are not tried on it: it answers none of them in time."""


def main() -> None:
    options = parse(sys.argv[1:])
    provenance = provenance_of(
        shlex.join(["python", "-m", "benchmarks.gateway_overhead", *sys.argv[1:]]), model="", draft=""
    )
    with ExitStack() as stack:
        worker = stack.enter_context(upstream())
        targets = [Target(name="direct", url=worker), stack.enter_context(appliance(worker))]
        if options.against is not None:
            other = appliance(worker, name="other commit", checkout=options.against)
            targets.append(stack.enter_context(other))
        for name in options.others:
            try:
                targets.append(stack.enter_context(OTHERS[name](worker)))
            except NotThereError as error:
                say(f"SKIPPED {name}: {error}")
        found, grown = uvloop.run(run(options, targets))
    write(options.out, provenance, found, grown)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_overhead")
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="of every load and target (default 5)")
    add("--requests", type=int, default=1500, help="in a round of requests that are not paced")
    add("--streams", type=int, nargs="*", default=[100, 500, 900, 1400], help="paced, at once")
    add("--seconds", type=float, default=8.0, help="of a round of paced streams (default 8)")
    add("--others", nargs="*", choices=sorted(OTHERS), default=sorted(OTHERS))
    add("--against", type=Path, help="checkout of another commit of this project, to compare with")
    add("--memory-requests", type=int, default=100_000, help="after which memory is compared; 0 for not")
    add("--out", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args(arguments)


async def run(
    options: argparse.Namespace, targets: Sequence[Target]
) -> tuple[list[Found], tuple[float, float] | None]:
    """Every load, round by round, the targets in an order that alternates."""
    found: list[Found] = []
    for load in (*LOADS, *paced_loads(options.streams)):
        lines = [Found(target=target.name, load=load) for target in targets]
        if load.paced and load.concurrency > SLOW_STREAMS:
            for line in lines:
                line.failure = "not tried" if line.target == SLOW else ""
        for number in range(options.rounds):
            turn = list(zip(targets, lines, strict=True))
            for target, line in turn[:: -1 if number % 2 else 1]:
                requests = options.requests // (SLOW_SHARE if target.name == SLOW else 1)
                await measure(load, target, line, requests=requests, seconds=options.seconds)
                await asyncio.sleep(0.2)
        for line in lines:
            say(in_words(line, lines[0]))
        found += lines
    grown = None
    if options.memory_requests:
        grown = await resident_growth(targets[1], options.memory_requests)
        say(f"memory: {grown[0]:.1f} MB, after {options.memory_requests:,} requests {grown[1]:.1f} MB")
    return found, grown


def in_words(line: Found, direct: Found) -> str:
    """One line of progress."""
    if line.failure:
        return f"{line.load.name:<34} {line.target:<20} failed: {line.failure}"
    return f"{line.load.name:<34} {line.target:<20} " + ", ".join(
        f"{name} {value}" for name, value in cells(line, direct).items()
    )


def cells(line: Found, direct: Found) -> dict[str, str]:
    """What is shown of one target under one load, by column."""
    first, base, cpu = line.first_byte, direct.first_byte, line.cpu_ms
    added = {
        "first byte p50 / p99 ms": f"{first.p50:.2f} / {first.p99:.2f}",
        "added": f"{first.p50 - base.p50:+.2f} / {first.p99 - base.p99:+.2f}",
    }
    spent = "" if cpu is None else f"{cpu:.3f}"
    if not line.load.paced:
        return {"CPU ms": spent, "per second": f"{line.per_second:,.0f}", **added}
    delay = line.delay
    return {
        "CPU ms per frame": spent,
        "frame delay p50 / p99 ms": f"{delay.p50:.2f} / {delay.p99:.2f}",
        **added,
        "lost or out of order": str(line.failed),
    }


def tables(found: Sequence[Found]) -> str:
    """A table for each load."""
    parts: list[str] = []
    for load in dict.fromkeys(line.load for line in found):
        lines = [line for line in found if line.load == load]
        columns = list(cells(lines[0], lines[0]))
        rows = [
            [
                line.target,
                *(
                    [f"failed: {line.failure}", *[""] * (len(columns) - 1)]
                    if line.failure
                    else cells(line, lines[0]).values()
                ),
            ]
            for line in lines
        ]
        parts.append(f"## {_title(load)}\n\n{markdown(['', *columns], rows)}")
    return "\n".join(parts)


def _title(load: Load) -> str:
    return load.name[0].upper() + load.name[1:]


def write(
    directory: Path, provenance: Provenance, found: Sequence[Found], grown: tuple[float, float] | None
) -> None:
    """The tables for people, and the figures for programs."""
    head = f"# What the gateway adds, at commit {provenance.commit}\n\n`{provenance.command}`\n\n"
    where = f"{provenance.hardware}; {provenance.date}.  Client, upstream and gateway share the cores.\n\n"
    memory = ""
    if grown is not None:
        memory = f"\nResident memory of the gateway: {grown[0]:.1f} MB before, {grown[1]:.1f} MB after.\n"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "gateway_overhead.md"
    path.write_text(head + where + tables(found) + memory, encoding="utf-8")
    document = {"command": provenance.command, "commit": provenance.commit, "memory_mb": grown, "lines": []}
    document["lines"] = [_figures(line) for line in found]
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    say(f"wrote {path}")


def _figures(line: Found) -> dict[str, Any]:
    times: dict[str, Callable[[], Any]] = {"first_byte": lambda: line.first_byte, "delay": lambda: line.delay}
    return {
        "load": line.load.name,
        "target": line.target,
        "per_second": line.per_second,
        "cpu_ms": line.cpu_ms,
        "failed_streams": line.failed,
        "failure": line.failure,
        **{
            f"{name}_{part}_ms": getattr(read(), part)
            for name, read in times.items()
            for part in ("p50", "p99")
        },
    }


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
