"""
Child processes that always end with this one.

Their output stays with the samples: speculators prints a sample in clear while packing and names tokens in
warnings.  Only the type of the last error leaves that directory.
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

from appliance.drafts.training.speculators.commands import visible
from appliance.drafts.training.trainer_process import end_process, on_interrupt
from appliance.errors import DraftRefusedError
from appliance.serving.guardian import guardian_source

STOP_SECONDS = 180.0
POLL_SECONDS = 0.5
ERROR = re.compile(r"\b([A-Z][A-Za-z]{0,60}(?:Error|Exception)):")
"""An exception's name at the end of a traceback; never the text after the colon."""


@dataclass(slots=True, kw_only=True)
class Processes:
    log: TextIO
    environment: Mapping[str, str]
    stopped: bool = False
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: list[str], gpus: Iterable[int]) -> subprocess.Popen[bytes]:
        """Start a process; its whole tree ends with this one, even if this one is killed."""
        process = subprocess.Popen(  # noqa: S603 - an interpreter the operator named
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
        """Wait for a process; False if the training was stopped."""
        while process.poll() is None:
            if self.stopped:
                return False
            time.sleep(POLL_SECONDS)
        if process.returncode != 0 and not self.stopped:
            raise DraftRefusedError(
                f"{what} ended with status {process.returncode}{self.cause()}; run the same command to resume"
            )
        return not self.stopped

    def cause(self) -> str:
        """The type of the last error in the log, in brackets; empty if there is none."""
        try:
            found = ERROR.findall(Path(self.log.name).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            found = []
        return f" ({found[-1]})" if found else ""

    def stop(self) -> None:
        self.stopped = True

    def end(self) -> None:
        for process in reversed(self.running):
            end_process(process, STOP_SECONDS)
            if process.stdin is not None:
                process.stdin.close()


@contextmanager
def processes_of(log: TextIO, environment: Mapping[str, str]) -> Iterator[Processes]:
    """Start processes within the block; a signal stops all of them."""
    processes = Processes(log=log, environment=environment)
    with on_interrupt(processes.stop):
        try:
            yield processes
        finally:
            processes.end()
