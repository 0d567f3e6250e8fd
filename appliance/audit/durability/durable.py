"""
What happens to requests while the database takes no entries: `strict` or `spool`.

`DurableLog` stands between those who record and the `AuditLog`.  In `strict` it passes every entry on.  In
`spool` it tracks what it handed over.  When the log refuses an entry or takes too long over one, every entry
goes to the spool, in order, and is acknowledged from there.  When the log works again the spool is drained
into it (`drain`), also in order: no entry overtakes an earlier one.

Both modes fail closed: an entry that is kept nowhere is refused.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from appliance.audit.durability.drain import SHORT_SECONDS, Drain
from appliance.audit.durability.in_flight import InFlight, TrackedEntry
from appliance.audit.durability.losses import Losses, load_gap, save_gap
from appliance.audit.durability.spool import Spool
from appliance.audit.durability.spooler import Spooler
from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog
from appliance.audit.pending import Receipt
from appliance.audit.stored import AuditStore
from appliance.errors import AuditEntryError, AuditError, AuditUnavailableError
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings

T = TypeVar("T")
RETRY_SECONDS = 0.25
LONGEST_RETRY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DurabilityState:
    mode: str = "strict"
    spooling: bool = False
    since: str | None = None
    """Entry time at which spooling began."""
    reason: str | None = None
    spooled_entries: int = 0
    spooled_bytes: int = 0
    spool_full: bool = False
    dropped_entries: int = 0
    """Entries of this process that were acknowledged from the spool and that the log then refused."""
    gap_entries: int = 0
    """Entries that are missing and that the log has not admitted yet."""


class DurableLog:
    """
    An `AuditLog` with a second place to keep entries; made and used on one event loop, while `running`.

    `log` is open, with `kept=spool.ended`; `store` is its own, read from another thread while draining; the
    caller closes `spool`; the file `gap_path` counts entries which a former process lost.  Raises
    ConfigurationError if that file cannot be read.
    """

    def __init__(
        self,
        *,
        log: AuditLog,
        store: AuditStore,
        spool: Spool,
        gap_path: Path,
        settings: AuditSettings,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
    ) -> None:
        self._log, self._spool, self._gap_path = log, spool, gap_path
        self._settings, self._metrics, self._logger = settings, metrics, logger
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-spool")
        self._loop = asyncio.get_running_loop()
        self._strict = settings.durability == "strict"
        # While spooling, everything in flight is also in the spool or on its way there.
        self._in_flight = InFlight(self._was_refused, self._loop.time)
        self._losses = Losses(load_gap(gap_path), spool.begun, clock, metrics.audit_dropped.inc)
        self._spooler = Spooler(
            log=log,
            spool=spool,
            losses=self._losses,
            settings=settings,
            metrics=metrics,
            logger=logger,
            clock=clock,
            run=self._run,
        )
        self._drain = Drain(
            log=log,
            store=store,
            spool=spool,
            spooler=self._spooler,
            gap_path=gap_path,
            losses=self._losses,
            in_flight=self._in_flight,
            run=self._run,
            clock=clock,
            patience_seconds=settings.spool_after_seconds,
        )
        self._closing = self._closed = False
        self._is_spooling = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.damage: str | None = None
        """Why the stored log is not what was written, in one line; set by the health monitor."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """
        Bring what a former process left in the spool into the log, and keep entries until the block ends.

        Raises AuditUnavailableError if the log cannot take a gap, or in mode `strict` what waits in the
        spool, and AuditEntryError if what waits is not of this log.
        """
        with self._thread:
            try:
                await self._begin()
                yield self
            finally:
                await self._end()

    def state(self) -> DurabilityState:
        start, gap = self._spooler.start, self._losses.gap
        return DurabilityState(
            mode=self._settings.durability,
            spooling=start is not None,
            since=start.since if start else None,
            reason=start.reason if start else None,
            spooled_entries=self._spool.entries,
            spooled_bytes=self._spool.size_bytes,
            spool_full=self._spooler.full,
            dropped_entries=self._losses.dropped,
            gap_entries=gap.entries if gap else 0,
        )

    async def wait_failed(self) -> None:
        """Wait until keeping entries has failed for good, and raise why: the process should end then."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        else:
            await asyncio.Event().wait()

    async def confirm(self, pending: asyncio.Future[Receipt]) -> Receipt:
        """
        Wait until a submitted entry is acknowledged, at most `append_timeout_seconds`.

        After AuditUnavailableError because of a timeout, it may yet become durable.
        """
        return await self._log.confirm(pending)

    async def append(self, entry_type: EntryType, /, **fields: Any) -> Receipt:  # noqa: ANN401
        """As `AuditLog.append`; an entry in the spool has no index."""
        return await self._log.placed(await self.confirm(self.submit(entry_type, **fields)))

    def submit(self, entry_type: EntryType, /, **fields: Any) -> asyncio.Future[Receipt]:  # noqa: ANN401
        """
        Hand over one entry, as to the log; the receipt tells where it is kept.

        Raises AuditEntryError if it is malformed, or its request is in the wrong state for it,
        AuditUnavailableError if it cannot be kept, or the stored log was found altered, and AuditForkError if
        another writer has taken the log over.
        """
        if self.damage and not entry_type.closes_request:
            raise AuditUnavailableError(self.damage)
        if self._strict:
            return self._log.submit(entry_type, **fields)
        if self._closing:
            raise AuditUnavailableError("the audit log is closing")
        entry = self._in_flight.track(self._log.make(entry_type, fields))
        if self._losses.is_lost(entry):
            raise AuditEntryError(f"the log refused the intent of request {entry.request_id}: it cannot end")
        if self._spooler.start is None:
            try:
                self._log.hand_over(entry)
            except AuditUnavailableError as error:
                self._begin_spooling(str(error))
            else:
                self._in_flight.add(entry)
                return entry.future
        self._spooler.keep(entry)
        return entry.future

    def _was_refused(self, entry: TrackedEntry, error: AuditError) -> None:
        """The log reports an error: it may have taken the entry all the same."""
        if not isinstance(error, AuditUnavailableError) or self._closed:
            self._in_flight.forget(entry)
            entry.give_up(error)
            return
        self._begin_spooling(str(error))  # takes over all that is in flight, this one included
        self._in_flight.forget(entry)
        if entry.request_id and (entry.begins_request or entry.ends_request):
            # Otherwise the log would end the request itself once it reads the store again.
            self._log.delegate_outcome(entry.request_id)
        if entry.is_drained:
            entry.give_up(error)
        else:
            entry.on_settled(entry.type, error)

    def _begin_spooling(self, reason: str) -> None:
        if self._spooler.begin(reason, self._in_flight):
            self._is_spooling.set()

    async def _drain_when_back(self) -> None:
        seconds = RETRY_SECONDS
        while True:
            await self._is_spooling.wait()
            await asyncio.sleep(seconds)
            if self._log.state().failure or self._in_flight:
                continue
            try:
                await self._resume()
            except AuditUnavailableError as error:
                self._logger.warning("audit_drain_failed", error=str(error))
                seconds = min(LONGEST_RETRY_SECONDS, 2 * seconds)
                continue
            seconds = RETRY_SECONDS

    async def _resume(self) -> None:
        assert self._spooler.start is not None  # noqa: S101 - checked by the callers
        total = await self._drain.drain(self._spooler.start.size)
        # From here on nothing is awaited: no entry can come between the last step and the change.
        self._losses.doubtful.clear()
        waiting = self._spooler.end()
        self._is_spooling.clear()
        for entry in waiting:
            self._in_flight.add(entry)
            try:
                self._log.readmit(entry)
            except AuditError as error:
                self._in_flight.forget(entry)
                entry.give_up(error)
        self._logger.info("audit_spooling_ended", count=total)

    async def _spool_when_slow(self) -> None:
        patience = self._settings.spool_after_seconds
        while True:
            await asyncio.sleep(patience / 4)
            if self._spooler.start is None and self._in_flight.age_seconds() > patience:
                self._begin_spooling(f"the database took more than {patience:g} s over an entry")

    async def _begin(self) -> None:
        if self._spool.torn_bytes:
            self._logger.warning("audit_spool_torn", count=self._spool.torn_bytes)
        if self._spool.start is not None:
            self._spooler.start = self._spool.start
            self._is_spooling.set()
            try:
                await self._resume()
            except AuditUnavailableError:
                if self._strict:
                    raise
        else:
            await self._drain.admit_gap()
        if not self._strict:
            work = (self._spooler.run(), self._drain_when_back(), self._spool_when_slow())
            self._tasks = [self._loop.create_task(one, name="audit-spool") for one in work]

    async def _end(self) -> None:
        """Settle every entry that was handed over: what the log has not taken by then is spooled."""
        self._closing = True
        if self._tasks:
            writing, *others = self._tasks
            closing_at = self._loop.time() + self._settings.spool_after_seconds
            while self._in_flight and self._spooler.start is None:
                await asyncio.sleep(SHORT_SECONDS)
                if self._loop.time() > closing_at:
                    break
            if self._in_flight:
                self._begin_spooling("the database took too long when the gateway stopped")
            await _cancel(others)
            while not self._spooler.is_idle and not writing.done():
                self._spooler.wake()
                await asyncio.sleep(SHORT_SECONDS)
            await _cancel([writing])
        if self._losses.gap is not None:
            with suppress(OSError):
                await self._run(partial(save_gap, self._gap_path, self._losses.gap))
        self._closed = True
        # The log closes after this, and must not end requests whose end waits in the spool.
        for request_id in self._spooler.ended:
            self._log.delegate_outcome(request_id)

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._thread, call)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
