"""
One egress check as it is shown and recorded, and a gateway's status after its checks.

`EgressReport.to_json` is an interface of the admin API and of `appliance egress check --json`.  Members may
be added.

An inconclusive check changes no status.  In `strict` a gateway keeps the status of its last conclusive
check; before the first one it is not ready.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from appliance.sovereignty.egress.judge import EgressJudgement, EgressVerdict, judge
from appliance.sovereignty.egress.probe import Observation

MOST_CHARACTERS = 100
"""Maximum length of one outcome in an entry: a leaf of the log must hold them all."""


class Trigger(StrEnum):
    START = "start"
    SCHEDULE = "schedule"
    REQUEST = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressReport:
    time: str
    """When it ended (RFC 3339, UTC)."""
    host: str
    """Name of the machine, container or pod."""
    trigger: Trigger
    settings: str
    """Digest of the `egress` section."""
    walled: bool
    """Whether the serving process has a wall of its own; compare `ProbeOutcome.REFUSED_BY_WALL`."""
    seconds: float
    observation: Observation

    @property
    def judgement(self) -> EgressJudgement:
        if failure := self.observation.failure:
            return EgressJudgement(verdict=EgressVerdict.INCONCLUSIVE, reasons=(failure,))
        return judge(self.observation.control, self.observation.results)

    @property
    def verdict(self) -> EgressVerdict:
        return self.judgement.verdict

    @property
    def why(self) -> str:
        """Reasons in one line; empty if the verdict is `closed`."""
        return "; ".join(self.judgement.reasons)

    def to_json(self) -> dict[str, Any]:
        """For programs; described in docs/how-to/check-egress.md."""
        control = self.observation.control
        return {
            "verdict": str(self.verdict),
            "reasons": list(self.judgement.reasons),
            "time": self.time,
            "host": self.host,
            "trigger": str(self.trigger),
            "settings": self.settings,
            "wall": "up" if self.walled else "absent",
            "seconds": round(self.seconds, 3),
            "control": control.to_json() if control else None,
            "probes": [result.to_json() for result in self.observation.results],
        }

    def to_entry(self) -> dict[str, Any]:
        """Fields of its `egress.attested` entry, without the actor."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        control = self.observation.control
        return {
            "result": str(self.verdict),
            "trigger": str(self.trigger),
            "attempts": len(self.observation.results),
            "outcomes": [str(result)[-MOST_CHARACTERS:] for result in self.observation.results],
            "control": str(control)[-MOST_CHARACTERS:] if control else "not tried",
            "wall": self.walled,
            "host": self.host[:MOST_CHARACTERS],
            "settings": self.settings,
            "report": hashlib.sha256(text.encode()).hexdigest(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressStatus:
    mode: Literal["off", "warn", "strict"]
    last: EgressReport | None = None
    """The newest check."""
    conclusive: EgressReport | None = None
    """The newest conclusive check."""

    def after(self, report: EgressReport) -> "EgressStatus":
        if report.verdict is EgressVerdict.INCONCLUSIVE:
            return replace(self, last=report)
        return replace(self, last=report, conclusive=report)

    @property
    def problem(self) -> str | None:
        """Why the gateway is not ready; always None outside of `strict`."""
        if self.mode != "strict":
            return None
        if self.conclusive is None:
            return f"no egress check has been conclusive yet{_because(self.last)}"
        return _open(self.conclusive)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line each."""
        found = []
        if self.mode == "warn" and self.conclusive and (problem := _open(self.conclusive)):
            found.append(problem)
        if self.last and self.last.verdict is EgressVerdict.INCONCLUSIVE:
            found.append(f"the egress check was inconclusive{_because(self.last)}")
        return tuple(found)


def _open(report: EgressReport) -> str | None:
    return f"egress is possible{_because(report)}" if report.verdict is EgressVerdict.OPEN else None


def _because(report: EgressReport | None) -> str:
    return f": {report.why}" if report and report.why else ""
