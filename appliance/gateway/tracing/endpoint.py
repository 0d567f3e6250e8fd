"""
Checks that the collector is in the enclave: traces name tenants and models.

An address is public if the internet routes it (`ipaddress`'s `is_global`).  A gateway starts with a name that
does not resolve: nothing can be sent to it, and the gateway checks again before each batch.
"""

import socket
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from appliance.errors import ConfigurationError
from appliance.infra.settings import TracingSettings

Resolve = Callable[[str], list[str]]  # addresses of a host; raises `OSError` if there are none


def resolve_host(host: str) -> list[str]:
    """By this machine's resolver; blocks."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def public_address(settings: TracingSettings, resolve: Resolve = resolve_host) -> str | None:
    """None if traces would go to none, or the settings allow it."""
    if settings.allow_public:
        return None
    try:
        found = resolve(urlsplit(settings.endpoint).hostname or "")
    except OSError:
        return None
    return next((text for text in found if ip_address(text.partition("%")[0]).is_global), None)


def refuse_public(settings: TracingSettings, resolve: Resolve = resolve_host) -> None:
    """Refuse to start with a collector outside the enclave; ConfigurationError names the address."""
    if settings.enabled and (address := public_address(settings, resolve)):
        message = (
            f"tracing.endpoint resolves to {address}, a public address: name a collector in your network, "
            "or set tracing.allow_public"
        )
        raise ConfigurationError(message)
