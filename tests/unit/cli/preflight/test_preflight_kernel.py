"""Landlock and open files."""

import pytest

from appliance.cli.preflight.check import Result
from appliance.cli.preflight.kernel import judge_landlock, judge_open_files, look_at_landlock


@pytest.mark.parametrize(
    ("version", "wall", "result"),
    [
        (7, "on", Result.OK),
        (4, "required", Result.OK),
        (3, "on", Result.WARN),
        (None, "on", Result.WARN),
        (3, "required", Result.FAIL),
        (None, "required", Result.FAIL),
        (7, "off", Result.WARN),
    ],
)
def test_a_kernel_without_landlock_is_as_bad_as_the_settings_say(version, wall, result):
    """A failure where a start would refuse, else a warning."""
    assert judge_landlock(version, wall=wall).result is result


def test_the_kernel_is_asked():
    """It answers with a version, or has none."""
    version = look_at_landlock()
    assert version is None or version >= 1


def test_as_many_files_as_connections_need():
    """Two for each, and some for the rest."""
    assert judge_open_files(None, 10_000).result is Result.OK
    assert judge_open_files(20_512, 10_000).result is Result.OK
    short = judge_open_files(1024, 10_000)
    assert short.result is Result.WARN
    assert "so 256 fit" in short.seen
