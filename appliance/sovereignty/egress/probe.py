"""
The attempts of an egress check and their outcomes: values, without I/O.

Imports only the standard library, to keep the process that makes the attempts (`child`) small.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ProbeKind(StrEnum):
    """A kind of attempt; all must fail except the control."""

    CONTROL = "control"
    """A TCP connection to a listener inside: the proof that an attempt could have succeeded."""
    TCP = "tcp"
    UDP = "udp"
    """A DNS query to the address itself, bypassing the system's resolver."""
    DNS = "dns"
    """A public name, by the system's resolver: if it resolves, queries are forwarded outside."""
    PROXY = "proxy"
    """A TCP connection to a proxy of an environment variable."""
    KUBERNETES = "kubernetes"
    """A TCP connection to the cluster's API server, which every pod can reach unless a policy is enforced."""
    METADATA = "metadata"
    """A TCP connection to a cloud's metadata service, which issues credentials."""


class ProbeOutcome(StrEnum):
    CONNECTED = "connected"
    """A connection was made, or an answer arrived."""
    REFUSED = "refused"
    """The connection was refused: by the target, or by a firewall in its name."""
    UNREACHABLE = "unreachable"
    """No route, no address of that family, or a router reported it."""
    PROHIBITED = "prohibited"
    """This machine's own rules refused it: firewall, route or control group."""
    REFUSED_BY_WALL = "refused_by_wall"
    """The Landlock wall of this process refused it, so the network was not tested."""
    TIMED_OUT = "timed_out"
    """No answer in time."""
    UNRESOLVED = "unresolved"
    """The name did not resolve, or to no public address."""
    FAILED = "failed"
    """The attempt could not be made; the detail says why."""


DOCUMENTATION_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
)
"""Addresses that no host has: reserved for documentation by RFC 5737 and RFC 3849."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressProbe:
    kind: ProbeKind
    host: str
    """An IP address; a name if the kind allows it."""
    port: int = 0
    """0 for a name to be resolved."""

    @property
    def target(self) -> str:
        """As text: `192.0.2.1:443`, `[2001:db8::1]:443`, `example.com`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host

    @property
    def is_reserved(self) -> bool:
        """Whether no host can have the address, so that an answer is not the target's."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return any(address in network for network in DOCUMENTATION_NETWORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    probe: EgressProbe
    outcome: ProbeOutcome
    detail: str = ""
    """The system's error name, such as `ENETUNREACH`, or the answer; may be empty."""
    seconds: float = 0.0

    def __str__(self) -> str:
        """One line for reasons and audit entries: `tcp 192.0.2.1:443 timed_out`."""
        return f"{self.probe.kind} {self.probe.target} {self.outcome}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": str(self.probe.kind),
            "target": self.probe.target,
            "outcome": str(self.outcome),
            "detail": self.detail,
            "ms": round(self.seconds * 1000),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    probes: tuple[EgressProbe, ...]
    control: EgressProbe | None
    """None: a listener that the check opens on loopback."""
    timeout_seconds: float
    """Per attempt; all are made at once."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ProbePlan":
        """Read `asdict` of a plan."""
        return cls(
            probes=tuple(_probe_from_json(probe) for probe in value["probes"]),
            control=_probe_from_json(value["control"]) if value["control"] else None,
            timeout_seconds=value["timeout_seconds"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    control: ProbeResult | None
    """None if no attempt could be made."""
    results: tuple[ProbeResult, ...]
    failure: str = ""
    """Why no attempt could be made; empty otherwise."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Observation":
        """Read `asdict` of an observation that was made."""
        return cls(
            control=_result_from_json(value["control"]) if value["control"] else None,
            results=tuple(_result_from_json(result) for result in value["results"]),
        )


def _probe_from_json(value: Mapping[str, Any]) -> EgressProbe:
    return EgressProbe(kind=ProbeKind(value["kind"]), host=value["host"], port=value["port"])


def _result_from_json(value: Mapping[str, Any]) -> ProbeResult:
    return ProbeResult(
        probe=_probe_from_json(value["probe"]),
        outcome=ProbeOutcome(value["outcome"]),
        detail=value["detail"],
        seconds=value["seconds"],
    )
