"""The report of all checks, for display and as JSON."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.cli.preflight.check import Check, CheckResult


class ReportedCheck(BaseModel):
    """The result of one check; members may be added."""

    model_config = ConfigDict(frozen=True)

    id: str
    """Family and name, such as `disk.space`."""
    title: str
    """For people."""
    result: CheckResult
    """`ok`, `warn`, `fail`, or `skipped` if it does not concern this machine or could not be checked."""
    seen: str
    """One line: the finding."""
    todo: str
    """One line: what to do; empty unless the result is `warn` or `fail`."""


class PreflightReport(BaseModel):
    """The output of `appliance preflight --json`."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    """Changes only if a member changes its meaning."""
    version: str
    """Of the appliance."""
    time: str
    """Time of the report (RFC 3339, UTC)."""
    roles: tuple[Literal["gateway", "worker"], ...]
    """Roles that run on this machine."""
    verdict: CheckResult
    """`fail` if a check failed, else `warn` if one warns, else `ok`."""
    counts: dict[CheckResult, int] = Field(min_length=len(CheckResult))
    """Checks by result."""
    checks: tuple[ReportedCheck, ...]
    """In the order of display."""

    @property
    def title(self) -> str:
        """Verdict and counts in one line."""
        words = {
            CheckResult.FAIL: "not ready",
            CheckResult.WARN: "ready, with warnings",
            CheckResult.OK: "ready",
        }
        counted = ", ".join(f"{number} {result}" for result, number in self.counts.items() if number)
        return f"{words[self.verdict]}: {counted}"


def make_report(
    checks: tuple[Check, ...], *, version: str, now: float, gateway: bool, worker: bool
) -> PreflightReport:
    counts = {result: sum(check.result is result for check in checks) for result in CheckResult}
    worst_first = (CheckResult.FAIL, CheckResult.WARN, CheckResult.OK)
    verdict = next((result for result in worst_first if counts[result]), CheckResult.OK)
    roles: list[Literal["gateway", "worker"]] = ["gateway"] if gateway else []
    roles += ["worker"] if worker else []
    return PreflightReport(
        version=version,
        time=datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        roles=tuple(roles),
        verdict=verdict,
        counts=counts,
        checks=tuple(ReportedCheck(**asdict(check)) for check in checks),
    )
