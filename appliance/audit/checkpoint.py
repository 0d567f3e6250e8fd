"""
Signed tree heads: C2SP `tlog-checkpoint` in a C2SP `signed-note`; keys, notes and checkpoints are one format.

A note may carry signatures of keys we do not know; they are kept and ignored, as the specification asks.  A
log signs with Ed25519 (type 0x01) and optionally ML-DSA-44 (0x06); a witness cosigns with Ed25519 (0x04) or
ML-DSA-44.  What each type signs is in `appliance.audit.cosignature`.  Pure.

Sources: c2sp.org/signed-note@v1.0.0, c2sp.org/tlog-checkpoint@v1.0.0.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.audit.cosignature import (
    ALGORITHM_NAMES,
    ED25519,
    ED25519_COSIGNATURE,
    MLDSA44,
    PUBLIC_KEY_BYTES,
    TIMESTAMPED,
    ed25519_message,
    mldsa_message,
    parse_timestamped,
)
from appliance.audit.mldsa import verify_mldsa
from appliance.errors import AuditKeyError, AuditVerificationError, MalformedCheckpointError

HASH_BYTES = 32
KEY_ID_BYTES = 4
MAX_NOTE_CHARACTERS = 2**18
"""Room for sixteen post-quantum signatures, as the specification asks, and then some."""

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
_SIGNATURE_PREFIX = "\u2014 "
_KEY_FORM = "a verifier key reads `name+hash+base64`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A tree head: this log had this root at this size."""

    origin: str
    size: int
    root: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSignature:
    name: str
    key_id: bytes
    signature: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A signed text; the text ends in a newline."""

    text: str
    signatures: tuple[NoteSignature, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierKey:
    """A public key with the name it signs under."""

    name: str
    kind: int
    """Signature type byte of c2sp.org/signed-note."""
    public_key: bytes

    @property
    def key_id(self) -> bytes:
        """Four bytes that identify, with the name, the key of a signature."""
        content = self.name.encode() + b"\n" + bytes([self.kind]) + self.public_key
        return hashlib.sha256(content).digest()[:KEY_ID_BYTES]

    def encode(self) -> str:
        """Return the one-line form `name+hash+base64`, for auditors."""
        return f"{self.name}+{self.key_id.hex()}+{_to_base64(bytes([self.kind]) + self.public_key)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosignature:
    """What a known witness stated about a checkpoint."""

    name: str
    kind: int
    time: int
    """When, in seconds since the epoch, by the witness's clock."""


class NoteSigner(Protocol):
    """A private key, as `sign_note` uses it."""

    @property
    def verifier_key(self) -> VerifierKey: ...

    def sign_text(self, text: str, time: int) -> bytes:
        """Return the signature of a note's text, as it stands in its line after the key id."""
        ...


def is_key_name(name: str) -> bool:
    """Whether a key or origin may have this name: not empty, no white space, no control, no `+`."""
    return bool(name) and not any(
        character.isspace() or character == "+" or ord(character) < ord(" ") for character in name
    )


def parse_verifier_key(text: str) -> VerifierKey:
    """Read the one-line form of a verifier key; raises AuditKeyError."""
    name, _, rest = text.strip().partition("+")
    key_hash, _, encoded = rest.partition("+")
    try:
        material = _from_base64(encoded)
    except ValueError as error:
        raise AuditKeyError(_KEY_FORM) from error
    if not is_key_name(name) or not material:
        raise AuditKeyError(_KEY_FORM)
    if len(material) != 1 + PUBLIC_KEY_BYTES.get(material[0], -1):
        raise AuditKeyError(
            f"the verifier key of {name} is neither an Ed25519 (type 01), an Ed25519 cosignature (04) nor "
            "an ML-DSA-44 key (06)"
        )
    key = VerifierKey(name=name, kind=material[0], public_key=material[1:])
    if key.key_id.hex() != key_hash:
        raise AuditKeyError(f"the verifier key of {name} does not match its hash: it was altered or mistyped")
    return key


