"""What the gateway calls to apply limits: reservations, and the case without limits."""

# ruff: noqa: ARG002 - `NoLimits` uses no argument

from collections.abc import Mapping, Sequence
from typing import Protocol

from appliance.infra.json_members import Member
from appliance.tenancy.limits.holding import Holding, TakenUnits
from appliance.tenancy.tenant import Tenant


class Reservation(Protocol):
    """Held by a request from before it is sent to a worker until it has ended."""

    def settle(self, tokens: int) -> None:
        """
        Report what the request used, however it ended; the rest is released.

        Only the first call counts.  After a crash before it, what was reserved counts as used, except
        for the request's concurrency unit, which is released when the gateway's lease ends.
        """


class Unlimited:
    def settle(self, tokens: int) -> None: ...


UNLIMITED = Unlimited()


class HeldReservation:
    """Units of several holdings, taken at once by `TenantShare.take`."""

    __slots__ = ("_taken",)

    def __init__(self, taken: Sequence[tuple[Holding, int, TakenUnits]]) -> None:
        self._taken = taken

    def settle(self, tokens: int) -> None:
        taken, self._taken = self._taken, ()
        for holding, units, interval in taken:
            holding.settle(interval, units, tokens)


class Limiting(Protocol):
    """Enforces tenants' limits; see `appliance.tenancy.limits.limiter`."""

    def take(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member], *, sequences: int = 1
    ) -> Reservation | None:
        """Admit a request; None if it has to `wait`."""

    async def wait(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member], *, sequences: int = 1
    ) -> Reservation:
        """Admit a request as soon as possible; raises LimitReachedError and LimitsUnavailableError."""

    def headers(self, tenant: Tenant, model: str | None = None) -> dict[str, str]: ...


class NoLimits:
    def take(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member], *, sequences: int = 1
    ) -> Reservation | None:
        return UNLIMITED

    async def wait(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member], *, sequences: int = 1
    ) -> Reservation:
        return UNLIMITED

    def headers(self, tenant: Tenant, model: str | None = None) -> dict[str, str]:
        return {}


NO_LIMITS = NoLimits()
