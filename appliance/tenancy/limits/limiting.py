"""What the gateway calls to apply limits: reservations, and the case without limits."""

# ruff: noqa: ARG002 - `NoLimits` uses no argument

from collections.abc import Sequence
from typing import Protocol

from appliance.tenancy.allowances import KeyLimits
from appliance.tenancy.limits.estimate import RequestSize
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

    def release(self) -> None:
        """Give everything back: the request does not begin.  Nothing after `settle`."""


class Unlimited:
    def settle(self, tokens: int) -> None: ...

    def release(self) -> None: ...


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

    def release(self) -> None:
        taken, self._taken = self._taken, ()
        for holding, units, interval in taken:
            holding.release(interval, units)


class JoinedReservation:
    """Reservations of several limited parties, for one request."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Reservation]) -> None:
        self._parts = parts

    def settle(self, tokens: int) -> None:
        for part in self._parts:
            part.settle(tokens)

    def release(self) -> None:
        for part in self._parts:
            part.release()


class Limiting(Protocol):
    """Enforces limits of tenants, and of the request's `keys`; see `appliance.tenancy.limits.limiter`."""

    async def enter(self, tenant: Tenant, keys: Sequence[KeyLimits] = ()) -> Reservation:
        """
        Reserve what a request needs of the tenant's limits of requests, before its body is read.

        The reservation is released when the whole need is known and `take` is called.  Raises as `wait`.
        """

    def take(
        self, tenant: Tenant, model: str, size: RequestSize, keys: Sequence[KeyLimits] = ()
    ) -> Reservation | None:
        """Admit a request; None if it has to `wait`."""

    async def wait(
        self, tenant: Tenant, model: str, size: RequestSize, keys: Sequence[KeyLimits] = ()
    ) -> Reservation:
        """Admit a request as soon as possible; raises LimitReachedError and LimitsUnavailableError."""

    def headers(
        self, tenant: Tenant, model: str | None = None, keys: Sequence[KeyLimits] = ()
    ) -> dict[str, str]: ...


class NoLimits:
    async def enter(self, tenant: Tenant, keys: Sequence[KeyLimits] = ()) -> Reservation:
        return UNLIMITED

    def take(
        self, tenant: Tenant, model: str, size: RequestSize, keys: Sequence[KeyLimits] = ()
    ) -> Reservation | None:
        return UNLIMITED

    async def wait(
        self, tenant: Tenant, model: str, size: RequestSize, keys: Sequence[KeyLimits] = ()
    ) -> Reservation:
        return UNLIMITED

    def headers(
        self, tenant: Tenant, model: str | None = None, keys: Sequence[KeyLimits] = ()
    ) -> dict[str, str]:
        return {}


NO_LIMITS = NoLimits()
