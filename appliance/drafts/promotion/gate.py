"""
Decisions before a promotion or rollback begins: whether, on which worker first, and back to which draft.

Fails closed: a draft is refused unless it is known to be allowed, with one line that says what to do.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

from appliance.drafts.evaluation.results import Evaluation, EvaluationVerdict
from appliance.drafts.promotion.promotion import Promotion, PromotionStage
from appliance.drafts.registry.active_draft import ActiveDraft
from appliance.drafts.registry.revision import Revision
from appliance.errors import ControlRefusedError, DraftNotFoundError, DraftRefusedError
from appliance.serving.worker import WorkerId, WorkerSnapshot

NONE = "none"
"""In requests and in the audit log: no draft, or that of the settings."""
SHORT = 12
"""Hex digits of a digest in messages."""


def short(digest: str) -> str:
    """A draft's name in messages."""
    return digest.removeprefix("sha256:")[:SHORT] or "of the settings"


def target_of(snapshots: Iterable[WorkerSnapshot], model: str | None) -> str:
    """
    The target with that model name, or the only one served if `model` is None.

    Raises:
        ControlRefusedError: there is none, or more than one.
    """
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
    """
    Digest of the draft in service; empty if the target is served without one.

    Raises:
        ControlRefusedError: workers serve different drafts, so there is no baseline.
    """
    served = {seen.draft: seen.worker.worker_id for seen in members if seen.draft}
    wanted = active.draft if active.draft is not None else next(iter(served), "")
    for draft, worker in served.items():
        if draft != wanted:
            message = (
                f"worker {worker} serves the draft {short(draft)}, not {short(wanted)} like the others: "
                f"recycle it first (appliance speculation recycle {worker})"
            )
            raise ControlRefusedError(message)
    return wanted


def check_evaluation(revision: Revision, evaluation: Evaluation | None, incumbent: str) -> str:
    """
    Return the digest of the evaluation that allows a trial.

    Raises:
        DraftRefusedError: there is none, it refused the draft, or it used another target or incumbent.
    """
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
        message = (
            f"draft {name} was compared with {short(evaluation.incumbent or '')}, but {short(incumbent)} is "
            f"in service: {again} against that one"
        )
        raise DraftRefusedError(message)
    return evaluation.digest


def rollback_draft(active: ActiveDraft, to: str | None) -> str | None:
    """
    The draft that a rollback restores, one that served before; None for that of the settings.

    `to` is its digest or a prefix, `none` for the draft of the settings, None for the last one.

    Raises:
        ControlRefusedError: no draft served before.
        DraftNotFoundError: `to` names none of those, or more than one.
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
    """
    The least loaded of the workers that `refusal` (None, or why not) lets restart.

    Raises:
        ControlRefusedError: it lets none.
    """
    why = "no worker serves its target: see `appliance workers list`"
    free: list[WorkerSnapshot] = []
    for seen in members:
        refused = refusal(seen.worker.worker_id)
        if refused is None:
            free.append(seen)
        else:
            why = refused
    if not free:
        raise ControlRefusedError(why)
    return min(free, key=_load).worker.worker_id


def _load(seen: WorkerSnapshot) -> tuple[bool, bool, int, str]:
    """Workers that serve and draft come first: their former speed is known."""
    running = seen.metrics.running if seen.metrics is not None else 0
    return not seen.takes_requests, not seen.draft, running, seen.worker.worker_id
