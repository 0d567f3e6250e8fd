"""
Composition root of processes: builds the parts a role needs, runs them, and stops them in order.

One function owns every part.  When any of them ends, for any reason, the rest stops as on a signal: requests
drain, then the worker, then the audit log.  A process in which one part has died never continues to serve.
"""

import asyncio
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import StrEnum
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any

import uvloop

from appliance.api.http.server import allow_open_files, bind, is_loopback, make_server
from appliance.api.http.tls import Tls, open_tls
from appliance.app.announcer import Announcer, status_text
from appliance.app.gateway_process import GatewayParts, GatewayRole
from appliance.app.http_app import create_admin_app, create_app
from appliance.app.worker_process import Listeners, WorkerRole
from appliance.audit.signing_keys import create_signing_key
from appliance.control.recycle import Restarter
from appliance.drafts.promotion.promotion_run import LocalTarget
from appliance.drafts.registry.site_registry import open_registry
from appliance.errors import ApplianceError, ConfigurationError
from appliance.gateway.tracing.endpoint import refuse_public
from appliance.infra.data_directory import Installation, locate, prepare
from appliance.infra.logs import Logger, configure_logs, open_log_file, take_over_libraries
from appliance.infra.os_account import account_name
from appliance.infra.settings import ApiSettings, LogSettings, Settings, WorkerSettings, process_environment
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import WorkerId
from appliance.serving.worker_log import KEPT_LOGS, LARGEST_LOG, rotate
from appliance.sovereignty.egress.plan import plan_egress
from appliance.sovereignty.egress.prober import Prober
from appliance.sovereignty.environment import refuse_egress_variables
from appliance.sovereignty.ports import gateway_ports
from appliance.sovereignty.wall import Wall, raise_wall
from appliance.tenancy.identity.files import keep_renewed

DISTRIBUTION = "sovereign-appliance"
COLLECT_AFTER = (10_000, 20, 20)
STATUS_SECONDS = 1.0


class Role(StrEnum):
    GATEWAY = "gateway"
    WORKER = "worker"


