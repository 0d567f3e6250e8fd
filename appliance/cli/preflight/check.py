"""
One question to a machine and its answer.
"""

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    """It will run, and somebody will wish this had been put right."""
    FAIL = "fail"
    """It will not run, or not as promised."""
    SKIPPED = "skipped"
    """It does not concern this machine, or could not be asked; `seen` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One answer; ids and what `result` may be do not change between versions."""

    id: str
    title: str
    result: Result
    seen: str
    """One line: what was found, with names and numbers."""
    todo: str = ""
    """One line: what to do about it; empty unless `result` is `warn` or `fail`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One question, whose answer is one `Check`."""

    id: str
    """Family and name, such as `disk.space`; it does not change between versions."""
    title: str

    def ok(self, seen: str) -> Check:
        """Nothing to do."""
        return Check(id=self.id, title=self.title, result=Result.OK, seen=_line(seen))

    def warn(self, seen: str, todo: str) -> Check:
        """It would run."""
        return Check(id=self.id, title=self.title, result=Result.WARN, seen=_line(seen), todo=_line(todo))

    def fail(self, seen: str, todo: str) -> Check:
        """It would not run, or not as promised."""
        return Check(id=self.id, title=self.title, result=Result.FAIL, seen=_line(seen), todo=_line(todo))

    def skipped(self, why: str) -> Check:
        """Nobody looked."""
        return Check(id=self.id, title=self.title, result=Result.SKIPPED, seen=_line(why))


def gib(number: float) -> str:
    """Bytes for people: `1.5 GiB`, or MiB below one."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _line(text: str) -> str:
    return " ".join(text.split())
