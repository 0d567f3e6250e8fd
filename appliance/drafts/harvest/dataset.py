"""
A harvested data set: its manifest on disk, its samples with the content they were made from.

Samples are decrypted one by one.  Samples erased since, and samples of tenants that withdrew their
permission, are skipped and counted.  Fails closed: a sample that differs from the manifest raises.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

from appliance.drafts.harvest.candidate import still_allows
from appliance.drafts.harvest.content_vault import ContentVault, open_vault
from appliance.drafts.harvest.dataset_manifest import (
    DatasetManifest,
    ManifestEntry,
    decode_manifest,
    encode_manifest,
)
from appliance.drafts.harvest.sample import TrainingSample
from appliance.errors import DraftNotFoundError, DraftRefusedError, DraftStorageError
from appliance.infra.data_directory import locate
from appliance.infra.files import sync_directory, write_private
from appliance.infra.settings import Settings
from appliance.tenancy.store import open_tenant_store

DATASETS = "datasets"
SUFFIX = ".json"
DIRECTORY_MODE = 0o700
_NAME = re.compile(r"[0-9a-f]{64}")


class Dataset:
    """Made by `open_dataset`; used by one thread."""

    def __init__(
        self,
        manifest: DatasetManifest,
        *,
        vault: Callable[[], AbstractContextManager[ContentVault]],
        permitted: Callable[[], Collection[str]],
    ) -> None:
        self.manifest = manifest
        self._vault = vault
        self._permitted = permitted
        self._erased: set[str] = set()
        self._withheld: set[str] = set()

    @property
    def missing(self) -> int:
        """Samples found erased so far, each counted once."""
        return len(self._erased)

    @property
    def withheld(self) -> int:
        """Samples skipped so far because their tenants no longer allow training."""
        return len(self._withheld)

    def read(self, held_out: bool) -> Iterator[TrainingSample]:  # noqa: FBT001 - which half, and nothing else
        """Decrypt the samples left, in order of request; DraftRefusedError if one is not the manifest's."""
        permitted = self._permitted()
        with self._vault() as vault:
            for entry in self.manifest.samples:
                if entry.held_out is not held_out:
                    continue
                if entry.tenant not in permitted:
                    self._withheld.add(entry.request_id)
                    continue
                sample = vault.read(entry.request_id)
                if sample is None:
                    self._erased.add(entry.request_id)
                    continue
                self._check(entry, sample)
                yield sample

    def _check(self, entry: ManifestEntry, sample: TrainingSample) -> None:
        if sample.tokenizer != self.manifest.tokenizer:
            raise DraftRefusedError(
                f"request {entry.request_id} was harvested again with another tokenizer: harvest again for "
                "this target"
            )
        if (sample.digest, sample.tenant) != (entry.digest, entry.tenant):
            raise DraftRefusedError(
                f"the sample of request {entry.request_id} differs from the manifest: harvest again"
            )


def open_dataset(settings: Settings, name: str) -> Dataset:
    """Open a data set by its digest or a prefix of its hex digits, which only one data set may have."""

    def permitted() -> Collection[str]:
        with closing(open_tenant_store(locate(settings))) as store:
            return frozenset(tenant.name for tenant in store.read().tenants if still_allows(tenant))

    return Dataset(
        find_manifest(locate(settings).drafts, name),
        # Reading neither seals nor makes keys, so it needs no time.
        vault=lambda: open_vault(settings, clock=lambda: 0.0),
        permitted=permitted,
    )


def find_manifest(drafts: Path, name: str) -> DatasetManifest:
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


def save_manifest(drafts: Path, manifest: DatasetManifest) -> Path:
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
