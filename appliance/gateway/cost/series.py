"""The usage of a report by hour or day, for drawings.  Pure."""

from collections.abc import Iterable
from datetime import date, timedelta
from zoneinfo import ZoneInfo

from appliance.gateway.cost.prices import Prices
from appliance.gateway.cost.report import CostReport, ReportPart
from appliance.gateway.cost.rows import SLOT_SECONDS, Recorded, ShareKey, TenantUsage, begin_of, day_of

MICRO, MILLI = 1e6, 1e3


class UsagePart(ReportPart):
    """Usage of one tenant and model in an hour or a day."""

    tenant: str
    model: str
    delivered_tokens: int
    cost: float


class UsageSpan(ReportPart):
    """An hour or a day; Unix time at which it begins."""

    begin: int
    parts: tuple[UsagePart, ...]


def usage_by_span(
    recorded: Recorded, report: CostReport, *, first: date, end: date, zone: ZoneInfo
) -> tuple[UsageSpan, ...]:
    """Hours if the report is of one day, else days; none begins after the report was made."""
    made_at = int(report.made_at.timestamp())
    days = [first + timedelta(days=number) for number in range((end - first).days)]
    if len(days) == 1:
        begins: Iterable[int] = range(begin_of(first, zone), begin_of(end, zone), SLOT_SECONDS)
    else:
        begins = (begin_of(day, zone) for day in days)
    usage: dict[int, dict[tuple[str, str], TenantUsage]] = {begin: {} for begin in begins if begin <= made_at}
    for _start, key, share in recorded.shares:
        span = usage.get(_begin(key, first, zone, hourly=len(days) == 1))
        if span is not None:
            span.setdefault((key.tenant, key.model), TenantUsage()).add(share)
    prices = _prices(report)
    return tuple(
        UsageSpan(begin=begin, parts=tuple(_part(who, of[who], prices) for who in sorted(of)))
        for begin, of in usage.items()
    )


def _begin(key: ShareKey, first: date, zone: ZoneInfo, *, hourly: bool) -> int:
    if not hourly:
        return begin_of(day_of(key.slot, zone), zone)
    # Where clocks change by half an hour, later slots begin between whole hours of the day.
    begin = begin_of(first, zone)
    return begin + (key.slot - begin) // SLOT_SECONDS * SLOT_SECONDS


def _prices(report: CostReport) -> Prices:
    """The prices of the whole report, so that spans add up to its lines."""
    return Prices(
        capital_per_hour=report.prices["capital_per_worker_hour"],
        people_per_hour=report.prices["people_per_worker_hour"],
        per_kwh=report.prices["power_per_kwh"],
        pue=report.prices["pue"] or 1.0,
    )


def _part(who: tuple[str, str], usage: TenantUsage, prices: Prices) -> UsagePart:
    money = prices.cost(seconds=usage.engine_us / MICRO, joules=usage.millijoules / MILLI)
    return UsagePart(tenant=who[0], model=who[1], delivered_tokens=usage.delivered_tokens, cost=money.total)
