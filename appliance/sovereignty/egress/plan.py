"""The attempts of a check, from settings and environment."""

import hashlib
import json
from collections.abc import Mapping
from urllib.parse import urlsplit

from appliance.infra.settings import EgressSettings, Settings, split_host
from appliance.sovereignty.egress.probe import EgressProbe, ProbeKind, ProbePlan

PROXY_VARIABLES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "socks_proxy", "grpc_proxy")
"""In lower case; programs read them in capitals as well."""
PROXY_PORTS = {"http": 80, "https": 443}
SOCKS_PORT = 1080
MOST_PROXIES = 4
POSTGRESQL_PORT = 5432


def plan_egress(settings: Settings, environment: Mapping[str, str]) -> ProbePlan:
    """The plan of a check; variables of `environment` may name proxies."""
    egress = settings.egress
    probes = [
        _probe(kind, text)
        for kind, targets in (
            (ProbeKind.TCP, egress.tcp_targets),
            (ProbeKind.UDP, egress.udp_targets),
            (ProbeKind.METADATA, egress.metadata_targets),
        )
        for text in targets
    ]
    if egress.canary_name:
        probes.append(EgressProbe(kind=ProbeKind.DNS, host=egress.canary_name))
    return ProbePlan(
        probes=(*probes, *_proxies(environment)[:MOST_PROXIES], *_api_server(environment)),
        control=_control(settings),
        timeout_seconds=egress.timeout_seconds,
    )


def digest_of(settings: EgressSettings) -> str:
    """SHA-256 (hex) of the settings of a check, to compare the settings of two checks."""
    text = json.dumps(settings.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _probe(kind: ProbeKind, text: str) -> EgressProbe:
    host, port = split_host(text)
    return EgressProbe(kind=kind, host=host, port=port)


def _control(settings: Settings) -> EgressProbe | None:
    if settings.egress.control:
        return _probe(ProbeKind.CONTROL, settings.egress.control)
    database = urlsplit(settings.audit.database_url or "")
    if database.scheme.startswith("postgresql") and database.hostname:
        return EgressProbe(
            kind=ProbeKind.CONTROL, host=database.hostname, port=database.port or POSTGRESQL_PORT
        )
    return None


def _api_server(environment: Mapping[str, str]) -> tuple[EgressProbe, ...]:
    """In a pod: the one place that it can normally reach, and that nothing of ours calls."""
    host, port = (environment.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not port.isdecimal():
        return ()
    return (EgressProbe(kind=ProbeKind.KUBERNETES, host=host, port=int(port)),)


def _proxies(environment: Mapping[str, str]) -> tuple[EgressProbe, ...]:
    """Each proxy once; only host and port of its URL, since it may contain a password."""
    found: dict[EgressProbe, None] = {}
    for name, value in environment.items():
        if name.lower() in PROXY_VARIABLES and value:
            found[_proxy(value)] = None
    return tuple(found)


def _proxy(value: str) -> EgressProbe:
    url = urlsplit(value if "://" in value else f"http://{value}")
    try:
        port = url.port or PROXY_PORTS.get(url.scheme, SOCKS_PORT)
    except ValueError:
        port = 0  # so that the attempt fails, and the verdict is not `closed`
    return EgressProbe(kind=ProbeKind.PROXY, host=url.hostname or "unreadable", port=port)
