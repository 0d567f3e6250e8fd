"""
Stop a process and all its descendants (SIGSTOP), and let them continue.

A vLLM worker on the CPU keeps its cores busy even while it has nothing to do, and two workers on one
machine use the same cores.  So whichever is not being measured stands still.
"""

import os
import signal
from pathlib import Path

PROC = Path("/proc")


class Standstill:
    """One process; it runs at first."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._still: tuple[int, ...] = ()

    def begin(self) -> None:
        """Stop it and all that descend from it, if they are not stopped."""
        if not self._still:
            # Parents first, so that none of them starts another child meanwhile.
            self._still = tree(self._pid)
            for pid in self._still:
                _send(pid, signal.SIGSTOP)

    def end(self) -> None:
        """Let them continue, if they are stopped."""
        for pid in reversed(self._still):
            _send(pid, signal.SIGCONT)
        self._still = ()


def tree(root: int, proc: Path = PROC) -> tuple[int, ...]:
    """A process and all that descend from it, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal() and (parent := _parent(entry / "stat")) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(sorted(children.get(pid, ())))
    return tuple(found)


def _parent(stat: Path) -> int | None:
    """The parent in a process's `stat`; None when it has ended meanwhile."""
    try:
        # The name stands in brackets and may hold anything, brackets too.
        return int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
