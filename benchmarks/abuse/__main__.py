"""
Measure every attack with 2, 10 and 50 connections in one run, or all at once, and write the report.

    python -m benchmarks.abuse
    python -m benchmarks.abuse --all-at-once 10
"""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import uvloop

from benchmarks.abuse.attacker import ATTACKS
from benchmarks.abuse.latency import ALLOWED_MS, CLIENTS, ROOT, Beside, measure, site
from benchmarks.abuse.memory import BOUND_MIB, CONNECTIONS, Endured, endure
from benchmarks.audit.figures import markdown
from benchmarks.speculation.provenance import Provenance, provenance_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
COLUMNS = (
    "attack",
    "connections",
    "alone p50 / p99 ms",
    "beside p50 / p99 ms",
    "allowed p99 ms",
    "longest turn of the loop, CPU ms",
    "slowest /healthz ms",
    "peak MiB",
    "answers to the attacker",
    "attacker MiB/s",
)


def main() -> None:
    options = parse(sys.argv[1:])
    command = shlex.join(["python", "-m", "benchmarks.abuse", *sys.argv[1:]])
    provenance = provenance_of(command, model="", draft="")
    found: list[Beside] = []
    load_before = load()
    if options.all_at_once:
        with site(options.against) as at:
            endured = uvloop.run(endure(at, 60 * options.all_at_once))
        write_endured(options.out, options.name or f"abuse-memory-{provenance.commit}", provenance, endured)
        sys.exit(0 if endured.holds else 1)
    with site(options.against) as at:
        for attack in options.attacks:
            for connections in options.connections:
                found.append(uvloop.run(measure(at, attack, connections, seconds=options.seconds)))
                print(" | ".join(cells(found[-1])), file=sys.stderr, flush=True)
    write(options.out, options.name or f"abuse-{provenance.commit}", provenance, found, load_before, load())


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse")
    add = parser.add_argument
    add("--attacks", nargs="*", choices=ATTACKS, default=ATTACKS)
    add("--connections", type=int, nargs="*", default=[2, 10, 50], help="of the attacker")
    add("--seconds", type=float, default=5.0, help="of each measurement, alone and beside (default 5)")
    add("--all-at-once", type=float, metavar="MINUTES", help="every attack together; measures memory")
    add("--against", type=Path, default=ROOT, help="checkout of another commit of this project")
    add("--out", type=Path, default=RESULTS, help="where results are written")
    add("--name", default="", help="of the results; default: abuse and the commit")
    return parser.parse_args(arguments)


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def cells(line: Beside) -> list[str]:
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(line.statuses.items()))
    return [
        line.attack,
        str(line.connections),
        f"{line.alone.p50:.1f} / {line.alone.p99:.1f}",
        f"{line.beside.p50:.1f} / {line.beside.p99:.1f}",
        f"{line.allowed_ms:.1f}{'' if line.holds else ' (missed)'}",
        f"{line.turn_ms:.1f}",
        f"{line.health_ms:.1f}",
        f"{line.peak_mib:.0f}",
        answers or "none yet",
        f"{line.sent_bytes / 2**20 / line.seconds:.0f}",
    ]


def write(
    out: Path, name: str, provenance: Provenance, found: list[Beside], load_before: str, load_after: str
) -> None:
    text = f"""# Another tenant's chats beside an attack

{provenance.hardware}; commit {provenance.source}; {provenance.date};
`{provenance.command}`

First-byte times of small streaming chats of one tenant, {CLIENTS} at a time, alone and right after that
beside another tenant's attack, of which each connection sends its next request as soon as the last was
answered. Allowed is twice the p99 alone and {ALLOWED_MS:g} ms. Gateway, workers, attacker and client share
the machine's cores; the attacker and the worker it uses run with nice 19. The longest turn of the event loop
is CPU time: it does not depend on what else the machine does. Load average before and after:
{load_before}, {load_after}.

{markdown(COLUMNS, [cells(line) for line in found])}"""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"provenance": asdict(provenance), "found": [asdict(line) for line in found]}
    (out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_endured(out: Path, name: str, provenance: Provenance, endured: Endured) -> None:
    step = max(1, len(endured.samples_mib) // 20)
    rows = [
        [attack, ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())) or "none yet"]
        for attack, statuses in endured.statuses.items()
    ]
    text = f"""# Memory while every attack runs at once

{provenance.hardware}; commit {provenance.source}; {provenance.date};
`{provenance.command}`

Every attack of `python -m benchmarks.abuse` at the same time for {endured.seconds / 60:g} minutes,
{CONNECTIONS} connections each. Memory is that of the gateway and its parser processes together.

- Bound: {BOUND_MIB} MiB. Peak: {endured.peak_mib:.0f} MiB{"" if endured.holds else " (missed)"}
- In order, MiB: {", ".join(f"{sample:.0f}" for sample in endured.samples_mib[::step])}
- Slowest answer of `/healthz`, asked once a second: {endured.health_ms:.0f} ms

{markdown(("attack", "answers to the attacker"), rows)}"""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
