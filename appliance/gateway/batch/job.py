"""
One batch from validation to its end: input checked, lines run, outputs written, end recorded.

    every line checked ─► lines run ─► results added to the journal ─► end

The journal alone records results, so after a crash the batch resumes from it: a line with a result is
never run again, any other line is.  A line in flight at a crash is therefore requested twice, as the
audit log shows, and answered once.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from appliance.audit.entry_types import EntryType
from appliance.errors import InvalidRequestError, StorageUnavailableError, StoredFileNotFoundError
from appliance.gateway.batch.batch import (
    CANCELLED,
    ERASED,
    EXPIRED,
    REVOKED,
    Batch,
    Counts,
    Status,
    StopReason,
    StoredFile,
)
from appliance.gateway.batch.executor import BatchParts, LineExecutor, count
from appliance.gateway.batch.journal import ResultJournal
from appliance.gateway.batch.lines import BatchLine, InputCheck, LineCutter
from appliance.gateway.batch.outputs import Outputs, lines_never_run, write_outputs
from appliance.gateway.batch.results import LineResult
from appliance.gateway.batch.store import encode_problems


class BatchJob:
    def __init__(self, batch: Batch, parts: BatchParts) -> None:
        self.batch = batch
        self._parts = parts
        self._stop: StopReason | None = None

    def apply_row(self, row: Batch | None, *, has_input: bool) -> None:
        """`row` is None if the batch is no longer open."""
        if row is None or not has_input:
            self._stop = ERASED
        elif row.status is Status.CANCELLING:
            self._stop = self._stop or CANCELLED

    async def run(self) -> None:
        """
        Run the batch to its end; after a cancellation it can be resumed.

        Raises StorageUnavailableError or AuditError; resume it later.
        """
        batch, parts = self.batch, self._parts
        if batch.sealed and not await parts.threads.run(parts.vault.has_key, batch.tenant, batch.ulid):
            self._stop = ERASED
        if batch.status is Status.VALIDATING and not await self._validate():
            return
        if self._why_stop() is ERASED:
            await self._finish(ERASED, Outputs(), Counts(total=self.batch.counts.total))
        else:
            journal = await self._open_journal()
            try:
                with parts.gate.batch():
                    stop = await self._run_lines(journal)
                await self._end(journal, stop)
            finally:
                journal.close()
        await parts.threads.run(parts.vault.remove, batch.tenant, batch.batch_id)

    async def _open_journal(self) -> ResultJournal:
        opening = asyncio.ensure_future(self._parts.threads.run(self._parts.vault.journal, self.batch))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread continues, and nothing else would close what it opens.
            with suppress(StorageUnavailableError):
                (await opening).close()
            raise

    # Validation.

    async def _validate(self) -> bool:
        """False if the batch failed, else it is run, or ended by `_why_stop`."""
        batch, parts = self.batch, self._parts
        check = InputCheck(parts.max_requests)
        cutter = LineCutter(parts.max_line_bytes)
        try:
            async for number, line in parts.cut_input(batch, cutter):
                check.add(number, await self._read(number, line))
                if check.has_enough or self._why_stop():
                    break
        except StoredFileNotFoundError:
            self._stop = ERASED
        except InvalidRequestError as error:
            check.refuse(cutter.number, error)
        if self._why_stop():
            return True
        check.end()
        counts, now = Counts(total=check.total), int(parts.clock())
        if check.problems:
            await self._record_end(Status.FAILED, counts, Outputs())
            errors = encode_problems(check.problems)
            move = partial(parts.store.move, batch.batch_id, Status.FAILED, now, errors=errors)
            await parts.threads.run(move)
            await parts.threads.run(parts.vault.remove, batch.tenant, batch.batch_id)
            return False
        move = partial(parts.store.move, batch.batch_id, Status.IN_PROGRESS, now)
        await parts.threads.run(partial(move, total=check.total, model=check.model))
        moments = {**batch.moments, Status.IN_PROGRESS: now}
        # A cancellation meanwhile is applied at the next poll.
        self.batch = replace(batch, status=Status.IN_PROGRESS, counts=counts, moments=moments)
        return True

    async def _read(self, number: int, line: bytes) -> BatchLine | InvalidRequestError:
        try:
            return await self._parts.answerer.read(self.batch, number, line)
        except InvalidRequestError as error:
            return error

    async def _run_lines(self, journal: ResultJournal) -> StopReason | None:
        if self._why_stop() is None:
            # Before workers compute answers that could not be kept.
            await self._parts.threads.run(self._parts.vault.check_room, 0)
        try:
            return await LineExecutor(self.batch, self._parts, journal, self._why_stop).run()
        except StoredFileNotFoundError:
            return ERASED

    def _why_stop(self) -> StopReason | None:
        batch, parts = self.batch, self._parts
        if self._stop is not None or batch.status is Status.FINALIZING:
            return self._stop
        if batch.status is Status.CANCELLING:
            return CANCELLED
        if parts.clock() >= batch.expires_at:
            return EXPIRED
        if parts.find_owner(batch.tenant, batch.key_id) is None:
            return REVOKED
        return None

    # Ending.

    async def _end(self, journal: ResultJournal, stop: StopReason | None) -> None:
        batch, parts = self.batch, self._parts
        if stop is None and batch.status is not Status.FINALIZING:
            now = int(parts.clock())
            if not await parts.threads.run(parts.store.move, batch.batch_id, Status.FINALIZING, now):
                stop = CANCELLED  # every line is done, but the tenant has seen `cancelling`
        outputs = Outputs()
        if stop is None or (stop.keeps_outputs and Status.IN_PROGRESS in batch.moments):
            outputs = await self._write(journal, stop)
        counts = count(batch, journal)
        await self._finish(stop, outputs, replace(counts, failed=max(outputs.failed, counts.failed)))

    async def _write(self, journal: ResultJournal, stop: StopReason | None) -> Outputs:
        batch, parts = self.batch, self._parts
        stored = await parts.files.get(batch.tenant, batch.input_file_id) if stop else None

        def write() -> Outputs:
            parts.vault.check_room(journal.size)
            rest = self._never_run(journal, stored, stop) if stored and stop else ()
            return write_outputs(parts.vault, batch, journal, rest, now=int(parts.clock()))

        return await parts.threads.run(write)

    async def _finish(self, stop: StopReason | None, outputs: Outputs, counts: Counts) -> None:
        """Record the end in the audit log, then in the database."""
        batch, parts = self.batch, self._parts
        status = stop.status if stop else Status.COMPLETED
        for stored in outputs.files:
            await parts.files.announce(stored, key_id=batch.key_id, batch_id=batch.batch_id)
        await self._record_end(status, counts, outputs)
        problems = [stop.problem] if stop and stop.problem else []
        move = partial(
            parts.store.move,
            batch.batch_id,
            status,
            int(parts.clock()),
            outputs=outputs.files,
            output_file_id=outputs.output.file_id if outputs.output else None,
            error_file_id=outputs.errors.file_id if outputs.errors else None,
            completed=counts.completed,
            failed=counts.failed,
            errors=encode_problems(problems),
        )
        moved = await parts.threads.run(move)
        # A crash before this line: the batch has ended, and the next start publishes its files and removes
        # its journal.
        for stored in outputs.files:
            if moved:
                await parts.threads.run(parts.vault.publish, stored.file_id)
            else:
                await parts.threads.run(parts.vault.remove, stored.tenant, stored.file_id)

    def _never_run(
        self, journal: ResultJournal, stored: StoredFile, stop: StopReason
    ) -> Iterator[LineResult]:
        parts = self._parts
        return lines_never_run(
            parts.vault.read(stored),
            self.batch.endpoint,
            journal.done,
            stop,
            max_line_bytes=parts.max_line_bytes,
            new_id=parts.new_id,
        )

    async def _record_end(self, status: Status, counts: Counts, outputs: Outputs) -> None:
        batch, parts = self.batch, self._parts
        entry = parts.audit.submit(
            EntryType.BATCH_ENDED,
            tenant=batch.tenant,
            batch=batch.batch_id,
            outcome=str(status),
            requests=counts.total,
            completed=counts.completed,
            failed=counts.failed,
            output_file=outputs.output.file_id if outputs.output else None,
            error_file=outputs.errors.file_id if outputs.errors else None,
        )
        await parts.audit.confirm(entry)
