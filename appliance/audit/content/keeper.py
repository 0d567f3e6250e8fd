"""
Seals content and stores it durably before the log gets the entry that names it.

The event loop queues parts and waits; one thread seals the queued parts and stores them in one transaction.
Erasures run in the same thread, so no part is sealed with a key that is being destroyed.

Fails closed: content that cannot be stored is refused with `AuditUnavailableError`, and so is its request.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeVar

from appliance.audit.content.payload_keys import PayloadKeys, Purpose, TenantKey
from appliance.audit.content.payloads import Payload, SqlPayloadStore
from appliance.audit.content.sealing import Part, commit, place, rewrap, seal
from appliance.audit.entry import JSON, format_time
from appliance.audit.pending import copy_error
from appliance.errors import AuditError, AuditKeyError, AuditUnavailableError
from appliance.infra.settings import AuditSettings
from appliance.tenancy import ContentPolicy

LARGEST_BATCH = 64
"""Maximum parts in one transaction."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One part to store; the thread joins its pieces."""

    tenant: str
    policy: ContentPolicy
    """`digest` or `encrypted`."""
    request_id: str
    part: Part
    pieces: Sequence[bytes | bytearray]
    size: int
    """Bytes in all pieces."""


class Keeper:
    """The queue and the thread; used on one event loop, while `running`."""

    def __init__(
        self,
        *,
        store: SqlPayloadStore,
        keys: PayloadKeys,
        settings: AuditSettings,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.store, self.keys = store, keys
        self._settings, self._clock, self._random_bytes = settings, clock, random_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="payloads")
        self._queue: deque[tuple[Content, asyncio.Future[dict[str, JSON]]]] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Store parts until the block ends; parts queued by then are stored first."""
        with self._thread:
            task = asyncio.get_running_loop().create_task(self._run(), name="payloads")
            try:
                yield self
            finally:
                self._closing = True
                self._wake.set()
                await task

    async def keep(self, content: Content) -> dict[str, JSON]:
        """
        Store one part; returns its fields in the entry, once it is durable.

        Raises AuditUnavailableError if it cannot be kept, or too much waits already.  An answer is accepted
        even if the queue is full: there are never more of those than requests.
        """
        waiting = self._waiting_bytes
        if content.part is Part.REQUEST and waiting + content.size > self._settings.payload_queue_bytes:
            raise AuditUnavailableError(f"{waiting} bytes of content wait already: the disk does not keep up")
        kept: asyncio.Future[dict[str, JSON]] = asyncio.get_running_loop().create_future()
        # The caller may have stopped waiting.
        kept.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._queue.append((content, kept))
        self._waiting_bytes += content.size
        self._wake.set()
        seconds = self._settings.append_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(kept)
        except TimeoutError as error:
            raise AuditUnavailableError(f"content was not kept within {seconds:g} s") from error

    async def in_turn(self, call: Callable[[], T]) -> T:
        """Run a call in the sealing thread, between batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def _run(self) -> None:
        while not self._closing or self._queue:
            self._wake.clear()
            while self._queue:
                await self._turn()
            if not self._closing:
                await self._wake.wait()

    async def _turn(self) -> None:
        jobs = [self._queue.popleft() for _ in range(min(LARGEST_BATCH, len(self._queue)))]
        sealed: list[dict[str, JSON] | AuditError]
        try:
            sealed = await self.in_turn(lambda: self._seal([content for content, _ in jobs]))
        except AuditError as error:
            sealed = [error] * len(jobs)
        except Exception as error:  # noqa: BLE001 - a defect: the callers that wait must learn of it
            sealed = [AuditUnavailableError(f"content could not be sealed: {error!r}")] * len(jobs)
        self._waiting_bytes -= sum(content.size for content, _ in jobs)
        for (_, kept), fields in zip(jobs, sealed, strict=True):
            if kept.done():
                continue
            if isinstance(fields, AuditError):
                kept.set_exception(copy_error(fields))
            else:
                kept.set_result(fields)

    def _seal(self, contents: Sequence[Content]) -> list[dict[str, JSON] | AuditError]:
        payloads: list[tuple[Payload, TenantKey]] = []
        sealed: list[dict[str, JSON] | AuditError] = []
        for content in contents:
            try:
                sealed.append(self._seal_one(content, payloads))
            except AuditKeyError as error:  # one tenant's trouble is not another's
                sealed.append(AuditUnavailableError(str(error)))
        if payloads:
            self.store.add([payload for payload, _ in payloads])
            for payload, key in payloads:
                self._keep_openable(payload, key)
        return sealed

    def _keep_openable(self, payload: Payload, key: TenantKey) -> None:
        """
        Rewrap a stored payload if another gateway began to destroy its key meanwhile.

        That gateway searches rows after it retired the key, this one checks the key after it stored the row:
        one of them sees the other.
        """
        now = key
        while not self.keys.is_in_use(now.key_id, Purpose.WRAPPING):
            now = self.keys.current(payload.tenant, Purpose.WRAPPING)
            wrapped = rewrap(payload.sealed.wrapped_key, key.key, now.key)
            self.store.rewrap([(payload.request_id, payload.part, wrapped)], now.key_id)

    def _seal_one(self, content: Content, payloads: list[tuple[Payload, TenantKey]]) -> dict[str, JSON]:
        where = place(self._settings.origin, content.request_id, content.part)
        data = b"".join(content.pieces)
        if content.policy is ContentPolicy.DIGEST:
            key = self.keys.current(content.tenant, Purpose.COMMITMENT)
            return {"payload_commitment": commit(key.key, where, data), "payload_key": key.key_id}
        key = self.keys.current(content.tenant, Purpose.WRAPPING)
        sealed, commitment = seal(data, where, key.key, random_bytes=self._random_bytes)
        payload = Payload(
            request_id=content.request_id,
            part=content.part,
            tenant=content.tenant,
            key_id=key.key_id,
            sealed=sealed,
            time=format_time(int(self._clock() * 1000)),
        )
        payloads.append((payload, key))
        return {"payload_commitment": commitment, "payload_digest": sealed.digest, "payload_key": key.key_id}
