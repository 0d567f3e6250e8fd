"""
Makes the attempts of an egress check, all at once, each with the same short time.

Blocks, for a process or a thread of its own.  What the system says is told as it is; what follows from
it is decided in `verdict`.  Only the standard library is imported here.
"""

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import Thread

from appliance.sovereignty.egress.probe import Kind, Observation, Outcome, Plan, Probe, Result

LOOPBACK = "127.0.0.1"
WALLED_PORT = 1
"""No wall lets anybody connect here, and without one the kernel refuses in another way (`tcpmux`)."""
QUERY = b"\x53\x41\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"\x00\x00\x02\x00\x01"
"""A DNS query that every resolver answers: the name servers of the root (RFC 1035, section 4.1)."""
SENDS = 3
"""Times that a query is sent, since UDP loses packets."""
GRACE_SECONDS = 0.5
"""What a thread may need beyond its timeout to say how it ended."""

OUTCOMES = {
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET), Outcome.REFUSED),
    **dict.fromkeys(
        (
            errno.ENETUNREACH,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.EHOSTDOWN,
            errno.EADDRNOTAVAIL,
            errno.EAFNOSUPPORT,
            errno.EINVAL,  # a `blackhole` route
        ),
        Outcome.UNREACHABLE,
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM), Outcome.PROHIBITED),
    errno.ETIMEDOUT: Outcome.TIMED_OUT,
}
"""By the number the kernel gives; any other means that the attempt could not be made."""


def is_walled() -> bool:
    """
    Whether a Landlock wall around this process refuses connections.

    Asked of the kernel by an attempt on loopback, since a process cannot read its own rules.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asking:
            asking.settimeout(0)
            return asking.connect_ex((LOOPBACK, WALLED_PORT)) == errno.EACCES
    except OSError:
        return False


def run_probes(plan: Plan) -> Observation:
    """Try everything in the plan; takes little longer than its timeout, whatever happens."""
    walled = is_walled()
    with ExitStack() as held:
        control = plan.control or _own_listener(held)
        probes = (control, *plan.probes)
        ended: dict[int, Result] = {}

        def attempt(number: int, probe: Probe) -> None:
            ended[number] = _attempt(probe, timeout=plan.timeout_seconds, walled=walled)

        # A lookup cannot be broken off: its thread is left behind, and must not keep the process.
        threads = [
            Thread(target=attempt, args=(number, probe), daemon=True) for number, probe in enumerate(probes)
        ]
        for thread in threads:
            thread.start()
        latest = time.monotonic() + plan.timeout_seconds + GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, latest - time.monotonic()))
        results = [
            ended.get(number) or Result(probe=probe, outcome=Outcome.TIMED_OUT, seconds=plan.timeout_seconds)
            for number, probe in enumerate(probes)
        ]
    return Observation(control=results[0], results=tuple(results[1:]))


def _own_listener(held: ExitStack) -> Probe:
    """A listener on loopback, kept until `held` closes; port 0 where none can be opened."""
    try:
        listener = held.enter_context(socket.create_server((LOOPBACK, 0)))
    except OSError:
        return Probe(kind=Kind.CONTROL, host=LOOPBACK)
    return Probe(kind=Kind.CONTROL, host=LOOPBACK, port=listener.getsockname()[1])


def _attempt(probe: Probe, *, timeout: float, walled: bool) -> Result:
    began = time.monotonic()
    try:
        outcome, detail = WAYS[probe.kind](probe, timeout)
    except TimeoutError:
        outcome, detail = Outcome.TIMED_OUT, ""
    except socket.gaierror as error:
        outcome, detail = Outcome.UNRESOLVED, error.strerror or ""
    except OSError as error:
        outcome = OUTCOMES.get(error.errno or 0, Outcome.FAILED)
        if walled and error.errno == errno.EACCES:
            outcome = Outcome.REFUSED_BY_WALL
        detail = errno.errorcode.get(error.errno or 0, type(error).__name__)
    except Exception as error:  # noqa: BLE001 - a defect must not pass for silence, which counts as closed
        outcome, detail = Outcome.FAILED, f"{type(error).__name__}: {error}"
    return Result(probe=probe, outcome=outcome, detail=detail, seconds=time.monotonic() - began)


def _connect(probe: Probe, timeout: float) -> tuple[Outcome, str]:
    if not probe.port:
        return Outcome.FAILED, "no listener could be opened"
    with socket.create_connection((probe.host, probe.port), timeout=timeout):
        return Outcome.CONNECTED, ""


def _ask_address(probe: Probe, timeout: float) -> tuple[Outcome, str]:
    family = socket.AF_INET6 if ":" in probe.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.settimeout(timeout / SENDS)
        asking.connect((probe.host, probe.port))
        for _ in range(SENDS):
            asking.send(QUERY)
            try:
                asking.recv(512)
            except TimeoutError:
                continue
            return Outcome.CONNECTED, "a query was answered"
    return Outcome.TIMED_OUT, ""


def _resolve(probe: Probe, _timeout: float) -> tuple[Outcome, str]:
    # The dot keeps the resolver from adding domains of its own.
    name = probe.host.rstrip(".") + "."
    found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    public = [address for address in found if ipaddress.ip_address(address.partition("%")[0]).is_global]
    if public:
        return Outcome.CONNECTED, f"resolved to {public[0]}"
    return Outcome.UNRESOLVED, f"answered with {found[0]}, which is no public address"


WAYS: Mapping[Kind, Callable[[Probe, float], tuple[Outcome, str]]] = {
    **dict.fromkeys((Kind.CONTROL, Kind.TCP, Kind.PROXY, Kind.METADATA), _connect),
    Kind.UDP: _ask_address,
    Kind.DNS: _resolve,
}
"""How each kind is tried, within so many seconds."""
