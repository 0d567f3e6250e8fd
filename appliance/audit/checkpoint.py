"""
Signed tree heads: C2SP `tlog-checkpoint` in a C2SP `signed-note`.

Pure: text in, values out.  A note may carry signatures of keys we do not know (witnesses, a second
algorithm); they are kept and ignored, as the specification asks.  Only Ed25519 (type 0x01) is made
and checked here.  ML-DSA-44 (0x06) would be one more `case` in `_check_signature` and one more
`NoteSigner` given to `sign_note`; nothing else knows the algorithm.

Sources: c2sp.org/signed-note@v1.0.0, c2sp.org/tlog-checkpoint@v1.0.0.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from appliance.errors import AuditKeyError, AuditVerificationError, MalformedCheckpointError

ED25519 = 0x01
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
    """One signature line: who claims to have signed, and the signature."""

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
        """Four bytes that, with the name, tell which key made a signature."""
        content = self.name.encode() + b"\n" + bytes([self.kind]) + self.public_key
        return hashlib.sha256(content).digest()[:KEY_ID_BYTES]

    def encode(self) -> str:
        """Return the one-line form `name+hash+base64`, to be handed to auditors."""
        return f"{self.name}+{self.key_id.hex()}+{_to_base64(bytes([self.kind]) + self.public_key)}"


class NoteSigner(Protocol):
    """What `sign_note` needs of a private key."""

    @property
    def verifier_key(self) -> VerifierKey:
        """Public half."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return the bare signature of `message`."""
        ...


def is_key_name(name: str) -> bool:
    """Whether a key or origin may have this name: not empty, no white space, no control, no `+`."""
    return bool(name) and not any(
        character.isspace() or character == "+" or ord(character) < ord(" ") for character in name
    )


def parse_verifier_key(text: str) -> VerifierKey:
    """
    Read the one-line form of a verifier key.

    Raises:
        AuditKeyError: malformed, of an algorithm not known here, or its hash does not match.
    """
    name, _, rest = text.strip().partition("+")
    key_hash, _, encoded = rest.partition("+")
    try:
        material = _from_base64(encoded)
    except ValueError as error:
        raise AuditKeyError(_KEY_FORM) from error
    if not is_key_name(name) or not material:
        raise AuditKeyError(_KEY_FORM)
    if material[0] != ED25519 or len(material) != 1 + HASH_BYTES:
        raise AuditKeyError(
            f"the verifier key of {name} is not an Ed25519 key (type 01), the only kind known here"
        )
    key = VerifierKey(name=name, kind=material[0], public_key=material[1:])
    if key.key_id.hex() != key_hash:
        raise AuditKeyError(f"the verifier key of {name} does not match its hash: it was altered or mistyped")
    return key


def encode_body(checkpoint: Checkpoint) -> str:
    """Return the text of a checkpoint that is signed: origin, size, root."""
    return f"{checkpoint.origin}\n{checkpoint.size}\n{_to_base64(checkpoint.root)}\n"


def parse_body(text: str) -> Checkpoint:
    """
    Read the signed text of a checkpoint.

    Extension lines are refused: this log writes none, and no one could audit them.

    Raises:
        MalformedCheckpointError: it is no checkpoint.
    """
    try:
        origin, size, encoded, end = text.split("\n")
        root = _from_base64(encoded)
    except ValueError as error:
        raise MalformedCheckpointError("a checkpoint has three lines: origin, size and root") from error
    if end or not origin or not _DECIMAL.fullmatch(size) or len(root) != HASH_BYTES:
        raise MalformedCheckpointError("a checkpoint has three lines: origin, size and root")
    return Checkpoint(origin=origin, size=int(size), root=root)


def sign_note(text: str, signers: Sequence[NoteSigner]) -> str:
    """Return `text`, which ends in a newline, with one signature line per signer."""
    lines = [
        f"{_SIGNATURE_PREFIX}{signer.verifier_key.name} "
        f"{_to_base64(signer.verifier_key.key_id + signer.sign(text.encode()))}\n"
        for signer in signers
    ]
    return f"{text}\n{''.join(lines)}"


def parse_note(note_text: str) -> Note:
    """
    Split a signed note into its text and signatures, without judging either.

    Raises:
        MalformedCheckpointError: it is no signed note.
    """
    text, blank, block = note_text.rpartition("\n\n")
    if not blank or not text or not block.endswith("\n") or len(note_text) > MAX_NOTE_CHARACTERS:
        raise MalformedCheckpointError("a signed note is text, an empty line and signature lines")
    if any(character < " " and character != "\n" for character in note_text) or not _is_utf8(note_text):
        raise MalformedCheckpointError("a signed note has no control characters and is UTF-8")
    # Split on newlines alone: `splitlines` would also break on characters a name may contain.
    signatures = tuple(_parse_signature(line) for line in block[:-1].split("\n"))
    return Note(text=f"{text}\n", signatures=signatures)


def verify_checkpoint(note_text: str, verifier_key: VerifierKey) -> Checkpoint:
    """
    Return the checkpoint, once it is certain that the key signed it.

    Raises:
        MalformedCheckpointError: the text is no signed checkpoint.
        AuditVerificationError: the key did not sign it, or it is a checkpoint of another log.
    """
    note = parse_note(note_text)
    known = [
        signature
        for signature in note.signatures
        if (signature.name, signature.key_id) == (verifier_key.name, verifier_key.key_id)
    ]
    if not known:
        raise AuditVerificationError(
            f"the checkpoint carries no signature of {verifier_key.name} with this key"
        )
    for signature in known:
        _check_signature(verifier_key, note.text.encode(), signature.signature)
    checkpoint = parse_body(note.text)
    if checkpoint.origin != verifier_key.name:
        raise AuditVerificationError(
            f"the checkpoint is of the log {checkpoint.origin}, not of {verifier_key.name}"
        )
    return checkpoint


def _check_signature(key: VerifierKey, message: bytes, signature: bytes) -> None:
    try:
        match key.kind:
            case 0x01:
                Ed25519PublicKey.from_public_bytes(key.public_key).verify(signature, message)
            case _:
                problem = f"signatures of type {key.kind:02x} cannot be checked here"
                raise AuditVerificationError(problem)
    except (InvalidSignature, ValueError) as error:
        problem = f"the signature of {key.name} does not match the checkpoint"
        raise AuditVerificationError(problem) from error


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
    """Decode standard base64 in its one canonical spelling, or raise ValueError."""
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(text) from error
    if _to_base64(content) != text:
        raise ValueError(text)
    return content
