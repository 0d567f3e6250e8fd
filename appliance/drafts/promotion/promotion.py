"""
One promotion, or one rollback: how far it is, and everything needed to end it after a crash.

    begun ─► canary ─► trial ─► rollout ─► promoted
      └────────┴─────────┴────────┴─► returning ─► refused | failed | interrupted | rolled_back

A rollback is `returning` from its first moment.  What has not ended keeps no draft in service: only
`promoted` does.  Values only, with their JSON; `promotion.store` keeps them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal

Kind = Literal["promotion", "rollback"]
LONGEST_TIMELINE = 64
"""Steps that are kept; a promotion of more workers than that loses steps in its middle."""


class Stage(StrEnum):
    """How far it is."""

    BEGUN = "begun"
    CANARY = "canary"
    """The first worker is restarted with the draft."""
    TRIAL = "trial"
    """It serves beside the others, and both are counted."""
    ROLLOUT = "rollout"
    """The other workers get it, one at a time."""
    RETURNING = "returning"
    """Workers that have it are given back the one in service, one at a time."""
    PROMOTED = "promoted"
    REFUSED = "refused"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    ROLLED_BACK = "rolled_back"


OVER = frozenset(
    {Stage.PROMOTED, Stage.REFUSED, Stage.FAILED, Stage.INTERRUPTED, Stage.ROLLED_BACK},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of its timeline."""

    at: str
    """RFC 3339, UTC."""
    stage: Stage
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What the trial measured; None where it could not."""

    drafts: int = 0
    """Of the new draft, on its first worker."""
    acceptance_length: float | None = None
    previous_acceptance_length: float | None = None
    speed_ratio: float | None = None
    """Tokens per engine second, the new draft over the one in service."""

    def audit_fields(self) -> dict[str, Any]:
        """As the audit log has them."""
        named = {name: getattr(self, name) for name in (field.name for field in fields(self)[1:])}
        said = {name: f"{value:.3f}" for name, value in named.items() if value is not None}
        return {"drafts": self.drafts, **said} if self.drafts else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """One of them, as it is at one moment."""

    promotion_id: str
    kind: Kind
    target: str
    """Digest of the target."""
    model: str
    """Name that clients use for it."""
    draft: str
    """Digest of the draft that comes into service, or is taken out by a rollback; empty where a rollback
    takes out that of the settings."""
    incumbent: str
    """Digest of the draft in service meanwhile and, unless promoted, afterwards; empty for none, or one
    that is not known by its digest."""
    actor: str
    began: str
    """RFC 3339, UTC."""
    stage: Stage
    evaluation: str | None = None
    """Digest of the evaluation it was begun on."""
    without_evaluation: str | None = None
    """Why it was begun without one."""
    allow_downtime: bool = False
    canary: str | None = None
    """The first worker."""
    workers: tuple[str, ...] = ()
    """Workers that were told to start with the draft."""
    outcome: Stage | None = None
    """What it will have been once everything is returned."""
    reason: str | None = None
    """Why it did not go on."""
    numbers: Numbers = Numbers()
    waits: str | None = None
    """What it waits for now."""
    timeline: tuple[Step, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to be done."""
        return self.stage in OVER

    @property
    def title(self) -> str:
        """How it is called where somebody has to wait for it."""
        return f"{self.kind} {self.promotion_id}"

    def moved(self, stage: Stage, text: str, at: str, **changes: Any) -> "Promotion":  # noqa: ANN401 - as `replace`
        """It, one step further; what it waited for is forgotten."""
        timeline = (*self.timeline, Step(at=at, stage=stage, text=text))
        if len(timeline) > LONGEST_TIMELINE:
            timeline = (*timeline[: LONGEST_TIMELINE // 2], *timeline[-LONGEST_TIMELINE // 2 :])
        return replace(self, **{"waits": None, **changes, "stage": stage, "timeline": timeline})

    def encode(self) -> str:
        """The JSON it is kept as."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def decode(text: str) -> Promotion:
    """
    Read what `Promotion.encode` wrote.

    Raises:
        ValueError: it is nothing of the kind.
    """
    content = json.loads(text)
    try:
        return _parse(content)
    except (TypeError, KeyError, AttributeError) as error:
        message = f"it is no promotion: {error}"
        raise ValueError(message) from error


def _parse(content: Mapping[str, Any]) -> Promotion:
    known = {
        **content,
        "stage": Stage(content["stage"]),
        "outcome": Stage(content["outcome"]) if content["outcome"] is not None else None,
        "workers": tuple(str(name) for name in content["workers"]),
        "numbers": Numbers(**content["numbers"]),
        "timeline": tuple(
            Step(at=str(step["at"]), stage=Stage(step["stage"]), text=str(step["text"]))
            for step in content["timeline"]
        ),
    }
    promotion = Promotion(**known)
    texts = (promotion.promotion_id, promotion.target, promotion.model, promotion.draft, promotion.actor)
    if promotion.kind not in {"promotion", "rollback"} or not all(isinstance(text, str) for text in texts):
        message = "a field is not what it has to be"
        raise TypeError(message)
    return promotion
