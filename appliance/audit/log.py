"""
`AuditLog`: the only way into the audit log.

Callers submit entries from the event loop; one task commits them in groups through a thread of its own, so a
slow disk never blocks the loop.  An entry's future resolves once the entry is durable, never before.

A submitted entry cannot be withdrawn: a caller that stops waiting (cancelled, timed out) may find it in the
log later, and must still append the outcome of an intent.

Fails closed: what cannot be made durable is refused with `AuditUnavailableError`.  If the stored log is not
the known log with entries appended, the log refuses every further entry with `AuditForkError`, and the
process should end.
"""

import asyncio
import math
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from appliance.audit.checkpoint import Checkpoint, encode_body, sign_note
from appliance.audit.commit_thread import CommitThread
from appliance.audit.entry import JSON
from appliance.audit.entry_types import EntryType
from appliance.audit.integration import left_open
from appliance.audit.known import KnownLog, silent_gateways
from appliance.audit.merkle import CompactRange
from appliance.audit.pending import EntryMaker, Pending, Receipt, copy_error
from appliance.audit.pending_rows import INTEGRATION, Writing
from appliance.audit.publisher import Publisher
from appliance.audit.recovery import recover
from appliance.audit.requests import OpenRequests
from appliance.audit.sealed import SealedHead
from appliance.audit.shared_writer import SharedWriter, integration_seconds, lease_seconds
from appliance.audit.signing_keys import Signer
from appliance.audit.store import AuditStore, SqlAuditStore
from appliance.audit.writer import Writer
from appliance.errors import AuditError, AuditUnavailableError
from appliance.infra.lease import SqlLease
from appliance.infra.randomness import random_bytes
from appliance.infra.settings import AuditSettings

SOLE_GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditState:
    origin: str
    size: int
    """Durable entries."""
    root: str
    """Root of the tree over them, in base64 as in a checkpoint."""
    queued: int
    open_requests: int
    failure: str | None
    """Why the last commit failed, or None while entries become durable."""
    last_commit_seconds: float
    checkpoint_size: int
    """Entries the last signed checkpoint covers."""
    checkpoint_time: float
    """When it was signed, in seconds since the epoch; 0 for not by this process."""
    checkpoint_failure: str | None
    """Why the last checkpoint failed, or None; entries are durable all the same."""


def _first_seal(signer: Signer, tree: CompactRange) -> str:
    checkpoint = Checkpoint(origin=signer.name, size=tree.size, root=tree.root())
    return sign_note(encode_body(checkpoint), [signer])


def _ignore(_first: object, _second: object) -> None:
    """Observe nothing."""


