"""
What the audit log can take, and what it costs a request: `make bench-audit`.

Without arguments: appends per second, on SQLite and with one, two and four writers on PostgreSQL,
then the cost of `strict` against no audit log, with a worker that answers at once and with a real one.
`--large N` measures a log of N entries instead, with `--against COMMIT` beside that commit's,
`--soak SECONDS` drives a gateway at full speed for so long.  Results are files; nothing is asserted
but that no entry is lost, and figures are written with the machine they were measured on.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.audit import appends, large, serving, soak
from benchmarks.speculation.provenance import Provenance, provenance_of

RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    options = parse(sys.argv[1:])
    command = shlex.join(["python", "-m", "benchmarks.audit", *sys.argv[1:]])
    provenance = provenance_of(command, model="", draft="")
    say(line(provenance))
    if options.large:
        measure_large(options, provenance)
    elif options.soak:
        measure_soak(options, provenance)
    else:
        measure_usual(options, provenance)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    add = parser.add_argument
    add("--only", choices=["appends", "serving", "worker"], help="one of the usual measurements")
    add("--databases", nargs="+", choices=["sqlite", "postgresql"], help="default: what is installed")
    add("--writers", nargs="+", type=int, default=[1, 2, 4], help="on PostgreSQL (default 1 2 4)")
    add("--requests-in-flight", type=int, default=16, help="in each writer (default 16)")
    add("--seconds", type=float, default=5.0, help="of appending, per line (default 5)")
    add("--rounds", type=int, default=9, help="of serving (default 9)")
    add("--requests", type=int, default=400, help="per segment of serving (default 400)")
    add("--large", type=int, metavar="N", help="measure a log of N entries")
    add("--against", metavar="COMMIT", default="", help="measure a large log of this commit as well")
    add("--directory", type=Path, help="where it is kept; a second run continues it (default: nowhere)")
    add("--soak", type=float, metavar="SECONDS", help="drive a gateway at full speed for so long")
    add("--sample-seconds", type=float, default=1.0, help="between two looks at its memory (default 1)")
    add("--out", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args(arguments)


def measure_usual(options: argparse.Namespace, provenance: Provenance) -> None:
    if options.only in {None, "appends"}:
        databases = options.databases or appends.available()
        lines = []
        for found in appends.measure(databases, options.writers, options.requests_in_flight, options.seconds):
            lines.append(found)
            say(f"{found.database}, {found.writers} writers: {found.entries_per_second:,.0f} entries/s")
        title = f"Appending, {options.requests_in_flight} requests in flight in each writer"
        write(options.out, provenance, "appends", title, appends.table(lines), appends.document(lines))
    if options.only in {None, "serving"}:
        cases = serving.measure(options.rounds, options.requests)
        title = f"`strict` against no audit log, {options.rounds} rounds of {options.requests} requests"
        write(options.out, provenance, "serving", title, serving.table(cases), serving.document(cases))
    if options.only in {None, "worker"}:
        rounds, requests = options.rounds, options.requests // 10
        cases = serving.measure_on_worker(rounds, requests)
        title = f"The same on a real worker, {rounds} rounds of {requests} answers of 32 tokens"
        write(options.out, provenance, "worker", title, serving.table(cases), serving.document(cases))


def measure_large(options: argparse.Namespace, provenance: Provenance) -> None:
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch:
        directory = options.directory or Path(scratch)
        found = large.measure(
            directory, options.large, say, commit=provenance.commit, against=options.against
        )
    title = f"A log of {options.large:,} entries" + (
        f", against {options.against}" if options.against else ""
    )
    write(options.out, provenance, "large", title, large.table(found), large.document(found))


def measure_soak(options: argparse.Namespace, provenance: Provenance) -> None:
    found = soak.measure(options.soak, options.sample_seconds, say)
    title = f"{options.soak:g} seconds at full speed"
    write(options.out, provenance, "soak", title, soak.table(found), soak.document(found))
    if not found.passes:
        raise SystemExit("benchmarks.audit: the soak failed")


def write(directory: Path, provenance: Provenance, kind: str, title: str, table: str, content: Any) -> None:  # noqa: ANN401
    """A page for people and a file for programs, both with their provenance."""
    directory.mkdir(parents=True, exist_ok=True)
    name = f"audit-{kind}-{provenance.commit}"
    page = f"# {title}\n\n{line(provenance)}\n\n{table}"
    data = {"measured": line(provenance), "results": content}
    (directory / f"{name}.md").write_text(page, encoding="utf-8")
    (directory / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    say(f"\n{page}\nwrote {directory / name}.md and .json")


def line(provenance: Provenance) -> str:
    """What it was measured with, in one line; no model takes part."""
    source, date = provenance.source, provenance.date
    return f"{provenance.hardware}; commit {source}; {date}; `{provenance.command}`"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
