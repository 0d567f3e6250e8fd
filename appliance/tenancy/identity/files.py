"""
Files that are read again when they change: keys and certificates, replaced while the gateway runs.

A file that cannot be used changes nothing: what was read before stays in force, and the log says why.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

LOOK_SECONDS = 2.0

Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of change of each file; None for one that is not there."""


def stamp(paths: Iterable[Path]) -> Stamp:
    """What shows that files have changed, also when a link now leads to others."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class Renewable(Protocol):
    """Something read from files."""

    def renew(self) -> None:
        """Read them again if they have changed; never raises because of what is in them."""


async def keep_renewed(parts: Sequence[Renewable], *, seconds: float = LOOK_SECONDS) -> None:
    """Look at the files of all parts now and then, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        for part in parts:
            part.renew()
