"""
Opens the audit log with everything that keeps it going: spool, health, and what a crash left behind.

The composition root's one call.  Fails closed: whatever cannot be opened keeps the gateway from
starting, in every mode.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import make_url

from appliance.audit.durability.durable import DurableLog
from appliance.audit.durability.gap import GapFile
from appliance.audit.durability.health import HealthWatch
from appliance.audit.durability.selfcheck import SelfCheck
from appliance.audit.durability.spool import Spool
from appliance.audit.keys import Signer
from appliance.audit.log import AuditLog
from appliance.audit.registry import EntryType
from appliance.audit.store import AuditStore
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics, observe_audit, observe_health
from appliance.infra.settings import AuditSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFiles:
    """Where the log and what belongs to it is kept."""

    database_url: str
    sealed_head: Path
    spool: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedLog:
    """An open log, and the ways to use and to watch it."""

    log: AuditLog
    """For what must be in the log itself, such as an erasure, and for its state."""
    sink: DurableLog
    """For requests and events: kept as `audit.durability` says."""
    watch: HealthWatch

    async def run(self) -> None:
        """Look after the log until it has failed for good; raises why: the process should end then."""
        await asyncio.gather(self.log.watch(), self.sink.watch(), self.watch.run())


@asynccontextmanager
async def open_guarded(
    *,
    store: AuditStore,
    signer: Signer,
    settings: AuditSettings,
    files: LogFiles,
    gateway: str,
    version: str,
    wall: str | None = None,
    metrics: Metrics,
    logger: Logger,
    clock: Callable[[], float],
) -> AsyncIterator[GuardedLog]:
    """
    Open the log and bring what a former process left on this machine into it.

    Args:
        store: where leaves are kept; closed by whoever made it.
        signer: signs checkpoints.
        settings: of the log.
        files: where things are.
        gateway: name of this writer.
        version: of the appliance.
        wall: what the process can connect to, in words; None where nobody says.
        metrics: told of commits, entries and health.
        logger: the operator log.
        clock: seconds since the epoch.

    Raises:
        ConfigurationError: the spool cannot be used, or another gateway uses it.
        AuditError: the log cannot be opened; see `AuditLog.open` and `DurableLog.open`.
    """
    spool = await asyncio.to_thread(partial(Spool.open, files.spool, max_bytes=settings.spool_bytes))
    with closing(spool), closing(GapFile.open(files.spool / "gap")) as gap_file:
        async with (
            AuditLog.open(
                store=store,
                signer=signer,
                settings=settings,
                sealed_head_path=files.sealed_head,
                clock=clock,
                version=version,
                wall=wall,
                gateway=gateway,
                on_commit=metrics.saw_audit_commit,
                on_entry=metrics.saw_audit_entry,
                kept=frozenset(spool.ended),
            ) as log,
            DurableLog.open(
                log=log,
                store=store,
                spool=spool,
                gap_file=gap_file,
                settings=settings,
                metrics=metrics,
                logger=logger,
                clock=clock,
            ) as sink,
        ):
            watch = HealthWatch(
                log=log,
                durable=sink,
                check=SelfCheck(store),
                disks=_disks(files, settings),
                low_disk_bytes=settings.low_disk_bytes,
                verify_seconds=settings.verify_seconds,
                metrics=metrics,
                logger=logger,
                clock=clock,
            )
            for entry_type in EntryType:  # a type that never came is 0, not missing
                metrics.audit_entries.labels(entry_type.value)
            observe_audit(metrics, log.state)
            observe_health(metrics, watch.health)
            yield GuardedLog(log=log, sink=sink, watch=watch)


def _disks(files: LogFiles, settings: AuditSettings) -> dict[str, Path]:
    """The disks whose free space matters; a database server looks after its own."""
    url, disks = make_url(files.database_url), {}
    if url.get_backend_name() == "sqlite" and url.database:
        disks["database"] = Path(url.database).parent
    if settings.durability != "strict":
        disks["spool"] = files.spool
    # Heads and keys are kept in the data directory, which with SQLite is the database's.
    if files.sealed_head.parent not in disks.values():
        disks["data"] = files.sealed_head.parent
    return disks
