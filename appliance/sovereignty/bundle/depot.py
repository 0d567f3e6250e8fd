"""
The blobs of a bundle that is being built.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from appliance.errors import ConfigurationError
from appliance.infra.files import sync_file
from appliance.sovereignty.bundle.copying import PARTIAL, file_chunks, storage_error
from appliance.sovereignty.bundle.manifest import BLOBS, BundleFile
from appliance.sovereignty.bundle.oci import Descriptor, describe


class Depot:
    """A directory of blobs, each named by its hash and held once."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[str, BundleFile] = {}
        (place / BLOBS).mkdir(parents=True)

    @property
    def files(self) -> list[BundleFile]:
        """Every file added so far."""
        return list(self._files.values())

    def add(self, content: bytes, media_type: str) -> Descriptor:
        """Add a small blob."""
        return self.add_stream([content], media_type)

    def add_file(self, path: Path, media_type: str) -> Descriptor:
        """Add a file as a blob; raises ConfigurationError when it cannot be read."""
        return self.add_stream(file_chunks(path), media_type)

    def add_stream(
        self, chunks: Iterable[bytes], media_type: str, *, expected: str | None = None
    ) -> Descriptor:
        """
        Add a blob.

        Raises:
            ConfigurationError: it does not have the digest `expected`.
            BundleStorageError: it cannot be written.
        """
        partial = self._place / BLOBS / f"blob{PARTIAL}"
        digest, size = hashlib.sha256(), 0
        try:
            with partial.open("wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    file.write(chunk)
                sync_file(file)
            hexadecimal = digest.hexdigest()
            if expected is not None and expected != f"sha256:{hexadecimal}":
                raise ConfigurationError(
                    f"a blob has the digest sha256:{hexadecimal}, and should have {expected}"
                )
            partial.rename(self._place / BLOBS / hexadecimal)
        except OSError as error:
            raise storage_error(partial, error) from error
        self._note(f"{BLOBS}/{hexadecimal}", size, hexadecimal, media_type)
        return Descriptor(media_type=media_type, digest=f"sha256:{hexadecimal}", size=size)

    def place(self, path: str, content: bytes, media_type: str) -> None:
        """Write a file that is no blob; raises BundleStorageError."""
        try:
            (self._place / path).write_bytes(content)
        except OSError as error:
            raise storage_error(self._place / path, error) from error
        entry = describe(content, media_type)
        self._note(path, entry.size, entry.digest.removeprefix("sha256:"), media_type)

    def _note(self, path: str, size: int, sha256: str, media_type: str) -> None:
        # The same bytes may come in under two media types; the first in the order of building stands.
        self._files.setdefault(path, BundleFile(path=path, size=size, sha256=sha256, media_type=media_type))
