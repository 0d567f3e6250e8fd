"""
One tenant's requests before its limits: let in, waiting for an exchange, or refused.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from appliance.errors import LimitReachedError, LimitsUnavailableError
from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.book import Decision, Reply, Terms, Verdict
from appliance.tenancy.limits.estimate import Estimate
from appliance.tenancy.limits.ledger import Asked
from appliance.tenancy.limits.refusal import refusal
from appliance.tenancy.limits.reservation import Reservation
from appliance.tenancy.limits.share import Need, Share

POLLS = 4
"""How often, between two reports, whoever waits for what another gateway holds asks for it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What the book said to somebody lately."""

    units: int
    decision: Decision
    at: float
    """Monotonic time."""


class Waiter:
    """A request that needs more than is held."""

    def __init__(self, model: str, estimate: Estimate) -> None:
        self.model, self.estimate = model, estimate
        self.future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()


class Lane:
    """
    One tenant's share, and who waits for more of it.

    Args:
        limits: the tenant's.
        terms: the same for all gateways.
        wake: called when somebody begins to wait.
    """

    def __init__(self, limits: Limits, terms: Terms, wake: Callable[[], None]) -> None:
        self.share = Share(limits)
        self.ask_at = 0.0
        """Monotonic time at which the next exchange is worth it for those who wait."""
        self._terms, self._wake = terms, wake
        self._waiters: deque[Waiter] = deque()
        self._asking: list[Waiter] = []
        self._refused: dict[str, Refused] = {}

    @property
    def is_waited_in(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    def change(self, limits: Limits) -> None:
        """Go on with other limits."""
        self._refused.clear()
        self.share.change(limits)

    async def wait(self, model: str, estimate: Estimate, *, now: float, wall_time: float) -> Reservation:
        """
        Wait until the book has let a request in.

        Raises:
            LimitReachedError: a limit is used up, or the request is larger than it.
            LimitsUnavailableError: the database cannot be asked.
        """
        self._refuse_at_once(self.share.need(model, estimate), now, wall_time)
        waiter = Waiter(model, estimate)
        if not self._waiters:
            self.ask_at = now
        self._waiters.append(waiter)
        self._wake()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and not waiter.future.exception():
                # Let in and gone in the same moment: nobody else would ever settle it.
                waiter.future.result().settle(0)
            raise

    def ask(self, *, leaves: bool = False) -> Asked:
        """What to tell the book, and to ask it for those who wait."""
        self._refused.clear()
        self._asking = [waiter for waiter in self._waiters if not waiter.future.done()]
        needs = [self.share.need(waiter.model, waiter.estimate) for waiter in self._asking]
        return Asked(quotas=dict(self.share.quotas), report=self.share.report(needs, leaves=leaves))

    def hear(self, reply: Reply, *, asked: float, now: float, wall_time: float) -> None:
        """
        Take over what the book says; let in who may come in, refuse who may not, keep the others waiting.

        Args:
            reply: to the last question.
            asked: monotonic time of the question.
            now: monotonic time.
            wall_time: Unix time.
        """
        self.share.enter(reply, asked=asked, now=now)
        decisions = dict(zip(map(id, self._asking), reply.decisions, strict=True))
        waiters, self._waiters, self._asking = self._waiters, deque(), []
        for waiter in waiters:
            if not waiter.future.done():
                self._serve(waiter, decisions.get(id(waiter)), now, wall_time)
        waits = any(decision.verdict is Verdict.WAITS for decision in reply.decisions)
        self.ask_at = now + (self._terms.renew_seconds / POLLS if waits else 0.0)

    def fail(self) -> None:
        """Refuse all waiting requests: the database cannot be reached."""
        waiters, self._waiters, self._asking = self._waiters, deque(), []
        for waiter in waiters:
            if not waiter.future.done():
                message = "Limits cannot be looked up just now. Try again in a moment."
                waiter.future.set_exception(LimitsUnavailableError(message))

    def _serve(self, waiter: Waiter, decision: Decision | None, now: float, wall_time: float) -> None:
        need = self.share.need(waiter.model, waiter.estimate)
        if (reservation := self.share.take(need, now)) is not None:
            waiter.future.set_result(reservation)
            return
        # Of limits that were changed meanwhile the book is asked again.
        units = next((units for holding, units in need if decision and holding.key == decision.key), None)
        if decision is None or decision.verdict is not Verdict.REFUSED or units is None:
            self._waiters.append(waiter)
            return
        self._refused[decision.key] = Refused(units=units, decision=decision, at=now)
        waiter.future.set_exception(self._error(decision, units, wall_time))

    def _refuse_at_once(self, need: Need, now: float, wall_time: float) -> None:
        """Repeat what the book said since the last report to somebody who asked for no more."""
        for holding, units in need:
            lately = self._refused.get(holding.key)
            if (
                lately is not None
                and units >= lately.units
                and units > holding.free
                and now - lately.at < self._terms.renew_seconds
            ):
                raise self._error(lately.decision, units, wall_time)

    def _error(self, decision: Decision, units: int, wall_time: float) -> LimitReachedError:
        quota = self.share.quotas[decision.key]
        return refusal(quota, decision, units, now=wall_time, zone=self._terms.zone)
