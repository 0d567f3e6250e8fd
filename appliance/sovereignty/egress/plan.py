"""
What a check tries, out of settings and environment.
"""

import hashlib
import json
from collections.abc import Mapping
from urllib.parse import urlsplit

from appliance.infra.settings import EgressSettings, Settings, split_host
from appliance.sovereignty.egress.probe import Kind, Plan, Probe

PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "socks_proxy", "grpc_proxy")
"""In small letters; programs read them in capitals as well."""
PROXY_PORTS = {"http": 80, "https": 443}
SOCKS_PORT = 1080
MOST_PROXIES = 4
POSTGRESQL_PORT = 5432


def plan_egress(settings: Settings, environment: Mapping[str, str]) -> Plan:
    """
    Everything one check is to try.

    Args:
        settings: the `egress` section, and where the database is.
        environment: whose variables may name proxies.
    """
    egress = settings.egress
    probes = [
        _probe(kind, text)
        for kind, targets in (
            (Kind.TCP, egress.tcp_targets),
            (Kind.UDP, egress.udp_targets),
            (Kind.METADATA, egress.metadata_targets),
        )
        for text in targets
    ]
    if egress.canary_name:
        probes.append(Probe(kind=Kind.DNS, host=egress.canary_name))
    return Plan(
        probes=(*probes, *_proxies(environment)[:MOST_PROXIES]),
        control=_control(settings),
        timeout_seconds=egress.timeout_seconds,
    )


def digest_of(settings: EgressSettings) -> str:
    """A digest (SHA-256, hex) of the settings of a check, to tell whether two ran under the same."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _probe(kind: Kind, text: str) -> Probe:
    host, port = split_host(text)
    return Probe(kind=kind, host=host, port=port)


def _control(settings: Settings) -> Probe | None:
    if settings.egress.control:
        return _probe(Kind.CONTROL, settings.egress.control)
    database = urlsplit(settings.audit.database_url or "")
    if database.scheme.startswith("postgresql") and database.hostname:
        return Probe(kind=Kind.CONTROL, host=database.hostname, port=database.port or POSTGRESQL_PORT)
    return None


def _proxies(environment: Mapping[str, str]) -> tuple[Probe, ...]:
    """Each proxy once; of its URL only host and port, since it may carry a password."""
    found: dict[Probe, None] = {}
    for name, value in environment.items():
        if name.lower() in PROXY_VARIABLES and value:
            found[_proxy(value)] = None
    return tuple(found)


def _proxy(value: str) -> Probe:
    url = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = url.port or PROXY_PORTS.get(url.scheme, SOCKS_PORT)
    except ValueError:
        port = 0  # no number, so that the attempt fails, and the verdict with it
    return Probe(kind=Kind.PROXY, host=url.hostname or "unreadable", port=port)
