"""Tenants and their policies: models, speculation, stored content, priority, permissions, limits."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from appliance.tenancy.allowances import UNLIMITED, Limits
from appliance.tenancy.keys import ApiKey

NAME_FORMAT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
ANY_MODEL = "*"


class SpeculationPolicy(StrEnum):
    """Whether workers may speculate for a tenant's requests."""

    AUTO = "auto"
    """The monitor decides."""
    OFF = "off"
    """Never: only workers without speculation may answer."""


class ContentPolicy(StrEnum):
    """What the audit log stores of a tenant's requests and answers; `content_mode` in an intent."""

    NONE = "none"
    """Only sizes."""
    DIGEST = "digest"
    """Keyed commitments: a holder of the text can prove that it is the original."""
    ENCRYPTED = "encrypted"
    """All content, encrypted, until it is erased."""


class PriorityClass(StrEnum):
    """Order of requests when workers are at capacity."""

    INTERACTIVE = "interactive"
    """For users who wait."""
    STANDARD = "standard"
    """The default."""
    BATCH = "batch"
    """In capacity that other classes leave."""


class Permission(StrEnum):
    """Request features that are removed or refused unless the tenant has the permission."""

    PRIORITY = "priority"
    """The request's own `priority`."""
    LORA = "lora"
    """Adapters named in the request."""
    REMOTE_MEDIA = "remote_media"
    """Images and sound by URL, which the worker would fetch."""
    TRAIN_DRAFTS = "train_drafts"
    """Its stored content may train draft models, on this site only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A team or an application: limits, permissions and audit entries are per tenant."""

    name: str
    models: tuple[str, ...] = (ANY_MODEL,)
    keys: tuple[ApiKey, ...] = ()
    speculation: SpeculationPolicy = SpeculationPolicy.AUTO
    content: ContentPolicy = ContentPolicy.NONE
    priority: PriorityClass = PriorityClass.STANDARD
    may: frozenset[Permission] = frozenset()
    limits: Limits = UNLIMITED
    disabled: bool = False
    """Whether its keys are refused until it is enabled."""

    def may_use(self, model: str) -> bool:
        return ANY_MODEL in self.models or model in self.models

    def with_keys(self, keys: tuple[ApiKey, ...]) -> "Tenant":
        return replace(self, keys=keys)
