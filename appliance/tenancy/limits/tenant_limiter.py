"""One tenant's requests: admitted, waiting for an exchange, or refused."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from appliance.errors import LimitReachedError, LimitsUnavailableError
from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.estimate import TokenEstimate
from appliance.tenancy.limits.ledger import LeaseTerms, LedgerReply, LimitDecision, LimitVerdict
from appliance.tenancy.limits.limiting import Reservation
from appliance.tenancy.limits.refusal import refusal
from appliance.tenancy.limits.share import Need, TenantShare
from appliance.tenancy.limits.store import ExchangeRequest

POLLS = 4
"""Exchanges per report interval while requests wait for what another gateway holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRefusal:
    units: int
    decision: LimitDecision
    at: float
    """Monotonic time."""


class WaitingRequest:
    def __init__(self, model: str, estimate: TokenEstimate | None, holder: str) -> None:
        self.model, self.estimate, self.holder = model, estimate, holder
        self.future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()


class TenantLimiter:
    """One tenant's share, and the requests that wait for more; `wake` is called when one begins to wait."""

    def __init__(self, limits: Limits, terms: LeaseTerms, wake: Callable[[], None]) -> None:
        self.share = TenantShare(limits)
        self.ask_at = 0.0
        """Monotonic time of the next exchange for waiting requests."""
        self._terms, self._wake = terms, wake
        self._waiting: deque[WaitingRequest] = deque()
        self._asking: list[WaitingRequest] = []
        self._refused: dict[str, RecentRefusal] = {}

    @property
    def has_waiters(self) -> bool:
        return bool(self._waiting)

    def change(self, limits: Limits) -> None:
        self._refused.clear()
        self.share.change(limits)

    async def wait(
        self, model: str, estimate: TokenEstimate | None, *, holder: str, now: float, wall_time: float
    ) -> Reservation:
        """
        Wait until the ledger has admitted a request; without an estimate, as far as it needs none.

        `holder` is who has the limits, for the caller.  Raises LimitReachedError if a limit is used up, or
        the request is larger than it, and LimitsUnavailableError if the database cannot be reached.
        """
        self._refuse_at_once(self.share.need(model, estimate), holder, now, wall_time)
        request = WaitingRequest(model, estimate, holder)
        if not self._waiting:
            self.ask_at = now
        self._waiting.append(request)
        self._wake()
        try:
            return await request.future
        except asyncio.CancelledError:
            if request.future.done() and not request.future.cancelled() and not request.future.exception():
                # Admitted and cancelled at the same moment: no other code would settle it.
                request.future.result().settle(0)
            raise

    def next_exchange(self, *, leaves: bool = False) -> ExchangeRequest:
        """The tenant's part of the next exchange, with the needs of waiting requests."""
        self._refused.clear()
        self._asking = [request for request in self._waiting if not request.future.done()]
        needs = [self.share.need(request.model, request.estimate) for request in self._asking]
        return ExchangeRequest(quotas=dict(self.share.quotas), report=self.share.report(needs, leaves=leaves))

    def apply_reply(self, reply: LedgerReply, *, asked: float, now: float, wall_time: float) -> None:
        """Apply the answer to the exchange sent at `asked` (monotonic): admit, refuse or keep requests."""
        self.share.apply_reply(reply, asked=asked, now=now)
        decisions = dict(zip(map(id, self._asking), reply.decisions, strict=True))
        waiting, self._waiting, self._asking = self._waiting, deque(), []
        for request in waiting:
            if not request.future.done():
                self._serve(request, decisions.get(id(request)), now, wall_time)
        waits = any(decision.verdict is LimitVerdict.WAITS for decision in reply.decisions)
        self.ask_at = now + (self._terms.renew_seconds / POLLS if waits else 0.0)

    def fail(self) -> None:
        """Refuse all waiting requests: the database cannot be reached."""
        waiting, self._waiting, self._asking = self._waiting, deque(), []
        for request in waiting:
            if not request.future.done():
                message = "Limits cannot be checked now. Try again in a moment."
                request.future.set_exception(LimitsUnavailableError(message))

    def _serve(
        self, request: WaitingRequest, decision: LimitDecision | None, now: float, wall_time: float
    ) -> None:
        need = self.share.need(request.model, request.estimate)
        if (reservation := self.share.take(need, now)) is not None:
            request.future.set_result(reservation)
            return
        # If limits were changed meanwhile, the ledger decides again.
        units = next((units for holding, units in need if decision and holding.key == decision.key), None)
        if decision is None or decision.verdict is not LimitVerdict.REFUSED or units is None:
            self._waiting.append(request)
            return
        self._refused[decision.key] = RecentRefusal(units=units, decision=decision, at=now)
        request.future.set_exception(self._error(decision, units, request.holder, wall_time))

    def _refuse_at_once(self, need: Need, holder: str, now: float, wall_time: float) -> None:
        """Repeat a refusal since the last report for a request that needs at least as much."""
        for holding, units in need:
            refused = self._refused.get(holding.key)
            if (
                refused is not None
                and units >= refused.units
                and units > holding.free
                and now - refused.at < self._terms.renew_seconds
            ):
                raise self._error(refused.decision, units, holder, wall_time)

    def _error(self, decision: LimitDecision, units: int, holder: str, wall_time: float) -> LimitReachedError:
        quota = self.share.quotas[decision.key]
        return refusal(quota, decision, units, holder=holder, now=wall_time, zone=self._terms.zone)
