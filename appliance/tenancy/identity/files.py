"""
Reloads key and certificate files that change while the gateway runs.

A file that cannot be used changes nothing: the previous content stays in force, and the log says why.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

POLL_SECONDS = 2.0

Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and modification time of each file; None for a missing one."""


def stamp(paths: Iterable[Path]) -> Stamp:
    """Changes if the files change, or if a link leads to others."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class Renewable(Protocol):
    def renew(self) -> None:
        """Reload the files if they have changed; their content never makes it raise."""


async def keep_renewed(parts: Sequence[Renewable], *, seconds: float = POLL_SECONDS) -> None:
    while True:
        await asyncio.sleep(seconds)
        for part in parts:
            part.renew()
