"""
`revision.json`: the registry's signed statement on a draft.

Its digest covers every byte that decides the draft's answers, so the signature covers these too.  The
encoding is canonical: other bytes were altered.  Pure.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from appliance.audit.checkpoint import is_key_name
from appliance.drafts.training_record import TrainingRecord, encode_record, parse_record
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
"""Maximum size; larger files are refused before they are read."""

Source = Literal["imported", "trained"]

_SOURCES: Mapping[str, Source] = {"imported": "imported", "trained": "trained"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    digest: str
    """Of its weights, as in `appliance.serving.weights`."""
    target: str
    record: TrainingRecord
    parent: str | None = None
    dataset: str | None = None
    source: Source
    made: str
    """Time of registration, RFC 3339 in UTC with milliseconds."""
    origin: str | None = None
    """Trusted key that signed it elsewhere; None for drafts trained or vouched for here."""

    @property
    def hex(self) -> str:
        """The 64 hex digits of its digest: its directory's name."""
        return self.digest.removeprefix("sha256:")

    def encode(self) -> bytes:
        """Raises DraftRefusedError if the training record holds values without a JSON form, such as NaN."""
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
                f"the draft's training.json cannot be registered ({error}): write it as plain JSON"
            ) from error

    @classmethod
    def decode(cls, content: bytes) -> "Revision":
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DraftRefusedError(f"{REVISION} is not JSON: it was cut off or altered") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise DraftRefusedError(f"{REVISION} has another format than {FORMAT}: it needs a newer release")
        revision = cls._parse(fields)
        if revision.encode() != content:
            raise DraftRefusedError(f"{REVISION} is not canonical: it was altered")
        return revision

    @classmethod
    def _parse(cls, fields: dict[str, Any]) -> "Revision":
        digest, target = fields.get("digest"), fields.get("target")
        source, made, origin = fields.get("source"), fields.get("made"), fields.get("origin")
        if not is_digest(digest) or not is_digest(target):
            raise _altered("digest or target")
        for member in ("parent", "dataset"):
            if fields.get(member) is not None and not is_digest(fields[member]):
                raise _altered(member)
        if not isinstance(source, str) or source not in _SOURCES:
            raise _altered("source")
        if not isinstance(made, str) or not _TIME.fullmatch(made):
            raise _altered("made")
        if origin is not None and not (isinstance(origin, str) and is_key_name(origin)):
            raise _altered("origin")
        written = fields.get("record")
        if not isinstance(written, dict):
            raise _altered("record")
        record, wrong = parse_record(written)
        if wrong:
            raise _altered(f"record.{wrong[0]}")
        return cls(
            digest=digest,
            target=target,
            record=record,
            parent=fields.get("parent"),
            dataset=fields.get("dataset"),
            source=_SOURCES[source],
            made=made,
            origin=origin,
        )


def is_digest(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _altered(member: str) -> DraftRefusedError:
    return DraftRefusedError(f"{REVISION} has an invalid {member}: it was altered")
