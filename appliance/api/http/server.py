"""The HTTP server: uvicorn with bounded connections; the caller owns signals and sockets."""

import asyncio
import ipaddress
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from appliance.api.http.protocol import BoundedProtocol
from appliance.api.http.tls import Tls
from appliance.api.request_middleware import Stop
from appliance.errors import ApplianceError, ConfigurationError, spec_of
from appliance.infra.metrics import Metrics
from appliance.infra.read_turns import ReadTurns
from appliance.infra.settings import ADMIN_CONNECTIONS, ApiSettings

BACKLOG = 2048
TICKS_BETWEEN_CHECKS = 10
"""Connections are checked every second; uvicorn ticks every tenth of a second."""
OTHER_FILES = 512 + ADMIN_CONNECTIONS
"""Open files of a gateway besides the API's connections: the admin listener's, databases, logs, libraries."""


class Server(uvicorn.Server):
    """Stops when `should_exit` is set, after the requests in flight have finished."""

    def __init__(
        self, config: uvicorn.Config, *, settings: ApiSettings, tls: Tls | None, metrics: Metrics | None
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._tls = tls
        self._turns = ReadTurns()
        self._metrics = metrics

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the process stops its parts in its own order."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        handshake, flush = self._settings.head_seconds, self._settings.stalled_seconds
        self.servers = [
            await loop.create_server(
                self._new_connection,
                sock=listener,
                backlog=BACKLOG,
                ssl=self._tls.context if self._tls else None,
                ssl_handshake_timeout=handshake if self._tls else None,
                ssl_shutdown_timeout=flush if self._tls else None,
            )
            for listener in sockets or ()
        ]
        self.started = True

    async def leave(self, stop: Stop, seconds: float) -> None:
        """
        Serve for `seconds` more, then finish the running requests, at most for the drain time; refuse others.

        The listener stays open, and no connection is refused.  Set `should_exit` afterwards.  Does nothing if
        `seconds` is 0.
        """
        if not seconds:
            return
        stop.has_begun = True
        await asyncio.sleep(seconds)
        stop.refuses = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                while self.server_state.tasks:
                    await asyncio.wait(set(self.server_state.tasks))
        # What is left has had its time.
        self.config.timeout_graceful_shutdown = 1

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_BETWEEN_CHECKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.check(now)
        return await super().on_tick(counter)

    def _new_connection(self) -> BoundedProtocol:
        return BoundedProtocol(
            config=self.config,
            server_state=self.server_state,
            turns=self._turns,
            settings=self._settings,
            on_refusal=self._count,
        )

    def _count(self, error: ApplianceError) -> None:
        if self._metrics is not None:
            self._metrics.errors.labels(spec_of(error).code).inc()


def make_server(
    app: ASGIApp, settings: ApiSettings, *, tls: Tls | None = None, metrics: Metrics | None = None
) -> Server:
    return Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            # uvicorn's log of an exception would bypass the list of allowed log fields.
            log_level="critical",
            server_header=False,
            date_header=False,
            timeout_keep_alive=settings.idle_seconds,
            timeout_graceful_shutdown=settings.drain_seconds,
            proxy_headers=False,
        ),
        settings=settings,
        tls=tls,
        metrics=metrics,
    )


def bind(settings: ApiSettings) -> socket.socket:
    """Bind the port, before anything slow is started; raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named.  Without it an answer sent in two writes waits
    # 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{settings.host} port {settings.port}"
        message = (
            f"cannot listen on {where} ({error.strerror}): choose another with --host, --port or --admin-port"
        )
        raise ConfigurationError(message) from error
    listener.setblocking(False)  # noqa: FBT003 - positional only
    return listener


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def allow_open_files(settings: ApiSettings) -> int:
    """Raise the limit of open files as far as allowed; returns how many connections of the API fit."""
    wanted = 2 * settings.max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fitting = wanted if soft == resource.RLIM_INFINITY else soft
    return min(settings.max_connections, (fitting - OTHER_FILES) // 2)
