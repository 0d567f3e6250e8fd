"""Days and months begin with a slot in every time zone."""

from datetime import UTC, date, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ConfigurationError
from appliance.gateway.cost.rows import SLOT_SECONDS, begin_of, day_of, parse_day, slot_of

ZONES = ("UTC", "Africa/Nairobi", "Asia/Kolkata", "Asia/Kathmandu", "America/St_Johns", "Australia/Lord_Howe",
         "Europe/Berlin", "Pacific/Chatham")  # fmt: skip


@given(
    st.sampled_from(ZONES).map(ZoneInfo),
    st.dates(min_value=date(2020, 1, 1), max_value=date(2035, 12, 31)),
    st.integers(min_value=0, max_value=86399),
)
def test_slot_belongs_to_the_local_day(zone, day, second):
    """Offsets of half hours and quarters, and clock changes of one hour or half of one."""
    begin = begin_of(day, zone)
    assert slot_of(begin, zone) == begin
    moment = begin + second
    slot = slot_of(moment, zone)
    assert 0 <= moment - slot < SLOT_SECONDS
    assert day_of(slot, zone) == datetime.fromtimestamp(moment, UTC).astimezone(zone).date()


def test_months_of_half_hour_time_zones_are_exact():
    """November in India begins on 31 October at 18:30 UTC."""
    begin = begin_of(date(2026, 11, 1), ZoneInfo("Asia/Kolkata"))
    assert datetime.fromtimestamp(begin, UTC).isoformat() == "2026-10-31T18:30:00+00:00"


def test_days_and_months_are_read():
    assert parse_day("2026-11-21") == date(2026, 11, 21)
    assert parse_day("2026-11") == date(2026, 11, 1)


@pytest.mark.parametrize("text", ["", "2026", "21.11.2026", "2026-13", "2026-02-30", "yesterday"])
def test_invalid_day_is_refused_in_one_line(text):
    with pytest.raises(ConfigurationError, match="is not a day: write 2026-11-21"):
        parse_day(text)
