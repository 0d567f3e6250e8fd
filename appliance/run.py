"""
Composition root of processes: builds the parts a role needs, runs them, and stops them in order.

One function owns every part.  When any of them ends, for whatever reason, the rest is stopped the
way a signal would: requests drain, then the worker, then the audit log.  A process in which one
part has quietly died never goes on serving.
"""

import asyncio
import gc
import os
import signal
import socket
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
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from appliance.account import account_name
from appliance.admission import AdmissionControl
from appliance.announce import Announcer
from appliance.api.batches import render_line
from appliance.api.console.console import Console
from appliance.api.console.history import History
from appliance.api.console.logins import Logins
from appliance.api.console.sessions import Sessions
from appliance.api.middleware import CLIENT_ID
from appliance.api.services import Services
from appliance.app import create_app
from appliance.attestation import EgressWatch
from appliance.attribution import Attribution
from appliance.audit.content.payload_keys import PayloadKeys, load_master_key
from appliance.audit.durability.guarded import GuardedLog, LogFiles, open_guarded
from appliance.audit.entry import new_entry_id
from appliance.audit.gateway_name import GatewayName
from appliance.audit.keys import create_signing_key, load_signing_key, prepare_mldsa_key
from appliance.audit.store import SqlAuditStore
from appliance.audit.verification import LogVerification
from appliance.audit.witness.client import open_witnessing
from appliance.audit.witness.witnessing import Witnessing
from appliance.batch.answerer import Answerer
from appliance.batch.opening import open_batches
from appliance.batch.runner import Runner
from appliance.capture import open_content
from appliance.changes import ChangeLog
from appliance.control import ControlLoop, ControlParts
from appliance.cost.meter import CostMeter, open_costs
from appliance.drafts.promotion.crew import Crew
from appliance.drafts.promotion.passage import LocalTarget, PassageParts
from appliance.drafts.promotion.promoter import Promoter
from appliance.drafts.registry.opening import open_registry
from appliance.errors import ApplianceError, ConfigurationError
from appliance.gateway import Gateway, GatewayPolicy
from appliance.identity.authenticator import Authenticator
from appliance.identity.files import Renewable, keep_renewed
from appliance.identity.provider import open_provider
from appliance.installation import Installation, load_control_token, locate, prepare
from appliance.lease import SqlLease
from appliance.limits.limiter import Limiter, open_limits
from appliance.logs import Logger, configure_logs, take_over_libraries
from appliance.metrics import Metrics, observe_tenants, observe_witnesses
from appliance.override import SqlOverrideStore
from appliance.recorder import Recorder
from appliance.recycle import RecycleParts, Recycler, Restarter
from appliance.register.enrolment import enrol
from appliance.register.registrar import Registrar
from appliance.server import allow_open_files, bind, is_loopback, make_server
from appliance.serving.client import WorkerClient
from appliance.serving.discovery import Discovery
from appliance.serving.pool import WorkerPool
from appliance.serving.restart import RestartClient
from appliance.serving.speculation import SpeculationClient
from appliance.serving.worker import WorkerId
from appliance.settings import Settings, WorkerSettings, process_environment
from appliance.sovereignty.egress.plan import plan_egress
from appliance.sovereignty.egress.prober import Prober
from appliance.sovereignty.environment import refuse_ways_out
from appliance.sovereignty.ports import gateway_ports
from appliance.sovereignty.wall import Wall, raise_wall
from appliance.tenancy import TenantDirectory
from appliance.tenancy.store import SqlTenantStore
from appliance.tenancy.watch import TenantWatch
from appliance.tls import open_tls
from appliance.tracing.endpoint import refuse_public
from appliance.tracing.opening import open_tracing
from appliance.worker_list import WorkerList
from appliance.worker_role import Listeners, WorkerRole

DISTRIBUTION = "sovereign-appliance"
COLLECT_AFTER = (10_000, 20, 20)
"""Objects made and not gone after which the collector looks at the youngest, and how often it looks at older
ones; the interpreter's own numbers are for programs with far fewer."""


class Role(StrEnum):
    """A part of the appliance that a process can play."""

    GATEWAY = "gateway"
    WORKER = "worker"


