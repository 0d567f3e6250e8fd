"""
How a gateway stands after its checks: whether it may be used, and what somebody should look at.

An inconclusive check is no news.  In `strict` a gateway stays as the last check that concluded something
left it, and before the first one it has shown nothing.
"""

from dataclasses import dataclass, replace
from typing import Literal

from appliance.sovereignty.egress.report import Report
from appliance.sovereignty.egress.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is known from the checks so far."""

    mode: Literal["off", "warn", "strict"]
    last: Report | None = None
    """The newest check."""
    conclusive: Report | None = None
    """The newest that was not inconclusive."""

    def after(self, report: Report) -> "Standing":
        """What is known with one more check."""
        if report.verdict is Verdict.INCONCLUSIVE:
            return replace(self, last=report)
        return replace(self, last=report, conclusive=report)

    @property
    def problem(self) -> str | None:
        """Why the gateway is not ready; None while it is, and always outside of `strict`."""
        if self.mode != "strict":
            return None
        if self.conclusive is None:
            return f"nothing has shown yet that the outside cannot be reached{_because(self.last)}"
        return _open(self.conclusive)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What somebody should look at, in one line each."""
        found = []
        if self.mode == "warn" and self.conclusive and (way_out := _open(self.conclusive)):
            found.append(way_out)
        if self.last and self.last.verdict is Verdict.INCONCLUSIVE:
            found.append(f"the egress check was inconclusive{_because(self.last)}")
        return tuple(found)


def _open(report: Report) -> str | None:
    return f"the outside can be reached{_because(report)}" if report.verdict is Verdict.OPEN else None


def _because(report: Report | None) -> str:
    return f": {report.why}" if report and report.why else ""
