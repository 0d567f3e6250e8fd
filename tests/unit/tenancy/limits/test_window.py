"""The last minute, in slots of a second."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.tenancy.limits.window import SECONDS, is_past, seconds_until_free, slot_at

MOMENT = st.floats(0, 1e9)


@given(used=MOMENT, later=st.floats(0, 59.999))
def test_what_was_used_counts_for_a_whole_minute(used, later):
    """However it lies in its slot."""
    assert not is_past(slot_at(used), used + later)


@given(used=MOMENT)
def test_what_was_used_counts_for_no_more_than_a_second_longer(used):
    """The price of slots."""
    assert is_past(slot_at(used), used + SECONDS + 1)


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
