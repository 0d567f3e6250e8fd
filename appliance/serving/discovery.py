"""
Worker discovery: a list of base URLs, and a host name with a worker at each of its addresses.

    settings ─┐
              ├─► wanted ─► changes ─► pool: workers join and leave
    DNS ──────┘

A new worker receives requests once the control loop has found it healthy and it has listed its models; one
that leaves finishes its requests.  A worker is named by its address, so that it has the same name on every
gateway and after every restart.  Workers that this process started are not handled here.

Fails by keeping the current workers: if the name does not resolve, nothing changes.  A service that is down
shows in the health of its workers; a resolver that is down must not remove them.  For the same reason the
last worker of a model stays listed for a while: its pod is replaced, and until then clients have to wait, not
to be told that the model does not exist.
"""

import asyncio
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from appliance.errors import ConfigurationError
from appliance.infra.logs import Logger
from appliance.infra.settings import LAST_PORT, control_port_of
from appliance.serving.pool import WorkerPool
from appliance.serving.worker import PORTS, Worker, WorkerId

Resolve = Callable[[str, int], Awaitable[tuple[str, ...]]]
"""Addresses of a host name, IPv4 and IPv6, for a port; raises `OSError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    scheme: str
    host: str
    port: int

    def worker_at(self, address: str, control_port: int | None = None) -> Worker:
        host = f"[{address}]" if ipaddress.ip_address(address).version == IPV6 else address
        worker = worker_at(f"{self.scheme}://{host}:{self.port}", control_port)
        return replace(worker, tls_name=self.host) if self.scheme == "https" else worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    joined: tuple[WorkerId, ...]
    left: tuple[WorkerId, ...]


HELD_SECONDS = 3600.0
"""From the last answer of a model's last worker until it is forgotten; longer than the longest start."""
IPV6 = 6


def worker_at(url: str, control_port: int | None = None) -> Worker:
    """The worker at a base URL, named by its address."""
    url = url.rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname or parts.query or parts.fragment:
        raise ConfigurationError(f"pool.urls: {url!r} is not a base URL such as http://10.0.0.5:8000")
    try:
        control = control_port_of(control_port, parts.port or PORTS[parts.scheme])
    except ValueError as error:
        raise ConfigurationError(f"pool.urls: {url!r} has no valid port") from error
    if control > LAST_PORT:
        raise ConfigurationError(f"pool.urls: no port follows that of {url!r}; set pool.control_port")
    name = url.partition("://")[2].rpartition("@")[2].replace("/", "-")
    return Worker(worker_id=WorkerId(name), url=url, control_port=control_port)


def _place(worker: Worker) -> tuple[str, str, str]:
    """Where it is reached."""
    return *worker.address, worker.control_url


def parse_service(url: str) -> Service:
    try:
        parts = urlsplit(url.rstrip("/"))
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in PORTS or not parts.hostname or parts.path or parts.query or parts.username:
        raise ConfigurationError(f"pool.discover: {url!r} is not of the form http://name:port")
    return Service(scheme=parts.scheme, host=parts.hostname, port=port)


def workers_at(urls: Iterable[str], control_port: int | None = None) -> dict[WorkerId, Worker]:
    workers = (worker_at(url, control_port) for url in urls)
    return {worker.worker_id: worker for worker in workers}


async def resolve(host: str, port: int) -> tuple[str, ...]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(sorted({str(address[4][0]) for address in found}))


class Discovery:
    def __init__(
        self,
        *,
        pool: WorkerPool,
        urls: Iterable[str],
        discover: str | None,
        seconds: float,
        logger: Logger,
        control_port: int | None = None,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Add the listed workers; `run` adds those of `discover`, and resolves it every `seconds`.

        `control_port` is that of every worker; None: the one after its own.
        """
        self._pool = pool
        self._control_port = control_port
        self._listed = workers_at(urls, control_port)
        self._found: dict[WorkerId, Worker] = {}
        self._service = parse_service(discover) if discover else None
        self._seconds = seconds
        self._logger = logger
        self._resolve = resolve
        self._clock = clock
        self._known: dict[WorkerId, Worker] = {}
        self._is_failing = False
        self._changed = asyncio.Event()
        self._apply()

    def replace(self, urls: Iterable[str], discover: str | None, control_port: int | None = None) -> Changes:
        """
        Replace the list, all of it or, if a URL is invalid, nothing; resolve the host name again at once.
        """
        listed = workers_at(urls, control_port)
        service = parse_service(discover) if discover else None
        if control_port != self._control_port:
            self._found = {
                each: replace(worker, control_port=control_port) for each, worker in self._found.items()
            }
        self._listed, self._control_port = listed, control_port
        if service != self._service:
            self._service, self._found, self._is_failing = service, {}, False
        self._changed.set()
        return self._apply()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            if self._service is not None:
                await self.resolve_now(self._service)
            try:
                async with asyncio.timeout(self._seconds if self._service is not None else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def resolve_now(self, service: Service) -> Changes:
        """Resolve the name once; on failure nothing changes."""
        try:
            async with asyncio.timeout(max(self._seconds, 1.0)):
                addresses = await self._resolve(service.host, service.port)
            workers = [service.worker_at(address, self._control_port) for address in addresses]
        except (OSError, TimeoutError, ValueError, ConfigurationError) as error:
            self._log_failure(f"{type(error).__name__}: {error}")
            return Changes(joined=(), left=())
        if not workers:
            self._log_failure("it has no address")
            return Changes(joined=(), left=())
        if service != self._service:
            return Changes(joined=(), left=())  # `replace` configured another one meanwhile
        if self._is_failing:
            self._is_failing = False
            self._logger.info("discovery_recovered", host=service.host, count=len(workers))
        found = {worker.worker_id: worker for worker in workers}
        self._found = found | {
            worker_id: worker
            for worker_id, worker in self._found.items()
            if worker_id not in found and self._is_last_of_a_model(worker_id)
        }
        return self._apply()

    def _is_last_of_a_model(self, worker_id: WorkerId) -> bool:
        seen = self._pool.snapshot(worker_id)
        if seen is None or seen.seen_at + HELD_SECONDS < self._clock():
            return False
        others = [other for other in self._pool.snapshots if other.healthy and other is not seen]
        return any(not any(other.serves(model.name) for other in others) for model in seen.models)

    def _apply(self) -> Changes:
        wanted = {**self._listed, **self._found}
        joined = tuple(each for each, worker in wanted.items() if self._known.get(each) != worker)
        left = tuple(worker_id for worker_id in self._known if worker_id not in wanted)
        for worker_id in joined:
            seen = self._pool.snapshot(worker_id)
            if seen is None or _place(seen.worker) != _place(wanted[worker_id]):
                self._pool.add(wanted[worker_id])
            self._pool.stay(worker_id)
            self._logger.info("worker_joined", worker=worker_id)
        for worker_id in left:
            self._pool.leave(worker_id)
            self._logger.info("worker_leaves", worker=worker_id)
        self._known = wanted
        return Changes(joined=joined, left=left)

    def _log_failure(self, reason: str) -> None:
        """Log the first failure of a series only."""
        if not self._is_failing:
            self._is_failing = True
            host = self._service.host if self._service is not None else ""
            self._logger.warning("discovery_failed", host=host, error=reason)
