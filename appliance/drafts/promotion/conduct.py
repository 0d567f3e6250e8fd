"""
One promotion carried through, or given back.

    standing names the candidate ─► first worker ─► trial ─► the others ─► standing changed
                     └────────────────┴──────────────┴────────┴─► standing forgets it ─► workers return

What a crash leaves: up to the last step the standing keeps the draft in service, so every worker that
starts anew starts with that one; those that still run the new draft are found again by the promotion's
file (`promoter`).  After the last step the new one is in service, and only the file does not say so yet.
"""

import asyncio

from appliance.audit.registry import EntryType
from appliance.control.recycle import RecycleResult
from appliance.drafts.lint.lint import lint_pair, refuse_errors
from appliance.drafts.promotion.crew import LeaseLostError
from appliance.drafts.promotion.evidence import Counts, Recent
from appliance.drafts.promotion.gate import NONE, short
from appliance.drafts.promotion.passage import EndedError, Passage
from appliance.drafts.promotion.promotion import Stage
from appliance.drafts.promotion.returning import return_workers
from appliance.drafts.promotion.trial import LEAST_WINDOWS, Rules, Trial, Verdict, handicaps
from appliance.drafts.promotion.trying import has_collapsed, try_out
from appliance.drafts.registry.revision import Revision
from appliance.drafts.registry.standing import read_standing
from appliance.errors import ApplianceError
from appliance.serving.restart_request import Candidate
from appliance.serving.weights import inspect_weights
from appliance.serving.worker import WorkerId

KEPT = 16
"""Drafts that served before and can be rolled back to."""


async def promote(passage: Passage, revision: Revision, recent: Recent) -> None:
    """
    Take a draft into service, or give everything back; returns when either is done.

    Args:
        passage: the promotion, just begun.
        revision: the draft.
        recent: what workers counted lately.

    Raises:
        LeaseLostError: this gateway does not steer any more; whoever does gives it back.
    """
    recycler, title = passage.crew.recycler, passage.promotion.title
    try:
        recycler.reserve(title)
        await _promote(passage, revision, recent)
    except LeaseLostError:
        raise
    except EndedError as end:
        ended = end
    except (ApplianceError, OSError) as error:
        ended = EndedError(Stage.FAILED, " ".join(str(error).split()))
    except Exception as defect:
        # A defect here must leave no worker with a draft that nobody decided on.
        passage.parts.logger.exception("promotion_failed", error=type(defect).__name__)
        ended = EndedError(Stage.FAILED, f"a defect: {type(defect).__name__}")
    else:
        recent.forget()
        return
    finally:
        recycler.release(title)
    await abandon(passage, ended)
    recent.forget()


async def abandon(passage: Passage, ended: EndedError) -> None:
    """
    Give everything back, and end the promotion.

    Args:
        passage: the promotion.
        ended: what it will have been, and why.

    Raises:
        LeaseLostError: this gateway does not steer any more.
    """
    step = {Stage.REFUSED: "refused", Stage.FAILED: "failed"}.get(ended.outcome, "interrupted")
    await passage.gave_up(step, ended.reason, ended.actor)
    await passage.surely(
        lambda: passage.move(Stage.RETURNING, ended.reason, outcome=ended.outcome, reason=ended.reason)
    )
    await give_back(passage, actor=ended.actor)


async def give_back(passage: Passage, *, actor: str | None = None) -> None:
    """
    Return every worker to the draft in service, and end a promotion or a rollback that is `returning`.

    Args:
        passage: the promotion.
        actor: who wanted that; by default whoever began it.

    Raises:
        LeaseLostError: this gateway does not steer any more.
    """
    await passage.surely(passage.settle)
    actor = actor or passage.promotion.actor
    await return_workers(passage, actor)
    promotion = passage.promotion
    if promotion.kind == "promotion" and promotion.workers:
        await passage.note(
            EntryType.DRAFT_ROLLED_BACK,
            model=promotion.model,
            draft=promotion.incumbent or NONE,
            previous_draft=promotion.draft,
            reason=promotion.reason or "it was given back",
            actor=actor,
        )
    outcome = promotion.outcome or Stage.FAILED
    await passage.surely(lambda: passage.move(outcome, f"draft {short(promotion.incumbent)} is in service"))


async def finish(passage: Passage) -> None:
    """Note on disk that it is in service: the standing says so, and a crash came between."""
    await passage.surely(lambda: passage.move(Stage.PROMOTED, "in service; noted by the next gateway"))


