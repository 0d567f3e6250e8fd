"""
The workers of one target, restarted one at a time on behalf of a promotion.

Nothing is done while this gateway does not steer: another one may have taken over.
"""

import asyncio
from collections.abc import Awaitable, Callable

from appliance.control.recycle import Recycler, RecycleResult
from appliance.drafts.promotion.gate import members_of
from appliance.drafts.promotion.promotion import Promotion
from appliance.errors import ControlRefusedError
from appliance.serving.pool import WorkerPool
from appliance.serving.restart_request import Candidate
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.speculation.values import Reason

POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0
"""How long the lease may be out of hand before a promotion is left to whoever has it; shorter than any
lease lasts, and nothing is done meanwhile."""


class LeaseLostError(Exception):
    """The gateway does not steer any more; whoever does finds the promotion and ends it."""


class Crew:
    """Restarts workers for promotions, within the rules of the recycler."""

    def __init__(
        self,
        *,
        pool: WorkerPool,
        recycler: Recycler,
        is_acting: Callable[[], bool],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
    ) -> None:
        """
        Prepare; nothing is restarted yet.

        Args:
            pool: all workers.
            recycler: restarts them.
            is_acting: whether this gateway steers.
            clock: monotonic seconds.
            sleep: waits, in seconds of that clock.
        """
        self.pool = pool
        self.recycler = recycler
        self.is_acting = is_acting
        self.clock = clock
        self.sleep = sleep

    def members(self, target: str) -> tuple[WorkerSnapshot, ...]:
        """The workers that serve a target."""
        return members_of(self.pool.snapshots, target)

    def refusal(self, worker_id: WorkerId, promotion: Promotion) -> str | None:
        """Why a worker may not be restarted now; None if it may."""
        return self.recycler.refusal(
            worker_id, holder=promotion.title, allow_downtime=promotion.allow_downtime
        )

    async def insist(self) -> None:
        """
        Return once this gateway steers.

        Raises:
            LeaseLostError: it does not, and not only for a moment.
        """
        deadline = self.clock() + GRACE_SECONDS
        while not self.is_acting():
            if self.clock() >= deadline:
                raise LeaseLostError
            await self.sleep(POLL_SECONDS)

    async def pause(self) -> None:
        """Let a moment pass, and go on only if this gateway still steers; raises as `insist`."""
        await self.sleep(POLL_SECONDS)
        await self.insist()

    async def restart(
        self, worker_id: WorkerId, promotion: Promotion, *, actor: str, candidate: Candidate | None
    ) -> RecycleResult:
        """
        Restart one worker now, and wait until it is back or given up.

        Args:
            worker_id: which.
            promotion: on whose behalf.
            actor: who wanted it.
            candidate: the draft to try; None for the one in service.

        Raises:
            ControlRefusedError: it may not be restarted now.
        """
        task = self.recycler.begin(
            worker_id,
            with_draft=True,
            reason=Reason.OPERATOR_OVERRIDE,
            actor=actor,
            note=promotion.title,
            candidate=candidate,
            holder=promotion.title,
            allow_downtime=promotion.allow_downtime,
        )
        # Whoever gives this up does not give the worker up: half-way is no place to leave one at.
        await asyncio.wait({task})
        return RecycleResult.CANCELLED if task.cancelled() else task.result()

    async def restart_when_free(
        self,
        worker_id: WorkerId,
        promotion: Promotion,
        *,
        actor: str,
        candidate: Candidate | None,
        seconds: float,
        waiting: Callable[[str], None],
    ) -> RecycleResult:
        """
        Restart one worker as soon as the others allow it; as `restart` otherwise.

        Args:
            worker_id: which.
            promotion: on whose behalf.
            actor: who wanted it.
            candidate: the draft to try.
            seconds: how long to wait for that.
            waiting: told what is waited for; may raise to end it.

        Raises:
            ControlRefusedError: it could not be in all that time; says why.
            LeaseLostError: this gateway does not steer any more.
        """
        deadline = self.clock() + seconds
        while True:
            await self.insist()
            refused = self.refusal(worker_id, promotion)
            if refused is None:
                return await self.restart(worker_id, promotion, actor=actor, candidate=candidate)
            waiting(refused)
            if self.clock() >= deadline:
                raise ControlRefusedError(refused)
            await self.sleep(POLL_SECONDS)
