"""
Operators' commands on the worker list: reload it, drain a worker, undrain it.

A command is recorded before it takes effect: if the audit log takes no entry, nothing changes.  Each gateway
has a list of its own; a command to one does not reach the others.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from appliance.audit.entry_types import EntryType
from appliance.errors import ApplianceError, ConfigurationError, ControlRefusedError
from appliance.infra.logs import Logger
from appliance.infra.settings import Settings
from appliance.serving.discovery import Changes, Discovery, parse_service, workers_at
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import WorkerId, WorkerSnapshot
from appliance.sovereignty.ports import pool_ports
from appliance.sovereignty.wall import NO_WALL, Wall

RELOADED = ("urls", "discover", "control_port")


class Record(Protocol):
    """Makes an entry durable, or fails with `AuditError`."""

    def __call__(self, entry_type: EntryType, /, **fields: Any) -> Awaitable[Any]:  # noqa: ANN401 - see the registry
        ...


class WorkerList:
    def __init__(
        self,
        *,
        pool: WorkerPool,
        discovery: Discovery,
        settings: Settings,
        read_settings: Callable[[], Settings],
        record: Record,
        logger: Logger,
        wall: Wall = NO_WALL,
    ) -> None:
        """`read_settings` reads file and environment again, and raises ConfigurationError."""
        self._pool = pool
        self._discovery = discovery
        self._settings = settings
        self._read_settings = read_settings
        self._record = record
        self._logger = logger
        self._wall = wall

    async def reload(self, actor: str) -> Changes:
        """
        Apply `pool.urls`, `pool.discover` and `pool.control_port` of the current settings file, and no more.

        If it raises ControlRefusedError (wrong settings) or AuditError, nothing changed.
        """
        try:
            fresh = self._read_settings().pool
            workers_at(fresh.urls, fresh.control_port)
            if fresh.discover is not None:
                parse_service(fresh.discover)
            self._wall.check(pool_ports(fresh), "pool")
        except ConfigurationError as error:
            raise ControlRefusedError(str(error)) from error
        before = self._settings.pool
        changed = [name for name in RELOADED if getattr(before, name) != getattr(fresh, name)]
        if changed:
            pool = before.model_copy(update={name: getattr(fresh, name) for name in changed})
            settings = self._settings.model_copy(update={"pool": pool})
            await self._record(
                EntryType.CONFIG_CHANGED,
                digest=digest_of(settings),
                previous_digest=digest_of(self._settings),
                changes=tuple(f"pool.{name}" for name in changed),
                actor=actor,
            )
            self._settings = settings
        changes = self._discovery.replace(fresh.urls, fresh.discover, fresh.control_port)
        self._logger.info("workers_reloaded", count=len(changes.joined) + len(changes.left))
        return changes

    async def reload_on(self, request: asyncio.Event, actor: str) -> None:
        """A failed reload is logged and changes nothing."""
        while True:
            await request.wait()
            request.clear()
            try:
                await self.reload(actor)
            except ApplianceError as error:
                self._logger.warning("workers_reload_failed", error=str(error))

    async def drain(self, worker_id: WorkerId, *, actor: str, note: str, force: bool) -> None:
        """
        Send a worker no requests until `undrain`; those in flight finish.

        Raises ControlRefusedError if, without `force`, no other worker would serve one of its models, and
        AuditError if it could not be recorded; nothing changed.
        """
        missed = None if force else last_of(self._pool.snapshots, worker_id)
        if missed is not None:
            message = f"worker {worker_id} is the last one that serves {missed}: start another, or use force"
            raise ControlRefusedError(message)
        await self._set_drained(worker_id, drained=True, actor=actor, note=note)

    async def undrain(self, worker_id: WorkerId, *, actor: str, note: str) -> None:
        await self._set_drained(worker_id, drained=False, actor=actor, note=note)

    async def _set_drained(self, worker_id: WorkerId, *, drained: bool, actor: str, note: str) -> None:
        await self._record(
            EntryType.WORKER_DRAINED,
            worker=worker_id,
            drained=drained,
            actor=actor,
            **({"note": note} if note else {}),
        )
        self._pool.set_drained(worker_id, drained)
        self._logger.info("worker_drained" if drained else "worker_undrained", worker=worker_id)


def last_of(snapshots: tuple[WorkerSnapshot, ...], worker_id: WorkerId) -> str | None:
    """A model that no other worker takes requests for, if there is one."""
    takers = [seen for seen in snapshots if seen.takes_requests]
    mine = next((seen for seen in takers if seen.worker.worker_id == worker_id), None)
    others = [seen for seen in takers if seen is not mine]
    names = [served.name for served in mine.models] if mine is not None else []
    return next((name for name in names if not any(other.serves(name) for other in others)), None)


def digest_of(settings: Settings) -> str:
    """SHA-256 in hex of all settings as JSON with sorted keys; settings name secrets' files, not secrets."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
