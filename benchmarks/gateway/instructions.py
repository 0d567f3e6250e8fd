"""
Instructions of a request and of a frame, counted by valgrind: `python -m benchmarks.gateway.instructions`.

Unlike time they hardly depend on what else the machine does.  Not in them: the kernel's part, and what
waiting for memory costs.  What a process does at rest is counted first and subtracted.  Needs Debian's
`valgrind`.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import uvloop

from benchmarks.audit.figures import markdown
from benchmarks.gateway.client import Target, drive
from benchmarks.gateway.contenders import UNAUDITED, appliance, bare_relay
from benchmarks.gateway.profile import CONCURRENCY
from benchmarks.gateway.upstream import upstream
from benchmarks.speculation.provenance import RESULTS, provenance_of

WARM_UP, REST_SECONDS = 300, 6.0
STREAMS, FRAMES_PER_SECOND = 16, 20
SHORT, LONG = 20, 120
"""Frames of two streams that differ only in them."""
TOTALS = re.compile(r"^totals: (\d+)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway.instructions")
    parser.add_argument("--requests", type=int, default=300, help="at each concurrency (default 300)")
    parser.add_argument("--against", type=Path, help="checkout of another commit of this project")
    parser.add_argument("--out", type=Path, default=RESULTS / "gateway-instructions.md")
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.gateway.instructions", *sys.argv[1:]])
    provenance = provenance_of(command, model="", draft="")
    starts: dict[str, Start] = {
        "bare Python relay": bare_relay,
        f"this gateway, {provenance.source}": appliance,
        "without its log": partial(appliance, module=UNAUDITED),
    }
    if options.against is not None:
        git = ("git", "-C", str(options.against), "rev-parse", "--short", "HEAD")
        other = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
        starts[f"commit {other}"] = partial(appliance, checkout=options.against)
    rows = []
    for name, start in starts.items():
        rows.append((name, *(f"{each / 1000:.0f}" for each in counted(start, options.requests))))
        print(*rows[-1], flush=True)
    heading = ("process", *(f"request, {count} in flight" for count in CONCURRENCY), "frame")
    text = (
        "# Instructions of a plain request and of a frame of a stream, in thousands\n\n"
        f"`{command}`\n\n{provenance.hardware}; {provenance.date}.\n\n{markdown(heading, rows)}"
    )
    options.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwrote {options.out}")


class Start(Protocol):
    def __call__(self, worker: str, *, python: Sequence[str]) -> AbstractContextManager[Target]: ...


def counted(start: Start, requests: int) -> list[float]:
    """Instructions of a request at each concurrency, and of a frame."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="appliance-bench-")))
        worker = stack.enter_context(upstream())
        target = stack.enter_context(start(worker, python=_valgrind(scratch)))
        uvloop.run(drive(target, WARM_UP, max(CONCURRENCY)))
        _control(target, "--instr=on")
        uvloop.run(drive(target, max(CONCURRENCY), max(CONCURRENCY)))
        _since(target, scratch)
        time.sleep(REST_SECONDS)
        at_rest = _since(target, scratch) / REST_SECONDS

        def cost(requests: int, concurrency: int, **members: Any) -> float:  # noqa: ANN401 - JSON
            began = time.monotonic()
            uvloop.run(drive(target, requests, concurrency, **members))
            seconds = time.monotonic() - began
            return _since(target, scratch) - seconds * at_rest

        found = [cost(requests, concurrency) / requests for concurrency in CONCURRENCY]
        short, long = (
            cost(STREAMS, STREAMS, stream=True, max_tokens=frames, seed=FRAMES_PER_SECOND)
            for frames in (SHORT, LONG)
        )
        found.append((long - short) / (STREAMS * (LONG - SHORT)))
        _control(target, "--instr=off")  # so that it stops in less time
    return found


def _valgrind(scratch: Path) -> Sequence[str]:
    files = (f"--callgrind-out-file={scratch / 'counts'}", f"--log-file={scratch / 'log'}")
    return ("valgrind", "--tool=callgrind", "--instr-atstart=no", *files, sys.executable)


def _since(target: Target, scratch: Path) -> int:
    """Instructions since the last call."""
    before = set(scratch.glob("counts.*"))
    _control(target, "--dump")
    (dump,) = set(scratch.glob("counts.*")) - before
    return total_of(dump.read_text(encoding="utf-8"))


def total_of(dump: str) -> int:
    """The sum over all functions of one dump of callgrind."""
    found = TOTALS.search(dump)
    return int(found[1]) if found else 0


def _control(target: Target, order: str) -> None:
    subprocess.run(
        ["callgrind_control", order, str(target.pid)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
