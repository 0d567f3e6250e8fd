"""The checks of Landlock and open files."""

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.kernel import judge_landlock, judge_open_files, landlock_version


@pytest.mark.parametrize(
    ("version", "wall", "result"),
    [
        (7, "on", CheckResult.OK),
        (4, "required", CheckResult.OK),
        (3, "on", CheckResult.WARN),
        (None, "on", CheckResult.WARN),
        (3, "required", CheckResult.FAIL),
        (None, "required", CheckResult.FAIL),
        (7, "off", CheckResult.WARN),
    ],
)
def test_missing_landlock_fails_only_if_required(version, wall, result):
    """A failure if a start would fail, otherwise a warning."""
    assert judge_landlock(version, wall=wall).result is result


def test_landlock_version_is_read():
    version = landlock_version()
    assert version is None or version >= 1


def test_as_many_files_as_connections_need():
    """Two per connection, and some for other files."""
    assert judge_open_files(None, 10_000).result is CheckResult.OK
    assert judge_open_files(20_768, 10_000).result is CheckResult.OK
    short = judge_open_files(1024, 10_000)
    assert short.result is CheckResult.WARN
    assert "so 128 fit" in short.seen
