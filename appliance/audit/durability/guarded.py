"""
Opens the audit log with its spool and its health monitor, and recovers what a crash left behind.

The composition root's one call.  Fails closed: in every mode, what cannot be opened keeps the gateway from
starting.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import make_url

from appliance.audit.durability.durable import DurableLog
from appliance.audit.durability.health import AuditHealth, HealthMonitor
from appliance.audit.durability.selfcheck import SelfCheck
from appliance.audit.durability.spool import Spool
from appliance.audit.entry_types import EntryType
from appliance.audit.log import AuditLog, AuditState
from appliance.audit.signing_keys import Signer
from appliance.audit.store import AuditStore
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import AuditSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFiles:
    database_url: str
    sealed_head: Path
    spool: Path

    @property
    def self_check(self) -> Path:
        """Progress of the self-check, and damage it has found."""
        return self.sealed_head.with_name("audit.checked")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedLog:
    log: AuditLog
    """For entries that must be in the log itself, such as an erasure, and for its state."""
    sink: DurableLog
    """For requests and events: kept as `audit.durability` says."""
    monitor: HealthMonitor

    async def run(self) -> None:
        """Run until the log has failed for good, and raise why: the process should end then."""
        await asyncio.gather(self.log.wait_failed(), self.sink.wait_failed(), self.monitor.run())


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

    The caller closes `store`; `wall` says what the process can connect to, None if unknown; `clock` is Unix
    time.  Raises ConfigurationError if the spool cannot be used, or another gateway uses it, and AuditError
    if the log cannot be opened; see `AuditLog.open` and `DurableLog`.
    """
    spool = await asyncio.to_thread(partial(Spool.open, files.spool, max_bytes=settings.spool_bytes))
    with closing(spool):
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
                on_commit=metrics.record_audit_commit,
                on_entry=metrics.record_audit_entry,
                on_break=lambda gateway, why: logger.error(
                    "audit_entries_missing", detail=gateway, reason=why
                ),
                kept=frozenset(spool.ended),
            ) as log,
            DurableLog(
                log=log,
                store=store,
                spool=spool,
                gap_path=files.spool / "gap",
                settings=settings,
                metrics=metrics,
                logger=logger,
                clock=clock,
            ).running() as sink,
        ):
            monitor = HealthMonitor(
                log=log,
                durable=sink,
                check=SelfCheck(store, files.self_check, verify_seconds=settings.verify_seconds, clock=clock),
                disks=_disks(files, settings),
                low_disk_bytes=settings.low_disk_bytes,
                verify_seconds=settings.verify_seconds,
                metrics=metrics,
                logger=logger,
                clock=clock,
            )
            for entry_type in EntryType:  # a type without entries is 0, not missing
                metrics.audit_entries.labels(entry_type.value)
            observe_audit(metrics, log.state)
            _observe_health(metrics, monitor.health)
            yield GuardedLog(log=log, sink=sink, monitor=monitor)


def observe_audit(metrics: Metrics, state: Callable[[], AuditState]) -> None:
    metrics.audit_tree_size.set_function(lambda: state().size)
    metrics.audit_queue_entries.set_function(lambda: state().queued)
    metrics.audit_checkpoint_size.set_function(lambda: state().checkpoint_size)
    metrics.audit_checkpoint_lag.set_function(lambda: state().size - state().checkpoint_size)
    metrics.audit_checkpoint_time.set_function(lambda: state().checkpoint_time)
    metrics.audit_open_requests.set_function(lambda: state().open_requests)
    metrics.audit_failing.set_function(lambda: state().failure is not None)


def _observe_health(metrics: Metrics, health: Callable[[], AuditHealth]) -> None:
    metrics.audit_spool_entries.set_function(lambda: health().durability.spooled_entries)
    metrics.audit_spool_bytes.set_function(lambda: health().durability.spooled_bytes)
    metrics.audit_gap_entries.set_function(lambda: health().durability.gap_entries)
    metrics.audit_verified_size.set_function(lambda: health().verification.size)
    metrics.audit_verified_time.set_function(lambda: health().verification.time)
    metrics.audit_damaged.set_function(lambda: health().verification.damage is not None)


def _disks(files: LogFiles, settings: AuditSettings) -> dict[str, Path]:
    """The disks whose free space matters; a database server monitors its own."""
    url, disks = make_url(files.database_url), {}
    if url.get_backend_name() == "sqlite" and url.database:
        disks["database"] = Path(url.database).parent
    if settings.durability != "strict":
        disks["spool"] = files.spool
    # Heads and keys are kept in the data directory, which with SQLite is the database's.
    if files.sealed_head.parent not in disks.values():
        disks["data"] = files.sealed_head.parent
    return disks
