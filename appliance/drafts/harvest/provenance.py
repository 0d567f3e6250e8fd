"""
The requests a draft was trained on, checked against the erasures in the log.

No `erasure` entry before the training entry may cover a used request.  Later erasures are reported as well,
because a draft keeps what it learned.  Pure.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.audit.content.payloads import first_id
from appliance.audit.content.retention import parse_moment
from appliance.drafts.harvest.dataset_manifest import DatasetManifest
from appliance.errors import DraftRefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedSample:
    request_id: str
    tenant: str
    index: int
    """Index of the first `erasure` entry that covers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    dataset: str | None
    """Digest of the data set's manifest, from the draft's record."""
    trained: int | None
    """Index of the `draft.trained` entry; None if the log has none."""
    used: int
    tenants: Mapping[str, int]
    """Samples per tenant."""
    unknown: tuple[str, ...]
    """Used requests that are not in the data set, or have another digest there."""
    erased_before: tuple[ErasedSample, ...]
    """Erased before the training: must not have been used."""
    erased_since: tuple[ErasedSample, ...]

    @property
    def is_sound(self) -> bool:
        return not self.unknown and not self.erased_before


def parse_used(content: bytes, digest: object) -> dict[str, str]:
    """Parse `used.txt` into digests by request id; `digest` is its SHA-256 (hex) in the training record."""
    if hashlib.sha256(content).hexdigest() != digest:
        raise DraftRefusedError("used.txt differs from the list in the draft's training record")
    used: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        match line.split():
            case [request_id, sample] if request_id not in used:
                used[request_id] = sample
            case _:
                raise DraftRefusedError(f"line {len(used) + 1} of used.txt is not a request ID and a digest")
    return used


def trace(
    used: Mapping[str, str],
    manifest: DatasetManifest,
    entries: Sequence[tuple[int, Mapping[str, Any]]],
    *,
    trained: int | None,
) -> Provenance:
    """
    Check the samples a draft used against its data set and the log.

    `entries` has index and members of every `erasure` entry, in order.  `trained` is the index of the first
    entry on the draft's training; without one, every erasure counts as earlier.
    """
    named = {entry.request_id: entry for entry in manifest.samples}
    covered = [
        ErasedSample(request_id=each, tenant=named[each].tenant, index=index)
        for each in sorted(used.keys() & named.keys())
        if (index := _erased_at(each, named[each].tenant, entries)) is not None
    ]
    return Provenance(
        dataset=manifest.digest,
        trained=trained,
        used=len(used),
        tenants=dict(sorted(Counter(named[each].tenant for each in used if each in named).items())),
        unknown=tuple(sorted(each for each in used if each not in named or named[each].digest != used[each])),
        erased_before=tuple(each for each in covered if trained is None or each.index < trained),
        erased_since=tuple(each for each in covered if trained is not None and each.index >= trained),
    )


def first_training(draft: str, entries: Iterable[tuple[int, Mapping[str, Any]]]) -> int | None:
    """Index of the first `draft.trained` entry on a draft; a crash may have written it twice."""
    return next((index for index, entry in entries if entry.get("draft") == draft), None)


def _erased_at(request_id: str, tenant: str, entries: Sequence[tuple[int, Mapping[str, Any]]]) -> int | None:
    for index, entry in entries:
        if entry.get("tenant") != tenant:
            continue
        if request_id in entry.get("requests", ()):
            return index
        if "before" in entry and request_id < first_id(parse_moment(entry["before"], "before")):
            return index
    return None
