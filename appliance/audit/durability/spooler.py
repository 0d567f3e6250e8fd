"""
Writes entries to the spool while the log takes none: in order, many with one fsync.

Entries wait here in memory until they are written; then their callers learn that they are spooled.  What
there is no room for is refused: the spooler fails closed.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from appliance.audit.durability.in_flight import TrackedEntry
from appliance.audit.durability.losses import REASON_CHARACTERS, Losses
from appliance.audit.durability.spool import FRAME_BYTES, Spool, SpoolStart
from appliance.audit.entry import format_time, new_entry_id
from appliance.audit.log import AuditLog
from appliance.errors import AuditError, AuditUnavailableError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings

T = TypeVar("T")


class RunInThread(Protocol):
    """Runs a blocking call in the one thread that may touch the spool."""

    async def __call__(self, call: Callable[[], T]) -> T: ...


class Spooler:
    """The entries on their way into one spool."""

    def __init__(
        self,
        *,
        log: AuditLog,
        spool: Spool,
        losses: Losses,
        settings: AuditSettings,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        run: RunInThread,
    ) -> None:
        self._log, self._spool, self._losses = log, spool, losses
        self._settings, self._metrics, self._logger = settings, metrics, logger
        self._clock, self._run = clock, run
        # To be written, or to be handed to the log after the last step of draining.
        self._backlog: deque[TrackedEntry] = deque()
        self._wake = asyncio.Event()
        self.start: SpoolStart | None = None
        """When and why spooling began; None while the log takes entries."""
        self.full = False
        """Whether something was refused for lack of room."""
        self.is_writing = False
        self.ended = spool.ended
        """Requests whose end is in the spool."""
        self.held = False
        """Whether entries are to wait in memory, because the spool is about to be removed."""

    @property
    def is_idle(self) -> bool:
        """Whether every entry was written or refused."""
        return not self._backlog and not self.is_writing

    def begin(self, reason: str, in_flight: Iterable[TrackedEntry]) -> bool:
        """Spool from now on, first what the log has and may not keep; False if spooling already."""
        if self.start is not None:
            return False
        now_ms = int(self._clock() * 1000)
        self.start = SpoolStart(
            spool=new_entry_id(now_ms, os.urandom(10)),
            log=self._settings.origin,
            size=self._log.size,
            since=format_time(now_ms),
            reason=reason[:REASON_CHARACTERS],
        )
        for entry in in_flight:
            self._losses.doubtful.add(entry.entry.id)
            if not entry.is_drained:
                self._backlog.append(entry)
        self._logger.error("audit_spooling_started", reason=reason, mode=self._settings.durability)
        self.wake()
        return True

    def end(self) -> list[TrackedEntry]:
        """Spool no more; return the entries that were not written, for the log."""
        self.start, self.full, self.held = None, False, False
        self.ended.clear()
        waiting = [entry for entry in self._backlog if not entry.is_settled]
        self._backlog.clear()
        return waiting

    def wake(self) -> None:
        self._wake.set()

    def keep(self, entry: TrackedEntry) -> None:
        """Queue an entry for the spool; raises AuditUnavailableError if too many wait already."""
        if len(self._backlog) >= self._settings.queue_entries and not entry.ends_request:
            message = f"{len(self._backlog)} audit entries wait: the spool does not keep up"
            raise AuditUnavailableError(message)
        if entry.ends_request and entry.request_id:
            self._log.delegate_outcome(entry.request_id)
        self._backlog.append(entry)
        self.wake()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.held or not self._backlog:
                continue
            entries = [entry for entry in self._backlog if not entry.is_settled]
            self._backlog.clear()
            self.is_writing = True
            try:
                await self._write(entries)
            finally:
                self.is_writing = False

    async def _write(self, entries: Sequence[TrackedEntry]) -> None:
        assert self.start is not None  # noqa: S101 - a backlog is written while spooling only
        fitting, refused = self._fit(entries)
        self.full = self.full or bool(refused)
        error = AuditUnavailableError(f"{self.start.reason}; and the spool is full")
        if fitting:
            try:
                await self._run(partial(self._spool.append, [one.leaf for one in fitting], self.start))
            except AuditUnavailableError as failure:
                error, fitting, refused = failure, [], list(entries)
        for entry in fitting:
            if entry.ends_request and entry.request_id:
                self.ended.add(entry.request_id)
            entry.acknowledge_spooled()
        self._metrics.audit_spooled.inc(len(fitting))
        if refused:
            self._refuse(refused, error)

    def _fit(self, entries: Sequence[TrackedEntry]) -> tuple[list[TrackedEntry], list[TrackedEntry]]:
        """Return the entries there is room for, and the others; an end needs its intent."""
        fitting: list[TrackedEntry] = []
        refused: list[TrackedEntry] = []
        used, in_vain = 0, set[str | None]()
        for entry in entries:
            size = FRAME_BYTES + len(entry.leaf)
            without_intent = entry.ends_request and entry.request_id in in_vain
            without_intent = without_intent or self._losses.is_lost(entry)
            if without_intent or used + size > self._spool.room(entry.type):
                refused.append(entry)
                if entry.begins_request:
                    in_vain.add(entry.request_id)
            else:
                fitting.append(entry)
                used += size
        return fitting, refused

    def _refuse(self, refused: Sequence[TrackedEntry], error: AuditError) -> None:
        in_vain = {one.request_id for one in refused if one.begins_request}
        # Ends that were queued before their intent was known to have failed.
        also = [one for one in self._backlog if one.ends_request and one.request_id in in_vain]
        for entry in also:
            self._backlog.remove(entry)
        everything = (*refused, *also)
        self._losses.refuse(everything)
        for entry in everything:
            entry.give_up(error)
