"""
One tenant's book: what all gateways share about its limits, and how it is handed out.

Of each limit, units are *free*, *held* by a gateway under a lease, or *spent*.  A gateway lets
requests in from what it holds, and reports afterwards.  So for every limit, whatever gateways do
and whenever one of them dies:

    spent + held by all gateways <= limit

but for what requests used beyond what was reserved for them, which is entered all the same.
A unit is held before it is used, and spent from no earlier than it was used; a lease that runs out
counts as spent to the last unit, as late as it could have been.  Therefore no clock but the book's
own is ever compared with another: gateways only measure how long ago they asked.

This module is pure: the ledger reads and writes books, in one transaction each.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from appliance.errors import LimitsUnavailableError
from appliance.tenancy.limits.calendar import Period, period_at
from appliance.tenancy.limits.quota import Measure, Quota
from appliance.tenancy.limits.window import SECONDS, is_past, seconds_until_free, slot_at

CONCURRENT_RETRY_SECONDS = 1.0
"""Nobody knows when a running request ends; this is when asking again is reasonable."""

LEAST_PATIENCE_SECONDS = 1.0
"""However often gateways report, a busy one may be late."""

Units = dict[str, int]
"""By the key of a quota."""
Marked = dict[str, dict[str, int]]
"""By the key of a quota, then by when: a slot of the window, or the name of a period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What every gateway of a database must have set alike."""

    lease_seconds: float
    """How long a gateway may use what it holds without asking again."""
    renew_seconds: float
    """How often it asks while it works."""
    zone: ZoneInfo
    """Where days and months begin."""

    @property
    def patience_seconds(self) -> float:
        """How long to wait for another gateway to hand back what it does not need; it has heard by then."""
        return max(LEAST_PATIENCE_SECONDS, 3 * self.renew_seconds)


@dataclass(slots=True, kw_only=True)
class Lease:
    """What one gateway holds."""

    until: float
    born: int
    """Number of the report that it was made for."""
    sequence: int
    """Number of the last report that was entered: a report sent twice is entered once."""
    seen: float
    held: Units = field(default_factory=dict)
    busy: Units = field(default_factory=dict)
    """Of what it holds, what requests under way occupy."""
    periods: dict[str, str] = field(default_factory=dict)
    """The period that held units of a budget are of."""
    wanting: float | None = None
    """Since when it has waited for what others hold."""


@dataclass(slots=True, kw_only=True)
class Book:
    """Everything shared about one tenant."""

    time: float = 0.0
    """The newest time it was opened at: time stands still while a clock catches up."""
    spent: Marked = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a gateway tells, and asks for."""

    sequence: int
    is_resent: bool = False
    """Whether the same was sent before, and nobody knows if it arrived."""
    spent: Marked = field(default_factory=dict)
    """Held units that requests took; those of a minute are marked by the book, not by the gateway."""
    over: Marked = field(default_factory=dict)
    """Units that were used without having been held."""
    refunds: Marked = field(default_factory=dict)
    """Units that were reported as spent and turned out not to be."""
    returned: Units = field(default_factory=dict)
    busy: Units = field(default_factory=dict)
    waiting: tuple[Units, ...] = ()
    """What each request that waits needs, the first one first."""
    target: Units = field(default_factory=dict)
    """Units it would like to hold for requests to come."""


class Verdict(StrEnum):
    """What becomes of a request that waited."""

    GRANTED = "granted"
    WAITS = "waits"
    """Another gateway holds what it needs, perhaps without needing it."""
    REFUSED = "refused"


class Decision(NamedTuple):
    """A verdict; where it is not granted, the limit that was in the way longest."""

    verdict: Verdict
    key: str = ""
    seconds: float | None = None
    """Until it is worth asking again; None for never."""


