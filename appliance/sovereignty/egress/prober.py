"""
A gateway's hold on the process that makes the attempts (`child`).

Fails closed: a process that has ended or does not answer is an observation of nothing, from which no check
concludes that all is closed.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from appliance.sovereignty.egress.probe import Observation, Plan

MODULE = "appliance.sovereignty.egress.child"
PATIENCE_SECONDS = 10.0
"""How much longer than its attempts an answer may take, its own start included."""
CHUNK = 65536
_ENDED = "the process that tries has ended: restart the gateway"


class Prober:
    """A process that waits to be asked; `close` it."""

    def __init__(self, process: "subprocess.Popen[bytes]", plan: Plan) -> None:
        self._process, self._plan = process, plan
        self._in_use = threading.Lock()
        self._asked = 0
        self._unread = b""

    @classmethod
    def start(cls, plan: Plan) -> "Prober":
        """
        Start it; it tries nothing before it is asked.

        To be called before this process puts up a wall, which its children inherit.

        Raises:
            OSError: no process can be started.
        """
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        prober = cls(process, plan)
        prober._write(json.dumps(plan.to_json()))
        return prober

    def observe(self) -> Observation:
        """Have everything tried, and wait for what came of it; blocks."""
        with self._in_use:
            return self._observe()

    def _observe(self) -> Observation:
        self._asked += 1
        latest = time.monotonic() + self._plan.timeout_seconds + PATIENCE_SECONDS
        try:
            self._write(str(self._asked))
            while True:
                answer = self._read(latest)
                if answer["number"] == self._asked:
                    return Observation.from_json(answer)
        except TimeoutError:
            return _nothing("the process that tries did not answer in time")
        except (OSError, EOFError, ValueError):
            return _nothing(_ENDED)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        with self._in_use:  # whoever waits for an answer has seen by now that none will come
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        self._process.stdin.write(f"{line}\n".encode())

    def _read(self, latest: float) -> Any:  # noqa: ANN401 - JSON of our own
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
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
