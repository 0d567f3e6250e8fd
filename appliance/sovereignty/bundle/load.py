"""
Load a bundle into an installation.

The order is: verify everything, place everything next to the version in service, append the audit entry,
record the installed version, and switch `current` last.  A failure before that leaves the previous version
in service, and the next run resumes.  Fails closed: what cannot be recorded is not put into service, or an
older bundle could be loaded over it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BundleStorageError, ConfigurationError
from appliance.infra.files import open_locked, sync_directory, sync_file
from appliance.sovereignty.bundle.artefacts import OTHER, files_below
from appliance.sovereignty.bundle.bundle_verifier import Bundle, Progress, verify_bundle
from appliance.sovereignty.bundle.copying import file_chunks, storage_error, write_durably
from appliance.sovereignty.bundle.engine import Engine
from appliance.sovereignty.bundle.installed import check_order, read_installed
from appliance.sovereignty.bundle.manifest import (
    BLOBS,
    BundleFile,
    BundleManifest,
    ItemKind,
    is_inner_path,
)
from appliance.sovereignty.bundle.oci_push import Registry
from appliance.sovereignty.bundle.placing import (
    Placement,
    activate,
    check_room,
    clear_leftovers,
    place_copy,
    place_files,
    place_models,
    stage,
)
from appliance.sovereignty.bundle.source import ByteCount, byte_counter, ignore_bytes
from appliance.sovereignty.bundle.tree import ItemTree


class LoadJournal:
    """
    The completed steps of one load, so that an interrupted load resumes.

    One line for each step that is complete and on the disk, flushed before the next step begins.  A crash
    loses at most the step in progress, which is then repeated; every step is idempotent.
    """

    def __init__(self, path: Path, manifest: str) -> None:
        """Resume the journal, or start one if it is absent or of another bundle; `manifest` is a digest."""
        self._path = path
        lines = _lines(path)
        self.resumed = lines[:1] == [manifest]
        """Whether an earlier run of this bundle was interrupted."""
        self._done = set(lines[1:]) if self.resumed else set()
        try:
            kept = [manifest, *sorted(self._done)]
            # Rewritten, so that the incomplete line of a crash is not continued.
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in kept)
                sync_file(file)
            sync_directory(path.parent)
        except OSError as error:
            raise storage_error(path, error) from error

    def has(self, step: str) -> bool:
        return step in self._done

    def note(self, step: str) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(step)}\n")
                sync_file(file)
        except OSError as error:
            raise storage_error(self._path, error) from error
        self._done.add(step)

    def finish(self) -> None:
        """Remove the journal.  A crash before this repeats steps that change nothing."""
        with suppress(FileNotFoundError):
            self._path.unlink()


def _lines(path: Path) -> list[str]:
    """Complete lines of a journal; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    lines: list[str] = []
    for line in text.split("\n")[:-1]:
        try:
            lines.append(str(json.loads(line)))
        except ValueError:
            break
    return lines


RECORDED = "recorded"
PUSHED = {ItemKind.IMAGE, ItemKind.CHART}
"""What a registry gets."""
"""The step after which the audit log contains the installation."""

