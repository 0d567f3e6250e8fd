"""The checks of the data directory's disk."""

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.cli.preflight.check import CheckResult
from appliance.cli.preflight.disk import (
    SeenDisk,
    filesystem_of,
    judge_filesystem,
    judge_space,
    judge_speed,
    judge_writable,
    measure_disk,
)

GIB = 2**30
GOOD = SeenDisk(
    directory=Path("/var/lib/appliance"),
    exists=True,
    problem=None,
    sync_seconds=0.0005,
    filesystem="ext4",
    wal=True,
    free_bytes=100 * GIB,
)
MOUNTS = r"""
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /proc rw - proc proc rw
30 22 8:2 / /var/lib rw,noatime shared:1 - xfs /dev/sdb1 rw
31 30 0:40 / /var/lib/my\040data rw - nfs4 server:/export rw
32 22 0:41 / /mnt rw - ext4 /dev/sdc1 rw
33 22 0:42 / /mnt rw - tmpfs tmpfs rw
"""


def space(seen: SeenDisk = GOOD, *, per_day: int | None = None, days: int = 365):
    return judge_space(seen, low_bytes=GIB, files_bytes=2 * GIB, requests_per_day=per_day, keep_days=days)


def test_disk_check_leaves_nothing_behind(tmp_path):
    """Every file written for the measurement is removed."""
    seen = measure_disk(tmp_path)
    assert seen.problem is None
    assert seen.wal
    assert seen.sync_seconds is not None
    assert seen.sync_seconds > 0
    assert seen.filesystem
    assert list(tmp_path.iterdir()) == []
    assert judge_writable(seen).result is CheckResult.OK


def test_missing_directory_is_not_created(tmp_path):
    """The nearest existing directory above it is checked."""
    seen = measure_disk(tmp_path / "a" / "b")
    assert not seen.exists
    assert seen.problem is None
    assert not (tmp_path / "a").exists()
    assert "created at the first start" in judge_writable(seen).seen


def test_unwritable_directory_is_a_failure():
    """/proc accepts no files from any account."""
    seen = measure_disk(Path("/proc"))
    assert seen.problem is not None
    assert seen.filesystem == "proc"
    assert judge_writable(seen).result is CheckResult.FAIL
    assert judge_speed(seen).result is CheckResult.SKIPPED


@pytest.mark.parametrize(
    ("seconds", "result"), [(0.0003, CheckResult.OK), (0.008, CheckResult.WARN), (0.1, CheckResult.WARN)]
)
def test_slow_durable_writes_are_a_warning(seconds, result):
    """Each request waits for one or two of them."""
    assert judge_speed(replace(GOOD, sync_seconds=seconds)).result is result


@pytest.mark.parametrize(
    ("name", "sqlite", "result"),
    [
        ("ext4", True, CheckResult.OK),
        ("nfs4", True, CheckResult.FAIL),
        ("nfs4", False, CheckResult.WARN),
        ("cifs", True, CheckResult.FAIL),
        ("fuse.glusterfs", True, CheckResult.FAIL),
        ("tmpfs", True, CheckResult.WARN),
        ("overlay", True, CheckResult.WARN),
    ],
)
def test_sqlite_is_not_on_a_network_file_system(name, sqlite, result):
    """A file system that ends with the container is a warning."""
    assert judge_filesystem(replace(GOOD, filesystem=name), sqlite=sqlite).result is result


def test_file_system_without_wal_is_a_failure_for_sqlite():
    """With any file system."""
    assert judge_filesystem(replace(GOOD, wal=False), sqlite=True).result is CheckResult.FAIL
    assert judge_filesystem(replace(GOOD, wal=False), sqlite=False).result is CheckResult.OK


def test_a_disk_that_is_nearly_full_is_a_failure():
    """Below the watermark at which a running gateway warns."""
    assert space(replace(GOOD, free_bytes=GIB // 2)).result is CheckResult.FAIL
    assert space(replace(GOOD, free_bytes=GIB + GIB // 2)).result is CheckResult.WARN
    assert space().result is CheckResult.OK


def test_the_log_of_the_expected_load_has_room():
    """2 x 646 bytes per request: 100,000 a day are 43.9 GiB a year."""
    assert space(per_day=100_000).result is CheckResult.OK
    assert "43.9 GiB wanted for 365 days" in space(per_day=100_000).seen
    short = space(per_day=1_000_000)
    assert short.result is CheckResult.FAIL
    assert "add 340.2 GiB" in short.todo


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home", "ext4"),
        ("/var/lib/appliance", "xfs"),
        ("/var/lib/my data/log", "nfs4"),
        ("/var/library", "ext4"),
        ("/mnt/x", "tmpfs"),
    ],
)
def test_the_file_system_is_the_innermost_mount(path, kind):
    """Spaces in names are written in octal; a later mount covers an earlier one."""
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_without_a_list_of_mounts_it_is_unknown(tmp_path):
    assert measure_disk(tmp_path, mounts=tmp_path / "none").filesystem == ""