def run_roles(read_settings: Callable[[], Settings], roles: frozenset[Role]) -> None:
    """Run until a signal or a failure; `read_settings` is called at start and to reload the worker list."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(read_settings, roles))


async def _run(read_settings: Callable[[], Settings], roles: frozenset[Role]) -> None:
    refuse_egress_variables(process_environment())
    # Inherited by every child: a core file would hold prompts and keys in clear.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = read_settings()
    refuse_public(settings.tracing)
    version = installed_version(DISTRIBUTION)
    installation = locate(settings)
    prepare(installation, create_signing_key=create_signing_key)
    announcer = Announcer(sys.stdout)
    announcer.started(version, installation)
    logger = open_log(settings.log, installation, announcer, terminal=sys.stderr.isatty())
    take_over_libraries(logger)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    worker = _plan_worker(settings, installation, logger, announcer) if Role.WORKER in roles else None
    # Before the wall, which its children inherit: the check is of the network, not of the wall.
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
    api = _fit(settings.api, logger, is_plain=tls is None)
    gateway = GatewayRole(
        settings=settings,
        read_settings=read_settings,
        installation=installation,
        logger=logger,
        version=version,
        announcer=announcer,
        wall=wall,
        prober=prober,
        own=own,
        local=_local(settings.worker, worker),
    )
    async with gateway.open() as parts:
        opened = parts.opened
        if tls is not None:
            opened.metrics.tls_certificate_not_after.set_function(lambda: tls.not_after)
        server = make_server(create_app(parts.services), api, tls=tls, metrics=opened.metrics)
        opened.metrics.connections.set_function(lambda: len(server.server_state.connections))
        admin = make_server(
            create_admin_app(parts.services), api.admin_listener, tls=tls, metrics=opened.metrics
        )
        listeners = bind(api), bind(api.admin_listener)

        async def drain() -> None:
            await server.leave(parts.services.stop, settings.api.stop_delay_seconds if stop.is_set() else 0)
            server.should_exit = admin.should_exit = True
            # Before the worker stops: its end would pass for a failure of a draft on trial.
            await parts.promoter.stop()
            # Before the worker stops: interrupted lines run again at the next start.
            await parts.batches.stop()
            with suppress(ApplianceError):
                await serving
            if worker is not None:
                await worker.stop()

        serving = asyncio.gather(server.serve(sockets=[listeners[0]]), admin.serve(sockets=[listeners[1]]))
        running: list[Coroutine[Any, Any, None]] = [
            _wait_for(serving),
            parts.services.control.run(),
            parts.services.refused.run(),
            parts.promoter.run(),
            opened.audit.run(),
            opened.witnessing.run(),
            opened.timestamping.run(),
            *([opened.forwarder.run()] if opened.forwarder else []),
            *([opened.disposal.run()] if opened.disposal else []),
            parts.batches.run(),
            opened.limits.run(),
            opened.costs.run(),
            parts.tenants.run(),
            parts.discovery.run(),
            parts.egress.run(),
            parts.services.workers.reload_on(hangup, f"cli:{account_name()}"),
            _announce_when_ready(
                parts,
                announcer,
                installation,
                *(_url(each, tls) for each in listeners),
                shows_status=announcer.is_terminal and settings.log.format == "auto",
            ),
            keep_renewed([part for part in (tls, *parts.renewable) if part is not None]),
        ]
        if parts.services.console is not None:
            running.append(parts.services.console.run())
        if worker is not None:
            running.append(
                worker.run(Listeners(pool=opened.pool, audit=opened.audit.sink, metrics=opened.metrics))
            )
        _freeze_gc()
        await _until_stopped(stop, announcer, *running, drain=drain)


def open_log(
    settings: LogSettings, installation: Installation, announcer: Announcer, *, terminal: bool
) -> Logger:
    """Write the log to standard error, or to a file if that is a terminal, where a person reads."""
    if not terminal or settings.format != "auto":
        return configure_logs(settings, terminal=terminal)
    path = installation.logs / "appliance.log"
    try:
        rotate(path)
        file = open_log_file(path, largest=LARGEST_LOG, kept=KEPT_LOGS)  # until the process ends
    except OSError as error:
        raise ConfigurationError(f"cannot write the log {path}: {error.strerror}") from error
    announcer.say(f"log              {path}  (here with --log json)")
    return configure_logs(settings, terminal=False, file=file, on_warning=announcer.note_warning)


def _fit(settings: ApiSettings, logger: Logger, *, is_plain: bool) -> ApiSettings:
    """Warn, and limit connections so that descriptors are left for the admin listener, if all are idle."""
    for host in dict.fromkeys((settings.host, settings.admin_host)):
        if is_plain and not is_loopback(host):
            logger.warning("plain_http", host=host, detail="keys cross the network in clear")
    fitting = max(1, allow_open_files(settings))
    if fitting < settings.max_connections:
        logger.warning("open_files_limited", count=fitting, detail="raise the limit (ulimit -n)")
    # An idle connection takes one descriptor, a request in flight two.
    return settings.model_copy(update={"max_connections": min(settings.max_connections, 2 * fitting)})


def _plan_worker(
    settings: Settings, installation: Installation, logger: Logger, announcer: Announcer
) -> WorkerRole:
    registry = partial(open_registry, settings, time.time)  # noqa: TID251 - the root hands out the clock
    return WorkerRole.plan(settings, installation, logger, announcer, open_registry=registry)


def _local(settings: WorkerSettings, worker: WorkerRole | None) -> LocalTarget | None:
    """The target's weights, if this process serves them."""
    if worker is None:
        return None
    return LocalTarget(digest=worker.worker.weights, path=settings.model, context=settings.max_model_len)


def _start_prober(settings: Settings) -> Prober | None:
    """Start the process that makes the egress checks, if any; it ends with this one at the latest."""
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
    """Restrict this process and its future children to the ports they need."""
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


def _freeze_gc() -> None:
    """
    Exclude everything imported and built so far from garbage collection.

    Scanning it takes most of the time that the slowest requests wait; `benchmarks.gateway_overhead` shows it
    at 64 concurrent requests.  Too little of it is garbage to look for that first.
    """
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def _until_stopped(
    stop: asyncio.Event,
    announcer: Announcer,
    *parts: Coroutine[Any, Any, None],
    drain: Callable[[], Awaitable[None]],
) -> None:
    """Run the parts until one of them fails or a signal comes; drain; raise the failure."""
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


async def _wait_for(serving: "asyncio.Future[Any]") -> None:
    await asyncio.shield(serving)


def _url(listener: socket.socket, tls: Tls | None) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


async def _announce_when_ready(
    parts: GatewayParts,
    announcer: Announcer,
    installation: Installation,
    url: str,
    admin_url: str,
    *,
    shows_status: bool,
) -> None:
    await parts.opened.pool.wait_healthy()
    console = parts.services.console is not None
    documentation = parts.services.documentation is not None
    models = sorted(parts.opened.pool.models())
    announcer.ready(installation, url, admin_url, models, console=console, documentation=documentation)
    if shows_status:
        await _show_status(parts.opened.pool, announcer)


async def _show_status(pool: WorkerPool, announcer: Announcer) -> None:
    # A terminal that is gone or paused must neither end nor block the gateway.
    with suppress(OSError):
        while True:
            await asyncio.to_thread(announcer.show_status, status_text(pool.snapshots, pool.in_flight))
            await asyncio.sleep(STATUS_SECONDS)