RecordInstallation = Callable[[BundleManifest, str], None]
"""Appends the installation of a bundle, signed by a key of that name, to the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Destinations of a bundle's contents; None skips one."""

    models: Path | None = None
    files: Path | None = None
    engine: Engine | None = None
    registry: Registry | None = None

    def placements(self, manifest: BundleManifest, trees: Sequence[ItemTree]) -> list[Placement]:
        models = [] if self.models is None else place_models(trees, self.models)
        files = [] if self.files is None else place_files(manifest, trees, self.files)
        return [*models, *files]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The files of loads in the data directory."""

    directory: Path

    @property
    def installed(self) -> Path:
        return self.directory / "bundle.json"

    @property
    def journal(self) -> Path:
        """Progress of the current load."""
        return self.directory / "bundle.journal"

    @property
    def lock(self) -> Path:
        """Held while a load runs."""
        return self.directory / "bundle.lock"

    @property
    def trusted(self) -> Path:
        """The keys the site trusts, unless another file is named."""
        return self.directory / "bundle-keys.txt"


def load_bundle(
    bundle: Bundle,
    targets: Targets,
    home: Home,
    record: RecordInstallation,
    progress: Progress,
    count: ByteCount = ignore_bytes,
) -> bool:
    """
    Load a bundle; returns whether anything changed.

    Raises BundleRefusedError, BundleRollbackError, BundleIncompleteError without a difference's base,
    BundleStorageError if a disk, engine or registry failed (a second run resumes), and AuditUnavailableError.
    """
    with _alone(home):
        installed = read_installed(home.installed)
        loaded = installed.find(bundle.manifest.name)
        check_order(loaded, bundle.manifest)
        trees = verify_bundle(bundle, progress, count)
        placements = targets.placements(bundle.manifest, trees)
        clear_leftovers(placements)
        check_room(placements)
        journal = LoadJournal(home.journal, bundle.manifest.digest)
        if journal.resumed:
            progress("resuming an interrupted load")
        try:
            changed = _bring_in(bundle, trees, placements, targets, progress, count) > 0 or journal.resumed
            changed = changed or loaded is None or loaded.manifest != bundle.manifest.digest
            if changed and not journal.has(RECORDED):
                record(bundle.manifest, bundle.signer)
                journal.note(RECORDED)
            # A crash between this and the links leaves the previous version in service, and the journal, from
            # which the load resumes.  The reverse order would leave an unrecorded version in service, and
            # any bundle newer than the previous version could follow it.
            write_durably(home.installed, installed.with_bundle(bundle.manifest, bundle.signer).encode())
        except BundleStorageError as error:
            raise BundleStorageError(f"{error}; the previous version stays in service") from error
        for placement in placements:
            if activate(placement):
                progress(f"{placement.current} now points to {placement.version}")
        journal.finish()
    return changed


def copy_model(
    directory: Path,
    name: str,
    models: Path,
    home: Home,
    progress: Progress,
    count: ByteCount = ignore_bytes,
) -> bool:
    """
    Copy a directory of weights, without hidden files, next to the models of bundles.

    No signature is checked.  Returns whether anything changed.  Raises ConfigurationError if the directory
    cannot be read, and BundleStorageError if the disk failed (a second run resumes).
    """
    if not is_inner_path(name) or name.startswith("."):
        raise ConfigurationError(f"{name!r} is not a name for a directory of models")
    sources: dict[str, Path] = {}
    files: dict[str, BundleFile] = {}
    found = list(files_below(directory))
    total = sum(path.stat().st_size for _, path in found)
    counted = byte_counter(count, total)
    for inner, path in found:
        file = _described(counted(file_chunks(path)))
        files[inner], sources[file.sha256] = file, path
    if not files:
        raise ConfigurationError(f"{directory} has no files")
    placement = place_copy(files, models, name)
    with _alone(home):
        clear_leftovers([placement])
        check_room([placement])
        counted = byte_counter(count, total)
        written = stage(placement, lambda file: counted(file_chunks(sources[file.sha256])))
        progress(f"{placement.final} is complete ({written} of {len(files)} files written)")
        return activate(placement) or written > 0


def _described(chunks: Iterator[bytes]) -> BundleFile:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    sha256 = digest.hexdigest()
    return BundleFile(path=f"{BLOBS}/{sha256}", size=size, sha256=sha256, media_type=OTHER)


def _bring_in(
    bundle: Bundle,
    trees: Sequence[ItemTree],
    placements: Sequence[Placement],
    targets: Targets,
    progress: Progress,
    count: ByteCount,
) -> int:
    """Returns the number of files written, images loaded and items pushed."""
    done = 0
    registry, engine = targets.registry, targets.engine
    files = [file for placement in placements for file in placement.files.values()]
    for tree in trees:
        if registry is not None and tree.item.kind in PUSHED:
            files += tree.blobs
        if engine is not None and tree.item.kind is ItemKind.IMAGE:
            files += engine.choose(tree).layers
    counted = byte_counter(count, sum(file.size for file in files))
    for placement in placements:
        written = stage(placement, lambda file: counted(bundle.chunks(file)))
        done += written
        progress(f"{placement.final} is complete ({written} of {len(placement.files)} files written)")
    for tree in trees:
        label = tree.item.label
        if registry is not None and tree.item.kind in PUSHED:
            pushed = registry.push(tree, bundle, counted)
            done += pushed
            progress(f"{label} {'was pushed' if pushed else 'is already in the registry'}")
        if engine is not None and tree.item.kind is ItemKind.IMAGE:
            loaded = engine.load(tree, bundle, counted)
            done += loaded
            progress(f"{label} {'was loaded' if loaded else 'is already in the engine'}")
    return done


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Hold the lock of loads; the kernel releases it when the process ends, for any reason."""
    try:
        home.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_locked(home.lock)
    except BlockingIOError as error:
        raise BundleStorageError("another load is running here: wait for it to end") from error
    except OSError as error:
        raise storage_error(home.lock, error) from error
    with lock:
        yield
