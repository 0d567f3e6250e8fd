"""The TCP ports that the configuration implies: those a process must connect to, and no others."""

import ipaddress
from collections.abc import Iterable, Iterator
from itertools import groupby
from urllib.parse import urlsplit

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from appliance.infra.settings import PoolSettings, Settings, TracingSettings, control_port_of, split_host

DEFAULTS = {"http": 80, "https": 443}
POSTGRESQL = 5432
DNS = 53
"""Answers too long for UDP are sent over TCP, such as those of a service with about thirty workers."""
THIS_MACHINE = "localhost"


def gateway_ports(settings: Settings) -> frozenset[int]:
    """Ports for workers, database, what the log is sent to, collector and DNS, and those of the settings."""
    audit = settings.audit
    asked = [*(each.url for each in audit.witnesses), audit.timestamp_url]
    peers = [*_pool(settings.pool), *(_peer(url) for url in asked if url)]
    peers += _collector(settings.tracing)
    if audit.forward is not None:
        peers.append(split_host(audit.forward.destination))
    if audit.database_url is not None:
        peers += _database(audit.database_url)
    return _ports(peers) | frozenset(settings.sovereignty.connect_ports)


def picker_ports(settings: Settings) -> frozenset[int]:
    """Ports for workers and DNS, and those of the settings."""
    return _ports(_pool(settings.pool)) | frozenset(settings.sovereignty.connect_ports)


def pool_ports(settings: PoolSettings) -> frozenset[int]:
    return frozenset(port for _, port in _pool(settings))


def collector_ports(settings: TracingSettings) -> frozenset[int]:
    """Ports that a worker needs to export traces, DNS included; none without tracing."""
    return _ports(_collector(settings))


def spell(ports: Iterable[int]) -> str:
    """Numbers as text: `53, 8000, 32768-60999`."""
    return ", ".join(_spans(sorted(ports)))


def _ports(peers: Iterable[tuple[str, int]]) -> frozenset[int]:
    found = list(peers)
    names = {DNS} if any(_is_name(host) for host, _ in found) else set[int]()
    return frozenset({port for _, port in found} | names)


def _collector(settings: TracingSettings) -> list[tuple[str, int]]:
    return [_peer(settings.endpoint)] if settings.enabled else []


def _pool(settings: PoolSettings) -> list[tuple[str, int]]:
    """Each worker, and its control listener."""
    peers = [_peer(url) for url in (*settings.urls, *([settings.discover] if settings.discover else []))]
    return [*peers, *((host, control_port_of(settings.control_port, port)) for host, port in peers)]


def _peer(url: str) -> tuple[str, int]:
    """Host and port of a base URL; an invalid one is refused elsewhere, with the name of its setting."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or DEFAULTS.get(parts.scheme, DEFAULTS["http"])
    except ValueError:
        return "", DEFAULTS["http"]


def _database(url: str) -> list[tuple[str, int]]:
    try:
        parsed = make_url(url)
    except ArgumentError:
        return []
    if parsed.get_backend_name() != "postgresql" or "unix_sock" in parsed.query:
        return []
    return [(parsed.host or THIS_MACHINE, parsed.port or POSTGRESQL)]


def _is_name(host: str) -> bool:
    """Whether the host is resolved by DNS."""
    if host in {"", THIS_MACHINE}:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _spans(ports: list[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(ports), lambda pair: pair[1] - pair[0]):
        span = [port for _, port in run]
        yield str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}"
