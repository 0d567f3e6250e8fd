"""
Place the files of a bundle in a directory, a new version next to the one in service.

    MODELS/NAME/1.0-0123456789ab/   one version, its files read-only
    MODELS/NAME/current             a link to the version in service

A version is staged under a temporary name and renamed when it is complete; the link is switched last.  A
failure before that leaves the link, and its target, unchanged.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import BundleRefusedError, BundleStorageError
from appliance.infra.files import sync_directory
from appliance.sovereignty.bundle.copying import PARTIAL, copy_verified, holds, storage_error
from appliance.sovereignty.bundle.manifest import BundleFile, BundleManifest, ItemKind
from appliance.sovereignty.bundle.references import chart_path
from appliance.sovereignty.bundle.tree import ItemTree

CURRENT = "current"
READ_ONLY = 0o444
PASSABLE = 0o755
"""Workers read the weights under their own accounts, whatever the umask of the operator who loads."""
_DIGITS = 12

Chunks = Callable[[BundleFile], Iterator[bytes]]
"""Yields the bytes of a file of the bundle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One directory that a bundle fills."""

    home: Path
    """Directory of all versions of one item."""
    version: str
    """Directory name of this version."""
    files: dict[str, BundleFile]
    """By path in the version's directory."""

    @property
    def final(self) -> Path:
        return self.home / self.version

    @property
    def staged(self) -> Path:
        return self.home / f".{self.version}{PARTIAL}"

    @property
    def current(self) -> Path:
        return self.home / CURRENT

    def missing(self) -> list[BundleFile]:
        """Files that are not there in their full size yet, under either name; nothing is read."""
        return [
            file
            for path, file in self.files.items()
            if not any(_has_size(place / path, file) for place in (self.final, self.staged, self.current))
        ]


def place_models(trees: Sequence[ItemTree], models: Path) -> list[Placement]:
    """The directories of models; raises BundleRefusedError for two versions of one: `current` is one link."""
    names = [tree.item.name for tree in trees if tree.item.kind is ItemKind.MODEL]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BundleRefusedError(
            f"the bundle has two versions of the model {twice[0]}, and only one can serve: get another bundle"
        )
    return [
        Placement(
            home=models / tree.item.name,
            version=_directory(tree.item.version, tree.item.digest),
            files=tree.named_files(),
        )
        for tree in trees
        if tree.item.kind is ItemKind.MODEL
    ]


def place_copy(files: dict[str, BundleFile], models: Path, name: str) -> Placement:
    """The directory of a copied model; its version names the files and their content."""
    content = json.dumps(sorted((path, file.sha256) for path, file in files.items()))
    version = _directory("copy", hashlib.sha256(content.encode()).hexdigest())
    return Placement(home=models / name, version=version, files=files)


def place_files(manifest: BundleManifest, trees: Sequence[ItemTree], directory: Path) -> list[Placement]:
    """The one directory of charts, wheels, bills of materials and other files in a bundle."""
    files: dict[str, BundleFile] = {}
    for tree in trees:
        item = tree.item
        match item.kind:
            case ItemKind.CHART:
                files[chart_path(item)] = tree.images[0].layers[0]
            case ItemKind.SBOM:
                for name, file in tree.named_files().items():
                    files[f"sbom/{item.name}/{item.version}/{name}"] = file
            case ItemKind.WHEELS | ItemKind.FILES:
                for name, file in tree.named_files().items():
                    files[f"{item.kind}/{item.name}/{name}"] = file
            case ItemKind.IMAGE | ItemKind.MODEL:
                pass
    version = _directory(manifest.version, manifest.digest)
    return [Placement(home=directory / manifest.name, version=version, files=files)] if files else []


