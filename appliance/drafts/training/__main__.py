"""
The training process: `python -m appliance.drafts.training`; see `appliance.drafts.training.small.training`.

The kernel denies it every TCP connection before anything that starts threads is imported.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from appliance.drafts.training.progress import Point
from appliance.drafts.training.training_job import Job, read_samples
from appliance.errors import ApplianceError
from appliance.sovereignty.landlock import allow_connections


def main() -> int:
    """Train the job on standard input; errors go to standard output as an event."""
    stops: list[int] = []
    # Ctrl-C reaches the command, which sends SIGTERM to this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))  # the current step still finishes
    with suppress(OSError):  # kernels without it: the offline environment remains
        allow_connections(())
    try:
        return _train(stops)
    except ApplianceError as error:
        return _failed(str(error))
    except BrokenPipeError:
        # The parent is gone; the last checkpoint is on disk.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        return _failed(f"{error.name} is not installed here: train where a worker runs")
    except Exception as error:  # libraries raise anything, and the operator needs a message
        first = str(error).strip().partition("\n")[0]
        if "out of memory" in first:
            return _failed("the device is out of memory: choose a smaller --batch or --window")
        _failed(f"the training failed with {type(error).__name__}: {first}")
        raise


def _train(stops: list[int]) -> int:
    job = Job.from_json(json.loads(sys.stdin.readline()))
    given = read_samples(sys.stdin)
    _emit({"event": "loading", "samples": len(given.samples), "missing": given.missing})
    from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415 - takes seconds

    from appliance.drafts.training.small.training import Training  # noqa: PLC0415 - imports torch

    disable_progress_bar()  # type: ignore[no-untyped-call]

    def report(point: Point) -> None:
        _emit({"event": "step", **point.to_json()})

    ended = Training(job, given, report=report, is_stopped=lambda: bool(stops)).run()
    _emit({"event": "finished" if ended.finished else "stopped", "step": ended.step})
    return 0


def _failed(message: str) -> int:
    _emit({"event": "failed", "message": message})
    return 1


def _emit(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
