"""
The task that forwards the log: one gateway of several does it, by lease; requests never wait for it.

The log itself is the queue: a slow or dead collector costs lag, not memory.  Syslog over TLS has no
acknowledgements, so nothing here knows what a collector has stored.  What is known: of the bytes a connection
has taken, at most those in the buffers of both kernels are unread.  So the cursor stays WINDOW_BYTES behind
what was sent, and a new connection begins at the cursor: receivers get entries again and drop them by index.
What a collector reads and then loses, it loses; the proof in the stream shows it.  See decision 0047.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from appliance.audit.forward.cursor import Cursor, ForwardStore
from appliance.audit.forward.reader import Batch, LogReader
from appliance.errors import AuditError
from appliance.infra.lease import Lease
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics

WINDOW_BYTES = 16 * 2**20
"""More than Linux lets one connection hold unread: 4 MiB where it is sent, 6 MiB where it is received."""
MARK_BYTES = 2**16
POLL_SECONDS = 0.5
OBSERVE_SECONDS = 1.0
SAVE_SECONDS = 1.0
ALIVE_SECONDS = 60.0
"""After so long without an entry the last checkpoint is sent again."""
RETRY_SECONDS = 1.0, 30.0
RESTS = 2.0
"""Rest after each batch, as a multiple of the time its reading took: catching up must not slow requests."""


class Connection(Protocol):
    async def send(self, data: bytes) -> None: ...

    async def wait(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardState:
    lag_entries: int = 0
    """Entries of the log that were not sent yet."""
    lag_seconds: float = 0.0
    """Age of the oldest of them."""
    failure: str | None = None
    """Why this gateway cannot forward."""


class Window:
    """What was sent over one connection, and how much of it the other side must have read."""

    def __init__(self, cursor: Cursor, window_bytes: int) -> None:
        self._window_bytes, self._bytes = window_bytes, 0
        self._marks: deque[tuple[int, Cursor]] = deque()
        self.cursor = cursor
        """Where a new connection has to begin; its `sent` is up to date."""

    def sent(self, batch: Batch) -> None:
        self._bytes += len(batch.data)
        newest = self._marks[-1][0] if self._marks else -MARK_BYTES
        if batch.cursor is not None and self._bytes - newest >= MARK_BYTES:
            self._marks.append((self._bytes, batch.cursor))
        while self._marks and self._marks[0][0] <= self._bytes - self._window_bytes:
            self.cursor = self._marks.popleft()[1]
        self.cursor = replace(self.cursor, sent=max(self.cursor.sent, batch.tree.size))


class Forwarder:
    """`connect` opens a connection to `destination`; `clock` is Unix time, `monotonic` in seconds."""

    def __init__(
        self,
        *,
        destination: str,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        reader: LogReader,
        forward: ForwardStore,
        lease: Lease,
        metrics: Metrics,
        logger: Logger,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._destination, self._connect = destination, connect
        self._reader, self._forward, self._lease = reader, forward, lease
        self._metrics, self._logger = metrics, logger
        self._clock, self._monotonic = clock, monotonic
        self._window_bytes = window_bytes
        self._failures = 0
        self._saved, self._saved_at = Cursor(), float("-inf")
        self.state = ForwardState()
        metrics.audit_forward_lag.set_function(lambda: self.state.lag_entries)
        metrics.audit_forward_lag_seconds.set_function(lambda: self.state.lag_seconds)

    @property
    def warning(self) -> str | None:
        """What an operator should check, in one line."""
        if self.state.failure is None:
            return None
        return f"the log is not forwarded, {self.state.lag_entries} entries behind: {self.state.failure}"

    async def run(self) -> None:
        """Forward until cancelled."""
        observing = asyncio.create_task(self._observe())
        try:
            while True:
                if await self._lease.hold():
                    await self._try()
                else:
                    self._works()  # another gateway forwards, or the log's own health reports the database
                    await asyncio.sleep(OBSERVE_SECONDS)
        finally:
            observing.cancel()
            await self._lease.release()

    async def _try(self) -> None:
        try:
            await self.forward()
        except AuditError as error:
            self._fails(str(error))
            # Another gateway may reach what this one does not.
            await self._lease.release()
            first, longest = RETRY_SECONDS
            await asyncio.sleep(min(first * 2 ** (self._failures - 1), longest))

    async def forward(self, *, until_sent: bool = False) -> None:
        """
        Send over one connection, while the lease is held; with `until_sent` only what is due now.

        Raises ForwardError if the connection fails, AuditVerificationError if the log was altered, and
        AuditUnavailableError if it cannot be read.
        """
        stored = await asyncio.to_thread(self._forward.load, self._destination)
        cursor = await asyncio.to_thread(self._reader.begin, stored)
        await asyncio.to_thread(self._reader.check, cursor)
        async with self._connect() as connection:
            if cursor is not stored:
                # A receiver proves the entries that follow from it.
                await connection.send(await asyncio.to_thread(self._reader.again, cursor))
            window, tree, last = Window(cursor, self._window_bytes), cursor.tree, cursor
            quiet_since = self._monotonic()
            while await self._lease.hold():
                began = self._monotonic()
                batch = await asyncio.to_thread(self._reader.next, tree)
                if batch is not None:
                    rest = (self._monotonic() - began) * RESTS
                    await connection.send(batch.data)
                    tree, last, quiet_since = batch.tree, batch.cursor or last, self._monotonic()
                    window.sent(batch)
                    await self._save(window.cursor)
                elif until_sent:
                    await self._save(window.cursor, now=True)
                    return
                else:
                    self._works()
                    rest = POLL_SECONDS
                    await self._save(window.cursor)
                    if self._monotonic() - quiet_since >= ALIVE_SECONDS:
                        await connection.send(await asyncio.to_thread(self._reader.again, last))
                        quiet_since = self._monotonic()
                await connection.wait(rest)

    async def _save(self, cursor: Cursor, *, now: bool = False) -> None:
        """Keep the cursor, not more often than once a second; a crash before it sends entries again."""
        is_due = now or self._monotonic() - self._saved_at >= SAVE_SECONDS
        if is_due and cursor != self._saved:
            await asyncio.to_thread(self._forward.save, self._destination, cursor)
            self._saved, self._saved_at = cursor, self._monotonic()

    async def _observe(self) -> None:
        while True:
            with suppress(AuditError):  # the log's own health reports the database
                behind, seconds = await asyncio.to_thread(self._measure)
                self.state = replace(self.state, lag_entries=behind, lag_seconds=seconds)
            await asyncio.sleep(OBSERVE_SECONDS)

    def _measure(self) -> tuple[int, float]:
        sent = self._forward.load(self._destination).sent
        behind = max(0, self._reader.store.head().size - sent)
        seconds = 0.0
        if behind and (waiting := self._reader.store.leaves(sent, sent + 1)):
            seconds = max(0.0, self._clock() - _time_of(waiting[0].leaf, self._clock()))
        return behind, seconds

    def _works(self) -> None:
        if self.state.failure is not None:
            self._logger.info("audit_forwarded", detail=self._destination)
        self._failures, self.state = 0, replace(self.state, failure=None)

    def _fails(self, reason: str) -> None:
        self._failures += 1
        self._metrics.audit_forward_failures.inc()
        if self.state.failure != reason:
            self._logger.warning("audit_not_forwarded", detail=self._destination, error=reason)
        self.state = replace(self.state, failure=reason)


def _time_of(leaf: bytes, otherwise: float) -> float:
    try:
        return datetime.fromisoformat(json.loads(leaf)["time"]).timestamp()
    except (ValueError, KeyError, TypeError, RecursionError):
        return otherwise  # altered; the reader reports it
