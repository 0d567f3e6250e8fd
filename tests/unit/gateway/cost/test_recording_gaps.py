"""Reports name missing data, and nothing else."""

from appliance.gateway.cost.report import GapKind, RecordingGap, find_gaps
from appliance.gateway.cost.rows import RecordingPeriod

NOW = 100_000


def period(
    begin: int, end: int, *, gateway: str = "a", closed: bool = True, start: str = ""
) -> RecordingPeriod:
    return RecordingPeriod(
        start=start or f"{gateway}{begin}",
        gateway=gateway,
        began_at=begin,
        until=end,
        flush_seconds=30,
        closed=closed,
    )


def no_gateway(begin: int, end: int) -> RecordingGap:
    return RecordingGap(begin=begin, end=end, kind=GapKind.NO_GATEWAY, gateway=None)


def unwritten(begin: int, end: int, gateway: str = "a") -> RecordingGap:
    return RecordingGap(begin=begin, end=end, kind=GapKind.NOT_WRITTEN, gateway=gateway)


def test_nothing_is_missing_while_a_gateway_runs():
    """Until now, although its last write was half a minute ago; the future is not missing."""
    assert find_gaps([period(0, NOW - 40, closed=False)], 1000, NOW + 9999, NOW) == ()


def test_killed_gateway_leaves_a_gap():
    known = [period(0, 5000, closed=False), period(5600, NOW, closed=False)]
    assert find_gaps(known, 1000, NOW, NOW) == (unwritten(5000, 5030), no_gateway(5000, 5600))


def test_restarted_gateway_leaves_a_gap():
    """Its last write was less than three intervals ago, but the running process is a later start."""
    known = [period(0, NOW - 20, closed=False), period(NOW - 10, NOW, closed=False)]
    assert unwritten(NOW - 20, NOW - 10) in find_gaps(known, 1000, NOW, NOW)


def test_no_gap_while_another_gateway_runs():
    """Requests of the failed one are missing, but the workers were observed."""
    known = [period(0, 5000, closed=False), period(0, NOW, gateway="b", closed=False)]
    assert find_gaps(known, 1000, NOW, NOW) == (unwritten(5000, 5030),)


def test_stopped_gateway_leaves_no_unwritten_gap():
    known = [period(0, 5000), period(6000, 7000)]
    assert find_gaps(known, 1000, 8000, NOW) == (no_gateway(5000, 6000), no_gateway(7000, 8000))


def test_time_before_the_first_start_is_a_gap():
    assert find_gaps([], 1000, 2000, NOW) == (no_gateway(1000, 2000),)
    assert find_gaps([period(1500, 5000)], 1000, 2000, NOW) == (no_gateway(1000, 1500),)
