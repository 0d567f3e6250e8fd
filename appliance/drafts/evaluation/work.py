"""
What an evaluation has finished so far, on the disk, so that a killed one goes on where it was.

One file a step, written durably: a crash loses the step under way and nothing else.  The files lie in
a directory named by everything the results depend on, so an evaluation of anything else never finds
them.  They hold numbers and trails (`appliance.drafts.evaluation.trail`), no content.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.drafts.evaluation.results import StepResult
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.infra.canonical_json import canonical
from appliance.infra.files import open_locked, write_private

KEY_DIGITS = 32


class Work:
    """The finished steps of one evaluation."""

    def __init__(self, directory: Path, depends: Mapping[str, Any]) -> None:
        """
        Prepare; nothing is read or written yet.

        Args:
            directory: where evaluations of this candidate keep their work.
            depends: everything the results depend on, as JSON.
        """
        self._all = directory
        self._own = directory / hashlib.sha256(canonical(depends)).hexdigest()[:KEY_DIGITS]

    def open(self) -> tuple[StepResult, ...]:
        """
        Return what is finished, and drop what other evaluations of this candidate left.

        A file that cannot be read as a result counts as not there: its step is taken again.

        Raises:
            DraftStorageError: the directory cannot be read or made.
        """
        with storing(self._own):
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            for other in self._all.iterdir():
                if other != self._own:
                    shutil.rmtree(other)
            return tuple(self._read())

    def keep(self, result: StepResult) -> None:
        """
        Keep a finished step; once this returns it survives a crash.

        Raises:
            DraftStorageError: it cannot be written.
        """
        with storing(self._own):
            write_private(self._own / f"{result.arm}-{result.number}.json", result.encode().decode())

    def clear(self) -> None:
        """Drop everything; the report has been written."""
        with storing(self._all):
            shutil.rmtree(self._all, ignore_errors=True)

    def _read(self) -> Iterator[StepResult]:
        for path in sorted(self._own.glob("*.json")):
            try:
                yield StepResult.decode(path.read_bytes(), path.name)
            except DraftRefusedError:
                path.unlink()


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """
    Say of a failed read or write where it was.

    Raises:
        DraftStorageError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        message = f"cannot read or write {path}: {reason}; make room or rights, and run this again"
        raise DraftStorageError(message) from error


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """
    Hold the right to evaluate one candidate; the kernel gives it back however this process ends.

    Raises:
        DraftRefusedError: another process evaluates it.
        DraftStorageError: the directory cannot be made.
    """
    with storing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = open_locked(directory / ".lock")
        except BlockingIOError as error:
            message = f"another process evaluates this draft ({directory}): wait for it, or end it"
            raise DraftRefusedError(message) from error
    with lock:
        yield