def run_roles(read_settings: Callable[[], Settings], roles: frozenset[Role]) -> None:
    """
    Run until a signal or a failure.

    Args:
        read_settings: reads the settings, now and whenever somebody asks for the list of workers anew.
        roles: what this process is.

    Raises:
        ApplianceError: one line that says why the process could not start or go on.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(read_settings, roles))


async def _run(read_settings: Callable[[], Settings], roles: frozenset[Role]) -> None:
    refuse_ways_out(process_environment())
    settings = read_settings()
    refuse_public(settings.tracing)
    version = installed_version(DISTRIBUTION)
    logger = configure_logs(settings.log, terminal=sys.stderr.isatty())
    take_over_libraries(logger)
    installation = locate(settings)
    prepare(installation, create_signing_key=create_signing_key)
    announcer = Announcer(sys.stdout)
    announcer.started(version, installation)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    worker = _plan_worker(settings, installation, logger, announcer) if Role.WORKER in roles else None
    # Before the wall, which its children inherit: what it finds is said of the network, not of the wall.
    prober = _start_prober(settings) if Role.GATEWAY in roles else None
    wall = _raise_wall(settings, roles, worker, logger, announcer)
    if Role.GATEWAY not in roles:
        assert worker is not None  # noqa: S101 - there are two roles
        await _until_stopped(stop, announcer, worker.run(None), drain=worker.stop)
        return
    hangup = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup.set)
    own: dict[WorkerId, Restarter] = {} if worker is None else {worker.worker.worker_id: worker}
    tls = open_tls(settings.tls, logger=logger, clock=time.time)  # noqa: TID251 - the root hands out the clock
    if tls is None and not is_loopback(settings.api.host):
        logger.warning("plain_http", host=settings.api.host, detail="keys cross the network in clear")
    if (fitting := allow_open_files(settings.api)) < settings.api.max_connections:
        logger.warning("open_files_limited", count=fitting, detail="raise the limit (ulimit -n)")
    async with _open_gateway(
        settings,
        read_settings,
        installation,
        logger,
        version,
        own,
        announcer,
        wall,
        prober,
        _local(settings.worker, worker),
    ) as parts:
        if tls is not None:
            parts.metrics.tls_certificate_not_after.set_function(lambda: tls.not_after)
        server = make_server(create_app(parts.services), settings.api, tls=tls, metrics=parts.metrics)
        listener = bind(settings.api)

        async def drain() -> None:
            server.should_exit = True
            # Before the worker goes: its end would pass for the death of whoever tries a draft.
            await parts.promoter.stop()
            # Before the worker goes: lines that were broken off are run again at the next start.
            await parts.batches.stop()
            with suppress(ApplianceError):
                await serving
            if worker is not None:
                await worker.stop()

        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        key = parts.shown.get("demo tenant", "$KEY")
        host, port = listener.getsockname()[:2]
        running: list[Coroutine[Any, Any, None]] = [
            _wait_for(serving),
            parts.control.run(),
            parts.promoter.run(),
            parts.audit.run(),
            parts.witnessing.run(),
            parts.batches.run(),
            parts.limits.run(),
            parts.costs.run(),
            parts.tenants.run(),
            parts.discovery.run(),
            parts.egress.run(),
            parts.services.workers.reload_on(hangup, f"cli:{account_name()}"),
            _announce_when_ready(
                parts, announcer, installation, f"{'https' if tls else 'http'}://{host}:{port}", key
            ),
            keep_renewed([part for part in (tls, *parts.renewable) if part is not None]),
        ]
        if parts.console is not None:
            running.append(parts.console.run())
        if worker is not None:
            running.append(
                worker.run(Listeners(pool=parts.pool, audit=parts.audit.sink, metrics=parts.metrics))
            )
        _leave_alone_what_a_start_made()
        await _until_stopped(stop, announcer, *running, drain=drain)


def _plan_worker(
    settings: Settings, installation: Installation, logger: Logger, announcer: Announcer
) -> WorkerRole:
    """Raises as `WorkerRole.plan`."""
    registry = partial(open_registry, settings, time.time)  # noqa: TID251 - the root hands out the clock
    return WorkerRole.plan(settings, installation, logger, announcer, open_registry=registry)


def _local(settings: WorkerSettings, worker: WorkerRole | None) -> LocalTarget | None:
    """The target's weights, where this process serves them."""
    if worker is None:
        return None
    return LocalTarget(digest=worker.worker.weights, path=settings.model, context=settings.max_model_len)


