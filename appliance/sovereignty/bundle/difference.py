"""
A bundle without what an earlier one holds already.

The manifest and its signature are those of the whole bundle, so making a difference takes no key and
a loaded difference is worth the same as the whole.  BASE.json says which blobs are left out and where
they are; it is not signed, and needs not be: a blob is taken from the base only if it has the hash
that the signed manifest asks for.
"""

from collections.abc import Sequence
from typing import Literal

from appliance.errors import BundleIncompleteError, BundleRefusedError
from appliance.sovereignty.bundle.manifest import BASE, BundleFile, Count, Digest, Manifest, Name, Version
from appliance.sovereignty.bundle.record import Record


class Base(Record):
    """BASE.json."""

    format: Literal[1] = 1
    name: Name
    version: Version
    created: Count
    manifest: Digest
    """Digest of the base's MANIFEST.json."""
    omitted: tuple[Digest, ...]
    """Blobs that are to be taken from the base, sorted."""


def make_base(older: Manifest, newer: Manifest) -> Base:
    """
    Return what a difference between two bundles leaves out.

    Raises:
        BundleRefusedError: they are not two versions of one bundle.
    """
    if older.name != newer.name:
        raise BundleRefusedError(f"{older.name} and {newer.name} are not two versions of one bundle")
    omitted = sorted(older.blobs().keys() & newer.blobs().keys())
    return Base(
        name=older.name,
        version=older.version,
        created=older.created,
        manifest=older.digest,
        omitted=tuple(omitted),
    )


def present_files(manifest: Manifest, base: Base | None) -> Sequence[BundleFile]:
    """
    The files that the medium of a bundle holds, in the manifest's order.

    Raises:
        BundleRefusedError: BASE.json leaves out what the manifest does not have.
    """
    if base is None:
        return manifest.files
    blobs = manifest.blobs()
    if list(base.omitted) != sorted(set(base.omitted) & blobs.keys()):
        raise BundleRefusedError(f"{BASE} leaves out blobs that the manifest does not list: it was altered")
    omitted = {blobs[digest].path for digest in base.omitted}
    return [file for file in manifest.files if file.path not in omitted]


def check_base(base: Base, found: Manifest | None) -> None:
    """
    Check that a bundle is the one a difference was made against.

    Raises:
        BundleIncompleteError: it is not, or there is none.
    """
    wanted = f"{base.name} {base.version} ({base.manifest})"
    if found is None:
        raise BundleIncompleteError(f"this is a difference to {wanted}: name that bundle with --base")
    if (found.name, found.version, found.created, found.digest) != (
        base.name,
        base.version,
        base.created,
        base.manifest,
    ):
        message = f"the base is {found.name} {found.version} ({found.digest}), and should be {wanted}"
        raise BundleIncompleteError(message)
