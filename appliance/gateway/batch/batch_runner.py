"""
Runs a gateway's batches, several at a time, and sweeps its files.

Crash-safe: `run` starts with the batches that are open in the database.  A batch that cannot continue,
because the disk is full or the log takes no entries, is retried later and blocks no other.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from appliance.errors import ApplianceError
from appliance.gateway.batch.batch import Batch, pick_next
from appliance.gateway.batch.executor import BatchParts
from appliance.gateway.batch.job import BatchJob
from appliance.infra.logs import Logger

PARALLEL = 8  # batches at the same time; those of different tenants start first
POLL_SECONDS = 2.0  # of the database while batches run: another gateway may have cancelled one
SWEEP_SECONDS = 60.0
STALLED_SECONDS = 30.0  # from a batch's failure to the next attempt


class BatchRunner:
    def __init__(
        self, parts: BatchParts, *, clock: Callable[[], float], logger: Logger, parallel: int = PARALLEL
    ) -> None:
        """`clock` is monotonic, in seconds."""
        self._parts = parts
        self._parallel = parallel
        self._clock = clock
        self._logger = logger
        self._wake = asyncio.Event()
        self._jobs: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}
        self._stalled: dict[str, float] = {}
        self._stopping = False
        self._swept_at = float("-inf")

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                try:
                    await self._poll()
                except ApplianceError as error:
                    self._logger.warning("batches_stalled", error=str(error))
                seconds = POLL_SECONDS if self._jobs or self._stalled else SWEEP_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._wake.wait()
        finally:
            await self._cancel_jobs()

    async def stop(self) -> None:
        """Start no more lines and abort those in flight; the next start resumes them."""
        self._stopping = True
        self._wake.set()
        await self._cancel_jobs()

    async def _poll(self) -> None:
        parts = self._parts
        if self._clock() - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = self._clock()
            await parts.files.sweep()
        # A job that ends during the query is open in its result, and must not be started again.
        known = list(self._jobs.items())
        rows = {
            row.batch_id: row
            for row in await parts.threads.run(parts.store.open_batches, parts.vault.gateway)
        }
        for batch_id, (job, _) in known:
            stored = await parts.threads.run(parts.store.file, job.batch.tenant, job.batch.input_file_id)
            job.apply_row(rows.pop(batch_id, None), has_input=stored is not None)
        now = self._clock()
        self._stalled = {batch_id: until for batch_id, until in self._stalled.items() if until > now}
        self._start_jobs([row for row in rows.values() if row.batch_id not in self._stalled])

    def _start_jobs(self, waiting: list[Batch]) -> None:
        running = Counter(job.batch.tenant for job, _ in self._jobs.values())
        while waiting and len(self._jobs) < self._parallel and not self._stopping:
            batch = pick_next(waiting, running)
            if batch is None:
                return
            waiting.remove(batch)
            running[batch.tenant] += 1
            job = BatchJob(batch, self._parts)
            task = asyncio.ensure_future(self._run_job(job))
            self._jobs[batch.batch_id] = job, task

    async def _run_job(self, job: BatchJob) -> None:
        batch_id = job.batch.batch_id
        try:
            await job.run()
        except ApplianceError as error:
            self._stall(batch_id, str(error))
        except Exception as error:
            # A defect in one batch must not end the process.
            self._logger.exception("batch_crashed", detail=batch_id)
            self._stall(batch_id, type(error).__name__)
        finally:
            self._jobs.pop(batch_id, None)
            self._wake.set()

    def _stall(self, batch_id: str, why: str) -> None:
        self._logger.warning("batch_stalled", detail=batch_id, error=why)
        self._stalled[batch_id] = self._clock() + STALLED_SECONDS

    async def _cancel_jobs(self) -> None:
        tasks = [task for _, task in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
