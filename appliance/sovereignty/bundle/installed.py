"""
The bundles installed here, so that nothing older is loaded afterwards, and what a new bundle would change.

One file in the data directory, replaced atomically.  It prevents rollback: without it an old bundle with a
vulnerability, properly signed at its time, could be loaded again.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from appliance.errors import BundleRefusedError, BundleRollbackError, BundleStorageError
from appliance.sovereignty.bundle.manifest import (
    BundleManifest,
    BundleRecord,
    Count,
    Digest,
    Item,
    Name,
    Text,
    Version,
    version_order,
)


class InstalledBundle(BundleRecord):
    name: Name
    version: Version
    created: Count
    manifest: Digest
    signer: Text
    items: tuple[Item, ...]


class InstalledBundles(BundleRecord):
    """The newest installed bundle of each name."""

    format: Literal[1] = 1
    bundles: tuple[InstalledBundle, ...] = ()

    def find(self, name: str) -> InstalledBundle | None:
        return next((loaded for loaded in self.bundles if loaded.name == name), None)

    def with_bundle(self, manifest: BundleManifest, signer: str) -> "InstalledBundles":
        loaded = InstalledBundle(
            name=manifest.name,
            version=manifest.version,
            created=manifest.created,
            manifest=manifest.digest,
            signer=signer,
            items=manifest.items,
        )
        others = [other for other in self.bundles if other.name != manifest.name]
        return InstalledBundles(bundles=tuple(sorted([*others, loaded], key=lambda each: each.name)))


def read_installed(path: Path) -> InstalledBundles:
    """Empty without a file; raises BundleStorageError if damaged: a guess would allow a rollback."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return InstalledBundles()
    except OSError as error:
        raise BundleStorageError(f"cannot read the installed bundles {path}: {error.strerror}") from error
    try:
        return InstalledBundles.decode(content, str(path))
    except BundleRefusedError as error:
        raise BundleStorageError(f"{error}; restore it from a backup") from error


def check_order(loaded: InstalledBundle | None, manifest: BundleManifest) -> None:
    """Raise BundleRollbackError if a bundle is older than the installed one, or cannot follow it directly."""
    if loaded is None or loaded.manifest == manifest.digest:
        return
    before, now = version_order(loaded.version), version_order(manifest.version)
    if (now, manifest.created) <= (before, loaded.created):
        raise BundleRollbackError(
            f"{manifest.name} {manifest.version} (built at {manifest.created}) is not newer than installed "
            f"{loaded.version} (built at {loaded.created}): get a newer bundle"
        )
    if before < version_order(manifest.upgrade_from):
        raise BundleRollbackError(
            f"{manifest.name} {manifest.version} follows {manifest.upgrade_from} or later, and "
            f"{loaded.version} is installed: load {manifest.upgrade_from} first"
        )


class ItemChange(StrEnum):
    NEW = "new"
    CHANGED = "changed"
    SAME = "same"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemStep:
    change: ItemChange
    item: Item
    """As it will be; as it was, if it is gone."""
    before: str | None
    """Installed version."""


def make_plan(manifest: BundleManifest, loaded: InstalledBundle | None) -> list[ItemStep]:
    """By kind and name."""
    old = {(item.kind, item.name): item for item in loaded.items} if loaded is not None else {}
    new = {(item.kind, item.name): item for item in manifest.items}
    steps = []
    for key in sorted(old.keys() | new.keys()):
        item, before = new.get(key), old.get(key)
        if item is None:
            change = ItemChange.GONE
        elif before is None:
            change = ItemChange.NEW
        else:
            change = ItemChange.SAME if item.digest == before.digest else ItemChange.CHANGED
        shown = item or old[key]
        steps.append(ItemStep(change=change, item=shown, before=None if before is None else before.version))
    return steps
