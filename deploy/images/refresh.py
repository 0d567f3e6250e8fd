"""
Refresh a draft: harvest, train and evaluate, one after the other, as a Job or a service of compose.

    refresh.py --config FILE --state DIRECTORY --purpose WHY [--run NAME] [--minutes N | --steps N] [--gpu]

Each step is a command of `appliance draft`; further arguments of one are given as `--train=--unroll
--train=5`.  The result of a step is stored before the next begins, so an interrupted run resumes,
and a finished one does nothing more.  An operator puts the draft into service.

Exit codes: 0 for a draft that passed, 3 for one that was refused, 64 for wrong arguments, 75 where a GPU is
in use; otherwise that of the command that failed, 130 if it was stopped.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

PASSED, REFUSED, USAGE, IN_USE = 0, 3, 64, 75
ENDS = {"passed": PASSED, "refused": REFUSED}
"""Exit code by verdict."""
MADE = re.compile(r"(?:data set +)?(sha256:[0-9a-f]{64})\b")
"""Prefix of the line that names the result of a step."""
STEPS = ("harvest", "train", "evaluate")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
FREE_SHARE = 0.1
"""Maximum fraction of memory in use on an idle GPU."""
QUERY = ("nvidia-smi", "--query-gpu=index,memory.used,memory.total", "--format=csv,noheader,nounits")


class EndedError(Exception):
    """Ends the refresh with an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Run:
    """Progress of one refresh."""

    dataset: str | None = None
    """Digest of the harvested data set."""
    draft: str | None = None
    """Digest of the trained draft."""
    verdict: str | None = None
    """`passed` or `refused`, once it has ended."""


