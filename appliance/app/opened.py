"""What a gateway opens and has to close again: its name, database, log, content, limits, costs, clients."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from appliance.audit.content.retention import MISDATED
from appliance.audit.disposal.automatic import AutomaticDisposal
from appliance.audit.disposal.disposing import Disposing
from appliance.audit.durability.guarded import GuardedLog, LogFiles, open_guarded
from appliance.audit.entry import new_entry_id
from appliance.audit.forward.cef import render_cef
from appliance.audit.forward.collector import Collector
from appliance.audit.forward.cursor import ForwardStore
from appliance.audit.forward.events import Render, render_json
from appliance.audit.forward.forwarder import Forwarder
from appliance.audit.forward.ocsf import render_ocsf
from appliance.audit.forward.reader import LogReader
from appliance.audit.gateway_name import GatewayName
from appliance.audit.signing_keys import (
    Signer,
    keep_public_keys,
    load_signing_key,
    prepare_mldsa_key,
    refuse_retired,
)
from appliance.audit.store import SqlAuditStore
from appliance.audit.timestamps.timestamping import Timestamping
from appliance.audit.witness.witness_client import open_witnessing
from appliance.audit.witness.witnessing import Witnessing
from appliance.control.override import SqlOverrideStore
from appliance.gateway.batch.store import SqlBatchStore
from appliance.gateway.body_parsers import BodyParsers
from appliance.gateway.capture import OpenContent, open_content
from appliance.gateway.cost.meter import CostMeter
from appliance.gateway.cost.store import CostStore
from appliance.gateway.tracing.tracing_setup import open_tracing
from appliance.infra.data_directory import Installation, keys_travel_with_data, load_control_token
from appliance.infra.database import Database
from appliance.infra.lease import SqlLease
from appliance.infra.logs import Logger
from appliance.infra.metrics import Metrics
from appliance.infra.randomness import random_bytes
from appliance.infra.settings import Settings
from appliance.serving.client import WorkerClient
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.pool import WorkerPool
from appliance.serving.restart import RestartClient
from appliance.serving.worker_tls import WorkerTls
from appliance.sovereignty.egress.prober import Prober
from appliance.sovereignty.wall import Wall
from appliance.tenancy.limits.limiter import Limiter, open_limits
from appliance.tenancy.roster_mac import RosterMac
from appliance.tenancy.store import SqlTenantStore

if TYPE_CHECKING:  # loaded only if tracing is on
    from appliance.gateway.tracing.tracer import Tracing

WALL_CLOCK = time.time  # noqa: TID251 - the composition root hands out the clock
RENDERS: Mapping[str, Render] = {"json": render_json, "ocsf": render_ocsf, "cef": render_cef}
COUNT_CONNECTIONS = 32
"""Maximum at each worker, for the tokens of requests whose client left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedParts:
    metrics: Metrics
    database: Database
    pool: WorkerPool
    gateway: str  # held by no other process while this one runs
    audit: GuardedLog
    content: OpenContent
    witnessing: Witnessing
    timestamping: Timestamping
    forwarder: Forwarder | None  # None unless `audit.forward` is set
    disposal: AutomaticDisposal | None  # None unless `audit.dispose_after_days` is set, and on PostgreSQL
    limits: Limiter
    bodies: BodyParsers
    costs: CostMeter
    tracing: "Tracing | None"
    client: WorkerClient
    speculation: SpeculationClient
    counts: SpeculationClient  # for requests: clients that leave must not delay control
    others: RestartClient
    worker_tls: WorkerTls
    lease: SqlLease
    overrides: SqlOverrideStore
    tenant_store: SqlTenantStore


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOpener:
    """Opens the parts in the order they need each other, and closes them in the reverse order."""

    settings: Settings
    installation: Installation
    logger: Logger
    version: str
    wall: Wall
    prober: Prober | None  # makes the egress checks, if there are any

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[OpenedParts]:
        """Open every part until the block ends; raises ApplianceError if one cannot be opened."""
        settings, installation = self.settings, self.installation
        metrics = self._make_metrics()
        token, tls = load_control_token(installation), WorkerTls(settings.pool)
        # In a thread: a token may be slow to log in.
        signer = await asyncio.to_thread(self._load_signer, metrics)
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            if self.prober is not None:
                stack.enter_context(closing(self.prober))
            name = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
            stack.callback(name.release)
            # Closed after the stores, which give their connections back to it.
            database = stack.enter_context(closing(Database(installation.database_url)))
            # Opened before the other stores: it makes or checks the tables of all.
            progress = _report_upgrade(self.logger)
            store = stack.enter_context(closing(SqlAuditStore(database, progress=progress)))
            audit = await enter(
                open_guarded(
                    store=store,
                    signer=signer,
                    settings=settings.audit,
                    files=LogFiles(
                        database_url=installation.database_url,
                        sealed_head=installation.sealed_head,
                        spool=installation.spool,
                    ),
                    gateway=name.name,
                    version=self.version,
                    wall=self.wall.detail,
                    metrics=metrics,
                    logger=self.logger,
                    clock=WALL_CLOCK,
                )
            )
            report = partial(_report_witness, self.logger)
            witnessing = await enter(open_witnessing(store=store, settings=settings.audit, report=report))
            _observe_witnesses(metrics, witnessing)
            timestamping = Timestamping(
                store=store,
                settings=settings.audit,
                clock=WALL_CLOCK,
                random_bytes=os.urandom,
                report=partial(_report_timestamps, self.logger),
            )
            _observe_timestamps(metrics, timestamping)
            limits = await enter(
                open_limits(
                    database=database,
                    gateway=new_request_id(),
                    settings=settings.limits,
                    clock=time.monotonic,
                    wall_clock=WALL_CLOCK,
                    metrics=metrics,
                    logger=self.logger,
                )
            )
            costs = CostMeter(
                store=CostStore(database),
                gateway=name.name,
                start=new_request_id(),
                settings=settings.cost,
                zone=ZoneInfo(settings.limits.time_zone),
                clock=time.monotonic,
                wall_clock=WALL_CLOCK,
                metrics=metrics,
                logger=self.logger,
            )
            await enter(costs.opened())
            tracing = await enter(
                open_tracing(
                    settings.tracing,
                    version=self.version,
                    gateway=name.name,
                    metrics=metrics,
                    logger=self.logger,
                    clock=time.monotonic,
                    wall_clock=WALL_CLOCK,
                )
            )
            client = await enter(
                WorkerClient.open(token=token, tls=tls, connect_seconds=settings.pool.connect_seconds)
            )
            counts = await enter(SpeculationClient.open(token=token, tls=tls, connections=COUNT_CONNECTIONS))
            # Opened after what the ends of requests need: when it closes, it waits for those.
            content = await enter(
                open_content(
                    database=database,
                    keys_directory=installation.payload_keys,
                    settings=settings.audit,
                    log=audit.log,
                    clock=WALL_CLOCK,
                    random_bytes=os.urandom,
                )
            )
            if keys_travel_with_data(settings):
                self.logger.warning("payload_keys_with_data", path=str(installation.payload_keys))
            for tenant, count in (await content.retention.misdated()).items():
                self.logger.warning("content_misdated", tenant=tenant, count=count, detail=MISDATED)
            yield OpenedParts(
                metrics=metrics,
                database=database,
                pool=WorkerPool(on_gone=metrics.forget_worker),
                gateway=name.name,
                audit=audit,
                content=content,
                witnessing=witnessing,
                timestamping=timestamping,
                forwarder=self._make_forwarder(store, database, metrics),
                disposal=self._make_disposal(store, database),
                limits=limits,
                bodies=stack.enter_context(closing(BodyParsers())),
                costs=costs,
                tracing=tracing,
                client=client,
                speculation=await enter(SpeculationClient.open(token=token, tls=tls)),
                counts=counts,
                others=await enter(RestartClient.open(token=token, tls=tls)),
                worker_tls=tls,
                lease=SqlLease(
                    database,
                    name="control",
                    holder=new_request_id(),
                    seconds=settings.monitor.lease_seconds,
                    clock=WALL_CLOCK,
                ),
                overrides=SqlOverrideStore(database),
                tenant_store=SqlTenantStore(database, RosterMac.of(installation)),
            )

    def _make_disposal(self, store: SqlAuditStore, database: Database) -> AutomaticDisposal | None:
        settings = self.settings.audit
        if settings.dispose_after_days is None or store.shared:
            return None
        return AutomaticDisposal(
            disposing=Disposing.of(store, settings),
            files=SqlBatchStore(database).stored_ids,
            days=settings.dispose_after_days,
            origin=settings.origin,
            clock=WALL_CLOCK,
            report=partial(_report_disposal, self.logger),
        )

    def _make_forwarder(self, store: SqlAuditStore, database: Database, metrics: Metrics) -> Forwarder | None:
        settings = self.settings.audit.forward
        if settings is None:
            return None
        forward = ForwardStore(database)
        return Forwarder(
            destination=settings.destination,
            connect=partial(Collector.open, settings),
            reader=LogReader(
                store=store, forward=forward, render=RENDERS[settings.format], host=socket.gethostname()
            ),
            forward=forward,
            lease=SqlLease(
                database,
                name="forward",
                holder=new_request_id(),
                seconds=self.settings.monitor.lease_seconds,
                clock=WALL_CLOCK,
            ),
            metrics=metrics,
            logger=self.logger,
            clock=WALL_CLOCK,
            monotonic=time.monotonic,
        )

    def _make_metrics(self) -> Metrics:
        metrics = Metrics(CollectorRegistry())
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=metrics.registry)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # when each series began would double their number
        metrics.build_info.labels(self.version).set(1)
        metrics.wall_up.set(self.wall.is_up)
        return metrics

    def _load_signer(self, metrics: Metrics) -> Signer:
        key = self.installation.signing_key
        prepare_mldsa_key(key, wanted=self.settings.audit.post_quantum)
        signer = load_signing_key(key, self.settings.audit.origin)
        refuse_retired(signer, self.installation.retired_keys)
        keep_public_keys(key, signer, self.installation.public_key)
        file = key if isinstance(key, Path) else self.installation.public_key
        metrics.audit_signing_key_time.set(file.stat().st_mtime)
        return signer


