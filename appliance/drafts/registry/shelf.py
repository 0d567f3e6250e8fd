"""
The directory of registered drafts, and how one more gets into it.

    D/revisions/<64 hex>/weights/...     the draft itself, read-only
    D/revisions/<64 hex>/revision.json   what is said of it, with revision.sig
    D/revisions/<64 hex>/origin.json     what somebody else had said of it, with origin.sig

A draft is filled under a name of its own, file by file, each flushed and read back; then its directory
is renamed.  So whoever looks finds a whole draft or none.  What a crash left is gone on with by the same
draft, and swept by the next other one.  Writers take turns by a lock, which the kernel lets go of
however they end.
"""

import hashlib
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from appliance.drafts.registry.revision import REVISION, SIGNATURE
from appliance.drafts.registry.source import WEIGHTS, DraftSource, describe_file, read_small
from appliance.errors import (
    BundleRefusedError,
    BundleStorageError,
    ConfigurationError,
    DraftRefusedError,
    DraftStorageError,
)
from appliance.infra.files import open_locked, sync_directory
from appliance.sovereignty.bundle.copying import PARTIAL, file_chunks, storage_error
from appliance.sovereignty.bundle.manifest import BundleFile
from appliance.sovereignty.bundle.placing import PASSABLE, Placement, check_room, clear_leftovers, stage

REVISIONS = "revisions"
ORIGIN, ORIGIN_SIGNATURE = "origin.json", "origin.sig"
PAGES = (REVISION, SIGNATURE, ORIGIN, ORIGIN_SIGNATURE)
LOCK = "registry.lock"
_NAME = re.compile(r"[0-9a-f]{64}")


class Shelf:
    """The registered drafts as directories."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._home = directory / REVISIONS

    def names(self) -> tuple[str, ...]:
        """
        Return the hex digits of every draft there is a directory of, sorted.

        Raises:
            DraftStorageError: the directory cannot be read.
        """
        try:
            return tuple(sorted(path.name for path in self._home.iterdir() if _NAME.fullmatch(path.name)))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise DraftStorageError(f"cannot read the drafts in {self._home}: {error.strerror}") from error

    def weights(self, name: str) -> Path:
        """Where the files of a draft lie."""
        return self._home / name / WEIGHTS

    def page(self, name: str, page: str) -> bytes:
        """
        Return one of the small files beside a draft.

        Raises:
            DraftRefusedError: it cannot be read.
        """
        return read_small(self._home / name / page)

    def pages(self, name: str) -> dict[str, bytes]:
        """
        Return all the small files beside a draft.

        Raises:
            DraftRefusedError: one cannot be read.
        """
        return {page: self.page(name, page) for page in PAGES if (self._home / name / page).exists()}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """
        Wait until nobody else writes here, and keep others waiting.

        Raises:
            DraftStorageError: the directory cannot be made or locked.
        """
        lock = self._directory / LOCK
        try:
            self._prepare()
            held = open_locked(lock, wait=True)
        except OSError as error:
            raise _storage_error(lock, error) from error
        with held:
            yield

    def check_room(self, source: DraftSource) -> None:
        """
        Check that a draft fits on the disk.

        Raises:
            DraftStorageError: it does not.
        """
        placement, _contents = self._placement(source, {})
        with _as_draft_errors(source):
            check_room([placement])

    def put(self, source: DraftSource, pages: Mapping[str, bytes]) -> None:
        """
        Bring in a draft with what is said of it, or put right a damaged one; only while `alone`.

        Raises:
            DraftRefusedError: a file of the source changed while it was copied.
            DraftStorageError: a file cannot be written.
        """
        placement, contents = self._placement(source, pages)
        clear_leftovers([placement])

        def chunks(file: BundleFile) -> Iterator[bytes]:
            content = contents[file.sha256]
            return iter([content]) if isinstance(content, bytes) else file_chunks(content)

        try:
            _tidy(placement)
            if placement.final.exists():
                shutil.rmtree(placement.staged, ignore_errors=True)
            else:
                # Before the first flush of the directory above, or a power cut could lose its name.
                _make_passable(placement.staged)
                _make_passable(placement.staged / WEIGHTS)
            with _as_draft_errors(source):
                check_room([placement])
                stage(placement, chunks)
            sync_directory(placement.final)
        except OSError as error:
            raise _storage_error(placement.final, error) from error

    def _placement(
        self, source: DraftSource, pages: Mapping[str, bytes]
    ) -> tuple[Placement, dict[str, bytes | Path]]:
        """Where everything goes, and what goes there by its SHA-256."""
        files = {f"{WEIGHTS}/{name}": file for name, file in source.files.items()}
        contents: dict[str, bytes | Path] = {
            file.sha256: source.weights.path / name for name, file in source.files.items()
        }
        for page, content in pages.items():
            file = describe_file(len(content), hashlib.sha256(content).hexdigest())
            files[page], contents[file.sha256] = file, content
        name = source.digest.removeprefix("sha256:")
        return Placement(home=self._home, version=name, files=files), contents

    def _prepare(self) -> None:
        """Make the directories above, so that a power cut does not lose their names."""
        missing = [each for each in self._home.parents if not each.exists()]
        for directory in (*reversed(missing), self._home):
            _make_passable(directory)
            sync_directory(directory.parent)


def _tidy(placement: Placement) -> None:
    """
    Remove what earlier tries left in a draft's directory that is no part of it.

    Raises:
        DraftStorageError: something else is in it.
        OSError: it cannot be removed.
    """
    for place in (placement.final, placement.staged):
        for found in sorted(place.rglob("*")):
            path = found.relative_to(place).as_posix()
            if path in placement.files or (found.is_dir() and not found.is_symlink()):
                continue
            if place == placement.staged or path in PAGES or path.endswith(PARTIAL):
                found.unlink()
            else:
                raise DraftStorageError(f"{found} is no part of the draft: move it away, and run this again")


def _make_passable(directory: Path) -> None:
    """Make a directory that workers may pass, whatever the umask, and whatever came in between last time."""
    directory.mkdir(exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) != PASSABLE:
        directory.chmod(PASSABLE)


@contextmanager
def _as_draft_errors(source: DraftSource) -> Iterator[None]:
    """Say in the words of drafts what copying says in those of bundles."""
    try:
        yield
    except (BundleRefusedError, ConfigurationError) as error:
        raise DraftRefusedError(
            f"the draft in {source.home} changed while it was copied: run this again once it is left alone"
        ) from error
    except BundleStorageError as error:
        raise DraftStorageError(f"{error}; the registry holds no half of it") from error


def _storage_error(path: Path, error: OSError) -> DraftStorageError:
    return DraftStorageError(f"{storage_error(path, error)}; the registry holds no half of it")
