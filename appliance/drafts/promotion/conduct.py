"""
The stages of a promotion, and the way back.

    candidate named ─► canary worker ─► trial ─► rollout ─► active draft changed
           └─────────────────┴────────────┴─────────┴─► candidate removed ─► workers rolled back

What a crash leaves: up to the last step the former draft is the active one, so every worker that starts
gets it; the promotion's file names the workers that still run the new draft (`promoter`).  After the last
step the new draft is active, and only the promotion's file does not say so yet.
"""

import asyncio
from dataclasses import dataclass, replace

from appliance.audit.entry_types import EntryType
from appliance.control.recycle import RecycleResult
from appliance.drafts.lint.lint import lint_pair, refuse_errors
from appliance.drafts.promotion.promotion import NONE, PromotionStage, short
from appliance.drafts.promotion.promotion_run import (
    POLL_SECONDS,
    RETRY_SECONDS,
    EndedError,
    LeaseLostError,
    PromotionRun,
    restored,
)
from appliance.drafts.promotion.trial import (
    LEAST_WINDOWS,
    Trial,
    TrialJudgement,
    TrialRules,
    TrialVerdict,
    follow,
    handicaps,
    judge,
)
from appliance.drafts.promotion.trial_counts import RecentCounts, WorkerCounters
from appliance.drafts.registry.active_draft import read_active_draft
from appliance.drafts.registry.revision import Revision
from appliance.errors import ApplianceError, ControlRefusedError
from appliance.serving.restart_request import CandidateDraft
from appliance.serving.weights import inspect_weights
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason

KEPT = 16
"""Former drafts that a rollback can go back to."""
SILENT_SECONDS = 10.0
"""An unhealthy canary worker counts as dead after this time."""
ABSENT_SECONDS = 60.0
"""How long to wait for a worker that is not in the pool: a new gateway may not have discovered it yet."""


async def promote(run: PromotionRun, revision: Revision, recent: RecentCounts) -> None:
    recycler, title = run.parts.recycler, run.promotion.title
    try:
        recycler.reserve(title)
        await _promote(run, revision, recent)
    except LeaseLostError:
        raise
    except EndedError as end:
        ended = end
    except (ApplianceError, OSError) as error:
        ended = EndedError(PromotionStage.FAILED, " ".join(str(error).split()))
    except Exception as defect:
        # A defect here must leave no worker with a draft that was not decided on.
        run.parts.logger.exception("promotion_failed", error=type(defect).__name__)
        ended = EndedError(PromotionStage.FAILED, f"a defect: {type(defect).__name__}")
    else:
        recent.forget()
        return
    finally:
        recycler.release(title)
    await abandon(run, ended)
    recent.forget()


async def abandon(run: PromotionRun, ended: EndedError) -> None:
    outcome, reason = ended.outcome, ended.reason
    step = str(outcome) if outcome in {PromotionStage.REFUSED, PromotionStage.FAILED} else "interrupted"
    await run.record_ended(step, reason, ended.actor)
    await run.move_with_retry(PromotionStage.RETURNING, reason, outcome=outcome, reason=reason)
    await roll_back(run, actor=ended.actor)


async def roll_back(run: PromotionRun, *, actor: str | None = None) -> None:
    """Restart every worker with the draft in service, and end a promotion or rollback that is `returning`."""
    # From here on workers start without the draft.
    await run.retry_until_done(lambda: run.change_active(lambda active: restored(active, run.promotion)))
    actor = actor or run.promotion.actor
    await roll_back_workers(run, actor)
    promotion = run.promotion
    if promotion.kind == "promotion" and promotion.workers:
        await run.record_best_effort(
            EntryType.DRAFT_ROLLED_BACK,
            model=promotion.model,
            draft=promotion.incumbent or NONE,
            previous_draft=promotion.draft,
            reason=promotion.reason or "it was rolled back",
            actor=actor,
        )
    outcome = promotion.outcome or PromotionStage.FAILED
    await run.move_with_retry(outcome, f"draft {short(promotion.incumbent)} is in service")


async def _promote(run: PromotionRun, revision: Revision, recent: RecentCounts) -> None:
    promotion = run.promotion
    await asyncio.to_thread(_check_weights, run, revision)
    canary = WorkerId(promotion.canary or "")
    trial = _trial(run, canary, recent)
    await run.move(PromotionStage.CANARY, f"worker {canary} gets it first", workers=(canary,))
    await run.change_active(
        lambda active: replace(active, promotion=promotion.promotion_id, candidate=promotion.draft)
    )
    await _equip(run, canary)
    equipped = run.parts.pool.snapshot(canary)
    await run.record_tried("canary", worker=canary)
    await run.move(PromotionStage.TRIAL, f"worker {canary} serves with it")
    judgement = await run_canary(run, canary, replace(trial, began=run.parts.clock()), equipped)
    await run.record_tried("trial", worker=canary, **judgement.numbers.audit_fields())
    if judgement.verdict is not TrialVerdict.PASSED:
        raise EndedError(PromotionStage.REFUSED, judgement.reason)
    await run.move(PromotionStage.ROLLOUT, judgement.reason)
    await _roll_out(run)
    active = await asyncio.to_thread(read_active_draft, run.parts.directory, promotion.target)
    evaluation = (promotion.evaluation or "").removeprefix("sha256:")
    known = {"previous_draft": promotion.incumbent, "evaluation": evaluation}
    # Recorded before it takes effect: if the log refuses the entry, nothing changes and all is rolled back.
    await run.parts.record(
        EntryType.DRAFT_PROMOTED,
        model=promotion.model,
        draft=promotion.draft,
        actor=promotion.actor,
        **{name: value for name, value in known.items() if value},
    )
    previous = (active.draft, *active.previous)[:KEPT]
    await run.change_active(
        lambda active: replace(
            active, draft=promotion.draft, previous=previous, promotion=None, candidate=None
        )
    )
    # From here on it is in service, whatever happens: the next gateway would only note it.
    await run.move_with_retry(PromotionStage.PROMOTED, f"in service on {len(run.promotion.workers)} workers")


