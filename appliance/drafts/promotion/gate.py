"""
Whether a draft may be tried at all, and on which worker first; and which one a rollback goes back to.

Decisions only.  It fails closed: what is not known to be so is refused, in one line that says what to do.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

from appliance.drafts.evaluation.report import Evaluation, Verdict
from appliance.drafts.promotion.promotion import Promotion, Stage
from appliance.drafts.registry.revision import Revision
from appliance.drafts.registry.standing import Standing
from appliance.errors import ControlRefusedError, DraftNotFoundError, DraftRefusedError
from appliance.serving.worker import WorkerId, WorkerSnapshot

NONE = "none"
"""In orders and in the audit log, where a draft is named and there is none, or none but the settings'."""
SHORT = 12
"""Hex digits that people are shown of a digest."""


def short(digest: str) -> str:
    """How a draft is called where people read."""
    return digest.removeprefix("sha256:")[:SHORT] or "of the settings"


def members_of(snapshots: Iterable[WorkerSnapshot], target: str) -> tuple[WorkerSnapshot, ...]:
    """The workers that serve a target, as far as they say so; those without our plugin do not."""
    return tuple(seen for seen in snapshots if seen.weights == target and not seen.leaving)


def target_of(snapshots: Iterable[WorkerSnapshot], model: str | None) -> str:
    """
    The target that is meant: the only one that is served, or the one of a model's name.

    Raises:
        ControlRefusedError: there is none, or several; says which.
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
        message = f"{what} here says which target it serves: see `appliance workers list`"
        raise ControlRefusedError(message)
    names = ", ".join(sorted({name for names in known.values() for name in names}))
    message = f"several targets are served here: name one by its model with --model ({names})"
    raise ControlRefusedError(message)


def incumbent_of(standing: Standing, members: Iterable[WorkerSnapshot]) -> str:
    """
    Digest of the draft in service; empty where the target is served alone.

    Raises:
        ControlRefusedError: workers serve another one, so there is nothing to compare with.
    """
    served = {seen.draft: seen.worker.worker_id for seen in members if seen.draft}
    wanted = standing.draft if standing.draft is not None else next(iter(served), "")
    for draft, worker in served.items():
        if draft != wanted:
            message = (
                f"worker {worker} serves the draft {short(draft)}, and not {short(wanted)} as others: "
                f"recycle it first (appliance speculation recycle {worker})"
            )
            raise ControlRefusedError(message)
    return wanted


def check_evaluation(revision: Revision, evaluation: Evaluation | None, incumbent: str) -> str:
    """
    Return the digest of the evaluation that lets a draft be tried.

    Raises:
        DraftRefusedError: there is none, it refused the draft, or it compared with something else.
    """
    name = short(revision.digest)
    again = f"evaluate it (appliance draft evaluate {name})"
    if evaluation is None:
        raise DraftRefusedError(f"draft {name} was never evaluated: {again}")
    if evaluation.verdict is not Verdict.PASSED or not evaluation.complete:
        why = evaluation.reasons[0] if evaluation.reasons else "it is not complete"
        raise DraftRefusedError(f"the evaluation of draft {name} refused it: {why}")
    if evaluation.target != revision.target:
        raise DraftRefusedError(f"draft {name} was evaluated with another target: {again} with this one")
    if (evaluation.incumbent or "") != incumbent:
        message = (
            f"draft {name} was compared with {short(evaluation.incumbent or '')}, and {short(incumbent)} is "
            f"in service: {again} against that one"
        )
        raise DraftRefusedError(message)
    return evaluation.digest


def before(standing: Standing, to: str | None) -> str | None:
    """
    The draft that a rollback goes back to: one that served before; None for that of the settings.

    Args:
        standing: what serves, and what did.
        to: its digest or the beginning of it, `none` for that of the settings; None for the last.

    Raises:
        ControlRefusedError: nothing served before.
        DraftNotFoundError: none that did has this name, or several.
    """
    if standing.draft is None:
        message = "the draft of the settings is in service: there is nothing to roll back"
        raise ControlRefusedError(message)
    if to is None:
        return standing.previous[0] if standing.previous else None
    if to == NONE:
        return None
    digits = to.strip().lower().removeprefix("sha256:")
    found = {
        draft
        for draft in standing.previous
        if draft and digits and draft.removeprefix("sha256:").startswith(digits)
    }
    if len(found) != 1:
        served = ", ".join(short(draft or "") for draft in standing.previous) or "none"
        message = f"{to!r} names none of the drafts that served before ({served}): promote it instead"
        raise DraftNotFoundError(message)
    return found.pop()


def own_draft(standing: Standing, promotions: Iterable[Promotion]) -> str:
    """
    Digest of the draft of the settings, as it was seen when another one took its place; empty if unknown.

    Args:
        standing: what serves, and what did.
        promotions: those that are remembered, the newest first.
    """
    chain = (standing.draft, *standing.previous)
    successor = next((later for later, earlier in pairwise(chain) if earlier is None), None)
    for promotion in promotions:
        known = (promotion.kind, promotion.stage, promotion.target, promotion.draft)
        if known == ("promotion", Stage.PROMOTED, standing.target, successor):
            return promotion.incumbent
    return ""


def choose_canary(members: Iterable[WorkerSnapshot], refusal: Callable[[WorkerId], str | None]) -> WorkerId:
    """
    The worker that tries a draft first: of those that may be restarted, the one with the least to do.

    Args:
        members: the workers that serve the target.
        refusal: why a worker may not be restarted now; None if it may.

    Raises:
        ControlRefusedError: none may be; says why.
    """
    why = "no worker here serves its target: see `appliance workers list`"
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
    """Those that serve and draft come first: what they did before tells how fast they are."""
    running = seen.metrics.running if seen.metrics is not None else 0
    return not seen.takes_requests, not seen.draft, running, seen.worker.worker_id
