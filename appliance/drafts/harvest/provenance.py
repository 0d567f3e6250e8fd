"""
Which requests a draft learnt from, and whether each of them could still be learnt from then.

The draft's own list of what it used is held against the log: an `erasure` entry before the training
entry must cover none of it.  What was erased after the training is told as well, for a draft keeps
what it learnt.  Pure.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.audit.content.payloads import first_id
from appliance.audit.content.retention import parse_moment
from appliance.drafts.harvest.manifest import Manifest
from appliance.errors import DraftRefusedError

FIELDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """A used request that an entry of the log calls erased."""

    request_id: str
    tenant: str
    index: int
    """Of the `erasure` entry, the first that covers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What is known of a draft's training data."""

    dataset: str | None
    """Digest of the data set's manifest, as the draft's record has it."""
    trained: int | None
    """Index of the `draft.trained` entry; None: the log knows of no training here."""
    used: int
    """Samples it learnt from."""
    tenants: Mapping[str, int]
    """How many of whom."""
    unknown: tuple[str, ...]
    """Used requests that the data set does not name, or with another digest."""
    erased_before: tuple[Covered, ...]
    """Erased before the training: they must not have been used."""
    erased_since: tuple[Covered, ...]
    """Erased after it."""

    @property
    def is_sound(self) -> bool:
        """Whether every used sample is the data set's, and none of them had been erased before."""
        return not self.unknown and not self.erased_before


def parse_used(content: bytes, digest: object) -> dict[str, str]:
    """
    Read the list of used samples; digests by request id.

    Args:
        content: of `used.txt`: a request id and a sample's digest on each line.
        digest: SHA-256 of it in hex, as the training record has it.

    Raises:
        DraftRefusedError: it is another list than the record's, or none.
    """
    if hashlib.sha256(content).hexdigest() != digest:
        raise DraftRefusedError("used.txt is not the list that the draft's training record names")
    used: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        words = line.split()
        if len(words) != FIELDS or words[0] in used:
            raise DraftRefusedError(f"line {len(used) + 1} of used.txt is not a request and a digest")
        used[words[0]] = words[1]
    return used


def trace(
    used: Mapping[str, str],
    manifest: Manifest,
    entries: Sequence[tuple[int, Mapping[str, Any]]],
    *,
    trained: int | None,
) -> Provenance:
    """
    Hold what a draft used against its data set and the log.

    Args:
        used: digests by request id.
        manifest: of the data set.
        entries: index and members of every `erasure` entry, in order.
        trained: index of the first entry that says the draft was trained; None where there is none,
            and whatever was erased counts as erased before.
    """
    named = {entry.request_id: entry for entry in manifest.samples}
    covered: list[Covered] = []
    for request_id in sorted(used.keys() & named.keys()):
        tenant = named[request_id].tenant
        index = _erased_at(request_id, tenant, entries)
        if index is not None:
            covered.append(Covered(request_id=request_id, tenant=tenant, index=index))
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
    """Index of the first `draft.trained` entry about a draft; a crash may have had it written twice."""
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
