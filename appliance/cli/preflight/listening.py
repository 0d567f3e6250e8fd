"""The ports that the appliance listens on."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.api.http.server import bind
from appliance.cli.preflight.check import Check, Subject
from appliance.cli.preflight.inquiry import Inquiry
from appliance.errors import ConfigurationError
from appliance.infra.settings import ApiSettings

FREE = Subject("ports.free", "Ports")
SUBJECTS = (FREE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPort:
    """One address to listen on."""

    what: str
    """`gateway` or `worker`."""
    host: str
    port: int
    problem: str | None
    """Why it cannot be listened on; None if it is free."""


def check_ports(inquiry: Inquiry) -> Iterable[Check]:
    """Listen briefly on each."""
    settings, ports = inquiry.settings, []
    if inquiry.gateway:
        ports.append(try_port("gateway", settings.api.host, settings.api.port))
    if inquiry.worker:
        ports.append(try_port("worker", settings.worker.host, settings.worker.port))
    yield judge_ports(ports)


def try_port(what: str, host: str, port: int) -> SeenPort:
    """Bind one address as the gateway does; for port 0 the kernel chooses a port at start."""
    problem = None
    try:
        bind(ApiSettings(host=host, port=port)).close()
    except ConfigurationError as error:
        cause = error.__cause__
        problem = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
    except (OSError, socket.gaierror) as error:
        problem = error.strerror or str(error)
    return SeenPort(what=what, host=host, port=port, problem=problem)


def judge_ports(ports: Iterable[SeenPort]) -> Check:
    ports = tuple(ports)
    for port in ports:
        if port.problem is not None:
            todo = "stop the process that listens (`ss -ltnp`); a running appliance counts"
            return FREE.fail(f"{port.what}: {port.host} port {port.port}: {port.problem}", todo)
    fixed = [port for port in ports if port.port]
    if len({(port.host, port.port) for port in fixed}) < len(fixed):
        seen = f"gateway and worker are both configured for {fixed[0].host} port {fixed[0].port}"
        return FREE.fail(seen, "set worker.port to another, or to 0")
    return FREE.ok(", ".join(f"{port.what} {port.host}:{port.port or 'any'}" for port in ports))