def _start_prober(settings: Settings) -> Prober | None:
    """
    The process that will try to get out, unless there are no checks; it ends with this one at the latest.

    Raises:
        ConfigurationError: it cannot be started.
    """
    if settings.egress.mode == "off":
        return None
    try:
        return Prober.start(plan_egress(settings, process_environment()))
    except OSError as error:
        message = f"cannot start the process of the egress check: {error.strerror}"
        raise ConfigurationError(message) from error


def _raise_wall(
    settings: Settings,
    roles: frozenset[Role],
    worker: WorkerRole | None,
    logger: Logger,
    announcer: Announcer,
) -> Wall:
    """
    Shut this process and all it will start in with the ports they need.

    Raises:
        ConfigurationError: the settings insist on a wall that this kernel cannot raise.
    """
    ports = frozenset(settings.sovereignty.connect_ports)
    if Role.GATEWAY in roles:
        ports |= gateway_ports(settings)
    if worker is not None:
        ports |= worker.connect_ports
    wall = raise_wall(settings.sovereignty.wall, ports)
    announcer.say(f"wall: {wall.detail}")
    if wall.is_up:
        logger.info("wall_raised", detail=wall.detail)
    else:
        logger.warning("wall_missing", detail=wall.detail)
    return wall


def _leave_alone_what_a_start_made() -> None:
    """
    Keep the garbage collector to what requests make.

    Looking through everything that was imported and built takes it long enough to be most of what the
    slowest requests wait for; `benchmarks.gateway_overhead` shows it at 64 requests at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


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
    discovery: Discovery
    egress: EgressWatch
    control: ControlLoop
    promoter: Promoter
    audit: GuardedLog
    witnessing: Witnessing
    console: Console | None
    tenants: TenantWatch
    shown: dict[str, str]
    """Keys made just now, by what they are for."""
    metrics: Metrics
    batches: Runner
    limits: Limiter
    costs: CostMeter
    renewable: tuple[Renewable, ...]
    """What is read from files that may change."""


@asynccontextmanager
async def _open_gateway(
    settings: Settings,
    read_settings: Callable[[], Settings],
    installation: Installation,
    logger: Logger,
    version: str,
    own: Mapping[WorkerId, Restarter],
    announcer: Announcer,
    wall: Wall,
    prober: Prober | None,
    local: LocalTarget | None,
) -> AsyncIterator[GatewayParts]:
    metrics = Metrics(CollectorRegistry())
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=metrics.registry)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # when each series began would double their number
    metrics.build_info.labels(version).set(1)
    metrics.wall_up.set(wall.is_up)
    tenants = TenantDirectory()
    provider = open_provider(settings.oidc, logger=logger, clock=time.time)  # noqa: TID251 - as below
    token = load_control_token(installation)
    prepare_mldsa_key(installation.signing_key, wanted=settings.audit.post_quantum)
    signer = load_signing_key(installation.signing_key, settings.audit.origin)
    metrics.audit_signing_key_time.set(installation.signing_key.stat().st_mtime)
    held = GatewayName.hold(installation.directory / "gateway.id", settings.audit.gateway)
    store = SqlAuditStore(installation.database_url)
    overrides = SqlOverrideStore(installation.database_url)
    tenant_store = SqlTenantStore(installation.database_url)
    lease = SqlLease(
        installation.database_url,
        name="control",
        holder=new_request_id(),
        seconds=settings.monitor.lease_seconds,
        clock=time.time,  # noqa: TID251 - the composition root hands out the clock
    )
    pool = WorkerPool(on_gone=metrics.forget_worker)
    discovery = Discovery(
        pool=pool,
        urls=settings.pool.urls,
        discover=settings.pool.discover,
        seconds=settings.pool.discover_seconds,
        logger=logger,
    )
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
                wall=wall.detail,
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
            open_limits(
                database_url=installation.database_url,
                gateway=new_request_id(),
                settings=settings.limits,
                clock=time.monotonic,
                wall_clock=time.time,  # noqa: TID251 - as above
                metrics=metrics,
                logger=logger,
            ) as limits,
            open_costs(
                database_url=installation.database_url,
                gateway=held.name,
                start=new_request_id(),
                settings=settings.cost,
                time_zone=settings.limits.time_zone,
                clock=time.monotonic,
                wall_clock=time.time,  # noqa: TID251 - as above
                metrics=metrics,
                logger=logger,
            ) as costs,
            open_tracing(
                settings.tracing,
                version=version,
                gateway=held.name,
                metrics=metrics,
                logger=logger,
                clock=time.monotonic,
                wall_clock=time.time,  # noqa: TID251 - as above
            ) as tracing,
            WorkerClient.open(connect_seconds=settings.pool.connect_seconds) as client,
            SpeculationClient.open(token=token) as speculation,
            RestartClient.open(token=token) as others,
        ):
            observe_witnesses(metrics, lambda: witnessing.level)
            tenant_watch = TenantWatch(
                store=tenant_store,
                directory=tenants,
                logger=logger,
                clock=time.time,  # noqa: TID251 - as above
                seconds=settings.tenants.poll_seconds,
            )
            observe_tenants(metrics, tenant_watch)
            registrar = Registrar(store=tenant_store, record=guarded.log.append, adopt=tenant_watch.adopt)
            roster, shown = await enrol(
                registrar,
                installation,
                file=settings.tenants.file,
                actor=f"cli:{account_name()}",
                clock=time.time,  # noqa: TID251 - as above
            )
            tenant_watch.adopt(roster)
            # Before anything else can fail: they are not made a second time.
            announcer.show_keys(installation, shown)
            attribution = Attribution(label_key=os.urandom(16), clock=time.monotonic)
            admission = AdmissionControl(
                pool=pool,
                settings=settings.admission,
                pool_settings=settings.pool,
                metrics=metrics,
                clock=time.monotonic,
            )
            gateway = Gateway(
                pool=pool,
                admission=admission,
                client=client,
                recorder=Recorder(
                    audit=guarded.sink,
                    attribution=attribution,
                    captures=content.captures,
                    metrics=metrics,
                    logger=logger,
                    clock=time.monotonic,
                    costs=costs,
                ),
                metrics=metrics,
                clock=time.monotonic,
                policy=GatewayPolicy(
                    keep_alive_seconds=settings.api.keep_alive_seconds,
                    silence_seconds=settings.api.silence_seconds,
                    origin=settings.audit.origin,
                ),
                limits=limits,
                costs=costs,
                tracing=tracing,
            )
            recycler = Recycler(
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
            )
            control = ControlLoop(
                ControlParts(
                    pool=pool,
                    client=client,
                    speculation=speculation,
                    lease=lease,
                    overrides=overrides,
                    recycler=recycler,
                    changes=ChangeLog(
                        audit=guarded.sink,
                        metrics=metrics,
                        logger=logger,
                        clock=time.time,  # noqa: TID251 - as above
                    ),
                    metrics=metrics,
                    logger=logger,
                    costs=costs,
                ),
                settings=settings.monitor,
                clock=time.monotonic,
                wall_clock=time.time,  # noqa: TID251 - as above
            )
            promoter = Promoter(
                PassageParts(
                    crew=Crew(
                        pool=pool,
                        recycler=recycler,
                        is_acting=lambda: control.is_acting,
                        clock=time.monotonic,
                        sleep=asyncio.sleep,
                    ),
                    directory=installation.drafts,
                    open_registry=partial(open_registry, settings, time.time),  # noqa: TID251 - as above
                    record=guarded.log.append,
                    drafts=settings.drafts,
                    recycle=settings.recycle,
                    wall_clock=time.time,  # noqa: TID251 - as above
                    logger=logger,
                    local=local,
                ),
                new_id=new_request_id,
            )
            egress = EgressWatch(
                settings=settings.egress,
                observe=prober.observe if prober else None,
                audit=guarded.sink,
                gateway=held.name,
                host=socket.gethostname(),
                metrics=metrics,
                logger=logger,
                clock=time.time,  # noqa: TID251 - as above
                monotonic=time.monotonic,
            )
            answerer = Answerer(
                gateway,
                render=render_line,
                new_request_id=new_request_id,
                is_client_id=lambda text: CLIENT_ID.match(text) is not None,
                salted=not settings.api.share_prefix_cache,
                logger=logger,
            )
            async with open_batches(
                database_url=installation.database_url,
                directory=settings.batch.directory or installation.files,
                gateway=held.name,
                keys=_payload_keys(settings, installation),
                settings=settings.batch,
                worker_requests=settings.admission.worker_requests,
                max_line_bytes=settings.api.max_body_bytes,
                tenants=tenants,
                pool=pool,
                audit=guarded.sink,
                answerer=answerer,
                metrics=metrics,
                logger=logger,
                clock=time.time,  # noqa: TID251 - as above
                monotonic=time.monotonic,
                random_bytes=os.urandom,
                new_id=new_request_id,
            ) as work:
                console = _make_console(settings, installation, pool, control, witnessing, logger)
                services = Services(
                    settings=settings.api,
                    tenants=tenants,
                    identity=Authenticator(tenants, provider=provider, tls=settings.tls),
                    pool=pool,
                    workers=WorkerList(
                        pool=pool,
                        discovery=discovery,
                        settings=settings,
                        read_settings=read_settings,
                        record=guarded.log.append,
                        logger=logger,
                        wall=wall,
                    ),
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
                    wall=wall,
                    egress=egress,
                    registrar=registrar,
                    tenants_warning=lambda: tenant_watch.warning,
                    retention=content.retention,
                    files=work.files,
                    batches=work.batches,
                    console=console,
                    promoter=promoter,
                )
                yield GatewayParts(
                    services=services,
                    pool=pool,
                    discovery=discovery,
                    egress=egress,
                    control=control,
                    promoter=promoter,
                    audit=guarded,
                    witnessing=witnessing,
                    console=console,
                    tenants=tenant_watch,
                    shown=shown,
                    metrics=metrics,
                    renewable=(provider,) if provider else (),
                    batches=work.runner,
                    limits=limits,
                    costs=costs,
                )
    finally:
        if prober is not None:
            prober.close()
        lease.close()
        overrides.close()
        tenant_store.close()
        store.close()
        held.release()


def _make_console(
    settings: Settings,
    installation: Installation,
    pool: WorkerPool,
    control: ControlLoop,
    witnessing: Witnessing,
    logger: Logger,
) -> Console | None:
    """The operator console, where there is to be one."""
    if not settings.console.enabled:
        return None
    chosen, clock = settings.console, time.monotonic
    return Console(
        settings=chosen,
        sessions=Sessions(
            idle_seconds=chosen.idle_seconds, longest_seconds=chosen.session_seconds, clock=clock
        ),
        logins=Logins(attempts=chosen.login_attempts, seconds=chosen.login_seconds, clock=clock),
        history=History(pool=pool, control=control, clock=clock, logger=logger),
        verification=LogVerification(
            database_url=installation.database_url,
            scratch=installation.directory,
            vkey=lambda: load_signing_key(installation.signing_key, settings.audit.origin).vkey,
            witnesses=settings.audit.witnesses,
            keep_free_bytes=settings.audit.low_disk_bytes,
            clock=time.time,  # noqa: TID251 - as above
        ),
        witnesses=lambda: witnessing.level,
        clock=clock,
    )


def _payload_keys(settings: Settings, installation: Installation) -> PayloadKeys:
    """The keys to content once more, for files: each thread that uses them has its own view of them."""
    master = settings.audit.payload_master_key_file
    return PayloadKeys(
        settings.audit.payload_keys_directory or installation.payload_keys,
        master_key=load_master_key(master) if master else None,
        key_days=settings.audit.payload_rotation_days,
        clock=time.time,  # noqa: TID251 - as above
        random_bytes=os.urandom,
    )


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
    console = parts.services.console is not None
    announcer.ready(installation, url, sorted(parts.pool.models()), key, console=console)