def _check_weights(run: PromotionRun, revision: Revision) -> None:
    path = run.parts.open_registry().weights(revision)
    local = run.parts.local
    if local is not None and local.digest == revision.target:
        pair = inspect_weights(local.path), inspect_weights(path)
        refuse_errors(lint_pair(*pair, context=local.context), path)


def _trial(run: PromotionRun, canary: WorkerId, recent: RecentCounts) -> Trial:
    """The trial with the counts from before any restart: none of them can be measured later."""
    drafts = run.parts.drafts
    rules = TrialRules(drafts=drafts.trial_drafts, seconds=drafts.trial_seconds, margin=drafts.trial_margin)
    mates = [seen.worker.worker_id for seen in run.members if seen.worker.worker_id != canary]
    before = recent.counts((canary,))
    if mates:
        return Trial(rules=rules, handicaps=handicaps(before, recent.counts(mates)))
    least = LEAST_WINDOWS * rules.window
    if before.drafts < least:
        made = f"worker {canary} is the only one, and made {before.drafts} drafts of late"
        reason = f"{made}: too few to compare with; begin once it made {least} in ten minutes"
        raise EndedError(PromotionStage.REFUSED, reason)
    return Trial(rules=rules, reference=before)


async def _equip(run: PromotionRun, worker_id: WorkerId) -> None:
    """Restart a worker with the draft as soon as the recycler allows it; `EndedError` if that fails."""
    promotion, parts = run.promotion, run.parts
    candidate = CandidateDraft(draft=promotion.draft, promotion=promotion.promotion_id)
    deadline = parts.clock() + parts.recycle.start_seconds
    while True:
        await run.ensure_acting()
        refused = run.refusal(worker_id)
        if refused is None:
            break
        run.raise_if_cancelled()
        run.set_waits(refused)
        if parts.clock() >= deadline:
            raise ControlRefusedError(refused)
        await parts.sleep(POLL_SECONDS)
    result = await run.restart(worker_id, actor=promotion.actor, candidate=candidate)
    if result is not RecycleResult.RECYCLED:
        reason = f"worker {worker_id} did not come back with it ({result}): its log says why"
        raise EndedError(PromotionStage.FAILED, reason)
    run.raise_if_cancelled()


async def run_canary(
    run: PromotionRun, canary: WorkerId, trial: Trial, equipped: WorkerSnapshot | None
) -> TrialJudgement:
    """
    Compare the canary worker with the others until the trial is decided or its time is up.

    `equipped` is the worker when it came back with the draft: another process must not replace it.  While the
    monitor keeps either side from drafting there is nothing to compare, and the trial waits.
    """
    epoch = equipped.reading.epoch if equipped is not None and equipped.reading is not None else ""
    mine, theirs, process = WorkerCounters(), WorkerCounters(), _CanaryProcess(canary, epoch)
    judgement, judged = judge(trial, trial.began), 0
    while True:
        await run.parts.sleep(POLL_SECONDS)
        await run.ensure_acting()
        run.raise_if_cancelled()
        now = run.parts.clock()
        seen = process.check(run, now)
        mates = _comparable(run, canary)
        if seen is not None and seen.reading is not None:
            mine.observe(canary, seen.reading)
            for mate in mates:
                if mate.reading is not None:
                    theirs.observe(mate.worker.worker_id, mate.reading)
        trial = follow(trial, mine.total(), theirs.total())
        if seen is not None and has_collapsed(seen) and not (mates and all(map(has_collapsed, mates))):
            run.promotion = replace(run.promotion, numbers=judge(trial, now).numbers)
            raise EndedError(PromotionStage.REFUSED, f"its drafts collapsed on worker {canary}")
        if len(trial.lengths) > judged or now - trial.began >= trial.rules.seconds:
            judgement, judged = judge(trial, now), len(trial.lengths)
        stopped = _stopped((seen, *mates) if seen is not None else mates)
        run.promotion = replace(run.promotion, numbers=judgement.numbers, waits=judgement.reason + stopped)
        if judgement.verdict is TrialVerdict.UNDECIDED:
            return replace(judgement, reason=judgement.reason + stopped)
        if judgement.verdict is not TrialVerdict.CONTINUE:
            return judgement


