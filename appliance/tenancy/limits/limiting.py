"""
What the gateway asks about limits, and the answer where nobody has any.
"""

# ruff: noqa: ARG002 - who lets everybody in looks at nothing

from collections.abc import Mapping
from typing import Protocol

from appliance.infra.json_members import Member
from appliance.tenancy.limits.reservation import UNLIMITED, Reservation
from appliance.tenancy.tenant import Tenant


class Limiting(Protocol):
    """Holds tenants to their limits; `appliance.tenancy.limits.limiter` does."""

    def take(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member]
    ) -> Reservation | None:
        """Let a request in, or return None if that takes a `wait`."""

    async def wait(self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member]) -> Reservation:
        """Let a request in as soon as it may; raises LimitReachedError and LimitsUnavailableError."""

    def headers(self, tenant: Tenant, model: str | None = None) -> dict[str, str]:
        """What an answer to this tenant says about its limits."""


class NoLimits:
    """Lets everybody in."""

    def take(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member]
    ) -> Reservation | None:
        """Let it in."""
        return UNLIMITED

    async def wait(self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member]) -> Reservation:
        """Let it in."""
        return UNLIMITED

    def headers(self, tenant: Tenant, model: str | None = None) -> dict[str, str]:
        """Say nothing."""
        return {}


NO_LIMITS = NoLimits()
