"""
Brings what waits in the spool into the log: in order, exactly once, then what else has to be said.

An entry leaves the spool only after its commit.  What the log holds already, because a commit
happened although it failed or because a process ended right after it, is passed over.

Fails closed: whatever cannot be done now is tried again from where it stopped.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from appliance.audit.durability.arrivals import Arrivals, arrivals
from appliance.audit.durability.gap import GapFile
from appliance.audit.durability.handed import Handed, InFlight
from appliance.audit.durability.losses import Losses
from appliance.audit.durability.spool import Spool
from appliance.audit.durability.spooler import Run, Spooler
from appliance.audit.entry import format_time
from appliance.audit.log import AuditLog
from appliance.audit.merkle import hash_leaf
from appliance.audit.registry import EntryType
from appliance.audit.store import AuditStore
from appliance.errors import AuditEntryError, AuditUnavailableError

BATCH = 256
SHORT_SECONDS = 0.002


class Drain:
    """Empties one spool into one log."""

    def __init__(
        self,
        *,
        log: AuditLog,
        store: AuditStore,
        spool: Spool,
        spooler: Spooler,
        gap_file: GapFile,
        losses: Losses,
        in_flight: InFlight,
        run: Run,
        clock: Callable[[], float],
        patience_seconds: float,
    ) -> None:
        self._log, self._store, self._spool, self._spooler = log, store, spool, spooler
        self._gap_file, self._losses, self._in_flight = gap_file, losses, in_flight
        self._run, self._clock, self._patience = run, clock, patience_seconds

    async def drain(self, size: int) -> int:
        """
        Empty the spool, close what has to be closed, and say how many entries came from it.

        On success new entries still wait in memory: the caller has the spooler end, and hands them over.

        Args:
            size: durable entries when the spool was begun.

        Returns:
            How many entries waited in the spool.

        Raises:
            AuditUnavailableError: to be tried again once nothing is in flight any more.
        """
        try:
            seen = await self._look(size)
            while True:
                leaves = await self._run(partial(self._spool.read, BATCH))
                # Nearly there: what comes from now on waits for a commit or two.
                self._spooler.held = self._spooler.held or len(leaves) < BATCH
                if leaves:
                    await self._hand_on(leaves, seen, size)
                elif self._spooler.is_writing:
                    await asyncio.sleep(SHORT_SECONDS)
                else:
                    break
            await self._close_requests()
            await self._admit(seen)
            total = self._spool.total
            await self._report(seen)
            await self._run(self._spool.clear)
        except BaseException:
            self._spooler.held = False
            self._spooler.wake()
            raise
        return total

    async def admit_gap(self) -> None:
        """
        Say in the log how many entries are missing, if any.

        Raises:
            AuditUnavailableError: to be tried again.
        """
        if self._losses.gap is not None:
            await self._admit(await self._look(self._losses.gap.size))

    async def _hand_on(self, leaves: Sequence[bytes], seen: Arrivals, size: int) -> None:
        waiting: list[Handed] = []
        for leaf in leaves:
            handed = self._in_flight.own(self._log.remake(leaf), drained=True)
            if self._losses.is_lost(handed):
                self._losses.drop([handed], "its request began unrecorded", size)
            elif hash_leaf(leaf) in seen.leaf_hashes:
                self._log.readmit(handed, is_stored=True)
            else:
                self._log.readmit(handed)
                self._in_flight.add(handed)
                waiting.append(handed)
        for handed in waiting:
            try:
                await self._confirm(handed)
            except AuditEntryError as error:
                # It was acknowledged, and is lost: the log has to admit that.
                self._losses.drop([handed], f"the log refused a spooled entry: {error}", size)
        # A crash before this line: the next drain finds them in the log and passes them over.
        await self._run(partial(self._spool.advance, leaves))

    async def _close_requests(self) -> None:
        if not self._losses.unended:
            return
        still_open = set(await self._run(self._store.open_intents))
        for request_id, reason in tuple(self._losses.unended.items()):
            if request_id in still_open:
                # The log may have ended it itself meanwhile, and then refuses this.
                with suppress(AuditEntryError):
                    await self._append(EntryType.REQUEST_ABORTED, request_id=request_id, reason=reason)
            del self._losses.unended[request_id]

    async def _admit(self, seen: Arrivals) -> None:
        gap = self._losses.gap
        if gap is None:
            return
        missing, until = self._losses.missing(gap, seen), self._time()
        if missing > 0:
            await self._append(
                EntryType.AUDIT_GAP, reason=gap.reason, entries=missing, since=gap.since, until=until
            )
        self._losses.admit(gap, until, self._log.size)
        # A crash before this line: the next start finds the entry in the log, by the time it began.
        with suppress(OSError):
            await self._run(partial(self._gap_file.write, self._losses.gap))

    async def _report(self, seen: Arrivals) -> None:
        start = self._spool.start
        if start is None or start.spool in seen.spools:
            return
        await self._append(
            EntryType.AUDIT_SPOOLED,
            reason=start.reason,
            entries=self._spool.total,
            since=start.since,
            until=self._time(),
            spool=start.spool,
        )

    async def _append(self, entry_type: EntryType, **fields: str | int) -> None:
        handed = self._in_flight.own(self._log.make(entry_type, fields), drained=True)
        self._log.readmit(handed)
        self._in_flight.add(handed)
        await self._confirm(handed)

    async def _confirm(self, handed: Handed) -> None:
        try:
            # While others wait for these steps, the log gets no more time than it gets from them.
            async with asyncio.timeout(self._patience if self._spooler.held else None):
                await self._log.confirm(handed.future)
        except TimeoutError as error:
            raise AuditUnavailableError("the database is too slow to take what was spooled") from error

    async def _look(self, size: int) -> Arrivals:
        return await self._run(partial(arrivals, self._store, size))

    def _time(self) -> str:
        return format_time(int(self._clock() * 1000))
