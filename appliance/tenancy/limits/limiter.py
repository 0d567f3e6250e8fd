"""
All limits of tenants and keys in one gateway.

Most requests are admitted at once, from what this gateway holds of the tenant's limits.  A request that
needs more waits for an exchange with the database, shared by all waiting requests.  Reports are sent
every `RENEW_SECONDS`; requests cause no other database access.

It fails closed: without the database a gateway uses what it holds until its lease ends, then refuses.
After a crash what the gateway held counts as used: the tenant loses it, the limit holds.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from zoneinfo import ZoneInfo

from appliance.errors import LimitReachedError, LimitsUnavailableError
from appliance.infra.database import Database
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LimitSettings
from appliance.tenancy.allowances import KeyLimits, Limits
from appliance.tenancy.limits.estimate import RequestSize, TokenEstimate
from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.ledger import LeaseTerms
from appliance.tenancy.limits.limiting import UNLIMITED, JoinedReservation, Reservation
from appliance.tenancy.limits.quota import Measure
from appliance.tenancy.limits.refusal import render_headers
from appliance.tenancy.limits.share import TenantShare
from appliance.tenancy.limits.store import LedgerStore, SqlLedgerStore
from appliance.tenancy.limits.tenant_limiter import TenantLimiter
from appliance.tenancy.tenant import Tenant

Clock = Callable[[], float]
YOUR_TENANT = "your tenant"
RENEW_SECONDS = 0.5
"""Time between two reports of a gateway; a lease is at least four times as long."""


_Limited = tuple[str, TenantLimiter]  # and who has the limits, in the words of a refusal


class Limiter:
    """
    Enforces limits of tenants and keys; made by `open_limits`.

    `guess_tokens` are reserved for an answer of unknown length; `clock` is monotonic;
    `wall_clock` is Unix time, for messages only.
    """

    def __init__(
        self,
        *,
        store: LedgerStore,
        terms: LeaseTerms,
        guess_tokens: int,
        clock: Clock,
        wall_clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._store, self._terms, self._guess_tokens = store, terms, guess_tokens
        self._clock, self._wall_clock = clock, wall_clock
        self._metrics, self._logger = metrics, logger
        self._tenants: dict[str, TenantLimiter] = {}
        self._wake = asyncio.Event()
        self._failure: str | None = None

    async def enter(self, tenant: Tenant, keys: Sequence[KeyLimits] = ()) -> Reservation:
        """Reserve a request of limits that do not depend on its body; raises as `wait`."""

        async def enter_one(holder: str, limiter: TenantLimiter) -> Reservation:
            if not (need := limiter.share.need_to_enter):
                return UNLIMITED
            found = limiter.share.take(need, self._clock())
            return found or await self._wait(limiter, tenant, holder, "", None)

        return await _join(self._limiters(tenant, keys), enter_one)

    def take(
        self, tenant: Tenant, model: str, size: RequestSize, keys: Sequence[KeyLimits] = ()
    ) -> Reservation | None:
        """Admit a request for an existing model; None if it has to `wait`."""
        taken: list[Reservation] = []
        for _, limiter in self._limiters(tenant, keys):
            need = limiter.share.need(model, size.estimate(self._guess_tokens))
            part = limiter.share.take(need, self._clock())
            if part is None:
                JoinedReservation(taken).release()
                return None
            taken.append(part)
        return _joined(taken)

    async def wait(
        self, tenant: Tenant, model: str, size: RequestSize, keys: Sequence[KeyLimits] = ()
    ) -> Reservation:
        """Admit a request as soon as the database allows it; raises as `TenantLimiter.wait`."""
        estimate = size.estimate(self._guess_tokens)

        async def wait_for_one(holder: str, limiter: TenantLimiter) -> Reservation:
            need = limiter.share.need(model, estimate)
            # Alone, its units are certainly missing; with others, any of them may have missed some.
            found = limiter.share.take(need, self._clock()) if keys else None
            return found or await self._wait(limiter, tenant, holder, model, estimate)

        return await _join(self._limiters(tenant, keys), wait_for_one)

    async def _wait(
        self,
        limiter: TenantLimiter,
        tenant: Tenant,
        holder: str,
        model: str,
        estimate: TokenEstimate | None,
    ) -> Reservation:
        try:
            return await limiter.wait(
                model, estimate, holder=holder, now=self._clock(), wall_time=self._wall_clock()
            )
        except LimitReachedError as refused:
            self._metrics.limit_refusals.labels(tenant.name, refused.limit).inc()
            raise

    def headers(
        self, tenant: Tenant, model: str | None = None, keys: Sequence[KeyLimits] = ()
    ) -> dict[str, str]:
        """Rate-limit headers of an answer to this tenant; empty if neither it nor its key has limits."""
        holdings = [
            holding
            for _, limiter in self._limiters(tenant, keys)
            for holding in limiter.share.of_model(model or "")
        ]
        return render_headers(holdings, self._clock())

    async def run(self) -> None:
        next_round = self._clock()
        while True:
            ask_at = min(
                (limiter.ask_at for limiter in self._tenants.values() if limiter.has_waiters),
                default=next_round,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(ask_at, next_round) - self._clock())):
                    await self._wake.wait()
            self._wake.clear()
            now = self._clock()
            is_round = now >= next_round
            if is_round:
                next_round = now + self._terms.renew_seconds
            await self._exchange(
                {
                    name: limiter
                    for name, limiter in self._tenants.items()
                    if (limiter.has_waiters and now >= limiter.ask_at)
                    or (is_round and not limiter.share.is_idle)
                }
            )

    async def close(self) -> None:
        """Return what is held and refuse waiting requests."""
        for _ in range(2):  # a report whose answer was lost comes first
            busy = {name: limiter for name, limiter in self._tenants.items() if not limiter.share.is_idle}
            await self._exchange(busy, leaves=True)
        for limiter in self._tenants.values():
            limiter.fail()

    def _limiters(self, tenant: Tenant, keys: Sequence[KeyLimits]) -> list[_Limited]:
        """Those with limits: of the keys, which are narrower, and then of the tenant."""
        found = [(each.holder, self._limiter(each.ledger, each.limits)) for each in keys]
        found.append((YOUR_TENANT, self._limiter(tenant.name, tenant.limits, shown=True)))
        return [each for each in found if each[1].share.holdings]

    def _limiter(self, name: str, limits: Limits, *, shown: bool = False) -> TenantLimiter:
        limiter = self._tenants.get(name)
        if limiter is not None and limiter.share.limits is limits:
            return limiter
        if limiter is None:
            limiter = self._tenants[name] = TenantLimiter(limits, self._terms, self._wake.set)
        elif limiter.share.limits == limits:
            limiter.share.limits = limits  # equal, read again
        else:
            limiter.change(limits)
        if shown:
            self._publish(name, limiter.share)
        return limiter

    async def _exchange(self, limiters: Mapping[str, TenantLimiter], *, leaves: bool = False) -> None:
        if not limiters:
            return
        asked_at = self._clock()
        requests = {name: limiter.next_exchange(leaves=leaves) for name, limiter in limiters.items()}
        try:
            replies = await asyncio.to_thread(self._store.exchange, requests)
        except LimitsUnavailableError as error:
            if self._failure is None:
                self._logger.warning("limits_unavailable", error=str(error))
            self._failure = str(error)
            self._metrics.limits_failing.set(1)
            for limiter in limiters.values():
                limiter.fail()
            return
        if self._failure is not None:
            self._failure = None
            self._logger.info("limits_available")
            self._metrics.limits_failing.set(0)
        now, wall_time = self._clock(), self._wall_clock()
        for name, limiter in limiters.items():
            limiter.apply_reply(replies[name], asked=asked_at, now=now, wall_time=wall_time)

    def _publish(self, tenant: str, share: TenantShare) -> None:
        """Export how full each limit is, computed at each scrape."""
        for measure in Measure:
            holdings = [each for each in share.holdings.values() if each.quota.measure is measure]
            if holdings:
                self._metrics.limit_used.labels(tenant, measure).set_function(
                    partial(_fullest, holdings, self._clock)
                )
            else:
                with suppress(KeyError):
                    self._metrics.limit_used.remove(tenant, measure)


async def _join(
    limiters: Sequence[_Limited], reserve: Callable[[str, TenantLimiter], Awaitable[Reservation]]
) -> Reservation:
    """Reserve of each, in order; of none if one refuses."""
    taken: list[Reservation] = []
    try:
        for holder, limiter in limiters:
            taken.append(await reserve(holder, limiter))
    except BaseException:
        JoinedReservation(taken).release()
        raise
    return _joined(taken)


def _joined(parts: Sequence[Reservation]) -> Reservation:
    if not parts:
        return UNLIMITED
    return parts[0] if len(parts) == 1 else JoinedReservation(parts)


def _fullest(holdings: Sequence[Holding], clock: Clock) -> float:
    now, limits = clock(), [(each, each.quota.limit) for each in holdings]
    return max((limit - each.remaining(now)) / limit if limit else 1.0 for each, limit in limits)


@asynccontextmanager
async def open_limits(
    *,
    database: Database | str,
    gateway: str,
    settings: LimitSettings,
    clock: Clock,
    wall_clock: Clock,
    metrics: Metrics,
    logger: Logger,
    renew_seconds: float = RENEW_SECONDS,
) -> AsyncIterator[Limiter]:
    """
    Limits in the audit log's database, which has the tables, until the block ends.

    `Limiter.run` must run meanwhile.  `gateway` names this start of this gateway and is never used again;
    `clock` is monotonic, `wall_clock` is Unix time.
    """
    terms = LeaseTerms(
        lease_seconds=settings.lease_seconds, renew_seconds=renew_seconds, zone=ZoneInfo(settings.time_zone)
    )
    store = SqlLedgerStore(database, gateway=gateway, terms=terms, clock=wall_clock)
    limits = Limiter(
        store=store,
        terms=terms,
        guess_tokens=settings.guess_tokens,
        clock=clock,
        wall_clock=wall_clock,
        metrics=metrics,
        logger=logger,
    )
    try:
        yield limits
    finally:
        await limits.close()
        store.close()
