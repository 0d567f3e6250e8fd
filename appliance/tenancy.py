"""
Tenants and their API keys: who may call, which models, whether drafts may help, what is kept.

Keys are made here, shown once and kept only as SHA-256 digests.  A plain digest is enough because
a key is 256 random bits: there is nothing to guess.  This module is pure; the roots read and write
the tenants file.
"""

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from appliance.errors import ConfigurationError, InvalidApiKeyError

KEY_FORMAT = re.compile(r"^sk-(?P<key_id>[a-z2-7]{8})-(?P<secret>[A-Za-z0-9_-]{43})$")
KEY_ID_FORMAT = re.compile(r"[a-z2-7]{8}")
DIGEST_FORMAT = re.compile(r"[0-9a-f]{64}")
NAME_FORMAT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ANY_MODEL = "*"


class SpeculationPolicy(StrEnum):
    """Whether somebody's requests may be drafted for."""

    AUTO = "auto"
    """The appliance decides, by what pays."""
    OFF = "off"
    """Never: only workers without a draft may answer."""


class ContentPolicy(StrEnum):
    """What the audit log keeps of somebody's requests and answers; `content_mode` in an intent."""

    NONE = "none"
    """Nothing but sizes."""
    DIGEST = "digest"
    """Keyed commitments: who holds the text can show that it is the one."""
    ENCRYPTED = "encrypted"
    """All of it, encrypted, until it is erased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it is stored: its public id and the digest of the whole key."""

    key_id: str
    digest: str
    admin: bool = False
    """Whether it opens the admin API; such a key cannot call models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is limited, billed and named in the audit log."""

    name: str
    models: tuple[str, ...] = (ANY_MODEL,)
    keys: tuple[ApiKey, ...] = ()
    speculation: SpeculationPolicy = SpeculationPolicy.AUTO
    content: ContentPolicy = ContentPolicy.NONE

    def may_use(self, model: str) -> bool:
        """Whether this tenant's keys are scoped to `model`."""
        return ANY_MODEL in self.models or model in self.models


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The tenant a request belongs to, and the key it came with."""

    tenant: Tenant
    key: ApiKey


class TenantDirectory:
    """All tenants, looked up by the key id that every key carries in clear."""

    def __init__(self, tenants: tuple[Tenant, ...]) -> None:
        self.tenants = tenants
        self._by_key = {
            key.key_id: Caller(tenant=tenant, key=key) for tenant in tenants for key in tenant.keys
        }

    def authenticate(self, presented: str | None) -> Caller:
        """
        Return whose key this is.

        Raises:
            InvalidApiKeyError: always with the same words, whatever was wrong.
        """
        match = KEY_FORMAT.match(presented or "")
        caller = self._by_key.get(match["key_id"]) if match else None
        # The comparison runs for unknown keys too, so that timing does not tell which ids exist.
        expected = caller.key.digest if caller else "0" * 64
        matches = hmac.compare_digest(digest_key(presented or ""), expected)
        if caller is None or not matches:
            message = "Incorrect API key provided. Send your key as `Authorization: Bearer sk-...`."
            raise InvalidApiKeyError(message)
        return caller


def make_key(random_bytes: bytes, *, admin: bool = False) -> tuple[str, ApiKey]:
    """Turn 37 random bytes into a key to show once and the form to store."""
    key_id = base64.b32encode(random_bytes[:5]).decode().lower()
    secret = base64.urlsafe_b64encode(random_bytes[5:37]).rstrip(b"=").decode()
    key = f"sk-{key_id}-{secret}"
    return key, ApiKey(key_id=key_id, digest=digest_key(key), admin=admin)


def digest_key(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_tenants(text: str) -> tuple[Tenant, ...]:
    """
    Read the tenants file (YAML).

    Raises:
        ConfigurationError: one line that names the entry and what is wrong with it.
    """
    try:
        content = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that does not exist
        message = f"the tenants file is not YAML: {' '.join(str(error).split())}"
        raise ConfigurationError(message) from error
    try:
        tenants = tuple(_parse_tenant(name, body) for name, body in content["tenants"].items())
    except (KeyError, TypeError, AttributeError) as error:
        message = (
            f"the tenants file needs `tenants:` with names, and keys of key_id and digest below: {error}"
        )
        raise ConfigurationError(message) from error
    ids = [key.key_id for tenant in tenants for key in tenant.keys]
    if len(ids) != len(set(ids)):
        message = "the tenants file holds the same key_id twice: remove one of them"
        raise ConfigurationError(message)
    return tenants


def encode_tenants(tenants: tuple[Tenant, ...]) -> str:
    """The tenants file; `parse_tenants` reads it back."""
    content = {
        "tenants": {
            tenant.name: {
                "models": list(tenant.models),
                "speculation": str(tenant.speculation),
                "content": str(tenant.content),
                "keys": [
                    {"key_id": key.key_id, "digest": key.digest, "admin": key.admin} for key in tenant.keys
                ],
            }
            for tenant in tenants
        }
    }
    return yaml.safe_dump(content, sort_keys=False)


def _parse_tenant(name: str, body: Mapping[str, Any]) -> Tenant:
    if not NAME_FORMAT.fullmatch(name):
        message = f"tenant name {name!r}: use lower-case letters, digits, dots, dashes, at most 63"
        raise ConfigurationError(message)
    models = body.get("models", [ANY_MODEL])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        message = f"tenant {name}: models must be a list of names, such as [demo]"
        raise ConfigurationError(message)
    return Tenant(
        name=name,
        models=tuple(models),
        keys=tuple(_parse_key(name, key) for key in body.get("keys", ())),
        speculation=_parse_speculation(name, body.get("speculation", "auto")),
        content=_parse_content(name, body.get("content", "none")),
    )


def _parse_speculation(name: str, value: Any) -> SpeculationPolicy:  # noqa: ANN401 - decoded YAML
    # YAML reads a bare `off` as false.
    try:
        return SpeculationPolicy.OFF if value is False else SpeculationPolicy(value)
    except ValueError as error:
        message = f"tenant {name}: speculation must be auto or off"
        raise ConfigurationError(message) from error


def _parse_content(name: str, value: Any) -> ContentPolicy:  # noqa: ANN401 - decoded YAML
    try:
        return ContentPolicy(value)
    except ValueError as error:
        message = f"tenant {name}: content must be none, digest or encrypted"
        raise ConfigurationError(message) from error


def _parse_key(name: str, key: Mapping[str, Any]) -> ApiKey:
    key_id, digest = str(key["key_id"]), str(key["digest"])
    if not KEY_ID_FORMAT.fullmatch(key_id) or not DIGEST_FORMAT.fullmatch(digest):
        message = f"tenant {name}: a key needs the key_id and digest that `appliance key create` wrote"
        raise ConfigurationError(message)
    return ApiKey(key_id=key_id, digest=digest, admin=bool(key.get("admin", False)))
