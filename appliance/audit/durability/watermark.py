"""
Free space on the disks that the audit log needs, and when it counts as low.

Pure but for `read_disks`.  It only warns, so that a disk is made larger before the log refuses
requests; it fails open: a disk that cannot be asked is not low.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

RELIEF = 1.1
"""A disk stops being low once it has a tenth more than the limit free: no warning on every write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One disk, by what it is used for."""

    name: str
    """`database` or `spool`."""
    free_bytes: int
    low: bool = False


def judge(free: Mapping[str, int], before: Iterable[Disk], *, low_bytes: int) -> tuple[Disk, ...]:
    """
    Say which disks are low.

    Args:
        free: bytes free now, by name of the disk.
        before: what this function said last.
        low_bytes: below it, a disk is low.
    """
    was_low = {disk.name for disk in before if disk.low}
    return tuple(
        Disk(
            name=name,
            free_bytes=free_bytes,
            low=free_bytes < low_bytes * (RELIEF if name in was_low else 1),
        )
        for name, free_bytes in free.items()
    )


def changes(before: Iterable[Disk], now: Iterable[Disk]) -> tuple[Disk, ...]:
    """The disks that have become low, or are no longer."""
    was_low = {disk.name for disk in before if disk.low}
    return tuple(disk for disk in now if disk.low != (disk.name in was_low))


def read_disks(paths: Mapping[str, Path]) -> dict[str, int]:
    """Bytes that an unprivileged process may still write, by name; without disks that cannot be asked."""
    free = {}
    for name, path in paths.items():
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        free[name] = found.f_bavail * found.f_frsize
    return free
