"""
Signatures of files and the keys a site trusts: MANIFEST.sig of a bundle, and its counterparts for drafts.

A C2SP signed note (c2sp.org/signed-note) whose text contains the file's hash and size.  Its first line
names the kind of file; it is not the origin of a log and the second line is not a number, so a signature of
one kind can never pass as one of another kind, nor as a checkpoint of an audit log, nor the reverse.  Only
Ed25519 signatures (type 0x01) count.  Fails closed: without a signature by a trusted key in force the file
is refused.

Trusted keys are a file with one key a line and the days on which it is valid:

    # release key, handed over on paper
    example.com/releases+1a2b3c4d+AbCd...= not-before=2026-01-01 not-after=2027-06-30

Both dates are days in UTC and included; either may be absent.  The file belongs to the site, which decides
how long a key is valid.  Pure, except for `load_trusted_keys`.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.audit.checkpoint import (
    Note,
    NoteSigner,
    VerifierKey,
    parse_note,
    parse_verifier_key,
    sign_note,
)
from appliance.audit.cosignature import ED25519
from appliance.errors import AuditKeyError, BundleRefusedError, ConfigurationError, MalformedCheckpointError
from appliance.sovereignty.bundle.manifest import MANIFEST, SIGNATURE

FORM = "a line is `name+hash+base64 not-before=2026-01-01 not-after=2027-12-31`; either date may be omitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    verifier_key: VerifierKey
    not_before: date | None = None
    not_after: date | None = None

    @property
    def name(self) -> str:
        return self.verifier_key.name

    def in_force(self, now: float) -> bool:
        """Whether it is valid at `now`, in seconds since the epoch."""
        day = datetime.fromtimestamp(now, UTC).date()
        return not (
            (self.not_before is not None and day < self.not_before)
            or (self.not_after is not None and day > self.not_after)
        )

    def complaint(self, now: float) -> str:
        day = datetime.fromtimestamp(now, UTC).date()
        if self.not_before is not None and day < self.not_before:
            return f"the key {self.name} is valid from {self.not_before}, and today is {day}: check the clock"
        return (
            f"the key {self.name} was valid until {self.not_after}, and today is {day}: get the same "
            "signed with a newer key, or extend not-after if the key is still good"
        )


def load_trusted_keys(path: Path) -> tuple[TrustedKey, ...]:
    """Read a site's trusted keys; raises ConfigurationError if there is no file or no usable key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the trusted keys {path} ({error}): put the release key there"
        raise ConfigurationError(message) from error
    try:
        keys = parse_trusted_keys(text)
    except AuditKeyError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not keys:
        raise ConfigurationError(f"{path} has no key: {FORM}")
    return keys


def parse_trusted_keys(text: str) -> tuple[TrustedKey, ...]:
    """The keys of a trusted-keys file; raises AuditKeyError if a line is malformed."""
    lines = [line.strip() for line in text.splitlines()]
    return tuple(_parse_line(line) for line in lines if line and not line.startswith("#"))


def end_of(day: date) -> int:
    """First second after a day, in seconds since the epoch."""
    return int(
        datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() + timedelta(days=1).total_seconds()
    )


def _parse_line(line: str) -> TrustedKey:
    encoded, *rest = line.split()
    key = parse_verifier_key(encoded)
    if key.kind != ED25519:
        raise AuditKeyError(f"the key {key.name} does not sign bundles: it must be Ed25519 (type 01)")
    days: dict[str, date] = {}
    for word in rest:
        name, _, value = word.partition("=")
        if name not in {"not-before", "not-after"} or name in days:
            raise AuditKeyError(f"{word} after the key {key.name} is not allowed: {FORM}")
        try:
            days[name] = date.fromisoformat(value)
        except ValueError as error:
            raise AuditKeyError(f"{word} is not a date: {FORM}") from error
    return TrustedKey(verifier_key=key, not_before=days.get("not-before"), not_after=days.get("not-after"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedKind:
    """A kind of signed file, with the names used in error messages."""

    heading: str
    """First line of the signed text; unique per kind."""
    file: str
    signature: str
    """Name of the file with the note."""
    thing: str
    """What the file describes."""

    def text(self, content: bytes) -> str:
        return f"{self.heading}\nsha256:{hashlib.sha256(content).hexdigest()}\n{len(content)}\n"

    def sign(self, content: bytes, signer: NoteSigner) -> bytes:
        return sign_note(self.text(content), [signer]).encode()

    def verify(self, content: bytes, note_bytes: bytes, trusted: Iterable[TrustedKey], now: float) -> str:
        """A trusted key in force at `now` (Unix time) that signed, by name; else BundleRefusedError."""
        try:
            note = parse_note(note_bytes.decode())
        except (UnicodeDecodeError, MalformedCheckpointError) as error:
            raise BundleRefusedError(f"{self.signature} cannot be read: {error}") from error
        if note.text != self.text(content):
            raise BundleRefusedError(
                f"{self.signature} belongs to another {self.file}: one of the two was altered"
            )
        known = [key for key in trusted if self._signed(note, key)]
        if not known:
            names = ", ".join(signature.name for signature in note.signatures)
            raise BundleRefusedError(f"no trusted key signed {self.thing}: its signature is by {names}")
        for key in known:
            if key.in_force(now):
                return key.name
        raise BundleRefusedError(known[0].complaint(now))

    def _signed(self, note: Note, key: TrustedKey) -> bool:
        """Whether the key signed the note; raises if a signature in its name is invalid."""
        mine = [
            line.signature
            for line in note.signatures
            if (line.name, line.key_id) == (key.verifier_key.name, key.verifier_key.key_id)
        ]
        for signature in mine:
            try:
                public_key = Ed25519PublicKey.from_public_bytes(key.verifier_key.public_key)
                public_key.verify(signature, note.text.encode())
            except (InvalidSignature, ValueError) as error:
                problem = f"the signature of {key.name} is invalid: {self.signature} was altered"
                raise BundleRefusedError(problem) from error
        return bool(mine)


BUNDLE = SignedKind(
    heading="sovereign-appliance bundle v1", file=MANIFEST, signature=SIGNATURE, thing="the bundle"
)
