"""
The manifest of a data set: request, tenant, length and digest of each sample, but no content.

A manifest is named by the digest of its canonical JSON, so a training record identifies its data even after
some of it is erased.  Pure.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from appliance.errors import DraftRefusedError

FORMAT = 1
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
HELD_OUT_ONE_IN = 10
_HEX = re.compile(r"[0-9a-f]{64}")
_TEXTS = ("request_id", "tenant", "template", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    request_id: str
    tenant: str
    template: str
    context: str
    tokens: int
    """Prompt and answer together."""
    digest: str
    """SHA-256 (hex) of the sample's canonical form; its salt prevents guessing the text."""
    held_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetManifest:
    target: str
    tokenizer: str
    """Digest of the tokenizer's files and chat template."""
    policy: str
    """The condition that allowed it."""
    made: str
    """RFC 3339 in UTC."""
    samples: tuple[ManifestEntry, ...]
    """In order of request id; no request twice."""

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(encode_manifest(self)).hexdigest()}"


def is_held_out(request_id: str) -> bool:
    """Whether a request is held out: a tenth of all, the same in every data set."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def encode_manifest(manifest: DatasetManifest) -> bytes:
    content = {"v": FORMAT, **asdict(manifest)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def decode_manifest(content: bytes, digest: str) -> DatasetManifest:
    """Decode a manifest; raises DraftRefusedError if it was altered or has an unknown format."""
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise DraftRefusedError(f"the manifest of data set {digest} was altered: harvest again")
    try:
        fields = json.loads(content)
        if fields.pop("v") != FORMAT:
            raise DraftRefusedError(f"the manifest of data set {digest} is of another version: harvest again")
        manifest = DatasetManifest(samples=tuple(_entry(each) for each in fields.pop("samples")), **fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DraftRefusedError(f"the manifest of data set {digest} is malformed: harvest again") from error
    ids = [entry.request_id for entry in manifest.samples]
    if ids != sorted(set(ids)):
        raise DraftRefusedError(f"the manifest of data set {digest} names a request twice: harvest again")
    return manifest


def _entry(fields: Mapping[str, Any]) -> ManifestEntry:
    entry = ManifestEntry(**fields)
    sound = all(isinstance(getattr(entry, name), str) for name in _TEXTS) and _HEX.fullmatch(entry.digest)
    if not sound or type(entry.tokens) is not int or type(entry.held_out) is not bool:
        raise ValueError("an entry is not what it has to be")
    return entry
