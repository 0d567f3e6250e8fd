"""
The one task that moves the log's head: it takes queued entries, commits them, and resolves their futures.

Memory matches the store, except while a commit is in doubt: then the store's head is read before anything
else is written.  Entries of other gateways are read, checked and followed: before a commit if they were
faster, before every checkpoint, and with every heartbeat.  So only heads that were read back and recomputed
are signed, and two gateways never sign two histories.

Gateways that share a log on PostgreSQL have `appliance.audit.shared_writer`, which goes by this one's queue.
Here others are commands, and gateways that wrote the log under another name before.

Fails closed.  While the store fails, every waiting entry is refused, and the next entry tries again.  If the
stored log is not the known log with entries appended, the writer stops for good.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from appliance.audit.commit_thread import CommitThread
from appliance.audit.entry_types import EntryType
from appliance.audit.known import KnownLog, PlacedEntries, silent_gateways
from appliance.audit.merkle import CompactRange
from appliance.audit.pending import EntryMaker, Pending, copy_error
from appliance.audit.publisher import Publisher
from appliance.audit.requests import OpenRequests
from appliance.audit.store import CHUNK, AuditStore, Head, Leaf, gateway_of
from appliance.errors import AuditEntryError, AuditError, AuditForkError, AuditUnavailableError
from appliance.infra.settings import AuditSettings

_Appended = tuple[Sequence[Leaf], CompactRange, PlacedEntries]
"""Entries of others, the tree with them, and the batch that came after."""
COMMIT_ENTRIES = 256
ATTEMPTS = 5
"""Maximum attempts to append a batch after others before the log counts as forked."""
BEATS = 6
"""Minimum number of heartbeats in the time after which a silent gateway counts as dead."""
BEAT_SECONDS = 5.0
"""Maximum time between two heartbeats if other gateways share the log."""


class Writer:
    """Queue, commit and checkpoint; `run` is the task, the rest is called on the same event loop."""

    def __init__(
        self,
        *,
        store: AuditStore,
        settings: AuditSettings,
        maker: EntryMaker,
        requests: OpenRequests,
        publisher: Publisher,
        known: KnownLog,
        gateway: str,
        clock: Callable[[], float],
        thread: CommitThread,
        on_commit: Callable[[int, float], None],
    ) -> None:
        self._store, self._settings, self._maker = store, settings, maker
        self._requests, self._publisher = requests, publisher
        self._thread, self._on_commit = thread, on_commit
        self._loop = asyncio.get_running_loop()
        self._known, self._gateway, self._clock = known, gateway, clock
        # Whether another gateway was ever faster: then its entries are read in the same transaction.
        self._others_write = False
        # Leaves of the newest commit: found in the log later, they are ours.
        self._tried: frozenset[bytes] = frozenset()
        self._beat_seconds = settings.gateway_dead_seconds / BEATS
        if store.shared:
            self._beat_seconds = min(self._beat_seconds, BEAT_SECONDS)
        self._beat_at = self._loop.time() + self._beat_seconds
        # Start of this gateway's unbroken heartbeats, during which it could have observed the others.
        self._beating_since: float | None = self._loop.time()
        self._queue: deque[Pending] = deque()
        self._taken: list[Pending] = []
        # Entries at the front of the queue to be committed one by one, to isolate the one refused.
        self._alone = 0
        self._in_doubt = False
        self._tried_at = 0.0
        self._waiter: asyncio.Future[None] | None = None
        self._closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.stopped: AuditError | None = None
        """Why nothing can be written any more, or None."""
        self.failure: str | None = None
        """Why the last commit failed, or None while committing works."""
        self.last_commit_seconds = 0.0

    @property
    def size(self) -> int:
        return self._known.head.size

    @property
    def root(self) -> bytes:
        return self._known.head.root

    @property
    def queued(self) -> int:
        """Entries that are not durable yet."""
        return len(self._queue) + len(self._taken)

    def add(self, pending: Pending) -> None:
        """Queue one entry; entries become durable in the order of calls."""
        self._queue.append(pending)
        self._wake()

    def close(self) -> None:
        """Ask `run` to commit what is queued, end what is open, sign, and return."""
        self._closing = True
        self._wake()

    async def ended(self) -> None:
        """Wait for `run` to fail, and raise why."""
        await asyncio.shield(self._ended)

    async def run(self) -> None:
        """Write until closed; raises AuditForkError when another writer interferes."""
        try:
            while not self._closing or self._queue:
                await self._wait()
                await self._turn()
            if self._in_doubt:
                await self._resynchronise()
            self._abort(self._requests.take_all(), "gateway_stopped")
            while self._queue:
                await self._turn()
            await self._settle()
            if not self._in_doubt and self.size > self._publisher.published.size:
                await self._publish()
            self._stop(AuditUnavailableError("the audit log is closed"))
        except AuditError as error:
            self._fail_for_good(error)
            raise
        except BaseException as error:
            # A defect or a cancellation: no caller may wait for a writer that is gone.
            self._fail_for_good(AuditUnavailableError(f"the audit writer stopped: {error!r}"))
            raise

    async def _settle(self) -> None:
        """Bring what is durable into the tree, before the log closes."""

    async def _wait(self) -> None:
        """Return when a batch or a checkpoint is due, or on closing."""
        if not self._queue and not self._closing:
            retry_at = self._tried_at + self._settings.checkpoint_seconds
            due_at = retry_at if self._in_doubt else self._due_at()
            await self._pause(due_at - self._loop.time())
        batch_at = self._loop.time() + self._settings.batch_seconds
        while 0 < len(self._queue) < COMMIT_ENTRIES and not self._closing:
            if (left := batch_at - self._loop.time()) <= 0:
                break
            await self._pause(left)

    def _due_at(self) -> float:
        return min(self._publisher.due_at(), self._beat_at)

    async def _pause(self, seconds: float) -> None:
        """Return when an entry was queued, on closing, or after `seconds`."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, seconds), self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _turn(self) -> None:
        if self._in_doubt and not await self._resynchronise():
            return
        self._take()
        if self._taken:
            await self._commit()
        if not self._in_doubt and self._loop.time() >= self._beat_at:
            await self._beat()
        if not self._in_doubt and self._publisher.is_due(self.size, self._loop.time()):
            await self._publish()

    def _take(self) -> None:
        count = 1 if self._alone else COMMIT_ENTRIES
        self._alone = max(0, self._alone - 1)
        self._taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]

    async def _commit(self) -> None:
        started = perf_counter()  # the loop's clock moves in whole milliseconds
        try:
            newer, tree, batch = await self._append(tuple(self._taken))
        except AuditEntryError as error:
            self._isolate(error)
            return
        except AuditUnavailableError as error:
            self._in_doubt = True
            self._refuse(error)
            return
        # A crash before this line: the entries are durable and not acknowledged.  That is allowed; the
        # reverse is not.
        now = self._loop.time()
        self._follow(newer, tree)
        self._known.commit(batch)
        self.failure, self._taken = None, []
        self.last_commit_seconds = perf_counter() - started
        for pending, leaf in batch.placed:
            pending.succeed(leaf.index)
        for pending in batch.refused:
            message = (
                f"request {pending.request_id} was ended by another gateway, which considered this one dead"
            )
            self._fail([pending], AuditEntryError(message))
        if batch.placed:
            self._publisher.committed(now)
            self._on_commit(len(batch.placed), self.last_commit_seconds)

    async def _append(self, taken: Sequence[Pending]) -> _Appended:
        """Commit entries after all entries in the log, ours or others'."""
        if not self._others_write:
            batch = self._place(taken, self._known.tree)
            try:
                if batch.placed:
                    append = partial(self._store.append, batch.leaves, expected=self._known.head)
                    await self._thread.run(partial(append, new=batch.head))
            except AuditForkError:
                # Another gateway was faster, or the log was rewritten: `_catch_up` tells.
                self._others_write = True
                await self._catch_up()
            else:
                return (), self._known.tree, batch
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._thread.run(partial(self._append_behind, taken))
            except AuditForkError:
                # Another writer did not take the lock: its entries are followed, or found to be a fork.
                await self._catch_up()
        return await self._thread.run(partial(self._append_behind, taken))

    def _append_behind(self, taken: Sequence[Pending]) -> _Appended:
        """In the writer's thread: nothing that is read here changes while the loop waits for it."""
        made: list[_Appended] = []

        def make(head: Head, newer: Sequence[Leaf]) -> tuple[Sequence[Leaf], Head]:
            tree = self._known.extended(newer, head)
            batch = self._place(taken, tree, newer)
            made.append((newer, tree, batch))
            return batch.leaves, batch.head

        self._store.append_behind(self.size, make)
        return made[-1]

    def _place(
        self, taken: Sequence[Pending], tree: CompactRange, newer: Sequence[Leaf] = ()
    ) -> PlacedEntries:
        batch = self._known.place(taken, tree, newer)
        self._tried = frozenset([leaf.leaf_hash for _, leaf in batch.placed])
        return batch

    async def _publish(self) -> None:
        try:
            # Only what was read back from the store is signed.
            await self._catch_up()
            published = await self._thread.run(partial(self._publisher.publish, self._known.head))
        except AuditUnavailableError as error:
            self._publisher.failed(str(error), self._loop.time())
        else:
            self._publisher.succeeded(published, self._loop.time())

    async def _resynchronise(self) -> bool:
        """Find out whether the commit in doubt happened; end the requests it left without an end."""
        try:
            await self._catch_up()
        except AuditUnavailableError as error:
            self._refuse(error)
            return False
        self._in_doubt, self.failure = False, None
        self._abort_abandoned()
        return True

    async def _catch_up(self) -> None:
        """Follow the entries of others, and of a commit in doubt; raises AuditForkError for another log."""
        newer, tree = await self._thread.run(self._read_newer)
        self._follow(newer, tree)

    def _read_newer(self) -> tuple[Sequence[Leaf], CompactRange]:
        head = self._store.head()
        starts = range(self.size, head.size, CHUNK)
        newer = [leaf for at in starts for leaf in self._store.leaves(at, min(at + CHUNK, head.size))]
        return newer, self._known.extended(newer, head)

    def _follow(self, newer: Sequence[Leaf], tree: CompactRange) -> None:
        started = (leaf for leaf in newer if leaf.type == EntryType.AUDIT_STARTED)
        if any(leaf.leaf_hash not in self._tried and gateway_of(leaf) == self._gateway for leaf in started):
            raise AuditForkError(
                f"another writer has started under this gateway's name, {self._gateway}: "
                "give each gateway a data directory or an audit.gateway of its own"
            )
        if newer:
            self._requests.end_elsewhere(self._known.follow(newer, tree))
            self._publisher.committed(self._loop.time())

    async def _beat(self) -> None:
        """Write a heartbeat, and end the requests of dead gateways."""
        self._beat_at = self._loop.time() + self._beat_seconds
        now = self._clock()
        try:
            seen = await self._thread.run(partial(self._store.beat, self._gateway, now))
            await self._catch_up()
        except AuditUnavailableError:
            # The next beat tries again.  Others may have been cut off from the database as well: their
            # silence means nothing until they had time for a heartbeat.
            self._beating_since = None
            return
        if self._beating_since is None:
            self._beating_since = self._loop.time()
        others = {gateway for gateway in self._known.open.values() if gateway != self._gateway}
        patience = self._settings.gateway_dead_seconds
        had_time = self._loop.time() - self._beating_since >= patience
        dead = silent_gateways(others, seen, now=now, seconds=patience if had_time else math.inf)
        queued = {pending.request_id for pending in self._queue}
        self._abort([one for one in self._known.open_of(dead) if one not in queued], "gateway_stopped")
        self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        ending = (pending.request_id for pending in self._queue if pending.type.closes_request)
        mine = self._known.open_of({self._gateway})
        self._abort(self._requests.abandoned(mine, ending), "entry_not_durable")

    def _abort(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            fields = {"request_id": request_id, "reason": reason}
            self._queue.append(self._maker.make(EntryType.REQUEST_ABORTED, fields))

    def _isolate(self, error: AuditEntryError) -> None:
        """Refuse the entry the store refused, without the others of its batch."""
        taken, self._taken = self._taken, []
        if len(taken) == 1:
            self._fail(taken, error)
        else:
            self._queue.extendleft(reversed(taken))
            self._alone = len(taken)

    def _refuse(self, error: AuditError) -> None:
        """Fail all waiting entries: no outcome may become durable if the intent queued before it did not."""
        self.failure, self._tried_at, self._alone = str(error), self._loop.time(), 0
        waiting = [*self._taken, *self._queue]
        self._taken = []
        self._queue.clear()
        self._fail(waiting, error)

    def _fail(self, entries: Sequence[Pending], error: AuditError) -> None:
        for pending in entries:
            self._requests.forget(pending.type, pending.request_id)
            pending.fail(error)

    def _stop(self, error: AuditError) -> None:
        self.stopped = error
        self._refuse(error)

    def _fail_for_good(self, error: AuditError) -> None:
        self._stop(error)
        self._ended.set_exception(copy_error(error))
        self._ended.exception()  # a caller of `ended` is optional