class AuditLog:
    """An open audit log; made by `AuditLog.open`, used on the event loop it was opened on."""

    def __init__(
        self,
        *,
        settings: AuditSettings,
        maker: EntryMaker,
        requests: OpenRequests,
        publisher: Publisher,
        writer: Writer,
    ) -> None:
        self._settings, self._maker, self._requests = settings, maker, requests
        self._publisher, self._writer = publisher, writer
        self._closing = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        store: AuditStore,
        signer: Signer,
        settings: AuditSettings,
        sealed_head_path: Path,
        clock: Callable[[], float],
        version: str,
        wall: str | None = None,
        gateway: str = SOLE_GATEWAY,
        on_commit: Callable[[int, float], None] = _ignore,
        on_entry: Callable[[EntryType, AuditError | None], None] = _ignore,
        on_break: Callable[[str, str], None] = _ignore,
        kept: Collection[str] = (),
        random_bytes: Callable[[int], bytes] = random_bytes,
    ) -> AsyncIterator[Self]:
        """
        Check the stored log, end the requests that a crash left open, and write until the block ends.

        The caller closes `store`.  `sealed_head_path` is best not on the database's disk.  `wall` is what the
        process can connect to, None if unknown.  `gateway` is unique, and the same at every start.
        `on_commit` is called with the entries and seconds of every commit, `on_entry` with every entry that
        became durable or the error, `on_break` with a gateway whose accepted entries were removed or changed
        and what is wrong with them; all on the event loop.  Requests in `kept` have their end in the spool
        and are not aborted here.

        Raises AuditRollbackError if the log is older than a signed head or another history,
        AuditVerificationError if it is damaged or signed by another key, AuditUnavailableError, and
        AuditForkError on leaving if the stored log was replaced meanwhile.
        """
        loop = asyncio.get_running_loop()
        sealed = SealedHead(sealed_head_path)
        with CommitThread.open("audit-writer") as thread:
            found = await thread.run(lambda: recover(store, sealed.read(), signer.verifier_key, gateway))
            if found.joins:
                # Before this gateway is known as a writer: from then on it must have a sealed head.
                await thread.run(lambda: sealed.write(_first_seal(signer, found.tree)))
            now = clock()
            known = KnownLog(found.tree, found.open_requests)
            registered = None
            if isinstance(store, SqlAuditStore) and store.shared:
                writing = Writing(gateway=gateway, instance=random_bytes(8).hex())
                registered = await thread.run(partial(store.register, writing, now))
                # Read again: an older process of this name may have written until then.
                placed = await thread.run(store.open_requests)
                mine = [request.request_id for request in placed if request.gateway == gateway]
                unended = left_open(mine, registered.entries)
            else:
                seen = await thread.run(lambda: store.beat(gateway, now))
                names = {request.gateway for request in found.open_requests} - {gateway}
                # A silent gateway may only have been cut off from the database: the writer judges later.
                dead = silent_gateways(names, seen, now=now, seconds=math.inf)
                unended = known.open_of({gateway, *dead})
            size = found.tree.size
            maker = EntryMaker(
                origin=signer.name,
                clock=clock,
                random_bytes=random_bytes,
                on_settled=on_entry,
                gateway=gateway,
            )
            requests = OpenRequests(unended)
            for request_id in kept:
                requests.delegate_outcome(request_id)
            publisher = Publisher(
                store=store,
                signer=signer,
                sealed=sealed,
                settings=settings,
                clock=clock,
                signed_size=found.signed_size,
                now=loop.time(),
            )
            parts: dict[str, Any] = {
                "settings": settings,
                "maker": maker,
                "requests": requests,
                "publisher": publisher,
                "known": known,
                "gateway": gateway,
                "clock": clock,
                "thread": thread,
                "on_commit": on_commit,
            }
            if registered is not None and isinstance(store, SqlAuditStore):
                lease = SqlLease(
                    store.database,
                    name=INTEGRATION,
                    holder=registered.writing.holder,
                    seconds=lease_seconds(settings),
                    clock=clock,
                )
                writer: Writer = SharedWriter(
                    store=store, registered=registered, begun=unended, lease=lease, on_break=on_break, **parts
                )
            else:
                writer = Writer(store=store, **parts)
            log = cls(settings=settings, maker=maker, requests=requests, publisher=publisher, writer=writer)
            task = loop.create_task(writer.run(), name="audit-writer")
            try:
                await log._begin(version, wall, tuple(name for name in unended if name not in kept), size)
                yield log
            finally:
                log._closing = True
                writer.close()
                await task

    @property
    def size(self) -> int:
        return self._writer.size

    def state(self) -> AuditState:
        writer, publisher = self._writer, self._publisher
        return AuditState(
            origin=self._maker.origin,
            size=writer.size,
            root=b64encode(writer.root).decode(),
            queued=writer.queued,
            open_requests=len(self._requests),
            failure=str(writer.stopped) if writer.stopped else writer.failure,
            last_commit_seconds=writer.last_commit_seconds,
            checkpoint_size=publisher.published.size,
            checkpoint_time=publisher.published.time,
            checkpoint_failure=publisher.failure,
        )

    async def wait_failed(self) -> None:
        """Wait until the log has failed for good, and raise why: the process should end then."""
        await self._writer.ended()

    async def append(self, entry_type: EntryType, /, **fields: JSON | None) -> Receipt:
        """Wait until an entry is in the tree; raises AuditUnavailableError."""
        return await self.placed(await self.confirm(self.submit(entry_type, **fields)))

    async def placed(self, receipt: Receipt) -> Receipt:
        """
        Wait until a durable entry has its index; raises AuditUnavailableError after a time.

        That takes as long as another gateway needs to integrate it; an entry in the spool is not waited for.
        """
        if receipt.placing is None:
            return receipt
        seconds = self._settings.append_timeout_seconds + integration_seconds(self._settings)
        await asyncio.wait({receipt.placing}, timeout=seconds)
        if not receipt.placing.done():
            raise AuditUnavailableError(
                f"the audit entry {receipt.entry_id} is durable, and no gateway has integrated it within "
                f"{seconds:g} s"
            )
        return replace(receipt, index=receipt.placing.result(), placing=None)

    async def confirm(self, pending: asyncio.Future[Receipt]) -> Receipt:
        """
        Wait until an entry is durable, at most `append_timeout_seconds`; raises AuditUnavailableError.

        After a timeout the entry may yet become durable.
        """
        if pending.done():
            return pending.result()
        seconds, loop = self._settings.append_timeout_seconds, asyncio.get_running_loop()
        # As a shield in a timeout, in fewer steps: the entry must not be cancelled with its caller.
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_future: object = None) -> None:
            if not waiter.done():
                waiter.set_result(None)

        pending.add_done_callback(wake)
        timer = loop.call_later(seconds, wake)
        try:
            await waiter
        finally:
            timer.cancel()
            pending.remove_done_callback(wake)
        if not pending.done():
            raise AuditUnavailableError(f"the audit entry did not become durable within {seconds:g} s")
        return pending.result()

    def submit(self, entry_type: EntryType, /, **fields: JSON | None) -> asyncio.Future[Receipt]:
        """
        Queue one entry; the future resolves once it is durable.  Fields of None are omitted.

        Entries become durable in the order they were submitted.  One that ends a request is accepted even if
        the queue is full: there are never more of those than accepted intents.

        Raises AuditEntryError if the entry is malformed or its request is in the wrong state,
        AuditUnavailableError if too many entries are waiting or the log is closing, AuditForkError if another
        writer has taken the log over.
        """
        pending = self.make(entry_type, fields)
        self.hand_over(pending)
        return pending.future

    def hand_over(self, pending: Pending) -> None:
        """Queue an entry from `make`; raises as `submit`."""
        self._refuse_if_stopped()
        waiting = self._writer.queued
        if waiting >= self._settings.queue_entries and not pending.type.closes_request:
            raise AuditUnavailableError(f"{waiting} audit entries are waiting already: the disk is too slow")
        self._requests.accept(pending.type, pending.request_id)
        self._writer.add(pending)

    def make(self, entry_type: EntryType, fields: Mapping[str, JSON | None]) -> Pending:
        """Return an entry that is not queued yet; raises AuditEntryError."""
        return self._maker.make(entry_type, fields)

    def remake(self, leaf: bytes) -> Pending:
        """Return an entry from the spool; raises AuditEntryError."""
        return self._maker.remake(leaf)

    def delegate_outcome(self, request_id: str) -> None:
        """Leave the end of a request to the caller, which keeps its entries while the store takes none."""
        self._requests.delegate_outcome(request_id)

    def readmit(self, pending: Pending, *, is_stored: bool = False) -> None:
        """Queue an entry from the spool, or only note it if the store has it already; raises as `submit`."""
        self._refuse_if_stopped()
        self._requests.readmit(pending.type, pending.request_id)
        if not is_stored:
            self._writer.add(pending)

    def _refuse_if_stopped(self) -> None:
        if self._writer.stopped:
            raise copy_error(self._writer.stopped)
        if self._closing:
            raise AuditUnavailableError("the audit log is closing")

    async def _begin(self, version: str, wall: str | None, open_intents: tuple[str, ...], size: int) -> None:
        """End the requests that a crash left open, then record the start."""
        first = [
            self.submit(EntryType.REQUEST_ABORTED, request_id=request_id, reason="gateway_stopped")
            for request_id in open_intents
        ]
        started = self.submit(
            EntryType.AUDIT_STARTED, version=version, recovered=len(open_intents), tree_size=size, wall=wall
        )
        for pending in (*first, started):
            await self.confirm(pending)
