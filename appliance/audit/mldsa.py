"""ML-DSA-44 (FIPS 204), which `cryptography` has from 47 on; a log without such keys needs no ML-DSA-44."""

from importlib.metadata import version
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from appliance.errors import AuditKeyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import mldsa
else:
    try:
        from cryptography.hazmat.primitives.asymmetric import mldsa
    except ImportError:
        mldsa = None
IS_THERE = mldsa is not None

PrivateKey: TypeAlias = "mldsa.MLDSA44PrivateKey"


def supports_mldsa() -> bool:
    if not IS_THERE:
        return False
    try:
        mldsa.MLDSA44PrivateKey.from_seed_bytes(bytes(32))
    except UnsupportedAlgorithm:  # there, but not with the library below it
        return False
    return True


def require_mldsa() -> None:
    """Raise AuditKeyError, which says what to install, if ML-DSA-44 is not available."""
    if not supports_mldsa():
        raise AuditKeyError(
            f"`cryptography` {version('cryptography')} has no ML-DSA-44 here: install 47 or newer, or do "
            "without post-quantum keys"
        )


def generate_mldsa() -> "PrivateKey":
    require_mldsa()
    return mldsa.MLDSA44PrivateKey.generate()


def is_mldsa(key: object) -> "TypeGuard[PrivateKey]":
    return supports_mldsa() and isinstance(key, mldsa.MLDSA44PrivateKey)


def verify_mldsa(public_key: bytes, signature: bytes, message: bytes) -> None:
    """Raise InvalidSignature, or AuditKeyError if the library has no ML-DSA-44."""
    require_mldsa()
    try:
        mldsa.MLDSA44PublicKey.from_public_bytes(public_key).verify(signature, message)
    except ValueError as error:  # a key or signature of another length
        raise InvalidSignature from error
