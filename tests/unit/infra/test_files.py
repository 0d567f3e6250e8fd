"""Durable writes: whole or absent, private where they have to be, locked for one process."""

import errno
import os
from pathlib import Path

import pytest

from appliance.infra import files
from appliance.infra.files import create_private, open_locked, write_atomically, write_private


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_write_private_replaces_a_file_that_others_could_read(tmp_path: Path):
    """The new file has mode 0600 even if the old one had not."""
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), mode(path)) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch, call: str):
    """The temporary file is removed."""
    path = tmp_path / "head"
    path.write_bytes(b"old")

    def fail(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_flushes_the_file_before_the_rename_and_the_directory_after(tmp_path: Path, monkeypatch):
    """In any other order a power cut could leave an empty file under the name."""
    flushed: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", record)
    write_atomically(tmp_path / "head", b"new", temporary=tmp_path / "head.new")
    assert flushed == [str(tmp_path / "head.new"), str(tmp_path)]


def test_create_private_never_replaces_a_file(tmp_path: Path):
    """Two makers of one key do not both win."""
    path = tmp_path / "key"
    create_private(path, b"first")
    with pytest.raises(FileExistsError):
        create_private(path, b"second")
    assert (path.read_bytes(), mode(path)) == (b"first", 0o600)


def test_create_private_shows_a_whole_file_or_none(tmp_path: Path, monkeypatch):
    """A reader beside the maker must not take a part of a key for the key."""
    path = tmp_path / "key"

    def fail(_file):
        assert not path.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync_file", fail)
    with pytest.raises(OSError, match="No space left"):
        create_private(path, b"secret")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_held_until_the_file_is_closed(tmp_path: Path):
    """A second holder is refused, not queued."""
    path = tmp_path / "lock"
    with open_locked(path), pytest.raises(BlockingIOError):
        open_locked(path)
    open_locked(path).close()
