"""One check and its result."""

from dataclasses import dataclass
from enum import StrEnum


class CheckResult(StrEnum):
    OK = "ok"
    WARN = "warn"
    """It will run, with a known disadvantage."""
    FAIL = "fail"
    """It will not run, or not as promised."""
    SKIPPED = "skipped"
    """It does not concern this machine, or could not be checked; `seen` says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check; ids and values of `result` do not change between versions."""

    id: str
    title: str
    result: CheckResult
    seen: str
    """One line: the finding, with names and numbers."""
    todo: str = ""
    """One line: what to do; empty unless `result` is `warn` or `fail`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What one check is about."""

    id: str
    """Family and name, such as `disk.space`; does not change between versions."""
    title: str

    def ok(self, seen: str) -> Check:
        return Check(id=self.id, title=self.title, result=CheckResult.OK, seen=_line(seen))

    def warn(self, seen: str, todo: str) -> Check:
        return Check(
            id=self.id, title=self.title, result=CheckResult.WARN, seen=_line(seen), todo=_line(todo)
        )

    def fail(self, seen: str, todo: str) -> Check:
        return Check(
            id=self.id, title=self.title, result=CheckResult.FAIL, seen=_line(seen), todo=_line(todo)
        )

    def skipped(self, why: str) -> Check:
        return Check(id=self.id, title=self.title, result=CheckResult.SKIPPED, seen=_line(why))


def gib(number: float) -> str:
    """Bytes as text: `1.5 GiB`, or MiB below one."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _line(text: str) -> str:
    return " ".join(text.split())
