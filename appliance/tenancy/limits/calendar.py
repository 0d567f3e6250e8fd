"""
Days and months where the appliance stands, for budgets that begin anew with them.
"""

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

from appliance.tenancy.limits.quota import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A day or a month."""

    name: str
    """Such as `2026-11-21` or `2026-11`."""
    ends: float
    """Unix time of the first moment after it."""


def period_at(measure: Measure, now: float, zone: ZoneInfo) -> Period:
    """The day or month that `now` (Unix time) is in, by the clocks of the zone."""
    today = datetime.fromtimestamp(now, zone).date()
    if measure is Measure.MONTH:
        name = f"{today:%Y-%m}"
        after = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    else:
        name = today.isoformat()
        after = today + timedelta(days=1)
    return Period(name=name, ends=datetime.combine(after, time(), zone).timestamp())
