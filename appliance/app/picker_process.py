"""
Composition root of the endpoint picker: polls the workers of `pool`, answers the proxy, stops on a signal.

It opens no database and writes no audit log: it sees no identity and no content, and changes no worker.
"""

import asyncio
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from appliance.api.picker.credentials import credentials_of
from appliance.api.picker.endpoints import Endpoints
from appliance.api.picker.messages import SERVICE
from appliance.api.picker.processor import processor
from appliance.errors import ConfigurationError
from appliance.infra.data_directory import load_control_token, locate
from appliance.infra.logs import Logger, configure_logs, take_over_libraries
from appliance.infra.metrics.picker import PickerMetrics
from appliance.infra.settings import Settings, process_environment
from appliance.serving.client import WorkerClient
from appliance.serving.discovery import Discovery
from appliance.serving.plugin_client import SpeculationClient
from appliance.serving.pool import WorkerPool
from appliance.serving.scraper import WorkerScraper
from appliance.serving.worker_tls import WorkerTls
from appliance.sovereignty.environment import refuse_egress_variables
from appliance.sovereignty.ports import picker_ports
from appliance.sovereignty.wall import raise_wall
from appliance.tenancy.identity.files import keep_renewed

READINESS = ("readiness", SERVICE, "")
"""Health services that wait for the first poll; `liveness` does not."""
STOP_SECONDS = 5.0
"""Time for requests whose headers are being answered."""
LARGEST_MESSAGE = 64 * 2**20
"""More than a proxy buffers of a body."""


def run_picker(read_settings: Callable[[], Settings]) -> None:
    """Run until a signal or a failure."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(read_settings))


async def _run(read_settings: Callable[[], Settings]) -> None:
    refuse_egress_variables(process_environment())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = read_settings()
    refuse_names(settings.pool.urls)
    if settings.pool.discover is None and not settings.pool.urls:
        raise ConfigurationError("the picker has no workers: set pool.discover or pool.urls")
    logger = configure_logs(settings.log, terminal=sys.stderr.isatty())
    take_over_libraries(logger)
    token = load_control_token(locate(settings))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Before gRPC has threads: the wall covers those that come after it.
    wall = raise_wall(settings.sovereignty.wall, picker_ports(settings))
    if wall.is_up:
        logger.info("wall_raised", detail=wall.detail)
    else:
        logger.warning("wall_missing", detail=wall.detail)
    credentials = credentials_of(settings, logger=logger, clock=time.time)  # noqa: TID251 - a composition root
    registry = CollectorRegistry()
    metrics, tls = PickerMetrics(registry), WorkerTls(settings.pool)
    async with AsyncExitStack() as stack:
        pool = WorkerPool(on_gone=metrics.forget_worker)
        endpoints = Endpoints(
            pool=pool,
            scraper=WorkerScraper(
                pool=pool,
                client=await stack.enter_async_context(
                    WorkerClient.open(token=token, tls=tls, connect_seconds=settings.pool.connect_seconds)
                ),
                speculation=await stack.enter_async_context(SpeculationClient.open(token=token, tls=tls)),
                timeout_seconds=settings.monitor.scrape_timeout_seconds,
                failures=metrics.scrape_failures,
                clock=time.monotonic,
            ),
            seconds=settings.monitor.interval_seconds,
            metrics=metrics,
            logger=logger,
            clock=time.monotonic,
        )
        discovery = Discovery(
            pool=pool,
            urls=settings.pool.urls,
            discover=settings.pool.discover,
            seconds=settings.pool.discover_seconds,
            control_port=settings.pool.control_port,
            logger=logger,
        )
        healthy = health.aio.HealthServicer()
        await healthy.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        for service in READINESS:
            await healthy.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        port = await stack.enter_async_context(_served(settings, endpoints, healthy, credentials))
        exporter, thread = start_http_server(
            settings.picker.metrics_port, settings.picker.host, registry=registry
        )
        stack.callback(thread.join)
        stack.callback(exporter.server_close)
        stack.callback(exporter.shutdown)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(discovery.run()),
                tasks.create_task(endpoints.run()),
                tasks.create_task(keep_renewed([tls])),
                tasks.create_task(_announce(endpoints, healthy, logger, settings.picker.host, port)),
            ]
            await stop.wait()
            for task in running:
                task.cancel()
        logger.info("picker_stopping")
        for service in READINESS:
            await healthy.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)


async def _announce(
    endpoints: Endpoints, healthy: health.aio.HealthServicer, logger: Logger, host: str, port: int
) -> None:
    await endpoints.wait_polled()
    for service in READINESS:
        await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
    logger.info("picker_ready", host=host, port=port)
    sys.stdout.write(f"ready  {host}:{port}\n")
    sys.stdout.flush()


@asynccontextmanager
async def _served(
    settings: Settings,
    endpoints: Endpoints,
    healthy: health.aio.HealthServicer,
    credentials: grpc.ServerCredentials | None,
) -> AsyncIterator[int]:
    """Serve the processor, and the health service on both ports, until the block ends; yields the port."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", LARGEST_MESSAGE)])
    server.add_generic_rpc_handlers((processor(endpoints),))
    probes = grpc.aio.server()
    try:
        for each in (server, probes):
            health_pb2_grpc.add_HealthServicer_to_server(healthy, each)
        port = _listen(server, settings.picker.host, settings.picker.port, credentials)
        _listen(probes, settings.picker.host, settings.picker.health_port, None)
        await server.start()
        await probes.start()
        yield port
    finally:
        await server.stop(STOP_SECONDS)
        await probes.stop(None)


def _listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {address}: another process may use the port") from error


def refuse_names(urls: tuple[str, ...]) -> None:
    """Raise ConfigurationError for a worker by name: the proxy knows its endpoints by address."""
    for url in urls:
        host = urlsplit(url).hostname or ""
        try:
            ip_address(host)
        except ValueError as error:
            message = f"pool.urls: {host} is a name; the picker needs addresses, or pool.discover"
            raise ConfigurationError(message) from error