async def _promote(passage: Passage, revision: Revision, recent: Recent) -> None:
    promotion, parts = passage.promotion, passage.parts
    await asyncio.to_thread(_check_weights, passage, revision)
    canary = WorkerId(promotion.canary or "")
    trial = _trial(passage, canary, recent)
    await passage.move(Stage.CANARY, f"worker {canary} gets it first", workers=(canary,))
    await passage.decide(promotion=promotion.promotion_id, candidate=promotion.draft)
    await _equip(passage, canary)
    equipped = passage.crew.pool.snapshot(canary)
    await passage.tried("canary", worker=canary)
    await passage.move(Stage.TRIAL, f"worker {canary} serves with it")
    judgement = await try_out(passage, canary, trial.beginning(passage.crew.clock()), equipped)
    await passage.tried("trial", worker=canary, **judgement.numbers.audit_fields())
    if judgement.verdict is not Verdict.PASSED:
        raise EndedError(Stage.REFUSED, judgement.reason)
    await passage.move(Stage.ROLLOUT, judgement.reason)
    await _roll_out(passage)
    standing = await asyncio.to_thread(read_standing, parts.directory, promotion.target)
    known = {
        "previous_draft": promotion.incumbent,
        "evaluation": (promotion.evaluation or "").removeprefix("sha256:"),
    }
    # Recorded before it is so: a log that takes no entry changes nothing, and all is given back.
    await parts.record(
        EntryType.DRAFT_PROMOTED,
        model=promotion.model,
        draft=promotion.draft,
        actor=promotion.actor,
        **{name: value for name, value in known.items() if value},
    )
    previous = (standing.draft, *standing.previous)[:KEPT]
    await passage.decide(draft=promotion.draft, previous=previous, promotion=None, candidate=None)
    # From here on it is in service, whatever happens: the next gateway would only note it.
    text = f"in service on {len(passage.promotion.workers)} workers"
    await passage.surely(lambda: passage.move(Stage.PROMOTED, text))


def _check_weights(passage: Passage, revision: Revision) -> None:
    """Read the whole draft, and judge it against the target where that is on this machine."""
    path = passage.parts.open_registry().weights(revision)
    local = passage.parts.local
    if local is not None and local.digest == revision.target:
        pair = inspect_weights(local.path), inspect_weights(path)
        refuse_errors(lint_pair(*pair, context=local.context), path)


def _trial(passage: Passage, canary: WorkerId, recent: Recent) -> Trial:
    """The trial as it will begin, with what is known from before; nothing of that can be measured later."""
    chosen = passage.parts.drafts
    rules = Rules(drafts=chosen.trial_drafts, seconds=chosen.trial_seconds, margin=chosen.trial_margin)
    members = passage.crew.members(passage.promotion.target)
    mates = [seen.worker.worker_id for seen in members if seen.worker.worker_id != canary]
    before: Counts = recent.counts((canary,))
    if mates:
        return Trial(rules=rules, handicaps=handicaps(before, recent.counts(mates)))
    if before.drafts < LEAST_WINDOWS * rules.window:
        reason = (
            f"worker {canary} is the only one, and made {before.drafts} drafts of late: too few to compare "
            f"with; begin once it made {LEAST_WINDOWS * rules.window} in ten minutes"
        )
        raise EndedError(Stage.REFUSED, reason)
    return Trial(rules=rules, reference=before)


async def _equip(passage: Passage, worker_id: WorkerId) -> None:
    """Restart a worker with the draft, and insist that it came back with it."""
    promotion = passage.promotion
    result = await passage.crew.restart_when_free(
        worker_id,
        promotion,
        actor=promotion.actor,
        candidate=Candidate(draft=promotion.draft, promotion=promotion.promotion_id),
        seconds=passage.parts.recycle.start_seconds,
        waiting=passage.wait_willingly_for,
    )
    if result is not RecycleResult.RECYCLED:
        reason = f"worker {worker_id} did not come back with it ({result}): its log says why"
        raise EndedError(Stage.FAILED, reason)
    passage.heed_stop()


async def _roll_out(passage: Passage) -> None:
    """Give it to the other workers, one at a time, also to those that join meanwhile."""
    while True:
        passage.heed_stop()
        draft = passage.promotion.draft
        members = passage.crew.members(passage.promotion.target)
        failing = [seen for seen in members if seen.draft == draft and has_collapsed(seen)]
        if failing and not all(map(has_collapsed, members)):
            worker = failing[0].worker.worker_id
            raise EndedError(Stage.REFUSED, f"its drafts collapsed on worker {worker}")
        left = [seen for seen in members if seen.draft != draft]
        if not left:
            return
        # One that takes no requests first: while it does not, no other may be restarted.
        worker_id = min(left, key=lambda seen: seen.takes_requests).worker.worker_id
        workers = tuple(dict.fromkeys((*passage.promotion.workers, worker_id)))
        await passage.move(Stage.ROLLOUT, f"worker {worker_id} gets it", workers=workers)
        await _equip(passage, worker_id)
        await passage.tried("rollout", worker=worker_id)
