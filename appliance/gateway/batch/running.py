"""
The lines of a batch under way: begun where there is capacity, their answers kept, some tried again.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from appliance.gateway.batch.batch import Batch, Counts
from appliance.gateway.batch.journal import Journal
from appliance.gateway.batch.lines import BatchLine, LineCutter, parse_line
from appliance.gateway.batch.parts import BatchParts
from appliance.gateway.batch.reply import CollectedReply
from appliance.gateway.batch.results import Answer, Result, answered, is_worth_waiting, should_try_again
from appliance.gateway.batch.stop import Stop

LOOK_SECONDS = 0.1
"""How long capacity that has become free may go unnoticed."""
SHORTEST_REST_SECONDS, LONGEST_REST_SECONDS = 1.0, 60.0
"""Rest of a batch whose line was refused for a reason that passes: limits, no worker, no audit log.
Doubled each time in a row; each refusal is an entry in the log."""
GROWTH = 0.25
"""Lines more at once for each run of answers as long as there are lines at once; a refusal halves them.
So a tenant's limit on requests at once is found, and tried again now and then."""
TOLD_SECONDS = 2.0
"""Time between two notes of how far a batch is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Try:
    """One line under way."""

    line: BatchLine
    reply: CollectedReply
    rests: int
    """How often the batch had rested when it began."""


class Running:
    """Runs the lines of one batch that its journal does not have yet."""

    def __init__(
        self, batch: Batch, parts: BatchParts, journal: Journal, why_stop: Callable[[], Stop | None]
    ) -> None:
        self._batch = batch
        self._parts = parts
        self._journal = journal
        self._why_stop = why_stop
        self._under_way: dict[asyncio.Task[Answer], _Try] = {}
        self._tries: dict[int, int] = {}
        self._again: deque[BatchLine] = deque()
        self._rests_until = 0.0
        self._rests = 0
        self._refused = 0
        """Rests in a row without an answer between them."""
        self._most = math.inf
        """Lines at once that are not refused, as far as is known."""
        self._told_at = 0.0

    async def run(self) -> Stop | None:
        """
        Run what is not done; why it ended before everything was, if it did.

        Cancelling this breaks off what is under way; what was answered is in the journal, or is asked again.

        Raises:
            StoredFileNotFoundError: the input is gone.
            StorageUnavailableError: disk or database cannot be used.
        """
        lines = self._lines_left()
        try:
            return await self._answer_all(lines)
        finally:
            # Only if this is cancelled or fails is anything under way still: the gateway stops.
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)
            await lines.aclose()

    async def _answer_all(self, lines: AsyncGenerator[BatchLine]) -> Stop | None:
        following: BatchLine | None = None
        while True:
            stop = self._why_stop()
            if stop is not None:
                await self._break_off()
                return stop
            following = following or await self._next(lines)
            while following is not None and self._begin(following):
                following = await self._next(lines)
            if following is None and not self._under_way:
                return None
            await self._collect()

    async def _next(self, lines: AsyncGenerator[BatchLine]) -> BatchLine | None:
        return self._again.popleft() if self._again else await anext(lines, None)

    def _begin(self, line: BatchLine) -> bool:
        """Begin to run a line if there is capacity for it; whether there was."""
        parts, mine = self._parts, len(self._under_way)
        if parts.clock() < self._rests_until or (self._refused and mine) or mine >= self._most:
            return False  # after a rest one line goes ahead
        if not parts.gate.lets_in(line.model, mine):
            return False
        owner = parts.find_owner(self._batch.tenant, self._batch.key_id)
        if owner is None:
            return False
        reply = CollectedReply()
        task = asyncio.ensure_future(parts.answerer.ask(self._batch, line, owner, reply))
        # Counted from here on: the task itself has not begun yet.
        parts.gate.began()
        task.add_done_callback(lambda _task: parts.gate.ended())
        self._under_way[task] = _Try(line=line, reply=reply, rests=self._rests)
        return True

    async def _collect(self) -> None:
        """Wait for answers, but not for long, and add what has come to the journal."""
        if not self._under_way:
            await asyncio.sleep(LOOK_SECONDS)
            return
        done, _ = await asyncio.wait(
            self._under_way, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        await self._keep(done)

    async def _keep(self, done: set[asyncio.Task[Answer]]) -> None:
        results: list[Result] = []
        for task in done:
            attempt, answer = self._under_way.pop(task), task.result()
            line = attempt.line
            if is_worth_waiting(answer):
                if attempt.rests == self._rests:  # those refused together tell one thing
                    self._rest()
            else:
                self._refused, self._most = 0, self._most + GROWTH / self._most
                self._tries[line.number] = self._tries.get(line.number, 0) + 1
            if should_try_again(answer, self._tries.get(line.number, 0)):
                self._again.append(line)  # if the batch ends before its turn, it was never run to its end
            else:
                self._tries.pop(line.number, None)
                results.append(answered(line.number, line.custom_id, answer))
        if results:
            await asyncio.to_thread(self._journal.add, results)
            for result in results:
                self._parts.count(self._batch.tenant, "completed" if result.succeeded else "failed")
        await self._tell()

    def _rest(self) -> None:
        seconds = min(LONGEST_REST_SECONDS, SHORTEST_REST_SECONDS * 2 ** min(self._refused, 6))
        self._rests_until = self._parts.clock() + seconds
        self._rests += 1
        self._refused += 1
        self._most = max(1.0, min(self._most, len(self._under_way) + 1) / 2)

    async def _break_off(self) -> None:
        """Stop what is under way; what was answered already counts."""
        for attempt in self._under_way.values():
            attempt.reply.client_left = True
        done = {task for task in self._under_way if task.done()}
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._under_way = {task: self._under_way[task] for task in done}
        await self._keep(done)

    async def _lines_left(self) -> AsyncGenerator[BatchLine]:
        done = frozenset(self._journal.done)
        async for number, line in self._parts.cut_input(self._batch, LineCutter(self._parts.max_line_bytes)):
            if number not in done:
                yield parse_line(number, line, self._batch.endpoint)

    async def _tell(self) -> None:
        now = self._parts.clock()
        if now - self._told_at >= TOLD_SECONDS:
            self._told_at = now
            counts = count(self._batch, self._journal)
            await asyncio.to_thread(self._parts.store.progress, self._batch.batch_id, counts)


def count(batch: Batch, journal: Journal) -> Counts:
    """How far a batch is, by its journal."""
    completed = sum(journal.done.values())
    return Counts(total=batch.counts.total, completed=completed, failed=len(journal.done) - completed)
