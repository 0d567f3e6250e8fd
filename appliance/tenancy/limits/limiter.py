"""
Requests in, reservations out: the gateway's side of every tenant's limits.

The usual request is let in at once, from what this gateway holds of its tenant's limits.  One that
needs more waits for an exchange with the database, which all that wait then share.  Reports go out
every `RENEW_SECONDS`; nothing else of a request touches the database.

It fails closed: without the database a gateway goes on with what it holds until its lease runs out,
and then refuses.  What a crash loses is lost to the tenant, never to the limit: what the gateway held
counts as used.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from zoneinfo import ZoneInfo

from appliance.errors import LimitReachedError, LimitsUnavailableError
from appliance.infra.json_members import Member
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import LimitSettings
from appliance.tenancy.limits.book import Terms
from appliance.tenancy.limits.estimate import estimate_tokens
from appliance.tenancy.limits.headers import render_headers
from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.lane import Lane
from appliance.tenancy.limits.ledger import Ledger, SqlLedger
from appliance.tenancy.limits.quota import Measure
from appliance.tenancy.limits.reservation import UNLIMITED, Reservation
from appliance.tenancy.limits.share import Share
from appliance.tenancy.tenant import Tenant

Clock = Callable[[], float]

RENEW_SECONDS = 0.5
"""Time between two reports of a gateway; a lease is at least four times as long."""


class Limiter:
    """
    Holds tenants to their limits; made by `open_limits`.

    Args:
        ledger: where the books are.
        terms: the same for all gateways.
        guess_tokens: reserved for an answer of unknown length.
        clock: monotonic seconds.
        wall_clock: Unix time, for messages only.
        metrics: told what is used and refused.
        logger: told when the database is lost and found.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        terms: Terms,
        guess_tokens: int,
        clock: Clock,
        wall_clock: Clock,
        metrics: Metrics,
        logger: Logger,
    ) -> None:
        self._ledger, self._terms, self._guess_tokens = ledger, terms, guess_tokens
        self._clock, self._wall_clock = clock, wall_clock
        self._metrics, self._logger = metrics, logger
        self._lanes: dict[str, Lane] = {}
        self._wake = asyncio.Event()
        self._failure: str | None = None

    def take(
        self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member]
    ) -> Reservation | None:
        """
        Let a request in, or return None if that takes a `wait`.

        Args:
            tenant: whose request it is.
            model: the model it is for, which must exist.
            text: its body.
            members: the body's members.
        """
        if (lane := self._lane(tenant)) is None:
            return UNLIMITED
        estimate = estimate_tokens(text, members, guess=self._guess_tokens)
        return lane.share.take(lane.share.need(model, estimate), self._clock())

    async def wait(self, tenant: Tenant, model: str, text: str, members: Mapping[str, Member]) -> Reservation:
        """
        Let a request in as soon as the database has said that it may.

        Raises:
            LimitReachedError: a limit is used up, or the request is larger than it.
            LimitsUnavailableError: the database cannot be asked.
        """
        if (lane := self._lane(tenant)) is None:
            return UNLIMITED
        estimate = estimate_tokens(text, members, guess=self._guess_tokens)
        try:
            return await lane.wait(model, estimate, now=self._clock(), wall_time=self._wall_clock())
        except LimitReachedError as refused:
            self._metrics.limit_refusals.labels(tenant.name, refused.limit).inc()
            raise

    def headers(self, tenant: Tenant, model: str | None = None) -> dict[str, str]:
        """What an answer to this tenant says about its limits; nothing where it has none."""
        if (lane := self._lane(tenant)) is None:
            return {}
        return render_headers(lane.share.of_model(model or ""), self._clock())

    async def run(self) -> None:
        """Exchange with the database until cancelled."""
        next_round = self._clock()
        while True:
            ask_at = min(
                (lane.ask_at for lane in self._lanes.values() if lane.is_waited_in), default=next_round
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
                    name: lane
                    for name, lane in self._lanes.items()
                    if (lane.is_waited_in and now >= lane.ask_at) or (is_round and not lane.share.is_idle)
                }
            )

    async def close(self) -> None:
        """Give back what is held; whoever still waits is refused."""
        for _ in range(2):  # a report whose answer was lost comes first
            busy = {name: lane for name, lane in self._lanes.items() if not lane.share.is_idle}
            await self._exchange(busy, leaves=True)
        for lane in self._lanes.values():
            lane.fail()

    def _lane(self, tenant: Tenant) -> Lane | None:
        """The tenant's lane; None where it has no limits."""
        lane = self._lanes.get(tenant.name)
        if lane is not None and lane.share.limits is tenant.limits:
            return lane if lane.share.holdings else None
        if lane is None:
            lane = self._lanes[tenant.name] = Lane(tenant.limits, self._terms, self._wake.set)
        elif lane.share.limits == tenant.limits:
            lane.share.limits = tenant.limits  # the same, read again
        else:
            lane.change(tenant.limits)
        self._show(tenant.name, lane.share)
        return lane if lane.share.holdings else None

    async def _exchange(self, lanes: Mapping[str, Lane], *, leaves: bool = False) -> None:
        if not lanes:
            return
        asked_at = self._clock()
        asked = {name: lane.ask(leaves=leaves) for name, lane in lanes.items()}
        try:
            replies = await asyncio.to_thread(self._ledger.exchange, asked)
        except LimitsUnavailableError as error:
            if self._failure is None:
                self._logger.warning("limits_unavailable", error=str(error))
            self._failure = str(error)
            self._metrics.limits_failing.set(1)
            for lane in lanes.values():
                lane.fail()
            return
        if self._failure is not None:
            self._failure = None
            self._logger.info("limits_available")
            self._metrics.limits_failing.set(0)
        now, wall_time = self._clock(), self._wall_clock()
        for name, lane in lanes.items():
            lane.hear(replies[name], asked=asked_at, now=now, wall_time=wall_time)

    def _show(self, tenant: str, share: Share) -> None:
        """Export how full each limit is, read whenever the metrics are."""
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
    return max(_fullness(holding, clock()) for holding in holdings)


def _fullness(holding: Holding, now: float) -> float:
    limit = holding.quota.limit
    return (limit - holding.remaining(now)) / limit if limit else 1.0


@asynccontextmanager
async def open_limits(
    *,
    database_url: str,
    gateway: str,
    settings: LimitSettings,
    clock: Clock,
    wall_clock: Clock,
    metrics: Metrics,
    logger: Logger,
    renew_seconds: float = RENEW_SECONDS,
) -> AsyncIterator[Limiter]:
    """
    Limits over the log's database until the block ends; `Limiter.run` must run meanwhile.

    Args:
        database_url: of the audit log, with its tables.
        gateway: names this start of this gateway; no two may ever be the same.
        settings: how they are counted.
        clock: monotonic seconds.
        wall_clock: Unix time.
        metrics: told what is used and refused.
        logger: told when the database is lost and found.
    """
    terms = Terms(
        lease_seconds=settings.lease_seconds,
        renew_seconds=renew_seconds,
        zone=ZoneInfo(settings.time_zone),
    )
    ledger = SqlLedger(database_url, gateway=gateway, terms=terms, clock=wall_clock)

    limits = Limiter(
        ledger=ledger,
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
        ledger.close()
