"""
The one task that moves the log's head: takes what is queued, commits it, tells whoever waits.

What is in memory and what is in the store agree after every line, except while a commit is in
doubt: then the store's head is read before anything else is written.

Fails closed.  While the store fails, everything that waits is refused, and the next entry tries
again.  When the head is not where this writer left it, it stops for good.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import EntryMaker, Pending, again
from appliance.audit.publisher import Publisher
from appliance.audit.registry import EntryType
from appliance.audit.requests import OpenRequests
from appliance.audit.store import AuditStore, Head, Leaf
from appliance.errors import AuditEntryError, AuditError, AuditForkError, AuditUnavailableError
from appliance.settings import AuditSettings

T = TypeVar("T")


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
        tree: CompactRange,
        thread: Executor,
        on_commit: Callable[[int, float], None],
    ) -> None:
        self._store, self._settings, self._maker = store, settings, maker
        self._requests, self._publisher = requests, publisher
        self._thread, self._on_commit = thread, on_commit
        self._loop = asyncio.get_running_loop()
        self._tree, self._head = tree, Head.of(tree)
        # The tree of the newest commit tried: after an error, the store may hold it.
        self._attempted = tree
        self._queue: deque[Pending] = deque()
        self._taken: list[Pending] = []
        # Entries at the front of the queue to be committed one by one, to find the one refused.
        self._alone = 0
        self._in_doubt = False
        self._tried_at = 0.0
        self._wake = asyncio.Event()
        self._closing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.stopped: AuditError | None = None
        """Why nothing can be written any more, or None."""
        self.failure: str | None = None
        """Why the last commit failed, or None while committing works."""
        self.last_commit_seconds = 0.0

    @property
    def size(self) -> int:
        """Durable entries."""
        return self._head.size

    @property
    def root(self) -> bytes:
        """Root of the tree over the durable entries."""
        return self._head.root

    @property
    def queued(self) -> int:
        """Entries that are not durable yet."""
        return len(self._queue) + len(self._taken)

    def add(self, pending: Pending) -> None:
        """Queue one entry; order of calls is order in the log."""
        self._queue.append(pending)
        self._wake.set()

    def close(self) -> None:
        """Ask `run` to commit what is queued, end what is open, sign, and return."""
        self._closing = True
        self._wake.set()

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
            if not self._in_doubt and self._head.size > self._publisher.published.size:
                await self._publish()
            self._stop(AuditUnavailableError("the audit log is closed"))
        except AuditError as error:
            self._fail_for_good(error)
            raise
        except BaseException as error:
            # A defect or a cancellation: nobody may wait for a writer that is gone.
            self._fail_for_good(AuditUnavailableError(f"the audit writer stopped: {error!r}"))
            raise

    async def _wait(self) -> None:
        """Return when a batch is to be committed or a checkpoint signed, or on closing."""
        if not self._queue and not self._closing:
            retry_at = self._tried_at + self._settings.checkpoint_seconds
            due_at = retry_at if self._in_doubt else self._publisher.due_at()
            await self._pause(due_at - self._loop.time())
        company = self._loop.time() + self._settings.batch_seconds
        while 0 < len(self._queue) < self._settings.batch_entries and not self._closing:
            if (left := company - self._loop.time()) <= 0:
                break
            await self._pause(left)

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()

    async def _turn(self) -> None:
        if self._in_doubt and not await self._resynchronise():
            return
        count = 1 if self._alone else self._settings.batch_entries
        self._alone = max(0, self._alone - 1)
        self._taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        if self._taken:
            await self._commit()
        if not self._in_doubt and self._publisher.is_due(self._head.size, self._loop.time()):
            await self._publish()

    async def _commit(self) -> None:
        tree, leaves = self._tree.copy(), []
        for pending in self._taken:
            leaf_hash = hash_leaf(pending.leaf)
            leaves.append(
                Leaf(
                    index=tree.size,
                    leaf=pending.leaf,
                    leaf_hash=leaf_hash,
                    type=pending.type.value,
                    request_id=pending.request_id,
                )
            )
            tree.append(leaf_hash)
        self._attempted, head, started = tree, Head.of(tree), self._loop.time()
        try:
            await self._run(partial(self._store.append, leaves, expected=self._head, new=head))
        except AuditEntryError as error:
            self._isolate(error)
            return
        except AuditUnavailableError as error:
            self._in_doubt = True
            self._refuse(error)
            return
        # A crash before this line: the entries are durable and nobody was told.  That is allowed;
        # the reverse is not.
        now = self._loop.time()
        self._tree, self._head, self.failure = tree, head, None
        self.last_commit_seconds = now - started
        taken, self._taken = self._taken, []
        for pending, leaf in zip(taken, leaves, strict=True):
            pending.succeed(leaf.index)
        self._publisher.committed(now)
        self._on_commit(len(taken), self.last_commit_seconds)

    async def _publish(self) -> None:
        try:
            published = await self._run(partial(self._publisher.publish, self._head))
        except AuditUnavailableError as error:
            self._publisher.failed(str(error), self._loop.time())
        else:
            self._publisher.succeeded(published, self._loop.time())

    async def _resynchronise(self) -> bool:
        """
        Learn whether the commit in doubt happened, and end the requests it left without an end.

        Raises:
            AuditForkError: the head is neither where it was nor where the commit would have put it.
        """
        try:
            head = await self._run(self._store.head)
            stored = await self._run(self._store.open_intents)
        except AuditUnavailableError as error:
            self._refuse(error)
            return False
        if head == Head.of(self._attempted):
            self._tree, self._head = self._attempted, head
            self._publisher.committed(self._loop.time())
        elif head != self._head:
            raise AuditForkError(
                f"the audit log stands at size {head.size}, and this writer did not put it there"
            )
        self._in_doubt, self.failure = False, None
        ending = (pending.request_id for pending in self._queue if pending.type.closes_request)
        self._abort(self._requests.abandoned(stored, ending), "entry_not_durable")
        return True

    def _abort(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            fields = {"request_id": request_id, "reason": reason}
            self._queue.append(self._maker.make(EntryType.REQUEST_ABORTED, fields))

    def _isolate(self, error: AuditEntryError) -> None:
        """Refuse the entry the store would not take, without those it was batched with."""
        taken, self._taken = self._taken, []
        if len(taken) == 1:
            self._fail(taken, error)
        else:
            self._queue.extendleft(reversed(taken))
            self._alone = len(taken)

    def _refuse(self, error: AuditError) -> None:
        """
        Fail everything that waits.

        All of it: an outcome must not become durable when the intent queued before it did not.
        """
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
        self._ended.set_exception(again(error))
        self._ended.exception()  # nobody has to watch

    async def _run(self, call: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._thread, call)
