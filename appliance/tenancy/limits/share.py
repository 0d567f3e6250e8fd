"""
What one gateway holds of one tenant's limits, all of them together.

A request takes units of every limit it falls under, or of none.  Nothing here waits or does I/O:
the limiter sends the reports and enters the replies.
"""

from collections.abc import Sequence
from dataclasses import replace

from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.book import Reply, Report
from appliance.tenancy.limits.estimate import Estimate
from appliance.tenancy.limits.holding import Holding, Told
from appliance.tenancy.limits.quota import Quota, quotas_of
from appliance.tenancy.limits.reservation import HeldReservation
from appliance.tenancy.limits.window import slot_at

NEVER = float("-inf")

Need = Sequence[tuple[Holding, int]]
"""What a request takes of each limit it falls under."""


class Share:
    """One tenant's limits, as one gateway holds them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.quotas: dict[str, Quota] = {}
        self.holdings: dict[str, Holding] = {}
        self.valid_until = NEVER
        """Monotonic time until which what is held may be used."""
        self._of_all: list[Holding] = []
        self._by_model: dict[str, list[Holding]] = {}
        self._sequence = 0
        self._until = NEVER  # of the lease, by the book's clock
        self._is_pressed = False
        self._changes = self._changes_sent = 0
        self._sent: Report | None = None
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Go on with other limits; what is used of those that stay is kept."""
        self.limits = limits
        self.quotas = {quota.key: quota for quota in quotas_of(limits)}
        known, self.holdings = self.holdings, {}
        for key, quota in self.quotas.items():
            holding = self.holdings[key] = known.get(key) or Holding(quota)
            holding.quota = quota
        self._of_all = [each for each in self.holdings.values() if each.quota.model is None]
        self._by_model = {
            model: [each for each in self.holdings.values() if each.quota.model in {None, model}]
            for model in limits.by_model
        }
        # Nothing is let in until all was given back and the book was seen with the new limits.
        self.valid_until = NEVER
        self._changes += 1

    def of_model(self, model: str) -> Sequence[Holding]:
        """What requests for a model take from."""
        return self._by_model.get(model, self._of_all)

    def need(self, model: str, estimate: Estimate) -> Need:
        """What a request takes."""
        return [
            (holding, _units(holding, estimate) if holding.is_tokens else 1)
            for holding in self.of_model(model)
        ]

    def take(self, need: Need, now: float) -> HeldReservation | None:
        """Take all of it if all of it is free, else nothing."""
        if now >= self.valid_until:
            return None
        for holding, units in need:
            if holding.free < units:
                return None
        return HeldReservation([(holding, units, holding.take(units)) for holding, units in need])

    @property
    def is_idle(self) -> bool:
        """Whether the book need not be told anything."""
        return self._sent is None and all(holding.is_idle for holding in self.holdings.values())

    @property
    def is_pressed(self) -> bool:
        """Whether another gateway waits for what this one holds."""
        return self._is_pressed

    def report(self, waiting: Sequence[Need], *, leaves: bool = False) -> Report:
        """
        The next report; one that was sent before and not answered is sent again as it was.

        With somebody waiting, all that is free goes back to the book first and is handed out again from
        there, in order: else two gateways could each hold half of what a request needs.
        """
        needs = tuple({holding.key: units for holding, units in need} for need in waiting)
        busy = {holding.key: holding.in_use for holding in self.holdings.values() if holding.in_use}
        if self._sent is not None:
            self._sent = replace(self._sent, is_resent=True, waiting=needs, busy=busy)
            return self._sent
        told = Told()
        all_of_it = leaves or self._is_pressed or bool(waiting) or self._changes != self._changes_sent
        self._changes_sent = self._changes
        for holding in self.holdings.values():
            holding.report(told, all_of_it=all_of_it)
        self._sequence += 1
        self._sent = Report(
            sequence=self._sequence,
            spent=told.spent,
            over=told.over,
            refunds=told.refunds,
            returned=told.returned,
            busy=busy,
            waiting=needs,
            target={} if leaves else told.target,
        )
        return self._sent

    def enter(self, reply: Reply, *, asked: float, now: float) -> None:
        """
        Take over what the book says.

        Args:
            reply: to the last report.
            asked: monotonic time at which it was sent, so that a slow answer makes for a short lease.
            now: monotonic time.
        """
        sent, self._sent = self._sent, None
        for key, holding in self.holdings.items():
            if key not in reply.held:
                continue  # new since the report
            if reply.is_new:
                # Of a report in doubt nobody knows whether it came before the lease ran out or after.
                returned = sent.returned.get(key, 0) if sent and not sent.is_resent else 0
                reaped = str(slot_at(self._until)) if self._until > NEVER else ""
                holding.lose(reply, now, reaped=reaped, returned=returned)
            else:
                holding.enter(reply, now)
        ends = [reply.until, *(period.ends for period in reply.periods.values())]
        is_outdated = self._changes != self._changes_sent
        self.valid_until = NEVER if is_outdated else asked + min(ends) - reply.now
        self._until, self._is_pressed = reply.until, reply.is_pressed


def _units(holding: Holding, estimate: Estimate) -> int:
    total = estimate.prompt + estimate.completion
    if estimate.is_guess and total > holding.quota.limit:
        # Nobody asked for a long answer: what is guessed must not be what is refused.
        return max(estimate.prompt, holding.quota.limit)
    return total
