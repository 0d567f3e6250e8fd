"""
Make the attempts of an egress check, all at once, each with the same short timeout.

Blocks, so it runs in a process or thread of its own.  The system's answers are reported unchanged;
`verdict` judges them.  Imports only the standard library.
"""

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import Thread

from appliance.sovereignty.egress.probe import (
    EgressProbe,
    Observation,
    ProbeKind,
    ProbeOutcome,
    ProbePlan,
    ProbeResult,
)

LOOPBACK = "127.0.0.1"
WALLED_PORT = 1
"""`tcpmux`: no wall allows it, and without a wall the kernel refuses with another error."""
QUERY = b"\x53\x41\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"\x00\x00\x02\x00\x01"
"""A DNS query that every resolver answers: the name servers of the root (RFC 1035, section 4.1)."""
SENDS = 3
"""Transmissions of a query, since UDP loses packets."""
GRACE_SECONDS = 0.5
"""Time that a thread may need beyond its timeout to report."""

OUTCOMES = {
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET), ProbeOutcome.REFUSED),
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
        ProbeOutcome.UNREACHABLE,
    ),
    **dict.fromkeys((errno.EACCES, errno.EPERM), ProbeOutcome.PROHIBITED),
    errno.ETIMEDOUT: ProbeOutcome.TIMED_OUT,
}
"""By errno; any other means that the attempt could not be made."""


def is_walled() -> bool:
    """Whether a Landlock wall refuses connections: tried on loopback, since rules cannot be read."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asking:
            asking.settimeout(0)
            return asking.connect_ex((LOOPBACK, WALLED_PORT)) == errno.EACCES
    except OSError:
        return False


def run_probes(plan: ProbePlan) -> Observation:
    """Make all attempts of the plan; takes little longer than its timeout in any case."""
    walled = is_walled()
    with ExitStack() as held:
        control = plan.control or _own_listener(held)
        probes = (control, *plan.probes)
        ended: dict[int, ProbeResult] = {}

        def attempt(number: int, probe: EgressProbe) -> None:
            ended[number] = _attempt(probe, timeout=plan.timeout_seconds, walled=walled)

        # A lookup cannot be cancelled: its thread may outlive the check, and must not keep the process.
        threads = [
            Thread(target=attempt, args=(number, probe), daemon=True) for number, probe in enumerate(probes)
        ]
        for thread in threads:
            thread.start()
        latest = time.monotonic() + plan.timeout_seconds + GRACE_SECONDS
        for thread in threads:
            thread.join(max(0.0, latest - time.monotonic()))
        results = [
            ended.get(number)
            or ProbeResult(probe=probe, outcome=ProbeOutcome.TIMED_OUT, seconds=plan.timeout_seconds)
            for number, probe in enumerate(probes)
        ]
    return Observation(control=results[0], results=tuple(results[1:]))


def _own_listener(held: ExitStack) -> EgressProbe:
    """A listener on loopback until `held` closes; port 0 if none can be opened."""
    try:
        listener = held.enter_context(socket.create_server((LOOPBACK, 0)))
    except OSError:
        return EgressProbe(kind=ProbeKind.CONTROL, host=LOOPBACK)
    return EgressProbe(kind=ProbeKind.CONTROL, host=LOOPBACK, port=listener.getsockname()[1])


def _attempt(probe: EgressProbe, *, timeout: float, walled: bool) -> ProbeResult:
    began = time.monotonic()
    try:
        outcome, detail = WAYS[probe.kind](probe, timeout)
    except TimeoutError:
        outcome, detail = ProbeOutcome.TIMED_OUT, ""
    except socket.gaierror as error:
        outcome, detail = ProbeOutcome.UNRESOLVED, error.strerror or ""
    except OSError as error:
        outcome = OUTCOMES.get(error.errno or 0, ProbeOutcome.FAILED)
        if walled and error.errno == errno.EACCES:
            outcome = ProbeOutcome.REFUSED_BY_WALL
        detail = errno.errorcode.get(error.errno or 0, type(error).__name__)
    except Exception as error:  # noqa: BLE001 - a defect must not look like a timeout, which counts as closed
        outcome, detail = ProbeOutcome.FAILED, f"{type(error).__name__}: {error}"
    return ProbeResult(probe=probe, outcome=outcome, detail=detail, seconds=time.monotonic() - began)


def _connect(probe: EgressProbe, timeout: float) -> tuple[ProbeOutcome, str]:
    if not probe.port:
        return ProbeOutcome.FAILED, "no listener could be opened"
    with socket.create_connection((probe.host, probe.port), timeout=timeout):
        return ProbeOutcome.CONNECTED, ""


def _ask_address(probe: EgressProbe, timeout: float) -> tuple[ProbeOutcome, str]:
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
            return ProbeOutcome.CONNECTED, "a query was answered"
    return ProbeOutcome.TIMED_OUT, ""


def _resolve(probe: EgressProbe, _timeout: float) -> tuple[ProbeOutcome, str]:
    # The trailing dot keeps the resolver from adding search domains.
    name = probe.host.rstrip(".") + "."
    found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    public = [address for address in found if ipaddress.ip_address(address.partition("%")[0]).is_global]
    if public:
        return ProbeOutcome.CONNECTED, f"resolved to {public[0]}"
    return ProbeOutcome.UNRESOLVED, f"answered with {found[0]}, which is not a public address"


WAYS: Mapping[ProbeKind, Callable[[EgressProbe, float], tuple[ProbeOutcome, str]]] = {
    **dict.fromkeys(ProbeKind, _connect),
    ProbeKind.UDP: _ask_address,
    ProbeKind.DNS: _resolve,
}
"""The function that makes the attempt, by kind."""
