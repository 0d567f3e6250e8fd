"""Runs the lines of one batch: starts them while there is capacity, records results, retries some."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from appliance.audit.sink import AuditSink
from appliance.gateway.batch.answerer import Answerer, CollectedReply
from appliance.gateway.batch.batch import Batch, Counts, StopReason
from appliance.gateway.batch.bounds import StorageThreads
from appliance.gateway.batch.files import TenantFiles
from appliance.gateway.batch.idle import Gate
from appliance.gateway.batch.journal import ResultJournal
from appliance.gateway.batch.lines import BatchLine, LineCutter
from appliance.gateway.batch.results import (
    LineAnswer,
    LineResult,
    answered,
    is_worth_waiting,
    should_try_again,
)
from appliance.gateway.batch.store import SqlBatchStore
from appliance.gateway.batch.vault import FileVault
from appliance.tenancy import Caller

SLICE_BYTES = 16_384  # checked without yielding to the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    store: SqlBatchStore
    vault: FileVault
    files: TenantFiles
    threads: StorageThreads
    audit: AuditSink
    gate: Gate
    answerer: Answerer
    find_owner: Callable[[str, str], Caller | None]  # by tenant and key id; None if it is no longer valid
    count: Callable[[str, str], None]  # with tenant and result of each finished line: `completed` or `failed`
    clock: Callable[[], float]  # Unix time
    new_id: Callable[[], str]
    max_line_bytes: int
    max_requests: int

    async def cut_input(self, batch: Batch, cutter: LineCutter) -> AsyncIterator[tuple[int, bytes]]:
        """
        Yield number and bytes of each line of a batch's input, and yield to the event loop in between.

        Raises StoredFileNotFoundError, StorageUnavailableError, or InvalidRequestError if a line is too long.
        """
        stored = await self.files.get(batch.tenant, batch.input_file_id)
        seen = 0
        async for piece in self.files.read(stored):
            for number, line in cutter.feed(piece):
                yield number, line
                seen += len(line)
                if seen >= SLICE_BYTES:
                    seen = 0
                    await asyncio.sleep(0)
        for number, line in cutter.end():
            yield number, line


POLL_SECONDS = 0.1  # between two checks for free capacity
SHORTEST_BACK_OFF_SECONDS, LONGEST_BACK_OFF_SECONDS = 1.0, 60.0
"""Back-off of a batch after a temporary refusal of a line: limits, no worker, no audit log.
Doubles with each refusal in a row; each refusal is an entry in the log."""
GROWTH = 0.25
"""Concurrent lines added after as many answers as there are concurrent lines; a refusal halves the number.
So the batch adapts to the tenant's limit on concurrent requests."""
PROGRESS_SECONDS = 2.0  # between two progress updates in the database


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    line: BatchLine
    reply: CollectedReply
    back_offs: int  # of the batch when it started


