"""
A private directory for files a training needs: samples in clear, and hidden states.

It is in memory (`/dev/shm`) if possible, only its owner can read it, and it is removed when the training
ends. Its path is written to the run's directory before it is made, so that the next training removes what a
killed one left.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.drafts.training.run_directory import RunDirectory
from appliance.errors import DraftRefusedError, DraftStorageError
from appliance.infra.files import write_private

MEMORY = Path("/dev/shm")  # noqa: S108 - a directory below it, private and of a random name
NOTE = "scratch.json"
PREFIX = "appliance-train-"


@contextmanager
def scratch_directory(run: RunDirectory, parent: Path | None = None) -> Iterator[Path]:
    """Make a private directory for the block; by default in memory, else in the run, which is locked."""
    clear_scratch(run)
    home = parent or (MEMORY if os.access(MEMORY, os.W_OK) else run.path)
    # The name is chosen here, so that it can be written down before the directory exists.
    path = home / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        write_private(run.path / NOTE, json.dumps({"path": str(path)}) + "\n")
        path.mkdir(mode=0o700)
    except OSError as error:
        raise DraftStorageError(f"cannot make a private directory in {home}: {error.strerror}") from error
    try:
        yield path
    finally:
        clear_scratch(run)


def clear_scratch(run: RunDirectory) -> None:
    """Remove what a training left in clear, if anything; after DraftStorageError it may still exist."""
    note = run.path / NOTE
    try:
        path = Path(json.loads(note.read_text(encoding="utf-8"))["path"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DraftStorageError(f"{note} cannot be read: remove what it names, then the file") from error
    # Only what was made here is ever removed.
    if path.name.startswith(PREFIX) and not path.is_symlink() and path.is_dir():
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise DraftStorageError(f"cannot remove {path}, which holds content: {error.strerror}") from error
    note.unlink(missing_ok=True)


def sweep_scratch(drafts: Path) -> None:
    """Remove what killed trainings left in clear; running ones are skipped."""
    for note in sorted((drafts / "runs").glob(f"*/{NOTE}")):
        run = RunDirectory(path=note.parent)
        with suppress(DraftRefusedError), run.locked():
            clear_scratch(run)


def write_samples(path: Path, rows: Iterable[str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(rows)
