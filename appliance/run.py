"""
Composition root of processes: builds the parts a role needs, runs them, and stops them in order.

One function owns every part.  When any of them ends, for whatever reason, the rest is stopped the
way a signal would: requests drain, then the worker, then the audit log.  A process in which one
part has quietly died never goes on serving.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from appliance.announce import Announcer
from appliance.api.services import Services
from appliance.app import create_app
from appliance.attribution import Attribution
from appliance.audit.durability.guarded import GuardedLog, LogFiles, open_guarded
from appliance.audit.entry import new_entry_id
from appliance.audit.gateway_name import GatewayName
from appliance.audit.keys import create_signing_key, load_signing_key, prepare_mldsa_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.witness.client import open_witnessing
from appliance.audit.witness.witnessing import Witnessing
from appliance.capture import open_content
from appliance.changes import ChangeLog
from appliance.control import ControlLoop, ControlParts
from appliance.errors import ApplianceError
from appliance.gateway import Gateway, GatewayPolicy
from appliance.installation import Installation, load_control_token, load_tenants, locate, prepare
from appliance.lease import SqlLease
from appliance.logs import Logger, configure_logs
from appliance.metrics import Metrics, observe_witnesses
from appliance.override import SqlOverrideStore
from appliance.recycle import RecycleParts, Recycler, Restarter
from appliance.server import bind, make_server
from appliance.serving.client import WorkerClient
from appliance.serving.pool import WorkerPool
from appliance.serving.restart import RestartClient
from appliance.serving.speculation import SpeculationClient
from appliance.serving.worker import Worker, WorkerId
from appliance.settings import Settings
from appliance.tenancy import TenantDirectory
from appliance.worker_role import Listeners, WorkerRole

DISTRIBUTION = "sovereign-appliance"


class Role(StrEnum):
    """A part of the appliance that a process can play."""

    GATEWAY = "gateway"
    WORKER = "worker"


def run_roles(settings: Settings, roles: frozenset[Role]) -> None:
    """
    Run until a signal or a failure.

    Raises:
        ApplianceError: one line that says why the process could not start or go on.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(settings, roles))


async def _run(settings: Settings, roles: frozenset[Role]) -> None:
    version = installed_version(DISTRIBUTION)
    logger = configure_logs(settings.log, terminal=sys.stderr.isatty())
    installation = locate(settings)
    shown = prepare(installation, create_signing_key=create_signing_key)
    announcer = Announcer(sys.stdout)
    announcer.started(version, installation, shown)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    worker = WorkerRole.plan(settings, installation, logger, announcer) if Role.WORKER in roles else None
    if Role.GATEWAY not in roles:
        assert worker is not None  # noqa: S101 - there are two roles
        await _until_stopped(stop, announcer, worker.run(None), drain=worker.stop)
        return
    own: dict[WorkerId, Restarter] = {} if worker is None else {worker.worker.worker_id: worker}
    async with _open_gateway(settings, installation, logger, version, own) as parts:
        server = make_server(create_app(parts.services), settings.api)
        listener = bind(settings.api)

        async def drain() -> None:
            server.should_exit = True
            with suppress(ApplianceError):
                await serving
            if worker is not None:
                await worker.stop()

        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        key = shown.get("demo tenant", "$KEY")
        host, port = listener.getsockname()[:2]
        running: list[Coroutine[Any, Any, None]] = [
            _wait_for(serving),
            parts.control.run(),
            parts.audit.run(),
            parts.witnessing.run(),
            _announce_when_ready(parts, announcer, installation, f"http://{host}:{port}", key),
        ]
        if worker is not None:
            running.append(
                worker.run(Listeners(pool=parts.pool, audit=parts.audit.sink, metrics=parts.metrics))
            )
        await _until_stopped(stop, announcer, *running, drain=drain)


async def _until_stopped(
    stop: asyncio.Event,
    announcer: Announcer,
    *parts: Coroutine[Any, Any, None],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Run the parts until one of them fails or a signal comes; drain; raise what failed."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    waiting = asyncio.ensure_future(stop.wait())
    failed: BaseException | None = None
    try:
        pending = {waiting, *tasks}
        while not stop.is_set() and failed is None:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task.exception() for task in done if task.exception()), None)
        announcer.stopping(failed)
        await drain()
    finally:
        for task in (waiting, *tasks):
            task.cancel()
        await asyncio.wait({waiting, *tasks})
    if failed is not None:
        raise failed


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """What a process with a gateway is made of."""

    services: Services
    pool: WorkerPool
    control: ControlLoop
    audit: GuardedLog
    witnessing: Witnessing
    metrics: Metrics


