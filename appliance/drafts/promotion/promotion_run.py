"""
A promotion or rollback while it runs: its steps on disk and in the audit log, and the workers it restarts.

Every step is on disk (`promotions/<id>.json` in the registry) before it is taken: after a crash the file is
at most one step ahead, and ending the promotion is the same either way.

On the way into service an audit entry that cannot be written stops the promotion (fails closed); on the way
back it is logged and ignored (fails open), so that a full audit log keeps no bad draft in service.

Nothing is done without the control lease: coroutines here and in `conduct` raise `LeaseLostError` once this
gateway has lost it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.audit.entry import format_time
from appliance.audit.entry_types import EntryType
from appliance.control.recycle import Recycler, RecycleResult
from appliance.drafts.promotion.promotion import NONE, Promotion, PromotionStage, decode
from appliance.drafts.registry.active_draft import (
    ACTIVE_DRAFTS,
    ActiveDraft,
    read_active_draft,
    write_active_draft,
)
from appliance.drafts.registry.registry import DraftRegistry
from appliance.errors import ApplianceError, DraftStorageError
from appliance.infra.files import write_private
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import DraftSettings, RecycleSettings
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import CandidateDraft
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason

POLL_SECONDS = 0.5
RETRY_SECONDS = 15.0
"""Between two attempts of a step that failed and must be done."""
GRACE_SECONDS = 3.0
"""How long the control lease may be missing; shorter than any lease lasts."""
STORED = 100
"""Promotions on disk; older ones are in the audit log only."""


class LeaseLostError(Exception):
    """The next holder of the control lease finds the promotion on disk and ends it."""


class EndedError(Exception):
    """The promotion cannot continue and must be rolled back."""

    def __init__(self, outcome: PromotionStage, reason: str, actor: str | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.actor = actor


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTarget:
    """Target weights on this machine: drafts are linted against them before any worker is restarted."""

    digest: str
    path: Path
    context: int | None
    """Maximum context that is served; None for the target's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionParts:
    pool: WorkerPool
    recycler: Recycler
    is_acting: Callable[[], bool]
    """Whether this gateway holds the control lease."""
    clock: Callable[[], float]
    """Monotonic seconds, also those of `sleep`."""
    sleep: Callable[[float], Awaitable[object]]
    directory: Path
    """Of the registry."""
    open_registry: Callable[[], DraftRegistry]
    record: Callable[..., Awaitable[Any]]
    """Appends an audit entry (type, fields); returns once it is durable, raises `AuditError`."""
    drafts: DraftSettings
    recycle: RecycleSettings
    wall_clock: Callable[[], float]
    """Unix seconds."""
    metrics: Metrics
    logger: Logger
    local: LocalTarget | None = None

    def now(self) -> str:
        """RFC 3339."""
        return format_time(int(self.wall_clock() * 1000))

    def members(self, target: str) -> tuple[WorkerSnapshot, ...]:
        """The workers that report this target; a worker without our plugin reports none."""
        return tuple(seen for seen in self.pool.snapshots if seen.weights == target and not seen.leaving)


class PromotionStore:
    """The promotions of one registry; for one thread at a time.  Its methods raise `DraftStorageError`."""

    def __init__(self, directory: Path) -> None:
        self._registry = directory
        self._directory = directory / "promotions"

    def write(self, promotion: Promotion) -> None:
        path = self._path(promotion.promotion_id)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, promotion.encode() + "\n")
        except OSError as error:
            raise DraftStorageError(f"cannot write {path} ({error.strerror}): make room there") from error

    def list(self) -> tuple[tuple[Promotion, ...], tuple[str, ...]]:
        """The promotions, newest first, and the names of damaged files."""
        try:
            # Ids begin with the time, so their order is chronological.
            files = sorted(self._directory.glob("*.json"), reverse=True)
        except OSError as error:
            message = f"cannot read {self._directory} ({error.strerror}): give this account access to it"
            raise DraftStorageError(message) from error
        found: list[Promotion] = []
        unreadable: list[str] = []
        for file in files:
            try:
                found.append(decode(file.read_text(encoding="utf-8")))
            except (OSError, ValueError, RecursionError):
                unreadable.append(file.name)
        return tuple(found), tuple(unreadable)

    def prune(self) -> None:
        """Delete the oldest that are over; raises `OSError` too."""
        promotions, _ = self.list()
        for promotion in promotions[STORED:]:
            if promotion.is_over:
                self._path(promotion.promotion_id).unlink(missing_ok=True)

    def clear_orphaned_promotions(self, known: Collection[str]) -> tuple[str, ...]:
        """Remove promotions not in `known` from active-draft files; return those changed or damaged."""
        changed: list[str] = []
        for file in sorted((self._registry / ACTIVE_DRAFTS).glob("*.json")):
            try:
                active = read_active_draft(self._registry, f"sha256:{file.stem}")
            except DraftStorageError:
                # Damaged: a worker falls back to the draft of its settings.
                changed.append(file.name)
                continue
            # Without its own file a promotion never ends: workers would keep starting with its draft.
            if active.promotion is not None and active.promotion not in known:
                write_active_draft(self._registry, replace(active, promotion=None, candidate=None))
                changed.append(file.name)
        return tuple(changed)

    def _path(self, promotion_id: str) -> Path:
        return self._directory / f"{promotion_id}.json"


