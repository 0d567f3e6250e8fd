"""
Starting the process that trains, handing it its samples, and hearing how it goes.

The process gets an environment that opens no way out and lives in a session of its own, so that an interrupt
on the terminal reaches it only through here: it then writes a checkpoint and ends.  It ends as well when
this process dies, at the next thing it has to say.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance.drafts.training.job import Job, job_line
from appliance.drafts.training.progress import Point
from appliance.drafts.training.signals import answering
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.sovereignty.environment import offline_environment

MODULE = "appliance.drafts.training"
STOP_SECONDS = 120.0
"""How long it may take to write a checkpoint and end."""
LONGEST_LINE = 200
"""Characters of the log's last line that are shown."""


def train(
    job: Job,
    lines: Callable[[], Iterable[str]],
    *,
    log: Path,
    environment: Mapping[str, str],
    hear: Callable[[Point], None],
) -> bool:
    """
    Train until it is done; False where it was stopped before.

    Args:
        job: what to train.
        lines: makes the lines that follow the job's own.
        log: gets what libraries print; it is replaced.
        environment: of this process.
        hear: is told of every step.

    Raises:
        DraftRefusedError: it cannot be trained; the message says why.
        DraftStorageError: the log cannot be written.
        ConfigurationError: the environment points outside.
    """
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
    with process, answering(_asking(process)):
        try:
            _hand_over(process, job, lines)
            return _listen(process, log, hear)
        finally:
            # Whatever went wrong here, nothing is left behind.
            _end(process)


def _hand_over(process: subprocess.Popen[str], job: Job, lines: Callable[[], Iterable[str]]) -> None:
    stdin = process.stdin
    if stdin is None:  # pragma: no cover - it was asked for
        return
    # It may have ended already, and then says why on its way out.
    with suppress(BrokenPipeError):
        stdin.write(job_line(job))
        for line in lines():
            stdin.write(line)
    with suppress(BrokenPipeError):
        stdin.close()


def _listen(process: subprocess.Popen[str], log: Path, hear: Callable[[Point], None]) -> bool:
    for said in _said(process):
        event = said.pop("event")
        if event == "step":
            hear(Point.from_json(said))
        elif event == "failed":
            raise DraftRefusedError(str(said["message"]))
        elif event in {"finished", "stopped"}:
            return bool(event == "finished")
    status = process.wait()
    if status == -signal.SIGTERM:  # it was asked before it could listen
        return False
    raise DraftRefusedError(
        f"the process that trains ended with status {status}{_last_line(log)}: the same command goes on"
    )


def _said(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
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
                return f" ({line.strip()[:LONGEST_LINE]})"
    return ""


def _asking(process: subprocess.Popen[str]) -> Callable[[], None]:
    """What asks the process to end; it says when it has."""

    def ask() -> None:
        with suppress(ProcessLookupError):
            process.terminate()

    return ask


def _end(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
