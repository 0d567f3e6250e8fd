"""A disk is called low once, in time, and not on every write around the limit."""

from pathlib import Path

from appliance.audit.durability.watermark import Disk, changes, judge, read_disks


def _judge(free, before=()):
    return judge({"database": free}, before, low_bytes=1000)


def test_a_disk_below_the_limit_is_low_until_it_has_a_tenth_more_free():
    """Else a checkpoint and its trimming would warn all day."""
    assert not _judge(1000)[0].low
    low = _judge(999)
    assert low == (Disk(name="database", free_bytes=999, low=True),)
    assert _judge(1099, low)[0].low
    assert not _judge(1100, low)[0].low


def test_only_changes_are_told():
    """Once when it becomes low, once when it is no longer."""
    fine, low = _judge(5000), _judge(10)
    assert changes(fine, low) == low
    assert changes(low, low) == ()
    assert changes(low, fine) == fine
    assert changes((), fine) == ()


def test_a_limit_of_zero_never_warns():
    """How to switch it off."""
    assert not judge({"spool": 0}, (), low_bytes=0)[0].low


def test_disks_are_asked_by_path_and_those_that_cannot_be_are_left_out(tmp_path):
    """A disk that is gone is noticed by what cannot be written to it."""
    free = read_disks({"database": tmp_path, "spool": Path("/no/such/place")})
    assert list(free) == ["database"]
    assert free["database"] > 0