def new_request_id() -> str:
    """A unique id: 48 bits of time, 80 of randomness."""
    return new_entry_id(int(WALL_CLOCK() * 1000), random_bytes(10))


def _observe_witnesses(metrics: Metrics, witnessing: Witnessing) -> None:
    metrics.audit_witnesses.labels("known").set_function(lambda: witnessing.level.known)
    metrics.audit_witnesses.labels("cosigned").set_function(lambda: witnessing.level.cosigned)
    metrics.audit_witnessed_size.set_function(lambda: witnessing.level.size)
    metrics.audit_witness_time.set_function(lambda: witnessing.level.time)


def _report_upgrade(logger: Logger) -> Callable[[int, int], None]:
    """Log each percent of the hashes that an upgrade adds to the audit log."""
    percent = -1

    def report(done: int, total: int) -> None:
        nonlocal percent
        if (now := done * 100 // total) != percent:
            percent = now
            logger.info("audit_upgrading", detail=f"{done} of {total} hash tiles", count=done)

    return report


def _observe_timestamps(metrics: Metrics, timestamping: Timestamping) -> None:
    metrics.audit_timestamp_interval.set_function(lambda: timestamping.level.seconds)
    metrics.audit_timestamped_size.set_function(lambda: timestamping.level.size)
    metrics.audit_timestamp_time.set_function(lambda: timestamping.level.time)
    metrics.audit_timestamp_failures.set_function(lambda: timestamping.level.failures)
    metrics.audit_timestamp_clock_difference.set_function(lambda: timestamping.level.clock_difference)


def _report_timestamps(logger: Logger, event: str, problem: str | None) -> None:
    if problem:
        logger.warning(event, reason=problem)
    else:
        logger.info(event)


def _report_disposal(logger: Logger, event: str, detail: str, *, is_problem: bool) -> None:
    if is_problem:
        logger.warning(event, error=detail)
    else:
        logger.info(event, detail=detail)


def _report_witness(logger: Logger, name: str, problem: str | None) -> None:
    if problem:
        logger.warning("witness_failed", detail=name, reason=problem)
    else:
        logger.info("witness_cosigns", detail=name)
