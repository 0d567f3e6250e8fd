"""The models page: what is served, its drafts, how each draft got there, and the actions on drafts."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request

from appliance.api import drafts as drafts_api
from appliance.api.console.console import Console
from appliance.api.console.history import at_batch
from appliance.api.console.operators import Operator
from appliance.api.console.sessions import Notice
from appliance.api.console.views import worker_figures
from appliance.api.services import Services
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.promotion.promoter import SHOWN, RegisteredDrafts
from appliance.drafts.promotion.promotion import NONE, Promotion, PromotionStage, short
from appliance.drafts.promotion.promotion_run import STORED
from appliance.drafts.registry.active_draft import ActiveDraft
from appliance.drafts.registry.revision import Revision
from appliance.errors import DraftError
from appliance.serving.worker import WorkerSnapshot
from appliance.speculation.values import Capability, missing_of

RECIPE = ("tool", "version", "method")
"""Members of a draft's recipe that are shown, where its trainer recorded them."""
STEP_CLASSES = {"done": "good", "failed": "down", "running": "warn", "open": ""}


async def promote(_request: Request, services: Services, operator: Operator, form: dict[str, str]) -> Notice:
    members: dict[str, Any] = {"draft": form.get("draft"), "allow_downtime": "allow_downtime" in form}
    if "without_evaluation" in form:
        members["without_evaluation"] = form["without_evaluation"]
    begun = await drafts_api.start_promotion(services, operator.caller, members)
    return Notice(text=f"The promotion of {short(begun.draft)} has begun with a canary, {begun.canary}.")


async def roll_back(
    _request: Request, services: Services, operator: Operator, form: dict[str, str]
) -> Notice:
    """Also cancels a running promotion."""
    members: dict[str, Any] = {name: form.get(name) for name in ("to", "model")}
    members |= {"reason": form.get("reason", ""), "allow_downtime": "allow_downtime" in form}
    begun = await drafts_api.start_rollback(services, operator.caller, members)
    if begun.kind == "promotion":
        return Notice(text=f"The promotion of {short(begun.draft)} ends; its workers get their draft again.")
    return Notice(text=f"Workers leave the draft {short(begun.draft)}, one at a time.")


