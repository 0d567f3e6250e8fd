"""
An identity provider for tests: keys it publishes, and tokens it signs.
"""

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

ISSUER = "https://login.bank.internal/realms/staff"
AUDIENCE = "appliance"
MAKERS = {
    "RS256": lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}


class Provider:
    """One signing key, and what is made with it."""

    def __init__(self, key_id: str | None = "k1", algorithm: str = "ES256") -> None:
        self.key_id = key_id
        self.algorithm = algorithm
        self.key = MAKERS[algorithm]()

    def jwk(self, **more: Any) -> dict[str, Any]:
        """The public key as it is published."""
        made = jwt.get_algorithm_by_name(self.algorithm).to_jwk(self.key.public_key(), as_dict=True)
        named = {} if self.key_id is None else {"kid": self.key_id}
        return {**made, **named, "use": "sig", **more}

    def token(
        self, *, without: tuple[str, ...] = (), header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """A token for this gateway, by default of tenant `acme`."""
        now = int(time.time())  # noqa: TID251 - PyJWT has no other clock
        content = {
            "iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 300, "tenant": "acme",
            **claims,
        }  # fmt: skip
        content = {name: value for name, value in content.items() if name not in without}
        headers = {**({} if self.key_id is None else {"kid": self.key_id}), **(header or {})}
        return jwt.encode(content, self.key, algorithm=self.algorithm, headers=headers)


def key_set(*jwks: dict[str, Any]) -> str:
    """What a provider publishes."""
    return json.dumps({"keys": jwks})


def publish(file: Path, *providers: Provider) -> Path:
    """Write the keys of these providers to a file."""
    file.write_text(key_set(*(provider.jwk() for provider in providers)))
    return file
