"""
Where the gateway's CPU time goes, by stage and function: `python -m benchmarks.gateway.profile`.

Samples of py-spy, of threads that hold the interpreter lock: time in the kernel and in libraries that release
the lock is not in them, but in the CPU time of a request, which is measured before.  Run it as root, or as a
user who may trace.
"""

import argparse
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import uvloop

from benchmarks.audit.figures import markdown
from benchmarks.gateway.cases import cpu_seconds
from benchmarks.gateway.client import drive
from benchmarks.gateway.contenders import ROOT, appliance
from benchmarks.gateway.upstream import upstream
from benchmarks.speculation.provenance import RESULTS, provenance_of

CONCURRENCY = (1, 32)
RATE, WARM_UP, FUNCTIONS = 500, 500, 25
STAGES = {
    "appliance/audit/commit_thread": "audit: commit",
    "appliance/audit/sqlite_append": "audit: commit",
    "appliance/audit": "audit: entries and writer",
    "appliance/tenancy": "keys and limits",
    "appliance/serving": "worker connection and dialects",
    "appliance/gateway": "gateway",
    "appliance/api": "API",
    "appliance": "rest of the gateway",
    "uvicorn": "HTTP server",
    "starlette": "web framework",
    "fastapi": "web framework",
    "prometheus_client": "metrics",
    "aiohttp": "scrapes",
    "structlog": "log",
    "json": "JSON",
    "asyncio": "event loop",
}
"""By the longest prefix of a module's path."""
FRAME = re.compile(r"^(?P<function>.+) \((?P<file>[^()]+?)(?::\d+)?\)$")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.profile")
    parser.add_argument("--requests", type=int, default=6000, help="at each concurrency (default 6000)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="another commit of this project")
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway-profile.md")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.gateway.profile", *sys.argv[1:]])
    provenance = provenance_of(command, model="", draft="")
    parts = [profile(count, options.requests, options.checkout) for count in CONCURRENCY]
    head = f"# Where the gateway's CPU time goes, at commit {provenance.source}\n\n`{command}`\n\n"
    text = f"{head}{provenance.hardware}; {provenance.date}.\n" + "".join(parts)
    options.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {options.out}")


def profile(concurrency: int, requests: int, checkout: Path) -> str:
    """One run of the gateway, under plain requests."""
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        upstream() as worker,
        appliance(worker, checkout=checkout) as target,
    ):
        uvloop.run(drive(target, WARM_UP, concurrency))
        before = cpu_seconds(target) or 0.0
        uvloop.run(drive(target, requests, concurrency))
        spent = (cpu_seconds(target) or 0.0) - before
        samples = Path(scratch, "samples")
        spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or "py-spy"
        more = ["--gil", "--nonblocking", "--rate", str(RATE), "--format", "raw", "--duration", "3600"]
        sampling = subprocess.Popen(
            [spy, "record", "--pid", str(target.pid), "--output", str(samples), *more],
            stdout=subprocess.DEVNULL,
        )
        time.sleep(1.0)
        uvloop.run(drive(target, requests, concurrency))
        sampling.send_signal(signal.SIGINT)
        sampling.wait()
        lines = samples.read_text(encoding="utf-8").splitlines()
    stages, functions = counts(lines)
    total = max(1, stages.total())
    shares = [(name, f"{count / total:.1%}") for name, count in stages.most_common()]
    own = [(f"`{name}`", f"{count / total:.1%}") for name, count in functions.most_common(FUNCTIONS)]
    return (
        f"\n## {concurrency} in flight: {1000 * spent / requests:.3f} ms of CPU time a request\n\n"
        f"{markdown(('stage', 'own time'), shares)}\n{markdown(('function', 'own time'), own)}"
    )


def counts(lines: Iterable[str]) -> tuple[Counter[str], Counter[str]]:
    """Samples by stage and by function, of lines `frame;frame;… count`; the innermost frame has them."""
    stages, functions = Counter[str](), Counter[str]()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        found = FRAME.match(stack.rpartition(";")[2])
        if found is not None:
            stages[stage_of(found["file"])] += int(count)
            functions[f"{found['function']} ({found['file']})"] += int(count)
    return stages, functions


def stage_of(file: str) -> str:
    fitting = [prefix for prefix in STAGES if file.startswith(prefix)]
    return STAGES[max(fitting, key=len)] if fitting else "other"


if __name__ == "__main__":
    main()
