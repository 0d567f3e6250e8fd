"""
API keys: generated here, shown once, stored only as SHA-256 digests.

A plain digest is enough because a key has 256 random bits: it cannot be guessed.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum

from appliance.tenancy.allowances import UNLIMITED, Limits

KEY_BYTES = 37
"""Random bytes that `make_key` takes: 5 for the id, 32 for the secret."""
KEY_FORMAT = re.compile(r"^sk-(?P<key_id>[a-z2-7]{8})-(?P<secret>[A-Za-z0-9_-]{43})$")
KEY_ID_FORMAT = re.compile(r"[a-z2-7]{8}")
MAKER_FORMAT = re.compile(r"[a-z2-7]{8}|jwt:[0-9a-f]{16}")
"""Id of a key, or of the subject of a token."""
DIGEST_FORMAT = re.compile(r"[0-9a-f]{64}")


class AdminScope(StrEnum):
    """A part of the admin API; `appliance.api.scopes` says which route belongs to which."""

    READ = "read"
    """Show the state of everything, and log in to the console."""
    TENANTS = "tenants"
    """Change tenants and keys."""
    WORKERS = "workers"
    """Control workers and speculation, and check egress."""
    RETENTION = "retention"
    """Erase kept content, and place and release legal holds."""
    DRAFTS = "drafts"
    """Promote and roll back drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A stored key: its public id, the digest of the whole key, its permissions and validity."""

    key_id: str
    digest: str
    admin: bool = False
    """Whether it is for the admin API; such a key cannot call models."""
    scopes: frozenset[AdminScope] | None = None
    """Parts of the admin API that an admin key may use; None for all of them."""
    models: tuple[str, ...] | None = None
    """Models of its tenant that it may use; None for all of them."""
    limits: Limits = UNLIMITED
    """Enforced beside its tenant's."""
    manage_keys: bool = False
    """Whether it may make further keys of its tenant, and rotate and revoke those."""
    made_by: str | None = None
    """The key, or the subject of a token, of the tenant that made it; None if an admin did."""
    created_at: int | None = None
    """Unix time; None if unknown."""
    expires_at: int | None = None
    """Unix time from which it is invalid; None for never."""
    replaces: str | None = None
    rotated_at: int | None = None
    """Unix time at which another key replaced it."""
    revoked_at: int | None = None
    """Unix time at which it was revoked."""

    def is_valid_at(self, now: float) -> bool:
        """Whether it is valid at this Unix time."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def has_scope(self, scope: AdminScope) -> bool:
        return self.admin and (self.scopes is None or scope in self.scopes)

    def may_use(self, model: str) -> bool:
        """Whether the key allows `model`; its tenant has to allow it too."""
        return self.models is None or model in self.models


def make_key(
    random_bytes: bytes,
    *,
    admin: bool = False,
    scopes: frozenset[AdminScope] | None = None,
    models: tuple[str, ...] | None = None,
    limits: Limits = UNLIMITED,
    manage_keys: bool = False,
    made_by: str | None = None,
    created_at: int | None = None,
    expires_at: int | None = None,
) -> tuple[str, ApiKey]:
    """Make the text of a key, to show once, and its stored form from `KEY_BYTES` random bytes."""
    key_id = base64.b32encode(random_bytes[:5]).decode().lower()
    secret = base64.urlsafe_b64encode(random_bytes[5:KEY_BYTES]).rstrip(b"=").decode()
    key = f"sk-{key_id}-{secret}"
    return key, ApiKey(
        key_id=key_id,
        digest=digest_key(key),
        admin=admin,
        scopes=scopes,
        models=models,
        limits=limits,
        manage_keys=manage_keys,
        made_by=made_by,
        created_at=created_at,
        expires_at=expires_at,
    )


def digest_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
