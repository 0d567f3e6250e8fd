"""
Signing keys: in files, made once and readable by their owner alone, or in PKCS#11 tokens.

A log has one Ed25519 key and optionally a post-quantum ML-DSA-44 key in a second file; it then signs with
both.  A witness has the same two files, and signs cosignatures with them.

The holder of these files can sign a second history, so they are refused if other accounts can read them.
The Ed25519 key of a log may be in a token instead (`appliance.audit.token_key`), and its PIN is kept as a key
is.  Fails closed: no key, no log.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from appliance.audit.checkpoint import (
    NoteSigner,
    VerifierKey,
    is_key_name,
    parse_verifier_keys,
    signed_message,
)
from appliance.audit.cosignature import ED25519, ED25519_COSIGNATURE, MLDSA44, encode_timestamped
from appliance.audit.mldsa import PrivateKey as MldsaPrivateKey
from appliance.audit.mldsa import generate_mldsa, is_mldsa, require_mldsa
from appliance.audit.token_key import TokenSigningKey
from appliance.errors import AuditKeyError
from appliance.infra.files import create_private, write_atomically
from appliance.infra.key_location import KeyLocation, TokenKey, mldsa_path

OTHERS = 0o077
GROUP_MAY_READ = 0o040
FRESH = ".new"
"""Ending of new keys until a rotation activates them."""


class Ed25519SigningKey(Protocol):
    """A private key in memory, or in a token."""

    def public_key(self) -> Ed25519PublicKey: ...

    def sign(self, data: bytes, /) -> bytes: ...


class Signer:
    """
    A private key, the name (the log's origin) it signs under, and further keys that sign with it.

    `kind` is `ED25519` for a log and `ED25519_COSIGNATURE` for a witness.
    """

    def __init__(
        self,
        name: str,
        private_key: Ed25519SigningKey,
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
        return encode_keys(self.verifier_keys)

    def sign(self, message: bytes) -> bytes:
        """Raises AuditUnavailableError if the key is in a token that cannot sign now."""
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


def encode_keys(keys: Iterable[VerifierKey]) -> str:
    return "\n".join(key.encode() for key in keys)


def create_signing_key(path: Path) -> None:
    """Create an Ed25519 key (PKCS#8 PEM, mode 0600); raises AuditKeyError, also if the file exists."""
    _create(path, Ed25519PrivateKey.generate())


def create_mldsa_key(path: Path) -> None:
    """Create an ML-DSA-44 key (PKCS#8 PEM, mode 0600); raises AuditKeyError, also if the file exists."""
    _create(path, generate_mldsa())


def prepare_mldsa_key(signing_key: KeyLocation, *, wanted: bool) -> None:
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


def load_signing_key(location: KeyLocation, name: str) -> Signer:
    """
    Read the signing key of the log `name`, and its post-quantum key if that exists.

    Raises AuditKeyError if it is missing, readable by others, of another kind, or being rotated.
    """
    if isinstance(location, Path):
        fresh = location.with_name(location.name + FRESH)
        if fresh.exists():
            # Once the log names the new key, the old one must not sign alone.
            raise AuditKeyError(
                f"a rotation of the signing key is unfinished ({fresh} exists): run `appliance "
                "audit rotate-key` again"
            )
    return load_keys(location, mldsa_path(location), name)


def load_keys(location: KeyLocation, mldsa: Path, name: str, *, kind: int = ED25519) -> Signer:
    """
    Read or open an Ed25519 key and, if its file exists, an ML-DSA-44 key; raises AuditKeyError.

    Blocks while a token logs in.
    """
    key: Ed25519SigningKey
    if isinstance(location, TokenKey):
        key = TokenSigningKey(location, lambda: _read_pin(location.pin))
    else:
        loaded = _load(location)
        if not isinstance(loaded, Ed25519PrivateKey):
            raise AuditKeyError(f"{location} holds another kind of key: it must be Ed25519")
        key = loaded
    others = [_mldsa_signer(mldsa, name)] if mldsa.exists() else []
    return Signer(name, key, others, kind=kind)


def keep_public_keys(location: KeyLocation, signer: Signer, kept: Path) -> None:
    """Keep the public half of a key in a token, for processes that do not sign; raises AuditKeyError."""
    if isinstance(location, Path) or load_kept(location, kept) == signer.verifier_keys:
        return
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(
            kept, f"# {location}\n{signer.vkey}\n".encode(), temporary=kept.with_name(f"{kept.name}.new")
        )
    except OSError as error:
        raise AuditKeyError(f"cannot write the public key {kept}: {error.strerror}") from error


def load_kept(location: TokenKey, kept: Path) -> tuple[VerifierKey, ...]:
    """The public half that a process has kept of this key, if any; raises AuditKeyError."""
    try:
        text = kept.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditKeyError(f"cannot read the public key {kept}: {error}") from error
    # That of a key before a rotation is another's.
    return parse_verifier_keys(text) if text.startswith(f"# {location}\n") else ()


def load_public_keys(location: KeyLocation, name: str, kept: Path) -> tuple[VerifierKey, ...]:
    """The public halves of a log's keys, without opening a token; raises AuditKeyError."""
    if isinstance(location, Path):
        return load_signing_key(location, name).verifier_keys
    if keys := load_kept(location, kept):
        return keys
    raise AuditKeyError(f"{kept} does not have the public half of {location}: run `appliance audit key`")


def retire(signer: Signer, retired: Path) -> None:
    """Keep these keys from signing on this machine, durably; raises AuditKeyError."""
    try:
        known = _retired(retired)
        lines = dict.fromkeys((*known, *signer.vkey.splitlines()))
        write_atomically(retired, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise AuditKeyError(f"cannot write {retired}: {error.strerror}") from error


def is_retired(signer: Signer, retired: Path) -> bool:
    """Raises AuditKeyError if the file cannot be read."""
    try:
        return signer.verifier_key.encode() in _retired(retired)
    except OSError as error:
        raise AuditKeyError(f"cannot read {retired}: {error.strerror}") from error


def refuse_retired(signer: Signer, retired: Path) -> None:
    """Raise AuditKeyError for a key that a rotation has ended: it must not sign alone after its entry."""
    if is_retired(signer, retired):
        raise AuditKeyError(
            "this signing key was handed over to another: name the new one in audit.signing_key_file, and if "
            "`appliance audit rotate-key --to` did not finish, run it again before"
        )


def _retired(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


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
    content = _read(path, "signing key", "restore it, or create one for a new log")
    try:
        return load_pem_private_key(content, password=None)
    except Exception as error:  # the library documents several kinds, and raises more
        raise AuditKeyError(
            f"{path} holds no usable private key: it must be an unencrypted PKCS#8 PEM file"
        ) from error


def _read_pin(path: Path) -> str:
    try:
        pin = _read(path, "PIN", "write the PIN of the token's user into it, with mode 0600").decode()
    except UnicodeDecodeError as error:
        raise AuditKeyError(f"{path} is not a PIN: write it as text") from error
    if not (pin := pin.rstrip("\r\n")):
        raise AuditKeyError(f"{path} is empty: write the PIN of the token's user into it")
    return pin


def _read(path: Path, what: str, remedy: str) -> bytes:
    try:
        with path.open("rb") as file:
            if is_open_to_others(os.fstat(file.fileno())):
                raise AuditKeyError(f"others may read the {what} {path}: run `chmod 600 {path}`")
            return file.read()
    except FileNotFoundError as error:
        raise AuditKeyError(f"no {what} at {path}: {remedy}") from error
    except OSError as error:
        raise AuditKeyError(f"cannot read the {what} {path}: {error.strerror}") from error


def _checked(name: str) -> str:
    if not is_key_name(name):
        raise AuditKeyError(
            f"{name!r} cannot name a log: use something like `example.com/audit`, no spaces, no `+`"
        )
    return name
