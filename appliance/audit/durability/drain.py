"""
Brings what waits in the spool into the log, in order and exactly once, then closes requests and reports.

An entry leaves the spool only after its commit.  A commit whose answer was lost may have happened, and a
process may have ended between a commit and the note that it was made: entries that the log holds already are
recognised by their hash, which is unique because each entry has an id, and skipped.

Fails closed: whatever cannot be done now is retried from where it stopped.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from appliance.audit.durability.in_flight import InFlight, TrackedEntry
from appliance.audit.durability.losses import Losses, save_gap, short_name
from appliance.audit.durability.spool import Spool
from appliance.audit.durability.spooler import RunInThread, Spooler
from appliance.audit.entry import format_time, without_place
from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.merkle import hash_leaf
from appliance.audit.stored import AuditStore, Leaf
from appliance.errors import AuditEntryError, AuditUnavailableError

BATCH = 256
CHUNK = 1024
SHORT_SECONDS = 0.002


@dataclass(slots=True, kw_only=True)
class RecordedSince:
    """What the log holds from some entry on."""

    leaf_hashes: set[bytes] = field(default_factory=set)
    spools: set[str] = field(default_factory=set)
    """Ids of the spools that an `audit.spooled` entry reports."""
    gaps: Counter[str] = field(default_factory=Counter)
    """Entries that `audit.gap` entries admit are missing, by the time the gap began."""

    @classmethod
    def since(cls, store: AuditStore, start: int) -> "RecordedSince":
        """Read everything from index `start` on.  Blocks; raises AuditUnavailableError."""
        found = cls()
        # Before the log: an entry that is moved into it meanwhile is found twice rather than not at all.
        for leaf in store.accepted_leaves():
            found._add(leaf)
        while leaves := store.leaves(start, start + CHUNK):
            for leaf in leaves:
                found._add(leaf)
            start += len(leaves)
        return found

    def _add(self, leaf: Leaf) -> None:
        leaf_hash = leaf.leaf_hash
        if b'"sequence":' in leaf.leaf:
            # The spool has it as it was before a gateway accepted it; the verifier judges malformed entries.
            with suppress(AuditEntryError):
                leaf_hash = hash_leaf(without_place(leaf.leaf))
        if leaf_hash in self.leaf_hashes:
            return
        self.leaf_hashes.add(leaf_hash)
        if leaf.type == EntryType.AUDIT_SPOOLED:
            self.spools.add(json.loads(leaf.leaf)["spool"])
        elif leaf.type == EntryType.AUDIT_GAP:
            entry = json.loads(leaf.leaf)
            self.gaps[entry["since"]] += entry["entries"]


class Drain:
    def __init__(
        self,
        *,
        log: AuditLog,
        store: AuditStore,
        spool: Spool,
        spooler: Spooler,
        gap_path: Path,
        losses: Losses,
        in_flight: InFlight,
        run: RunInThread,
        clock: Callable[[], float],
        patience_seconds: float,
    ) -> None:
        self._log, self._store, self._spool, self._spooler = log, store, spool, spooler
        self._gap_path, self._losses, self._in_flight = gap_path, losses, in_flight
        self._run, self._clock, self._patience = run, clock, patience_seconds

    async def drain(self, size: int) -> int:
        """
        Empty the spool, close what has to be closed, and return how many entries waited in it.

        On success new entries still wait in memory: the caller ends spooling, and hands them over.
        `size` is the number of durable entries when the spool was begun.  After AuditUnavailableError, retry
        once nothing is in flight any more.
        """
        try:
            recorded = await self._read_recorded(size)
            while True:
                leaves = await self._run(partial(self._spool.read, BATCH))
                # Nearly there: new entries wait in memory for a commit or two.
                self._spooler.held = self._spooler.held or len(leaves) < BATCH
                if leaves:
                    await self._hand_over(leaves, recorded, size)
                elif self._spooler.is_writing:
                    await asyncio.sleep(SHORT_SECONDS)
                else:
                    break
            await self._close_requests()
            await self._admit(recorded)
            total = self._spool.total
            await self._report(recorded)
            await self._run(self._spool.clear)
        except BaseException:
            self._spooler.held = False
            self._spooler.wake()
            raise
        return total

    async def admit_gap(self) -> None:
        """Record how many entries are missing, if any; raises AuditUnavailableError: retry."""
        if self._losses.gap is not None:
            await self._admit(await self._read_recorded(self._losses.gap.size))

    async def _hand_over(self, leaves: Sequence[bytes], recorded: RecordedSince, size: int) -> None:
        waiting: list[TrackedEntry] = []
        for leaf in leaves:
            entry = self._in_flight.track(self._log.remake(leaf), is_drained=True)
            if self._losses.is_lost(entry):
                self._losses.drop(entry, "its request began unrecorded", size)
            elif hash_leaf(leaf) in recorded.leaf_hashes:
                self._log.readmit(entry, is_stored=True)
            else:
                self._log.readmit(entry)
                self._in_flight.add(entry)
                waiting.append(entry)
        for entry in waiting:
            try:
                await self._confirm(entry)
            except AuditEntryError as error:
                # It was acknowledged, and is lost: the log has to admit that.
                self._losses.drop(entry, f"the log refused a spooled entry: {error}", size)
        # A crash before this line: the next drain finds them in the log and skips them.
        await self._run(partial(self._spool.advance, leaves))

    async def _close_requests(self) -> None:
        if not self._losses.unended:
            return
        # Where gateways share the log, an intent may not be in the tree yet: the log knows which are open.
        still_open = set() if self._store.shared else set(await self._run(self._store.open_intents))
        for request_id, reason in tuple(self._losses.unended.items()):
            if self._store.shared or request_id in still_open:
                # The log may have ended it itself meanwhile, and then refuses this.
                with suppress(AuditEntryError):
                    await self._append(EntryType.REQUEST_ABORTED, request_id=request_id, reason=reason)
            del self._losses.unended[request_id]

    async def _admit(self, recorded: RecordedSince) -> None:
        gap = self._losses.gap
        if gap is None:
            return
        doubtful = set(gap.doubtful)
        found = sum(short_name(each) in doubtful for each in recorded.leaf_hashes) if doubtful else 0
        missing = gap.entries - recorded.gaps[gap.since] - found
        if missing > 0:
            await self._append(
                EntryType.AUDIT_GAP, reason=gap.reason, entries=missing, since=gap.since, until=self._time()
            )
        self._losses.gap = None
        # A crash before this line: the next start finds the entry in the log, by the time the gap began.
        with suppress(OSError):
            await self._run(partial(save_gap, self._gap_path, None))

    async def _report(self, recorded: RecordedSince) -> None:
        start = self._spool.start
        if start is None or start.spool in recorded.spools:
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
        entry = self._in_flight.track(self._log.make(entry_type, fields), is_drained=True)
        self._log.readmit(entry)
        self._in_flight.add(entry)
        await self._confirm(entry)

    async def _confirm(self, entry: TrackedEntry) -> None:
        try:
            # While callers wait for these steps, the log gets no more time than it gets for their entries.
            async with asyncio.timeout(self._patience if self._spooler.held else None):
                await self._log.confirm(entry.future)
        except TimeoutError as error:
            raise AuditUnavailableError("the database is too slow to take what was spooled") from error

    async def _read_recorded(self, size: int) -> RecordedSince:
        return await self._run(partial(RecordedSince.since, self._store, size))

    def _time(self) -> str:
        return format_time(int(self._clock() * 1000))
