"""
All answers together, as they are shown and as programs read them.
"""

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from appliance.cli.preflight.check import Check, Result


class ReportedCheck(BaseModel):
    """One answer; members may be added."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    id: str
    """Family and name, such as `disk.space`."""
    title: str
    """For people."""
    result: Result
    """`ok`, `warn`, `fail`, or `skipped` where it does not concern this machine or could not be asked."""
    seen: str
    """One line: what was found."""
    todo: str
    """One line: what to do; empty unless the result is `warn` or `fail`."""


class Report(BaseModel):
    """What `appliance preflight --json` prints."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    format: Literal[1] = 1
    """Changes only if a member changes its meaning."""
    version: str
    """Of the appliance that asked."""
    time: str
    """When (RFC 3339, UTC)."""
    roles: tuple[Literal["gateway", "worker"], ...]
    """What is to run on this machine."""
    verdict: Result
    """`fail` if a check failed, else `warn` if one warns, else `ok`."""
    counts: dict[Result, int] = Field(min_length=len(Result))
    """Checks by result."""
    checks: tuple[ReportedCheck, ...]
    """In the order they are shown."""

    @property
    def title(self) -> str:
        """In one line for people."""
        words = {Result.FAIL: "not ready", Result.WARN: "ready, with warnings", Result.OK: "ready"}
        counted = ", ".join(f"{number} {result}" for result, number in self.counts.items() if number)
        return f"{words[self.verdict]}: {counted}"


def make_report(
    checks: tuple[Check, ...], *, version: str, now: float, gateway: bool, worker: bool
) -> Report:
    """Put answers together."""
    counts = {result: sum(check.result is result for check in checks) for result in Result}
    verdict = Result.FAIL if counts[Result.FAIL] else Result.WARN if counts[Result.WARN] else Result.OK
    roles: list[Literal["gateway", "worker"]] = []
    if gateway:
        roles.append("gateway")
    if worker:
        roles.append("worker")
    return Report(
        version=version,
        time=datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        roles=tuple(roles),
        verdict=verdict,
        counts=counts,
        checks=tuple(
            ReportedCheck(
                id=check.id, title=check.title, result=check.result, seen=check.seen, todo=check.todo
            )
            for check in checks
        ),
    )
