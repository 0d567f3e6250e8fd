"""
Processes that end when this one does, whichever way that is.

What they print stays with the samples: speculators shows one of these in clear while it packs them, and
names tokens in its warnings.  Of a failure only the kind of the last error leaves that place.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from appliance.drafts.training.signals import answering
from appliance.drafts.training.speculators.plan import visible
from appliance.errors import DraftRefusedError
from appliance.serving.guardian import guardian_source

STOP_SECONDS = 180.0
POLL_SECONDS = 0.5
ERROR = re.compile(r"\b([A-Z][A-Za-z]{0,60}(?:Error|Exception)):")
"""An exception's name as a traceback ends with it; never what comes after the colon."""


@dataclass(slots=True, kw_only=True)
class Processes:
    """Processes that have to end with this one, and whether somebody asked for that."""

    log: TextIO
    environment: Mapping[str, str]
    stopped: bool = False
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: list[str], gpus: Iterable[int]) -> subprocess.Popen[bytes]:
        """Start a process; all of it ends when this one does, even if this one is killed."""
        process = subprocess.Popen(  # noqa: S603 - by a list of arguments, of an interpreter the operator named
            [sys.executable, "-I", "-S", "-c", guardian_source(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.log,
            env={**self.environment, **visible(tuple(gpus))},
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def finish(self, process: subprocess.Popen[bytes], what: str) -> bool:
        """Wait for a process; False where somebody stopped it."""
        while process.poll() is None:
            if self.stopped:
                return False
            time.sleep(POLL_SECONDS)
        if process.returncode != 0 and not self.stopped:
            raise DraftRefusedError(
                f"{what} ended with status {process.returncode}{self.cause()}; the same command goes on"
            )
        return not self.stopped

    def cause(self) -> str:
        """Return the kind of the last error in what was printed, in brackets; empty where none is named."""
        try:
            found = ERROR.findall(Path(self.log.name).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            found = []
        return f" ({found[-1]})" if found else ""

    def stop(self) -> None:
        """Note that everything has to end."""
        self.stopped = True

    def end(self) -> None:
        """End what runs, the newest first."""
        for process in reversed(self.running):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            if process.stdin is not None:
                process.stdin.close()


@contextmanager
def processes_of(log: TextIO, environment: Mapping[str, str]) -> Iterator[Processes]:
    """Start processes as long as the block lasts; a signal asks all of them to end."""
    processes = Processes(log=log, environment=environment)
    with answering(processes.stop):
        try:
            yield processes
        finally:
            processes.end()
