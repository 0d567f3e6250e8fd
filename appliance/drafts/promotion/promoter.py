"""
Begins promotions and rollbacks on the gateway that holds the control lease, and ends those another one left.

One at a time.  A gateway that gets the lease looks for promotions on disk that are not over: the gateway
that ran them is gone or lost the lease, and does nothing more.  Such a promotion is not resumed but rolled
back, since the draft in service never changed.  A rollback is continued.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from appliance.audit.entry_types import EntryType
from appliance.drafts.evaluation.evaluation_results import Evaluation
from appliance.drafts.evaluation.store import load_evaluation
from appliance.drafts.promotion.conduct import abandon, promote, roll_back
from appliance.drafts.promotion.promotion import (
    NONE,
    Promotion,
    PromotionStage,
    check_evaluation,
    choose_canary,
    incumbent_of,
    own_draft,
    rollback_draft,
    short,
    target_of,
)
from appliance.drafts.promotion.promotion_run import (
    RETRY_SECONDS,
    EndedError,
    LeaseLostError,
    PromotionParts,
    PromotionRun,
    PromotionStore,
)
from appliance.drafts.promotion.trial_counts import RecentCounts
from appliance.drafts.registry.active_draft import ActiveDraft, read_active_draft
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.revision import Revision
from appliance.errors import ConfigurationError, ControlRefusedError, DraftRefusedError, DraftStorageError
from appliance.infra.lease import require_lease
from appliance.serving.worker import WorkerSnapshot

POLL_SECONDS = 1.0
SHOWN = 10
SHOWN_DRAFTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredDrafts:
    drafts: tuple[tuple[Revision, Evaluation | None], ...]
    """The newest first, with the latest evaluation of each."""
    problems: tuple[str, ...]
    """A line per draft or evaluation that cannot be trusted or read."""
    omitted: int
    """Older drafts."""


class Promoter:
    def __init__(self, parts: PromotionParts, *, new_id: Callable[[], str]) -> None:
        """Ids that `new_id` makes sort by time."""
        self._parts = parts
        self._new_id = new_id
        self._store = PromotionStore(parts.directory)
        self._recent = RecentCounts()
        self._run: PromotionRun | None = None
        self._task: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._has_recovered = self._is_stopped = False
        self._trouble: str | None = None
        for stage in PromotionStage:
            # A series must exist before its first increase, or Prometheus does not see it.
            parts.metrics.draft_promotion_steps.labels(stage)
        parts.metrics.draft_promotion_running.set_function(lambda: self._running() is not None)

    async def run(self) -> None:
        """Count workers' drafts, and end what another gateway left, until cancelled."""
        try:
            while True:
                try:
                    await self._tick()
                except Exception as defect:
                    # A defect here must not end the gateway; the draft in service does not change.
                    self._parts.logger.exception("promotion_failed", error=type(defect).__name__)
                await self._parts.sleep(POLL_SECONDS)
        finally:
            await asyncio.shield(self.stop())

    async def stop(self) -> None:
        """Stop for good, in the middle of a promotion if need be: the next holder of the lease ends it."""
        self._is_stopped = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def promote(
        self, name: str, *, actor: str, without_evaluation: str | None, allow_downtime: bool
    ) -> Promotion:
        """
        Begin a promotion of the draft `name` (digest or prefix); returns once on disk and in the audit log.

        Without a passed evaluation it needs the reason `without_evaluation`.  Raises `ControlRefusedError`
        without the lease, during another promotion or if no worker may restart; `DraftError`; `AuditError`.
        """
        async with self._begin():
            revision, active = await asyncio.to_thread(self._find, name)
            members = self._parts.members(revision.target)
            incumbent = incumbent_of(active, members)
            _refuse_needless(revision, incumbent, members)
            evaluation: str | None = None
            basis = f"without evaluation: {without_evaluation}"
            if without_evaluation is None:
                report = await asyncio.to_thread(load_evaluation, self._parts.directory, revision.digest)
                evaluation = check_evaluation(revision, report, incumbent)
                basis = f"on evaluation {short(evaluation)}"
            canary = choose_canary(
                members, lambda worker: self._parts.recycler.refusal(worker, allow_downtime=allow_downtime)
            )
            begun = Promotion(
                promotion_id=self._new_id(),
                kind="promotion",
                target=revision.target,
                model=_model_of(members),
                draft=revision.digest,
                incumbent=incumbent,
                actor=actor,
                began=self._parts.now(),
                stage=PromotionStage.BEGUN,
                evaluation=evaluation,
                without_evaluation=without_evaluation,
                allow_downtime=allow_downtime,
                canary=canary,
            )
            text = f"draft {short(revision.digest)} for {short(incumbent)}, {basis}"
            promotion = begun.moved(PromotionStage.BEGUN, text, self._parts.now())
            run = PromotionRun(self._parts, promotion)
            await run.record_tried("begun", **({"reason": basis} if evaluation is None else {}))
            try:
                await asyncio.to_thread(self._store.write, promotion)
            except DraftStorageError as error:
                await run.record_ended("failed", str(error), None)
                raise
            run.count_stage()
            self._start(run, promote(run, revision, self._recent))
            return promotion

    async def roll_back(
        self, *, to: str | None, reason: str, actor: str, model: str | None, allow_downtime: bool
    ) -> Promotion:
        """Begin a rollback to `to` (see `rollback_draft`), or cancel the running promotion."""
        running = self._running()
        if running is not None and running.promotion.stage is not PromotionStage.RETURNING:
            require_lease(is_held=self.is_acting)
            if to is not None:
                message = f"{running.promotion.title} is running: roll back without --to to end it first"
                raise ControlRefusedError(message)
            running.cancel(reason, actor)
            return running.promotion
        async with self._begin():
            target = target_of(self._parts.pool.snapshots, model)
            active = await asyncio.to_thread(read_active_draft, self._parts.directory, target)
            former = rollback_draft(active, to)
            known, _ = await asyncio.to_thread(self._store.list)
            began = self._parts.now()
            begun = Promotion(
                promotion_id=self._new_id(),
                kind="rollback",
                target=target,
                model=_model_of(self._parts.members(target)),
                draft=active.draft or "",
                incumbent=former or "",
                actor=actor,
                began=began,
                stage=PromotionStage.RETURNING,
                allow_downtime=allow_downtime,
                outcome=PromotionStage.ROLLED_BACK,
                reason=reason,
            )
            text = f"draft {short(begun.draft)} is taken out: {reason}"
            promotion = begun.moved(PromotionStage.RETURNING, text, began)
            # Recorded before it takes effect, as every operator's order.
            await self._parts.record(
                EntryType.DRAFT_ROLLED_BACK,
                model=promotion.model,
                draft=former or own_draft(active, known) or NONE,
                previous_draft=promotion.draft,
                reason=reason,
                actor=actor,
            )
            await asyncio.to_thread(self._store.write, promotion)
            run = PromotionRun(self._parts, promotion)
            run.count_stage()
            self._start(run, roll_back(run))
            return promotion

    async def promotions(self, most: int = SHOWN) -> tuple[Promotion, ...]:
        """The newest first, the running one with its current numbers; raises `DraftStorageError`."""
        kept, _ = await asyncio.to_thread(self._store.list)
        running = self._running()
        live = {running.promotion.promotion_id: running.promotion} if running is not None else {}
        return tuple(live.get(each.promotion_id, each) for each in kept[:most])

    async def active_drafts(self) -> tuple[ActiveDraft, ...]:
        """The active draft of each target that a worker serves; raises `DraftStorageError`."""
        targets = sorted({seen.weights for seen in self.workers if seen.weights})
        return tuple(
            [await asyncio.to_thread(read_active_draft, self._parts.directory, target) for target in targets]
        )

    async def registered(self) -> RegisteredDrafts:
        """The newest drafts of the registry with their evaluations; raises `DraftStorageError`."""
        return await asyncio.to_thread(self._registered)

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        return self._parts.pool.snapshots

    @property
    def is_acting(self) -> bool:
        return self._parts.is_acting()

    def _open_registry(self) -> DraftRegistry:
        try:
            return self._parts.open_registry()
        except ConfigurationError as error:
            raise DraftStorageError(str(error)) from error

    def _registered(self) -> RegisteredDrafts:
        revisions, warnings = self._open_registry().survey()
        drafts, problems = [], list(warnings)
        for revision in reversed(revisions[-SHOWN_DRAFTS:]):
            evaluation = None
            try:
                evaluation = load_evaluation(self._parts.directory, revision.digest)
            except DraftRefusedError as error:
                problems.append(str(error))
            drafts.append((revision, evaluation))
        return RegisteredDrafts(
            drafts=tuple(drafts), problems=tuple(problems), omitted=len(revisions) - len(drafts)
        )

    def _find(self, name: str) -> tuple[Revision, ActiveDraft]:
        revision = self._open_registry().find(name)
        return revision, read_active_draft(self._parts.directory, revision.target)

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[None]:
        """Let one request at a time begin something, and none while a promotion runs."""
        require_lease(is_held=self.is_acting)
        running = self._running()
        if running is not None:
            message = f"{running.promotion.title} is running: wait until that is done, or roll it back"
            raise ControlRefusedError(message)
        if self._beginning.locked() or self._is_stopped or not self._has_recovered:
            message = "a promotion is about to begin, resume or end here: try again in a moment"
            raise ControlRefusedError(message)
        async with self._beginning:
            yield

    def _running(self) -> PromotionRun | None:
        return self._run if self._task is not None and not self._task.done() else None

    def _start(self, run: PromotionRun, work: Coroutine[Any, Any, None]) -> None:
        self._run = run
        self._task = asyncio.get_running_loop().create_task(self._guard(run, work))

    async def _guard(self, run: PromotionRun, work: Coroutine[Any, Any, None]) -> None:
        """Await the work; if it fails, the promotion is recovered from disk."""
        try:
            await work
        except LeaseLostError:
            self._has_recovered = False
            self._parts.logger.warning("promotion_lease_lost", detail=run.promotion.title)
        except Exception as defect:
            # On disk it is not over, so recovery tries again; the draft in service does not change.
            self._has_recovered = False
            self._parts.logger.exception("promotion_failed", error=type(defect).__name__)
            await self._parts.sleep(RETRY_SECONDS)

    async def _tick(self) -> None:
        # Counts from before a change cannot be measured afterwards.
        readings = {
            seen.worker.worker_id: seen.reading
            for seen in self.workers
            if seen.healthy and seen.reading is not None
        }
        self._recent.observe(readings, self._parts.clock())
        is_busy = self._running() is not None or self._beginning.locked()
        if not self.is_acting:
            self._has_recovered = False
        elif not (self._has_recovered or self._is_stopped or is_busy):
            await self._recover()

    async def _recover(self) -> None:
        """End what is not over, oldest first, and clear orphans; the next tick repeats it if it fails."""
        try:
            promotions, unreadable = await asyncio.to_thread(self._store.list)
            left = [promotion for promotion in reversed(promotions) if not promotion.is_over]
            ids = frozenset(promotion.promotion_id for promotion in left)
            cleared = await asyncio.to_thread(self._store.clear_orphaned_promotions, ids)
            with suppress(OSError):
                await asyncio.to_thread(self._store.prune)
        except DraftStorageError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                self._parts.logger.error("promotions_unreadable", error=str(error))  # noqa: TRY400 - one line
            return
        self._trouble, self._has_recovered = None, True
        for name in (*unreadable, *cleared):
            self._parts.logger.warning("promotion_unreadable", path=name)
        if left:
            run = PromotionRun(self._parts, left[0])
            self._has_recovered = len(left) == 1
            self._start(run, self._end(run))

    async def _end(self, run: PromotionRun) -> None:
        promotion = run.promotion
        if promotion.stage is PromotionStage.RETURNING:
            await roll_back(run)
            return
        active = await asyncio.to_thread(read_active_draft, self._parts.directory, promotion.target)
        if active.draft == promotion.draft and active.promotion is None:
            # It crashed between the change of the active draft and the note of that.
            await run.move_with_retry(PromotionStage.PROMOTED, "in service; noted by the next gateway")
            return
        await abandon(run, EndedError(PromotionStage.INTERRUPTED, "the gateway that ran it has ended"))


def _refuse_needless(revision: Revision, incumbent: str, members: tuple[WorkerSnapshot, ...]) -> None:
    if not members:
        raise ControlRefusedError(f"no worker reports the target of draft {short(revision.digest)}")
    if revision.digest == incumbent:
        raise DraftRefusedError(f"draft {short(revision.digest)} is in service already")
    if not incumbent:
        message = "no worker drafts now, so there is no draft to compare with: name one in worker.draft"
        raise ControlRefusedError(message)


def _model_of(members: tuple[WorkerSnapshot, ...]) -> str:
    return next((served.name for seen in members for served in seen.models), "unknown")
