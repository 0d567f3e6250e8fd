"""
What one gateway holds of one limit, and what was used of it since it last reported.

For limits by the minute and budgets, what is free plus what the open batch has taken is what the
book says is held; for concurrency, what is free plus what is in use is.  Everything here is
arithmetic on integers, in the thread of the event loop.
"""

from appliance.tenancy.limits.book import Marked, Reply, Units
from appliance.tenancy.limits.quota import Measure, Quota

AHEAD = 4
"""How many times the use between two reports is held for requests to come."""
NEXT = 2
"""How many requests like the last one can be let in at any rate."""
QUIET_REPORTS = 120
"""After so many reports without a request nothing is held for the next one."""


class Batch:
    """Units taken between two reports."""

    __slots__ = ("late", "mark", "period", "units")

    def __init__(self, period: str) -> None:
        self.period = period
        """Of a budget; empty for others."""
        self.units = 0
        self.mark = ""
        """Where the book has entered them; empty until it is known."""
        self.late = 0
        """Units given back between the report and its answer."""


class Holding:
    """What is held of one limit; owned by a `Share`."""

    __slots__ = (
        "_flying", "_last", "_over", "_quiet", "_recent", "_refunds", "_taken",
        "batch", "free", "in_use", "is_concurrent", "is_tokens", "key", "pool", "quota", "refilled_at",
    )  # fmt: skip

    def __init__(self, quota: Quota) -> None:
        self.quota, self.key = quota, quota.key
        # Looked at several times for every request.
        self.is_concurrent, self.is_tokens = quota.measure is Measure.CONCURRENT, quota.measure.is_tokens
        self.free = 0
        """Units a request may take now."""
        self.in_use = 0
        """Requests under way, for concurrency."""
        self.batch = Batch("")
        self.pool = quota.limit
        """Units nobody held when the book was last seen."""
        self.refilled_at = 0.0
        """Monotonic time at which the limit is as good as new, as the book was last seen."""
        self._taken = 0  # since the last report
        self._last = 0  # by the last request
        self._recent = 0  # between two reports, falling by half with each that saw less
        self._quiet = 0  # reports in a row without a request
        self._flying: Batch | None = None
        self._over: dict[str, int] = {}
        self._refunds: dict[str, int] = {}

    def remaining(self, now: float) -> int:
        """Units left at a monotonic time, as far as this gateway knows; what others hold counts as used."""
        if now >= self.refilled_at and not self.is_concurrent:
            # The book was not seen since: what it said then is past.
            return max(0, self.quota.limit - self.batch.units)
        return min(self.quota.limit, max(0, self.free + self.pool))

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to tell the book, and nothing to keep from running out."""
        return not (
            self.free or self.in_use or self.batch.units or self._taken or self._over or self._refunds
        )

    def take(self, units: int) -> Batch:
        """Take units that are free."""
        self.free -= units
        self._taken += units
        self._last = units
        if self.is_concurrent:
            self.in_use += units
        else:
            self.batch.units += units
        return self.batch

    def settle(self, batch: Batch, units: int, tokens: int) -> None:
        """Give back, or charge, the difference between what a request took and what it used."""
        if self.is_concurrent:
            self.in_use -= units
            self.free += units
        elif self.is_tokens and tokens < units:
            self._refund(batch, units - tokens)
        elif self.is_tokens and tokens > units:
            self.charge(tokens - units, batch.period)

    def charge(self, units: int, period: str) -> None:
        """Enter units beyond what was taken, from what is free as far as that goes."""
        if period != self.batch.period:
            return  # what a request of yesterday used beyond its reservation is not of today's budget
        covered = min(units, max(0, self.free))
        self.free -= covered
        self.batch.units += covered
        if units > covered:
            self._over[period] = self._over.get(period, 0) + units - covered

    def _refund(self, batch: Batch, units: int) -> None:
        if batch is self.batch:
            batch.units -= units
            self.free += units
        elif batch.mark:
            self._refunds[batch.mark] = self._refunds.get(batch.mark, 0) + units
        else:
            batch.late += units

    def report(self, told: "Told", *, all_of_it: bool) -> None:
        """Add to a report what happened since the last one; from here on it is on its way."""
        self._quiet = 0 if self._taken else self._quiet + 1
        self._recent = max(self._taken, self._recent // 2)
        self._taken = 0
        next_ones = NEXT * self._last if self._quiet < QUIET_REPORTS else 0
        wanted = max(AHEAD * self._recent, next_ones)
        returned = self.free if all_of_it else max(0, self.free - 2 * wanted)
        if returned > 0:
            self.free -= returned
            told.returned[self.key] = returned
        told.target[self.key] = max(0, wanted - self.free)
        if self.is_concurrent:
            return
        if self.batch.units:
            told.spent[self.key] = {self.batch.period: self.batch.units}
        self._flying, self.batch = self.batch, Batch(self.batch.period)
        if self._over:
            told.over[self.key], self._over = self._over, {}
        if self._refunds:
            told.refunds[self.key], self._refunds = self._refunds, {}

    def enter(self, reply: Reply, now: float) -> None:
        """Take over what the book says after a report that it has entered."""
        period = reply.periods[self.key].name if self.key in reply.periods else ""
        self._land(self._flying.period or reply.slot if self._flying else "")
        if self.batch.period != period:
            # What was taken while the report was on its way is of the period that is over.
            self.batch.mark, self.batch = self.batch.period, Batch(period)
        self._see(reply, now)

    def lose(self, reply: Reply, now: float, *, reaped: str, returned: int) -> None:
        """
        Take over a new lease after the old one ran out, which spent all that was held under it.

        Args:
            reply: of the new lease.
            now: monotonic time.
            reaped: where the units of a minute were entered.
            returned: what this gateway had given back in the same breath.
        """
        mark = self.batch.period or reaped
        self._land(mark)
        unused = self.free + returned
        if not self.is_concurrent:
            self.batch.mark, self.batch = (
                mark,
                Batch(reply.periods[self.key].name if self.key in reply.periods else ""),
            )
            if unused and mark:
                self._refunds[mark] = self._refunds.get(mark, 0) + unused
        self._see(reply, now)

    def _land(self, mark: str) -> None:
        flying, self._flying = self._flying, None
        if flying is not None and mark:
            flying.mark = mark
            if flying.late:
                self._refunds[mark] = self._refunds.get(mark, 0) + flying.late

    def _see(self, reply: Reply, now: float) -> None:
        self.free = reply.held[self.key] - (self.in_use if self.is_concurrent else self.batch.units)
        self.pool = reply.free[self.key]
        self.refilled_at = now + reply.refills[self.key]


class Told:
    """A report as the holdings fill it in."""

    def __init__(self) -> None:
        self.spent: Marked = {}
        self.over: Marked = {}
        self.refunds: Marked = {}
        self.returned: Units = {}
        self.target: Units = {}