def room(placements: Sequence[Placement]) -> list[tuple[Path, int, int]]:
    """(directory, missing bytes, free bytes) of each disk."""
    needed: dict[int, int] = {}
    where: dict[int, Path] = {}
    for placement in placements:
        home = placement.home.absolute()
        place = next(each for each in (home, *home.parents) if each.exists())
        device = place.stat().st_dev
        where.setdefault(device, place)
        needed[device] = needed.get(device, 0) + sum(file.size for file in placement.missing())
    disks = {device: os.statvfs(place) for device, place in where.items()}
    return [(where[device], needed[device], disk.f_bavail * disk.f_frsize) for device, disk in disks.items()]


def check_room(placements: Sequence[Placement]) -> None:
    """Raise BundleStorageError if the missing files do not fit on their disks."""
    for place, needed, free in room(placements):
        if needed > free:
            raise BundleStorageError(
                f"the disk with {place} has {free} bytes free and {needed} are needed: nothing was written, "
                f"and the version in service is unchanged; free {needed - free} more"
            )


def clear_leftovers(placements: Sequence[Placement]) -> None:
    """Remove staged versions of abandoned loads; those of this load are kept and resumed."""
    for placement in placements:
        for left in placement.home.glob(f".*{PARTIAL}"):
            if left != placement.staged and left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)


def stage(placement: Placement, chunks: Chunks) -> int:
    """Fill a version's directory and return how many files were written; raises a BundleError."""
    place = placement.final if placement.final.exists() else placement.staged
    written = 0
    for path, file in sorted(placement.files.items()):
        target = place / path
        try:
            _make_directories(target.parent)
            if not holds(target, file):
                written += 1
                if not _linked(placement.current / path, target, file):
                    copy_verified(chunks(file), file, target)
            # Also for an existing file: a crash may have happened between its writing and this.
            target.chmod(READ_ONLY)
        except OSError as error:
            raise storage_error(target, error) from error
    _check_no_others(placement, place)
    if place == placement.staged:
        try:
            place.rename(placement.final)
            sync_directory(placement.home)
        except OSError as error:
            raise storage_error(placement.final, error) from error
    return written


def activate(placement: Placement) -> bool:
    """Switch the link `current` to this version atomically; False if it pointed there already."""
    link = placement.current
    try:
        if link.is_symlink() and str(link.readlink()) == placement.version:
            return False
        if link.exists() and not link.is_symlink():
            raise BundleStorageError(f"{link} is not a link: move it away; the versions are next to it")
        partial = placement.home / f".{CURRENT}{PARTIAL}"
        with suppress(FileNotFoundError):
            partial.unlink()
        partial.symlink_to(placement.version)
        partial.replace(link)
        sync_directory(placement.home)
    except OSError as error:
        raise storage_error(link, error) from error
    return True


def _make_directories(path: Path) -> None:
    for directory in reversed([each for each in (path, *path.parents) if not each.exists()]):
        directory.mkdir(exist_ok=True)
        directory.chmod(PASSABLE)


def _linked(before: Path, target: Path, file: BundleFile) -> bool:
    """Whether an unchanged file could be hard-linked from the version in service."""
    if not holds(before, file):
        return False
    try:
        with suppress(FileNotFoundError):
            target.unlink()
        os.link(before, target)
        sync_directory(target.parent)
    except OSError:
        return False
    return True


def _check_no_others(placement: Placement, place: Path) -> None:
    for found in sorted(place.rglob("*")):
        path = found.relative_to(place).as_posix()
        if path in placement.files or (found.is_dir() and not found.is_symlink()):
            continue
        if path.endswith(PARTIAL) and place == placement.staged:
            found.unlink()
        else:
            raise BundleStorageError(f"{found} is not in the bundle: move it away, and load again")


def _directory(version: str, digest: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", version)[:64].lstrip(".")
    return f"{plain or '_'}-{digest.removeprefix('sha256:')[:_DIGITS]}"


def _has_size(path: Path, file: BundleFile) -> bool:
    try:
        return path.stat().st_size == file.size
    except OSError:
        return False
