"""
Captures the content of requests for the audit log, if the tenant's policy asks for it.

While an answer streams, only references to its bytes are kept; the keeper's thread joins and seals them after
the last one.  Tenants without a content policy share `NO_CAPTURE`.  Fails closed, as the audit log does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from appliance.audit.content.keeper import Content, Keeper
from appliance.audit.content.payload_keys import PayloadKeys, load_master_key
from appliance.audit.content.payloads import SqlPayloadStore
from appliance.audit.content.retention import ErasureLog, Retention
from appliance.audit.content.sealing import Part
from appliance.audit.entry import JSON
from appliance.gateway.body import Body
from appliance.infra.database import Database
from appliance.infra.settings import AuditSettings
from appliance.tenancy import ContentPolicy, Tenant


class Capture(Protocol):
    @property
    def is_on(self) -> bool: ...

    def observe(self, data: bytes) -> None:
        """Take bytes that are about to be sent to the client."""

    async def keep_request(self, body: Body) -> dict[str, JSON]:
        """Make the body durable; returns the intent's fields about it.  Raises AuditUnavailableError."""

    async def keep_answer(self) -> dict[str, JSON]:
        """Make the observed answer durable; returns the outcome's fields.  Raises AuditUnavailableError."""


class NoCapture:
    is_on = False

    def observe(self, data: bytes) -> None:
        pass

    async def keep_request(self, body: Body) -> dict[str, JSON]:  # noqa: ARG002
        return {}

    async def keep_answer(self) -> dict[str, JSON]:
        return {}


NO_CAPTURE = NoCapture()


class ContentCapture:
    """Keeps a digest or all content, as the tenant's policy says."""

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

    def observe(self, data: bytes) -> None:
        room = self._max_bytes - self._size
        if len(data) > room:
            self._is_cut, data = True, data[:room]
        if data:
            self._pieces.append(data)
            self._size += len(data)

    async def keep_request(self, body: Body) -> dict[str, JSON]:
        return await self._keeper.keep(self._content(Part.REQUEST, [body], len(body)))

    async def keep_answer(self) -> dict[str, JSON]:
        if self._kept is None:
            # A task: if the caller is cancelled, the next call waits for the same result.
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

    def _content(self, part: Part, pieces: Sequence[Body], size: int) -> Content:
        return Content(
            tenant=self._tenant.name,
            policy=self._tenant.content,
            request_id=self._request_id,
            part=part,
            pieces=pieces,
            size=size,
        )


class ContentCaptures:
    """Also owns the work that is left when a request has ended."""

    def __init__(self, keeper: Keeper, max_bytes: int) -> None:
        self._keeper = keeper
        self._max_bytes = max_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, keeper: Keeper, *, max_bytes: int) -> AsyncIterator["ContentCaptures"]:
        """Capture until the block ends, and then finish the work that is left; the log must outlive it."""
        captures = cls(keeper, max_bytes)
        try:
            yield captures
        finally:
            while captures._tasks:
                await asyncio.wait(captures._tasks)

    def begin(self, tenant: Tenant, request_id: str) -> Capture:
        if tenant.content is ContentPolicy.NONE:
            return NO_CAPTURE
        return ContentCapture(self._keeper, tenant, request_id, self._max_bytes)

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """It handles its own failures."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenContent:
    captures: ContentCaptures
    retention: Retention


@asynccontextmanager
async def open_content(
    *,
    database: Database | str,
    keys_directory: Path,
    settings: AuditSettings,
    log: ErasureLog,
    clock: Callable[[], float],
    random_bytes: Callable[[int], bytes],
) -> AsyncIterator[OpenContent]:
    """
    Keep content in the log's database until the block ends; the log must outlive it.

    Finishes erasures that a crash interrupted.  `clock` gives Unix time; `random_bytes` must be
    cryptographic. Raises AuditKeyError or AuditUnavailableError.
    """
    master = settings.payload_master_key_file
    keys = PayloadKeys(
        keys_directory,
        master_key=load_master_key(master) if master else None,
        key_days=settings.payload_rotation_days,
        clock=clock,
        random_bytes=random_bytes,
    )
    store = SqlPayloadStore(database)
    try:
        async with (
            Keeper(
                store=store, keys=keys, settings=settings, clock=clock, random_bytes=random_bytes
            ).running() as keeper,
            ContentCaptures.open(keeper, max_bytes=settings.payload_max_bytes) as captures,
        ):
            retention = Retention(log=log, keeper=keeper, clock=clock)
            await retention.resume()
            yield OpenContent(captures=captures, retention=retention)
    finally:
        store.close()
