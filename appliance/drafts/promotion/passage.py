"""
A promotion as it is now, on disk and in the audit log, and the means to take its next step.

Every step is on disk before it is taken.  Recording fails closed on the way in, and open on the way
back: a log that takes no entry keeps no bad draft in service.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from appliance.audit.entry import format_time
from appliance.audit.registry import EntryType
from appliance.drafts.promotion.crew import Crew
from appliance.drafts.promotion.gate import NONE
from appliance.drafts.promotion.promotion import Promotion, Stage
from appliance.drafts.promotion.store import PromotionStore
from appliance.drafts.registry.registry import DraftRegistry
from appliance.drafts.registry.standing import Standing, read_standing, write_standing
from appliance.errors import ApplianceError, DraftStorageError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import DraftSettings, RecycleSettings

RETRY_SECONDS = 15.0
"""Between two tries of something that has to be done and failed."""


class Record(Protocol):
    """Makes an entry durable, or fails with `AuditError`."""

    def __call__(self, entry_type: EntryType, /, **fields: Any) -> Awaitable[Any]:  # noqa: ANN401 - see the registry
        """Append one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTarget:
    """Target weights on this machine, to judge a draft by before any worker is touched."""

    digest: str
    path: Path
    context: int | None
    """Longest context that is served; None for the target's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageParts:
    """What promotions work with, built by the composition root."""

    crew: Crew
    directory: Path
    """Of the registry."""
    open_registry: Callable[[], DraftRegistry]
    record: Record
    drafts: DraftSettings
    recycle: RecycleSettings
    wall_clock: Callable[[], float]
    """Unix time."""
    metrics: Metrics
    logger: Logger
    local: LocalTarget | None = None

    def now(self) -> str:
        """The time as it is written down."""
        return format_time(int(self.wall_clock() * 1000))


class EndedError(Exception):
    """The promotion goes no further, and has to be given back."""

    def __init__(self, outcome: Stage, reason: str, actor: str | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason
        self.actor = actor
        """Who wanted that, where somebody did."""


class Passage:
    """One promotion, and what it takes to carry it on."""

    def __init__(self, parts: PassageParts, promotion: Promotion) -> None:
        """
        Prepare; nothing happens yet.

        Args:
            parts: what to work with.
            promotion: as it is on disk.
        """
        self.parts = parts
        self.promotion = promotion
        """As it is now; `waits` and `numbers` are newer than on disk."""
        self._store = PromotionStore(parts.directory)
        self._stop: EndedError | None = None

    @property
    def crew(self) -> Crew:
        """The workers."""
        return self.parts.crew

    def stop(self, reason: str, actor: str) -> None:
        """Have it given back at its next step."""
        self._stop = EndedError(Stage.ROLLED_BACK, reason, actor)

    def heed_stop(self) -> None:
        """
        Go on, unless somebody wants it given back.

        Raises:
            EndedError: somebody does.
        """
        if self._stop is not None:
            raise self._stop

    def wait_for(self, what: str | None) -> None:
        """Say what is waited for."""
        self.promotion = replace(self.promotion, waits=what)

    def wait_willingly_for(self, what: str) -> None:
        """Likewise, on the way in; raises as `heed_stop`."""
        self.heed_stop()
        self.wait_for(what)

    async def move(self, stage: Stage, text: str, **changes: Any) -> None:  # noqa: ANN401 - as `replace`
        """
        Take the next step on disk; only then is it taken.

        Raises:
            DraftStorageError: it cannot be written, and was not taken.
        """
        moved = self.promotion.moved(stage, text, self.parts.now(), **changes)
        await asyncio.to_thread(self._store.write, moved)
        self.promotion = moved
        self.count()
        self.parts.logger.info("promotion_moved", state=stage, detail=f"{moved.title}: {text}")

    def count(self) -> None:
        """Let the metrics say that its stage was entered."""
        self.parts.metrics.draft_promotion_steps.labels(self.promotion.stage).inc()

    async def surely(self, step: Callable[[], Awaitable[None]]) -> None:
        """
        Do what has to be done until it is; a disk that takes nothing now may take it later.

        Raises:
            LeaseLostError: this gateway does not steer any more.
        """
        while True:
            await self.crew.insist()
            try:
                await step()
            except DraftStorageError as error:
                self.parts.logger.error("promotion_stuck", error=str(error))  # noqa: TRY400 - one line says it
                self.promotion = replace(self.promotion, waits=str(error))
                await self.crew.sleep(RETRY_SECONDS)
            else:
                return

    async def decide(self, **changes: Any) -> None:  # noqa: ANN401 - as `replace`
        """
        Change the standing, if this gateway still steers.

        Raises:
            DraftStorageError: it cannot be; what was decided before stands.
            LeaseLostError: this gateway does not steer any more.
        """
        await self.crew.insist()
        await asyncio.to_thread(self._change_standing, lambda standing: replace(standing, **changes))

    async def settle(self) -> None:
        """
        Let the standing say what serves once everything is returned; nothing where it does.

        Raises:
            DraftStorageError: it cannot be read or written.
        """
        await asyncio.to_thread(self._change_standing, lambda standing: settled(standing, self.promotion))

    async def tried(self, step: str, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        """Record a step on the way in; raises `AuditError`, and then it must not be taken."""
        await self.parts.record(EntryType.DRAFT_TRIED, **self._fields(step), **fields)

    async def gave_up(self, step: str, reason: str, actor: str | None) -> None:
        """Record that it goes no further, whether that can be recorded or not."""
        fields = self._fields(step) | self.promotion.numbers.audit_fields() | {"reason": reason}
        await self.note(EntryType.DRAFT_TRIED, **fields | ({"actor": actor} if actor else {}))

    async def note(self, entry_type: EntryType, **fields: Any) -> None:  # noqa: ANN401 - see the registry
        """Record what happens whether it can be recorded or not."""
        try:
            await self.parts.record(entry_type, **fields)
        except ApplianceError as error:
            self.parts.logger.warning("audit_entry_refused", reason=str(entry_type), error=str(error))

    def _change_standing(self, change: Callable[[Standing], Standing]) -> None:
        standing = read_standing(self.parts.directory, self.promotion.target)
        if (wanted := change(standing)) != standing:
            write_standing(self.parts.directory, wanted)

    def _fields(self, step: str) -> dict[str, Any]:
        return {
            "promotion": self.promotion.promotion_id,
            "step": step,
            "draft": self.promotion.draft,
            "actor": self.promotion.actor,
            "previous_draft": self.promotion.incumbent or NONE,
        }


def settled(standing: Standing, promotion: Promotion) -> Standing:
    """What the standing says once a promotion is given back, or a rollback made."""
    if promotion.kind == "promotion":
        if standing.promotion != promotion.promotion_id:
            return standing
        return replace(standing, promotion=None, candidate=None)
    if standing.draft != promotion.draft:
        return standing
    wanted = promotion.incumbent or None
    at = standing.previous.index(wanted) + 1 if wanted in standing.previous else len(standing.previous)
    return replace(standing, draft=wanted, previous=standing.previous[at:], promotion=None, candidate=None)
