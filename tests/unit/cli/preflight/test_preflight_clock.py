"""The checks of the clock and the time zone."""

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.clock import judge_clock, judge_zone, read_clock, read_zone

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("synchronised", "error", "result"),
    [
        (True, 0.004, CheckResult.OK),
        (True, 12.0, CheckResult.WARN),
        (False, 0.0, CheckResult.WARN),
        (None, 0.0, CheckResult.SKIPPED),
    ],
)
def test_clock_must_be_synchronised(synchronised, error, result):
    """Decided from the state in the kernel; no time server is contacted."""
    assert judge_clock(NOW, synchronised=synchronised, error_seconds=error).result is result


def test_clock_in_the_past_is_a_failure():
    """In 1970 certificates are not valid yet and new entries are older than the log."""
    assert judge_clock(86400.0, synchronised=True, error_seconds=0.0).result is CheckResult.FAIL


def test_clock_is_read_without_privilege():
    synchronised, error_seconds = read_clock()
    assert synchronised in {True, False, None}
    assert error_seconds >= 0


@pytest.mark.parametrize(
    ("wanted", "system", "result"),
    [
        ("UTC", None, CheckResult.OK),
        ("UTC", "Etc/UTC", CheckResult.OK),
        ("UTC", "Africa/Nairobi", CheckResult.WARN),
        ("Africa/Nairobi", "Africa/Nairobi", CheckResult.OK),
        ("Africa/Nairobi", "Etc/UTC", CheckResult.OK),
    ],
)
def test_time_zone_of_budgets_should_match_the_system(wanted, system, result):
    """UTC may be an oversight on a machine in another time zone; any other setting was chosen."""
    assert judge_zone(wanted, system).result is result


def test_the_offset_is_shown():
    assert (
        judge_zone("Africa/Nairobi", None).seen == "token budgets start their days in Africa/Nairobi (+03:00)"
    )


def test_a_system_names_its_zone_by_a_link(tmp_path):
    """/etc/localtime may also be a file, which has no name of a zone."""
    link = tmp_path / "localtime"
    assert read_zone(link=link) is None
    link.symlink_to("/usr/share/zoneinfo/Africa/Nairobi")
    assert read_zone(link=link) == "Africa/Nairobi"
    assert read_zone(variable=":Asia/Dhaka", link=link) == "Asia/Dhaka"
