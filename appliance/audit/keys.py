"""
The log's signing key on disk: made once, readable by its owner alone.

Whoever holds this file can sign a second history, so it is refused when anyone else could read it.
Fails closed: no key, no log.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from appliance.audit.checkpoint import ED25519, VerifierKey, is_key_name
from appliance.errors import AuditKeyError

OWNER_ONLY = 0o600
OTHERS = 0o077


class Signer:
    """A private key and the name (the log's origin) it signs under."""

    def __init__(self, name: str, private_key: Ed25519PrivateKey) -> None:
        if not is_key_name(name):
            raise AuditKeyError(
                f"{name!r} cannot name a log: use something like `example.com/audit`, no spaces, no `+`"
            )
        self._private_key = private_key
        public_key = private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.verifier_key = VerifierKey(name=name, kind=ED25519, public_key=public_key)
        """Public half."""

    @property
    def name(self) -> str:
        """Origin of the log."""
        return self.verifier_key.name

    @property
    def vkey(self) -> str:
        """Verifier key in its one-line form, to be handed to auditors."""
        return self.verifier_key.encode()

    def sign(self, message: bytes) -> bytes:
        """Return the bare Ed25519 signature of `message`."""
        return self._private_key.sign(message)


def create_signing_key(path: Path) -> None:
    """
    Make a new Ed25519 key (PKCS#8 PEM, mode 0600); an existing file is never replaced.

    Raises:
        AuditKeyError: the file exists or cannot be written.
    """
    content = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # A crash before this line leaves a file that `load_signing_key` refuses; nothing was
            # signed with it yet, so it can be deleted.
            os.fsync(file.fileno())
        sync_directory(path.parent)
    except FileExistsError as error:
        raise AuditKeyError(
            f"{path} exists already; a signing key is never replaced, move it away first"
        ) from error
    except OSError as error:
        raise AuditKeyError(f"cannot write the signing key {path}: {error.strerror}") from error


def load_signing_key(path: Path, name: str) -> Signer:
    """
    Read the signing key of the log `name`.

    Raises:
        AuditKeyError: missing, readable by others, or no Ed25519 key; says what to do.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & OTHERS:
                raise AuditKeyError(f"others may read the signing key {path}: run `chmod 600 {path}`")
            content = file.read()
    except FileNotFoundError as error:
        raise AuditKeyError(
            f"there is no signing key at {path}: restore it, or make one for a new log"
        ) from error
    except OSError as error:
        raise AuditKeyError(f"cannot read the signing key {path}: {error.strerror}") from error
    try:
        key = load_pem_private_key(content, password=None)
    except Exception as error:  # the library documents several kinds, and raises more
        raise AuditKeyError(
            f"{path} holds no usable private key: it must be an unencrypted PKCS#8 PEM file"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise AuditKeyError(f"{path} holds another kind of key: the log is signed with Ed25519")
    return Signer(name, key)


def sync_directory(directory: Path) -> None:
    """Make a new or renamed file in `directory` survive a power cut; raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
