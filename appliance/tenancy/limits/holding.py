"""
What one gateway holds of one limit, and what was used of it since the last report.

For per-minute limits and budgets, free units plus units taken since the last report are what the
ledger says is held; for concurrency, free units plus units in use are.  All of it is integer
arithmetic on the event loop's thread.
"""

from appliance.tenancy.limits.ledger import LedgerReply, UsageReport
from appliance.tenancy.limits.quota import Measure, Quota

AHEAD = 4
"""Units held for future requests, as a multiple of the usage between two reports."""
NEXT = 2
"""Minimum units held for future requests, in requests like the last one."""
QUIET_REPORTS = 120
"""Reports without a request after which nothing is held for the next one."""


class TakenUnits:
    __slots__ = ("late", "mark", "period", "units")

    def __init__(self, period: str) -> None:
        self.period = period
        """Of a budget; empty for other limits."""
        self.units = 0
        self.mark = ""
        """Slot or period in which the ledger recorded them; empty until it is known."""
        self.late = 0
        """Units released between the report and its answer."""


class Holding:
    """What is held of one limit; owned by a `TenantShare`."""

    __slots__ = (
        "_last", "_over", "_quiet", "_recent", "_refunds", "_reported", "_since_report",
        "free", "in_use", "is_concurrent", "is_tokens", "key", "pool", "quota", "refilled_at", "taken",
    )  # fmt: skip

    def __init__(self, quota: Quota) -> None:
        self.quota, self.key = quota, quota.key
        # Read several times for every request.
        self.is_concurrent, self.is_tokens = quota.measure is Measure.CONCURRENT, quota.measure.is_tokens
        self.free = 0
        """Units a request may take now."""
        self.in_use = 0
        """Running requests, for concurrency."""
        self.taken = TakenUnits("")
        self.pool = quota.limit
        """Units no gateway held at the last exchange."""
        self.refilled_at = 0.0
        """Monotonic time at which the limit is fully available, as of the last exchange."""
        self._since_report = 0
        self._last = 0  # by the last request
        self._recent = 0  # between two reports; halves with each report with less usage
        self._quiet = 0  # reports in a row without a request
        self._reported: TakenUnits | None = None
        self._over: dict[str, int] = {}
        self._refunds: dict[str, int] = {}

    def remaining(self, now: float) -> int:
        """Units left at a monotonic time, as far as this gateway knows; what others hold counts as used."""
        if now >= self.refilled_at and not self.is_concurrent:
            # All usage known from the last exchange has expired.
            return max(0, self.quota.limit - self.taken.units)
        return min(self.quota.limit, max(0, self.free + self.pool))

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to report, and no lease to renew."""
        return not (
            self.free or self.in_use or self.taken.units or self._since_report or self._over or self._refunds
        )

    def take(self, units: int) -> TakenUnits:
        self.free -= units
        self._since_report += units
        self._last = units
        if self.is_concurrent:
            self.in_use += units
        else:
            self.taken.units += units
        return self.taken

    def settle(self, taken: TakenUnits, units: int, tokens: int) -> None:
        """Release, or charge, the difference between what a request took and what it used."""
        if self.is_concurrent:
            self.in_use -= units
            self.free += units
        elif self.is_tokens and tokens < units:
            self._refund(taken, units - tokens)
        elif self.is_tokens and tokens > units:
            self._charge(tokens - units, taken.period)

    def release(self, taken: TakenUnits, units: int) -> None:
        """Give back all that a request took, as if it had never come."""
        self._since_report = max(0, self._since_report - units)
        if self.is_concurrent:
            self.settle(taken, units, 0)
        else:
            self._refund(taken, units)

    def _charge(self, units: int, period: str) -> None:
        if period != self.taken.period:
            return  # usage beyond a reservation of yesterday does not count against today's budget
        covered = min(units, max(0, self.free))
        self.free -= covered
        self.taken.units += covered
        if units > covered:
            self._over[period] = self._over.get(period, 0) + units - covered

    def _refund(self, taken: TakenUnits, units: int) -> None:
        if taken is self.taken:
            taken.units -= units
            self.free += units
        elif taken.mark:
            self._refunds[taken.mark] = self._refunds.get(taken.mark, 0) + units
        else:
            taken.late += units

    def report(self, draft: UsageReport, *, return_all: bool) -> None:
        """Add usage since the last report; it counts as sent from here on."""
        self._quiet = 0 if self._since_report else self._quiet + 1
        self._recent = max(self._since_report, self._recent // 2)
        self._since_report = 0
        next_ones = NEXT * self._last if self._quiet < QUIET_REPORTS else 0
        wanted = max(AHEAD * self._recent, next_ones)
        returned = self.free if return_all else max(0, self.free - 2 * wanted)
        if returned > 0:
            self.free -= returned
            draft.returned[self.key] = returned
        draft.target[self.key] = max(0, wanted - self.free)
        if self.is_concurrent:
            return
        if self.taken.units:
            draft.spent[self.key] = {self.taken.period: self.taken.units}
        self._reported, self.taken = self.taken, TakenUnits(self.taken.period)
        if self._over:
            draft.over[self.key], self._over = self._over, {}
        if self._refunds:
            draft.refunds[self.key], self._refunds = self._refunds, {}

    def apply_reply(self, reply: LedgerReply, now: float) -> None:
        """Apply the answer to a report that the ledger applied."""
        period = reply.periods[self.key].name if self.key in reply.periods else ""
        self._mark_reported(self._reported.period or reply.slot if self._reported else "")
        if self.taken.period != period:
            # What was taken while the report was in flight belongs to the period that has ended.
            self.taken.mark, self.taken = self.taken.period, TakenUnits(period)
        self._update(reply, now)

    def apply_new_lease(self, reply: LedgerReply, now: float, *, expired_slot: str, returned: int) -> None:
        """
        Apply a new lease after the old one expired, which spent all that was held under it.

        `now` is monotonic; the ledger recorded the per-minute units in `expired_slot`; this gateway returned
        `returned` units in the same report.
        """
        mark = self.taken.period or expired_slot
        self._mark_reported(mark)
        unused = self.free + returned
        if not self.is_concurrent:
            period = reply.periods[self.key].name if self.key in reply.periods else ""
            self.taken.mark, self.taken = mark, TakenUnits(period)
            if unused and mark:
                self._refunds[mark] = self._refunds.get(mark, 0) + unused
        self._update(reply, now)

    def _mark_reported(self, mark: str) -> None:
        reported, self._reported = self._reported, None
        if reported is not None and mark:
            reported.mark = mark
            if reported.late:
                self._refunds[mark] = self._refunds.get(mark, 0) + reported.late

    def _update(self, reply: LedgerReply, now: float) -> None:
        self.free = reply.held[self.key] - (self.in_use if self.is_concurrent else self.taken.units)
        self.pool = reply.free[self.key]
        self.refilled_at = now + reply.refills[self.key]
