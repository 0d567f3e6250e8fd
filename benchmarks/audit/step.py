"""
One step of `benchmarks.audit.large`, in a process of its own, so that its memory is its own.

    python -P step.py STEP DIRECTORY COUNT

PYTHONPATH names the source, of any commit: its own `benchmarks.audit.large` makes, opens and exports the log.
Prints one line of JSON: seconds, memory in MiB, and what was found.
"""

import contextlib
import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDED = 10_000
"""Entries that are new to a verifier that remembers the others."""
Found = tuple[float, str]
"""Seconds, and what was found."""


def main(step: str, directory: Path, count: int) -> None:
    seconds, finding, *memory = STEPS[step](directory, count)
    print(json.dumps([seconds, *(memory or [peak_mib("self")]), finding]))


def large() -> Any:  # noqa: ANN401 - the module of another commit
    return importlib.import_module("benchmarks.audit.large")


def peak_mib(process: str | int) -> float:
    """The most memory a process had: not ru_maxrss, which begins with what its parent had."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 1024


def fill(directory: Path, entries: int) -> Found:
    speed = large().fill(directory, entries, lambda text: print(text, file=sys.stderr, flush=True))
    return 0.0, f"{speed:,.0f} entries/s" if speed else "there already"


def verify(directory: Path, *options: str) -> Found:
    """Run the auditor's command; its module imports nothing else of ours."""
    verifier = importlib.import_module("appliance.audit.verify")
    key = (directory / "log.keys").read_text(encoding="utf-8")
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = verifier.main([str(directory / "export"), "--json", "--key", key, *options])
    seconds = time.perf_counter() - started
    return seconds, f"{verifier.ExitCode(code).name.lower()}, {json.loads(said.getvalue())['size']:,} entries"


def verify_with_state(directory: Path, _count: int) -> Found:
    return verify(directory, "--state", str(directory / "verified.state"))


def start(directory: Path, count: int) -> tuple[float, str, float]:
    """From the start of a gateway's process to its ready line; the memory is the gateway's."""
    process = importlib.import_module("demo.process").ApplianceProcess
    seconds, memory = [], 0.0
    with importlib.import_module("benchmarks.gateway.upstream").upstream(0.0) as worker:
        environment = {
            "APPLIANCE_AUDIT__ORIGIN": large().SETTINGS.origin,
            "APPLIANCE_POOL__URLS": json.dumps([worker]),
            "APPLIANCE_LOG__LEVEL": "error",
        }
        for _ in range(count):
            started = time.perf_counter()
            with process("gateway", data=directory, environment=environment) as gateway:
                seconds.append(time.perf_counter() - started)
                memory = max(memory, peak_mib(gateway.process.pid))
    return statistics.median(seconds), f"median of {count}", memory


def of_that_commit(name: str) -> Callable[[Path, int], Found]:
    return lambda directory, _count: getattr(large(), name)(directory)


STEPS: dict[str, Callable[[Path, int], Any]] = {
    "fill": fill,
    "start, empty log": lambda directory, count: start(directory / "empty", count),
    "start": start,
    "open, check, sign": of_that_commit("_open"),
    "export": of_that_commit("_export"),
    "verify": lambda directory, _count: verify(directory),
    "verify --state, first": verify_with_state,
    f"verify --state, {ADDED:,} new entries": verify_with_state,
    "make a receipt": of_that_commit("_receipt"),
    "verify a receipt": of_that_commit("_verify_receipt"),
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
