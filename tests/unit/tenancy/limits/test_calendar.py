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
def test_period_end_belongs_to_the_next_period(now, measure, zone):
    period = period_at(measure, now, zone)
    assert now < period.ends
    assert period_at(measure, period.ends, zone).name > period.name


# The sliding minute.

MOMENT = st.floats(0, 1e9)


@given(used=MOMENT, later=st.floats(0, 59.999))
def test_usage_counts_for_at_least_a_minute(used, later):
    assert not is_past(slot_at(used), used + later)


@given(used=MOMENT)
def test_usage_counts_for_at_most_61_seconds(used):
    assert is_past(slot_at(used), used + WINDOW_SECONDS + 1)


def test_slot_counts_until_all_of_it_is_a_minute_old():
    assert not is_past(100, 160.999)
    assert is_past(100, 161.0)


def test_units_expire_with_their_slots():
    slots = {100: 5, 103: 2, 110: 1}
    assert seconds_until_free(slots, 0, 120.0) == 0
    assert seconds_until_free(slots, 5, 120.0) == 41.0
    assert seconds_until_free(slots, 6, 120.0) == 44.0
    assert seconds_until_free(slots, 8, 120.0) == 51.0


def test_time_for_more_units_than_used_is_that_of_the_last_slot():
    assert seconds_until_free({100: 5}, 9, 120.0) == 41.0
    assert seconds_until_free({}, 9, 120.0) == 0.0