class PromotionRun:
    def __init__(self, parts: PromotionParts, promotion: Promotion) -> None:
        self.parts = parts
        self.promotion = promotion
        """Current state; `waits` and `numbers` are newer than on disk."""
        self._store = PromotionStore(parts.directory)
        self._cancelled: EndedError | None = None

    @property
    def members(self) -> tuple[WorkerSnapshot, ...]:
        return self.parts.members(self.promotion.target)

    def refusal(self, worker_id: WorkerId) -> str | None:
        """Why a worker may not be restarted now; None if it may."""
        title, allow_downtime = self.promotion.title, self.promotion.allow_downtime
        return self.parts.recycler.refusal(worker_id, holder=title, allow_downtime=allow_downtime)

    async def ensure_acting(self) -> None:
        """Wait for the lease for `GRACE_SECONDS`, then raise `LeaseLostError`."""
        deadline = self.parts.clock() + GRACE_SECONDS
        while not self.parts.is_acting():
            if self.parts.clock() >= deadline:
                raise LeaseLostError
            await self.parts.sleep(POLL_SECONDS)

    async def restart(
        self, worker_id: WorkerId, *, actor: str, candidate: CandidateDraft | None
    ) -> RecycleResult:
        """Restart one worker, with the draft in service if `candidate` is None."""
        task = self.parts.recycler.begin(
            worker_id,
            with_draft=True,
            reason=Reason.OPERATOR_OVERRIDE,
            actor=actor,
            note=self.promotion.title,
            candidate=candidate,
            holder=self.promotion.title,
            allow_downtime=self.promotion.allow_downtime,
        )
        # `wait` does not pass a cancellation on: a restart is never left half done.
        await asyncio.wait({task})
        return RecycleResult.CANCELLED if task.cancelled() else task.result()

    def cancel(self, reason: str, actor: str) -> None:
        """Roll it back at its next step."""
        self._cancelled = EndedError(PromotionStage.ROLLED_BACK, reason, actor)

    def raise_if_cancelled(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    def set_waits(self, what: str | None) -> None:
        self.promotion = replace(self.promotion, waits=what)

    async def move(self, stage: PromotionStage, text: str, **changes: Any) -> None:  # noqa: ANN401 - as `replace`
        """Write the next step to disk; if that raises `DraftStorageError`, it must not be taken."""
        moved = self.promotion.moved(stage, text, self.parts.now(), **changes)
        await asyncio.to_thread(self._store.write, moved)
        self.promotion = moved
        self.count_stage()
        self.parts.logger.info("promotion_moved", state=stage, detail=f"{moved.title}: {text}")

    def count_stage(self) -> None:
        self.parts.metrics.draft_promotion_steps.labels(self.promotion.stage).inc()

    async def retry_until_done(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step while the disk refuses it."""
        while True:
            await self.ensure_acting()
            try:
                await step()
            except DraftStorageError as error:
                self.parts.logger.error("promotion_step_retried", error=str(error))  # noqa: TRY400 - one line says it
                self.set_waits(str(error))
                await self.parts.sleep(RETRY_SECONDS)
            else:
                return

    async def move_with_retry(self, stage: PromotionStage, text: str, **changes: Any) -> None:  # noqa: ANN401 - as `replace`
        await self.retry_until_done(lambda: self.move(stage, text, **changes))

    async def change_active(self, change: Callable[[ActiveDraft], ActiveDraft]) -> None:
        """Change which draft is in service or on trial; nothing changed if it raises `DraftStorageError`."""
        await self.ensure_acting()
        await asyncio.to_thread(self._change_active, change)

    async def record_tried(self, step: str, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        """Record a step on the way into service; raises `AuditError`: then it must not be taken."""
        await self.parts.record(EntryType.DRAFT_TRIED, **self._fields(step), **fields)

    async def record_ended(self, step: str, reason: str, actor: str | None) -> None:
        """Record that it ends without success, best effort."""
        fields = self._fields(step) | self.promotion.numbers.audit_fields() | {"reason": reason}
        await self.record_best_effort(EntryType.DRAFT_TRIED, **fields | ({"actor": actor} if actor else {}))

    async def record_best_effort(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        try:
            await self.parts.record(entry_type, **fields)
        except ApplianceError as error:
            self.parts.logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))

    def _change_active(self, change: Callable[[ActiveDraft], ActiveDraft]) -> None:
        active = read_active_draft(self.parts.directory, self.promotion.target)
        if (changed := change(active)) != active:
            write_active_draft(self.parts.directory, changed)

    def _fields(self, step: str) -> dict[str, Any]:
        return {
            "promotion": self.promotion.promotion_id,
            "step": step,
            "draft": self.promotion.draft,
            "actor": self.promotion.actor,
            "previous_draft": self.promotion.incumbent or NONE,
        }


def restored(active: ActiveDraft, promotion: Promotion) -> ActiveDraft:
    """The active draft without a failed promotion, or after a rollback; idempotent."""
    if promotion.kind == "promotion":
        if active.promotion != promotion.promotion_id:
            return active
        return replace(active, promotion=None, candidate=None)
    if active.draft != promotion.draft:
        return active
    former = promotion.incumbent or None
    at = active.previous.index(former) + 1 if former in active.previous else len(active.previous)
    return replace(active, draft=former, previous=active.previous[at:], promotion=None, candidate=None)
