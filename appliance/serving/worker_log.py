"""A worker's log file: rotation, the phase of a start, and the cause of a failure."""

import contextlib
import os
import re
import shutil
import signal
from itertools import pairwise
from pathlib import Path

KEPT_LOGS = 3
LARGEST_LOG = 64 * 2**20
"""Rotated beyond these bytes while the worker runs; with the kept ones its logs take four times as many."""
TAIL_BYTES = 2**16
LONGEST_LINE = 400
PREFIX = re.compile(r"^\([^)]* pid=\d+\) (?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
EXCEPTION = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Exit|Interrupt)(?::.*|$))")
CLASS = re.compile(r"\w+(?:Error|Exception|Exit|Interrupt)(?=:|$)")
RELAYED = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "EngineCore encountered an issue",
)
"""Prefixes of messages by which one process of vLLM reports the failure of another."""
PHASES = (
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading the target"),
    ("Loading drafter model", "loading the draft"),
    ("Loading safetensors", "loading weights"),
    ("Dynamo bytecode transform", "compiling"),
    ("Compiling a graph", "compiling"),
    ("KV cache size", "making room for the KV cache"),
    ("Capturing CUDA graph", "capturing CUDA graphs"),
    ("Starting vLLM server", "opening the port"),
)


def rotate(log: Path) -> None:
    """Keep the logs of the last starts as `.1` (the latest) to `.3`, in a directory of mode 0700."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_older([log, *_older(log)])


def bound(log: Path, largest: int) -> bool:
    """
    Rotate a log of more than `largest` bytes while it is written; True if it was rotated.

    It is copied and truncated, since the worker holds it open and appends to it: bytes written between the
    two are lost.  Without disk space for a copy the log stays as it is.
    """
    kept = _older(log)
    copy = log.with_name(f".{log.name}.copy")
    try:
        size = log.stat().st_size
        # Checked at every poll: a copy that fails would fill the disk again and again.
        if size <= largest or shutil.disk_usage(log.parent).free < 2 * size:
            return False
        shutil.copy(log, copy)
        _make_older(kept)
        copy.replace(kept[0])
        os.truncate(log, 0)
    except OSError:
        copy.unlink(missing_ok=True)
        return False
    return True


def _older(log: Path) -> list[Path]:
    return [log.with_name(f"{log.name}.{age}") for age in range(1, KEPT_LOGS + 1)]


def _make_older(kept: list[Path]) -> None:
    for newer, older in reversed(list(pairwise(kept))):
        with contextlib.suppress(FileNotFoundError):
            newer.replace(older)


def read_tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def failure_line(log_tail: str, *, has_served: bool = False) -> str:
    """
    The line that says why a worker failed, from the end of its log.

    vLLM relays a failure from process to process: the last exception that is not such a relay is the cause.
    For a worker that has served, only the class of the exception: its message may quote a request.
    """
    lines = [PREFIX.sub("", line).rstrip() for line in log_tail.replace("\r", "\n").splitlines()]
    lines = [line for line in lines if line]
    roots: list[str] = []
    relays: list[str] = []
    for position, line in enumerate(lines):
        if match := EXCEPTION.match(line):
            what = match[1]
            if "validation error" in what:  # pydantic reports the cause on the next line
                what = "".join(lines[position + 1 : position + 2]).strip().removeprefix("Value error, ")
            (relays if any(text in what for text in RELAYED) else roots).append(what)
        elif ": error: " in line:  # argparse
            roots.append(line.partition(": error: ")[2])
    causes = [*relays[:1], *roots[-1:]]
    if has_served:
        found = CLASS.match(causes[-1]) if causes else None
        relayed = [text for text in RELAYED if causes and text in causes[-1]]
        return ": ".join([found[0], *relayed]) if found else "it logged no exception"
    causes = causes or lines[-1:] or ["it wrote nothing"]
    return " ".join(causes[-1].split())[:LONGEST_LINE]


def find_phase(log_text: str) -> str | None:
    for line in reversed(log_text.splitlines()):
        for needle, phase in PHASES:
            if needle in line:
                return phase
    return None


def describe_end(returncode: int | None, log_tail: str, *, has_served: bool) -> str:
    line = failure_line(log_tail, has_served=has_served)
    if returncode is not None and returncode < 0:
        name = signal.Signals(-returncode).name
        hint = "; the kernel does that when memory runs out" if returncode == -signal.SIGKILL else ""
        return f"killed by {name}{hint}; last line: {line}"
    return line
