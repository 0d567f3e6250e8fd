"""
When usage stops counting: the sliding minute in one-second slots, and the days and months of budgets.

Usage at a moment is counted in that second's slot, and the slot counts until all of it is a minute
past.  So no minute, wherever it begins, holds more than the limit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

from appliance.tenancy.limits.quota import Measure

WINDOW_SECONDS = 60


def slot_at(now: float) -> int:
    return int(now // 1)


def is_past(slot: int, now: float) -> bool:
    """Whether nothing in a slot counts any more."""
    return slot + 1 + WINDOW_SECONDS <= now


def seconds_until_free(slots: Mapping[int, int], units: int, now: float) -> float:
    """Time until so many units have left the window; until all have, if there are fewer."""
    seconds = 0.0
    for slot in sorted(slots):
        if units <= 0:
            break
        units -= slots[slot]
        seconds = slot + 1 + WINDOW_SECONDS - now
    return max(0.0, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPeriod:
    name: str
    """Such as `2026-11-21` or `2026-11`."""
    ends: float
    """Unix time of the first moment after it."""


def period_at(measure: Measure, now: float, zone: ZoneInfo) -> BudgetPeriod:
    """The day or month that `now` (Unix time) is in, in the zone's local time."""
    today = datetime.fromtimestamp(now, zone).date()
    if measure is Measure.MONTH:
        name = f"{today:%Y-%m}"
        after = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    else:
        name = today.isoformat()
        after = today + timedelta(days=1)
    return BudgetPeriod(name=name, ends=datetime.combine(after, time(), zone).timestamp())
