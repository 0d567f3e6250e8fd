"""
Checks that the collector is in the enclave: traces name tenants and models.

A gateway starts with a name that does not resolve, and checks again before each batch.
"""

from urllib.parse import urlsplit

from appliance.errors import ConfigurationError
from appliance.infra.public_address import Resolve, public_address_of, resolve_host
from appliance.infra.settings import TracingSettings


def public_address(settings: TracingSettings, resolve: Resolve = resolve_host) -> str | None:
    """None if traces would go to none, or the settings allow it."""
    if settings.allow_public:
        return None
    return public_address_of(urlsplit(settings.endpoint).hostname or "", resolve)


def refuse_public(settings: TracingSettings, resolve: Resolve = resolve_host) -> None:
    """Refuse to start with a collector outside the enclave; ConfigurationError names the address."""
    if settings.enabled and (address := public_address(settings, resolve)):
        message = (
            f"tracing.endpoint resolves to {address}, a public address: name a collector in your network, "
            "or set tracing.allow_public"
        )
        raise ConfigurationError(message)
