"""
Takes entries to the spool while the log takes none, in order, many with one fsync.

Entries wait here in memory until they are written; then whoever waits for them is told.  What there
is no room for is refused (fails closed), or in mode `open` let pass and counted (fails open).
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from appliance.audit.durability.gap import REASON_CHARACTERS, GapFile
from appliance.audit.durability.handed import Handed
from appliance.audit.durability.losses import Losses
from appliance.audit.durability.spool import FRAME_BYTES, Spool, Start
from appliance.audit.entry import format_time, new_entry_id
from appliance.audit.log import AuditLog
from appliance.audit.pending import Kept
from appliance.errors import AuditError, AuditUnavailableError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings

T = TypeVar("T")


class Run(Protocol):
    """Runs a blocking call in the one thread that may touch the spool."""

    async def __call__(self, call: Callable[[], T]) -> T:
        """Return what the call returns."""


class Spooler:
    """The entries on their way into one spool."""

    def __init__(
        self,
        *,
        log: AuditLog,
        spool: Spool,
        gap_file: GapFile,
        losses: Losses,
        settings: AuditSettings,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        run: Run,
    ) -> None:
        self._log, self._spool, self._gap_file, self._losses = log, spool, gap_file, losses
        self._settings, self._metrics, self._logger = settings, metrics, logger
        self._clock, self._run = clock, run
        self._open = settings.durability == "open"
        # To be written, or to be handed to the log after the last step of draining.
        self._backlog: deque[Handed] = deque()
        self._wake = asyncio.Event()
        self.start: Start | None = None
        """When and why entries began to come here; None while the log takes them."""
        self.full = False
        """Whether something was refused for lack of room."""
        self.is_writing = False
        self.ended = spool.ended
        """Requests whose end is in the spool."""
        self.held = False
        """Whether entries are to wait in memory, because the spool is about to be removed."""

    @property
    def is_idle(self) -> bool:
        """Whether everything that came was written or refused."""
        return not self._backlog and not self.is_writing

    def begin(self, reason: str, in_flight: Iterable[Handed]) -> bool:
        """Take entries from now on, and first what the log has and may not keep; False if it does already."""
        if self.start is not None:
            return False
        now_ms = int(self._clock() * 1000)
        self.start = Start(
            spool=new_entry_id(now_ms, os.urandom(10)),
            log=self._settings.origin,
            size=self._log.size,
            since=format_time(now_ms),
            reason=reason[:REASON_CHARACTERS],
        )
        for handed in in_flight:
            self._losses.doubt(handed)
            if not handed.drained:
                self._backlog.append(handed)
        self._logger.error("audit_spooling_started", reason=reason, mode=self._settings.durability)
        self.wake()
        return True

    def end(self) -> list[Handed]:
        """Take no more; return what was not written, for the log."""
        self.start, self.full, self.held = None, False, False
        self.ended.clear()
        waiting = [handed for handed in self._backlog if not handed.is_settled]
        self._backlog.clear()
        return waiting

    def wake(self) -> None:
        """Look again whether there is something to write."""
        self._wake.set()

    def keep(self, handed: Handed) -> None:
        """
        Queue an entry for the spool.

        Raises:
            AuditUnavailableError: too many wait already.
        """
        if len(self._backlog) >= self._settings.queue_entries and not handed.ends:
            reason = f"{len(self._backlog)} audit entries wait: the spool does not keep up"
            if not self._open:
                raise AuditUnavailableError(reason)
            self.drop([handed], reason)
            return
        if handed.ends and handed.request_id:
            self._log.owe(handed.request_id)
        self._backlog.append(handed)
        self.wake()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.held or not self._backlog:
                continue
            entries = [handed for handed in self._backlog if not handed.is_settled]
            self._backlog.clear()
            self.is_writing = True
            try:
                await self._write(entries)
            finally:
                self.is_writing = False

    async def _write(self, entries: Sequence[Handed]) -> None:
        assert self.start is not None  # noqa: S101 - a backlog is written while spooling only
        fitting, refused = self._fit(entries)
        self.full = self.full or bool(refused)
        error = AuditUnavailableError(f"{self.start.reason}; and the spool is full")
        if fitting:
            try:
                await self._run(partial(self._spool.append, [one.leaf for one in fitting], self.start))
            except AuditUnavailableError as failure:
                error, fitting, refused = failure, [], list(entries)
        for handed in fitting:
            if handed.ends and handed.request_id:
                self.ended.add(handed.request_id)
            handed.acknowledge(Kept.SPOOLED)
        self._metrics.audit_spooled.inc(len(fitting))
        if refused and self._open:
            self._count(refused, str(error))
            with suppress(OSError):  # the mode says that this is no reason to stop
                await self._run(partial(self._gap_file.write, self._losses.gap))
            for handed in refused:
                handed.acknowledge(Kept.UNRECORDED)
        elif refused:
            self._refuse(refused, error)

    def _fit(self, entries: Sequence[Handed]) -> tuple[list[Handed], list[Handed]]:
        """Return what there is room for and what there is not; an end needs its intent."""
        fitting: list[Handed] = []
        refused: list[Handed] = []
        used, in_vain = 0, set[str | None]()
        for handed in entries:
            size = FRAME_BYTES + len(handed.leaf)
            without_intent = handed.ends and handed.request_id in in_vain
            without_intent = without_intent or self._losses.is_lost(handed)
            if without_intent or used + size > self._spool.room(handed.type):
                refused.append(handed)
                if handed.begins:
                    in_vain.add(handed.request_id)
            else:
                fitting.append(handed)
                used += size
        return fitting, refused

    def _refuse(self, refused: Sequence[Handed], error: AuditError) -> None:
        in_vain = {one.request_id for one in refused if one.begins}
        # Ends that were queued before anybody could know that their intent failed.
        also = [one for one in self._backlog if one.ends and one.request_id in in_vain]
        for handed in also:
            self._backlog.remove(handed)
        everything = (*refused, *also)
        self._losses.refuse(everything)
        for handed in everything:
            handed.give_up(error)

    def drop(self, dropped: Sequence[Handed], reason: str) -> None:
        """Let pass what nobody can be made to wait for."""
        self._count(dropped, reason)
        for handed in dropped:
            handed.acknowledge(Kept.UNRECORDED)

    def _count(self, dropped: Sequence[Handed], reason: str) -> None:
        size = self.start.size if self.start else self._log.size
        if self._losses.drop(dropped, reason, size):
            self._logger.error("audit_entries_dropped", reason=reason)
