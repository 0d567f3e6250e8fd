"""
The public keys of an identity provider, read from its JSON Web Key Set (RFC 7517).  Pure.

Each key is bound to the algorithms it can verify, so a token's header only chooses among them.
Shared secrets are never used: a verifier of such tokens could also issue them.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from appliance.errors import ConfigurationError
from appliance.tenancy.identity.rejection import RefusalReason, RefusedCallerError

RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Algorithms for each key type and curve."""
LEAST_RSA_BITS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySet:
    """Keys by id and algorithm, and the number of unusable keys in the file."""

    keys: Mapping[tuple[str | None, str], jwt.PyJWK]
    skipped: int

    def find(self, key_id: str | None, algorithm: str) -> jwt.PyJWK:
        """The key a token names, or the only one for its algorithm; otherwise raises RefusedCallerError."""
        if key_id is not None:
            found = self.keys.get((key_id, algorithm))
        else:
            fitting = [key for (_, of), key in self.keys.items() if of == algorithm]
            found = fitting[0] if len(fitting) == 1 else None
        if found is None:
            raise RefusedCallerError(RefusalReason.TOKEN_KEY_UNKNOWN)
        return found


def parse_key_set(text: str, algorithms: Collection[str]) -> KeySet:
    """
    Read the file, keeping the keys that can verify one of `algorithms`.

    Raises ConfigurationError, one line that never quotes the file, if it is not a key set, holds a private
    key or a duplicate `kid`, or no key can be used.
    """
    try:
        content = json.loads(text)
        entries = content["keys"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigurationError('it is not a JSON Web Key Set, `{"keys": [...]}`') from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError("`keys` must be a list of objects")
    keys: dict[tuple[str | None, str], jwt.PyJWK] = {}
    skipped = 0
    for entry in entries:
        if "d" in entry:
            raise ConfigurationError("it holds a private key: copy only what the provider publishes")
        found = _keys_of(entry, algorithms)
        if found.keys() & keys.keys():
            raise ConfigurationError("two keys have the same `kid`: remove one")
        keys |= found
        skipped += not found
    if not keys:
        raise ConfigurationError(
            f"none of its {len(entries)} keys can be used: it takes a public RSA key of at least "
            f"{LEAST_RSA_BITS} bits, or an EC or Ed25519 key, for one of {', '.join(algorithms)}"
        )
    return KeySet(keys=keys, skipped=skipped)


def _keys_of(
    entry: Mapping[str, Any], algorithms: Collection[str]
) -> dict[tuple[str | None, str], jwt.PyJWK]:
    """One entry as a key for each allowed algorithm; empty if it cannot be used."""
    key_id = entry.get("kid")
    if not isinstance(key_id, str | None) or entry.get("use", "sig") != "sig":
        return {}
    able = ALGORITHMS.get((str(entry.get("kty")), str(entry.get("crv", ""))), ())
    try:
        if "verify" not in entry.get("key_ops", ["verify"]):
            return {}
        keys = [
            jwt.PyJWK(dict(entry), algorithm)
            for algorithm in able
            if algorithm in algorithms and entry.get("alg", algorithm) == algorithm
        ]
    except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError, AttributeError, KeyError):
        return {}
    return {(key_id, key.algorithm_name): key for key in keys if not _is_weak(key)}


def _is_weak(key: jwt.PyJWK) -> bool:
    return isinstance(key.key, RSAPublicKey) and key.key.key_size < LEAST_RSA_BITS
