"""
One tenant's ledger: usage and leases shared by all gateways, and how units are allocated.

Of each limit, units are *free*, *held* by a gateway under a lease, or *spent*.  A gateway admits
requests from what it holds and reports afterwards.  So for every limit, whatever gateways do and
whenever one of them stops:

    spent + held by all gateways <= limit

except for what requests used beyond their reservation, which is recorded all the same.
A unit is held before it is used, and recorded as spent no earlier than it was used; an expired lease
counts as spent completely, as late as it could have been.  Therefore only the ledger's own clock is
compared with itself: gateways only measure how long ago they asked.

This module is pure: the store reads and writes ledgers, in one transaction each.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from appliance.errors import LimitsUnavailableError
from appliance.tenancy.limits.calendar import (
    WINDOW_SECONDS,
    BudgetPeriod,
    is_past,
    period_at,
    seconds_until_free,
    slot_at,
)
from appliance.tenancy.limits.quota import Measure, Quota

CONCURRENT_RETRY_SECONDS = 1.0
"""The end of a running request is unknown; asking again after this time is reasonable."""
LEAST_PATIENCE_SECONDS = 1.0
"""A busy gateway may report late, however short the interval."""

Units = dict[str, int]
"""By the key of a quota."""
UsageByPeriod = dict[str, dict[str, int]]
"""By the key of a quota, then by a slot of the window or the name of a period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The same on every gateway of a database."""

    lease_seconds: float
    """How long a gateway may use what it holds without an exchange."""
    renew_seconds: float
    """Time between two exchanges of a busy gateway."""
    zone: ZoneInfo
    """Where days and months begin."""

    @property
    def patience_seconds(self) -> float:
        """How long to wait for another gateway to return what it does not need; by then it has been asked."""
        return max(LEAST_PATIENCE_SECONDS, 3 * self.renew_seconds)


@dataclass(slots=True, kw_only=True)
class GatewayLease:
    """What one gateway holds; its fields are stored by name."""

    until: float
    born: int
    """Number of the report that created it."""
    sequence: int
    """Number of the last report applied: a report sent twice is applied once."""
    seen: float
    held: Units = field(default_factory=dict)
    busy: Units = field(default_factory=dict)
    """Of what it holds, what its running requests occupy."""
    periods: dict[str, str] = field(default_factory=dict)
    """The period to which held units of a budget belong."""
    wanting: float | None = None
    """Since when it has waited for what other gateways hold."""


@dataclass(slots=True, kw_only=True)
class TenantLedger:
    """Everything gateways share about one tenant; its fields are stored by name."""

    time: float = 0.0
    """The latest time it was changed; it does not go back while a clock catches up."""
    spent: UsageByPeriod = field(default_factory=dict)
    leases: dict[str, GatewayLease] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    sequence: int
    is_resent: bool = False
    """Whether it was sent before and may have been applied."""
    spent: UsageByPeriod = field(default_factory=dict)
    """Held units that requests took; the slot of per-minute units is set by the ledger."""
    over: UsageByPeriod = field(default_factory=dict)
    """Units that were used without having been held."""
    refunds: UsageByPeriod = field(default_factory=dict)
    """Units that were reported as spent and were not used."""
    returned: Units = field(default_factory=dict)
    busy: Units = field(default_factory=dict)
    waiting: tuple[Units, ...] = ()
    """What each waiting request needs, the oldest request first."""
    target: Units = field(default_factory=dict)
    """Units it would like to hold for future requests."""


class LimitVerdict(StrEnum):
    """What becomes of a waiting request."""

    GRANTED = "granted"
    WAITS = "waits"
    """Another gateway holds what it needs and may not need it."""
    REFUSED = "refused"


class LimitDecision(NamedTuple):
    """A verdict; if it is not granted, the limit that stays exhausted longest."""

    verdict: LimitVerdict
    key: str = ""
    seconds: float | None = None
    """Until a retry is useful; None for never."""


GRANTED = LimitDecision(LimitVerdict.GRANTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReply:
    now: float
    until: float
    is_new: bool
    """Whether the lease had expired, or never existed: what was held is spent."""
    slot: str
    """The slot in which per-minute units were recorded."""
    periods: Mapping[str, BudgetPeriod]
    held: Units
    free: Units
    """Units no gateway holds."""
    refills: Mapping[str, float]
    """Seconds until each limit is fully available."""
    decisions: tuple[LimitDecision, ...]
    is_pressed: bool
    """Whether another gateway waits for what this one may not need."""


def exchange(
    ledger: TenantLedger,
    quotas: Mapping[str, Quota],
    gateway: str,
    report: UsageReport,
    *,
    now: float,
    terms: LeaseTerms,
) -> LedgerReply:
    """
    Apply a report and allocate what it requests; changes `ledger`.

    `gateway` names one start of one gateway and is never used again; `now` is Unix time by one clock for all
    gateways; `quotas` are the tenant's limits as this gateway knows them, by key.
    """
    if now < ledger.time - WINDOW_SECONDS:
        _set_back(ledger, now)
    now = ledger.time = max(now, ledger.time)
    periods = {key: period_at(quota.measure, now, terms.zone) for key, quota in quotas.items()
               if quota.measure.is_budget}  # fmt: skip
    _end_leases(ledger, now)
    lease = ledger.leases.get(gateway)
    if lease is None:
        lease = GatewayLease(until=now, born=report.sequence, sequence=report.sequence, seen=now)
        ledger.leases[gateway] = lease
        _apply_corrections(ledger, report, slot_at(now), refunds=not report.is_resent)
        lease.held = {key: units for key, units in report.busy.items() if key in quotas}
    elif report.sequence > lease.sequence:
        lease.sequence, lease.seen = report.sequence, now
        _apply(ledger, lease, report, now)
    _drop_past(ledger, now, terms.zone)
    lease.busy = dict(report.busy)
    lease.until = now + terms.lease_seconds
    lease.held = {key: lease.held.get(key, 0) for key in quotas}
    for key, period in periods.items():
        if lease.periods.get(key) != period.name:
            lease.held[key], lease.periods[key] = 0, period.name
    allocator = Allocator(ledger, quotas, gateway, now, terms, periods)
    decisions = tuple(map(allocator.decide, report.waiting))
    waits = any(decision.verdict is LimitVerdict.WAITS for decision in decisions)
    lease.wanting = (lease.wanting if lease.wanting is not None else now) if waits else None
    if not waits and not allocator.is_pressed:
        allocator.stock(report.target)
    return LedgerReply(
        now=now,
        until=lease.until,
        is_new=lease.born == report.sequence,
        slot=str(slot_at(lease.seen)),
        periods=periods,
        held=dict(lease.held),
        free=allocator.free,
        refills={key: allocator.refill_seconds(key) for key in quotas},
        decisions=decisions,
        is_pressed=allocator.is_pressed,
    )


class Allocator:
    def __init__(
        self,
        ledger: TenantLedger,
        quotas: Mapping[str, Quota],
        gateway: str,
        now: float,
        terms: LeaseTerms,
        periods: Mapping[str, BudgetPeriod],
    ) -> None:
        self._ledger, self._quotas, self._now, self._periods = ledger, quotas, now, periods
        self._lease = ledger.leases[gateway]
        others = [lease for name, lease in ledger.leases.items() if name != gateway]
        active = [lease for lease in others if lease.seen >= now - terms.patience_seconds]
        self.is_pressed = any(lease.wanting is not None for lease in active)
        self._sharers = 1 + len(others)
        since = self._lease.wanting
        self._may_wait = since is None or now - since < terms.patience_seconds
        self._spare = {
            key: sum(self._held(lease, key) - lease.busy.get(key, 0) for lease in active) for key in quotas
        }
        self.free = {
            key: quota.limit
            - sum(ledger.spent.get(key, {}).values())
            - sum(self._held(lease, key) for lease in (self._lease, *others))
            for key, quota in quotas.items()
        }

    def decide(self, need: Units) -> LimitDecision:
        """Give a request all it needs, or nothing."""
        lacking = [key for key, units in need.items() if self.free[key] < units]
        if not lacking:
            for key, units in need.items():
                self._give(key, units)
            return GRANTED
        waits = self._may_wait and all(self.free[key] + self._spare[key] >= need[key] for key in lacking)
        seconds, key = max((self._seconds_until(key, need[key]), key) for key in lacking)
        return LimitDecision(
            LimitVerdict.WAITS if waits else LimitVerdict.REFUSED,
            key,
            None if seconds == float("inf") else seconds,
        )

    def stock(self, target: Units) -> None:
        """Hold units for future requests, and leave as many to each of the other gateways."""
        for key, units in target.items():
            if key in self._quotas:
                self._give(key, max(0, min(units, self.free[key] // (2 * self._sharers))))

    def refill_seconds(self, key: str) -> float:
        """Seconds until a limit is fully available, without further usage."""
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
        return {int(slot): units for slot, units in self._ledger.spent.get(key, {}).items()}

    def _held(self, lease: GatewayLease, key: str) -> int:
        period = self._periods.get(key)
        # Units held of a past period do not count against the current one.
        return lease.held.get(key, 0) if period is None or lease.periods.get(key) == period.name else 0


def _measure(key: str) -> Measure:
    return Measure(key.partition("/")[0])


def _spend(ledger: TenantLedger, key: str, period: str, units: int) -> None:
    usage = ledger.spent.setdefault(key, {})
    usage[period] = usage.get(period, 0) + units


def _apply(ledger: TenantLedger, lease: GatewayLease, report: UsageReport, now: float) -> None:
    slot = str(slot_at(now))
    for key, usage in report.spent.items():
        for period, units in usage.items():
            lease.held[key] = max(0, lease.held.get(key, 0) - units)
            _spend(ledger, key, period or slot, units)
    for key, units in report.returned.items():
        lease.held[key] = max(0, lease.held.get(key, 0) - units)
    _apply_corrections(ledger, report, slot_at(now), refunds=True)


def _apply_corrections(ledger: TenantLedger, report: UsageReport, slot: int, *, refunds: bool) -> None:
    for key, usage in report.over.items():
        for period, units in usage.items():
            _spend(ledger, key, period or str(slot), units)
    for key, usage in report.refunds.items() if refunds else ():
        for period, units in usage.items():
            # A slot that has left the window takes no refund.
            if period in ledger.spent.get(key, {}):
                _spend(ledger, key, period, -min(units, ledger.spent[key][period]))


def _set_back(ledger: TenantLedger, now: float) -> None:
    """Continue from an earlier time, as if all usage of the last minute were current."""
    for key, usage in ledger.spent.items():
        if not _measure(key).is_budget:
            ledger.spent[key] = {str(slot_at(now)): sum(usage.values())}
    for lease in ledger.leases.values():
        lease.until, lease.seen = now + lease.until - ledger.time, now
    ledger.time = now


def _end_leases(ledger: TenantLedger, now: float) -> None:
    for name in [name for name, lease in ledger.leases.items() if lease.until <= now]:
        lease = ledger.leases.pop(name)
        for key, units in lease.held.items():
            measure = _measure(key)
            if measure is not Measure.CONCURRENT and units:
                period = lease.periods[key] if measure.is_budget else str(slot_at(lease.until))
                _spend(ledger, key, period, units)


def _drop_past(ledger: TenantLedger, now: float, zone: ZoneInfo) -> None:
    for key in list(ledger.spent):
        measure, usage = _measure(key), ledger.spent[key]
        if measure.is_budget:
            kept = period_at(measure, now, zone).name
            ledger.spent[key] = {period: units for period, units in usage.items() if period >= kept}
        else:
            ledger.spent[key] = {
                slot: units for slot, units in usage.items() if units and not is_past(int(slot), now)
            }
        if not ledger.spent[key]:
            del ledger.spent[key]


def encode_ledger(ledger: TenantLedger) -> str:
    return json.dumps(asdict(ledger), separators=(",", ":"))


def decode_ledger(text: str) -> TenantLedger:
    """Read what `encode_ledger` wrote; raises LimitsUnavailableError if it has another format."""
    try:
        content: dict[str, Any] = json.loads(text)
        leases = {name: GatewayLease(**lease) for name, lease in content.pop("leases").items()}
        return TenantLedger(leases=leases, **content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"a ledger of limits cannot be read; a newer version may have written it: {error}"
        raise LimitsUnavailableError(message) from error
