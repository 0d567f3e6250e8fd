"""
Slow builds, kept for later runs in a directory outside the checkout.

An entry is named after the hash of its inputs: a change of them makes another entry.  It is made elsewhere
and renamed, and its size is checked before use, so a half-written or damaged entry is made again.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.container_engine import remove_tree

VARIABLE = "SOVEREIGN_TEST_CACHE"
"""Names another directory."""
KEPT_SECONDS = 3 * 86400
"""How long an unused entry stays: longer than any run, which may use it to its end."""
SIZE = "size.json"


class BuildCache:
    """Directories by kind and inputs; safe for several runs at once."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or _default_directory()
        self.directory.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory on the same file system; removed at the end, or by the next run if this is killed."""
        with self._locked():
            for left in self.directory.glob("run-*"):
                if (unused := _hold(left)) is not None:
                    remove_tree(left)
                    os.close(unused)
            path = Path(tempfile.mkdtemp(prefix="run-", dir=self.directory))
            held = _hold(path)
        try:
            yield path
        finally:
            remove_tree(path)
            os.close(held)

    def entry(self, kind: str, inputs: Iterable[str | Path], make: Callable[[Path], None]) -> Path:
        """
        The directory that `make` filled for these inputs, in this run or an earlier one.

        Args:
            kind: what it is, as part of its name.
            inputs: texts, files, and directories with the files in them.
            make: fills an empty directory.
        """
        path = self._path(kind, inputs)
        with self.scratch() as place:
            if not _is_whole(path):
                made = place / "made"
                made.mkdir()
                make(made)
                (made / SIZE).write_text(json.dumps(_size(made)), encoding="utf-8")
                with self._locked():
                    if path.exists():
                        path.rename(place / "damaged")
                    made.rename(path)
            with self._locked():
                os.utime(path)
                for entry in self.directory.glob("*.*"):
                    if entry.stat().st_mtime < path.stat().st_mtime - KEPT_SECONDS:
                        entry.rename(place / entry.name)
        return path

    def existing(self, kind: str, inputs: Iterable[str | Path]) -> Path | None:
        """The same directory if an earlier run filled it."""
        path = self._path(kind, inputs)
        return path if _is_whole(path) else None

    def _path(self, kind: str, inputs: Iterable[str | Path]) -> Path:
        return self.directory / f"{kind}.{digest(inputs)}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other runs from adding and removing directories."""
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def digest(inputs: Iterable[str | Path]) -> str:
    """A hash of texts, of files, and of the files in directories, with their names."""
    hashed = hashlib.sha256()
    for given in inputs:
        if isinstance(given, str):
            parts = [given.encode()]
        else:
            files = sorted(path for path in given.iterdir() if path.is_file()) if given.is_dir() else [given]
            parts = [part for file in files for part in (file.name.encode(), file.read_bytes())]
        for part in parts:
            hashed.update(len(part).to_bytes(8, "big") + part)
    return hashed.hexdigest()[:16]


def _default_directory() -> Path:
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sovereign-appliance-tests"


def _hold(path: Path) -> int | None:
    """A descriptor that holds a lock on a directory; None if another run holds it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_whole(path: Path) -> bool:
    try:
        return json.loads((path / SIZE).read_text(encoding="utf-8")) == _size(path)
    except (OSError, ValueError):
        return False


def _size(path: Path) -> list[int]:
    """Number and bytes of all files, but for the record of them."""
    sizes = [
        (Path(directory) / name).lstat().st_size
        for directory, _, names in os.walk(path)
        for name in names
        if name != SIZE
    ]
    return [len(sizes), sum(sizes)]
