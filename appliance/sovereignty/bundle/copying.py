"""
Verified copies that survive a power cut: each file is complete or absent.

The order is always: write to a temporary file, flush to the disk, read back, rename, flush the directory.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from appliance.errors import BundleError, BundleRefusedError, BundleStorageError, ConfigurationError
from appliance.infra.files import sync_directory, sync_file, write_atomically
from appliance.sovereignty.bundle.manifest import BundleFile
from appliance.sovereignty.bundle.source import CHUNK_BYTES

PARTIAL = ".partial"
"""Suffix of incomplete files; a later run overwrites them."""


def storage_error(path: Path, error: OSError) -> BundleStorageError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return BundleStorageError(f"the disk is full at {path}: make room and run this again")
    return BundleStorageError(f"cannot write {path}: {error.strerror}")


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a small file atomically; raises BundleStorageError."""
    try:
        write_atomically(path, content, temporary=path.with_name(path.name + PARTIAL), mode=mode)
    except OSError as error:
        raise storage_error(path, error) from error


def copy_verified(chunks: Iterable[bytes], file: BundleFile, path: Path) -> None:
    """Write one file, verified while writing and read back; raises a BundleError if it is not the same."""
    partial = path.with_name(path.name + PARTIAL)
    digest = hashlib.sha256()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w+b") as written:
            for chunk in chunks:
                digest.update(chunk)
                written.write(chunk)
            if digest.hexdigest() != file.sha256:
                raise BundleRefusedError(f"{file.path} does not have the hash in the manifest: copy it again")
            sync_file(written)
            # Otherwise the kernel's cache is read back, not the disk.
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            written.seek(0)
            if hashlib.file_digest(written, "sha256").hexdigest() != file.sha256:
                raise BundleStorageError(f"{path} reads back differently than written: the disk is faulty")
        partial.replace(path)
        sync_directory(path.parent)
    except (OSError, BundleError) as error:
        # The audit log may need the space of the incomplete file.
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def holds(path: Path, file: BundleFile) -> bool:
    """Whether a path is a regular file with the bytes of the manifest; reads the whole file."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
            return False
        with path.open("rb") as found:
            return hashlib.file_digest(found, "sha256").hexdigest() == file.sha256
    except OSError:
        return False


def file_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file on the machine that builds; raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def making(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed on success; raises ConfigurationError if it exists."""
    if directory.exists() or directory.is_symlink():
        raise ConfigurationError(f"{directory} exists already: name a directory that does not")
    place = directory.with_name(f".{directory.name}{PARTIAL}")
    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    except OSError as error:
        raise storage_error(place, error) from error
    try:
        yield place
        sync_directory(place)
        place.rename(directory)
        sync_directory(directory.parent)
    except OSError as error:
        raise storage_error(directory, error) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
