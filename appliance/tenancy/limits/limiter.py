"""
All tenants' limits in one gateway.

Most requests are admitted at once, from what this gateway holds of the tenant's limits.  A request that
needs more waits for an exchange with the database, shared by all waiting requests.  Reports are sent
every `RENEW_SECONDS`; requests cause no other database access.

It fails closed: without the database a gateway uses what it holds until its lease ends, then refuses.
After a crash what the gateway held counts as used: the tenant loses it, the limit holds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from zoneinfo import ZoneInfo

from appliance.errors import LimitReachedError, LimitsUnavailableError
from appliance.infra.database import Database
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LimitSettings
from appliance.tenancy.limits.estimate import RequestSize, TokenEstimate
from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.ledger import LeaseTerms
from appliance.tenancy.limits.limiting import UNLIMITED, Reservation
from appliance.tenancy.limits.quota import Measure
from appliance.tenancy.limits.refusal import render_headers
from appliance.tenancy.limits.share import TenantShare
from appliance.tenancy.limits.store import LedgerStore, SqlLedgerStore
from appliance.tenancy.limits.tenant_limiter import TenantLimiter
from appliance.tenancy.tenant import Tenant

Clock = Callable[[], float]
RENEW_SECONDS = 0.5
"""Time between two reports of a gateway; a lease is at least four times as long."""


class Limiter:
    """
    Enforces tenants' limits; made by `open_limits`.

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

    async def enter(self, tenant: Tenant) -> Reservation:
        """Reserve a request of limits that do not depend on its body; raises as `wait`."""
        if (limiter := self._limiter(tenant)) is None or not (need := limiter.share.need_to_enter):
            return UNLIMITED
        return limiter.share.take(need, self._clock()) or await self._wait(limiter, tenant, "", None)

    def take(self, tenant: Tenant, model: str, size: RequestSize) -> Reservation | None:
        """Admit a request for an existing model; None if it has to `wait`."""
        if (limiter := self._limiter(tenant)) is None:
            return UNLIMITED
        need = limiter.share.need(model, size.estimate(self._guess_tokens))
        return limiter.share.take(need, self._clock())

    async def wait(self, tenant: Tenant, model: str, size: RequestSize) -> Reservation:
        """Admit a request as soon as the database allows it; raises as `TenantLimiter.wait`."""
        if (limiter := self._limiter(tenant)) is None:
            return UNLIMITED
        return await self._wait(limiter, tenant, model, size.estimate(self._guess_tokens))

    async def _wait(
        self, limiter: TenantLimiter, tenant: Tenant, model: str, estimate: TokenEstimate | None
    ) -> Reservation:
        try:
            return await limiter.wait(model, estimate, now=self._clock(), wall_time=self._wall_clock())
        except LimitReachedError as refused:
            self._metrics.limit_refusals.labels(tenant.name, refused.limit).inc()
            raise

    def headers(self, tenant: Tenant, model: str | None = None) -> dict[str, str]:
        """Rate-limit headers of an answer to this tenant; empty if it has no limits."""
        if (limiter := self._limiter(tenant)) is None:
            return {}
        return render_headers(limiter.share.of_model(model or ""), self._clock())

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

    def _limiter(self, tenant: Tenant) -> TenantLimiter | None:
        limiter = self._tenants.get(tenant.name)
        if limiter is not None and limiter.share.limits is tenant.limits:
            return limiter if limiter.share.holdings else None
        if limiter is None:
            limiter = self._tenants[tenant.name] = TenantLimiter(tenant.limits, self._terms, self._wake.set)
        elif limiter.share.limits == tenant.limits:
            limiter.share.limits = tenant.limits  # equal, read again
        else:
            limiter.change(tenant.limits)
        self._publish(tenant.name, limiter.share)
        return limiter if limiter.share.holdings else None

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
