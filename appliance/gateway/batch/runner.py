"""
Runs a gateway's batches, some at a time, and sweeps its files.

It may die at any moment: `run` begins with what the database says is open.  One batch that cannot
go on, because the disk is full or the log takes no entries, is tried again later and holds up no
other.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from appliance.errors import ApplianceError
from appliance.gateway.batch.batch import Batch, pick_next
from appliance.gateway.batch.course import Course
from appliance.gateway.batch.parts import BatchParts
from appliance.infra.logs import Logger

PARALLEL = 8
"""Maximum batches that run at the same time; those of different tenants start first, the others wait."""
LOOK_SECONDS = 2.0
"""Time between two looks at the database while batches are run: another gateway may have cancelled one."""
SWEEP_SECONDS = 60.0
STALLED_SECONDS = 30.0
"""From a batch's failure to run to the next try."""


class Runner:
    """Runs batches; made once for each gateway."""

    def __init__(
        self, parts: BatchParts, *, clock: Callable[[], float], logger: Logger, parallel: int = PARALLEL
    ) -> None:
        """`clock` is monotonic, in seconds."""
        self._parts = parts
        self._parallel = parallel
        self._clock = clock
        self._logger = logger
        self._wake = asyncio.Event()
        self._courses: dict[str, tuple[Course, asyncio.Task[None]]] = {}
        self._stalled: dict[str, float] = {}
        self._stopping = False
        self._swept_at = float("-inf")

    def wake(self) -> None:
        """Have it look at the database now."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until this is cancelled or `stop` was called."""
        try:
            while not self._stopping:
                self._wake.clear()
                try:
                    await self._look()
                except ApplianceError as error:
                    self._logger.warning("batches_stalled", error=str(error))
                seconds = LOOK_SECONDS if self._courses or self._stalled else SWEEP_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._wake.wait()
        finally:
            await self._halt()

    async def stop(self) -> None:
        """Begin no more lines and break off those under way; the next start goes on with them."""
        self._stopping = True
        self._wake.set()
        await self._halt()

    async def _look(self) -> None:
        parts = self._parts
        if self._clock() - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = self._clock()
            await parts.files.sweep()
        # One that ends while we look is open in what we read, and must not be begun again.
        known = list(self._courses.items())
        rows = {
            row.batch_id: row
            for row in await asyncio.to_thread(parts.store.open_batches, parts.vault.gateway)
        }
        for batch_id, (course, _) in known:
            stored = await asyncio.to_thread(
                parts.store.file, course.batch.tenant, course.batch.input_file_id
            )
            course.saw(rows.pop(batch_id, None), has_input=stored is not None)
        now = self._clock()
        self._stalled = {batch_id: until for batch_id, until in self._stalled.items() if until > now}
        self._begin([row for row in rows.values() if row.batch_id not in self._stalled])

    def _begin(self, waiting: list[Batch]) -> None:
        running = Counter(course.batch.tenant for course, _ in self._courses.values())
        while waiting and len(self._courses) < self._parallel and not self._stopping:
            batch = pick_next(waiting, running)
            if batch is None:
                return
            waiting.remove(batch)
            running[batch.tenant] += 1
            course = Course(batch, self._parts)
            task = asyncio.ensure_future(self._see_through(course))
            self._courses[batch.batch_id] = course, task

    async def _see_through(self, course: Course) -> None:
        batch_id = course.batch.batch_id
        try:
            await course.run()
        except ApplianceError as error:
            self._stall(batch_id, str(error))
        except Exception as error:
            # A defect that one batch meets must not end the process.
            self._logger.exception("batch_crashed", detail=batch_id)
            self._stall(batch_id, type(error).__name__)
        finally:
            self._courses.pop(batch_id, None)
            self._wake.set()

    def _stall(self, batch_id: str, why: str) -> None:
        self._logger.warning("batch_stalled", detail=batch_id, error=why)
        self._stalled[batch_id] = self._clock() + STALLED_SECONDS

    async def _halt(self) -> None:
        tasks = [task for _, task in self._courses.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
