"""
The directory of one training: what it is a training of, how far it is, and what came of it.

    run.json        what may not change while it lasts, written before the first step
    checkpoint.pt   where it stands
    progress.jsonl  how it went, one line now and then
    log.txt         what the libraries print
    draft/          the finished draft; it appears whole
    published.json  its digest, once it is registered and in the audit log

No content of a data set is in any of them.
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

from appliance.drafts.training.job import Given, Job
from appliance.errors import ConfigurationError, DraftRefusedError, DraftStorageError
from appliance.infra.files import open_locked, write_private

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
DRAFT = "draft"
PARTIAL = "draft.partial"
SPENT = ("checkpoint.pt", "checkpoints", "parent")
"""What a finished training has no use for: as large as the draft several times over."""
MADE_NAME = 12
"""Hex digits in the name of a run that was given none."""
WHAT = {
    "target": "the target's weights",
    "parent": "the draft it starts from",
    "dataset": "the data set",
    "samples": "what is left of the data set, because content was erased or came back",
    "corpus": "the general text",
    "recipe": "the recipe",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Paths of one training."""

    path: Path

    @property
    def draft(self) -> Path:
        """The finished draft, if it is finished."""
        return self.path / DRAFT

    @property
    def partial(self) -> Path:
        """Where the finished draft is put together."""
        return self.path / PARTIAL

    @property
    def progress(self) -> Path:
        """One line of JSON now and then."""
        return self.path / "progress.jsonl"

    @property
    def log(self) -> Path:
        """What the libraries print."""
        return self.path / "log.txt"

    @property
    def published(self) -> str | None:
        """Digest of the draft, once it is registered and recorded."""
        content = _read(self.path / "published.json")
        return None if content is None else str(content["draft"])

    def publish(self, digest: str) -> None:
        """
        Note that the draft is registered and recorded, and drop what was only needed to go on.

        A crash before leads to asking the registry again, which knows it by then.

        Raises:
            DraftStorageError: it cannot be written.
        """
        try:
            write_private(self.path / "published.json", json.dumps({"draft": digest}) + "\n")
            for name in SPENT:
                path = self.path / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def refuse_changed(self, identity: Mapping[str, Any]) -> bool:
        """
        See that the run is one of this identity, as far as both say; returns whether it has begun.

        Raises:
            DraftRefusedError: something is not as it was when the run began; the message says what.
        """
        before = _read(self.path / "run.json")
        if before is None:
            return False
        changed = [name for name in identity if name in before and before[name] != identity[name]]
        if changed:
            raise DraftRefusedError(
                f"the run {self.path.name} cannot go on, for {WHAT[changed[0]]} changed since it began: "
                "start another with --run"
            )
        return True

    def claim(self, job: Job, given: Given) -> None:
        """
        Make the run this job's, or see that it is.

        Raises:
            DraftRefusedError: something is not as it was when the run began; the message says what.
            DraftStorageError: it cannot be written.
        """
        identity = {**job.identity, "samples": samples_digest(given)}
        if self.refuse_changed(identity):
            return
        try:
            write_private(self.path / "run.json", json.dumps(identity, indent=2) + "\n")
        except OSError as error:
            raise storage_error(self.path, error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Keep every other process out of the run; the kernel lets go when this one ends, however it does.

        Raises:
            DraftRefusedError: another process is at it.
            DraftStorageError: the directory cannot be made.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_locked(self.path / "lock")
        except BlockingIOError as error:
            raise DraftRefusedError(f"the run {self.path.name} is under way in another process") from error
        except OSError as error:
            raise storage_error(self.path, error) from error
        with lock:
            yield


def run_directory(drafts: Path, job_identity: Mapping[str, Any], name: str | None) -> RunDirectory:
    """
    Where a training lives; one that has no name is named after what it is a training of.

    Raises:
        ConfigurationError: the name is none for a directory.
    """
    if name is None:
        canonical = json.dumps(job_identity, sort_keys=True).encode()
        name = hashlib.sha256(canonical).hexdigest()[:MADE_NAME]
    if not NAME.fullmatch(name):
        raise ConfigurationError("--run is a name of small letters, digits, dots, dashes: at most 64")
    return RunDirectory(path=drafts / "runs" / name)


def samples_digest(given: Given) -> str:
    """SHA-256 (hex) over which samples there are."""
    return hashlib.sha256("".join(sorted(used_lines(given.samples))).encode()).hexdigest()


def used_lines(samples: Iterable[Any]) -> list[str]:
    """One line `<request_id> <digest>` for each sample, sorted: what `used.txt` holds."""
    return sorted(f"{sample.request_id} {sample.digest}\n" for sample in samples)


def storage_error(path: Path, error: OSError) -> DraftStorageError:
    """Return what to say when a run's files could not be written."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return DraftStorageError(f"the disk is full at {path}: make room, and the same command goes on")
    return DraftStorageError(f"cannot write {path}: {error.strerror}")


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
