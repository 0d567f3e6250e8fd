"""Opens the files and batches of a gateway, for the composition root."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from appliance.audit.content.payload_keys import PayloadKeys
from appliance.audit.sink import AuditSink
from appliance.gateway.batch.answerer import Answerer, find_owner
from appliance.gateway.batch.batch_runner import BatchRunner
from appliance.gateway.batch.batches import Batches
from appliance.gateway.batch.bounds import StorageThreads
from appliance.gateway.batch.executor import BatchParts
from appliance.gateway.batch.files import TenantFiles
from appliance.gateway.batch.idle import Gate, IdleCapacity
from appliance.gateway.batch.store import SqlBatchStore
from appliance.gateway.batch.vault import FileVault
from appliance.infra.database import Database
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.settings import BatchSettings
from appliance.serving.pool import WorkerPool
from appliance.tenancy import TenantDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatches:
    files: TenantFiles
    batches: Batches
    runner: BatchRunner


@asynccontextmanager
async def open_batches(
    *,
    database: Database | str,
    directory: Path,
    former: Path,
    gateway: str,
    keys: PayloadKeys,
    settings: BatchSettings,
    worker_requests: int | None,
    max_line_bytes: int,
    tenants: TenantDirectory,
    pool: WorkerPool,
    audit: AuditSink,
    answerer: Answerer,
    metrics: Metrics,
    logger: Logger,
    clock: Callable[[], float],
    monotonic: Callable[[], float],
    random_bytes: Callable[[int], bytes],
    new_id: Callable[[], str],
) -> AsyncIterator[OpenBatches]:
    """
    Files and batches until the block ends; leftovers of a crash are removed first.

    `directory` is shared by all gateways; `former` is its default, where older files are.  `worker_requests`
    is the batch size of a worker; None for the size it reports.  `clock` is Unix time, `monotonic` is in
    seconds; `random_bytes` must be cryptographic.  `new_id` creates ids for lines that were not completed.
    Raises ConfigurationError and StorageUnavailableError.
    """
    with closing(SqlBatchStore(database)) as store, closing(StorageThreads()) as threads:
        vault = FileVault(
            directory,
            gateway,
            keys,
            former=former,
            keep_free_bytes=settings.keep_free_bytes,
            clock=clock,
            random_bytes=random_bytes,
        )
        files = TenantFiles(
            store=store, vault=vault, audit=audit, settings=settings, threads=threads, clock=clock
        )
        await threads.run(files.recover)
        idle = IdleCapacity(
            concurrency=settings.concurrency, share=settings.idle_share, worker_requests=worker_requests
        )
        parts = BatchParts(
            store=store,
            vault=vault,
            files=files,
            threads=threads,
            audit=audit,
            gate=Gate(pool, idle),
            answerer=answerer,
            find_owner=lambda tenant, key_id: find_owner(tenants, tenant, key_id, clock()),
            count=lambda tenant, result: metrics.batch_lines.labels(tenant, result).inc(),
            clock=clock,
            new_id=new_id,
            max_line_bytes=max_line_bytes,
            max_requests=settings.max_requests,
        )
        runner = BatchRunner(parts, clock=monotonic, logger=logger)
        batches = Batches(
            store=store,
            vault=vault,
            files=files,
            audit=audit,
            settings=settings,
            threads=threads,
            clock=clock,
            wake=runner.wake,
        )
        try:
            yield OpenBatches(files=files, batches=batches, runner=runner)
        finally:
            await runner.stop()
