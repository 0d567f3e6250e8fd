"""One check, its result, and its inputs: settings, roles of this machine, and expectations."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from appliance.infra.data_directory import Installation, locate
from appliance.infra.settings import Settings


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
        return self._check(CheckResult.OK, seen)

    def warn(self, seen: str, todo: str) -> Check:
        return self._check(CheckResult.WARN, seen, todo)

    def fail(self, seen: str, todo: str) -> Check:
        return self._check(CheckResult.FAIL, seen, todo)

    def skipped(self, why: str) -> Check:
        return self._check(CheckResult.SKIPPED, why)

    def _check(self, result: CheckResult, seen: str, todo: str = "") -> Check:
        seen, todo = " ".join(seen.split()), " ".join(todo.split())
        return Check(id=self.id, title=self.title, result=result, seen=seen, todo=todo)


class SkippedError(Exception):
    """Why the remaining checks of a family are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquiry:
    settings: Settings
    settings_file: Path | None
    """The YAML file of the settings, if there is one."""
    clock: Callable[[], float]
    """Unix time in seconds."""
    gateway: bool = True
    """Whether a gateway runs on this machine."""
    worker: bool = True
    """Whether a worker runs on this machine."""
    manifest: Path | None = None
    """A bundle, or the output of `sha256sum`: the expected digests of the weights."""
    names: tuple[str, ...] = ()
    """Host names that clients use for the gateway."""
    egress: bool = False
    """Whether to check egress even if `egress.mode` is off."""
    requests_per_day: int | None = None
    """Expected load; None if unknown."""
    keep_days: int = 365
    """Days for which the audit log must have space."""
    entries: int = 1000
    """Number of newest audit entries to read."""

    @property
    def installation(self) -> Installation:
        return locate(self.settings)

    @property
    def uses_sqlite(self) -> bool:
        return self.installation.database_url.startswith("sqlite")

    def require_gateway(self) -> None:
        if not self.gateway:
            raise SkippedError("no gateway runs on this machine")

    def require_worker(self) -> None:
        if not self.worker:
            raise SkippedError("no worker runs on this machine")


@dataclass(frozen=True, slots=True)
class CheckFamily:
    """Checks of one part of the machine."""

    look: Callable[[Inquiry], Iterable[Check]]
    """Yields one check per subject, in their order; SkippedError skips those that remain."""
    subjects: tuple[Subject, ...]

    def __call__(self, inquiry: Inquiry) -> Iterator[Check]:
        remaining = iter(self.subjects)
        try:
            for check in self.look(inquiry):
                next(remaining)
                yield check
        except SkippedError as why:
            yield from (subject.skipped(str(why)) for subject in remaining)


def family(*subjects: Subject) -> Callable[[Callable[[Inquiry], Iterable[Check]]], CheckFamily]:
    return lambda look: CheckFamily(look, subjects)


def gib(number: float) -> str:
    """Bytes as text: `1.5 GiB`, or MiB below one."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def read_text(file: Path) -> str:
    """A file of the kernel's; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
