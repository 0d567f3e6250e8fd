"""
What the registry says of one draft: revision.json, beside the weights and signed.

Its digest names every byte that decides how the draft answers, so the signature covers these as well.
One spelling: a file whose bytes are not those its values encode to was altered.  Pure.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from appliance.audit.checkpoint import is_key_name
from appliance.drafts.record import TrainingRecord, encode_record, parse_record
from appliance.errors import DraftRefusedError
from appliance.infra.canonical_json import canonical
from appliance.sovereignty.bundle.signature import SignedKind

REVISION = "revision.json"
SIGNATURE = "revision.sig"
SIGNED = SignedKind(
    heading="sovereign-appliance draft revision v1",
    file=REVISION,
    signature=SIGNATURE,
    thing="the draft",
)
FORMAT = 1
MAX_BYTES = 2**20
"""Room for any recipe; more is refused before it is read into memory."""

Source = Literal["imported", "trained"]
"""How a draft came into this registry."""

_SOURCES: Mapping[str, Source] = {"imported": "imported", "trained": "trained"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One draft that was registered."""

    digest: str
    """Of its weights, as `appliance.serving.weights` has it."""
    target: str
    """Digest of the target it was made for."""
    record: TrainingRecord
    """What its trainer wrote down."""
    parent: str | None = None
    """Digest of the draft its training started from."""
    dataset: str | None = None
    """Digest of the manifest of the data it was trained on."""
    source: Source
    made: str
    """When it was registered here, RFC 3339 in UTC with milliseconds."""
    origin: str | None = None
    """Key that signed it where it came from; None for what this site made, or vouches for by itself."""

    @property
    def hex(self) -> str:
        """The 64 hex digits of its digest, which its directory is named by."""
        return self.digest.removeprefix("sha256:")

    def encode(self) -> bytes:
        """
        Return revision.json: its one spelling.

        Raises:
            DraftRefusedError: the training record holds what JSON has no spelling for, such as a NaN.
        """
        content = {
            "format": FORMAT,
            "digest": self.digest,
            "target": self.target,
            "record": encode_record(self.record),
            "parent": self.parent,
            "dataset": self.dataset,
            "source": self.source,
            "made": self.made,
            "origin": self.origin,
        }
        try:
            return canonical({name: value for name, value in content.items() if value is not None})
        except (ValueError, TypeError, RecursionError) as error:
            raise DraftRefusedError(
                f"the draft's training.json cannot be registered ({error}): have it written as plain JSON"
            ) from error

    @classmethod
    def decode(cls, content: bytes) -> "Revision":
        """
        Read revision.json.

        Raises:
            DraftRefusedError: it is none, or is not in its one spelling.
        """
        try:
            said = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DraftRefusedError(f"{REVISION} is not JSON: it was cut off or altered") from error
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            raise DraftRefusedError(
                f"{REVISION} is of another format than {FORMAT}: it needs a newer release"
            )
        revision = cls._parse(said)
        if revision.encode() != content:
            raise DraftRefusedError(f"{REVISION} is not in its canonical spelling: it was altered")
        return revision

    @classmethod
    def _parse(cls, said: dict[str, Any]) -> "Revision":
        digest, target = said.get("digest"), said.get("target")
        parent, dataset = said.get("parent"), said.get("dataset")
        source, made, origin = said.get("source"), said.get("made"), said.get("origin")
        if not is_digest(digest) or not is_digest(target):
            raise _broken("digest or target")
        if parent is not None and not is_digest(parent):
            raise _broken("parent")
        if dataset is not None and not is_digest(dataset):
            raise _broken("dataset")
        if not isinstance(source, str) or source not in _SOURCES:
            raise _broken("source")
        if not isinstance(made, str) or not _TIME.fullmatch(made):
            raise _broken("made")
        if origin is not None and not (isinstance(origin, str) and is_key_name(origin)):
            raise _broken("origin")
        written = said.get("record")
        if not isinstance(written, dict):
            raise _broken("record")
        record, wrong = parse_record(written)
        if wrong:
            raise _broken(f"record.{wrong[0]}")
        return cls(
            digest=digest,
            target=target,
            record=record,
            parent=parent,
            dataset=dataset,
            source=_SOURCES[source],
            made=made,
            origin=origin,
        )


def is_digest(value: object) -> TypeGuard[str]:
    """Whether a value is a digest as `sha256:` and 64 hex digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _broken(member: str) -> DraftRefusedError:
    return DraftRefusedError(f"{REVISION} does not say {member} as it has to: it was altered")
