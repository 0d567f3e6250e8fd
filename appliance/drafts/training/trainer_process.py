"""
Starts the training process, sends it the samples and follows its progress.

The process runs in an offline environment and a session of its own, so that Ctrl-C reaches it only through
this module: it then writes a checkpoint and exits.  If this process dies, the child exits at its next write.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from appliance.drafts.training.progress import Point
from appliance.drafts.training.training_job import Job, job_line
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.sovereignty.environment import offline_environment

MODULE = "appliance.drafts.training"
STOP_SECONDS = 120.0
"""Maximum time to write a checkpoint and exit."""
MAX_LINE_CHARACTERS = 200
"""Maximum characters of the log's last line in a message."""


def train(
    job: Job,
    lines: Callable[[], Iterable[str]],
    *,
    log: Path,
    environment: Mapping[str, str],
    observe: Callable[[Point], None],
) -> bool:
    """False if it was stopped; `lines` makes the lines that follow the job's own, `log` is replaced."""
    try:
        output = log.open("w", encoding="utf-8")
    except OSError as error:
        raise DraftStorageError(f"cannot write {log}: {error.strerror}") from error
    with output:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and a module of ours
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            encoding="utf-8",
            env=offline_environment(environment),
            start_new_session=True,
        )
    with process, on_interrupt(process.terminate):
        try:
            _send(process, job, lines)
            return _follow(process, log, observe)
        finally:
            # No process survives an error here.
            _end(process)


def _send(process: subprocess.Popen[str], job: Job, lines: Callable[[], Iterable[str]]) -> None:
    stdin = process.stdin
    if stdin is None:  # pragma: no cover - it is a pipe
        return
    # It may have exited already; its last event says why.
    with suppress(BrokenPipeError):
        stdin.write(job_line(job))
        for line in lines():
            stdin.write(line)
    with suppress(BrokenPipeError):
        stdin.close()


def _follow(process: subprocess.Popen[str], log: Path, observe: Callable[[Point], None]) -> bool:
    for content in _events(process):
        event = content.pop("event")
        if event == "step":
            observe(Point.from_json(content))
        elif event == "failed":
            raise DraftRefusedError(str(content["message"]))
        elif event in {"finished", "stopped"}:
            return bool(event == "finished")
    status = process.wait()
    if status == -signal.SIGTERM:  # stopped before its handler was installed
        return False
    raise DraftRefusedError(
        f"the training process ended with status {status}{_last_line(log)}: run the same command to resume"
    )


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in process.stdout or ():
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict) and "event" in content:
                yield content


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        for line in reversed(lines):
            if line.strip():
                return f" ({line.strip()[:MAX_LINE_CHARACTERS]})"
    return ""


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
    end_process(process, STOP_SECONDS)


def end_process(process: subprocess.Popen[Any], seconds: float) -> None:
    """End a process if it runs: by SIGTERM, and by SIGKILL after `seconds`."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a service manager, and a closed terminal."""


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on each of these signals instead of ending; restore the handlers afterwards."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
