"""
One check as it is shown and recorded: what was tried, how it ended, and what follows.

`to_json` is an interface: the admin API, `appliance egress check --json` and those who read them have it
from here.  Members may be added.
"""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from appliance.sovereignty.egress.probe import Observation
from appliance.sovereignty.egress.verdict import Judgement, Verdict, judge

MOST_CHARACTERS = 100
"""Of one outcome in an entry: a leaf of the log has to hold them all."""


class Trigger(StrEnum):
    """Why a check was made."""

    START = "start"
    SCHEDULE = "schedule"
    REQUEST = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One check."""

    time: str
    """When it ended (RFC 3339, UTC)."""
    host: str
    """Name of the machine, container or pod it was made on."""
    trigger: Trigger
    settings: str
    """Digest of the `egress` section it was made under."""
    walled: bool
    """Whether the process that serves is behind a Landlock wall of its own; see `Outcome.REFUSED_BY_WALL`
    for what that would mean of the attempts."""
    seconds: float
    """How long it took."""
    observation: Observation
    judgement: Judgement

    @classmethod
    def of(
        cls,
        observation: Observation,
        *,
        time: str,
        host: str,
        trigger: Trigger,
        settings: str,
        walled: bool,
        seconds: float,
    ) -> "Report":
        """Judge what was observed."""
        judgement = judge(observation.control, observation.results)
        if observation.failure:
            judgement = Judgement(verdict=Verdict.INCONCLUSIVE, reasons=(observation.failure,))
        return cls(
            time=time,
            host=host,
            trigger=trigger,
            settings=settings,
            walled=walled,
            seconds=seconds,
            observation=observation,
            judgement=judgement,
        )

    @property
    def verdict(self) -> Verdict:
        """What the check showed."""
        return self.judgement.verdict

    @property
    def why(self) -> str:
        """Its reasons in one line; empty if it is closed."""
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
        """The fields of its `egress.attested` entry, but for who asked for it."""
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
