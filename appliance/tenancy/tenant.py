"""
Tenants: who may call, which models, how urgently, how much, whether drafts may help, what is kept.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from appliance.tenancy.allowances import UNLIMITED, Limits
from appliance.tenancy.keys import ApiKey

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


class PriorityClass(StrEnum):
    """Who goes first when there are more requests than the workers can take."""

    INTERACTIVE = "interactive"
    """People who wait."""
    STANDARD = "standard"
    """Everybody else."""
    BATCH = "batch"
    """Only what nobody else uses."""


class Permission(StrEnum):
    """What policy takes out of requests, refuses or leaves alone, unless their tenant may."""

    PRIORITY = "priority"
    """The request's own `priority`."""
    LORA = "lora"
    """Adapters named in the request."""
    REMOTE_MEDIA = "remote_media"
    """Images and sound by URL, which the worker would fetch."""
    TRAIN_DRAFTS = "train_drafts"
    """Its kept content may train draft models, on this site and nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is limited, billed and named in the audit log."""

    name: str
    models: tuple[str, ...] = (ANY_MODEL,)
    keys: tuple[ApiKey, ...] = ()
    speculation: SpeculationPolicy = SpeculationPolicy.AUTO
    content: ContentPolicy = ContentPolicy.NONE
    priority: PriorityClass = PriorityClass.STANDARD
    may: frozenset[Permission] = frozenset()
    limits: Limits = UNLIMITED
    disabled: bool = False
    """Whether none of its keys opens anything for now."""

    def may_use(self, model: str) -> bool:
        """Whether this tenant's keys are scoped to `model`."""
        return ANY_MODEL in self.models or model in self.models

    def with_keys(self, keys: tuple[ApiKey, ...]) -> "Tenant":
        """Return the same tenant with these keys and no others."""
        return replace(self, keys=keys)