def parse_verifier_keys(text: str) -> tuple[VerifierKey, ...]:
    """Read verifier keys, one a line, skipping empty lines and comments (`#`); raises AuditKeyError."""
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(parse_verifier_key(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise AuditKeyError(f"there is no verifier key: {_KEY_FORM}")
    return keys


def encode_body(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.origin}\n{checkpoint.size}\n{_to_base64(checkpoint.root)}\n"


def parse_body(text: str) -> Checkpoint:
    """
    Read the signed text of a checkpoint; raises MalformedCheckpointError.

    Extension lines are refused: this log writes none, and no one could audit them.
    """
    try:
        origin, size, encoded, end = text.split("\n")
        root = _from_base64(encoded)
    except ValueError as error:
        raise MalformedCheckpointError("a checkpoint has three lines: origin, size and root") from error
    if end or not origin or not _DECIMAL.fullmatch(size) or len(root) != HASH_BYTES:
        raise MalformedCheckpointError("a checkpoint has three lines: origin, size and root")
    return Checkpoint(origin=origin, size=int(size), root=root)


def sign_note(text: str, signers: Sequence[NoteSigner], *, time: int = 0) -> str:
    """
    Return `text`, which ends in a newline, with one signature line per signer.

    `time`, in seconds since the epoch, is stated by ML-DSA-44 signatures; 0 states nothing.
    """
    return f"{text}\n{signature_lines(text, signers, time=time)}"


def signature_lines(text: str, signers: Sequence[NoteSigner], *, time: int) -> str:
    return "".join(
        f"{_SIGNATURE_PREFIX}{signer.verifier_key.name} "
        f"{_to_base64(signer.verifier_key.key_id + signer.sign_text(text, time))}\n"
        for signer in signers
    )


def signed_message(key: VerifierKey, text: str, time: int) -> bytes:
    """Return what a key signs; raises MalformedCheckpointError if an ML-DSA-44 key gets no checkpoint."""
    if key.kind == ED25519:
        return text.encode()
    if key.kind == ED25519_COSIGNATURE:
        return ed25519_message(time=time, text=text)
    head = parse_body(text)
    return mldsa_message(name=key.name, time=time, origin=head.origin, size=head.size, root=head.root)


def parse_note(note_text: str) -> Note:
    """Split a signed note, without judging text or signatures; raises MalformedCheckpointError."""
    text, blank, block = note_text.rpartition("\n\n")
    if not blank or not text or not block.endswith("\n") or len(note_text) > MAX_NOTE_CHARACTERS:
        raise MalformedCheckpointError("a signed note is text, an empty line and signature lines")
    if any(character < " " and character != "\n" for character in note_text) or not _is_utf8(note_text):
        raise MalformedCheckpointError("a signed note has no control characters and is UTF-8")
    # Split on newlines alone: `splitlines` would also break on characters a name may contain.
    signatures = tuple(_parse_signature(line) for line in block[:-1].split("\n"))
    return Note(text=f"{text}\n", signatures=signatures)


def with_signatures(note_text: str, lines: Iterable[str]) -> str:
    """Return the note with further signature lines; one that it has already is not added again."""
    present = note_text.rpartition("\n\n")[2].splitlines(keepends=True)
    return note_text + "".join(line for line in dict.fromkeys(lines) if line not in present)


def verify_checkpoint(note_text: str, *verifier_keys: VerifierKey) -> Checkpoint:
    """
    Return the checkpoint, once it is certain that every one of the keys signed it.

    Raises MalformedCheckpointError, or AuditVerificationError if a key did not sign it or is of another log.
    """
    note = parse_note(note_text)
    for key in verifier_keys:
        if not _verified(note, key):
            raise AuditVerificationError(
                f"the checkpoint carries no signature of {key.name} with this {ALGORITHM_NAMES[key.kind]} key"
            )
    checkpoint = parse_body(note.text)
    for key in verifier_keys:
        if checkpoint.origin != key.name:
            raise AuditVerificationError(
                f"the checkpoint is of the log {checkpoint.origin}, not of {key.name}"
            )
    if not verifier_keys:
        raise AuditVerificationError("a checkpoint cannot be verified without a key")
    return checkpoint


def verify_cosignatures(note_text: str, witness_keys: Iterable[VerifierKey]) -> tuple[Cosignature, ...]:
    """
    Return what the known witnesses stated about a checkpoint; others are ignored.

    Raises MalformedCheckpointError, or AuditVerificationError if a known witness's signature is wrong.
    """
    note = parse_note(note_text)
    return tuple(
        Cosignature(name=key.name, kind=key.kind, time=max(times))
        for key in witness_keys
        if key.kind in TIMESTAMPED and (times := [time for time in _verified(note, key) if time])
    )


def _verified(note: Note, key: VerifierKey) -> list[int]:
    """Return the times (0 for none) of the key's signatures, all of which must be right."""
    return [
        _check_signature(key, note.text, line.signature)
        for line in note.signatures
        if (line.name, line.key_id) == (key.name, key.key_id)
    ]


def _check_signature(key: VerifierKey, text: str, content: bytes) -> int:
    try:
        time, signature = parse_timestamped(content, key.kind) if key.kind in TIMESTAMPED else (0, content)
        message = signed_message(key, text, time)
        if key.kind == MLDSA44:
            verify_mldsa(key.public_key, signature, message)
        else:
            Ed25519PublicKey.from_public_bytes(key.public_key).verify(signature, message)
    except (InvalidSignature, ValueError, MalformedCheckpointError) as error:
        problem = f"the signature of {key.name} does not match the checkpoint"
        raise AuditVerificationError(problem) from error
    return time


def _parse_signature(line: str) -> NoteSignature:
    name, space, encoded = line.removeprefix(_SIGNATURE_PREFIX).partition(" ")
    try:
        content = _from_base64(encoded)
    except ValueError:
        content = b""
    if (
        not line.startswith(_SIGNATURE_PREFIX)
        or not space
        or not is_key_name(name)
        or len(content) <= KEY_ID_BYTES
    ):
        raise MalformedCheckpointError("a signature line reads: em dash, key name, base64")
    return NoteSignature(name=name, key_id=content[:KEY_ID_BYTES], signature=content[KEY_ID_BYTES:])


def _is_utf8(text: str) -> bool:
    """Whether the text can be encoded at all; a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _from_base64(text: str) -> bytes:
    """Decode canonical standard base64, or raise ValueError."""
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(text) from error
    if _to_base64(content) != text:
        raise ValueError(text)
    return content
