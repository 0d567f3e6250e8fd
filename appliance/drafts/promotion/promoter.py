"""
Promotions and rollbacks of the gateway that steers: begins them, and ends what another gateway left.

One at a time.  Whoever takes the control lease over looks for promotions that are not over: whoever ran
them is gone, or has lost the lease and does nothing any more.  Such a promotion is not resumed but given
back: its trial is broken off, and the draft in service has never stopped being that.  A rollback is
carried on, since it is on the way to where it wants to be.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from appliance.audit.registry import EntryType
from appliance.drafts.evaluation.report import Evaluation
from appliance.drafts.evaluation.store import load_evaluation
from appliance.drafts.promotion.conduct import abandon, finish, give_back, promote
from appliance.drafts.promotion.crew import LeaseLostError
from appliance.drafts.promotion.evidence import Recent
from appliance.drafts.promotion.gate import (
    NONE,
    before,
    check_evaluation,
    choose_canary,
    incumbent_of,
    own_draft,
    short,
    target_of,
)
from appliance.drafts.promotion.passage import RETRY_SECONDS, EndedError, Passage, PassageParts
from appliance.drafts.promotion.promotion import Promotion, Stage
from appliance.drafts.promotion.store import PromotionStore
from appliance.drafts.promotion.strays import clear_strays
from appliance.drafts.registry.revision import Revision
from appliance.drafts.registry.standing import Standing, read_standing
from appliance.errors import (
    ConfigurationError,
    ControlRefusedError,
    DraftRefusedError,
    DraftStorageError,
)
from appliance.serving.worker import WorkerSnapshot

LOOK_SECONDS = 1.0
SHOWN = 10
"""Promotions that are shown, the newest."""


class Promoter:
    """The promotions of one gateway."""

    def __init__(
        self,
        parts: PassageParts,
        *,
        new_id: Callable[[], str],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        Prepare; nothing runs before `run`.

        Args:
            parts: what to work with.
            new_id: makes ids that sort by time.
            sleep: waits, in seconds of the clock of `parts.crew`.
        """
        self._parts = parts
        self._crew = parts.crew
        self._new_id = new_id
        self._sleep = sleep
        self._store = PromotionStore(parts.directory)
        self._recent = Recent()
        self._passage: Passage | None = None
        self._task: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._has_taken_up = self._is_stopped = False
        self._trouble: str | None = None
        for stage in Stage:
            parts.metrics.draft_promotion_steps.labels(stage)  # a first of a new series is no rise
        parts.metrics.draft_promotion_running.set_function(lambda: self._running() is not None)

    async def run(self) -> None:
        """Look at the workers, and end what another gateway left, until cancelled."""
        try:
            while True:
                try:
                    await self._tick()
                except Exception as defect:
                    # A defect here must not end the gateway; the draft in service is what it was.
                    self._parts.logger.exception("promotion_failed", error=type(defect).__name__)
                await self._sleep(LOOK_SECONDS)
        finally:
            await asyncio.shield(self.stop())

    async def stop(self) -> None:
        """Leave what is under way as it is, for good: the next gateway that steers ends it."""
        self._is_stopped = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def promote(
        self, name: str, *, actor: str, without_evaluation: str | None, allow_downtime: bool
    ) -> Promotion:
        """
        Begin to take a draft into service; returns once that is on disk and in the audit log.

        Args:
            name: its digest, or the beginning of it.
            actor: who wants it.
            without_evaluation: why it may be tried although no evaluation lets it; None where one must.
            allow_downtime: whether a model may be without a worker meanwhile.

        Raises:
            ControlRefusedError: this gateway does not steer, something is under way, or no worker may be
                restarted now.
            DraftNotFoundError: no draft has this name.
            DraftRefusedError: signature or evaluation are against it, or it is in service already.
            DraftStorageError: the registry cannot be read or written.
            AuditError: the log takes no entry.
        """
        async with self._begin():
            revision, standing = await asyncio.to_thread(self._find, name)
            members = self._crew.members(revision.target)
            incumbent = incumbent_of(standing, members)
            self._refuse_needless(revision, incumbent, members)
            evaluation: str | None = None
            if without_evaluation is None:
                report = await asyncio.to_thread(self._evaluation, revision)
                evaluation = check_evaluation(revision, report, incumbent)
            canary = choose_canary(
                members, lambda worker: self._crew.recycler.refusal(worker, allow_downtime=allow_downtime)
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
                stage=Stage.BEGUN,
                evaluation=evaluation,
                without_evaluation=without_evaluation,
                allow_downtime=allow_downtime,
                canary=canary,
            )
            promotion = begun.moved(Stage.BEGUN, _begun_text(begun), self._parts.now())
            passage = Passage(self._parts, promotion)
            why = (
                {} if without_evaluation is None else {"reason": f"without evaluation: {without_evaluation}"}
            )
            await passage.tried("begun", **why)
            try:
                await asyncio.to_thread(self._store.write, promotion)
            except DraftStorageError as error:
                await passage.gave_up("failed", str(error), None)
                raise
            passage.count()
            self._start(passage, promote(passage, revision, self._recent))
            return promotion

    async def roll_back(
        self, *, to: str | None, reason: str, actor: str, model: str | None, allow_downtime: bool
    ) -> Promotion:
        """
        Begin to take a draft out of service; a promotion that is under way is given back instead.

        Args:
            to: digest of a draft that served before, or its beginning; `none` for that of the settings;
                None for the one that served last.
            reason: why.
            actor: who wants it.
            model: a name of the target, where several are served.
            allow_downtime: whether a model may be without a worker meanwhile.

        Raises:
            ControlRefusedError: this gateway does not steer, or there is nothing to go back to.
            DraftNotFoundError: none that served before has this name.
            DraftStorageError: the registry cannot be read or written.
            AuditError: the log takes no entry.
        """
        running = self._running()
        if running is not None and running.promotion.stage is not Stage.RETURNING:
            self._insist_on_acting()
            if to is not None:
                message = f"{running.promotion.title} is under way: roll back without --to to end it first"
                raise ControlRefusedError(message)
            running.stop(reason, actor)
            return running.promotion
        async with self._begin():
            target = target_of(self._crew.pool.snapshots, model)
            standing = await asyncio.to_thread(read_standing, self._parts.directory, target)
            wanted = before(standing, to)
            known, _ = await asyncio.to_thread(self._store.list)
            members = self._crew.members(target)
            began = self._parts.now()
            begun = Promotion(
                promotion_id=self._new_id(),
                kind="rollback",
                target=target,
                model=_model_of(members),
                draft=standing.draft or "",
                incumbent=wanted or "",
                actor=actor,
                began=began,
                stage=Stage.RETURNING,
                allow_downtime=allow_downtime,
                outcome=Stage.ROLLED_BACK,
                reason=reason,
            )
            promotion = begun.moved(
                Stage.RETURNING, f"draft {short(begun.draft)} is taken out: {reason}", began
            )
            # Recorded before it is so, as every order; a rollback of a promotion is not.
            await self._parts.record(
                EntryType.DRAFT_ROLLED_BACK,
                model=promotion.model,
                draft=wanted or own_draft(standing, known) or NONE,
                previous_draft=promotion.draft,
                reason=reason,
                actor=actor,
            )
            await asyncio.to_thread(self._store.write, promotion)
            passage = Passage(self._parts, promotion)
            passage.count()
            self._start(passage, give_back(passage))
            return promotion

    async def promotions(self) -> tuple[Promotion, ...]:
        """
        The newest promotions and rollbacks, the newest first; of one under way, as it is this moment.

        Raises:
            DraftStorageError: the registry cannot be read.
        """
        kept, _ = await asyncio.to_thread(self._store.list)
        running = self._running()
        live = running.promotion if running is not None else None
        return tuple(
            live if live is not None and live.promotion_id == each.promotion_id else each
            for each in kept[:SHOWN]
        )

    async def standings(self) -> tuple[Standing, ...]:
        """
        What serves each target that workers here say they serve.

        Raises:
            DraftStorageError: the registry cannot be read.
        """
        targets = sorted({seen.weights for seen in self._crew.pool.snapshots if seen.weights})
        return tuple(
            [await asyncio.to_thread(read_standing, self._parts.directory, target) for target in targets]
        )

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        """Every worker, with the drafts they say they have."""
        return self._crew.pool.snapshots

    @property
    def is_acting(self) -> bool:
        """Whether this gateway steers, so that promotions can be begun here."""
        return self._crew.is_acting()

    def _find(self, name: str) -> tuple[Revision, Standing]:
        try:
            registry = self._parts.open_registry()
        except ConfigurationError as error:
            raise DraftStorageError(str(error)) from error
        revision = registry.find(name)
        return revision, read_standing(self._parts.directory, revision.target)

    def _evaluation(self, revision: Revision) -> Evaluation | None:
        return load_evaluation(self._parts.directory, revision.digest)

    @staticmethod
    def _refuse_needless(revision: Revision, incumbent: str, members: tuple[WorkerSnapshot, ...]) -> None:
        if not members:
            message = f"no worker here says that it serves the target of draft {short(revision.digest)}"
            raise ControlRefusedError(message)
        if revision.digest == incumbent:
            raise DraftRefusedError(f"draft {short(revision.digest)} is in service already")
        if not incumbent:
            message = (
                "no worker drafts now, so there is nothing to compare a draft with: name it in worker.draft"
            )
            raise ControlRefusedError(message)

    def _begin(self) -> "_Beginning":
        """Let one order at a time begin something, and none while something is under way."""
        self._insist_on_acting()
        running = self._running()
        if running is not None:
            message = f"{running.promotion.title} is under way: wait until that is done, or roll it back"
            raise ControlRefusedError(message)
        if self._beginning.locked() or self._is_stopped or not self._has_taken_up:
            message = "promotions are being begun, taken up or ended: try again in a moment"
            raise ControlRefusedError(message)
        return _Beginning(self._beginning)

    def _insist_on_acting(self) -> None:
        if not self._crew.is_acting():
            message = "This gateway does not steer; ask the one that does, or see monitor.control."
            raise ControlRefusedError(message)

    def _running(self) -> Passage | None:
        return self._passage if self._task is not None and not self._task.done() else None

    def _start(self, passage: Passage, work: Coroutine[Any, Any, None]) -> None:
        self._passage = passage
        self._task = asyncio.get_running_loop().create_task(self._guard(passage, work))

    async def _guard(self, passage: Passage, work: Coroutine[Any, Any, None]) -> None:
        """Carry it through; what is left of it when that fails is taken up again."""
        try:
            await work
        except LeaseLostError:
            self._has_taken_up = False
            self._parts.logger.warning("promotion_left", detail=passage.promotion.title)
        except Exception as defect:
            # It is on disk as not over, so it is tried again; the draft in service is what it was.
            self._has_taken_up = False
            self._parts.logger.exception("promotion_failed", error=type(defect).__name__)
            await self._sleep(RETRY_SECONDS)

    async def _tick(self) -> None:
        self._look()
        is_busy = self._running() is not None or self._beginning.locked()
        if not self._crew.is_acting():
            self._has_taken_up = False
        elif not (self._has_taken_up or self._is_stopped or is_busy):
            await self._take_up()

    def _look(self) -> None:
        """Remember what workers count: after a change it is too late to ask how they were before."""
        readings = {
            seen.worker.worker_id: seen.reading
            for seen in self._crew.pool.snapshots
            if seen.healthy and seen.reading is not None
        }
        self._recent.saw(readings, self._crew.clock())

    async def _take_up(self) -> None:
        """End what is not over, oldest first, and clear what nobody will; again later where that fails."""
        try:
            promotions, unreadable = await asyncio.to_thread(self._store.list)
            left = [promotion for promotion in reversed(promotions) if not promotion.is_over]
            ids = frozenset(promotion.promotion_id for promotion in left)
            cleared = await asyncio.to_thread(clear_strays, self._parts.directory, ids)
            with suppress(OSError):
                await asyncio.to_thread(self._store.prune)
        except DraftStorageError as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                self._parts.logger.error("promotions_unreadable", error=str(error))  # noqa: TRY400 - one line
            return
        self._trouble, self._has_taken_up = None, True
        for name in (*unreadable, *cleared):
            self._parts.logger.warning("promotion_unreadable", path=name)
        if left:
            passage = Passage(self._parts, left[0])
            self._has_taken_up = len(left) == 1
            self._start(passage, self._end(passage))

    async def _end(self, passage: Passage) -> None:
        """End a promotion that another gateway left."""
        promotion = passage.promotion
        if promotion.stage is Stage.RETURNING:
            await give_back(passage)
            return
        standing = await asyncio.to_thread(read_standing, self._parts.directory, promotion.target)
        if standing.draft == promotion.draft and standing.promotion is None:
            await finish(passage)
            return
        await abandon(passage, EndedError(Stage.INTERRUPTED, "the gateway that ran it has ended"))


class _Beginning:
    """Holds a lock that is known to be free."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(self, *_reason: object) -> None:
        self._lock.release()


def _model_of(members: tuple[WorkerSnapshot, ...]) -> str:
    return next((served.name for seen in members for served in seen.models), "unknown")


def _begun_text(promotion: Promotion) -> str:
    basis = f"without evaluation: {promotion.without_evaluation}"
    if promotion.evaluation is not None:
        basis = f"on evaluation {short(promotion.evaluation)}"
    return f"draft {short(promotion.draft)} for {short(promotion.incumbent)}, {basis}"