class Runs:
    """All refreshes, one small file each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, name: str) -> Run:
        """Progress of a run; empty for an unknown one."""
        path = self._path(name)
        try:
            return Run(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Run()
        except (OSError, ValueError, TypeError) as error:
            raise EndedError(1, f"{path} cannot be read ({error}): remove it to start again") from error

    def write(self, name: str, run: Run) -> None:
        """Replace the record of a run; after a crash it is the old one or the new one."""
        path = self._path(name)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with fresh.open("w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            # Without this a power cut could lose the name, and the run would harvest a second time.
            directory = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise EndedError(1, f"cannot write {path}: {error.strerror}") from error

    def unfinished(self) -> str | None:
        """The newest run that has not ended."""
        names = sorted(path.stem for path in self._directory.glob("[!.]*.json"))
        return next((name for name in reversed(names) if self.read(name).verdict is None), None)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"


class Parser(argparse.ArgumentParser):
    """A parser that raises `EndedError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise the error of the command line."""
        raise EndedError(USAGE, message)


class Commands:
    """Runs commands of the appliance, and forwards SIGTERM to them."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._running: subprocess.Popen[str] | None = None
        self._stopped = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def draft(self, *words: str) -> tuple[int, str]:
        """
        Run `appliance draft ...`; what it prints is shown, and returned with its exit code.

        Raises:
            EndedError: this process received a stop signal.
        """
        say(f"appliance draft {words[0]}")
        self._refuse_stopped()
        command = ["appliance", "draft", *words, "--config", str(self._config)]
        printed: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ours
            self._running = process
            if self._stopped:  # between the check above and the line above
                process.terminate()
            for line in process.stdout or ():
                sys.stdout.write(line)
                sys.stdout.flush()
                printed.append(line)
        self._running = None
        self._refuse_stopped()
        return process.returncode, "".join(printed)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        if self._running is not None:
            self._running.terminate()

    def _refuse_stopped(self) -> None:
        if self._stopped:
            raise EndedError(130, "stopped: run the same command again to resume")


def refresh(asked: argparse.Namespace, runs: Runs, commands: Commands) -> int:
    """Run the remaining steps; returns the exit code for the verdict."""
    name = asked.run or runs.unfinished() or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    run = runs.read(name)
    if run.verdict is not None:
        say(f"the run {name} ended with {run.draft} {run.verdict}: nothing is done; name another with --run")
        return ENDS[run.verdict]
    say(f"run {name}")
    if asked.gpu:
        refuse_gpu_in_use()
    if run.dataset is None:
        words = ("harvest", "--purpose", asked.purpose, *asked.harvest)
        run = replace(run, dataset=made(commands.draft(*words), "harvest"))
        runs.write(name, run)
    if run.draft is None:
        for_long = ("--steps", str(asked.steps)) if asked.steps else ("--minutes", str(asked.minutes))
        words = ("train", "--dataset", str(run.dataset), *for_long, *asked.train)
        run = replace(run, draft=made(commands.draft(*words), "train"))
        runs.write(name, run)
    words = ("evaluate", str(run.draft), "--dataset", str(run.dataset), "--json", *asked.evaluate)
    verdict = judged(commands.draft(*words))
    runs.write(name, replace(run, verdict=verdict))
    if verdict == "passed":
        say(f"{run.draft} passed; to put it into service: appliance draft promote {run.draft}")
    else:
        say(f"{run.draft} was refused, and is not in service")
    return ENDS[verdict]


def made(result: tuple[int, str], step: str) -> str:
    """The digest of a step's result: the last line that begins with one."""
    code, printed = result
    if code:
        raise EndedError(code, f"appliance draft {step} failed with exit code {code}; its last line says why")
    found = [match[1] for line in printed.splitlines() if (match := MADE.match(line))]
    if not found:
        raise EndedError(1, f"appliance draft {step} ended well and named nothing it made")
    return found[-1]


def judged(result: tuple[int, str]) -> str:
    """The verdict in an evaluation's report; a refusal is a verdict, a failure is not."""
    code, printed = result
    try:
        verdict = json.loads(printed)["verdict"]
    except (ValueError, KeyError, TypeError):
        verdict = None
    if verdict not in ENDS:
        raise EndedError(code or 1, f"appliance draft evaluate failed with exit code {code}: no verdict")
    return str(verdict)


def refuse_gpu_in_use() -> None:
    """
    Refuse a GPU in use: with a worker on it, both would lack memory and speed.

    Raises:
        EndedError: one is in use, or there is none.
    """
    try:
        shown = subprocess.run(QUERY, capture_output=True, text=True, check=True).stdout  # noqa: S603 - fixed
    except (OSError, subprocess.CalledProcessError) as error:
        message = "no GPU is here: give the refresh one that no worker has (compose: REFRESH_GPU)"
        raise EndedError(USAGE, message) from error
    for line in shown.splitlines():
        index, used, total = (each.strip() for each in line.split(","))
        # A MIG partition does not report its use, and belongs to this container.
        if used.isdecimal() and total.isdecimal() and int(used) > FREE_SHARE * int(total):
            holds = f"GPU {index} is in use ({used} of {total} MiB)"
            raise EndedError(IN_USE, f"{holds}: give the refresh one that no worker has")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; raises EndedError if it is invalid."""
    parser = Parser(prog="refresh.py")
    parser.add_argument("--config", type=Path, required=True, help="settings (YAML)")
    parser.add_argument("--state", type=Path, required=True, help="directory that says how far runs are")
    parser.add_argument("--purpose", default="", help="why content is read, for the audit log")
    parser.add_argument("--run", default="", help="name; default: the unfinished one, or a new one")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training (default 60)")
    parser.add_argument("--steps", type=int, default=0, help="of training, in place of minutes")
    parser.add_argument("--gpu", action="store_true", help="refuse to begin without a GPU that is free")
    for step in STEPS:
        parser.add_argument(
            f"--{step}", action="append", default=[], help=f"argument of `appliance draft {step}`"
        )
    asked = parser.parse_args(arguments)
    if not asked.purpose.strip():
        raise EndedError(USAGE, 'say --purpose "why content is read": the audit log records it')
    if asked.run and not NAME.fullmatch(asked.run):
        raise EndedError(USAGE, "--run is a name of letters, digits, dots and dashes")
    return asked


def say(line: str) -> None:
    """Print a line for the log."""
    sys.stderr.write(f"refresh: {line}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Run one refresh."""
    try:
        asked = parse(arguments)
        return refresh(asked, Runs(asked.state), Commands(asked.config))
    except EndedError as error:
        say(str(error))
        return error.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
