"""A disk counts as low in time, and not again on every write around the limit."""

from pathlib import Path

from appliance.audit.durability.health import DiskSpace, changed_disks, judge_disks, read_disks


def _judge(free, before=()):
    return judge_disks({"database": free}, before, low_bytes=1000)


def test_disk_is_low_until_a_tenth_more_than_the_limit_is_free():
    """Otherwise a checkpoint and its trimming would warn all day."""
    assert not _judge(1000)[0].low
    low = _judge(999)
    assert low == (DiskSpace(name="database", free_bytes=999, low=True),)
    assert _judge(1099, low)[0].low
    assert not _judge(1100, low)[0].low


def test_only_changes_are_reported():
    """Once when it becomes low, once when it stops being low."""
    fine, low = _judge(5000), _judge(10)
    assert changed_disks(fine, low) == low
    assert changed_disks(low, low) == ()
    assert changed_disks(low, fine) == fine
    assert changed_disks((), fine) == ()


def test_a_limit_of_zero_never_warns():
    """This switches the warning off."""
    assert not judge_disks({"spool": 0}, (), low_bytes=0)[0].low


def test_disks_that_cannot_be_read_are_left_out(tmp_path):
    """A disk that is gone shows when a write to it fails."""
    free = read_disks({"database": tmp_path, "spool": Path("/no/such/place")})
    assert list(free) == ["database"]
    assert free["database"] > 0
