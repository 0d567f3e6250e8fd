"""
What a harvest took, without any of it: which requests, whose, how long, and each sample's digest.

A manifest is named by the digest of its canonical JSON, so a draft's training record can name the
data it was trained on for good, whatever of that data is erased later.  Pure.
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
class Entry:
    """One sample."""

    request_id: str
    tenant: str
    template: str
    context: str
    tokens: int
    """Tokens of prompt and answer."""
    digest: str
    """SHA-256 of the sample's canonical form, in hex; the form holds a salt, so it gives nothing away."""
    held_out: bool
    """Whether it is kept for judging and never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One data set."""

    target: str
    """Digest of the target's weights."""
    tokenizer: str
    """Digest of the tokenizer's files and chat template."""
    policy: str
    """What allowed it."""
    made: str
    """When, RFC 3339 in UTC."""
    samples: tuple[Entry, ...]
    """In order of request id; no request twice."""

    @property
    def digest(self) -> str:
        """The name of the data set: `sha256:` and the hash of the canonical JSON."""
        return f"sha256:{hashlib.sha256(encode_manifest(self)).hexdigest()}"


def is_held_out(request_id: str) -> bool:
    """Whether a request is kept for judging: a tenth of all, the same ones in every data set."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the canonical JSON; `decode_manifest` reads it back."""
    content = {"v": FORMAT, **asdict(manifest)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def decode_manifest(content: bytes, digest: str) -> Manifest:
    """
    Read a manifest that has to have this digest.

    Raises:
        DraftRefusedError: it was altered, or is of a form that is not known here.
    """
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise DraftRefusedError(f"the manifest of data set {digest} was altered: harvest again")
    try:
        fields = json.loads(content)
        if fields.pop("v") != FORMAT:
            raise DraftRefusedError(f"the manifest of data set {digest} is of another version: harvest again")
        manifest = Manifest(samples=tuple(_entry(each) for each in fields.pop("samples")), **fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DraftRefusedError(f"the manifest of data set {digest} is malformed: harvest again") from error
    ids = [entry.request_id for entry in manifest.samples]
    if ids != sorted(set(ids)):
        raise DraftRefusedError(f"the manifest of data set {digest} names a request twice: harvest again")
    return manifest


def _entry(fields: Mapping[str, Any]) -> Entry:
    entry = Entry(**fields)
    sound = all(isinstance(getattr(entry, name), str) for name in _TEXTS) and _HEX.fullmatch(entry.digest)
    if not sound or type(entry.tokens) is not int or type(entry.held_out) is not bool:
        raise ValueError("an entry is not what it has to be")
    return entry