async def models(services: Services, console: Console) -> dict[str, Any]:
    registered = RegisteredDrafts(drafts=(), problems=(), omitted=0)
    active: tuple[ActiveDraft, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    unreadable = "" if services.promoter else "This gateway has no draft registry."
    if services.promoter is not None:
        try:
            promotions = await services.promoter.promotions(STORED)
            active = await services.promoter.active_drafts()
            registered = await services.promoter.registered()
        except DraftError as error:
            unreadable = str(error)
    known = {revision.digest: revision for revision, _evaluation in registered.drafts}
    snapshots = services.pool.snapshots
    served = {model.name: model for seen in snapshots for model in seen.models}
    running = next((each for each in promotions if not each.is_over), None)
    waiting = sum(not seen.models for seen in snapshots)
    return {
        "models": [
            {
                "name": name,
                "parent": model.parent,
                "contexts": _contexts(name, snapshots),
                "workers": [
                    _worker(services, console, seen, known) for seen in snapshots if seen.serves(name)
                ],
            }
            for name, model in sorted(served.items())
        ],
        "waiting": waiting,
        "drafts": [
            {
                "name": short(revision.digest),
                "digest": revision.digest,
                "models": _models_of(revision.target, snapshots),
                "recipe": _recipe(revision),
                "steps": life_cycle(revision, evaluation, active, promotions),
                "may_promote": running is None
                and any(each.target == revision.target and each.draft != revision.digest for each in active),
                "has_passed": _has_passed(evaluation),
            }
            for revision, evaluation in registered.drafts
        ],
        "problems": registered.problems,
        "omitted": registered.omitted,
        "cancels": short(running.draft)
        if running is not None and running.stage is not PromotionStage.RETURNING
        else "",
        "rollbacks": [_rollback(each, snapshots) for each in active if each.draft and running is None],
        "promotions": [_promotion(each) for each in promotions[:SHOWN]],
        "unreadable": unreadable,
        "step_classes": STEP_CLASSES,
        "status": f"{len(served)} model{'' if len(served) == 1 else 's'}, "
        f"{len(snapshots)} worker{'' if len(snapshots) == 1 else 's'}.",
    }


def life_cycle(
    revision: Revision,
    evaluation: Evaluation | None,
    active: Iterable[ActiveDraft],
    promotions: Iterable[Promotion],
) -> list[dict[str, str]]:
    """Registered, evaluated, trial and promoted, each with its state; `promotions` are the newest first."""
    origin = f", signed by {revision.origin}" if revision.origin else ""
    tries = [each for each in promotions if each.kind == "promotion" and each.draft == revision.digest]
    return [
        _step(revision.source, "done", f"{revision.made}{origin}"),
        _evaluated(evaluation),
        _trial(tries[0] if tries else None),
        _promoted(revision, active, tries),
    ]


def _step(name: str, state: str, text: str) -> dict[str, str]:
    return {"name": name, "state": state, "text": text}


def _evaluated(evaluation: Evaluation | None) -> dict[str, str]:
    if evaluation is None:
        return _step("evaluated", "open", "not evaluated here")
    if _has_passed(evaluation):
        ratio = evaluation.acceptance_ratio
        gain = "" if ratio is None else f", acceptance length {ratio.value:.2f} times the incumbent's"
        return _step("evaluated", "done", f"passed {evaluation.made}{gain}")
    why = evaluation.reasons[0] if evaluation.reasons else "it is not complete"
    return _step("evaluated", "failed", f"refused {evaluation.made}: {why}")


def _has_passed(evaluation: Evaluation | None) -> bool:
    return evaluation is not None and evaluation.verdict is EvaluationVerdict.PASSED and evaluation.complete


def _rollback(active: ActiveDraft, snapshots: Sequence[WorkerSnapshot]) -> dict[str, Any]:
    """What a rollback of one target can restore, the last draft first."""
    former = [
        (each or NONE, short(each) if each else "the draft of the settings") for each in active.previous
    ]
    return {
        "draft": short(active.draft or ""),
        "models": _models_of(active.target, snapshots),
        "model": _models_of(active.target, snapshots).partition(", ")[0],
        "former": list(dict.fromkeys([*former, (NONE, "the draft of the settings")])),
    }


def _trial(promotion: Promotion | None) -> dict[str, str]:
    if promotion is None:
        return _step("trial", "open", "no promotion is on record")
    numbers = promotion.numbers
    measured = [
        f"{name} {value:.2f}"
        for name, value in (
            ("acceptance length", numbers.acceptance_length),
            ("before", numbers.previous_acceptance_length),
            ("speed ratio", numbers.speed_ratio),
        )
        if value is not None
    ]
    figures = f" ({', '.join(measured)})" if measured else ""
    if not promotion.is_over:
        waits = f", waits: {promotion.waits}" if promotion.waits else ""
        return _step("trial", "running", f"{promotion.stage} since {promotion.began}{waits}{figures}")
    if promotion.stage is PromotionStage.PROMOTED:
        return _step("trial", "done", f"passed {promotion.began}{figures}")
    why = f": {promotion.reason}" if promotion.reason else ""
    return _step("trial", "failed", f"{_words(promotion.stage)} {promotion.began}{why}{figures}")


def _promoted(
    revision: Revision, active: Iterable[ActiveDraft], tries: Sequence[Promotion]
) -> dict[str, str]:
    of_target = next((each for each in active if each.target == revision.target), None)
    if of_target is None:
        return _step("promoted", "open", "no worker serves its target now")
    if of_target.draft == revision.digest:
        since = next((each.began for each in tries if each.stage is PromotionStage.PROMOTED), "")
        return _step("promoted", "done", f"in service{f' since the promotion of {since}' if since else ''}")
    if revision.digest in of_target.previous:
        return _step("promoted", "done", "served before; a rollback can restore it")
    return _step("promoted", "open", "not in service")


def _worker(
    services: Services, console: Console, seen: WorkerSnapshot, known: dict[str, Revision]
) -> dict[str, Any]:
    revision = known.get(seen.draft)
    return worker_figures(services, console, seen) | {
        "engine": seen.engine,
        "payoff": _payoff(services, seen),
        "draft": short(seen.draft) if seen.draft else "",
        "speculates": seen.speculates,
        "recipe": _recipe(revision) if revision else "",
        "is_registered": revision is not None,
        "missing": _lacks(seen),
    }


def _lacks(seen: WorkerSnapshot) -> list[str]:
    missing = missing_of(seen.reading)
    if len(missing) == len(Capability) and len(set(missing.values())) == 1:
        return [f"all: {next(iter(missing.values()))}"]
    return [f"{name.replace('_', ' ')}: {why}" for name, why in missing.items()]


def _payoff(services: Services, seen: WorkerSnapshot) -> float | None:
    """The gain in tokens per second by drafts, as a share, at the nearest measured batch size."""
    view = services.control.view(seen.worker.worker_id)
    payoff = at_batch(seen, {each.bucket: each.payoff for each in view.buckets} if view else {})
    return None if payoff is None else math.expm1(payoff)


def _contexts(name: str, snapshots: Iterable[WorkerSnapshot]) -> list[int]:
    """The maximum contexts that its workers serve, ascending."""
    found = {model.max_model_len for seen in snapshots for model in seen.models if model.name == name}
    return sorted(context for context in found if context is not None)


def _models_of(target: str, snapshots: Iterable[WorkerSnapshot]) -> str:
    names = {model.name for seen in snapshots if seen.weights == target for model in seen.models}
    return ", ".join(sorted(names))


def _recipe(revision: Revision) -> str:
    recipe = revision.record.recipe
    return ", ".join(f"{name} {recipe[name]}" for name in RECIPE if isinstance(recipe.get(name), str))


def _promotion(promotion: Promotion) -> dict[str, Any]:
    is_promotion = promotion.kind == "promotion"
    is_good = promotion.stage is (PromotionStage.PROMOTED if is_promotion else PromotionStage.ROLLED_BACK)
    relation = "instead of" if is_promotion else "restored:"
    return {
        "began": promotion.began,
        "kind": promotion.kind,
        "model": promotion.model,
        "draft": short(promotion.draft),
        "other": f"{relation} {short(promotion.incumbent)}",
        "stage": _words(promotion.stage),
        "class": STEP_CLASSES["done" if is_good else "failed" if promotion.is_over else "running"],
        "reason": promotion.reason or promotion.without_evaluation or "",
        "actor": promotion.actor,
        "timeline": promotion.timeline,
    }


def _words(stage: PromotionStage) -> str:
    return stage.replace("_", " ")
