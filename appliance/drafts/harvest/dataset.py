"""
A data set that was harvested: its manifest on disk, its samples beside the content they were made of.

Reading decrypts one sample after the other.  What was erased since is left out, and so is what
belongs to a tenant that took its permission back; both are counted.  Fails closed: a sample that
is not the one the manifest names ends the reading.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

from appliance.drafts.harvest.candidate import still_allows
from appliance.drafts.harvest.manifest import Entry, Manifest, decode_manifest, encode_manifest
from appliance.drafts.harvest.sample import Sample
from appliance.drafts.harvest.vault import Vault, open_vault
from appliance.errors import DraftNotFoundError, DraftRefusedError, DraftStorageError
from appliance.infra.data_directory import locate
from appliance.infra.files import sync_directory, write_private
from appliance.infra.settings import Settings
from appliance.tenancy.store import SqlTenantStore

DATASETS = "datasets"
SUFFIX = ".json"
DIRECTORY_MODE = 0o700
_NAME = re.compile(r"[0-9a-f]{64}")


class Dataset:
    """One data set; made by `open_dataset`, used by one thread."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        vault: Callable[[], AbstractContextManager[Vault]],
        allowing: Callable[[], Collection[str]],
    ) -> None:
        """
        Prepare; nothing is opened yet.

        Args:
            manifest: what was taken.
            vault: opens content and keys.
            allowing: names of the tenants whose content may train drafts now.
        """
        self.manifest = manifest
        self._vault = vault
        self._allowing = allowing
        self._erased: set[str] = set()
        self._withheld: set[str] = set()

    @property
    def missing(self) -> int:
        """Samples that were found erased so far, each counted once however often it is read."""
        return len(self._erased)

    @property
    def withheld(self) -> int:
        """Samples left out so far because their tenants do not allow it any more."""
        return len(self._withheld)

    def read(self, held_out: bool) -> Iterator[Sample]:  # noqa: FBT001 - which half, and nothing else
        """
        Decrypt what is still there, in order of request.

        Args:
            held_out: whether to give what is kept for judging, or what is there to be trained on.

        Raises:
            DraftRefusedError: a sample is not what the manifest says: it was altered, or harvested
                anew with another tokenizer.
            AuditError: database or keys cannot be read.
            TenantsUnavailableError: it cannot be told who allows it.
        """
        allowing = self._allowing()
        with self._vault() as vault:
            for entry in self.manifest.samples:
                if entry.held_out is not held_out:
                    continue
                if entry.tenant not in allowing:
                    self._withheld.add(entry.request_id)
                    continue
                sample = vault.read(entry.request_id)
                if sample is None:
                    self._erased.add(entry.request_id)
                    continue
                self._check(entry, sample)
                yield sample

    def _check(self, entry: Entry, sample: Sample) -> None:
        if sample.tokenizer != self.manifest.tokenizer:
            raise DraftRefusedError(
                f"request {entry.request_id} was harvested again with another tokenizer: harvest for this "
                "target again"
            )
        if (sample.digest, sample.tenant) != (entry.digest, entry.tenant):
            raise DraftRefusedError(
                f"the sample of request {entry.request_id} is not the one the manifest names: harvest again"
            )


def open_dataset(settings: Settings, name: str) -> Dataset:
    """
    Find a data set of this site.

    Args:
        settings: where things are.
        name: its digest, or hex digits it begins with.

    Raises:
        DraftNotFoundError: there is none, or several begin so.
        DraftRefusedError: its manifest was altered.
        DraftStorageError: it cannot be read.
    """

    def allowing() -> Collection[str]:
        with closing(SqlTenantStore(locate(settings).database_url)) as store:
            return frozenset(tenant.name for tenant in store.read().tenants if still_allows(tenant))

    return Dataset(
        find_manifest(locate(settings).drafts, name),
        # Only whoever seals or makes a key needs to know the time.
        vault=lambda: open_vault(settings, clock=lambda: 0.0),
        allowing=allowing,
    )


def find_manifest(drafts: Path, name: str) -> Manifest:
    """
    Read the manifest of a data set below the registry's directory; raises as `open_dataset` does.

    Args:
        drafts: the registry's directory.
        name: digest of the data set, or hex digits it begins with.
    """
    digits = name.strip().lower().removeprefix("sha256:")
    try:
        paths = [
            path
            for path in (drafts / DATASETS).glob(f"*{SUFFIX}")
            if _NAME.fullmatch(path.stem) and digits and path.stem.startswith(digits)
        ]
        if not paths:
            raise DraftNotFoundError(f"no data set {name!r} is in {drafts / DATASETS}: harvest one first")
        if len(paths) > 1:
            raise DraftNotFoundError(f"{len(paths)} data sets begin with {name!r}: give more of its digits")
        content = paths[0].read_bytes()
    except OSError as error:
        raise DraftStorageError(f"cannot read the data sets in {drafts}: {error.strerror}") from error
    return decode_manifest(content, f"sha256:{paths[0].stem}")


def save_manifest(drafts: Path, manifest: Manifest) -> Path:
    """
    Write a manifest under its digest; durable on return.

    Raises:
        DraftStorageError: it cannot be written.
    """
    folder = drafts / DATASETS
    path = folder / f"{manifest.digest.removeprefix('sha256:')}{SUFFIX}"
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        for each in missing:
            sync_directory(each.parent)
        write_private(path, encode_manifest(manifest).decode())
    except OSError as error:
        raise DraftStorageError(f"cannot write the data set {path}: {error.strerror}") from error
    return path
