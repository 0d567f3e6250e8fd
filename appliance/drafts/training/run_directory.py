"""
The directory of a training run.

    run.json        identity of the run, written before the first step; it must not change
    checkpoint.pt   the last checkpoint
    progress.jsonl  progress
    log.txt         output of the libraries
    draft/          the finished draft; it appears whole
    published.json  its digest, once it is registered and in the audit log

None of these files holds content of a data set.
"""

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.drafts.training.training_job import Job, TrainingSet
from appliance.errors import ConfigurationError, DraftRefusedError, DraftStorageError
from appliance.infra.files import open_locked, sync_directory, sync_files, write_private

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
OBSOLETE = ("checkpoint.pt", "checkpoints", "parent")
"""Files a finished training no longer needs: several times as large as the draft."""
NAME_DIGITS = 12
"""Hex digits of a generated run name."""
INPUTS = {
    "target": "the target's weights",
    "parent": "the draft it starts from",
    "dataset": "the data set",
    "samples": "the remaining samples, because content was erased or restored",
    "corpus": "the general text",
    "recipe": "the recipe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    path: Path

    @property
    def draft(self) -> Path:
        return self.path / "draft"

    @property
    def partial(self) -> Path:
        """Where the finished draft is assembled."""
        return self.path / "draft.partial"

    @property
    def progress(self) -> Path:
        return self.path / "progress.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def published(self) -> str | None:
        """Digest of the draft, once it is registered and recorded."""
        content = _read(self.path / "published.json")
        return None if content is None else str(content["draft"])

    def publish(self, digest: str) -> None:
        """Record that the draft is registered; a run that crashed before this finds it in the registry."""
        with storage_errors(self.path):
            write_private(self.path / "published.json", json.dumps({"draft": digest}) + "\n")
            for name in OBSOLETE:
                path = self.path / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def refuse_changed(self, identity: Mapping[str, Any]) -> bool:
        """Whether the run has begun; DraftRefusedError if it began with other values of `identity`."""
        before = _read(self.path / "run.json")
        if before is None:
            return False
        changed = [name for name in identity if name in before and before[name] != identity[name]]
        if changed:
            raise DraftRefusedError(
                f"the run {self.path.name} cannot resume: {INPUTS[changed[0]]} changed since it began; "
                "start another with --run"
            )
        return True

    def claim(self, job: Job, given: TrainingSet) -> None:
        """Bind the run to this job; raises DraftRefusedError if it is bound to another."""
        identity = {**job.identity, "samples": samples_digest(given)}
        if not self.refuse_changed(identity):
            with storage_errors(self.path):
                write_private(self.path / "run.json", json.dumps(identity, indent=2) + "\n")

    @contextmanager
    def assembled(self) -> Iterator[Path]:
        """A directory to write the draft's files into; it becomes `draft` when all of them are durable."""
        with storage_errors(self.path):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(mode=0o700)
            yield self.partial
            sync_files(self.partial)
            self.partial.rename(self.draft)
            sync_directory(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The kernel releases the lock when this process ends; DraftRefusedError if another one has it."""
        with storage_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                lock = open_locked(self.path / "lock")
            except BlockingIOError as error:
                raise DraftRefusedError(f"the run {self.path.name} is in use by another process") from error
        with lock:
            yield


def run_directory(drafts: Path, job_identity: Mapping[str, Any], name: str | None) -> RunDirectory:
    """The directory of a run; an unnamed run is named after its identity."""
    if name is None:
        canonical = json.dumps(job_identity, sort_keys=True).encode()
        name = hashlib.sha256(canonical).hexdigest()[:NAME_DIGITS]
    if not NAME.fullmatch(name):
        raise ConfigurationError("--run must be at most 64 lower-case letters, digits, dots and dashes")
    return RunDirectory(path=drafts / "runs" / name)


def samples_digest(given: TrainingSet) -> str:
    return hashlib.sha256("".join(sorted(used_lines(given.samples))).encode()).hexdigest()


def used_lines(samples: Iterable[Any]) -> list[str]:
    """The lines of `used.txt`: `<request_id> <digest>` per sample, sorted."""
    return sorted(f"{sample.request_id} {sample.digest}\n" for sample in samples)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a DraftStorageError on `path`."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            problem = f"the disk is full at {path}: free space and run the same command to resume"
        raise DraftStorageError(problem) from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DraftStorageError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DraftStorageError(f"{path} holds no JSON object")
    return content
