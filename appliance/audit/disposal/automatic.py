"""
The task that disposes of entries by age, once a day, if `audit.dispose_after_days` is set.

On SQLite only.  On PostgreSQL no gateway may delete entries: the owner's role runs the command.  A failure is
reported and tried again the next day; what it left is completed then.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from appliance.audit.disposal.disposing import Disposing
from appliance.audit.stored import Disposal
from appliance.errors import ApplianceError

ROUND_SECONDS = 86_400.0
FIRST_SECONDS = 3600.0
"""After a start, so that a gateway that is restarted daily disposes as well."""
SEEN_SECONDS = 60.0
RESTS = 9
"""Seconds of rest for each second of work, which no entry can be written in."""
BASIS = "its retention period has ended"
Pause = Callable[[float], Awaitable[None]]


class Report(Protocol):
    def __call__(self, event: str, detail: str, *, is_problem: bool) -> None: ...


class AutomaticDisposal:
    def __init__(
        self,
        *,
        disposing: Disposing,
        files: Callable[[], Collection[str]],
        days: int,
        origin: str,
        clock: Callable[[], float],
        report: Report,
    ) -> None:
        """Prepare; `files` reads what `Facts.files` is, and `clock` is Unix time."""
        self._disposing, self._files, self._days = disposing, files, days
        self._origin, self._clock, self._report = origin, clock, report

    async def run(self, pause: Pause = asyncio.sleep) -> None:
        """Dispose once a day, until cancelled."""
        await pause(FIRST_SECONDS)
        while True:
            await self.round(pause)
            await pause(ROUND_SECONDS)

    async def round(self, pause: Pause = asyncio.sleep) -> None:
        """Dispose of what is old enough, or complete what an earlier round left."""
        try:
            disposal = await asyncio.to_thread(self._record)
            if disposal is None:
                return
            for _ in range(int(ROUND_SECONDS / SEEN_SECONDS)):
                if await asyncio.to_thread(self._disposing.unseen, disposal) is None:
                    break
                await pause(SEEN_SECONDS)
            await self._carry_out(disposal, pause)
        except ApplianceError as error:
            self._report("audit_not_disposed", str(error), is_problem=True)
        else:
            self._report("audit_disposed", f"the first {disposal.below} entries", is_problem=False)

    def _record(self) -> Disposal | None:
        if recorded := self._disposing.recorded():
            return recorded
        now_ms = int(self._clock() * 1000)
        before_ms = self._disposing.latest_cutoff(now_ms, self._days)
        plan = self._disposing.plan(before_ms, now_ms=now_ms, files=self._files())
        if not plan.entries:
            return None
        index = self._disposing.record(plan, BASIS, actor="gateway", origin=self._origin, clock=self._clock)
        return Disposal(below=plan.below, index=index)

    async def _carry_out(self, disposal: Disposal, pause: Pause) -> None:
        steps = self._disposing.carry_out(disposal)
        while True:
            began = time.perf_counter()
            if await asyncio.to_thread(next, steps, None) is None:
                return
            await pause((time.perf_counter() - began) * RESTS)
