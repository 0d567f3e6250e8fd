"""
Whether a bundle is, to the last byte, what a trusted key signed.

It reads each medium once, from beginning to end, with one chunk in memory and nothing written, and
needs no network.  It decides in this order: signature, dates, the list of files, every byte, and
whether names, items and blobs agree.  Fails closed: the first doubt ends it.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from appliance.errors import BundleIncompleteError, BundleRefusedError
from appliance.sovereignty.bundle.difference import Base, check_base, present_files
from appliance.sovereignty.bundle.manifest import BASE, LAYOUT, LAYOUT_CONTENT, MANIFEST, BundleFile, Manifest
from appliance.sovereignty.bundle.parts import open_source
from appliance.sovereignty.bundle.signature import verify_signature
from appliance.sovereignty.bundle.source import Contents, Head, read_chunks
from appliance.sovereignty.bundle.tree import Tree, read_trees
from appliance.sovereignty.bundle.trust import TrustedKey

LARGE_BYTES = 64 * 2**20
"""Files from this size on are worth a line when they are done."""

Progress = Callable[[str], None]
"""Takes one line for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle whose head is in order; its contents are not verified yet."""

    manifest: Manifest
    signer: str
    """Name of the trusted key that signed it; empty where that was not asked."""
    head: Head
    contents: Contents
    base: Base | None
    older: "Bundle | None"
    """The base of a difference."""

    def open(self, file: BundleFile) -> AbstractContextManager[BinaryIO]:
        """Open a file, wherever it is."""
        return self._holder(file).open(file)

    def where(self, file: BundleFile) -> str:
        """Where a file is, for messages."""
        return self._holder(file).where(file)

    def chunks(self, file: BundleFile) -> Iterator[bytes]:
        """Yield the bytes of a file, unverified."""
        with self.open(file) as opened:
            yield from read_chunks(opened, file, self.where(file))

    def read(self, file: BundleFile) -> bytes:
        """
        Return the verified bytes of a small file.

        Raises:
            BundleRefusedError: they are not those of the manifest.
        """
        content = b"".join(self.chunks(file))
        _compare(hashlib.sha256(content).hexdigest(), file, self.where(file))
        return content

    def trees(self) -> tuple[Tree, ...]:
        """What hangs below each item; raises BundleRefusedError when it does not add up."""
        return read_trees(self.manifest, self.read)

    def omitted(self) -> Sequence[BundleFile]:
        """The files that are to come from the base."""
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
    Read and verify the head of a bundle.

    Args:
        path: a directory, a directory of parts, or a tar file.
        trusted: keys of the site; None on the machine that builds, where nobody asks who signed.
        now: seconds since the epoch.
        base: the bundle that a difference was made against.

    Raises:
        BundleRefusedError: nobody trusted signed it, or its head is malformed.
        BundleIncompleteError: `base` is not the one of this difference.
        BundleStorageError: the medium cannot be read.
        ConfigurationError: there is no bundle at the path.
    """
    source = open_source(path)
    head = source.head()
    signer = "" if trusted is None else verify_signature(head.manifest, head.signature, trusted, now)
    manifest = Manifest.decode(head.manifest, MANIFEST)
    if trusted is not None and now >= manifest.key_not_after:
        day = datetime.fromtimestamp(manifest.key_not_after, UTC).date()
        raise BundleRefusedError(
            f"{signer} vouches for its key until {day} only, and that is over: ask for a newer bundle"
        )
    difference = None if head.base is None else Base.decode(head.base, BASE)
    older = None
    if difference is not None and base is not None:
        # Nobody needs to have signed the base: what is taken from it has the hash the manifest asks for.
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


def verify_bundle(bundle: Bundle, progress: Progress = lambda _: None) -> tuple[Tree, ...]:
    """
    Verify every byte of a bundle and return what its items are made of.

    Raises:
        BundleRefusedError: something is missing, added, or not as the manifest has it.
        BundleIncompleteError: it is a difference, and its base is not there or lacks a blob.
        BundleStorageError: a medium cannot be read.
    """
    if bundle.base is not None and bundle.older is None:
        check_base(bundle.base, None)
    for file, chunks in bundle.contents.stream():
        _verify_file(file, chunks, bundle.contents)
        if file.size >= LARGE_BYTES:
            progress(f"verified {file.path} ({file.size} bytes)")
    for file in bundle.omitted():
        try:
            _verify_file(file, bundle.chunks(file), bundle)
        except BundleRefusedError as error:
            raise BundleIncompleteError(
                f"the base cannot give what the difference leaves out: {error}"
            ) from error
        if file.size >= LARGE_BYTES:
            progress(f"verified {file.path} of the base ({file.size} bytes)")
    layout = next(file for file in bundle.manifest.files if file.path == LAYOUT)
    if bundle.read(layout) != LAYOUT_CONTENT:
        raise BundleRefusedError(f"{LAYOUT} is of another version than 1.0.0")
    return bundle.trees()


def _verify_file(file: BundleFile, chunks: Iterator[bytes], holder: "Contents | Bundle") -> None:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    _compare(digest.hexdigest(), file, holder.where(file))


def _compare(found: str, file: BundleFile, where: str) -> None:
    if found != file.sha256:
        raise BundleRefusedError(f"{where} does not have the hash of the manifest: copy it again")
