"""Days and months where the appliance stands."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tenancy.limits.calendar import (
    WINDOW_SECONDS,
    BudgetPeriod,
    is_past,
    period_at,
    seconds_until_free,
    slot_at,
)
from appliance.tenancy.limits.quota import Measure

BERLIN, NAIROBI, APIA = ZoneInfo("Europe/Berlin"), ZoneInfo("Africa/Nairobi"), ZoneInfo("Pacific/Apia")


def unix(text: str) -> float:
    return datetime.fromisoformat(text).astimezone(UTC).timestamp()


@pytest.mark.parametrize(
    ("measure", "now", "zone", "name", "ends"),
    [
        (Measure.DAY, "2026-11-21T20:59:59+00:00", NAIROBI, "2026-11-21", "2026-11-21T21:00:00+00:00"),
        (Measure.DAY, "2026-11-21T21:00:00+00:00", NAIROBI, "2026-11-22", "2026-11-22T21:00:00+00:00"),
        (Measure.MONTH, "2026-12-31T23:00:00+01:00", BERLIN, "2026-12", "2027-01-01T00:00:00+01:00"),
        (Measure.MONTH, "2028-01-31T12:00:00+01:00", BERLIN, "2028-01", "2028-02-01T00:00:00+01:00"),
        (Measure.DAY, "2026-03-29T12:00:00+02:00", BERLIN, "2026-03-29", "2026-03-30T00:00:00+02:00"),
        (Measure.DAY, "2026-10-25T00:30:00+02:00", BERLIN, "2026-10-25", "2026-10-26T00:00:00+01:00"),
    ],
    ids=[
        "before midnight",
        "midnight",
        "new year",
        "leap february",
        "a day of 23 hours",
        "a day of 25 hours",
    ],
)
def test_periods_end_at_local_midnight(measure, now, zone, name, ends):
    """Also where clocks are changed."""
    assert period_at(measure, unix(now), zone) == BudgetPeriod(name=name, ends=unix(ends))


@given(now=st.floats(1e9, 4e9), measure=st.sampled_from([Measure.DAY, Measure.MONTH]),
       zone=st.sampled_from([BERLIN, NAIROBI, APIA]))  # fmt: skip
def test_every_moment_is_before_the_end_of_its_period_and_the_end_in_the_next(now, measure, zone):
    """Even on the day that Apia left out."""
    period = period_at(measure, now, zone)
    assert now < period.ends
    assert period_at(measure, period.ends, zone).name > period.name


# The sliding minute.

MOMENT = st.floats(0, 1e9)


@given(used=MOMENT, later=st.floats(0, 59.999))
def test_what_was_used_counts_for_a_whole_minute(used, later):
    """However it lies in its slot."""
    assert not is_past(slot_at(used), used + later)


@given(used=MOMENT)
def test_what_was_used_counts_for_no_more_than_a_second_longer(used):
    """The price of slots."""
    assert is_past(slot_at(used), used + WINDOW_SECONDS + 1)


def test_a_slot_counts_until_all_of_it_is_a_minute_past():
    """To the boundary."""
    assert not is_past(100, 160.999)
    assert is_past(100, 161.0)


def test_units_come_back_with_their_slots():
    """The oldest first."""
    slots = {100: 5, 103: 2, 110: 1}
    assert seconds_until_free(slots, 0, 120.0) == 0
    assert seconds_until_free(slots, 5, 120.0) == 41.0
    assert seconds_until_free(slots, 6, 120.0) == 44.0
    assert seconds_until_free(slots, 8, 120.0) == 51.0


def test_of_more_than_there_is_all_comes_back():
    """The time is that of the last slot."""
    assert seconds_until_free({100: 5}, 9, 120.0) == 41.0
    assert seconds_until_free({}, 9, 120.0) == 0.0
