"""
Seals content: what is stored of a request or an answer, and the fields of its leaf.

    data key (random, one per part) ─HKDF─► encryption key ─► AES-256-GCM ─► ciphertext
                                    └─HKDF─► commitment key ─► HMAC-SHA256 ─► commitment
    tenant's wrapping key ─► AES key wrap ─► wrapped data key

Everything is bound to its place, `<origin>/<request id>/<part>`, so a sealed part decrypts only in its own
place. AES-GCM alone would allow one ciphertext with two plaintexts under two keys; the commitment excludes
that.  Without the data key, neither reveals anything; a bare digest of the content could be guessed.

Pure, except for the randomness it is given.  Fails closed: what does not verify is not decrypted.
Sources: RFC 3394 (key wrap), RFC 5869 (HKDF), NIST SP 800-38D (GCM), RFC 2104 (HMAC).
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from appliance.errors import AuditVerificationError

KEY_BYTES = 32
NONCE_BYTES = 12
ENCRYPTION = b"appliance payload encryption v1"
COMMITMENT = b"appliance payload commitment v1"


class Part(StrEnum):
    REQUEST = "request"
    RESPONSE = "response"
    SAMPLE = "sample"
    """A training sample made of the other two; no entry names it, and it never outlives them."""


LOGGED = (Part.REQUEST, Part.RESPONSE)
"""Parts that entries name, and that are counted, exported and shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    nonce: bytes
    ciphertext: bytes
    """Including the tag."""
    wrapped_key: bytes

    @property
    def blob(self) -> bytes:
        """Nonce and ciphertext, as in an export."""
        return self.nonce + self.ciphertext

    @property
    def digest(self) -> str:
        """SHA-256 of `blob`, in hex: the leaf's `payload_digest`."""
        return hashlib.sha256(self.blob).hexdigest()


def place(origin: str, request_id: str, part: Part) -> bytes:
    """Return the place of a part, to which encryption and commitment bind it."""
    return f"{origin}/{request_id}/{part}".encode()


def commit(key: bytes, where: bytes, content: bytes) -> str:
    """Return the keyed commitment to `content` at `where`: HMAC-SHA256 of `where`, NUL, content, in hex."""
    mac = hmac.new(key, where + b"\0", hashlib.sha256)
    mac.update(content)
    return mac.hexdigest()


def seal(
    content: bytes, where: bytes, wrapping_key: bytes, *, random_bytes: Callable[[int], bytes]
) -> tuple[Sealed, str]:
    """Encrypt `content` under a new data key; return it with its commitment."""
    data_key, nonce = random_bytes(KEY_BYTES), random_bytes(NONCE_BYTES)
    sealed = Sealed(
        nonce=nonce,
        ciphertext=AESGCM(_derive(data_key, ENCRYPTION)).encrypt(nonce, content, where),
        wrapped_key=aes_key_wrap(wrapping_key, data_key),
    )
    return sealed, commit_under(data_key, where, content)


def unwrap(wrapped_key: bytes, wrapping_key: bytes) -> bytes:
    """The data key; raises AuditVerificationError if it was wrapped with another key, or altered."""
    try:
        return aes_key_unwrap(wrapping_key, wrapped_key)
    except (InvalidUnwrap, ValueError) as error:
        raise AuditVerificationError("the data key was altered, or wrapped with another key") from error


def rewrap(wrapped_key: bytes, old: bytes, new: bytes) -> bytes:
    return aes_key_wrap(new, unwrap(wrapped_key, old))


def open_sealed(blob: bytes, where: bytes, data_key: bytes, *, digest: str, commitment: str) -> bytes:
    """Decrypt content; raises AuditVerificationError if it is not the one the leaf names, or was altered."""
    if not hmac.compare_digest(hashlib.sha256(blob).hexdigest(), digest):
        raise AuditVerificationError("the stored payload is not the one in the log: its digest differs")
    if len(data_key) != KEY_BYTES:
        raise AuditVerificationError(f"a data key has {KEY_BYTES} bytes, this one has {len(data_key)}")
    cipher = AESGCM(_derive(data_key, ENCRYPTION))
    try:
        content = cipher.decrypt(blob[:NONCE_BYTES], blob[NONCE_BYTES:], where)
    except (InvalidTag, ValueError) as error:
        raise AuditVerificationError(
            "the payload does not open: it was altered, moved, or the key is another's"
        ) from error
    if not hmac.compare_digest(commit_under(data_key, where, content), commitment):
        raise AuditVerificationError("the payload opens, but it is not what the log commits to")
    return content


def open_unlogged(blob: bytes, where: bytes, data_key: bytes) -> bytes:
    """
    Decrypt a part that no entry names; the caller compares its digest if it has one.

    Raises AuditVerificationError if it belongs elsewhere, or was altered.
    """
    try:
        cipher = AESGCM(_derive(data_key, ENCRYPTION))
        return cipher.decrypt(blob[:NONCE_BYTES], blob[NONCE_BYTES:], where)
    except (InvalidTag, ValueError) as error:
        raise AuditVerificationError(
            "the sample does not open: it was altered, moved, or the key is another's"
        ) from error


def commit_under(data_key: bytes, where: bytes, content: bytes) -> str:
    return commit(_derive(data_key, COMMITMENT), where, content)


def _derive(data_key: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(data_key)