class LineExecutor:
    """Runs those lines of one batch that have no result in its journal."""

    def __init__(
        self,
        batch: Batch,
        parts: BatchParts,
        journal: ResultJournal,
        why_stop: Callable[[], StopReason | None],
    ) -> None:
        self._batch = batch
        self._parts = parts
        self._journal = journal
        self._why_stop = why_stop
        self._in_flight: dict[asyncio.Task[LineAnswer], _Attempt] = {}
        self._tries: dict[int, int] = {}
        self._retries: deque[BatchLine] = deque()
        self._backs_off_until = 0.0
        self._back_offs = 0
        self._refused = 0  # back-offs in a row without an answer in between
        self._max_lines = math.inf  # concurrent lines that are not refused, as far as is known
        self._progress_at = 0.0

    async def run(self) -> StopReason | None:
        """
        Run all unfinished lines; returns why it stopped early, if it did.

        Cancelling this aborts lines in flight; answers that are not in the journal are requested again.
        Raises StoredFileNotFoundError or StorageUnavailableError.
        """
        lines = self._lines_left()
        try:
            return await self._run_all(lines)
        finally:
            # Lines are still in flight only if this was cancelled or failed: the gateway stops.
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)
            await lines.aclose()

    async def _run_all(self, lines: AsyncGenerator[BatchLine]) -> StopReason | None:
        following: BatchLine | None = None
        while True:
            stop = self._why_stop()
            if stop is not None:
                await self._abort()
                return stop
            following = following or await self._next(lines)
            while following is not None and self._start(following):
                following = await self._next(lines)
            if following is None and not self._in_flight:
                return None
            await self._collect()

    async def _next(self, lines: AsyncGenerator[BatchLine]) -> BatchLine | None:
        return self._retries.popleft() if self._retries else await anext(lines, None)

    def _start(self, line: BatchLine) -> bool:
        """Whether there was capacity to start it."""
        parts, mine = self._parts, len(self._in_flight)
        if parts.clock() < self._backs_off_until or (self._refused and mine) or mine >= self._max_lines:
            return False  # after a back-off one line is tried first
        if not parts.gate.admits(line.model, mine):
            return False
        owner = parts.find_owner(self._batch.tenant, self._batch.key_id)
        if owner is None:
            return False
        reply = CollectedReply()
        task = asyncio.ensure_future(parts.answerer.ask(self._batch, line, owner, reply))
        # Counted from here on: the task itself has not started yet.
        parts.gate.line_started()
        task.add_done_callback(lambda _task: parts.gate.line_ended())
        self._in_flight[task] = _Attempt(line=line, reply=reply, back_offs=self._back_offs)
        return True

    async def _collect(self) -> None:
        """Wait shortly for answers, and add their results to the journal."""
        if not self._in_flight:
            await asyncio.sleep(POLL_SECONDS)
            return
        done, _ = await asyncio.wait(
            self._in_flight, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        await self._record(done)

    async def _record(self, done: set[asyncio.Task[LineAnswer]]) -> None:
        results: list[LineResult] = []
        for task in done:
            attempt, answer = self._in_flight.pop(task), task.result()
            line = attempt.line
            if is_worth_waiting(answer):
                if attempt.back_offs == self._back_offs:  # lines refused together count once
                    self._back_off()
            else:
                self._refused, self._max_lines = 0, self._max_lines + GROWTH / self._max_lines
                self._tries[line.number] = self._tries.get(line.number, 0) + 1
            if should_try_again(answer, self._tries.get(line.number, 0)):
                self._retries.append(line)  # if the batch ends first, the line counts as unfinished
            else:
                self._tries.pop(line.number, None)
                results.append(answered(line.number, line.custom_id, answer))
        if results:
            await self._parts.threads.run(self._journal.add, results)
            for result in results:
                self._parts.count(self._batch.tenant, "completed" if result.succeeded else "failed")
        await self._report_progress()

    def _back_off(self) -> None:
        seconds = min(LONGEST_BACK_OFF_SECONDS, SHORTEST_BACK_OFF_SECONDS * 2 ** min(self._refused, 6))
        self._backs_off_until = self._parts.clock() + seconds
        self._back_offs += 1
        self._refused += 1
        self._max_lines = max(1.0, min(self._max_lines, len(self._in_flight) + 1) / 2)

    async def _abort(self) -> None:
        """Answers that have arrived count."""
        for attempt in self._in_flight.values():
            attempt.reply.client_left = True
        done = {task for task in self._in_flight if task.done()}
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._in_flight = {task: self._in_flight[task] for task in done}
        await self._record(done)

    async def _lines_left(self) -> AsyncGenerator[BatchLine]:
        done = frozenset(self._journal.done)
        async for number, line in self._parts.cut_input(self._batch, LineCutter(self._parts.max_line_bytes)):
            if number not in done:
                yield await self._parts.answerer.read(self._batch, number, line)

    async def _report_progress(self) -> None:
        now = self._parts.clock()
        if now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            counts = count(self._batch, self._journal)
            await self._parts.threads.run(self._parts.store.progress, self._batch.batch_id, counts)


def count(batch: Batch, journal: ResultJournal) -> Counts:
    completed = sum(journal.done.values())
    return Counts(total=batch.counts.total, completed=completed, failed=len(journal.done) - completed)
