"""
Load a bundle into an installation.

First everything is verified, then everything is brought in beside what serves, then the audit log
says so, then the version is remembered, and only then `current` is turned.  Whatever fails before that
leaves the previous version serving, and the next run goes on where this one stopped.  Fails closed:
what cannot be recorded or remembered is not put into service, or an older bundle could be loaded over it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BundleStorageError
from appliance.infra.files import open_locked
from appliance.sovereignty.bundle.copying import storage_error
from appliance.sovereignty.bundle.engine import Engine
from appliance.sovereignty.bundle.journal import Journal
from appliance.sovereignty.bundle.manifest import Kind, Manifest
from appliance.sovereignty.bundle.memory import check_order, read_memory, write_memory
from appliance.sovereignty.bundle.placing import (
    Placement,
    activate,
    check_room,
    clear_leftovers,
    place_files,
    place_models,
    stage,
)
from appliance.sovereignty.bundle.registry import Registry
from appliance.sovereignty.bundle.tree import Tree
from appliance.sovereignty.bundle.verify import Bundle, Progress, verify_bundle

RECORDED = "recorded"
"""The step after which the audit log says that the bundle is installed."""

Record = Callable[[Manifest, str], None]
"""Puts the installation of a bundle, signed by a key of that name, into the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Where the contents of a bundle go; what is None is left out."""

    models: Path | None = None
    files: Path | None = None
    engine: Engine | None = None
    registry: Registry | None = None

    def placements(self, manifest: Manifest, trees: Sequence[Tree]) -> list[Placement]:
        """The directories that a bundle fills."""
        models = [] if self.models is None else place_models(trees, self.models)
        files = [] if self.files is None else place_files(manifest, trees, self.files)
        return [*models, *files]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The files that loads keep in the data directory."""

    directory: Path

    @property
    def memory(self) -> Path:
        """What was loaded."""
        return self.directory / "bundle.json"

    @property
    def journal(self) -> Path:
        """How far the load that runs has come."""
        return self.directory / "bundle.journal"

    @property
    def lock(self) -> Path:
        """Held while a load runs."""
        return self.directory / "bundle.lock"

    @property
    def trusted(self) -> Path:
        """The keys the site trusts, unless another file is named."""
        return self.directory / "bundle-keys.txt"


def load_bundle(bundle: Bundle, targets: Targets, home: Home, record: Record, progress: Progress) -> bool:
    """
    Load a bundle, and return whether anything had to be done.

    Raises:
        BundleRefusedError: it is not what was signed.
        BundleRollbackError: it is older than what was loaded.
        BundleIncompleteError: the base of a difference is missing.
        BundleStorageError: a disk, engine or registry failed; run it again to go on.
        AuditUnavailableError: it cannot be recorded.
    """
    with _alone(home):
        memory = read_memory(home.memory)
        loaded = memory.find(bundle.manifest.name)
        check_order(loaded, bundle.manifest)
        trees = verify_bundle(bundle, progress)
        placements = targets.placements(bundle.manifest, trees)
        clear_leftovers(placements)
        check_room(placements)
        journal = Journal(home.journal, bundle.manifest.digest)
        if journal.resumed:
            progress("going on with a load that was cut off")
        work = _Work(bundle, progress)
        try:
            work.bring_in(trees, placements, targets)
            changed = journal.resumed or work.done > 0
            changed = changed or loaded is None or loaded.manifest != bundle.manifest.digest
            if changed and not journal.has(RECORDED):
                record(bundle.manifest, bundle.signer)
                journal.note(RECORDED)
            # A crash between this and the links leaves the version before in service, and the journal, by
            # which the same bundle is gone on with.  The other way round it would leave a version in service
            # that nobody remembers, and everything newer than the one before could follow it.
            write_memory(home.memory, memory.with_bundle(bundle.manifest, bundle.signer))
        except BundleStorageError as error:
            raise BundleStorageError(f"{error}; the version before goes on serving") from error
        for placement in placements:
            if activate(placement):
                progress(f"{placement.current} is {placement.version} now")
        journal.finish()
    return changed


class _Work:
    """What one run brings in."""

    def __init__(self, bundle: Bundle, progress: Progress) -> None:
        self._bundle = bundle
        self._progress = progress
        self.done = 0
        """Files written, images loaded and items pushed."""

    def bring_in(self, trees: Sequence[Tree], placements: Sequence[Placement], targets: Targets) -> None:
        for placement in placements:
            written = stage(placement, self._bundle.chunks)
            self.done += written
            self._progress(f"{placement.final} is whole ({written} of {len(placement.files)} files written)")
        registry, engine = targets.registry, targets.engine
        for tree in trees:
            label = tree.item.label
            if registry is not None and tree.item.kind in {Kind.IMAGE, Kind.CHART}:
                pushed = registry.push(tree, self._bundle)
                self.done += pushed
                self._progress(f"{label} {'was pushed' if pushed else 'is in the registry already'}")
            if engine is not None and tree.item.kind is Kind.IMAGE:
                loaded = engine.load(tree, self._bundle)
                self.done += loaded
                self._progress(f"{label} {'was loaded' if loaded else 'is in the engine already'}")


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Hold the lock of loads; the kernel lets go of it when the process ends, however it ends."""
    try:
        home.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open_locked(home.lock)
    except BlockingIOError as error:
        raise BundleStorageError("another load is running here: wait for it to end") from error
    except OSError as error:
        raise storage_error(home.lock, error) from error
    with lock:
        yield