GRANTED = Decision(Verdict.GRANTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a gateway is told."""

    now: float
    until: float
    is_new: bool
    """Whether the lease had run out, or never was: what was held is spent."""
    slot: str
    """Where the units of a minute were entered."""
    periods: Mapping[str, Period]
    held: Units
    free: Units
    """Units nobody holds."""
    refills: Mapping[str, float]
    """Seconds until each limit is as good as new."""
    decisions: tuple[Decision, ...]
    is_pressed: bool
    """Whether another gateway waits for what this one may not need."""


def exchange(
    book: Book, quotas: Mapping[str, Quota], gateway: str, report: Report, *, now: float, terms: Terms
) -> Reply:
    """
    Enter a report and hand out what is asked for.

    Args:
        book: is changed.
        quotas: the tenant's limits as this gateway knows them, by key.
        gateway: names one start of one gateway; never used again after it.
        report: what the gateway tells.
        now: Unix time, by one clock for all gateways.
        terms: the same for all gateways.
    """
    if now < book.time - SECONDS:
        _set_back(book, now)
    now = book.time = max(now, book.time)
    periods = {key: period_at(quota.measure, now, terms.zone) for key, quota in quotas.items()
               if quota.measure.is_budget}  # fmt: skip
    _end_leases(book, now)
    lease = book.leases.get(gateway)
    if lease is None:
        lease = Lease(until=now, born=report.sequence, sequence=report.sequence, seen=now)
        book.leases[gateway] = lease
        _enter_beyond(book, report, slot_at(now), refunds=not report.is_resent)
        lease.held = {key: units for key, units in report.busy.items() if key in quotas}
    elif report.sequence > lease.sequence:
        lease.sequence, lease.seen = report.sequence, now
        _enter(book, lease, report, now)
    _forget(book, now, terms.zone)
    lease.busy = dict(report.busy)
    lease.until = now + terms.lease_seconds
    lease.held = {key: lease.held.get(key, 0) for key in quotas}
    for key, period in periods.items():
        if lease.periods.get(key) != period.name:
            lease.held[key], lease.periods[key] = 0, period.name
    hand = _Hand(book, quotas, gateway, now, terms, periods)
    decisions = tuple(map(hand.decide, report.waiting))
    waits = any(decision.verdict is Verdict.WAITS for decision in decisions)
    lease.wanting = (lease.wanting if lease.wanting is not None else now) if waits else None
    if not waits and not hand.is_pressed:
        hand.stock(report.target)
    return Reply(
        now=now,
        until=lease.until,
        is_new=lease.born == report.sequence,
        slot=str(slot_at(lease.seen)),
        periods=periods,
        held=dict(lease.held),
        free=hand.free,
        refills={key: hand.refill(key) for key in quotas},
        decisions=decisions,
        is_pressed=hand.is_pressed,
    )


class _Hand:
    """Hands out what is free at one moment."""

    def __init__(
        self,
        book: Book,
        quotas: Mapping[str, Quota],
        gateway: str,
        now: float,
        terms: Terms,
        periods: Mapping[str, Period],
    ) -> None:
        self._book, self._quotas, self._now, self._periods = book, quotas, now, periods
        self._lease = book.leases[gateway]
        others = [lease for name, lease in book.leases.items() if name != gateway]
        heard = [lease for lease in others if lease.seen >= now - terms.patience_seconds]
        self.is_pressed = any(lease.wanting is not None for lease in heard)
        self._sharers = 1 + len(others)
        since = self._lease.wanting
        self._may_hope = since is None or now - since < terms.patience_seconds
        self._spare = {
            key: sum(self._held(lease, key) - lease.busy.get(key, 0) for lease in heard) for key in quotas
        }
        self.free = {
            key: quota.limit
            - sum(book.spent.get(key, {}).values())
            - sum(self._held(lease, key) for lease in (self._lease, *others))
            for key, quota in quotas.items()
        }

    def decide(self, need: Units) -> Decision:
        """Give a request all it needs, or nothing."""
        lacking = [key for key, units in need.items() if self.free[key] < units]
        if not lacking:
            for key, units in need.items():
                self._give(key, units)
            return GRANTED
        hopes = self._may_hope and all(self.free[key] + self._spare[key] >= need[key] for key in lacking)
        seconds, key = max((self._seconds_until(key, need[key]), key) for key in lacking)
        return Decision(
            Verdict.WAITS if hopes else Verdict.REFUSED, key, None if seconds == float("inf") else seconds
        )

    def stock(self, target: Units) -> None:
        """Hold some for requests to come, and leave as much again to each of the others."""
        for key, units in target.items():
            if key in self._quotas:
                self._give(key, max(0, min(units, self.free[key] // (2 * self._sharers))))

    def refill(self, key: str) -> float:
        """Seconds until all of a limit is there again, if nobody uses any more of it."""
        if key in self._periods:
            return self._periods[key].ends - self._now
        return seconds_until_free(self._slots(key), self._quotas[key].limit, self._now)

    def _give(self, key: str, units: int) -> None:
        self.free[key] -= units
        self._lease.held[key] += units

    def _seconds_until(self, key: str, units: int) -> float:
        quota = self._quotas[key]
        if units > quota.limit:
            return float("inf")
        if quota.measure is Measure.CONCURRENT:
            return CONCURRENT_RETRY_SECONDS
        if quota.measure.is_budget:
            return self._periods[key].ends - self._now
        return max(1.0, seconds_until_free(self._slots(key), units - self.free[key], self._now))

    def _slots(self, key: str) -> dict[int, int]:
        return {int(slot): units for slot, units in self._book.spent.get(key, {}).items()}

    def _held(self, lease: Lease, key: str) -> int:
        period = self._periods.get(key)
        # What is held of a period that is over is not held of this one.
        return lease.held.get(key, 0) if period is None or lease.periods.get(key) == period.name else 0


def _measure(key: str) -> Measure:
    return Measure(key.partition("/")[0])


def _spend(book: Book, key: str, mark: str, units: int) -> None:
    marks = book.spent.setdefault(key, {})
    marks[mark] = marks.get(mark, 0) + units


def _enter(book: Book, lease: Lease, report: Report, now: float) -> None:
    slot = str(slot_at(now))
    for key, marks in report.spent.items():
        for mark, units in marks.items():
            lease.held[key] = max(0, lease.held.get(key, 0) - units)
            _spend(book, key, mark or slot, units)
    for key, units in report.returned.items():
        lease.held[key] = max(0, lease.held.get(key, 0) - units)
    _enter_beyond(book, report, slot_at(now), refunds=True)


def _enter_beyond(book: Book, report: Report, slot: int, *, refunds: bool) -> None:
    for key, marks in report.over.items():
        for mark, units in marks.items():
            _spend(book, key, mark or str(slot), units)
    for key, marks in report.refunds.items() if refunds else ():
        for mark, units in marks.items():
            # A slot that has left the window takes nothing back.
            if mark in book.spent.get(key, {}):
                _spend(book, key, mark, -min(units, book.spent[key][mark]))


def _set_back(book: Book, now: float) -> None:
    """Go on from an earlier time, as if all that was spent in the last minute had been spent just now."""
    for key, marks in book.spent.items():
        if not _measure(key).is_budget:
            book.spent[key] = {str(slot_at(now)): sum(marks.values())}
    for lease in book.leases.values():
        lease.until, lease.seen = now + lease.until - book.time, now
    book.time = now


def _end_leases(book: Book, now: float) -> None:
    """Enter what was held under leases that have run out as spent."""
    for name in [name for name, lease in book.leases.items() if lease.until <= now]:
        lease = book.leases.pop(name)
        for key, units in lease.held.items():
            measure = _measure(key)
            if measure is not Measure.CONCURRENT and units:
                mark = lease.periods[key] if measure.is_budget else str(slot_at(lease.until))
                _spend(book, key, mark, units)


def _forget(book: Book, now: float, zone: ZoneInfo) -> None:
    """Drop what counts no longer."""
    for key in list(book.spent):
        measure, marks = _measure(key), book.spent[key]
        if measure.is_budget:
            kept = period_at(measure, now, zone).name
            book.spent[key] = {mark: units for mark, units in marks.items() if mark >= kept}
        else:
            book.spent[key] = {
                mark: units for mark, units in marks.items() if units and not is_past(int(mark), now)
            }
        if not book.spent[key]:
            del book.spent[key]


def encode_book(book: Book) -> str:
    """A book as it is stored."""
    return json.dumps(asdict(book), separators=(",", ":"))


def decode_book(text: str) -> Book:
    """
    Read what `encode_book` wrote.

    Raises:
        LimitsUnavailableError: something else did.
    """
    try:
        content: dict[str, Any] = json.loads(text)
        leases = {name: Lease(**lease) for name, lease in content.pop("leases").items()}
        return Book(leases=leases, **content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"a book of limits cannot be read, was it written by a newer appliance? {error}"
        raise LimitsUnavailableError(message) from error
