"""
What one gateway holds of all limits of one tenant.

A request takes units of every limit that applies to it, or of none.  Nothing here waits or does I/O:
the limiter sends the reports and applies the replies.
"""

from collections.abc import Sequence
from dataclasses import replace

from appliance.tenancy.allowances import Limits
from appliance.tenancy.limits.calendar import slot_at
from appliance.tenancy.limits.estimate import TokenEstimate
from appliance.tenancy.limits.holding import Holding
from appliance.tenancy.limits.ledger import LedgerReply, UsageReport
from appliance.tenancy.limits.limiting import HeldReservation
from appliance.tenancy.limits.quota import Quota, quotas_of

NEVER = float("-inf")

Need = Sequence[tuple[Holding, int]]
"""Units a request takes of each limit that applies to it."""


class TenantShare:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.quotas: dict[str, Quota] = {}
        self.holdings: dict[str, Holding] = {}
        self.valid_until = NEVER
        """Monotonic time until which what is held may be used."""
        self._of_all: list[Holding] = []
        self._by_model: dict[str, list[Holding]] = {}
        self._sequence = 0
        self._until = NEVER  # of the lease, by the ledger's clock
        self.is_pressed = False
        """Whether another gateway waits for what this one holds."""
        self._changes = self._changes_sent = 0
        self._sent: UsageReport | None = None
        self.change(limits)

    def change(self, limits: Limits) -> None:
        """Replace the limits; usage of those that stay is kept."""
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
        # Nothing is admitted until all units were returned and exchanged under the new limits.
        self.valid_until = NEVER
        self._changes += 1

    def of_model(self, model: str) -> Sequence[Holding]:
        return self._by_model.get(model, self._of_all)

    @property
    def need_to_enter(self) -> Need:
        """What every request takes, whatever is in its body."""
        return [(each, 1) for each in self._of_all if not each.is_tokens]

    def need(self, model: str, estimate: TokenEstimate | None) -> Need:
        if estimate is None:
            return self.need_to_enter
        return [(each, _units(each, estimate)) for each in self.of_model(model)]

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
        return self._sent is None and all(holding.is_idle for holding in self.holdings.values())

    def report(self, waiting: Sequence[Need], *, leaves: bool = False) -> UsageReport:
        """
        The next report; an unanswered one is sent again unchanged.

        If requests wait, all free units are returned to the ledger first and allocated again from
        there, in order: else two gateways could each hold half of what a request needs.
        """
        needs = tuple({holding.key: units for holding, units in need} for need in waiting)
        busy = {holding.key: holding.in_use for holding in self.holdings.values() if holding.in_use}
        if self._sent is not None:
            self._sent = replace(self._sent, is_resent=True, waiting=needs, busy=busy)
            return self._sent
        return_all = leaves or self.is_pressed or bool(waiting) or self._changes != self._changes_sent
        self._changes_sent = self._changes
        self._sequence += 1
        self._sent = UsageReport(sequence=self._sequence, busy=busy, waiting=needs)
        for holding in self.holdings.values():
            holding.report(self._sent, return_all=return_all)
        if leaves:
            self._sent.target.clear()
        return self._sent

    def apply_reply(self, reply: LedgerReply, *, asked: float, now: float) -> None:
        """
        Apply the answer to the last report, which was sent at `asked`; times are monotonic.

        The lease counts from `asked`, so that a slow answer shortens it.
        """
        sent, self._sent = self._sent, None
        for key, holding in self.holdings.items():
            if key not in reply.held:
                continue  # new since the report
            if reply.is_new:
                # A resent report may have been applied before the lease expired or after.
                returned = sent.returned.get(key, 0) if sent and not sent.is_resent else 0
                expired_slot = str(slot_at(self._until)) if self._until > NEVER else ""
                holding.apply_new_lease(reply, now, expired_slot=expired_slot, returned=returned)
            else:
                holding.apply_reply(reply, now)
        ends = [reply.until, *(period.ends for period in reply.periods.values())]
        is_outdated = self._changes != self._changes_sent
        self.valid_until = NEVER if is_outdated else asked + min(ends) - reply.now
        self._until, self.is_pressed = reply.until, reply.is_pressed


def _units(holding: Holding, estimate: TokenEstimate) -> int:
    if holding.is_concurrent:
        # A request of more sequences than the limit runs alone.
        return max(1, min(estimate.sequences, holding.quota.limit))
    if not holding.is_tokens:
        return 1
    if estimate.is_guess and estimate.total > holding.quota.limit:
        # The client did not ask for a long answer: a guess must not be the reason for a refusal.
        return max(estimate.prompt, holding.quota.limit)
    return estimate.total
