"""
What one request leaves behind of its content: nothing, or its body and its answer, for the log.

While an answer streams, only references to the bytes are kept; they are joined and sealed after
the last of them, in the keeper's thread.  A tenant that keeps nothing has `NO_CAPTURE`, which does
nothing at all.  Fails closed, as the audit log does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from appliance.audit.content.keeper import Content, Keeper
from appliance.audit.content.payload_keys import PayloadKeys, load_master_key
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.content.retention import Log, Retention
from appliance.audit.content.sealing import Part
from appliance.audit.entry import JSON
from appliance.infra.settings import AuditSettings
from appliance.tenancy import ContentPolicy, Tenant


class Capture(Protocol):
    """What the gateway tells of one request."""

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""

    def saw(self, data: bytes) -> None:
        """Note what is about to be sent to the client."""

    async def keep_request(self, body: str) -> dict[str, JSON]:
        """Keep the body; what the intent says about it, once it is durable."""

    async def keep_answer(self) -> dict[str, JSON]:
        """Keep what was seen of the answer; what the outcome says about it, once it is durable."""


class NoCapture:
    """Keeps nothing."""

    is_on = False

    def saw(self, data: bytes) -> None:
        """Do nothing."""

    async def keep_request(self, body: str) -> dict[str, JSON]:  # noqa: ARG002 - see the protocol
        """Say nothing."""
        return {}

    async def keep_answer(self) -> dict[str, JSON]:
        """Say nothing."""
        return {}


NO_CAPTURE = NoCapture()


class ContentCapture:
    """Keeps commitments or all content of one request."""

    is_on = True

    def __init__(self, keeper: Keeper, tenant: Tenant, request_id: str, max_bytes: int) -> None:
        self._keeper = keeper
        self._tenant = tenant
        self._request_id = request_id
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_cut = False
        self._kept: asyncio.Task[dict[str, JSON]] | None = None

    def saw(self, data: bytes) -> None:
        """Note what is about to be sent, as far as there is room."""
        room = self._max_bytes - self._size
        if len(data) > room:
            self._is_cut, data = True, data[:room]
        if data:
            self._pieces.append(data)
            self._size += len(data)

    async def keep_request(self, body: str) -> dict[str, JSON]:
        """Keep the body as it came; raises AuditUnavailableError."""
        data = body.encode()
        return await self._keeper.keep(self._content(Part.REQUEST, [data], len(data)))

    async def keep_answer(self) -> dict[str, JSON]:
        """Keep what was seen so far, once, whoever asks again; raises AuditUnavailableError."""
        if self._kept is None:
            # A task: who waits may be cancelled, and the rest then asks for the same thing again.
            self._kept = asyncio.ensure_future(self._keep_answer())
        return await asyncio.shield(self._kept)

    async def _keep_answer(self) -> dict[str, JSON]:
        about: dict[str, JSON] = {"payload_bytes": self._size}
        if self._is_cut:
            about["payload_truncated"] = True
        if not self._size:
            return about
        content = self._content(Part.RESPONSE, self._pieces, self._size)
        self._pieces = []
        return about | await self._keeper.keep(content)

    def _content(self, part: Part, pieces: list[bytes], size: int) -> Content:
        return Content(
            tenant=self._tenant.name,
            policy=self._tenant.content,
            request_id=self._request_id,
            part=part,
            pieces=pieces,
            size=size,
        )


class Captures(Protocol):
    """Begins captures, and owns what is still to be done when a request has ended."""

    def begin(self, tenant: Tenant, request_id: str) -> Capture:
        """Return what to tell of a request."""

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """See work through that nobody waits for."""


class ContentCaptures:
    """Captures for tenants whose policy asks for them; made by `ContentCaptures.open`."""

    def __init__(self, keeper: Keeper, max_bytes: int) -> None:
        self._keeper = keeper
        self._max_bytes = max_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, keeper: Keeper, *, max_bytes: int) -> AsyncIterator["ContentCaptures"]:
        """Capture until the block ends, and see through what is left; the log must outlive it."""
        captures = cls(keeper, max_bytes)
        try:
            yield captures
        finally:
            while captures._tasks:
                await asyncio.wait(captures._tasks)

    def begin(self, tenant: Tenant, request_id: str) -> Capture:
        """Return what to tell of a request of this tenant."""
        if tenant.content is ContentPolicy.NONE:
            return NO_CAPTURE
        return ContentCapture(self._keeper, tenant, request_id, self._max_bytes)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """See work through; it handles its own failures."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenContent:
    """What a gateway needs to keep content, and to end keeping it."""

    captures: ContentCaptures
    retention: Retention


@asynccontextmanager
async def open_content(
    *,
    database_url: str,
    keys_directory: Path,
    settings: AuditSettings,
    log: Log,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes],
) -> AsyncIterator[OpenContent]:
    """
    Keep content in the log's database until the block ends; the log must outlive it.

    Erasures that a crash interrupted are finished first.

    Args:
        database_url: of the audit log.
        keys_directory: of the tenants' keys to content.
        settings: bounds, and where the master key is.
        log: takes the entries about erasures and holds.
        clock: seconds since the epoch.
        random_bytes: source of keys; must be cryptographic.

    Raises:
        AuditKeyError: the keys cannot be used.
        AuditUnavailableError: the database cannot be.
    """
    master = settings.payload_master_key_file
    keys = PayloadKeys(
        keys_directory,
        master_key=load_master_key(master) if master else None,
        key_days=settings.payload_rotation_days,
        clock=clock,
        random_bytes=random_bytes,
    )
    store = SqlPayloadStore(database_url)
    try:
        async with (
            Keeper.open(
                store=store, keys=keys, settings=settings, clock=clock, random_bytes=random_bytes
            ) as keeper,
            ContentCaptures.open(keeper, max_bytes=settings.payload_max_bytes) as captures,
        ):
            retention = Retention(log=log, keeper=keeper, clock=clock)
            await retention.resume()
            yield OpenContent(captures=captures, retention=retention)
    finally:
        store.close()
