"""
Evaluations on disk, one directory per candidate in the registry's directory.

    D/evaluations/<64 hex of draft>/report.json, report.html
    D/evaluations/<64 hex of draft>/work/<hash>/<arm>-<number>.json

The page is written before the report, so a report.json always has its page, or a newer one.  `work` holds the
finished steps of an evaluation that has not ended, so that a killed one resumes; a crash loses only the step
in progress.
"""

import hashlib
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation.evaluation_results import Evaluation, StepResult
from appliance.errors import DraftNotFoundError, DraftRefusedError, DraftStorageError
from appliance.infra.canonical_json import canonical
from appliance.infra.files import open_locked, write_private
from appliance.speculation.values import Expectation

EVALUATIONS, REPORT, PAGE = "evaluations", "report.json", "report.html"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


def evaluation_directory(directory: Path, draft: str) -> Path:
    """In that of the registry; raises `DraftNotFoundError` if `draft` is not a digest."""
    found = DIGEST.fullmatch(draft)
    if found is None:
        raise DraftNotFoundError(f"{draft!r} is no digest of a draft: it is sha256: and 64 hex digits")
    return directory / EVALUATIONS / found[1]


def load_evaluation(directory: Path, draft: str) -> Evaluation | None:
    """The latest report about a draft, if any; raises `DraftRefusedError` and `DraftStorageError`."""
    path = evaluation_directory(directory, draft) / REPORT
    with storage_errors(path):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    evaluation = Evaluation.decode(content, str(path))
    if evaluation.draft != draft:
        raise DraftRefusedError(f"{path} is about another draft: evaluate this one again")
    return evaluation


def load_measured(directory: Path, draft: str, target: str) -> dict[str, Expectation]:
    """What a complete evaluation with this target measured, if there is one; raises as `load_evaluation`."""
    evaluation = load_evaluation(directory, draft)
    if evaluation is None or not evaluation.complete or evaluation.target != target:
        return {}
    return evaluation.expected


def save_evaluation(directory: Path, evaluation: Evaluation, page: str) -> Path:
    """Write a report and its HTML page durably; return the report's path; raises `DraftStorageError`."""
    home = evaluation_directory(directory, evaluation.draft)
    with storage_errors(home):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(home / PAGE, page)
        write_private(home / REPORT, evaluation.encode().decode())
    return home / REPORT


class FinishedSteps:
    """
    The finished steps of one evaluation; every method raises `DraftStorageError`.

    The hash in their path is of everything the results depend on: another evaluation never finds them.
    """

    def __init__(self, directory: Path, depends: Mapping[str, Any]) -> None:
        self._all = directory
        self._own = directory / hashlib.sha256(canonical(depends)).hexdigest()[:32]

    def open(self) -> tuple[StepResult, ...]:
        """Read them, and delete those of other evaluations and damaged ones, which are measured again."""
        with storage_errors(self._own):
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            for other in self._all.iterdir():
                if other != self._own:
                    shutil.rmtree(other)
            return tuple(self._read())

    def keep(self, result: StepResult) -> None:
        with storage_errors(self._own):
            write_private(self._own / f"{result.arm}-{result.number}.json", result.encode().decode())

    def clear(self) -> None:
        with storage_errors(self._all):
            shutil.rmtree(self._all, ignore_errors=True)

    def _read(self) -> Iterator[StepResult]:
        for path in sorted(self._own.glob("*.json")):
            try:
                yield StepResult.decode(path.read_bytes(), path.name)
            except DraftRefusedError:
                path.unlink()


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DraftStorageError` that names the path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        message = f"cannot read or write {path}: {reason}; make room or grant access, and run this again"
        raise DraftStorageError(message) from error


@contextmanager
def evaluation_lock(directory: Path) -> Iterator[None]:
    """Exclusive for what is measured in `directory`; the kernel releases it if the process is killed."""
    with storage_errors(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = open_locked(directory / ".lock")
        except BlockingIOError as error:
            message = f"another process measures here ({directory}): wait for it, or end it"
            raise DraftRefusedError(message) from error
    with lock:
        yield


@contextmanager
def control_token(directory: Path) -> Iterator[tuple[str, Path]]:
    """A token for the workers of one measurement, and the file that holds it as long as the context."""
    token, file = secrets.token_hex(32), directory / "control.token"
    with storage_errors(file):
        write_private(file, token + "\n")
    try:
        yield token, file
    finally:
        file.unlink(missing_ok=True)
