"""
What is tried to get out, and how each attempt ended: values, and nothing that connects.

Only the standard library is imported here: the process that tries (`child`) stays small.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """A way out, or the one way that has to work."""

    CONTROL = "control"
    """A TCP connection to a listener of the enclave: the proof that an attempt could have succeeded."""
    TCP = "tcp"
    UDP = "udp"
    """A DNS query to the address itself, past the system's resolver."""
    DNS = "dns"
    """A public name asked of the system's resolver: if it is resolved, queries are passed on to outside."""
    PROXY = "proxy"
    """A TCP connection to a proxy that a variable of the environment names."""
    METADATA = "metadata"
    """A TCP connection to a cloud's metadata service, which gives out credentials."""


class Outcome(StrEnum):
    """How an attempt ended."""

    CONNECTED = "connected"
    """A connection was made, or an answer came."""
    REFUSED = "refused"
    """Somebody answered, and took no connection: the target itself, or a firewall in its name."""
    UNREACHABLE = "unreachable"
    """There is no way there: no route, no address of that family, or a router said so."""
    PROHIBITED = "prohibited"
    """This machine's own rules refused it: firewall, route or control group."""
    REFUSED_BY_WALL = "refused_by_wall"
    """The Landlock wall around this process refused it, so that nothing was learnt of the network."""
    TIMED_OUT = "timed_out"
    """Nothing came back in time."""
    UNRESOLVED = "unresolved"
    """The name was not resolved, or to no public address."""
    FAILED = "failed"
    """It could not be tried; the detail says why."""


DOCUMENTATION_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
)
"""Addresses that nobody has: reserved for documentation by RFC 5737 and RFC 3849."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One attempt."""

    kind: Kind
    host: str
    """An IP address; a name where the kind allows it."""
    port: int = 0
    """0 for a name to be resolved."""

    @property
    def target(self) -> str:
        """For people: `192.0.2.1:443`, `[2001:db8::1]:443`, `example.com`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host

    @property
    def is_nobodys(self) -> bool:
        """Whether nobody can have the address, so that whoever answers is no target."""
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return any(address in network for network in DOCUMENTATION_NETWORKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One attempt, and how it ended."""

    probe: Probe
    outcome: Outcome
    detail: str = ""
    """The system's own word, such as `ENETUNREACH`, or what was answered; may be empty."""
    seconds: float = 0.0
    """How long it took."""

    def __str__(self) -> str:
        """In one line, as reasons and audit entries have it: `tcp 192.0.2.1:443 timed_out`."""
        return f"{self.probe.kind} {self.probe.target} {self.outcome}"

    def to_json(self) -> dict[str, Any]:
        """As in a report."""
        return {
            "kind": str(self.probe.kind),
            "target": self.probe.target,
            "outcome": str(self.outcome),
            "detail": self.detail,
            "ms": round(self.seconds * 1000),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that one check tries."""

    probes: tuple[Probe, ...]
    control: Probe | None
    """None: a listener that the check itself opens on loopback."""
    timeout_seconds: float
    """For each attempt; all are made at once."""

    def to_json(self) -> dict[str, Any]:
        """For another process; `from_json` reads it."""
        return {
            "probes": [_probe_to_json(probe) for probe in self.probes],
            "control": _probe_to_json(self.control) if self.control else None,
            "timeout_seconds": self.timeout_seconds,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Plan":
        """What `to_json` wrote."""
        return cls(
            probes=tuple(_probe_from_json(probe) for probe in value["probes"]),
            control=_probe_from_json(value["control"]) if value["control"] else None,
            timeout_seconds=value["timeout_seconds"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What came of one run of a plan."""

    control: Result | None
    """None where nothing could be tried at all."""
    results: tuple[Result, ...]
    failure: str = ""
    """Why nothing could be tried; empty if it was."""

    def to_json(self) -> dict[str, Any]:
        """For another process; `from_json` reads it."""
        return {
            "control": _result_to_json(self.control) if self.control else None,
            "results": [_result_to_json(result) for result in self.results],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Observation":
        """What `to_json` wrote."""
        return cls(
            control=_result_from_json(value["control"]) if value["control"] else None,
            results=tuple(_result_from_json(result) for result in value["results"]),
        )


def _probe_to_json(probe: Probe) -> dict[str, Any]:
    return {"kind": str(probe.kind), "host": probe.host, "port": probe.port}


def _probe_from_json(value: Mapping[str, Any]) -> Probe:
    return Probe(kind=Kind(value["kind"]), host=value["host"], port=value["port"])


def _result_to_json(result: Result) -> dict[str, Any]:
    return {
        "probe": _probe_to_json(result.probe),
        "outcome": str(result.outcome),
        "detail": result.detail,
        "seconds": result.seconds,
    }


def _result_from_json(value: Mapping[str, Any]) -> Result:
    return Result(
        probe=_probe_from_json(value["probe"]),
        outcome=Outcome(value["outcome"]),
        detail=value["detail"],
        seconds=value["seconds"],
    )