@asynccontextmanager
async def _open_gateway(
    settings: Settings,
    installation: Installation,
    logger: Logger,
    version: str,
    own: Mapping[WorkerId, Restarter],
) -> AsyncIterator[GatewayParts]:
    metrics = Metrics(CollectorRegistry())
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=metrics.registry)
    metrics.build_info.labels(version).set(1)
    tenants = TenantDirectory(load_tenants(installation))
    token = load_control_token(installation)
    prepare_mldsa_key(installation.signing_key, wanted=settings.audit.post_quantum)
    signer = load_signing_key(installation.signing_key, settings.audit.origin)
    held = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
    store = SqlAuditStore(installation.database_url)
    overrides = SqlOverrideStore(installation.database_url)
    lease = SqlLease(
        installation.database_url,
        name="control",
        holder=new_request_id(),
        seconds=settings.monitor.lease_seconds,
        clock=time.time,  # noqa: TID251 - the composition root hands out the clock
    )
    pool = WorkerPool()
    for number, url in enumerate(settings.pool.urls, start=1):
        pool.add(Worker(worker_id=WorkerId(f"pool-{number}"), url=url.rstrip("/")))
    try:
        async with (
            open_guarded(
                store=store,
                signer=signer,
                settings=settings.audit,
                files=LogFiles(
                    database_url=installation.database_url,
                    sealed_head=installation.sealed_head,
                    spool=installation.spool,
                ),
                gateway=held.name,
                version=version,
                metrics=metrics,
                logger=logger,
                clock=time.time,  # noqa: TID251 - the composition root hands out the clock
            ) as guarded,
            open_content(
                database_url=installation.database_url,
                keys_directory=settings.audit.payload_keys_directory or installation.payload_keys,
                settings=settings.audit,
                log=guarded.log,
                clock=time.time,  # noqa: TID251 - as above
                random_bytes=os.urandom,
            ) as content,
            open_witnessing(
                store=store, settings=settings.audit, report=partial(_report_witness, logger)
            ) as witnessing,
            WorkerClient.open(connect_seconds=settings.pool.connect_seconds) as client,
            SpeculationClient.open(token=token) as speculation,
            RestartClient.open(token=token) as others,
        ):
            observe_witnesses(metrics, lambda: witnessing.level)
            attribution = Attribution(label_key=os.urandom(16), clock=time.monotonic)
            gateway = Gateway(
                pool=pool,
                client=client,
                audit=guarded.sink,
                attribution=attribution,
                captures=content.captures,
                metrics=metrics,
                logger=logger,
                clock=time.monotonic,
                policy=GatewayPolicy(
                    keep_alive_seconds=settings.api.keep_alive_seconds,
                    silence_seconds=settings.api.silence_seconds,
                    origin=settings.audit.origin,
                ),
            )
            control = ControlLoop(
                ControlParts(
                    pool=pool,
                    client=client,
                    speculation=speculation,
                    lease=lease,
                    overrides=overrides,
                    recycler=Recycler(
                        RecycleParts(
                            pool=pool,
                            client=client,
                            own=own,
                            others=others,
                            audit=guarded.sink,
                            metrics=metrics,
                            logger=logger,
                        ),
                        settings=settings.recycle,
                        clock=time.monotonic,
                    ),
                    changes=ChangeLog(
                        audit=guarded.sink,
                        metrics=metrics,
                        logger=logger,
                        clock=time.time,  # noqa: TID251 - as above
                    ),
                    metrics=metrics,
                    logger=logger,
                ),
                settings=settings.monitor,
                clock=time.monotonic,
                wall_clock=time.time,  # noqa: TID251 - as above
            )
            services = Services(
                settings=settings.api,
                tenants=tenants,
                pool=pool,
                gateway=gateway,
                audit=guarded.log,
                audit_health=guarded.watch.health,
                attribution=attribution,
                control=control,
                overrides=overrides,
                metrics=metrics,
                logger=logger,
                clock=time.time,  # noqa: TID251 - as above
                new_request_id=new_request_id,
                version=version,
                retention=content.retention,
            )
            yield GatewayParts(
                services=services,
                pool=pool,
                control=control,
                audit=guarded,
                witnessing=witnessing,
                metrics=metrics,
            )
    finally:
        lease.close()
        overrides.close()
        store.close()
        held.release()


def new_request_id() -> str:
    """An id no other request has: 48 bits of time, 80 of randomness."""
    return new_entry_id(int(time.time() * 1000), os.urandom(10))  # noqa: TID251 - as above


def _report_witness(logger: Logger, name: str, problem: str | None) -> None:
    if problem:
        logger.warning("witness_failed", detail=name, reason=problem)
    else:
        logger.info("witness_cosigns", detail=name)


async def _wait_for(serving: "asyncio.Future[None]") -> None:
    await asyncio.shield(serving)


async def _announce_when_ready(
    parts: GatewayParts, announcer: Announcer, installation: Installation, url: str, key: str
) -> None:
    await parts.pool.wait_healthy()
    announcer.ready(installation, url, sorted(parts.pool.models()), key)
