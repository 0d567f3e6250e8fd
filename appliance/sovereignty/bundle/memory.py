"""
What was loaded here, so that nothing older is loaded after it.

One file in the data directory, replaced whole.  It is what rollback is refused by: without it an old
bundle with a hole in it, properly signed at its time, would load again.
"""

from pathlib import Path
from typing import Literal

from appliance.errors import BundleRefusedError, BundleRollbackError, BundleStorageError
from appliance.sovereignty.bundle.copying import write_durably
from appliance.sovereignty.bundle.manifest import (
    Count,
    Digest,
    Item,
    Manifest,
    Name,
    Text,
    Version,
    version_order,
)
from appliance.sovereignty.bundle.record import Record


class Loaded(Record):
    """One bundle that was loaded."""

    name: Name
    version: Version
    created: Count
    manifest: Digest
    signer: Text
    items: tuple[Item, ...]


class Memory(Record):
    """The newest bundle of each name that was loaded here."""

    format: Literal[1] = 1
    bundles: tuple[Loaded, ...] = ()

    def find(self, name: str) -> Loaded | None:
        """The bundle of a name, if one was loaded."""
        return next((loaded for loaded in self.bundles if loaded.name == name), None)

    def with_bundle(self, manifest: Manifest, signer: str) -> "Memory":
        """Return the memory once this bundle is loaded."""
        loaded = Loaded(
            name=manifest.name,
            version=manifest.version,
            created=manifest.created,
            manifest=manifest.digest,
            signer=signer,
            items=manifest.items,
        )
        others = [other for other in self.bundles if other.name != manifest.name]
        return Memory(bundles=tuple(sorted([*others, loaded], key=lambda each: each.name)))


def read_memory(path: Path) -> Memory:
    """
    Read what was loaded; nothing, where there is no file.

    Raises:
        BundleStorageError: it cannot be read, or is damaged.  Guessing would allow a rollback.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Memory()
    except OSError as error:
        raise BundleStorageError(f"cannot read what was loaded before, {path}: {error.strerror}") from error
    try:
        return Memory.decode(content, str(path))
    except BundleRefusedError as error:
        raise BundleStorageError(f"{error}; restore it from a backup") from error


def write_memory(path: Path, memory: Memory) -> None:
    """Remember what was loaded; raises BundleStorageError."""
    write_durably(path, memory.encode())


def check_order(loaded: Loaded | None, manifest: Manifest) -> None:
    """
    Check that a bundle may follow what was loaded; the same one may always be loaded again.

    Raises:
        BundleRollbackError: it is older, or a version in between is needed first.
    """
    if loaded is None or loaded.manifest == manifest.digest:
        return
    before, now = version_order(loaded.version), version_order(manifest.version)
    if (now, manifest.created) <= (before, loaded.created):
        raise BundleRollbackError(
            f"{manifest.name} {manifest.version} (made at {manifest.created}) is not newer than "
            f"{loaded.version} (made at {loaded.created}), which was loaded here: ask for a newer bundle"
        )
    if before < version_order(manifest.upgrade_from):
        raise BundleRollbackError(
            f"{manifest.name} {manifest.version} follows {manifest.upgrade_from} or later, and "
            f"{loaded.version} is loaded: load {manifest.upgrade_from} first"
        )
