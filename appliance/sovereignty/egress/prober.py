"""
The gateway's side of the process that makes the attempts (`child`).

Fails closed: if that process has ended or does not answer, the observation is empty, from which no check
concludes `closed`.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from appliance.sovereignty.egress.probe import Observation, ProbePlan

MODULE = "appliance.sovereignty.egress.child"
PATIENCE_SECONDS = 10.0
"""Maximum time of an answer beyond its attempts, including the start of the process."""
CHUNK = 65536


class Prober:
    """The process that makes the attempts; the owner calls `close`."""

    def __init__(self, process: "subprocess.Popen[bytes]", plan: ProbePlan) -> None:
        self._process, self._plan = process, plan
        self._in_use = threading.Lock()
        self._asked = 0
        self._unread = b""

    @classmethod
    def start(cls, plan: ProbePlan) -> "Prober":
        """Start it, before this process raises the wall, which its children inherit; raises OSError."""
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        prober = cls(process, plan)
        prober._write(json.dumps(asdict(plan)))
        return prober

    def observe(self) -> Observation:
        """Make all attempts and wait for their results; blocks."""
        with self._in_use:
            self._asked += 1
            latest = time.monotonic() + self._plan.timeout_seconds + PATIENCE_SECONDS
            try:
                self._write(str(self._asked))
                while True:
                    answer = self._read(latest)
                    if answer["number"] == self._asked:
                        return Observation.from_json(answer)
            except TimeoutError:
                return _nothing("the probe process did not answer in time")
            except (OSError, EOFError, ValueError):
                return _nothing("the probe process has ended: restart the gateway")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with self._in_use:  # a caller that waits for an answer has seen end of file by now
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        self._process.stdin.write(f"{line}\n".encode())

    def _read(self, latest: float) -> Any:  # noqa: ANN401 - JSON of our own
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, latest - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(self._process.stdout.fileno(), CHUNK)
            if not part:
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _nothing(failure: str) -> Observation:
    return Observation(control=None, results=(), failure=failure)
