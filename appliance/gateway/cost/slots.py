"""
Slots that rows are kept by: whole hours of the site's own clock.

Not of UTC's: where clocks differ from it by half an hour, a day and a month begin in the middle of such an
hour, and a row could not be told to belong to either.
"""

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from appliance.errors import ConfigurationError

SLOT_SECONDS = 3600


def slot_of(time: float, zone: ZoneInfo) -> int:
    """Unix time at which the hour began, by the clock on the wall."""
    offset = datetime.fromtimestamp(time, UTC).astimezone(zone).utcoffset() or timedelta(0)
    seconds = round(offset.total_seconds())
    return int(time + seconds) // SLOT_SECONDS * SLOT_SECONDS - seconds


def day_of(slot: int, zone: ZoneInfo) -> date:
    """The day a slot belongs to."""
    return datetime.fromtimestamp(slot, UTC).astimezone(zone).date()


def begin_of(day: date, zone: ZoneInfo) -> int:
    """Unix time at which a day begins."""
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp())


def parse_day(text: str) -> date:
    """
    Read `2026-11-21`, or `2026-11` for the first of that month.

    Raises:
        ConfigurationError: it is neither.
    """
    try:
        return date.fromisoformat(text if text.count("-") > 1 else f"{text}-01")
    except ValueError as error:
        message = f"{text} is no day: write 2026-11-21, or 2026-11 for the first of that month"
        raise ConfigurationError(message) from error
