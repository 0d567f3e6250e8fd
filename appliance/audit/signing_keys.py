"""
Signing keys on disk: made once, readable by their owner alone.

A log has one Ed25519 key and optionally a post-quantum ML-DSA-44 key in a second file; it then signs with
both.  A witness has the same two files, and signs cosignatures with them.

The holder of these files can sign a second history, so they are refused if other accounts can read them.
Fails closed: no key, no log.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from appliance.audit.checkpoint import NoteSigner, VerifierKey, is_key_name, signed_message
from appliance.audit.cosignature import ED25519, ED25519_COSIGNATURE, MLDSA44, encode_timestamped
from appliance.audit.mldsa import PrivateKey as MldsaPrivateKey
from appliance.audit.mldsa import generate_mldsa, is_mldsa, require_mldsa
from appliance.errors import AuditKeyError
from appliance.infra.files import create_private

OTHERS = 0o077
GROUP_MAY_READ = 0o040
FRESH = ".new"
"""Ending of new keys until a rotation activates them."""


class Signer:
    """
    A private key, the name (the log's origin) it signs under, and further keys that sign with it.

    `kind` is `ED25519` for a log and `ED25519_COSIGNATURE` for a witness.
    """

    def __init__(
        self,
        name: str,
        private_key: Ed25519PrivateKey,
        others: Sequence[NoteSigner] = (),
        *,
        kind: int = ED25519,
    ) -> None:
        self._private_key = private_key
        public_key = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.verifier_key = VerifierKey(name=_checked(name), kind=kind, public_key=public_key)
        """Public half of the Ed25519 key."""
        self.signers: tuple[NoteSigner, ...] = (self, *others)
        """Every key that signs, this one first."""

    @property
    def name(self) -> str:
        return self.verifier_key.name

    @property
    def verifier_keys(self) -> tuple[VerifierKey, ...]:
        """Public halves of every key that signs; an auditor should require all of them."""
        return tuple(signer.verifier_key for signer in self.signers)

    @property
    def vkey(self) -> str:
        """Verifier keys in their one-line form, one per line, for auditors."""
        return "\n".join(key.encode() for key in self.verifier_keys)

    def sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)

    def sign_text(self, text: str, time: int) -> bytes:
        """Return the signature of a note's text; only a witness's carries the time."""
        signature = self.sign(signed_message(self.verifier_key, text, time))
        return signature if self.verifier_key.kind == ED25519 else encode_timestamped(time, signature)


class MldsaSigner:
    """An ML-DSA-44 key; its signatures carry a time, whether a log's or a witness's."""

    def __init__(self, name: str, private_key: "MldsaPrivateKey") -> None:
        self._private_key = private_key
        public_key = private_key.public_key().public_bytes_raw()
        self.verifier_key = VerifierKey(name=_checked(name), kind=MLDSA44, public_key=public_key)

    def sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)

    def sign_text(self, text: str, time: int) -> bytes:
        """Return the time and the signature; raises MalformedCheckpointError if the text is no checkpoint."""
        return encode_timestamped(time, self.sign(signed_message(self.verifier_key, text, time)))


def mldsa_path(path: Path) -> Path:
    """Return the path of the post-quantum key of a signing key: `audit-mldsa.key` for `audit.key`."""
    return path.with_name(f"{path.stem}-mldsa{path.suffix}")


def create_signing_key(path: Path) -> None:
    """Create an Ed25519 key (PKCS#8 PEM, mode 0600); raises AuditKeyError, also if the file exists."""
    _create(path, Ed25519PrivateKey.generate())


def create_mldsa_key(path: Path) -> None:
    """Create an ML-DSA-44 key (PKCS#8 PEM, mode 0600); raises AuditKeyError, also if the file exists."""
    _create(path, generate_mldsa())


def prepare_mldsa_key(signing_key: Path, *, wanted: bool) -> None:
    """
    Create the post-quantum key of a signing key if it is wanted and missing.

    Raises AuditKeyError if it cannot be created, or exists and is no longer wanted.
    """
    path = mldsa_path(signing_key)
    if wanted:
        require_mldsa()
        if not path.exists():
            create_mldsa_key(path)
    elif path.exists():
        # Signing without it would make the log invalid for every auditor that requires the key.
        raise AuditKeyError(
            f"audit.post_quantum is off, but {path} exists: turn it on, or move the file away and tell "
            "auditors to stop requiring this key"
        )


def load_signing_key(path: Path, name: str) -> Signer:
    """
    Read the signing key of the log `name`, and its post-quantum key if that exists.

    Raises AuditKeyError if it is missing, readable by others, of another kind, or being rotated.
    """
    fresh = path.with_name(path.name + FRESH)
    if fresh.exists():
        # Once the log names the new key, the old one must not sign alone.
        raise AuditKeyError(
            f"a rotation of the signing key is unfinished ({fresh} exists): run `appliance "
            "audit rotate-key` again"
        )
    return load_keys(path, mldsa_path(path), name)


def load_keys(path: Path, mldsa: Path, name: str, *, kind: int = ED25519) -> Signer:
    """Read an Ed25519 key and, if its file exists, an ML-DSA-44 key; raises AuditKeyError."""
    key = _load(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise AuditKeyError(f"{path} holds another kind of key: it must be Ed25519")
    others = [_mldsa_signer(mldsa, name)] if mldsa.exists() else []
    return Signer(name, key, others, kind=kind)


def load_witness_keys(path: Path, name: str) -> Signer:
    return load_keys(path, mldsa_path(path), name, kind=ED25519_COSIGNATURE)


def _mldsa_signer(path: Path, name: str) -> MldsaSigner:
    require_mldsa()
    key = _load(path)
    if not is_mldsa(key):
        raise AuditKeyError(f"{path} holds another kind of key: it must be ML-DSA-44")
    return MldsaSigner(name, key)


def _create(path: Path, key: "Ed25519PrivateKey | MldsaPrivateKey") -> None:
    content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        # A crash here leaves a file that `load_signing_key` refuses; nothing was signed with it, so it can be
        # deleted.
        create_private(path, content)
    except FileExistsError as error:
        raise AuditKeyError(
            f"{path} exists already; a signing key is never replaced, move it away first"
        ) from error
    except OSError as error:
        raise AuditKeyError(f"cannot write the signing key {path}: {error.strerror}") from error


def is_open_to_others(status: os.stat_result) -> bool:
    """
    Whether other accounts may read a key's file.

    A file of root that our group may read is accepted: Kubernetes mounts Secrets so in a pod whose user is
    not root.  libpq has the same rule.
    """
    granted = status.st_uid == 0 and os.geteuid() != 0
    return bool(status.st_mode & (OTHERS & ~GROUP_MAY_READ if granted else OTHERS))


def _load(path: Path) -> object:
    try:
        with path.open("rb") as file:
            if is_open_to_others(os.fstat(file.fileno())):
                raise AuditKeyError(f"others may read the signing key {path}: run `chmod 600 {path}`")
            content = file.read()
    except FileNotFoundError as error:
        raise AuditKeyError(f"no signing key at {path}: restore it, or create one for a new log") from error
    except OSError as error:
        raise AuditKeyError(f"cannot read the signing key {path}: {error.strerror}") from error
    try:
        return load_pem_private_key(content, password=None)
    except Exception as error:  # the library documents several kinds, and raises more
        raise AuditKeyError(
            f"{path} holds no usable private key: it must be an unencrypted PKCS#8 PEM file"
        ) from error


def _checked(name: str) -> str:
    if not is_key_name(name):
        raise AuditKeyError(
            f"{name!r} cannot name a log: use something like `example.com/audit`, no spaces, no `+`"
        )
    return name
