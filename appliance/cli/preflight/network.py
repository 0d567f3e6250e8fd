"""The ports that the appliance listens on, and the gateway's own egress check, run once."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from appliance.api.http.server import bind
from appliance.cli.preflight.check import Check, Inquiry, Subject, family
from appliance.errors import ConfigurationError
from appliance.infra.settings import ApiSettings, control_port_of, process_environment
from appliance.sovereignty.egress.judge import EgressJudgement, EgressVerdict, judge
from appliance.sovereignty.egress.plan import plan_egress
from appliance.sovereignty.egress.probing import run_probes

FREE = Subject("ports.free", "Ports")
OUTSIDE = Subject("egress.outside", "Egress")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPort:
    what: str
    """`gateway`, `admin listener`, `worker` or `control listener`."""
    host: str
    port: int
    problem: str | None
    """Why it cannot be listened on; None if it is free."""


@family(FREE)
def check_ports(inquiry: Inquiry) -> Iterable[Check]:
    """Listen briefly on each."""
    settings, ports = inquiry.settings, []
    if inquiry.gateway:
        ports.append(try_port("gateway", settings.api.host, settings.api.port))
        ports.append(try_port("admin listener", settings.api.admin_host, settings.api.admin_port))
    if inquiry.worker:
        worker = settings.worker
        ports.append(try_port("worker", worker.host, worker.port))
        if worker.port or worker.control_port:
            ports.append(
                try_port("control listener", worker.host, control_port_of(worker.control_port, worker.port))
            )
    yield judge_ports(ports)


def try_port(what: str, host: str, port: int) -> SeenPort:
    """Bind one address as the gateway does; for port 0 the kernel chooses a port at start."""
    problem = None
    try:
        bind(ApiSettings(host=host, port=port)).close()
    except ConfigurationError as error:
        cause = error.__cause__
        problem = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
    except OSError as error:
        problem = error.strerror or str(error)
    return SeenPort(what=what, host=host, port=port, problem=problem)


def judge_ports(ports: Iterable[SeenPort]) -> Check:
    ports = tuple(ports)
    for port in ports:
        if port.problem is not None:
            todo = "stop the process that listens (`ss -ltnp`); a running appliance counts"
            return FREE.fail(f"{port.what}: {port.host} port {port.port}: {port.problem}", todo)
    fixed = [port for port in ports if port.port]
    for first, second in combinations(fixed, 2):
        if (first.host, first.port) == (second.host, second.port):
            seen = f"{first.what} and {second.what} are both configured for {first.host} port {first.port}"
            return FREE.fail(seen, "set one of them to another port, or to 0")
    return FREE.ok(", ".join(f"{port.what} {port.host}:{port.port or 'any'}" for port in ports))


@family(OUTSIDE)
def check_egress(inquiry: Inquiry) -> Iterable[Check]:
    """Run the check if settings or options allow it; takes `egress.timeout_seconds`."""
    settings = inquiry.settings
    if settings.egress.mode == "off" and not inquiry.egress:
        todo = "set egress.mode: strict, or check once with `appliance preflight --egress`"
        yield OUTSIDE.warn("egress.mode is off: egress was not checked, and no gateway checks it", todo)
        return
    observed = run_probes(plan_egress(settings, process_environment()))
    found = judge(observed.control, observed.results)
    if observed.failure:
        found = EgressJudgement(verdict=EgressVerdict.INCONCLUSIVE, reasons=(observed.failure,))
    strict = inquiry.egress or settings.egress.mode == "strict"
    yield judge_egress(found, attempts=len(observed.results), strict=strict)


def judge_egress(found: EgressJudgement, *, attempts: int, strict: bool) -> Check:
    """`strict` if it must be closed: gateways are not ready otherwise, or an option requires it."""
    first = next(iter(found.reasons), "")
    more = f" (and {len(found.reasons) - 1} more)" if len(found.reasons) > 1 else ""
    if found.verdict is EgressVerdict.CLOSED:
        return OUTSIDE.ok(f"closed: {attempts} attempts failed, and the control was reached")
    if found.verdict is EgressVerdict.OPEN:
        seen, todo = f"open: {first}{more}", "block it in the network, then run `appliance egress check`"
        return OUTSIDE.fail(seen, todo) if strict else OUTSIDE.warn(seen, todo)
    todo = "set egress.control to a listener of your network; see `appliance egress check`"
    return OUTSIDE.warn(f"inconclusive: {first}{more}", todo)
