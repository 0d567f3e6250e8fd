"""
Durable writes: every file that must survive a power cut is written through these functions.

A file is durable once it was flushed itself, and its name once the directory was.  Failures are `OSError`:
callers translate them.  A file that others read has its whole content as soon as it has its name: a crash
inside `write_atomically` leaves the old file or the new one, inside `create_private` the new one or none.
"""

import fcntl
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

OWNER_ONLY, FOR_ALL = 0o600, 0o644
OWNER_ONLY_UMASK = 0o077


def sync_file(file: IO[bytes] | IO[str]) -> None:
    """Flush a file to the disk; its name may need `sync_directory`."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make new, renamed and removed names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(directory)


def create_private(path: Path, content: bytes) -> None:
    """Create a durable file that only its owner can read; FileExistsError if the name is taken."""
    # Random, as gateways in several pods, each process 1, may share the directory.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write(temporary, content, OWNER_ONLY)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_atomically(path: Path, content: bytes, *, temporary: Path | None = None, mode: int = 0o666) -> None:
    """
    Replace a file, durably; `temporary`, in the same directory, is written first and removed on failure.

    With `FOR_ALL`, others can read it whatever the umask.
    """
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        _write(temporary, content, mode)
        temporary.replace(path)
        # Without this, a power cut may bring the old file back.
        sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        if mode == FOR_ALL:
            os.fchmod(descriptor, mode)
        file.write(content)
        sync_file(file)


def write_private(path: Path, text: str) -> None:
    write_atomically(path, text.encode(), mode=OWNER_ONLY)


def open_locked(path: Path, *, wait: bool = False, mode: int = OWNER_ONLY) -> BinaryIO:
    """
    Open a file for reading and appending; its lock ends with it.  BlockingIOError if held, without `wait`.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file
