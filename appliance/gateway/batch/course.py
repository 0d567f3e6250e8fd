"""
One batch on its way: its input judged, its lines run, its outputs written, its end recorded.

    every line judged ─► lines run, a few at a time ─► results added to the journal ─► end

What a line came to is known from the journal alone, so whoever runs the batch again after a crash
begins by reading it: a line whose result is there is never run again, any other one is.  A line
that was under way at a crash is therefore asked twice, as the audit log shows, and answered once.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from appliance.audit.registry import EntryType
from appliance.errors import InvalidRequestError, StorageUnavailableError, StoredFileNotFoundError
from appliance.gateway.batch.batch import Batch, Counts, Status
from appliance.gateway.batch.journal import Journal
from appliance.gateway.batch.lines import InputCheck, LineCutter
from appliance.gateway.batch.outputs import Outputs, lines_never_run, write_outputs
from appliance.gateway.batch.parts import BatchParts
from appliance.gateway.batch.results import Result
from appliance.gateway.batch.running import Running, count
from appliance.gateway.batch.stop import CANCELLED, ERASED, EXPIRED, REVOKED, Stop
from appliance.gateway.batch.store import encode_problems
from appliance.gateway.batch.stored_file import StoredFile


class Course:
    """Runs one batch, from wherever it is."""

    def __init__(self, batch: Batch, parts: BatchParts) -> None:
        self.batch = batch
        self._parts = parts
        self._stop: Stop | None = None

    def saw(self, row: Batch | None, *, has_input: bool) -> None:
        """Note what the database says of the batch now; None when it says nothing any more."""
        if row is None or not has_input:
            self._stop = ERASED
        elif row.status is Status.CANCELLING:
            self._stop = self._stop or CANCELLED

    async def run(self) -> None:
        """
        Run the batch to its end; cancelling this leaves it to be run on later.

        Raises:
            StorageUnavailableError: disk or database cannot be used; run it again later.
            AuditError: the log takes no entries; as above.
        """
        batch, parts = self.batch, self._parts
        if batch.sealed and not await asyncio.to_thread(parts.vault.has_key, batch.tenant, batch.ulid):
            self._stop = ERASED
        if batch.status is Status.VALIDATING and not await self._judge():
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
        await asyncio.to_thread(parts.vault.remove, batch.tenant, batch.batch_id)

    async def _open_journal(self) -> Journal:
        opening = asyncio.ensure_future(asyncio.to_thread(self._parts.vault.journal, self.batch))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread goes on, and what it opens is nobody's.
            with suppress(StorageUnavailableError):
                (await opening).close()
            raise

    # Judging.

    async def _judge(self) -> bool:
        """Judge every line; whether the batch goes on to be run, or to be ended by `_why_stop`."""
        batch, parts = self.batch, self._parts
        check = InputCheck(batch.endpoint, parts.max_requests)
        cutter = LineCutter(parts.max_line_bytes)
        try:
            async for number, line in parts.cut_input(batch, cutter):
                check.see(number, line)
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
            await self._say_ended(Status.FAILED, counts, Outputs())
            errors = encode_problems(check.problems)
            await asyncio.to_thread(parts.store.move, batch.batch_id, Status.FAILED, now, errors=errors)
            await asyncio.to_thread(parts.vault.remove, batch.tenant, batch.batch_id)
            return False
        await asyncio.to_thread(
            parts.store.move, batch.batch_id, Status.IN_PROGRESS, now, total=check.total, model=check.model
        )
        moments = {**batch.moments, Status.IN_PROGRESS: now}
        # Whoever cancelled it meanwhile is heard at the next look.
        self.batch = replace(batch, status=Status.IN_PROGRESS, counts=counts, moments=moments)
        return True

    async def _run_lines(self, journal: Journal) -> Stop | None:
        try:
            return await Running(self.batch, self._parts, journal, self._why_stop).run()
        except StoredFileNotFoundError:
            return ERASED

    def _why_stop(self) -> Stop | None:
        """Why the batch is to end now, if it is."""
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

    async def _end(self, journal: Journal, stop: Stop | None) -> None:
        """Write the outputs, and put the batch into its last state."""
        batch, parts = self.batch, self._parts
        if stop is None and batch.status is not Status.FINALIZING:
            now = int(parts.clock())
            if not await asyncio.to_thread(parts.store.move, batch.batch_id, Status.FINALIZING, now):
                stop = CANCELLED  # every line is done, but the tenant was told that it is being cancelled
        outputs = Outputs()
        if stop is None or (stop.keeps_outputs and Status.IN_PROGRESS in batch.moments):
            outputs = await self._write(journal, stop)
        counts = count(batch, journal)
        await self._finish(stop, outputs, replace(counts, failed=max(outputs.failed, counts.failed)))

    async def _write(self, journal: Journal, stop: Stop | None) -> Outputs:
        batch, parts = self.batch, self._parts
        stored = await parts.files.get(batch.tenant, batch.input_file_id) if stop else None

        def write() -> Outputs:
            rest = self._never_run(journal, stored, stop) if stored and stop else ()
            return write_outputs(parts.vault, batch, journal, rest, now=int(parts.clock()))

        return await asyncio.to_thread(write)

    async def _finish(self, stop: Stop | None, outputs: Outputs, counts: Counts) -> None:
        """Say in the log how the batch ended, then let it end."""
        batch, parts = self.batch, self._parts
        status = stop.status if stop else Status.COMPLETED
        for stored in outputs.files:
            await parts.files.announce(stored, key_id=batch.key_id, batch_id=batch.batch_id)
        await self._say_ended(status, counts, outputs)
        problems = [stop.problem] if stop and stop.problem else []
        moved = await asyncio.to_thread(
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
        # A crash before this line: the batch has ended, and the next start names its files and removes
        # its journal.
        for stored in outputs.files:
            if moved:
                await asyncio.to_thread(parts.vault.publish, stored.file_id)
            else:
                await asyncio.to_thread(parts.vault.remove, stored.tenant, stored.file_id)

    def _never_run(self, journal: Journal, stored: StoredFile, stop: Stop) -> Iterator[Result]:
        parts = self._parts
        return lines_never_run(
            parts.vault.read(stored),
            self.batch.endpoint,
            journal.done,
            stop,
            max_line_bytes=parts.max_line_bytes,
            new_id=parts.new_id,
        )

    async def _say_ended(self, status: Status, counts: Counts, outputs: Outputs) -> None:
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
