"""
The state of one promotion or rollback, and its JSON: everything needed to end it after a crash.

    begun ─► canary ─► trial ─► rollout ─► promoted
      └────────┴─────────┴────────┴─► returning ─► refused | failed | interrupted | rolled_back

A rollback starts in `returning`.  Only `promoted` puts a draft into service.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal

LONGEST_TIMELINE = 64
"""Maximum steps kept; a longer timeline loses steps in its middle."""


class PromotionStage(StrEnum):
    """Persisted, served and counted by these values."""

    BEGUN = "begun"
    CANARY = "canary"
    """The first worker is restarted with the draft."""
    TRIAL = "trial"
    """That worker and the others serve, and their counts are compared."""
    ROLLOUT = "rollout"
    """The other workers are restarted with it, one at a time."""
    RETURNING = "returning"
    """Workers that have it are restarted with the draft in service, one at a time."""
    PROMOTED = "promoted"
    REFUSED = "refused"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    ROLLED_BACK = "rolled_back"


OVER = frozenset({"promoted", "refused", "failed", "interrupted", "rolled_back"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    at: str
    """RFC 3339, UTC."""
    stage: PromotionStage
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialNumbers:
    """What the trial measured; None where it could not."""

    drafts: int = 0
    """Of the new draft, on the canary worker."""
    acceptance_length: float | None = None
    previous_acceptance_length: float | None = None
    speed_ratio: float | None = None
    """Tokens per engine second, the new draft over the one in service."""

    def audit_fields(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        texts = {name: f"{value:.3f}" for name, value in values.items() if value is not None}
        return {"drafts": self.drafts, **texts} if self.drafts else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    promotion_id: str
    kind: Literal["promotion", "rollback"]
    target: str
    """Digest."""
    model: str
    """Name that clients use for it."""
    draft: str
    """Digest of the draft that a promotion tries or a rollback takes out of service; empty if a rollback
    takes out that of the settings."""
    incumbent: str
    """Digest of the draft in service meanwhile and, unless promoted, afterwards; empty for none, or for one
    whose digest is not known."""
    actor: str
    began: str
    """RFC 3339, UTC."""
    stage: PromotionStage
    evaluation: str | None = None
    """Digest of the evaluation that allowed it."""
    without_evaluation: str | None = None
    """The operator's reason to begin without one."""
    allow_downtime: bool = False
    canary: str | None = None
    """Id of the worker that gets the draft first."""
    workers: tuple[str, ...] = ()
    """Workers that were restarted with the draft."""
    outcome: PromotionStage | None = None
    """The last stage, once all workers are rolled back."""
    reason: str | None = None
    """Why it ended without success, or why it is a rollback."""
    numbers: TrialNumbers = TrialNumbers()
    waits: str | None = None
    """What it waits for now."""
    timeline: tuple[TimelineStep, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.stage in OVER

    @property
    def title(self) -> str:
        """Its name in messages, and as holder of the recycler."""
        return f"{self.kind} {self.promotion_id}"

    def moved(self, stage: PromotionStage, text: str, at: str, **changes: Any) -> "Promotion":  # noqa: ANN401 - as `replace`
        """The promotion one step further; clears `waits`."""
        timeline = (*self.timeline, TimelineStep(at=at, stage=stage, text=text))
        if len(timeline) > LONGEST_TIMELINE:
            timeline = (*timeline[: LONGEST_TIMELINE // 2], *timeline[-LONGEST_TIMELINE // 2 :])
        return replace(self, **{"waits": None, **changes, "stage": stage, "timeline": timeline})

    def encode(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def decode(text: str) -> Promotion:
    """Parse `Promotion.encode`'s JSON; raises `ValueError` for anything else."""
    content = json.loads(text)
    try:
        return _parse(content)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a promotion: {error}") from error


def _parse(content: Mapping[str, Any]) -> Promotion:
    known = {
        **content,
        "stage": PromotionStage(content["stage"]),
        "outcome": PromotionStage(content["outcome"]) if content["outcome"] is not None else None,
        "workers": tuple(str(name) for name in content["workers"]),
        "numbers": TrialNumbers(**content["numbers"]),
        "timeline": tuple(
            TimelineStep(at=str(step["at"]), stage=PromotionStage(step["stage"]), text=str(step["text"]))
            for step in content["timeline"]
        ),
    }
    promotion = Promotion(**known)
    texts = (promotion.promotion_id, promotion.target, promotion.model, promotion.draft, promotion.actor)
    if promotion.kind not in {"promotion", "rollback"} or not all(isinstance(text, str) for text in texts):
        raise TypeError("a field has the wrong type")
    return promotion
