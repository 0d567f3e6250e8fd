"""
The directory of registered drafts.

    D/revisions/<64 hex>/weights/...     the draft, read-only
    D/revisions/<64 hex>/revision.json   its revision, with revision.sig
    D/revisions/<64 hex>/origin.json     a revision signed elsewhere, with origin.sig

A draft is written under a temporary name, each file flushed and read back; then its directory is renamed, so
readers see a whole draft or none.  After a crash the same draft resumes, and another one removes the
leftovers.  Writers take turns by a lock that the kernel releases when they end.
"""

import hashlib
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from appliance.drafts.registry.draft_source import WEIGHTS, DraftSource, describe_file, read_small
from appliance.drafts.registry.revision import REVISION, SIGNATURE
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


class RevisionStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._home = directory / REVISIONS

    def names(self) -> tuple[str, ...]:
        """Hex digits of every draft's directory, sorted."""
        try:
            return tuple(sorted(path.name for path in self._home.iterdir() if _NAME.fullmatch(path.name)))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise DraftStorageError(f"cannot read the drafts in {self._home}: {error.strerror}") from error

    def weights(self, name: str) -> Path:
        return self._home / name / WEIGHTS

    def page(self, name: str, page: str) -> bytes:
        return read_small(self._home / name / page)

    def pages(self, name: str) -> dict[str, bytes]:
        return {page: self.page(name, page) for page in PAGES if (self._home / name / page).exists()}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other writers; waits for them."""
        lock = self._directory / LOCK
        try:
            self._prepare()
            held = open_locked(lock, wait=True)
        except OSError as error:
            raise _storage_error(lock, error) from error
        with held:
            yield

    def check_room(self, source: DraftSource) -> None:
        placement, _contents = self._placement(source, {})
        with _draft_errors(source):
            check_room([placement])

    def put(self, source: DraftSource, pages: Mapping[str, bytes]) -> None:
        """Write a draft with its small files, or repair a damaged one; only while locked."""
        placement, contents = self._placement(source, pages)
        clear_leftovers([placement])

        def chunks(file: BundleFile) -> Iterator[bytes]:
            content = contents[file.sha256]
            return iter([content]) if isinstance(content, bytes) else file_chunks(content)

        try:
            _remove_leftovers(placement)
            if placement.final.exists():
                shutil.rmtree(placement.staged, ignore_errors=True)
            else:
                # Before the first flush of the directory above, or a power cut could lose its name.
                _make_enterable(placement.staged)
                _make_enterable(placement.staged / WEIGHTS)
            with _draft_errors(source):
                check_room([placement])
                stage(placement, chunks)
            sync_directory(placement.final)
        except OSError as error:
            raise _storage_error(placement.final, error) from error

    def _placement(
        self, source: DraftSource, pages: Mapping[str, bytes]
    ) -> tuple[Placement, dict[str, bytes | Path]]:
        """The destination, and the contents by SHA-256."""
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
        """Make the directories above; durable, so that a power cut cannot lose their names."""
        missing = [each for each in self._home.parents if not each.exists()]
        for directory in (*reversed(missing), self._home):
            _make_enterable(directory)
            sync_directory(directory.parent)


def _remove_leftovers(placement: Placement) -> None:
    for place in (placement.final, placement.staged):
        for found in sorted(place.rglob("*")):
            path = found.relative_to(place).as_posix()
            if path in placement.files or (found.is_dir() and not found.is_symlink()):
                continue
            if place == placement.staged or path in PAGES or path.endswith(PARTIAL):
                found.unlink()
            else:
                raise DraftStorageError(
                    f"{found} is not part of the draft: move it away and run the command again"
                )


def _make_enterable(directory: Path) -> None:
    """Make a directory that workers may enter, whatever the umask and earlier attempts."""
    directory.mkdir(exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) != PASSABLE:
        directory.chmod(PASSABLE)


@contextmanager
def _draft_errors(source: DraftSource) -> Iterator[None]:
    try:
        yield
    except (BundleRefusedError, ConfigurationError) as error:
        raise DraftRefusedError(
            f"the draft in {source.home} changed during the copy: run the command again"
        ) from error
    except BundleStorageError as error:
        raise DraftStorageError(f"{error}; nothing was registered") from error


def _storage_error(path: Path, error: OSError) -> DraftStorageError:
    return DraftStorageError(f"{storage_error(path, error)}; nothing was registered")