def has_collapsed(seen: WorkerSnapshot) -> bool:
    return seen.decision.verdict is Reason.COLLAPSED


@dataclass
class _CanaryProcess:
    """The canary worker's process, which must stay the same from its admission to the end of the trial."""

    _canary: WorkerId
    _epoch: str
    _silent_since: float | None = None

    def check(self, run: PromotionRun, now: float) -> WorkerSnapshot | None:
        """The worker now; None while it is unhealthy; raises `EndedError` if it restarted or is dead."""
        seen = run.parts.pool.snapshot(self._canary)
        if seen is None:
            raise EndedError(PromotionStage.FAILED, f"worker {self._canary} has left the pool")
        if not seen.healthy:
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since >= SILENT_SECONDS:
                raise EndedError(PromotionStage.FAILED, f"worker {self._canary}, which tries it, is down")
            return None
        self._silent_since = None
        if seen.reading is None or not seen.reading.epoch:
            return None
        if self._epoch not in {"", seen.reading.epoch} or seen.draft != run.promotion.draft:
            reason = f"worker {self._canary}, which tries it, has died and restarted"
            raise EndedError(PromotionStage.FAILED, reason)
        self._epoch = seen.reading.epoch
        return seen


def _comparable(run: PromotionRun, canary: WorkerId) -> tuple[WorkerSnapshot, ...]:
    return tuple(
        seen
        for seen in run.members
        if seen.worker.worker_id != canary and seen.healthy and seen.draft == run.promotion.incumbent
    )


def _stopped(seen: tuple[WorkerSnapshot, ...]) -> str:
    """The workers on which the monitor has stopped drafting, as a suffix of the reason."""
    stopped = [f"{each.worker.worker_id} ({each.decision.verdict})" for each in seen if each.decision.verdict]
    return f"; the monitor has stopped drafting on {', '.join(stopped)}" if stopped else ""


async def _roll_out(run: PromotionRun) -> None:
    """Restart the other workers with the draft, one at a time, including those that join meanwhile."""
    while True:
        run.raise_if_cancelled()
        draft = run.promotion.draft
        members = run.members
        failing = [seen for seen in members if seen.draft == draft and has_collapsed(seen)]
        if failing and not all(map(has_collapsed, members)):
            worker = failing[0].worker.worker_id
            raise EndedError(PromotionStage.REFUSED, f"its drafts collapsed on worker {worker}")
        left = [seen for seen in members if seen.draft != draft]
        if not left:
            return
        # A worker that takes no requests comes first: until it does, no other may be restarted.
        worker_id = min(left, key=lambda seen: seen.takes_requests).worker.worker_id
        workers = tuple(dict.fromkeys((*run.promotion.workers, worker_id)))
        await run.move(PromotionStage.ROLLOUT, f"worker {worker_id} gets it", workers=workers)
        await _equip(run, worker_id)
        await run.record_tried("rollout", worker=worker_id)


async def roll_back_workers(run: PromotionRun, actor: str) -> None:
    """Restart all workers that have the draft, one at a time; waits without limit until each may restart."""
    parts, began = run.parts, run.parts.clock()
    done: set[WorkerId] = set()
    not_before: dict[WorkerId, float] = {}
    while True:
        await run.ensure_acting()
        left = [
            seen.worker.worker_id
            for seen in run.members
            if seen.draft == run.promotion.draft and seen.worker.worker_id not in done
        ]
        absent = _absent(run, parts.clock() - began)
        if not left and not absent:
            return
        why = f"worker {absent[0]} is not back yet" if absent else None
        free: WorkerId | None = None
        for worker_id in left:
            refused = run.refusal(worker_id)
            if refused is not None:
                why = refused
            elif parts.clock() >= not_before.get(worker_id, began):
                free = worker_id
                break
        if free is None:
            run.set_waits(why)
            await parts.sleep(POLL_SECONDS)
        elif await _is_rolled_back(run, free, actor):
            done.add(free)
        else:
            not_before[free] = parts.clock() + RETRY_SECONDS


async def _is_rolled_back(run: PromotionRun, worker_id: WorkerId, actor: str) -> bool:
    """Whether one worker, restarted with the draft in service, is back with that draft or with none."""
    await run.move_with_retry(PromotionStage.RETURNING, f"worker {worker_id} is rolled back")
    try:
        result = await run.restart(worker_id, actor=actor, candidate=None)
    except ControlRefusedError:
        return False
    return result in {RecycleResult.RECYCLED, RecycleResult.WITHOUT_DRAFT}


def _absent(run: PromotionRun, seconds: float) -> list[str]:
    """Workers that were restarted with the draft and have not been seen healthy for `seconds`."""
    if seconds >= run.parts.recycle.start_seconds:
        return []  # a worker that starts from now on starts with the draft in service
    found: list[str] = []
    for name in run.promotion.workers:
        seen = run.parts.pool.snapshot(WorkerId(name))
        is_absent = seen is None and seconds < ABSENT_SECONDS
        if is_absent or (seen is not None and not seen.leaving and not (seen.healthy and seen.weights)):
            found.append(name)
    return found
