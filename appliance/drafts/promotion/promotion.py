"""
One promotion or rollback: its state with all that is needed to end it after a crash, and its first decisions.

    begun ─► canary ─► trial ─► rollout ─► promoted
      └────────┴─────────┴────────┴─► returning ─► refused | failed | interrupted | rolled_back

A rollback starts in `returning`.  Only `promoted` puts a draft into service.

Fails closed: a draft is refused unless it is known to be allowed, with one line that says what to do.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal

from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.registry.active_draft import ActiveDraft
from appliance.drafts.registry.revision import Revision
from appliance.errors import ControlRefusedError, DraftNotFoundError, DraftRefusedError
from appliance.serving.worker import WorkerId, WorkerSnapshot

NONE = "none"
"""In requests and in the audit log: no draft, or that of the settings."""
SHORT = 12
"""Hex digits of a digest in messages."""
LONGEST_TIMELINE = 64
"""Maximum steps kept; a longer timeline loses steps in its middle."""


class PromotionStage(StrEnum):
    """Persisted, served and counted by these values."""

    BEGUN = "begun"
    CANARY = "canary"
    TRIAL = "trial"
    ROLLOUT = "rollout"
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
    """None for what the trial could not measure."""

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
    draft: str
    """Digest of the draft that a promotion tries or a rollback takes out; empty if that is the settings'."""
    incumbent: str
    """Digest of the draft in service meanwhile and, unless promoted, afterwards; empty if none or unknown."""
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
    """Restarted with the draft."""
    outcome: PromotionStage | None = None
    """The last stage, once all workers are rolled back."""
    reason: str | None = None
    """Why it ended without success, or why it is a rollback."""
    numbers: TrialNumbers = TrialNumbers()
    waits: str | None = None
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
    content: dict[str, Any] = json.loads(text)
    try:
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
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a promotion: {error}") from error
    texts = (promotion.promotion_id, promotion.target, promotion.model, promotion.draft, promotion.actor)
    is_text = all(isinstance(text, str) for text in texts)
    if promotion.kind not in ("promotion", "rollback") or not is_text:
        raise ValueError("not a promotion: a field has the wrong type")
    return promotion


def short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:SHORT] or "of the settings"


def target_of(snapshots: Iterable[WorkerSnapshot], model: str | None) -> str:
    """The target with that model name, or the only one served if None; raises `ControlRefusedError`."""
    known = {
        seen.weights: sorted(served.name for served in seen.models)
        for seen in snapshots
        if seen.weights and (model is None or any(served.name == model for served in seen.models))
    }
    if len(known) == 1:
        return next(iter(known))
    if not known:
        what = "no worker" if model is None else f"no worker of {model}"
        raise ControlRefusedError(f"{what} reports its target: see `appliance workers list`")
    names = ", ".join(sorted({name for names in known.values() for name in names}))
    raise ControlRefusedError(f"several targets are served: choose one with --model ({names})")


def incumbent_of(active: ActiveDraft, members: Iterable[WorkerSnapshot]) -> str:
    """The draft in service, empty for none; raises `ControlRefusedError` if workers serve different ones."""
    served = {seen.draft: seen.worker.worker_id for seen in members if seen.draft}
    wanted = active.draft if active.draft is not None else next(iter(served), "")
    for draft, worker in served.items():
        if draft != wanted:
            raise ControlRefusedError(
                f"worker {worker} serves the draft {short(draft)}, not {short(wanted)} like the others: "
                f"recycle it first (appliance speculation recycle {worker})"
            )
    return wanted


def check_evaluation(revision: Revision, evaluation: Evaluation | None, incumbent: str) -> str:
    """Return the digest of the evaluation that allows a trial; raises `DraftRefusedError` if none does."""
    name = short(revision.digest)
    again = f"evaluate it (appliance draft evaluate {name})"
    if evaluation is None:
        raise DraftRefusedError(f"draft {name} was never evaluated: {again}")
    if evaluation.verdict is not EvaluationVerdict.PASSED or not evaluation.complete:
        why = evaluation.reasons[0] if evaluation.reasons else "it is not complete"
        raise DraftRefusedError(f"the evaluation of draft {name} refused it: {why}")
    if evaluation.target != revision.target:
        raise DraftRefusedError(f"draft {name} was evaluated with another target: {again} with this one")
    if (evaluation.incumbent or "") != incumbent:
        raise DraftRefusedError(
            f"draft {name} was compared with {short(evaluation.incumbent or '')}, but {short(incumbent)} is "
            f"in service: {again} against that one"
        )
    return evaluation.digest


def rollback_draft(active: ActiveDraft, to: str | None) -> str | None:
    """
    The draft that a rollback restores, one that served before; None for that of the settings.

    `to` is its digest or a prefix, `none` for the draft of the settings, None for the last one.
    """
    if active.draft is None:
        raise ControlRefusedError("the draft of the settings is in service: there is nothing to roll back")
    if to is None:
        return active.previous[0] if active.previous else None
    if to == NONE:
        return None
    digits = to.strip().lower().removeprefix("sha256:")
    found = {
        draft
        for draft in active.previous
        if draft and digits and draft.removeprefix("sha256:").startswith(digits)
    }
    if len(found) != 1:
        served = ", ".join(short(draft or "") for draft in active.previous) or "none"
        message = f"{to!r} is not one of the drafts that served before ({served}): promote it instead"
        raise DraftNotFoundError(message)
    return found.pop()


def own_draft(active: ActiveDraft, promotions: Iterable[Promotion]) -> str:
    """Digest of the settings' draft, from the promotion that replaced it; empty if unknown."""
    chain = (active.draft, *active.previous)
    successor = next((later for later, earlier in pairwise(chain) if earlier is None), None)
    for promotion in promotions:
        known = (promotion.kind, promotion.stage, promotion.target, promotion.draft)
        if known == ("promotion", PromotionStage.PROMOTED, active.target, successor):
            return promotion.incumbent
    return ""


def choose_canary(members: Iterable[WorkerSnapshot], refusal: Callable[[WorkerId], str | None]) -> WorkerId:
    """The least loaded worker that `refusal` lets restart (None); raises `ControlRefusedError`."""
    why = "no worker serves its target: see `appliance workers list`"
    free: list[tuple[bool, bool, int, WorkerId]] = []
    for seen in members:
        refused = refusal(seen.worker.worker_id)
        if refused is None:
            running = seen.metrics.running if seen.metrics is not None else 0
            # Workers that serve and draft come first: their former speed is known.
            free.append((not seen.takes_requests, not seen.draft, running, seen.worker.worker_id))
        else:
            why = refused
    if not free:
        raise ControlRefusedError(why)
    return min(free)[-1]
