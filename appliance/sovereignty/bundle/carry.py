"""
Bundles made of bundles: a difference, and the whole again.
"""

from collections.abc import Iterable
from pathlib import Path

from appliance.errors import BundleRefusedError
from appliance.sovereignty.bundle.copying import copy_verified, making, write_durably
from appliance.sovereignty.bundle.difference import make_base
from appliance.sovereignty.bundle.manifest import BASE, BLOBS, MANIFEST, SIGNATURE, BundleFile
from appliance.sovereignty.bundle.verify import Bundle, open_bundle


def make_difference(older: Bundle, newer: Bundle, directory: Path) -> Bundle:
    """
    Write the newer bundle without what the older one has, to a new directory.

    Raises:
        BundleRefusedError: they do not belong together, one is a difference itself, or a file is damaged.
        BundleStorageError: it cannot be written.
    """
    for bundle in (older, newer):
        if bundle.base is not None:
            raise BundleRefusedError(
                f"{bundle.manifest.name} {bundle.manifest.version} is a difference: join it first"
            )
    base = make_base(older.manifest, newer.manifest)
    omitted = set(base.omitted)
    present = [file for file in newer.manifest.files if f"sha256:{file.sha256}" not in omitted]
    _write(newer, present, directory, {BASE: base.encode()})
    return open_bundle(directory, trusted=None, now=0)


def make_whole(bundle: Bundle, directory: Path) -> None:
    """
    Write a bundle, wherever its files are now, to a new directory; raises as `make_difference` does.
    """
    _write(bundle, bundle.manifest.files, directory, {})


def _write(bundle: Bundle, files: Iterable[BundleFile], directory: Path, more: dict[str, bytes]) -> None:
    with making(directory) as place:
        (place / BLOBS).mkdir(parents=True)
        for file in files:
            copy_verified(bundle.chunks(file), file, place / file.path)
        head = {MANIFEST: bundle.head.manifest, SIGNATURE: bundle.head.signature, **more}
        for name, content in head.items():
            write_durably(place / name, content)
