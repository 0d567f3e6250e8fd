"""
Verify that a bundle is, to the last byte, what a trusted key signed.

Reads each medium once, from beginning to end, with one chunk in memory and nothing written; needs no
network.  The order is: signature, dates, the list of files, every byte, and whether names, items and blobs
agree.  Fails closed: the first error ends it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from appliance.errors import BundleIncompleteError, BundleRefusedError
from appliance.sovereignty.bundle.manifest import (
    BASE,
    LAYOUT,
    LAYOUT_CONTENT,
    MANIFEST,
    Base,
    BundleFile,
    BundleManifest,
    check_base,
    present_files,
)
from appliance.sovereignty.bundle.parts import open_source
from appliance.sovereignty.bundle.signature import BUNDLE, TrustedKey
from appliance.sovereignty.bundle.source import (
    BundleHead,
    ByteCount,
    Contents,
    byte_counter,
    ignore_bytes,
    read_chunks,
)
from appliance.sovereignty.bundle.tree import ItemTree, read_trees

LARGE_BYTES = 64 * 2**20
"""Files of at least this size are reported when they are verified."""

Progress = Callable[[str], None]
"""Receives one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle with a valid head; its contents are not verified yet."""

    manifest: BundleManifest
    signer: str
    """Name of the trusted key that signed it; empty if signatures were not checked."""
    head: BundleHead
    contents: Contents
    base: Base | None
    older: "Bundle | None"
    """The base of a difference."""

    def open(self, file: BundleFile) -> AbstractContextManager[BinaryIO]:
        """In this bundle or in the base."""
        return self._holder(file).open(file)

    def where(self, file: BundleFile) -> str:
        """Location of a file, for messages."""
        return self._holder(file).where(file)

    def chunks(self, file: BundleFile) -> Iterator[bytes]:
        """Yield the bytes of a file, unverified."""
        with self.open(file) as opened:
            yield from read_chunks(opened, file, self.where(file))

    def read(self, file: BundleFile) -> bytes:
        """The bytes of a small file; raises BundleRefusedError unless they have the hash in the manifest."""
        content = b"".join(self.chunks(file))
        _compare(hashlib.sha256(content).hexdigest(), file, self.where(file))
        return content

    def trees(self) -> tuple[ItemTree, ...]:
        """The tree of each item; raises BundleRefusedError if they are inconsistent."""
        return read_trees(self.manifest, self.read)

    def omitted(self) -> Sequence[BundleFile]:
        """The files that come from the base."""
        blobs = self.manifest.blobs()
        return [blobs[digest] for digest in self.base.omitted] if self.base is not None else []

    def _holder(self, file: BundleFile) -> Contents:
        if self.base is None or f"sha256:{file.sha256}" not in self.base.omitted:
            return self.contents
        if self.older is None:
            check_base(self.base, None)
            raise AssertionError
        return self.older.contents


def open_bundle(
    path: Path, *, trusted: Sequence[TrustedKey] | None, now: float, base: Path | None = None
) -> Bundle:
    """
    Read and verify the head of a bundle: a directory, a directory of parts, or a tar file.

    `trusted` is None on the machine that builds, where signatures are not checked.  `now` is in seconds
    since the epoch.  `base` is the bundle that a difference was made against.  Raises BundleRefusedError,
    BundleIncompleteError if `base` is not the base, BundleStorageError, or ConfigurationError for no bundle.
    """
    source = open_source(path)
    head = source.head()
    signer = "" if trusted is None else BUNDLE.verify(head.manifest, head.signature, trusted, now)
    manifest = BundleManifest.decode(head.manifest, MANIFEST)
    if trusted is not None and now >= manifest.key_not_after:
        day = datetime.fromtimestamp(manifest.key_not_after, UTC).date()
        raise BundleRefusedError(
            f"{signer} vouches for its key until {day} only, and that has passed: get a newer bundle"
        )
    difference = None if head.base is None else Base.decode(head.base, BASE)
    older = None
    if difference is not None and base is not None:
        # The base needs no signature: blobs taken from it must have the hash in the signed manifest.
        older = open_bundle(base, trusted=None, now=now)
        check_base(difference, older.manifest)
    return Bundle(
        manifest=manifest,
        signer=signer,
        head=head,
        contents=source.contents(present_files(manifest, difference)),
        base=difference,
        older=older,
    )


def verify_bundle(
    bundle: Bundle,
    progress: Progress = lambda _: None,
    count: ByteCount = ignore_bytes,
) -> tuple[ItemTree, ...]:
    """
    Verify every byte of a bundle and return the trees of its items.

    Raises BundleRefusedError if a file is missing, added, or not as in the manifest, BundleIncompleteError
    if a difference lacks its base or a blob of it, and BundleStorageError if a medium cannot be read.
    """
    if bundle.base is not None and bundle.older is None:
        check_base(bundle.base, None)
    counted = byte_counter(count, bundle.manifest.size)
    for file, chunks in bundle.contents.stream():
        _verify_file(file, counted(chunks), bundle.contents)
        if file.size >= LARGE_BYTES:
            progress(f"verified {file.path} ({file.size} bytes)")
    for file in bundle.omitted():
        try:
            _verify_file(file, counted(bundle.chunks(file)), bundle)
        except BundleRefusedError as error:
            raise BundleIncompleteError(
                f"the base lacks a blob that the difference omits: {error}"
            ) from error
        if file.size >= LARGE_BYTES:
            progress(f"verified {file.path} of the base ({file.size} bytes)")
    layout = next(file for file in bundle.manifest.files if file.path == LAYOUT)
    if bundle.read(layout) != LAYOUT_CONTENT:
        raise BundleRefusedError(f"{LAYOUT} does not have the version 1.0.0")
    return bundle.trees()


def _verify_file(file: BundleFile, chunks: Iterator[bytes], holder: "Contents | Bundle") -> None:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    _compare(digest.hexdigest(), file, holder.where(file))


def _compare(found: str, file: BundleFile, where: str) -> None:
    if found != file.sha256:
        raise BundleRefusedError(f"{where} does not have the hash in the manifest: copy it again")
